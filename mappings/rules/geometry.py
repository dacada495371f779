"""Index arithmetic between dims and stored axes: which range of an axis a range of dims occupies.

A stored axis is a row-major product of factors. A factor is a dim, or a Concat of which one Slice is meant: then its
extent is the whole concatenation and its dims occupy a stretch of it.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tensorferry.mappings.rules.dims import Dims
from tensorferry.mappings.rules.layout import Axis, Side, Slice, Term

Range = tuple[int, int]
Box = tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of a stored axis.

    Attributes:
      extent: its length in the stored axis, in units of the factors to its right.
      offset: where its dims begin inside the extent.
      atoms: its dims, row-major.
      sizes: their lengths.
      part: ``concat.part`` when only a part of a concatenation is meant.
    """

    extent: int
    offset: int
    atoms: tuple[str, ...]
    sizes: tuple[int, ...]
    part: str = ""

    @property
    def inner(self) -> int:
        """Elements of this factor per step of its first dim."""
        return math.prod(self.sizes[1:])

    def span(self, ranges: Mapping[str, Range]) -> Range:
        """The range of the extent that ranges of the dims occupy; trailing dims must then be whole.

        Raises:
          ValueError: the ranges are not one contiguous stretch.
        """
        if len(self.atoms) == 1:  # nearly always, and plans ask millions of times
            start, stop = ranges[self.atoms[0]]
        else:
            start, stop = flat_range(self.sizes, [ranges[atom] for atom in self.atoms])
        return self.offset + start, self.offset + stop


@dataclass(frozen=True, slots=True)
class AxisGeometry:
    """A stored axis as a product of factors."""

    factors: tuple[Factor, ...]

    @property
    def length(self) -> int:
        return math.prod(factor.extent for factor in self.factors)

    @property
    def atoms(self) -> tuple[str, ...]:
        return tuple(atom for factor in self.factors for atom in factor.atoms)

    @property
    def row(self) -> int:
        """Elements of the axis per step of its first factor."""
        return math.prod(factor.extent for factor in self.factors[1:])

    def span(self, ranges: Mapping[str, Range]) -> Range:
        """The contiguous range of the axis that ranges of its dims occupy.

        Raises:
          ValueError: the ranges are not one contiguous stretch.
        """
        if len(self.factors) == 1:
            return self.factors[0].span(ranges)
        return flat_range([f.extent for f in self.factors], [f.span(ranges) for f in self.factors])

    def scattered(self, ranges: Mapping[str, Range]) -> list[str]:
        """The dims that must be taken position by position, because ranges of dims to their right leave holes."""
        before: list[str] = []
        found: list[str] = []
        for factor in self.factors:
            if math.prod(factor.sizes) < factor.extent:
                found = list(before)
            for atom, size in zip(factor.atoms, factor.sizes, strict=True):
                if ranges[atom] != (0, size):
                    found = list(before)
                before.append(atom)
        return [atom for atom in found if ranges[atom][1] - ranges[atom][0] > 1]


Geometry = tuple[AxisGeometry, ...]


def flat_range(extents: list[int] | tuple[int, ...], ranges: list[Range]) -> Range:
    """The flat range that per-digit ranges of a mixed-radix number occupy.

    >>> flat_range((4, 3, 5), [(2, 3), (1, 3), (0, 5)])
    (35, 45)

    Raises:
      ValueError: a digit after the first partial one is not whole, so the range has holes.
    """
    start, length, open_digit = 0, 1, False
    for extent, (low, high) in zip(extents, ranges, strict=True):
        if open_digit and (low, high) != (0, extent):
            raise ValueError(f"ranges {ranges} of {tuple(extents)} are not contiguous")
        start = start * extent + low
        length = length * extent if open_digit else high - low
        open_digit = open_digit or high - low > 1
    return start, start + length


def side_geometry(side: Side, dims: Dims, padded: Mapping[str, int]) -> Geometry:
    """The geometry of every axis of one side of a layout.

    Args:
      padded: dims that this side stores longer than they are (vocabulary padding), with the stored length.
    """
    return tuple(_axis(axis, dims, padded) for axis in side)


def _axis(axis: Axis, dims: Dims, padded: Mapping[str, int]) -> AxisGeometry:
    return AxisGeometry(tuple(_factor(term, dims, padded) for term in axis))


def _factor(term: Term, dims: Dims, padded: Mapping[str, int]) -> Factor:
    if isinstance(term, Slice):
        concat = dims.concat(term.concat)
        offset, length = concat.span(term.part)
        sizes = tuple(dims.size(atom) for atom in term.atoms)
        if math.prod(sizes) != length:
            raise ValueError(f"{term}: its dims make {math.prod(sizes)}, the part has {length}")
        return Factor(concat.length, offset, term.atoms, sizes, f"{term.concat}.{term.part}")
    if term == "1":
        return Factor(1, 0, (), ())
    size = dims.size(term)
    return Factor(padded.get(term, size), 0, (term,), (size,))


def shape_of(geometry: Geometry) -> tuple[int, ...]:
    """The stored shape."""
    return tuple(axis.length for axis in geometry)


def box_of(geometry: Geometry, ranges: Mapping[str, Range]) -> Box:
    """The box of stored indices that ranges of the dims occupy."""
    return tuple(axis.span(ranges) for axis in geometry)


def hull_of(geometry: Geometry, ranges: Mapping[str, Range]) -> Box:
    """The smallest box around everything that ranges of the dims mean, in one stretch or not."""
    first = {atom: (start, start + 1) for atom, (start, _) in ranges.items()}
    last = {atom: (stop - 1, stop) for atom, (_, stop) in ranges.items()}
    return tuple((axis.span(first)[0], axis.span(last)[1]) for axis in geometry)


def stretches(geometry: Geometry, ranges: Mapping[str, Range]) -> Iterator[dict[str, Range]]:
    """Cuts ranges into pieces that are one contiguous stretch on every axis: a part inside a merged axis lies apart."""
    scattered = [atom for axis in geometry for atom in axis.scattered(ranges)]
    for positions in itertools.product(*(range(*ranges[atom]) for atom in scattered)):
        yield {**ranges, **{atom: (at, at + 1) for atom, at in zip(scattered, positions, strict=True)}}


def describe(side: Side, geometry: Geometry) -> str:
    """``[embed=4096, mlp=14336]``: axis names and lengths, for messages."""
    names = ["·".join(str(term) for term in axis) for axis in side]
    return "[" + ", ".join(f"{n}={a.length}" for n, a in zip(names, geometry, strict=True)) + "]"


def grain_steps(geometry: Geometry, grain: Sequence[int]) -> list[dict[str, int]]:
    """Per axis, dim to the steps of it after which a whole number of grains of the axis has passed.

    >>> axis = AxisGeometry((Factor(6, 0, ("heads",), (6,)), Factor(16, 0, ("lane",), (16,))))
    >>> grain_steps((axis,), (32,))
    [{'lane': 32, 'heads': 2}]
    """
    found = []
    for axis, unit in zip(geometry, grain, strict=True):
        steps, inner = {}, 1
        for factor in reversed(axis.factors):
            within = inner
            for atom, size in reversed(list(zip(factor.atoms, factor.sizes, strict=True))):
                steps[atom] = unit // math.gcd(unit, within)
                within *= size
            inner *= factor.extent
        found.append(steps)
    return found
