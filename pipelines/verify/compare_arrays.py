"""Comparing one migrated array with the old step's, block by block, both read by stock TensorStore."""

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tensorferry.mappings.rules.geometry import Box
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.orbax.orbax_view import read_region
from tensorferry.pipelines.verify.difference import Difference

BLOCK_BYTES = 16 << 20
_WHOLE = 1 << 32
_SHOWN_ELEMENTS = 3

Read = Callable[[Box], np.ndarray]


@dataclass(frozen=True)
class Compared:
    """What was compared of one array, or of several.

    Attributes:
      arrays: how many.
      nbytes: bytes of the target's values.
      elements: of the target.
      differences: what differs, the first elements of each block only.
    """

    arrays: int = 0
    nbytes: int = 0
    elements: int = 0
    differences: tuple[Difference, ...] = ()

    def __add__(self, other: "Compared") -> "Compared":
        counts = (self.arrays + other.arrays, self.nbytes + other.nbytes, self.elements + other.elements)
        return Compared(*counts, self.differences + other.differences)


def compare_array(name: str, target: Any, wanted: Read, dtype: np.dtype, sample: float = 1.0) -> Compared:
    """Compares an array bit for bit, in blocks of whole chunks.

    Args:
      name: how differences call it.
      target: the opened TensorStore of the new array.
      wanted: reads the old array's values in a box.
      dtype: of the old array.
      sample: share of the blocks to compare, above 0 up to 1; the first is always in.
    """
    if target.dtype.numpy_dtype != dtype:
        return Compared(1, differences=(Difference(name, "dtype", str(dtype), str(target.dtype.numpy_dtype)),))
    nbytes, elements = 0, 0
    differences: list[Difference] = []
    shape = tuple(target.shape)
    grid = target.chunk_layout.read_chunk.shape or shape
    for number, box in enumerate(blocks(shape, grid, dtype.itemsize)):
        if number and sample < 1 and zlib.crc32(f"{name}{number}".encode()) >= sample * _WHOLE:
            continue
        try:
            expected = wanted(box)
        except FerryError as error:
            differences.append(Difference(name, f"index {_start(box)}", "a source that can be read", str(error)))
            continue
        try:
            found = read_region(target, "values", box)
        except FerryError as error:
            differences.append(Difference(name, f"index {_start(box)}", "readable values", str(error)))
            continue
        nbytes, elements = nbytes + found.nbytes, elements + found.size
        differences += unequal(name, box, expected, found)
    return Compared(1, nbytes, elements, tuple(differences))


def blocks(shape: Sequence[int], grid: Sequence[int], itemsize: int, most_bytes: int = BLOCK_BYTES) -> Iterator[Box]:
    """Boxes that tile an array, each of whole chunks and of one chunk at least; the last axes are filled first.

    >>> list(blocks((4, 6), (1, 2), 1, 8))
    [((0, 1), (0, 6)), ((1, 2), (0, 6)), ((2, 3), (0, 6)), ((3, 4), (0, 6))]
    """
    if not all(shape):
        return
    sizes = [max(1, min(chunk, size)) for chunk, size in zip(grid, shape, strict=True)]
    for axis in reversed(range(len(shape))):
        room = most_bytes // (math.prod(sizes) * itemsize)
        sizes[axis] = min(shape[axis], sizes[axis] * max(1, room))
    starts = (range(0, size, step) for size, step in zip(shape, sizes, strict=True))
    for corner in itertools.product(*starts):
        yield tuple((low, min(low + step, size)) for low, step, size in zip(corner, sizes, shape, strict=True))


def unequal(name: str, box: Box, expected: np.ndarray, found: np.ndarray) -> Iterator[Difference]:
    """The first elements of a block whose bits differ."""
    wrong = np.flatnonzero((_octets(expected) != _octets(found)).any(axis=1))
    for number, flat in enumerate(wrong[:_SHOWN_ELEMENTS]):
        inside = np.unravel_index(flat, found.shape)
        at = [int(i) + low for i, (low, _) in zip(inside, box, strict=True)]
        more = f" ({len(wrong):,} elements differ from index {_start(box)} on)" if number == 0 else ""
        yield Difference(name, f"index {at}", _value(expected[inside]), f"{_value(found[inside])}{more}")


def _octets(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, array.itemsize)


def _value(value: Any) -> str:
    return f"{value} (bits {value.tobytes()[::-1].hex()})"


def _start(box: Box) -> list[int]:
    return [low for low, _ in box]
