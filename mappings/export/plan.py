"""Planning an export: inverse rules, a dtype for each tensor, cuts along the source's chunks, files laid out."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mappings.arrays import FLOATS, TargetArray, hf_path
from mappings.compiled import CompiledRule, compile_rule
from mappings.export.grid import (
    Chunk,
    Cutting,
    Limits,
    choose_cutting,
    common_grains,
    grains,
    group_sizes,
)
from mappings.export.items import ExportItems, held_bytes, item_json, reading_bytes
from mappings.export.shards import Shard, all_places, lay_out
from mappings.family import Family
from mappings.plan import Plan, PlanOptions, plan_rules
from mappings.problems import Problem
from mappings.tensors import LogicalTensor
from mappings.text import bytes_text
from mappings.work import WorkItem
from transforms.dtypes import numpy_dtype
from transforms.ops import Crop

SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Wanted:
    """What the files shall be like.

    Attributes:
      dtype: dtype of every float tensor; empty takes each from ``dtypes``.
      dtypes: tensor name to dtype, as an existing checkpoint has them.
      default_dtype: for tensors that ``dtypes`` does not name; empty keeps the source's.
      order: tensor names in the order of an existing checkpoint.
      shard_bytes: bound on the data of one file.
      scan_layers: whether the source's layers are stacked.
      worker_memory_bytes: bound on tensor bytes per worker process.
      chunk_bytes: aim for the bytes of one work item.
    """

    dtype: str = ""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    default_dtype: str = ""
    order: Sequence[str] = ()
    shard_bytes: int = SHARD_BYTES
    scan_layers: bool = True
    worker_memory_bytes: int = 1 << 30
    chunk_bytes: int = 64 << 20

    @property
    def target(self) -> PlanOptions:
        dtype = self.dtype or self.default_dtype or "source"
        return PlanOptions(self.scan_layers, dtype, self.chunk_bytes, self.worker_memory_bytes)

    def dtype_of(self, array: TargetArray) -> str:
        """The dtype of a tensor; integers stay what they are."""
        if array.spec.dtype not in FLOATS or self.dtype:
            return array.spec.dtype
        return self.dtypes.get(array.name, array.spec.dtype)


@dataclass(frozen=True)
class ExportPlan(Plan):
    """A plan whose targets are tensors in safetensors files.

    Attributes:
      shards: the files.
      cuttings: tensor name to how it is cut.
      chunks: source array to the shape of what is read in one go.
    """

    shards: tuple[Shard, ...] = ()
    cuttings: Mapping[str, Cutting] = field(default_factory=dict, repr=False)
    chunks: Mapping[str, Chunk] = field(default_factory=dict, repr=False)

    def items(self) -> Iterator[WorkItem]:
        aim = self.options.effective_chunk_bytes
        return ExportItems(self.arrays, self.tensors, self.cuttings, self.chunks, aim).items()

    def lines(self) -> Iterator[tuple[str, WorkItem]]:
        places = all_places(self.shards)
        for item in self.items():
            yield json.dumps(item_json(item, places, self.chunks), separators=(",", ":")), item

    def _head(self) -> str:
        return super()._head() + json.dumps([shard.file for shard in self.shards])

    @property
    def amplification(self) -> float:
        """Bytes that the source decodes over bytes that it holds of these arrays."""
        used = {use.source_name(at) for a in self.arrays for use in a.uses for at in _stack(use.compiled)}
        return self.totals.read_bytes / max(1, sum(self.tensors[name].nbytes for name in used))


def _stack(compiled: CompiledRule) -> list[dict[str, int]]:
    return compiled.dims.positions(compiled.stack)


def make_export_plan(
    family: Family,
    tensors: Mapping[str, LogicalTensor],
    chunks: Mapping[str, Chunk],
    wanted: Wanted,
    source_digest: str,
) -> ExportPlan:
    """Plans an export. Collects problems instead of raising them.

    Args:
      family: the family of the checkpoint, as for a conversion.
      tensors: the source's arrays by MaxText's names.
      chunks: the shape of what is read of each in one go.
      wanted: what the files shall be like.
      source_digest: digest of the source's metadata.
    """
    rules = [compile_rule(rule.inverse(family.dims), family.dims) for rule in family.plain_rules(wanted.scan_layers)]
    bare = replace(family, ties=(), ignores=(), notes=(*family.notes, *_cropped(rules)))
    plan = plan_rules(bare, rules, tensors, replace(wanted.target, dtype="source"), source_digest, hf_path)
    if plan.problems:
        return _export_plan(plan, wanted, (), {}, chunks)
    cutter = _Cutter(wanted, tensors, chunks)
    pairs = [cutter.cut(array) for array in plan.arrays]
    arrays = tuple(array for array, _ in pairs)
    cuttings = {array.name: cutting for array, cutting in pairs}
    made = _export_plan(plan, wanted, arrays, cuttings, chunks)
    return replace(made, problems=tuple(_too_big(made)))


def _export_plan(
    plan: Plan,
    wanted: Wanted,
    arrays: tuple[TargetArray, ...],
    cuttings: Mapping[str, Cutting],
    chunks: Mapping[str, Chunk],
) -> ExportPlan:
    return ExportPlan(
        family=plan.family,
        options=wanted.target,
        source_digest=plan.source_digest,
        arrays=arrays,
        account=plan.account,
        tensors=plan.tensors,
        problems=plan.problems,
        notes=plan.notes,
        shards=lay_out([array.spec for array in arrays], wanted.shard_bytes, wanted.order),
        cuttings=cuttings,
        chunks=chunks,
    )


class _Cutter:
    """Gives each tensor its dtype and its cuts; tensors of the same rules and dtype are cut alike."""

    def __init__(self, wanted: Wanted, tensors: Mapping[str, LogicalTensor], chunks: Mapping[str, Chunk]) -> None:
        self._wanted, self._tensors, self._chunks = wanted, tensors, chunks
        self._known: dict[tuple, Cutting] = {}

    def cut(self, array: TargetArray) -> tuple[TargetArray, Cutting]:
        spec = array.spec
        sources = [use.source_name(dict.fromkeys(use.compiled.stack, 0)) for use in array.uses]
        dtype = self._wanted.dtype_of(self._typed(array))
        key = (tuple(id(use.compiled) for use in array.uses), dtype, *(self._chunks[name] for name in sources))
        if key not in self._known:
            self._known[key] = self._cutting(array, sources, dtype)
        cutting = self._known[key]
        return replace(array, spec=replace(spec, dtype=dtype, chunk=cutting.chunk, inner=cutting.chunk)), cutting

    def _typed(self, array: TargetArray) -> TargetArray:
        general = self._wanted.dtype or self._wanted.default_dtype
        if not general or array.spec.dtype not in FLOATS:
            return array
        return replace(array, spec=replace(array.spec, dtype=general))

    def _cutting(self, array: TargetArray, sources: Sequence[str], dtype: str) -> Cutting:
        rules = [use.compiled for use in array.uses]
        chunks = [self._chunks[name] for name in sources]
        found = [self._tensors[name] for name in sources]
        cuts = common_grains([grains(rule, chunk) for rule, chunk in zip(rules, chunks, strict=True)])
        sizes = [group_sizes(rule, chunk) for rule, chunk in zip(rules, chunks, strict=True)]
        group = {atom: min(one.get(atom, 1) for one in sizes) for atom in sizes[0]}
        reading = max(reading_bytes(chunk, one.dtype) for chunk, one in zip(chunks, found, strict=True))
        itemsize = max(numpy_dtype(name).itemsize for name in (dtype, *(one.dtype for one in found)))
        limits = Limits(self._wanted.target.effective_chunk_bytes, self._wanted.worker_memory_bytes)
        return choose_cutting(array.spec.shape, itemsize, cuts, group, limits, reading)


def _cropped(rules: Sequence[CompiledRule]) -> Iterator[str]:
    for rule in rules:
        for op in rule.rule.ops:
            if isinstance(op, Crop):
                stored = dict(rule.rule.stored)[op.dim]
                name = rule.rule.target.text
                yield f"{name}: {stored - op.to:,} padded rows of {op.dim} are left out ({stored:,} to {op.to:,})"


def _too_big(plan: ExportPlan) -> Iterator[Problem]:
    """The work items that do not fit, one for each array that they read first."""
    bound = plan.options.worker_memory_bytes
    worst: dict[str, tuple[int, str]] = {}
    for item in plan.items():
        held = held_bytes(item, plan.chunks)
        if held > bound:
            array = item.reads[0].tensor.name
            worst[array] = max(worst.get(array, (0, "")), (held, item.parts[0].spec.key))
    for array, (held, name) in worst.items():
        yield Problem(
            array,
            f"work items of at most {bound:,} bytes (--worker-memory-bytes)",
            f"one that needs {held:,} for {name}: a stored chunk is read whole",
            f"Run with --worker-memory-bytes {held}.",
        )


def export_text(plan: ExportPlan) -> Iterator[str]:
    """What the plan's table does not tell: files, and how often the source is read."""
    for shard in plan.shards[:3]:
        yield f"  {shard.file}: {len(shard.tensors):,} tensors, {shard.nbytes:,} bytes"
    if len(plan.shards) > 3:
        yield f"  and {len(plan.shards) - 3:,} more files"
    total = sum(shard.nbytes for shard in plan.shards)
    yield f"{len(plan.shards):,} safetensors files, {bytes_text(total)}"
    yield f"the source is read {plan.amplification:.2f} times"
