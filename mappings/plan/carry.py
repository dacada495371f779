"""Carrying FP8: codes go through their rule as they are, the scale goes through the same layout as a companion array.

Along each source axis the scale keeps one entry per block where blocks, dims and target axes fit each other. Where they
do not (a ragged last block, a block across heads, permuted lanes, uneven parts) it is expanded along that axis alone,
to one entry per even part of a block, at worst per element: bigger, and always exact.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tensorferry.mappings.lowbit.scaled_codes import expand
from tensorferry.mappings.lowbit.scheme import CarryPlan
from tensorferry.mappings.lowbit.schemes import is_low_bit, is_merged, scheme_of
from tensorferry.mappings.lowbit.tensors import LogicalTensor
from tensorferry.mappings.plan.scale_grid import Blocks, ScaleGrid, fit_grids
from tensorferry.mappings.plan.target_arrays import Use
from tensorferry.mappings.rules.compiled import CompiledRule, source_shape
from tensorferry.mappings.words.problems import Problem
from tensorferry.transforms.ops import Op, Pad, Scale

SCALE_LAYOUTS = ("declared", "broadcast")
_DECLARED = (
    "scales per tensor have the axes of layers and experts only, as MaxText's FP8 models declare them; its loader can "
    "dequantise them for a bfloat16 model with --scale-layout broadcast"
)
_SCALE_BYTES = 4

Tensors = Mapping[str, LogicalTensor]
Kind = tuple[str, Blocks]


@dataclass(frozen=True)
class Carried:
    """Rules and tensors of a conversion that carries what can be carried.

    Attributes:
      rules: with companion rules for scales.
      tensors: codes under the weights' names, scales under names of their own.
      notes: where scales are expanded, and what is dequantised after all.
      problems: quantised tensors that cannot be carried.
    """

    rules: tuple[CompiledRule, ...]
    tensors: Tensors
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]


def carry_low_bit(rules: Sequence[CompiledRule], tensors: Tensors, scale_layout: str) -> Carried:
    """Turns rules over quantised tensors into rules over their codes and rules over their scales.

    Args:
      rules: the family's rules.
      tensors: the source's logical tensors.
      scale_layout: ``declared``: scales of the shapes that MaxText's FP8 models declare; ``broadcast``: every scale
        of the same rank as its weight.
    """
    return _Carrier(tensors, scale_layout == "declared").carry(rules)


class _Carrier:
    def __init__(self, tensors: Tensors, declared: bool) -> None:
        self._given = tensors
        self._declared = declared
        self._codes: dict[str, LogicalTensor] = {}
        self._scales: dict[str, LogicalTensor] = {}
        self._kept: set[str] = set()
        self._notes: dict[str, None] = {}
        self._problems: dict[str, Problem] = {}

    def carry(self, rules: Sequence[CompiledRule]) -> Carried:
        groups: dict[str, list[CompiledRule]] = {}
        for rule in rules:
            groups.setdefault(rule.rule.target.text, []).append(rule)
        made = [rule for group in groups.values() for rule in self._group(group)]
        self._problems |= {name: _half_carried(self._given[name]) for name in sorted(self._codes.keys() & self._kept)}
        tensors = {**self._given, **self._codes, **self._scales}
        return Carried(tuple(made), tensors, tuple(self._notes), tuple(self._problems.values()))

    def _group(self, rules: Sequence[CompiledRule]) -> Iterator[CompiledRule]:
        """Rules that fill the same arrays: each array is carried by all of them, or by none."""
        kinds: dict[Kind | None, list[tuple[int, ...]]] = {}
        for _, at in rules[0].targets():
            kinds.setdefault(self._kind(rules, at), []).append(tuple(at[atom] for atom in rules[0].named))
        for kind, positions in kinds.items():
            some = rules if len(kinds) == 1 else [rule.only(positions) for rule in rules]
            if kind is None:
                self._kept.update(name for rule in some for name in rule.sources() if self._is_low_bit(name))
                yield from some
            else:
                yield from self._carried(some, *kind)

    def _is_low_bit(self, name: str) -> bool:
        return name in self._given and is_low_bit(self._given[name])

    def _kind(self, rules: Sequence[CompiledRule], at: Mapping[str, int]) -> Kind | None:
        """Dtype of the codes and blocks, when all sources of an array are carried alike; None when they are not."""
        plans = [self._plan_of(self._given[name]) for rule in rules for name in _names(rule, at) if name in self._given]
        kinds = {(plan.codes.dtype, plan.blocks) if plan else None for plan in plans}
        if kinds <= {None}:
            return None
        scalable = all(isinstance(op, Scale | Pad) for rule in rules for op in rule.rule.ops)
        if len(kinds) > 1 or not scalable:
            why = "its rule does more than scale" if not scalable else "its sources are not quantised alike"
            self._notes[f"{rules[0].rule.target.text}: dequantised to bfloat16, not carried: {why}"] = None
            return None
        return kinds.pop()

    def _plan_of(self, tensor: LogicalTensor) -> CarryPlan | None:
        scheme = scheme_of(tensor)
        if is_merged(tensor):
            self._problems |= {tensor.name: _merged(tensor)} if is_low_bit(tensor) else {}
            return None
        plan = scheme.carry(tensor) if scheme else None
        if scheme and plan is None:
            self._problems[tensor.name] = _cannot(tensor, scheme.describe(tensor))
        return plan

    def _carried(self, rules: Sequence[CompiledRule], dtype: str, blocks: Blocks) -> Iterator[CompiledRule]:
        grids = fit_grids(rules, blocks, self._declared)
        scale_dtype = self._scale_dtype(rules)
        for grid in grids:
            rule = grid.rule
            yield replace(rule, rule=replace(rule.rule, ops=_pads(rule.rule.ops), dtype=dtype))
            suffix = self._suffix(rule)
            companion = grid.companion(suffix, scale_dtype, self._declared)
            folded = tuple(op for op in rule.rule.ops if isinstance(op, Scale))
            plain = replace(companion.rule, ops=(*folded, *companion.rule.ops))
            yield replace(companion, rule=plain, positions=rule.positions)
            self._take(rule, companion, suffix)
            if self._declared and grid.scalar and rule.stack:
                self._notes[_DECLARED] = None
            self._note_cost(grid, companion)

    def _suffix(self, rule: CompiledRule) -> str:
        """What names of scales have after names of weights. Parts of one tensor may see its scale in different shapes,
        so each part has a copy under a name of its own."""
        name = next(rule.sources())
        stored = self._given[name].stored["scale"].name
        parts = (f"#{factor.part.rpartition('.')[2]}" for axis in rule.source for factor in axis.factors if factor.part)
        return "".join([stored.removeprefix(name) if stored.startswith(name) else "#scale", *parts])

    def _scale_dtype(self, rules: Sequence[CompiledRule]) -> str:
        """bfloat16 scales stay as they are, unless a factor is folded into them."""
        stored = {self._given[name].stored["scale"].dtype for rule in rules for name in rule.sources()}
        folded = any(isinstance(op, Scale) for rule in rules for op in rule.rule.ops)
        return "bfloat16" if stored == {"bfloat16"} and not folded else "float32"

    def _take(self, rule: CompiledRule, companion: CompiledRule, suffix: str) -> None:
        """Codes and scales of a rule's sources, the scales in the shape that their rule reads."""
        for name in rule.sources():
            plan = self._plan_of(self._given[name])
            if plan is not None:
                self._codes[name] = plan.codes
                self._scales[name + suffix] = replace(expand(plan.scale, source_shape(companion)), name=name + suffix)

    def _note_cost(self, grid: ScaleGrid, companion: CompiledRule) -> None:
        shape = source_shape(companion)
        names = grid.rule.source_text.removeprefix("[").removesuffix("]").split(", ")
        grains, entries = [], 1
        for a, (axis, block, grain) in enumerate(zip(grid.rule.source, grid.blocks, grid.grains, strict=True)):
            entries *= math.ceil(axis.length / (block or axis.length)) if grain != block else shape[a]
            if grain != block and shape[a] > 1:
                grains.append(f"{names[a]} in entries of {grain}" + (f" instead of {block}" if block else ""))
        if grains:
            extra = _SCALE_BYTES * (math.prod(shape) - entries)
            self._notes[
                f"{companion.rule.target.text}: its blocks would not be an even grid of the array, so "
                f"{' and '.join(grains)}: {extra:,} bytes more for each source tensor"
            ] = None


