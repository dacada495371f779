"""Byte ranges of a checkpoint's files, wherever they lie: the only way in which weights are read."""

import os
import re
import stat
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol
from urllib.parse import unquote, urlsplit

from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.storage.strict_json import is_text, shown

# Well below the 256 open files that macOS allows a process by default.
_OPEN_FILES = 128
_REMOTE_SCHEMES = ("gs", "hf", "http", "https")
_MOVED = "Something rewrites the source while it is read: let that finish, then run the command again."


class SourceError(FerryError):
    """A file or folder of the source cannot be read; carries the sentence as a `Problem`."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem)


class MissingFileError(SourceError):
    """A file or folder is not there at all."""


class ByteSource(Protocol):
    """The files of one folder, read by byte ranges. Picklable and thread-safe.

    Paths are relative to the root, with forward slashes. Every method raises `SourceError` when
    the source cannot answer, and its subclass `MissingFileError` when the file or folder is not there.
    """

    @property
    def url(self) -> str:
        """The root, as `open_source` takes it."""
        ...

    def revision(self) -> str:
        """Changes when the content of a file directly in the root does; empty where the source cannot tell."""
        ...

    def etags(self) -> dict[str, str]:
        """Files to what names their content, as the source tells without being asked for more; may be empty."""
        ...

    def list(self) -> dict[str, int]:
        """Files directly in the root: relative path to size in bytes."""
        ...

    def folders(self) -> tuple[str, ...]:
        """Names of the folders directly in the root."""
        ...

    def size(self, path: str) -> int:
        """Size of a file in bytes."""
        ...

    def read(self, path: str, start: int, length: int) -> bytes:
        """Exactly ``length`` bytes from byte ``start`` on; never fewer."""
        ...

    def readinto(self, path: str, start: int, buffer: memoryview) -> None:
        """Fills the whole of a writable, C-contiguous ``buffer`` from byte ``start`` on."""
        ...


@dataclass(frozen=True)
class LocalSource:
    """A folder of this machine (or mounted on it).

    Attributes:
      root: absolute path of the folder.
    """

    root: str

    @property
    def url(self) -> str:
        return self.root

    def revision(self) -> str:
        return ""

    def etags(self) -> dict[str, str]:
        return {}

    def list(self) -> dict[str, int]:
        found = ((entry.name, _stat_or_none(entry.path)) for entry in self._entries())
        return {name: info.st_size for name, info in found if info and stat.S_ISREG(info.st_mode)}

    def folders(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self._entries() if entry.is_dir())

    def files_in(self, folder: str) -> dict[str, int]:
        """Files directly in a folder of the root: path relative to the root, to size in bytes."""
        inside = LocalSource(self._absolute(folder)).list()
        return {f"{folder}/{name}": size for name, size in inside.items()}

    def size(self, path: str) -> int:
        try:
            return os.stat(self._absolute(path)).st_size
        except OSError as error:
            raise _file_fault(self.root, path, error) from error

    def read(self, path: str, start: int, length: int) -> bytes:
        pieces, done = [], 0
        with _Opened(self, path) as descriptor:
            while done < length:
                piece = os.pread(descriptor, length - done, start + done)
                if not piece:
                    raise short_read(path, start, length, done)
                pieces.append(piece)
                done += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readinto(self, path: str, start: int, buffer: memoryview) -> None:
        if not buffer.nbytes:
            return
        octets, done = buffer.cast("B"), 0
        with _Opened(self, path) as descriptor:
            while done < len(octets):
                count = os.preadv(descriptor, [octets[done:]], start + done)
                if not count:
                    raise short_read(path, start, len(octets), done)
                done += count

    def _entries(self) -> tuple[os.DirEntry[str], ...]:
        try:
            with os.scandir(self.root) as entries:
                return tuple(sorted(entries, key=lambda entry: entry.name))
        except OSError as error:
            raise _root_fault(self.root, error) from error

    def _absolute(self, path: str) -> str:
        if not is_inside(path):
            raise SourceError(outside(path))
        return os.path.join(self.root, path)


class _Opened:
    """Lends a cached descriptor and turns faults of the operating system into sentences."""

    def __init__(self, source: LocalSource, path: str) -> None:
        self._source, self._path = source, path

    def __enter__(self) -> int:
        absolute = self._source._absolute(self._path)
        try:
            info = os.stat(absolute)
            self._descriptor = _descriptor(absolute, info.st_dev, info.st_ino)
        except OSError as error:
            raise _file_fault(self._source.root, self._path, error) from error
        return self._descriptor.number

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        if isinstance(error, OSError):
            raise _file_fault(self._source.root, self._path, error) from error


class _Descriptor:
    """An open file, closed when the cache and the last reader have let go of it."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close=os.close) -> None:
        close(self.number)


