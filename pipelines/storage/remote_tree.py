"""Trees of folders on the hub and on web servers; TensorStore reads them through the relay of its process."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from tensorferry.pipelines.storage.byte_source import MissingFileError, SourceError
from tensorferry.pipelines.storage.hub import HubSource, open_hub_folder
from tensorferry.pipelines.storage.relay import relay_url
from tensorferry.pipelines.storage.remote_source import RangedSource
from tensorferry.pipelines.storage.tree_store import Listed, TreeStore


@dataclass(frozen=True)
class RemoteTree(ABC):
    """What both share. See `TreeStore`.

    Attributes:
      source: whose files they are.
      root: the tree's root below the source's; empty for all of it.
    """

    source: RangedSource
    root: str = ""

    @property
    def url(self) -> str:
        return f"{self.source.url.rstrip('/')}/{self.root}" if self.root else self.source.url

    @property
    def needs_commit_file(self) -> bool:
        """They hold copies of what a disk or a bucket held, whose saves were renamed or marked there."""
        return False

    @abstractmethod
    def list(self, folder: str) -> Listed:
        """Names directly in a folder."""

    @abstractmethod
    def sizes(self, folder: str) -> dict[str, int]:
        """Every file below a folder at any depth: path relative to the folder, and size in bytes."""

    def read(self, path: str) -> bytes:
        with os_errors(path):
            return self.source.read(self._inside(path), 0, self.source.size(self._inside(path)))

    def etags(self, folder: str) -> dict[str, str]:
        """What names the content of the files below a folder; empty where the source cannot tell."""
        with os_errors(folder):
            return below(self.source.etags(), self._inside(folder))

    def kvstore_url(self, folder: str) -> str:
        return relay_url(self.source, self._inside(folder))

    def _inside(self, path: str) -> str:
        return "/".join(filter(None, (self.root, path)))


@dataclass(frozen=True)
class HubTree(RemoteTree):
    """A folder of a repository of the hub, at one commit."""

    source: HubSource

    def list(self, folder: str) -> Listed:
        with os_errors(folder):
            found = _listings(self.source).get(self._inside(folder))
        if found is None:
            raise FileNotFoundError(2, "no such folder", folder)
        return found

    def sizes(self, folder: str) -> dict[str, int]:
        with os_errors(folder):
            return below(self.source.sizes(), self._inside(folder))


@lru_cache(maxsize=8)
def _listings(source: HubSource) -> Mapping[str, Listed]:
    """What lies in each folder of a commit; git knows no empty ones."""
    folders: dict[str, set[str]] = defaultdict(set)
    files: dict[str, set[str]] = defaultdict(set, {"": set()})
    for path in source.sizes():
        folder, _, name = path.rpartition("/")
        files[folder].add(name)
        while folder:
            above, _, name = folder.rpartition("/")
            folders[above].add(name)
            folder = above
    every = folders.keys() | files.keys()
    return {at: Listed(tuple(sorted(folders.get(at, ()))), tuple(sorted(files.get(at, ())))) for at in every}


@contextmanager
def os_errors(path: str) -> Iterator[None]:
    """Turns a source's faults into the operating system's, which is what callers of trees know; the sentence stays."""
    try:
        yield
    except MissingFileError as error:
        raise FileNotFoundError(2, "no such file or folder", path) from error
    except SourceError as error:
        problem = error.problem
        raise OSError(5, f"{problem.found}, instead of {problem.expected}. {problem.fix}", path) from error


def below(files: Mapping[str, object], folder: str) -> dict:
    """Those of some files that lie below a folder, by their paths from there."""
    prefix = f"{folder}/" if folder else ""
    return {path.removeprefix(prefix): told for path, told in files.items() if path.startswith(prefix)}


def open_remote_tree(url: str) -> TreeStore:
    """The folders of an ``hf://`` or ``https://`` URL. Asks the hub for the commit unless the revision is one.

    Raises:
      FerryError: the URL is malformed, or the hub has no such repository or revision, or does not show it.
    """
    if url.lower().startswith("hf:"):
        return HubTree(*open_hub_folder(url))
    from tensorferry.pipelines.storage.web_tree import open_web_tree

    return open_web_tree(url)
