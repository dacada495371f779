"""Lists folders of a slow tree before the walk gets there, many at once: a bucket answers in tens of milliseconds."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from tensorferry.mappings.tunix.step_tree import MODEL_ITEM, OPTIMIZER_ITEM
from tensorferry.pipelines.orbax.step_discovery import NEW_ITEM, STEP_METADATA
from tensorferry.pipelines.storage.tree_store import Listed, LocalTree, TreeStore

_AT_ONCE = 32


class AheadTree:
    """A tree whose folders are listed ahead of a walk from the top down. Used by one thread.

    What the walk asks for first starts the listing of everything below it that a walk for steps will ask for.
    """

    def __init__(self, store: TreeStore, pool: ThreadPoolExecutor) -> None:
        self._store, self._pool = store, pool
        self._ahead: dict[str, Future[Listed]] = {}

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def needs_commit_file(self) -> bool:
        return self._store.needs_commit_file

    def list(self, folder: str) -> Listed:
        future = self._ahead.pop(folder, None)
        listed = future.result() if future else self._store.list(folder)
        for name in _wanted(listed):
            path = f"{folder}/{name}" if folder else name
            self._ahead.setdefault(path, self._pool.submit(self._store.list, path))
        return listed

    def read(self, path: str) -> bytes:
        return self._store.read(path)

    def sizes(self, folder: str) -> dict[str, int]:
        return self._store.sizes(folder)

    def etags(self, folder: str) -> dict[str, str]:
        return self._store.etags(folder)

    def kvstore_url(self, folder: str) -> str:
        return self._store.kvstore_url(folder)


def _wanted(listed: Listed) -> tuple[str, ...]:
    """Folders that the walk will list next: all but those inside a step's items."""
    is_item = "_METADATA" in listed.files
    is_step = STEP_METADATA in listed.files or not {MODEL_ITEM, OPTIMIZER_ITEM, NEW_ITEM}.isdisjoint(listed.folders)
    if is_step:
        return tuple(name for name in listed.folders if name == MODEL_ITEM)
    return () if is_item else listed.folders


@contextmanager
def listed_ahead(store: TreeStore) -> Iterator[TreeStore]:
    """The tree for one walk; a local one as it is."""
    if isinstance(store, LocalTree):
        yield store
        return
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield AheadTree(store, pool)
