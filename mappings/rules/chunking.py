"""How big a target array's chunks are: what one work item writes whole, and the inner chunks that readers fetch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1 << 20
SMALL_ARRAY_BYTES = MIB
INNER_CHUNK_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class Cut:
    """An axis along which an array may be cut.

    Attributes:
      axis: position of the axis.
      unit: chunk lengths along it are multiples of this.
    """

    axis: int
    unit: int


def choose_chunk(
    shape: Sequence[int], itemsize: int, stacked: Sequence[Cut], cuts: Sequence[Cut], limit_bytes: int
) -> tuple[int, ...]:
    """The outer chunk: at most ``limit_bytes`` where the cuts allow it, equal lengths where they divide.

    Stacked axes give way first (down to length 1, so that one source tensor fills whole chunks), the last of them
    first; then the source's leading axes, so that what a work item reads stays one stretch of bytes.

    Args:
      shape: the array's shape.
      itemsize: bytes per element.
      stacked: axes that enumerate source tensors.
      cuts: other axes along which a source tensor may be cut, the source's outermost first.
      limit_bytes: the aim for the bytes of one chunk.
    """
    chunk = list(shape)
    for cut in (*reversed(stacked), *cuts):
        others = itemsize * math.prod(chunk) // chunk[cut.axis]
        if others * chunk[cut.axis] <= limit_bytes:
            break
        chunk[cut.axis] = _length(shape[cut.axis], cut.unit, limit_bytes // others)
    return tuple(chunk)


def _length(axis: int, unit: int, wanted: int) -> int:
    """The largest even cut of an axis at or below ``wanted``; an uneven one when no divisor comes near."""
    units = axis // unit
    most = max(1, min(wanted // unit, units))
    for length in range(most, max(most // 2, 1) - 1, -1):
        if units % length == 0:
            return length * unit
    parts = math.ceil(units / most)
    return math.ceil(units / parts) * unit


def choose_inner(
    chunk: Sequence[int], itemsize: int, stacked_axes: Sequence[int], limit_bytes: int = INNER_CHUNK_BYTES
) -> tuple[int, ...]:
    """The inner chunk: divides the outer one, splits its large axes evenly, length 1 along stacked axes.

    Readers that restore a part of a sharded array fetch inner chunks, so both large axes are split.
    """
    inner = list(chunk)
    if itemsize * math.prod(inner) <= SMALL_ARRAY_BYTES:
        return tuple(inner)
    for axis in stacked_axes:
        inner[axis] = 1
    while itemsize * math.prod(inner) > limit_bytes:
        axis = max(range(len(inner)), key=lambda a: (_smallest_factor(inner[a]) < inner[a], inner[a]))
        factor = _smallest_factor(inner[axis])
        if factor == 1:
            break
        inner[axis] //= factor
    return tuple(inner)


def _smallest_factor(number: int) -> int:
    """The smallest prime factor, or 1 for 1.

    >>> [_smallest_factor(n) for n in (1, 2, 9, 35, 7)]
    [1, 2, 3, 5, 7]
    """
    if number == 1:
        return 1
    for candidate in range(2, math.isqrt(number) + 1):
        if number % candidate == 0:
            return candidate
    return number
