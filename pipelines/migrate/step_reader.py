"""Reading arrays of old steps: stored chunks as they are, or the values of a box."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from tensorferry.mappings.rules.geometry import Box
from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.migrate.array_plan import StoredArray
from tensorferry.pipelines.orbax.chunk_codecs import stored_chunk_key
from tensorferry.pipelines.orbax.orbax_item import leaf_spec
from tensorferry.pipelines.storage.kvstores import store_words
from tensorferry.pipelines.storage.relay import relayed_problem
from tensorferry.pipelines.storage.tree_store import open_tree

if TYPE_CHECKING:
    import numpy as np
    import tensorstore as ts

# Keeps the index of OCDBT databases, of which every read needs several nodes.
_CACHE_BYTES = 32 << 20
_OPEN_ITEMS = 256
_LOST = "The source lost data, or cannot be reached; this step is left out."

Result = TypeVar("Result")


class ReadFault(FerryError):
    """An old step cannot be read: its fault alone, so the others go on."""


@dataclass(frozen=True, slots=True)
class StepReader:
    """Reads arrays of one step; holds names only, so that any worker may have one.

    Attributes:
      source: url of the tree of runs.
      step_path: the step's folder in it.
      run_token: names the run, which alone shares what is kept open.
    """

    source: str
    step_path: str
    run_token: str = ""

    def start(self, array: StoredArray, index: tuple[int, ...]) -> Any:
        """Begins to read a stored chunk, so that several may be under way.

        Raises:
          ReadFault: the store cannot be opened.
        """
        key = stored_chunk_key(array.name, array.use_zarr3, index)
        store = self._tell(array, lambda: _open_store(self.run_token, self._url(array), array.use_ocdbt))
        return store.read(key)

    def stored(self, array: StoredArray, index: tuple[int, ...], started: Any = None) -> bytes | None:
        """The bytes of a stored chunk; None where the store has none and the values are the fill value's.

        Args:
          array: a stored array.
          index: the chunk's index in its grid.
          started: what ``start`` returned for it.

        Raises:
          ReadFault: the store cannot be read, or holds no bytes under the chunk's name.
        """
        reading = started or self.start(array, index)
        read = self._tell(array, lambda: reading.result())
        if read.state == "missing":
            return None
        # An index entry whose data file is gone reads as a value without bytes, and without an error.
        if read.state != "value" or not read.value:
            raise self._fault(array, "no bytes", f"chunk {list(index)}")
        return read.value

    def values(self, array: StoredArray, box: Box) -> "np.ndarray":
        """The values of a box, C-contiguous.

        Args:
          array: a stored array.
          box: (start, stop) per axis, in elements.

        Raises:
          ReadFault: the store cannot be read or a chunk cannot be decoded.
        """
        import numpy as np

        opened = self._tell(array, lambda: _open_array(self._url(array), array))
        region = tuple(slice(start, stop) for start, stop in box)
        return np.asarray(self._tell(array, lambda: opened[region].read().result()), order="C")

    def _url(self, array: StoredArray) -> str:
        folder = f"{self.step_path}/{array.item}" if self.step_path else array.item
        return _tree(self.source).kvstore_url(folder)

    def _tell(self, array: StoredArray, read: Callable[[], Result]) -> Result:
        try:
            return read()
        except ReadFault:
            raise
        except Exception as error:
            told = relayed_problem(error)
            fix = f"{told.fix} This step is left out." if told else _LOST
            raise self._fault(array, store_words(error), "its array", fix) from error

    def _fault(self, array: StoredArray, found: str, what: str, fix: str = _LOST) -> ReadFault:
        where = f"{self.step_path}/{array.item}"
        return ReadFault(str(Problem(array.name, f"{what} readable", found, fix, file=where)))


_tree = cache(open_tree)


@cache
def _context() -> "ts.Context":
    """One for each process. One copy thread, as in the sink: more only spread freed buffers over more arenas."""
    import tensorstore as ts

    return ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}, "data_copy_concurrency": {"limit": 1}})


@lru_cache(maxsize=_OPEN_ITEMS)
def _open_store(run_token: str, url: str, use_ocdbt: bool) -> Any:
    import tensorstore as ts

    spec = {"driver": "ocdbt", "base": url} if use_ocdbt else url
    return ts.KvStore.open(spec, context=_context()).result()


def _open_array(url: str, array: StoredArray) -> Any:
    import tensorstore as ts

    spec = leaf_spec(url, array.use_ocdbt, array.use_zarr3, array.name)
    return ts.open(spec, context=_context()).result()
