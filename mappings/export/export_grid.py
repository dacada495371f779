"""Cutting Hugging Face tensors along the chunks of the arrays that they come from, so that each is read about once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorferry.mappings.plan.work import BLOCK_BYTES, BLOCK_COPIES
from tensorferry.mappings.rules.compiled import CompiledRule
from tensorferry.mappings.rules.geometry import AxisGeometry, Box, Geometry, Range, box_of

Chunk = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grain:
    """An axis of a target along which it may be cut.

    Attributes:
      axis: position of the axis.
      unit: the smallest length of a cut.
      grain: the length at which cuts of the target are borders of the source's chunks; a multiple of ``unit``.
    """

    axis: int
    unit: int
    grain: int

    def at_blocks(self, block: int) -> "Grain":
        """The same axis, cut at borders of blocks only."""
        return Grain(self.axis, math.lcm(self.unit, block), math.lcm(self.grain, block))


@dataclass(frozen=True, slots=True)
class Cutting:
    """How the tensors of one kind are cut and grouped.

    Attributes:
      chunk: lengths of one part of a tensor.
      group: split dim to how many of its positions (layers, experts) go together in one work item.
    """

    chunk: Chunk
    group: Mapping[str, int]

    @property
    def parts(self) -> int:
        """Parts of one work item."""
        return math.prod(self.group.values())


@dataclass(frozen=True, slots=True)
class Limits:
    """What one work item may hold.

    Attributes:
      aim_bytes: bytes of its parts, where the source's chunks allow it.
      bound_bytes: bytes of everything it holds.
    """

    aim_bytes: int
    bound_bytes: int


def grains(rule: CompiledRule, chunk: Chunk) -> list[Grain]:
    """The axes along which a rule's targets may be cut, and where the source's chunks end on them.

    Args:
      rule: from an Orbax array to Hugging Face tensors.
      chunk: the shape of what the source reads in one go.
    """
    found = []
    for cut in rule.cuts():
        axis = rule.target[cut.axis]
        steps = _chunk_steps(rule.source, axis.atoms[0], chunk)
        grain = _unit_of(axis) * steps
        found.append(Grain(cut.axis, cut.unit, math.lcm(cut.unit, grain)))
    return found


def group_sizes(rule: CompiledRule, chunk: Chunk) -> dict[str, int]:
    """Split dim to how many of its positions one chunk of the source holds."""
    leading = {axis.atoms[0] for axis in rule.source if axis.atoms}
    return {
        atom: _chunk_steps(rule.source, atom, chunk) if atom in leading else rule.sizes[atom] for atom in rule.split
    }


def common_grains(every: Sequence[Sequence[Grain]]) -> list[Grain]:
    """The cuts that suit all rules of a target."""
    by_axis = [{grain.axis: grain for grain in grains} for grains in every]
    axes = sorted(set.intersection(*(set(one) for one in by_axis)))
    return [
        Grain(axis, math.lcm(*(g[axis].unit for g in by_axis)), math.lcm(*(g[axis].grain for g in by_axis)))
        for axis in axes
    ]


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes that the elements of a tensor take, and the source's chunks.

    Attributes:
      read: bytes of an element as it is read, over all arrays.
      part: bytes of an element of the part that is being written, with all that it is worked out from.
      chunk: bytes of the largest chunk that must be decoded.
      lone: whether everything that an item reads of an array lies in one chunk, which then is decoded once.
    """

    read: int
    part: int
    chunk: int
    lone: bool

    def held(self, region: int, part: int) -> int:
        """Bytes that an item of so many read elements and so many elements in a part holds at once."""
        own, made = self.read * region, self.part * part
        reading = reading_extra(own, self.chunk) if self.lone else 2 * max(BLOCK_BYTES, self.chunk)
        return own + max(reading, made + BLOCK_COPIES * min(BLOCK_BYTES, made))

    def left(self, bound: int) -> int:
        """Bytes of a bound that are left for parts when the largest chunk is there."""
        chunks = self.chunk if self.lone else 2 * max(BLOCK_BYTES, self.chunk)
        return bound - chunks - BLOCK_COPIES * BLOCK_BYTES


def reading_extra(region_bytes: int, chunk_bytes: int) -> int:
    """Bytes beside a region while it is read out of one chunk: the chunk as stored and decoded, then decoded alone."""
    return max(chunk_bytes, 2 * chunk_bytes - region_bytes)


