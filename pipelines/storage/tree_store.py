"""A tree of folders of checkpoints, wherever it lies: list, read, and name it to TensorStore."""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol
from urllib.parse import quote

from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.storage.buckets import bucket_store, split_bucket_url

_REMOTE_SCHEMES = ("hf", "http", "https")


@dataclass(frozen=True, slots=True)
class Listed:
    """What lies directly in a folder, names sorted."""

    folders: tuple[str, ...]
    files: tuple[str, ...]


class TreeStore(Protocol):
    """Folders below one root. Paths are relative with forward slashes; ``""`` is the root itself.

    Methods raise `FileNotFoundError`, `PermissionError` or another `OSError`; the callers make sentences of them.
    """

    @property
    def url(self) -> str:
        """The root, as the user gave it."""
        ...

    @property
    def needs_commit_file(self) -> bool:
        """Whether a step is whole only with its commit file: on an object store nothing is renamed into place."""
        ...

    def list(self, folder: str) -> Listed:
        """Names directly in a folder."""
        ...

    def read(self, path: str) -> bytes:
        """A whole, small file."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Every file below a folder at any depth: path relative to the folder, and size in bytes."""
        ...

    def etags(self, folder: str) -> dict[str, str]:
        """What names the content of the files below a folder, where the store tells that of all; else empty."""
        ...

    def kvstore_url(self, folder: str) -> str:
        """The folder as a URL for TensorStore, with a slash at the end."""
        ...


@dataclass(frozen=True)
class LocalTree:
    """Folders of this machine, or mounted on it.

    Attributes:
      root: path of the root.
    """

    root: str

    @property
    def url(self) -> str:
        return self.root

    @property
    def needs_commit_file(self) -> bool:
        return False

    def list(self, folder: str) -> Listed:
        with os.scandir(self._path(folder)) as entries:
            found = sorted((e for e in entries if not _leads_up(e)), key=lambda entry: entry.name)
        folders = tuple(entry.name for entry in found if entry.is_dir())
        return Listed(folders, tuple(entry.name for entry in found if not entry.is_dir()))

    def read(self, path: str) -> bytes:
        with open(self._path(path), "rb") as file:
            return file.read()

    def sizes(self, folder: str) -> dict[str, int]:
        top = self._path(folder)
        found = {}
        for where, _, names in os.walk(top, onerror=_raise):
            for name in names:
                path = os.path.join(where, name)
                found[os.path.relpath(path, top).replace(os.sep, "/")] = os.stat(path).st_size
        return found

    def etags(self, folder: str) -> dict[str, str]:
        return {}

    def kvstore_url(self, folder: str) -> str:
        return f"file://{quote(os.path.abspath(self._path(folder)))}/"

    def _path(self, path: str) -> str:
        return os.path.join(self.root, path) if path else self.root


def _leads_up(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a link to a folder above it: following it would never end."""
    if not entry.is_symlink():
        return False
    here = os.path.realpath(os.path.dirname(entry.path))
    return f"{here}/".startswith(f"{os.path.realpath(entry.path)}/")


def _raise(error: OSError) -> None:
    raise error


@dataclass(frozen=True)
class ObjectTree:
    """Folders of an object store, as far as their names pretend to be folders.

    Attributes:
      root: URL of the root, e.g. ``gs://bucket/runs``.
    """

    root: str

    @property
    def url(self) -> str:
        return self.root

    @property
    def needs_commit_file(self) -> bool:
        return True

    def list(self, folder: str) -> Listed:
        with _OsErrors(folder):
            found = self._store.list_with_delimiter(self._prefix + folder or None)
        folders = sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found["common_prefixes"])
        files = sorted(entry["path"].rsplit("/", 1)[-1] for entry in found["objects"])
        return Listed(tuple(folders), tuple(files))

    def read(self, path: str) -> bytes:
        with _OsErrors(path):
            return bytes(self._store.get(self._prefix + path).bytes())

    def sizes(self, folder: str) -> dict[str, int]:
        prefix = f"{self._prefix}{folder}/" if folder else self._prefix
        with _OsErrors(folder):
            listed = [entry for batch in self._store.list(prefix or None) for entry in batch]
        return {entry["path"].removeprefix(prefix): entry["size"] for entry in listed}

    def etags(self, folder: str) -> dict[str, str]:
        return {}

    def kvstore_url(self, folder: str) -> str:
        return f"{self.root.rstrip('/')}/{quote(folder)}/" if folder else f"{self.root.rstrip('/')}/"

    @cached_property
    def _store(self) -> Any:
        if self._in_bucket:
            return bucket_store(split_bucket_url(self.root)[0])
        from obstore.store import from_url

        return from_url(self.root)

    @property
    def _prefix(self) -> str:
        return split_bucket_url(self.root)[1] if self._in_bucket else ""

    @property
    def _in_bucket(self) -> bool:
        return self.root.startswith("gs://")


class _OsErrors:
    """Turns an object store's errors into the operating system's, so that callers know one kind."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            raise PermissionError(13, "permission denied", self.path) from error
        if isinstance(error, BaseError):
            raise OSError(5, str(error).split("\n", 1)[0], self.path) from error


def open_tree(url: str) -> TreeStore:
    """The folders at a URL. Touches nothing yet; a hub's branch or tag becomes a commit.

    Args:
      url: a local path, ``file:///path``, ``gs://bucket/path``, ``hf://org/repo[@revision][/folder]`` or
        ``https://host/path``.

    Raises:
      FerryError: the URL's scheme is not supported, or the hub has (or shows) no such repository or revision.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalTree(os.path.abspath(os.path.expanduser(url)))
    if scheme == "file":
        return LocalTree(os.path.abspath(rest))
    if scheme == "gs":
        return ObjectTree(url)
    if scheme.lower() in _REMOTE_SCHEMES:
        from tensorferry.pipelines.storage.remote_tree import open_remote_tree

        return open_remote_tree(url)
    raise FerryError(f"{url}: expected a local path, file://, gs://, hf:// or https://; found {scheme}://.")


def pinned(url: str) -> str:
    """The URL of a tree that does not move: one on the hub with its commit, others as they are.

    Raises:
      FerryError: as `open_tree`.
    """
    return open_tree(url).url if url.lower().startswith("hf://") else url
