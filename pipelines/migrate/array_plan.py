"""A target array of a migrated step: where its bytes come from, and whether its chunks move as they are stored."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.rules.chunking import Cut, choose_chunk, choose_inner
from tensorferry.mappings.tunix.step_plan import TargetLeaf
from tensorferry.mappings.tunix.step_tree import ItemTree, Key, Path
from tensorferry.mappings.words.problems import PlanError, Problem
from tensorferry.transforms.dtypes import numpy_dtype

_SMALL_CHUNK_BYTES = 256 << 10
_FEW_CHUNKS = 64


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array of the old step.

    Attributes:
      item: name of its item.
      name: its name in the item's store.
      use_ocdbt: the item is one OCDBT database.
      use_zarr3: its arrays are zarr v3.
    """

    item: str
    name: str
    use_ocdbt: bool
    use_zarr3: bool


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """One array of the new step.

    Attributes:
      path: keys from the root of ``items``.
      spec: what is written; for chunks that move its grid is the source's.
      source: what is read; None for a constant.
      constant: the value of a 0-d array without a source.
      codecs: codecs of chunks that move as they are stored; empty where values are read and written anew.
      prng_impl: implementation of a typed PRNG key.
    """

    path: Path
    spec: ArraySpec
    source: StoredArray | None = None
    constant: int | None = None
    codecs: str = ""
    prng_impl: str = ""

    @property
    def section(self) -> str:
        """``params``, ``nnx_aux``, ``opt_state`` or ``step``."""
        return self.path[0].name

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        spec, source = self.spec, self.source
        return {
            "path": [[key.name, key.kind] for key in self.path],
            "dtype": spec.dtype,
            "shape": spec.shape,
            "chunk": spec.chunk,
            "inner": spec.inner,
            "source": [source.item, source.name, source.use_ocdbt, source.use_zarr3] if source else None,
            "constant": self.constant,
            "codecs": self.codecs,
            "prng_impl": self.prng_impl,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ArrayPlan":
        """The inverse of ``to_json``."""
        path = tuple(Key(name, kind) for name, kind in data["path"])
        names = tuple(key.name for key in path)
        spec = ArraySpec(names, data["dtype"], *(tuple(data[grid]) for grid in ("shape", "chunk", "inner")))
        source = StoredArray(*data["source"]) if data["source"] else None
        return cls(path, spec, source, data["constant"], data["codecs"], data["prng_impl"])


def plan_array(leaf: TargetLeaf, items: Mapping[str, ItemTree], store_format: str, chunk_bytes: int) -> ArrayPlan:
    """How one array of a step is read and written.

    Args:
      leaf: a target leaf of kind ``array``.
      items: the old step's items.
      store_format: the target's storage format.
      chunk_bytes: the aim for one chunk that is written anew.

    Raises:
      PlanError: its dtype is not one we can write.
    """
    try:
        itemsize = numpy_dtype(leaf.dtype).itemsize
    except ValueError as error:
        fix = "This dtype cannot be migrated; leave the step out with --exclude."
        raise PlanError([Problem(leaf.name, "a dtype that zarr holds", leaf.dtype, fix)]) from error
    names = tuple(key.name for key in leaf.path)
    if moves_as_stored(leaf, store_format, itemsize):
        assert leaf.source is not None
        grid = leaf.source.chunk_shape
        spec, codecs = ArraySpec(names, leaf.dtype, leaf.shape, grid, grid), leaf.source.codecs
    else:
        chunk = _chunk(leaf, itemsize, chunk_bytes)
        spec, codecs = ArraySpec(names, leaf.dtype, leaf.shape, chunk, choose_inner(chunk, itemsize, ())), ""
    return ArrayPlan(leaf.path, spec, _stored(leaf, items), leaf.constant, codecs, leaf.prng_impl)


def _stored(leaf: TargetLeaf, items: Mapping[str, ItemTree]) -> StoredArray | None:
    if leaf.source is None:
        return None
    item = items[leaf.source.item]
    return StoredArray(item.name, leaf.source.array_name, item.use_ocdbt, item.use_zarr3)


def moves_as_stored(leaf: TargetLeaf, store_format: str, itemsize: int) -> bool:
    """Whether the source's chunks can be the target's: same values, codecs that zarr v3 knows, a grid worth keeping."""
    source = leaf.source
    if source is None or not source.codecs or source.dtype != leaf.dtype or store_format == "zarr2":
        return False
    nbytes = itemsize * math.prod(leaf.shape)
    chunks = math.prod(-(-size // chunk) for size, chunk in zip(leaf.shape, source.chunk_shape, strict=True))
    return 0 < chunks <= max(_FEW_CHUNKS, nbytes // _SMALL_CHUNK_BYTES)


def _chunk(leaf: TargetLeaf, itemsize: int, chunk_bytes: int) -> tuple[int, ...]:
    """A chunk of whole source chunks, so that none is read twice."""
    grid = leaf.source.chunk_shape if leaf.source else ()
    shape = [max(1, size) for size in leaf.shape]
    cuts = [Cut(axis, unit) for axis, (unit, size) in enumerate(zip(grid, shape, strict=True)) if unit < size]
    return choose_chunk(shape, itemsize, (), cuts, chunk_bytes)
