"""Carrying FP8: codes go through their rule as they are, the scale goes through the same rule as a companion array.

Along each source axis the scale keeps one entry per block where blocks, dims and target axes fit each other. Where they
do not (a ragged last block, a block across heads, permuted lanes, uneven parts) it is expanded along that axis alone,
to one entry per element: bigger, and always exact.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mappings.arrays import Use
from mappings.compiled import CompiledRule, compile_rule
from mappings.dims import Concat, Dims, Index
from mappings.layout import Axis, Layout, Slice, term_atoms
from mappings.problems import Problem
from mappings.rule import PlainRule, Template
from mappings.schemes import scheme_of
from mappings.schemes.base import CarryPlan
from mappings.schemes.scaled import expand
from mappings.tensors import LogicalTensor
from transforms.ops import Op, Pad, Scale

SCALE_LAYOUTS = ("declared", "broadcast")
_SUFFIX = "#scale"

Tensors = Mapping[str, LogicalTensor]
Blocks = tuple[int | None, ...]


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
      scale_layout: ``declared``: per-tensor scales as MaxText's FP8 models declare them, stacked dims only;
        ``broadcast``: every scale of the same rank as its weight.
    """
    return _Carrier(tensors, scale_layout).carry(rules)


@dataclass(frozen=True)
class _Fit:
    """How one rule's scale is stored.

    Attributes:
      blocks: block length per source axis; None for one entry for the whole axis.
      expanded: source axes with one entry per element.
      sizes: dim to its number of entries.
    """

    blocks: Blocks
    expanded: frozenset[int]
    sizes: Mapping[str, int]


