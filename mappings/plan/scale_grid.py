"""Where the entries of a carried scale lie: one per block where blocks fit the target axes, else one per part of one.

Everything is counted along dims: a block of a source axis becomes a step of each dim that the axis holds (heads 1,
head_dim 128), and the scale goes through its weight's layout with every dim divided by its step. Where blocks do not
fit (576 rows in blocks of 128) the largest even part of a block that does takes their place (64), down to one element.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorferry.mappings.rules.compiled import CompiledRule, compile_rule
from tensorferry.mappings.rules.dims import Concat, Dims, Index
from tensorferry.mappings.rules.geometry import AxisGeometry, Factor
from tensorferry.mappings.rules.layout import Axis, Layout, Side, Slice, term_atoms
from tensorferry.mappings.rules.rule import PlainRule, Template
from tensorferry.transforms.ops import Pad

Blocks = tuple[int | None, ...]
Steps = Mapping[str, int]

_ONE: Axis = ("1",)


@dataclass(frozen=True)
class ScaleGrid:
    """The entries of one rule's scale.

    Attributes:
      rule: the weight's rule.
      blocks: block length per source axis; None when one entry serves the whole axis.
      grains: elements per entry and source axis: the block or an even part of it; None as in ``blocks``.
      steps: dim to the elements that an entry stands for.
    """

    rule: CompiledRule
    blocks: Blocks
    grains: Blocks
    steps: Steps

    def step(self, atoms: Sequence[str]) -> int:
        """Elements per entry of several dims together."""
        return math.prod(self.steps.get(atom, 1) for atom in atoms)

    @property
    def scalar(self) -> bool:
        """Whether there is one entry per source tensor or per expert in it: what MaxText calls per tensor."""
        plain, dims = self.rule.rule.layout, self.rule.dims
        axes = zip(self.grains, plain.source, strict=True)
        return all(grain is None or _all_labels(dims, axis) for grain, axis in axes) and all(
            _all_labels(dims, axis) or not any(isinstance(t, Slice) or _is_label(dims, t) for t in axis)
            for axis in plain.target
        )

    def companion(self, suffix: str, dtype: str, declared: bool) -> CompiledRule:
        """The scale's own rule, at its own sizes.

        Args:
          suffix: what the names of scales have after the names of their weights.
          dtype: of the scale arrays.
          declared: whether a scale per tensor has the axes of layers and experts only, not its weight's rank.
        """
        rule = self.rule.rule
        layout = self._labels_only() if declared and self.scalar else self._layout()
        pads = tuple(op for op in rule.ops if isinstance(op, Pad) and self.step([op.dim]) < self.rule.sizes[op.dim])
        ops = tuple(Pad(op.dim, op.to // self.step([op.dim])) for op in pads)
        source, target = Template(rule.source.text + suffix), Template(f"{rule.target.text}_scale")
        return compile_rule(PlainRule(source, target, layout, ops, dtype), self._dims(layout))

    def _layout(self) -> Layout:
        """The weight's layout; an axis with one entry has no parts, the entry serves them all."""
        plain = self.rule.rule.layout
        source = tuple(
            axis if block else tuple(atom for term in axis for atom in term_atoms(term))
            for axis, block in zip(plain.source, self.blocks, strict=True)
        )
        return Layout(source, plain.target)

    def _labels_only(self) -> Layout:
        def labels(side: Side) -> Side:
            dims = self.rule.dims
            return tuple(axis if _all_labels(dims, axis) else _names(dims, axis) or _ONE for axis in side)

        plain = self.rule.rule.layout
        return Layout(labels(plain.source), tuple(axis for axis in labels(plain.target) if axis != _ONE))

    def _dims(self, layout: Layout) -> Dims:
        dims = self.rule.dims
        specs = dict(dims.items())
        specs |= {atom: dims.size(atom) // step for atom, step in self.steps.items() if step > 1}
        for term in (term for side in (layout.source, layout.target) for axis in side for term in axis):
            if isinstance(term, Slice):
                specs[term.concat] = _in_steps(dims.concat(term.concat), term.part, self.step(term.atoms))
        return Dims(specs)


def fit_grids(rules: Sequence[CompiledRule], blocks: Blocks, declared: bool) -> list[ScaleGrid]:
    """The coarsest grids with which the scales of rules that fill the same arrays make one even grid there.

    Args:
      rules: rules with the same target arrays.
      blocks: block length per source axis, None for one entry for the whole axis; alike for all rules.
      declared: give scales the shape that MaxText's FP8 models declare, where that is an even grid: axes shorter than
        a block at full length.
    """
    if declared:
        grids = _fitted(rules, blocks, keep_short=True)
        if all(_as_declared(grid) for grid in grids):
            return grids
    return _fitted(rules, blocks, keep_short=False)


def _fitted(rules: Sequence[CompiledRule], blocks: Blocks, keep_short: bool) -> list[ScaleGrid]:
    grids = [_grid(rule, blocks, blocks, keep_short) for rule in rules]
    while True:
        bad = {t for t in range(len(rules[0].target)) if not _fits(grids, t)}
        finer = [_finer(grid, bad, keep_short) for grid in grids]
        if finer == grids:
            return grids
        grids = finer


def _finer(grid: ScaleGrid, bad: set[int], keep_short: bool) -> ScaleGrid:
    """The grid with finer grains along the source axes that feed the target axes ``bad``."""
    grains = list(grid.grains)
    for a, axis in enumerate(grid.rule.source):
        if _fed(grid.rule, axis) & bad:
            grains[a] = _smaller(grains[a], grid.blocks[a], _whole(axis).length)
    return _grid(grid.rule, grid.blocks, tuple(grains), keep_short)


def _grid(rule: CompiledRule, blocks: Blocks, grains: Blocks, keep_short: bool) -> ScaleGrid:
    """The coarsest grid, not coarser than ``grains``, that is a grid of dims on every source axis."""
    found: list[int | None] = []
    steps: dict[str, int] = {}
    for axis, block, grain in zip(rule.source, blocks, grains, strict=True):
        kept = axis if block else _whole(axis)
        short = [rule.target[t] for t in _fed(rule, axis)] if keep_short and block else []
        while True:
            own = steps_of(kept, grain, rule.dims)
            if own is not None and not any(_is_short(target, block or 0, own) for target in short):
                break
            grain = _smaller(grain, block, kept.length)
        found.append(grain)
        steps |= own
    return ScaleGrid(rule, blocks, tuple(found), steps)


def _smaller(grain: int | None, block: int | None, length: int) -> int:
    """The next smaller even part of a block, or of the whole axis where there are no blocks.

    >>> _smaller(12, 12, 99), _smaller(6, 12, 99), _smaller(None, None, 9), _smaller(1, 12, 99)
    (6, 4, 3, 1)
    """
    whole = block or length
    return next((part for part in range((grain or whole) - 1, 0, -1) if whole % part == 0), 1)


def _whole(axis: AxisGeometry) -> AxisGeometry:
    """The axis without the rest of a concatenation."""
    return AxisGeometry(tuple(Factor(math.prod(f.sizes), 0, f.atoms, f.sizes) for f in axis.factors))


def _as_declared(grid: ScaleGrid) -> bool:
    """Whether every target axis that blocks reach has the entries that MaxText declares: blocks, or all when short."""
    for axis, block in zip(grid.rule.source, grid.blocks, strict=True):
        if block is None:
            continue
        for target in (grid.rule.target[t] for t in _fed(grid.rule, axis)):
            entries = math.prod(_entries(grid, factor) for factor in target.factors)
            if entries != (target.length // block if target.length >= block else target.length):
                return False
    return True


def steps_of(axis: AxisGeometry, block: int | None, dims: Dims) -> dict[str, int] | None:
    """Step of every dim of a source axis, when blocks of it are a grid of its dims; None when they are not.

    >>> axis = AxisGeometry((Factor(4, 0, ("heads",), (4,)), Factor(64, 0, ("lane",), (64,))))
    >>> dims = Dims({"heads": 4, "lane": 64})
    >>> steps_of(axis, 128, dims), steps_of(axis, 32, dims), steps_of(axis, 96, dims)
    ({'lane': 64, 'heads': 2}, {'lane': 32, 'heads': 1}, None)
    """
    if block is None:
        return {atom: 1 if _is_label(dims, atom) else dims.size(atom) for atom in axis.atoms}
    steps: dict[str, int] = {}
    rest = min(block, axis.length)
    for factor in reversed(axis.factors):
        whole = math.prod(factor.sizes) == factor.extent
        if not whole and (factor.offset % rest or factor.extent % rest):
            return None
        for atom, size in reversed(list(zip(factor.atoms, factor.sizes, strict=True))):
            step = math.gcd(rest, size)
            if step not in (rest, size) or (step > 1 and _is_label(dims, atom)):
                return None
            steps[atom], rest = step, rest // step
        if rest > 1 and not whole:
            return None
    return steps if rest == 1 else None


def _fed(rule: CompiledRule, axis: AxisGeometry) -> set[int]:
    """Target axes that hold dims of a source axis."""
    atoms = set(axis.atoms)
    return {t for t, target in enumerate(rule.target) if atoms & set(target.atoms)}


def _is_short(target: AxisGeometry, block: int, steps: Steps) -> bool:
    """Whether a target axis is shorter than a block, and blocks span several of its elements."""
    return target.length < block and any(steps.get(atom, 1) > 1 for atom in target.atoms)


def _fits(grids: Sequence[ScaleGrid], t: int) -> bool:
    """Whether the grids together are one even grid along a target axis."""
    if not all(_is_even(grid, grid.rule.target[t]) for grid in grids):
        return False
    return len({tuple(_entries(grid, factor) for factor in grid.rule.target[t].factors) for grid in grids}) == 1


def _is_even(grid: ScaleGrid, axis: AxisGeometry) -> bool:
    """Whether the entries stand for equal runs of the axis: from the outermost dim inwards an entry per element, at
    most one dim in steps, then nothing but whole dims."""
    stepped = False
    for factor in axis.factors:
        if not _is_divided(grid, factor) or (stepped and _entries(grid, factor) > 1):
            return False
        for atom, size in zip(factor.atoms, factor.sizes, strict=True):
            step = grid.steps.get(atom, 1)
            if stepped and step < size:
                return False
            stepped = stepped or step > 1
    return True


def _is_divided(grid: ScaleGrid, factor: Factor) -> bool:
    """Whether the step divides every part of a concatenation, and a padded dim's length (unless its one entry may
    stand for the padding too)."""
    step = grid.step(factor.atoms)
    if factor.part:
        concat = grid.rule.dims.concat(factor.part.partition(".")[0])
        return all(length % step == 0 for _, length in concat.parts)
    return factor.extent % step == 0 or step == math.prod(factor.sizes)


def _entries(grid: ScaleGrid, factor: Factor) -> int:
    step = grid.step(factor.atoms)
    return factor.extent // step if factor.part or step < math.prod(factor.sizes) else 1


def _in_steps(concat: Concat, part: str, step: int) -> Concat:
    offset, length = concat.span(part)
    after = concat.length - offset - length
    return Concat((("before", offset // step), (part, length // step), ("after", after // step)))


def _is_label(dims: Dims, term: object) -> bool:
    return isinstance(term, str) and term in dims and isinstance(dims[term], Index)


def _all_labels(dims: Dims, axis: Axis) -> bool:
    return all(_is_label(dims, term) for term in axis)


def _names(dims: Dims, axis: Axis) -> Axis:
    return tuple(term for term in axis if _is_label(dims, term))
