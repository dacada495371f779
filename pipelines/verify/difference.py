"""What is not as it must be: one difference, and those of a chunk that was read."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tensorferry.mappings.plan.work import Part
from tensorferry.transforms.digest import digest

_SHOWN_ELEMENTS = 3


@dataclass(frozen=True)
class Difference:
    """Something that is not as it must be.

    Attributes:
      array: key of the array.
      where: index or chunk.
      expected: what must be there.
      found: what is there.
    """

    array: str
    where: str
    expected: str
    found: str

    def __str__(self) -> str:
        where = f" {self.where}" if self.where else ""
        return f"{self.array}{where}: expected {self.expected}; found {self.found}"


def compare_part(part: Part, wanted: np.ndarray, found: np.ndarray, told: str) -> list[Difference]:
    """Differences of one chunk: dtype, elements bit for bit, and the digest that the manifest tells."""
    key = part.spec.key
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return [Difference(key, f"chunk {list(part.grid)}", _kind(wanted), _kind(found))]
    bits = np.dtype(f"u{found.itemsize}") if found.itemsize <= 8 else np.dtype(np.uint8)
    unequal = wanted.view(bits) != found.view(bits)
    if unequal.any():
        return [*_elements(part, wanted, found, unequal)]
    now = digest(np.ascontiguousarray(found))
    return [] if now == told else [Difference(key, f"chunk {list(part.grid)}", f"digest {told} (manifest)", now)]


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _elements(part: Part, wanted: np.ndarray, found: np.ndarray, unequal: np.ndarray) -> Iterator[Difference]:
    count = int(np.count_nonzero(unequal))
    start = [low for low, _ in part.spec.box(part.grid)]
    flat = np.flatnonzero(unequal)[:_SHOWN_ELEMENTS]
    for n, index in enumerate(zip(*np.unravel_index(flat, wanted.shape), strict=True)):
        at = [int(i) + low for i, low in zip(index, start, strict=True)]
        many = "elements differ" if count > 1 else "element differs"
        more = f" ({count:,} {many} in chunk {list(part.grid)})" if n == 0 else ""
        expected, instead = _values(wanted[index], found[index])
        yield Difference(part.spec.key, f"index {at}", expected, f"{instead}{more}")


def _values(one: Any, other: Any) -> tuple[str, str]:
    """Two elements that differ, exactly; with their bits where they are written alike, as NaNs are."""
    texts = f"{one}", f"{other}"
    if texts[0] != texts[1]:
        return texts
    bits = (f"{value} (bits {value.tobytes()[::-1].hex()})" for value in (one, other))
    return next(bits), next(bits)