# Device and inode are in the key so that a file replaced under its name is opened anew.
@lru_cache(maxsize=_OPEN_FILES)
def _descriptor(absolute: str, _device: int, _inode: int) -> _Descriptor:
    return _Descriptor(os.open(absolute, os.O_RDONLY | os.O_CLOEXEC))


def open_source(url: str) -> ByteSource:
    """The byte source for a path or URL. Touches no file yet; a hub's branch or tag becomes a commit.

    Args:
      url: a path (``~`` is expanded), ``file:///path``, ``gs://bucket/path``, ``hf://org/repo[@revision]`` or
        ``https://host/path/``.

    Raises:
      FerryError: the URL's scheme is not supported, a ``file://`` URL names another machine, or the hub does not
        have (or show) the repository.
    """
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url)
    if scheme is None:
        return LocalSource(os.path.abspath(os.path.expanduser(url)))
    if scheme[1].lower() == "file":
        return LocalSource(_path_of_file_url(url))
    if scheme[1].lower() in _REMOTE_SCHEMES:
        from tensorferry.pipelines.storage.remote_source import open_remote

        return open_remote(url)
    raise FerryError(
        f"{url}: expected a local path, gs://, hf:// or https://; found {scheme[1]}://, which cannot be read yet. "
        "Copy the checkpoint to a local or mounted folder and give that."
    )


def is_inside(path: str) -> bool:
    """Whether a relative path stays below its root as it is spelt; symbolic links are the owner's choice."""
    spelt = bool(path) and "\0" not in path and is_text(path)
    return spelt and not path.startswith("/") and ".." not in path.split("/")


def _path_of_file_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise FerryError(
            f"{url}: expected file:///absolute/path; found the host {parts.netloc!r}. Write three slashes."
        )
    return os.path.abspath(unquote(parts.path))


def _stat_or_none(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:  # a link whose target is gone: the same as a file that is not there
        return None


def short_read(path: str, start: int, length: int, done: int) -> SourceError:
    """The sentence for a file that ends before a range of it does."""
    found = f"only {done} of {length} bytes from byte {start} on: {length - done} bytes are missing"
    return SourceError(Problem(path, "the bytes that its header promised", found, _MOVED))


def outside(path: str) -> Problem:
    """The problem of a path that leads out of the source."""
    return Problem(
        shown(path),
        "a path inside the checkpoint's folder",
        "one that leads out of it",
        "Correct the name in the index.",
    )


def _file_fault(root: str, path: str, error: OSError) -> SourceError:
    wanted = f"a readable file in {root}"
    if isinstance(error, FileNotFoundError):
        fix = f"Put it into {root}, or correct the name."
        return MissingFileError(Problem(path, "a file of the source", "no such file", fix))
    if isinstance(error, PermissionError):
        fix = "Give the account that runs this the right to read it."
        return SourceError(Problem(path, wanted, "permission denied", fix))
    return SourceError(Problem(path, wanted, str(error.strerror), "Check the disk or the mount."))


def _root_fault(root: str, error: OSError) -> SourceError:
    wanted = "a checkpoint's folder"
    if isinstance(error, FileNotFoundError):
        return MissingFileError(Problem(root, wanted, "no such path", "Correct the path."))
    if isinstance(error, NotADirectoryError):
        return SourceError(Problem(root, wanted, "a file", f"Give the folder: {os.path.dirname(root)}"))
    if isinstance(error, PermissionError):
        fix = "Give the account that runs this the right to list and read it."
        return SourceError(Problem(root, wanted, "permission denied", fix))
    return SourceError(Problem(root, wanted, str(error.strerror), "Check the disk or the mount."))
