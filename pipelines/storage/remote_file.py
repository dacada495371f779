"""A file elsewhere, read like one that is here: in order or from any place, a buffer at a time."""

import io
from typing import IO, cast

from tensorferry.pipelines.storage.byte_source import ByteSource, open_source

_BUFFER_BYTES = 1 << 20


class RemoteFile(io.RawIOBase):
    """A read-only file of a byte source.

    Args:
      source: the folder.
      name: the file in it.
    """

    def __init__(self, source: ByteSource, name: str) -> None:
        self._source, self._name = source, name
        self._size = source.size(name)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        octets = memoryview(buffer).cast("B")
        count = max(0, min(len(octets), self._size - self._at))
        self._source.readinto(self._name, self._at, octets[:count])
        self._at += count
        return count


def open_remote_file(url: str) -> IO[bytes]:
    """Opens a file by its URL for reading.

    Raises:
      SourceError: it is not there, or cannot be read.
    """
    folder, _, name = url.rpartition("/")
    return cast(IO[bytes], io.BufferedReader(RemoteFile(open_source(folder), name), _BUFFER_BYTES))
