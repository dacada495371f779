"""Planning an export: inverse rules, a dtype for each tensor, cuts along the source's chunks, files laid out."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tensorferry.mappings.export.carried import carried_pairs, decoded_tensors, stacked_sources, target_uses
from tensorferry.mappings.export.export_grid import Chunk, Cutting
from tensorferry.mappings.export.export_items import ExportItems, held_bytes, item_json
from tensorferry.mappings.export.kept import Kept, keep_carried
from tensorferry.mappings.export.low_bit_exports import LowBit, refusal
from tensorferry.mappings.export.scale_finish import Finish
from tensorferry.mappings.export.shards import Place, Shard, all_places, lay_out
from tensorferry.mappings.export.wanted import Cutter, Wanted
from tensorferry.mappings.families.family import Family
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.plan.conversion_plan import Plan, plan_rules
from tensorferry.mappings.plan.target_arrays import TargetArray, hf_path
from tensorferry.mappings.plan.work import WorkItem
from tensorferry.mappings.rules.compiled import CompiledRule, compile_rule
from tensorferry.mappings.rules.rule import PlainRule
from tensorferry.mappings.words.problems import Problem
from tensorferry.mappings.words.text import bytes_text
from tensorferry.transforms.ops import Crop

OpsJson = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class ExportPlan(Plan):
    """A plan whose targets are tensors in safetensors files.

    Attributes:
      shards: the files.
      cuttings: tensor name to how it is cut.
      chunks: source array to the shape of what is read in one go.
      low_bit: tensors that leave as FP8; their arrays have the dtype of what is read.
      copied: tensors that are copied from the FP8 checkpoint byte for byte.
      finishes: scales of carried weights, which arrive in entries of the array's own, to how they are finished.
    """

    shards: tuple[Shard, ...] = ()
    cuttings: Mapping[str, Cutting] = field(default_factory=dict, repr=False)
    chunks: Mapping[str, Chunk] = field(default_factory=dict, repr=False)
    low_bit: Mapping[str, LowBit] = field(default_factory=dict, repr=False)
    copied: tuple[StoredTensor, ...] = ()
    finishes: Mapping[str, Finish] = field(default_factory=dict, repr=False)

    def items(self) -> Iterator[WorkItem]:
        aim = self.options.effective_chunk_bytes
        return ExportItems(self.arrays, self.tensors, self.cuttings, self.chunks, aim).items()

    def lines(self) -> Iterator[tuple[str, WorkItem]]:
        places = all_places(self.shards)
        for item in self.items():
            yield json.dumps(self.item_json(item, places), separators=(",", ":")), item

    def item_json(self, item: WorkItem, places: Mapping[str, Place]) -> dict[str, Any]:
        """A work item as Beam carries it."""
        return item_json(item, places, self.chunks, self.low_bit, self.finishes)

    def written(self, array: TargetArray) -> tuple[ArraySpec, ...]:
        """The tensors that an array becomes: itself, codes and scale, or a finished scale."""
        if array.name in self.low_bit:
            return self.low_bit[array.name].specs(array.spec.chunk)
        return (self.finishes[array.name].spec if array.name in self.finishes else array.spec,)

    def _head(self) -> str:
        return super()._head() + json.dumps([shard.file for shard in self.shards])

    @property
    def specs(self) -> Iterator[ArraySpec]:
        """Every tensor that is written: a low-bit one is two, scales of several parts of a weight are one."""
        written = (spec for array in self.arrays for spec in self.written(array))
        yield from {spec.key: spec for spec in written}.values()
        yield from (ArraySpec((one.name,), one.dtype, one.shape, _whole(one), _whole(one)) for one in self.copied)

    @property
    def amplification(self) -> float:
        """Bytes that the source decodes over bytes that it holds of these arrays."""
        used = {use.source_name(at) for a in self.arrays for use in a.uses for at in _stack(use.compiled)}
        return self.totals.read_bytes / max(1, sum(self.tensors[name].nbytes for name in used))


def _whole(tensor: StoredTensor) -> Chunk:
    return tuple(max(1, length) for length in tensor.shape)


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
    plain = [compile_rule(rule, family.dims) for rule in family.plain_rules(wanted.scan_layers)]
    kept = keep_carried(plain, tensors, wanted.low_bit, wanted.scales_at_hand)
    tensors, undecoded = decoded_tensors(plain, tensors, _others(plain, tensors, kept))
    rules = kept.inverse()
    bare = replace(family, ties=(), ignores=(), notes=(*family.notes, *_cropped(rules)))
    options = replace(wanted.target, dtype="source")
    plan = plan_rules(bare, rules, tensors, options, source_digest, hf_path, carry=False, bounded=False)
    problems = (*kept.problems, *undecoded) or plan.problems
    if problems:
        return _export_plan(replace(plan, problems=problems), wanted, (), {}, chunks)
    cutter = Cutter(wanted, tensors, chunks, kept.finishes)
    pairs = [cutter.cut(array) for array in plan.arrays]
    arrays = tuple(array for array, _ in pairs)
    cuttings = {array.name: cutting for array, cutting in pairs}
    forward = {id(inverse): _forward(rule.rule) for rule, inverse in zip(kept.rules, rules, strict=True)}
    changing = {name: tensor for name, tensor in wanted.low_bit.items() if name not in kept.codes}
    low_bit, problems = _low_bit(arrays, changing, forward)
    made = _export_plan(replace(plan, problems=problems), wanted, arrays, cuttings, chunks, low_bit, kept.finishes)
    too_big = () if problems else tuple(_too_big(made))
    # What a plan has worked out of its work items stays with it.
    return replace(made, problems=too_big) if too_big else made


def _others(rules: Sequence[CompiledRule], tensors: Mapping[str, LogicalTensor], kept: Kept) -> set[str]:
    """Arrays of codes that leave as numbers: all but those whose weights stay FP8."""
    pairs = carried_pairs(tensors)
    return {array for array, use in target_uses(rules, pairs) if kept.codes.isdisjoint(stacked_sources(use))}


def _forward(rule: PlainRule) -> OpsJson:
    return tuple(op.to_json() for op in rule.ops if op.elementwise)


def _low_bit(
    arrays: Sequence[TargetArray], tensors: Mapping[str, LogicalTensor], forward: Mapping[int, OpsJson]
) -> tuple[dict[str, LowBit], tuple[Problem, ...]]:
    """The arrays that leave as FP8, and why some cannot."""
    found, problems = {}, []
    for array in arrays:
        tensor = tensors.get(array.name)
        if tensor is None:
            continue
        ways = {json.dumps(forward[id(use.compiled)]) for use in array.uses}
        problem = refusal(tensor) or (_mixed(tensor) if len(ways) > 1 or tensor.shape != array.spec.shape else None)
        if problem:
            problems.append(problem)
        else:
            found[array.name] = LowBit(tensor, forward[id(array.uses[0].compiled)])
    return found, tuple(problems)


def _mixed(tensor: LogicalTensor) -> Problem:
    expected = "one shape and one arithmetic for a whole tensor (--fp8-from)"
    fix = "Export without --fp8-from, or give the FP8 checkpoint of this very model."
    return Problem(tensor.name, expected, f"{list(tensor.shape)}, or several rules for its parts", fix)


def _export_plan(
    plan: Plan,
    wanted: Wanted,
    arrays: tuple[TargetArray, ...],
    cuttings: Mapping[str, Cutting],
    chunks: Mapping[str, Chunk],
    low_bit: Mapping[str, LowBit] | None = None,
    finishes: Mapping[str, Finish] | None = None,
) -> ExportPlan:
    plain = ExportPlan(
        family=plan.family,
        options=wanted.target,
        source_digest=plan.source_digest,
        arrays=arrays,
        account=plan.account,
        tensors=plan.tensors,
        problems=plan.problems,
        notes=plan.notes,
        cuttings=cuttings,
        chunks=chunks,
        low_bit=low_bit or {},
        copied=tuple(wanted.copied),
        finishes=finishes or {},
    )
    return replace(plain, shards=lay_out(plain.specs, wanted.shard_bytes, wanted.order))


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
        held = held_bytes(item, plan.chunks, plan.low_bit, plan.finishes)
        if held > bound:
            array = item.reads[0].tensor.name
            worst[array] = max(worst.get(array, (0, "")), (held, item.parts[0].spec.key))
    enough = max((held for held, _ in worst.values()), default=0)
    for array, (held, name) in worst.items():
        yield Problem(
            array,
            f"work items of at most {bound:,} bytes (--worker-memory-bytes)",
            f"one that needs {held:,} for {name}: a stored chunk is decoded whole",
            f"Run with --worker-memory-bytes {enough}: such an item runs alone in its worker.",
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
