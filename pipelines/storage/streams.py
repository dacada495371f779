"""An object that is written front to back, on a local disk or in a bucket: nobody sees any of it before it is whole."""

from typing import Protocol

from tensorferry.pipelines.storage.encoding import Room
from tensorferry.pipelines.storage.kvstores import is_local
from tensorferry.pipelines.storage.local_chunk import LocalFile, stage_bytes

# What goes to a bucket in one request.
PIECE_BYTES = 8 << 20
_UNIT_BYTES = 256 << 10
# The piece that is filled, the one that is sent, and what the client library keeps beside them.
_PIECES_HELD = 3


class Stream(Room, Protocol):
    """Takes an object's bytes in order, from one thread; ended by `close` or `abort`.

    Attributes:
      nbytes: bytes put so far.

    Every method but `abort` raises OSError when a disk cannot be written, FerryError when a bucket refuses, and
    PassingFault when an upload is lost that may succeed from its start.
    """

    nbytes: int

    def append(self, octets: bytes | memoryview) -> None:
        """Puts the next bytes."""
        ...

    def close(self) -> None:
        """Makes the object, whole."""
        ...

    def abort(self) -> None:
        """Forgets it; never raises on account of a bucket."""
        ...


def open_stream(url: str, piece_bytes: int = PIECE_BYTES) -> Stream:
    """Begins an object.

    Args:
      url: path of a file, or ``gs://bucket/name``.
      piece_bytes: of a bucket's object, what is sent at once; a multiple of 256 KiB.
    """
    if is_local(url):
        return LocalFile(url)
    from tensorferry.pipelines.storage.bucket_stream import BucketStream

    return BucketStream(url, piece_bytes)


def stream_bytes(url: str, piece_bytes: int) -> int:
    """Bytes that an open stream takes, whatever it has put so far."""
    return stage_bytes() if is_local(url) else _PIECES_HELD * piece_bytes


def piece_within(worker_memory_bytes: int) -> int:
    """Pieces for a worker's bound: a sixty-fourth of it, as far as the store's unit and `PIECE_BYTES` allow.

    >>> piece_within(1 << 30), piece_within(100 << 20), piece_within(1)
    (8388608, 1572864, 262144)
    """
    units = min(worker_memory_bytes // 64, PIECE_BYTES) // _UNIT_BYTES
    return max(units, 1) * _UNIT_BYTES