class _Carrier:
    def __init__(self, tensors: Tensors, scale_layout: str) -> None:
        self._given = tensors
        self._tensors = dict(tensors)
        self._broadcast = scale_layout == "broadcast"
        self._notes: dict[str, None] = {}
        self._problems: dict[str, Problem] = {}

    def carry(self, rules: Sequence[CompiledRule]) -> Carried:
        groups = _groups_by_target(rules)
        made = [self._group(group) for group in groups]
        order = {id(rule): i for i, rule in enumerate(rules)}
        made.sort(key=lambda pair: order[id(pair[0][0])])
        flat = tuple(rule for _, result in made for rule in result)
        return Carried(flat, self._tensors, tuple(self._notes), tuple(self._problems.values()))

    def _group(self, rules: Sequence[CompiledRule]) -> tuple[Sequence[CompiledRule], list[CompiledRule]]:
        """Rules that fill the same arrays: carried together, or not."""
        kinds: dict[tuple[str, Blocks] | None, list[tuple[int, ...]]] = {}
        first = rules[0]
        for _, at in first.targets():
            position = tuple(at[atom] for atom in first.named)
            kinds.setdefault(self._kind(rules, at), []).append(position)
        result: list[CompiledRule] = []
        for kind, positions in kinds.items():
            some = rules if len(kinds) == 1 else [rule.only(positions) for rule in rules]
            result += some if kind is None else self._carried(some, *kind)
        return rules, result

    def _kind(self, rules: Sequence[CompiledRule], at: Mapping[str, int]) -> tuple[str, Blocks] | None:
        """(dtype of codes, blocks) when every source of an array can be carried alike; None when it is not carried."""
        tensors = [tensor for rule in rules for tensor in _sources(Use(rule, at), self._given)]
        plans = [self._plan_of(tensor) for tensor in tensors]
        if all(plan is None for plan in plans):
            return None
        kinds = {(plan.codes.dtype, plan.blocks) if plan else None for plan in plans}
        scalable = all(isinstance(op, Scale | Pad) for rule in rules for op in rule.rule.ops)
        if None in kinds or len(kinds) > 1 or not scalable:
            why = "its sources are not quantised alike" if scalable else "its rule does more than scale"
            self._notes[f"{rules[0].rule.target.text}: dequantised to bfloat16, not carried: {why}"] = None
            return None
        return kinds.pop()

    def _plan_of(self, tensor: LogicalTensor) -> CarryPlan | None:
        scheme = scheme_of(tensor)
        if scheme is None:
            return None
        plan = scheme.carry(tensor)
        if plan is None:
            self._problems[tensor.name] = _cannot(tensor)
        return plan

    def _carried(self, rules: Sequence[CompiledRule], dtype: str, blocks: Blocks) -> list[CompiledRule]:
        fits = fit_scales(rules, blocks)
        result = []
        for rule, fit in zip(rules, fits, strict=True):
            sources = [name for name in rule.sources() if name in self._given]
            for name in sources:
                self._replace(name, fit)
            result.append(replace(rule, rule=replace(rule.rule, ops=_without_scale(rule.rule.ops), dtype=dtype)))
            result.append(self._companion(rule, fit, sources))
            self._note_cost(rule, fit)
        return result

    def _replace(self, name: str, fit: _Fit) -> None:
        plan = self._plan_of(self._given[name])
        assert plan is not None
        self._tensors[name] = plan.codes
        scale = expand(plan.scale, sorted(fit.expanded))
        self._tensors[name + _SUFFIX] = replace(scale, name=name + _SUFFIX)

    def _companion(self, rule: CompiledRule, fit: _Fit, sources: Sequence[str]) -> CompiledRule:
        plain = rule.rule
        layout = plain.layout
        if not self._broadcast and not fit.expanded and all(block is None for block in fit.blocks):
            layout = _stacked_only(layout, set(rule.stack))
        ops = tuple(_scaled_pad(op, rule, fit) if isinstance(op, Pad) else op for op in plain.ops)
        stored = {self._given[name].stored["scale"].dtype for name in sources}
        dtype = "bfloat16" if stored == {"bfloat16"} and ops == _without_scale(ops) else "float32"
        scale_rule = PlainRule(
            Template(plain.source.text + _SUFFIX), Template(f"{plain.target.text}_scale"), layout, ops, dtype
        )
        compiled = compile_rule(scale_rule, _scale_dims(rule.dims, plain.layout, fit))
        return replace(compiled, positions=rule.positions)

    def _note_cost(self, rule: CompiledRule, fit: _Fit) -> None:
        for axis in sorted(fit.expanded):
            length, block = rule.source[axis].length, fit.blocks[axis]
            if not block or block == 1:
                continue
            coarse = [fit.sizes[atom] for a in rule.source for atom in a.atoms]
            entries = math.prod(coarse)
            extra = 4 * (entries - entries // length * math.ceil(length / block))
            side = str(rule.rule.layout).split(" -> ")[0]
            self._notes[
                f"{rule.rule.target.text}_scale: expanded along axis {axis} of [{side}] (blocks of {block} do not fit "
                f"its {length}), {extra:,} bytes more for each source"
            ] = None


def _groups_by_target(rules: Sequence[CompiledRule]) -> list[list[CompiledRule]]:
    """Rules that write parts of the same arrays, together."""
    groups: dict[str, list[CompiledRule]] = {}
    for rule in rules:
        groups.setdefault(rule.rule.target.text, []).append(rule)
    return list(groups.values())


def _sources(use: Use, tensors: Tensors) -> Iterable[LogicalTensor]:
    names = (use.source_name(at) for at in use.compiled.dims.positions(use.compiled.stack))
    return (tensors[name] for name in names if name in tensors)


def fit_scales(rules: Sequence[CompiledRule], blocks: Blocks) -> list[_Fit]:
    """How the scales of rules that fill the same arrays are stored; a target axis is expanded for all or none."""
    expanded = [{a for a, block in enumerate(blocks) if block == 1 or _enumerates(rule, a)} for rule in rules]
    while True:
        fits = [_Fit(blocks, frozenset(e), _entries(r, blocks, e)) for r, e in zip(rules, expanded, strict=True)]
        bad = {axis for rule, fit in zip(rules, fits, strict=True) for axis in _misfits(rule, fit)}
        grown = [e | _feeding(rule, bad) for rule, e in zip(rules, expanded, strict=True)]
        if grown == expanded:
            return fits
        expanded = grown


def _enumerates(rule: CompiledRule, axis: int) -> bool:
    """Whether a source axis holds a dim with labels (fused experts, gate and up): its entries keep their labels."""
    return any(isinstance(rule.dims[atom], Index) for atom in rule.source[axis].atoms)


def _entries(rule: CompiledRule, blocks: Blocks, expanded: set[int]) -> dict[str, int]:
    """Entries of the scale along every dim: all of them on an expanded axis, one per block elsewhere."""
    sizes = dict(rule.sizes)
    for axis, (geometry, block) in enumerate(zip(rule.source, blocks, strict=True)):
        if axis in expanded:
            continue
        rest = block or geometry.length
        for atom in reversed(geometry.atoms):
            step = math.gcd(rest, sizes[atom]) if block else sizes[atom]
            sizes[atom] //= step
            rest //= step
            if step < rule.sizes[atom]:
                break
    return sizes


def _misfits(rule: CompiledRule, fit: _Fit) -> set[int]:
    """Target axes along which the scale would not be one even block grid."""
    bad = {t for axis in range(len(rule.source)) if not _tiles(rule, fit, axis) for t in _fed(rule, axis)}
    for t, geometry in enumerate(rule.target):
        if not _even([(rule.sizes[a], fit.sizes[a]) for a in geometry.atoms]) or _uneven_parts(rule, fit, t):
            bad.add(t)
    return bad


def _tiles(rule: CompiledRule, fit: _Fit, axis: int) -> bool:
    """Whether the blocks of a source axis are exactly what its dims' entries stand for."""
    block = fit.blocks[axis]
    if axis in fit.expanded or block is None:
        return True
    geometry = rule.source[axis]
    step = math.prod(rule.sizes[a] // fit.sizes[a] for a in geometry.atoms)
    parts = [factor for factor in geometry.factors if factor.part]
    return step == block and all(f.offset % block == 0 and f.extent % block == 0 for f in parts)


def _even(dims: Sequence[tuple[int, int]]) -> bool:
    """Whether (size, entries) of the dims of one axis, outermost first, make equal runs: whole, then one in part, then
    single entries."""
    state = "whole"
    for size, entries in dims:
        if state == "single" and entries > 1:
            return False
        if entries < size:
            state = "single"
    return True


def _uneven_parts(rule: CompiledRule, fit: _Fit, t: int) -> bool:
    """Whether a concatenation on a target axis has a part whose length the entries' step does not divide."""
    for factor in rule.target[t].factors:
        if factor.part:
            step = math.prod(rule.sizes[a] // fit.sizes[a] for a in factor.atoms)
            concat = rule.dims.concat(factor.part.split(".")[0])
            if any(length % step for _, length in concat.parts):
                return True
    return False


def _fed(rule: CompiledRule, axis: int) -> set[int]:
    """Target axes that hold dims of a source axis."""
    atoms = set(rule.source[axis].atoms)
    return {t for t, geometry in enumerate(rule.target) if atoms & set(geometry.atoms)}


def _feeding(rule: CompiledRule, targets: set[int]) -> set[int]:
    """Source axes that hold dims of target axes."""
    atoms = {atom for t in targets for atom in rule.target[t].atoms}
    return {a for a, geometry in enumerate(rule.source) if atoms & set(geometry.atoms)}


def _scale_dims(dims: Dims, layout: Layout, fit: _Fit) -> Dims:
    """The dims of the scale: entries instead of elements, concatenations in steps of their own dims."""
    specs = dict(dims.items())
    for atom, entries in fit.sizes.items():
        if atom in specs and isinstance(specs[atom], int):
            specs[atom] = entries
    for axis in (*layout.source, *layout.target):
        for term in axis:
            if isinstance(term, Slice):
                step = math.prod(dims.size(a) // fit.sizes[a] for a in term.atoms)
                concat = dims.concat(term.concat)
                specs[term.concat] = Concat(tuple((name, length // step) for name, length in concat.parts))
    return Dims(specs)


def _stacked_only(layout: Layout, stack: set[str]) -> Layout:
    """A per-tensor scale as MaxText declares it: no axis but the stacked ones."""
    ones: Axis = ("1",)
    kept = tuple(axis for axis in layout.target if any(a in stack for term in axis for a in term_atoms(term)))
    return Layout(tuple(ones for _ in layout.source), kept)


def _without_scale(ops: Sequence[Op]) -> tuple[Op, ...]:
    return tuple(op for op in ops if not isinstance(op, Scale))


def _scaled_pad(op: Pad, rule: CompiledRule, fit: _Fit) -> Pad:
    step = rule.sizes[op.dim] // fit.sizes[op.dim]
    return Pad(op.dim, -(-op.to // step))


def _cannot(tensor: LogicalTensor) -> Problem:
    scheme = scheme_of(tensor)
    stored = next(iter(tensor.stored.values()))
    return Problem(
        tensor.name,
        "FP8 codes with a scale, which --dtype source can carry",
        f"{scheme.describe(tensor) if scheme else tensor.scheme}",
        "Use --dtype bfloat16 or float32, which dequantise it.",
        file=stored.file,
    )