def choose_cutting(
    shape: Chunk, cuts: Sequence[Grain], group: Mapping[str, int], limits: Limits, weights: Weights
) -> Cutting:
    """Cuts at the borders of the source's chunks, and across them only where memory asks for it.

    Args:
      shape: of one tensor.
      cuts: its axes that may be cut; the first axis gives way first, so that parts stay rows of the file.
      group: split dim to the positions that one chunk holds.
      limits: on the bytes of a work item.
      weights: of its elements and chunks.
    """
    chunk, groups = list(shape), dict(group)
    itemsize = max(weights.read, weights.part)
    for cut in cuts:
        if _bytes(chunk, groups, itemsize) > limits.aim_bytes:
            _cut(chunk, groups, itemsize, cut.axis, cut.grain, limits.aim_bytes)

    def too_much() -> bool:
        return weights.held(_bytes(chunk, groups, 1), math.prod(chunk)) > limits.bound_bytes

    left_bytes = weights.left(limits.bound_bytes)
    if left_bytes < itemsize:
        return Cutting(tuple(chunk), groups)  # whatever the parts, reading them does not fit
    if not weights.lone:
        while too_much() and max(groups.values(), default=1) > 1:
            widest = max(groups, key=lambda atom: groups[atom])
            groups[widest] = -(-groups[widest] // 2)
    for cut in cuts:
        if too_much():
            _cut(chunk, {} if weights.lone else groups, itemsize, cut.axis, cut.unit, left_bytes // 2)
    return Cutting(tuple(chunk), groups)


def in_one_chunk(box: Box, chunk: Chunk) -> bool:
    """Whether a box lies inside one chunk.

    >>> in_one_chunk(((2, 4), (0, 3)), (2, 3)), in_one_chunk(((1, 3), (0, 3)), (2, 3))
    (True, False)
    """
    return all(start // step == (stop - 1) // step for (start, stop), step in zip(box, chunk, strict=True))


def hull(geometry: Geometry, ranges: Mapping[str, Range]) -> Box:
    """The smallest box around the elements that ranges of dims mean; they may lie apart inside a merged axis."""
    first = box_of(geometry, {atom: (low, low + 1) for atom, (low, _) in ranges.items()})
    last = box_of(geometry, {atom: (high - 1, high) for atom, (_, high) in ranges.items()})
    return tuple((low, high) for (low, _), (_, high) in zip(first, last, strict=True))


def touched(box: Box, chunk: Chunk, shape: Chunk) -> int:
    """Elements of all chunks that a box touches.

    >>> touched(((1, 3), (0, 2)), (2, 4), (5, 6))
    16
    """
    lengths = (
        min(-(-stop // step) * step, length) - start // step * step
        for (start, stop), step, length in zip(box, chunk, shape, strict=True)
    )
    return math.prod(lengths)


def _bytes(chunk: Sequence[int], groups: Mapping[str, int], itemsize: int) -> int:
    return itemsize * math.prod(chunk) * math.prod(groups.values())


def _cut(chunk: list[int], groups: Mapping[str, int], itemsize: int, axis: int, step: int, limit_bytes: int) -> None:
    """Cuts an axis to the most steps that fit, as evenly as they allow."""
    others = _bytes(chunk, groups, itemsize) // chunk[axis]
    steps = -(-chunk[axis] // step)
    most = max(1, min(limit_bytes // others // step, steps))
    chunk[axis] = min(chunk[axis], -(-steps // -(-steps // most)) * step)


def _unit_of(axis: AxisGeometry) -> int:
    """Elements of an axis per step of its first dim."""
    return axis.row * axis.factors[0].inner


def _chunk_steps(source: Geometry, atom: str, chunk: Chunk) -> int:
    """Steps of a dim inside one chunk of the source; at least one."""
    for axis, length in zip(source, chunk, strict=True):
        if atom in axis.atoms:
            steps = max(1, length // _stride(axis, atom))
            return min(steps, _size(axis, atom))
    return 1


def _stride(axis: AxisGeometry, atom: str) -> int:
    """Elements of an axis per step of one of its dims."""
    stride = 1
    for factor in reversed(axis.factors):
        if atom in factor.atoms:
            return stride * math.prod(factor.sizes[factor.atoms.index(atom) + 1 :])
        stride *= factor.extent
    raise KeyError(atom)


def _size(axis: AxisGeometry, atom: str) -> int:
    return next(f.sizes[f.atoms.index(atom)] for f in axis.factors if atom in f.atoms)
