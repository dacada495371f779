"""What the files of an export shall be like, and how each tensor is cut for it."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tensorferry.mappings.export.export_grid import (
    Chunk,
    Cutting,
    Grain,
    Limits,
    Weights,
    choose_cutting,
    common_grains,
    grains,
    group_sizes,
    hull,
    in_one_chunk,
)
from tensorferry.mappings.export.export_items import chunk_bytes, stored_dtype
from tensorferry.mappings.export.low_bit_exports import BYTES_PER_ELEMENT
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.conversion_plan import PlanOptions
from tensorferry.mappings.plan.target_arrays import FLOATS, TargetArray
from tensorferry.mappings.plan.work import BLOCK_BYTES
from tensorferry.mappings.rules.compiled import CompiledRule
from tensorferry.transforms.dtypes import numpy_dtype

SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Wanted:
    """What the files shall be like.

    Attributes:
      dtype: dtype of every float tensor; empty takes each from ``dtypes``.
      dtypes: tensor name to dtype, as an existing checkpoint has them.
      default_dtype: for tensors that ``dtypes`` does not name; empty keeps the source's.
      order: tensor names in the order of an existing checkpoint.
      low_bit: tensors that leave as FP8, as an FP8 checkpoint stores them.
      scales_at_hand: whether the scales of those can be read.
      copied: tensors of that checkpoint that are written byte for byte (scales of activations).
      shard_bytes: bound on the data of one file.
      scan_layers: whether the source's layers are stacked.
      worker_memory_bytes: bound on tensor bytes per worker process.
      chunk_bytes: aim for the bytes of one work item.
      streamed: whether files are written front to back, so that tensors are cut into whole rows.
    """

    dtype: str = ""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    default_dtype: str = ""
    order: Sequence[str] = ()
    low_bit: Mapping[str, LogicalTensor] = field(default_factory=dict)
    scales_at_hand: bool = False
    copied: Sequence[StoredTensor] = ()
    shard_bytes: int = SHARD_BYTES
    scan_layers: bool = True
    worker_memory_bytes: int = 1 << 30
    chunk_bytes: int = 64 << 20
    streamed: bool = False

    @property
    def target(self) -> PlanOptions:
        dtype = self.dtype or self.default_dtype or "source"
        return PlanOptions(self.scan_layers, dtype, self.chunk_bytes, self.worker_memory_bytes)

    def dtype_of(self, array: TargetArray) -> str:
        """The dtype of a tensor; integers stay what they are."""
        if array.spec.dtype not in FLOATS or self.dtype:
            return array.spec.dtype
        return self.dtypes.get(array.name, array.spec.dtype)


class Cutter:
    """Gives each tensor its dtype and its cuts; tensors of the same rules and dtype are cut alike."""

    def __init__(
        self,
        wanted: Wanted,
        tensors: Mapping[str, LogicalTensor],
        chunks: Mapping[str, Chunk],
        whole: Collection[str] = (),
    ) -> None:
        """Prepares to cut.

        Args:
          wanted: what the files shall be like.
          tensors: the arrays.
          chunks: of each array, the shape of what is read in one go.
          whole: tensors that must not be cut.
        """
        self._wanted, self._tensors, self._chunks, self._whole = wanted, tensors, chunks, whole
        self._known: dict[tuple, Cutting] = {}

    def cut(self, array: TargetArray) -> tuple[TargetArray, Cutting]:
        spec = array.spec
        sources = [use.source_name(dict.fromkeys(use.compiled.stack, 0)) for use in array.uses]
        fixed = any(use.compiled.rule.dtype for use in array.uses)
        low_bit = None if fixed else self._wanted.low_bit.get(array.name)
        dtype = spec.dtype if low_bit or fixed else self._wanted.dtype_of(self._typed(array))
        if fixed and dtype not in FLOATS:  # one integer is as good as another: as an existing checkpoint has it
            told = self._wanted.dtypes.get(array.name, dtype)
            dtype = dtype if told in FLOATS else told
        key = (
            json.dumps(low_bit.params) if low_bit else "",
            tuple(id(use.compiled) for use in array.uses),
            dtype,
            *(self._chunks[name] for name in sources),
        )
        if key not in self._known:
            self._known[key] = self._cutting(array, sources, dtype, low_bit)
        cutting = self._known[key]
        return replace(array, spec=replace(spec, dtype=dtype, chunk=cutting.chunk, inner=cutting.chunk)), cutting

    def _typed(self, array: TargetArray) -> TargetArray:
        general = self._wanted.dtype or self._wanted.default_dtype
        if not general or array.spec.dtype not in FLOATS:
            return array
        return replace(array, spec=replace(array.spec, dtype=general))

    def _cutting(
        self, array: TargetArray, sources: Sequence[str], dtype: str, low_bit: LogicalTensor | None
    ) -> Cutting:
        rules = [use.compiled for use in array.uses]
        chunks = [self._chunks[name] for name in sources]
        found = [self._tensors[name] for name in sources]
        every = [grains(rule, chunk) for rule, chunk in zip(rules, chunks, strict=True)]
        cuts = [] if array.name in self._whole else common_grains(every)
        sizes = [group_sizes(rule, chunk) for rule, chunk in zip(rules, chunks, strict=True)]
        group = {atom: min(one.get(atom, 1) for one in sizes) for atom in sizes[0]}
        part = numpy_dtype(dtype).itemsize
        if low_bit and "blocks" in low_bit.params:
            part += BYTES_PER_ELEMENT
            cuts = [cut.at_blocks(block) for cut in cuts if (block := low_bit.params["blocks"][cut.axis])]
            cuts = [cut for cut in cuts if cut.unit < array.spec.shape[cut.axis]]
        if self._wanted.streamed:
            cuts, group = _rows(cuts, array.spec.shape), dict.fromkeys(group, 1)
        limits = Limits(self._wanted.target.effective_chunk_bytes, self._wanted.worker_memory_bytes)
        largest = max(chunk_bytes(chunk, stored_dtype(one)) for chunk, one in zip(chunks, found, strict=True))
        read = max(numpy_dtype(stored_dtype(one)).itemsize for one in found)
        lone = Weights(read, part, largest, largest > BLOCK_BYTES)
        made = choose_cutting(array.spec.shape, cuts, group, limits, lone)
        if all(_is_lone(rule, chunk, made) for rule, chunk in zip(rules, chunks, strict=True)):
            return made
        return choose_cutting(array.spec.shape, cuts, group, limits, replace(lone, lone=False))


def _rows(cuts: Sequence[Grain], shape: Chunk) -> list[Grain]:
    """The cuts that leave parts in one stretch of the tensor: those of its first axis that is longer than one."""
    first = next((axis for axis, length in enumerate(shape) if length > 1), 0)
    return [cut for cut in cuts if cut.axis <= first]


def _is_lone(rule: CompiledRule, chunk: Chunk, cutting: Cutting) -> bool:
    """Whether the first item of a cutting reads inside one chunk."""
    ranges = rule.ranges(tuple((0, length) for length in cutting.chunk))
    if ranges is None:
        return True
    split = {atom: (0, min(size, rule.sizes[atom])) for atom, size in cutting.group.items()}
    stacked = dict.fromkeys(rule.stack, (0, 1))
    return in_one_chunk(hull(rule.source, {**ranges, **split, **stacked}), chunk)