def _names(rule: CompiledRule, at: Mapping[str, int]) -> Iterator[str]:
    """The sources of one target array."""
    use = Use(rule, at)
    return (use.source_name(stacked) for stacked in rule.dims.positions(rule.stack))


def _pads(ops: Sequence[Op]) -> tuple[Op, ...]:
    return tuple(op for op in ops if isinstance(op, Pad))


def _cannot(tensor: LogicalTensor, found: str) -> Problem:
    return Problem(
        tensor.name,
        "FP8 codes with a scale, which --dtype source can carry",
        found,
        "Use --dtype bfloat16 or float32, which dequantise it.",
        file=next(iter(tensor.stored.values())).file,
    )


def _merged(tensor: LogicalTensor) -> Problem:
    return Problem(
        tensor.name,
        "a weight that stays as it is, which --dtype source can carry",
        "one that an adapter is merged into: its codes would have to be made anew",
        "Use --dtype bfloat16 or float32, which dequantise it.",
        file=tensor.stored["lora_a"].file,
    )


def _half_carried(tensor: LogicalTensor) -> Problem:
    return Problem(
        tensor.name,
        "a tensor that goes into FP8 arrays whole",
        "one of which parts go into arrays that are dequantised",
        "Use --dtype bfloat16 or float32, which dequantise it.",
        file=next(iter(tensor.stored.values())).file,
    )
