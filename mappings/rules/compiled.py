"""A rule with its numbers filled in: geometry on both sides, and which dims stack, split or enumerate."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tensorferry.mappings.rules.chunking import Cut
from tensorferry.mappings.rules.dims import Dims
from tensorferry.mappings.rules.geometry import (
    AxisGeometry,
    Geometry,
    Range,
    describe,
    grain_steps,
    shape_of,
    side_geometry,
)
from tensorferry.mappings.rules.rule import PlainRule
from tensorferry.transforms.ops import Op, Pad


@dataclass(frozen=True)
class CompiledRule:
    """One plain rule at one size.

    Attributes:
      rule: the rule.
      dims: the sizes.
      source: geometry of each source tensor.
      target: geometry of each target array.
      stack: dims that enumerate sources and are dimensions of the target.
      split: dims that enumerate targets and are dimensions of the source.
      named: dims that enumerate target arrays.
      sizes: length of every dim that has one.
      positions: when the rule holds for some of its target arrays only: the positions of ``named`` that it holds for.
    """

    rule: PlainRule
    dims: Dims
    source: Geometry
    target: Geometry
    stack: tuple[str, ...]
    split: tuple[str, ...]
    named: tuple[str, ...]
    sizes: Mapping[str, int]
    positions: frozenset[tuple[int, ...]] | None = None

    def only(self, positions: Iterable[tuple[int, ...]]) -> "CompiledRule":
        """The same rule for some of its target arrays."""
        return replace(self, positions=frozenset(positions))

    @property
    def arithmetic(self) -> tuple[Op, ...]:
        """The ops that change values; padding only changes shapes."""
        return tuple(op for op in self.rule.ops if op.elementwise)

    @property
    def padded(self) -> bool:
        """Whether some target elements have no source."""
        return any(isinstance(op, Pad) for op in self.rule.ops)

    @property
    def fill(self) -> float | None:
        """What target elements without a source are; None when every element has one."""
        return 0.0 if self.padded or self.rule.optional else self.rule.value

    @property
    def shared_reads(self) -> bool:
        """Whether one read must serve several target arrays: they interleave in the source, or each has only a piece
        of every row of its last axis."""
        outer = self.source[:-1] if len(self.source) > 1 else self.source
        leading = {axis.atoms[0] for axis in outer if axis.atoms}
        return any(atom not in leading for atom in self.split)

    @property
    def has_parts(self) -> bool:
        """Whether it uses only a part of each source tensor."""
        return any(factor.part for axis in self.source for factor in axis.factors)

    @property
    def source_text(self) -> str:
        return describe(self.rule.layout.source, self.source)

    def targets(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Every target array: its name and the positions of the dims in its name."""
        for at in self.dims.positions(self.named):
            if self.positions is None or tuple(at[atom] for atom in self.named) in self.positions:
                yield self.rule.target.fill(self.dims, at), at

    def sources(self) -> Iterator[str]:
        """Every source tensor's name."""
        if self.rule.value is not None:
            return
        atoms = self.rule.source.atoms(self.dims)
        both = [i for i, atom in enumerate(self.named) if atom in atoms]
        wanted = None if self.positions is None else {tuple(p[i] for i in both) for p in self.positions}
        for at in self.dims.positions(atoms):
            if wanted is None or tuple(at[self.named[i]] for i in both) in wanted:
                yield self.rule.source.fill(self.dims, at)

    def stacked_axes(self) -> list[int]:
        """Target axes that enumerate source tensors."""
        return [i for i, axis in enumerate(self.target) if axis.atoms and axis.atoms[0] in self.stack]

    def cuts(self, order: Sequence[int] = ()) -> list[Cut]:
        """Target axes along which one source tensor may be cut, the source's outermost first.

        An axis may be cut where its leading dim leads a source axis too: then a cut of the target is a stretch of
        that source axis.

        Args:
          order: the source's axes as they are stored, slowest first, where that is not their own order.
        """
        leads = {axis.atoms[0]: i for i, axis in enumerate(self.source) if axis.atoms}
        leads |= self._after_split()
        found = [
            (order.index(leads[axis.atoms[0]]) if order else leads[axis.atoms[0]], Cut(i, self.unit(i)))
            for i, axis in enumerate(self.target)
            if axis.atoms and axis.atoms[0] in leads and self.unit(i) < axis.length
        ]
        return [cut for _, cut in sorted(found, key=lambda pair: pair[0])]

    def _after_split(self) -> dict[str, int]:
        """Dims that lead their source axis once a split dim before them is fixed: ``mlp`` of ``(part mlp)``."""
        if self.shared_reads:
            return {}
        return {
            axis.atoms[1]: i
            for i, axis in enumerate(self.source)
            if len(axis.atoms) > 1 and axis.atoms[0] in self.split
        }

    def unit(self, axis: int, grain: Sequence[int] = ()) -> int:
        """The smallest length by which a target axis may be cut; the whole axis where a cut would not be even.

        Args:
          grain: per source axis, the multiple at which reads of it should start; ones where it is left out.
        """
        geometry = self.target[axis]
        first = geometry.factors[0]
        unit = geometry.row * first.inner * (self._steps(first.atoms[0], grain) if first.atoms and grain else 1)
        return geometry.length if (first.offset * geometry.row) % unit else unit

    def _steps(self, atom: str, grain: Sequence[int]) -> int:
        """Steps of a dim that make a whole number of grains of its source axis."""
        return next((steps[atom] for steps in grain_steps(self.source, grain) if atom in steps), 1)

    def ranges(self, box: tuple[Range, ...]) -> dict[str, Range] | None:
        """The range of every target dim inside a box of the target array; None when the rule has no element there."""
        ranges: dict[str, Range] = {}
        for axis, span in zip(self.target, box, strict=True):
            inside = _axis_ranges(axis, span)
            if inside is None:
                return None
            ranges.update(inside)
        return ranges


def _axis_ranges(axis: AxisGeometry, span: Range) -> dict[str, Range] | None:
    ranges = {a: (0, n) for f in axis.factors for a, n in zip(f.atoms, f.sizes, strict=True)}
    if span == (0, axis.length) or not axis.factors[0].atoms:
        return ranges
    first = axis.factors[0]
    unit = axis.row * first.inner
    start = max(0, span[0] - first.offset * axis.row)
    stop = span[1] - first.offset * axis.row
    low, high = start // unit, min(-(-stop // unit), first.sizes[0])
    if low >= high:
        return None
    ranges[first.atoms[0]] = (low, high)
    return ranges


def compile_rule(rule: PlainRule, dims: Dims) -> CompiledRule:
    """Fills a rule's numbers in.

    Raises:
      ValueError: the rule does not fit its dims (a mistake in the family file).
    """
    grown = {op.dim: op.to for op in rule.ops if isinstance(op, Pad)}
    source = side_geometry(rule.layout.source, dims, dict(rule.stored))
    target = side_geometry(rule.layout.target, dims, grown)
    factors = [factor for axis in (*source, *target) for factor in axis.factors]
    sizes = {atom: size for f in factors for atom, size in zip(f.atoms, f.sizes, strict=True)}
    stack, split = rule.stack_atoms(dims), rule.split_atoms(dims)
    return CompiledRule(rule, dims, source, target, stack, split, rule.target.atoms(dims), sizes)


def source_shape(compiled: CompiledRule) -> tuple[int, ...]:
    """The shape that every source tensor of a rule must have."""
    return shape_of(compiled.source)
