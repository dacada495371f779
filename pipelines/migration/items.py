"""Copy items: a big chunk alone, or many small ones of the same step together."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from pipelines.migration.arrays import ArrayPlan
from pipelines.migration.record import StepRecord
from transforms.dtypes import numpy_dtype

GROUP_BYTES = 16 << 20
GROUP_PARTS = 256


@dataclass(frozen=True, slots=True)
class Part:
    """One chunk of one target array.

    Attributes:
      array: the array.
      index: the chunk's index in its grid.
    """

    array: ArrayPlan
    index: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        count = numpy_dtype(self.array.spec.dtype).itemsize
        for length in self.array.spec.box_shape(self.index):
            count *= length
        return count


@dataclass(frozen=True, slots=True)
class CopyItem:
    """What one work item copies.

    Attributes:
      number: its place among the step's items; its receipt carries it.
      parts: the chunks.
    """

    number: int
    parts: tuple[Part, ...]

    @property
    def id(self) -> str:
        return f"{self.number:06d}"

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(part.nbytes for part in self.parts)

    @property
    def peak_bytes(self) -> int:
        """Most tensor bytes held at once: what is read, its values, and all that a transaction may hold back."""
        return self.nbytes + 2 * max(part.array.spec.chunk_bytes for part in self.parts)


def copy_items(record: StepRecord) -> list[CopyItem]:
    """The step's work, always cut in the same way."""
    return [CopyItem(number, parts) for number, parts in enumerate(_groups(record))]


def _groups(record: StepRecord) -> Iterator[tuple[Part, ...]]:
    group: list[Part] = []
    room = GROUP_BYTES
    for array in record.arrays:
        for index in array.spec.indices():
            part = Part(array, index)
            if group and (part.nbytes > room or len(group) == GROUP_PARTS):
                yield tuple(group)
                group, room = [], GROUP_BYTES
            group.append(part)
            room -= part.nbytes
    if group:
        yield tuple(group)


@lru_cache(maxsize=16)
def load_items(folder: str, number: int) -> tuple[StepRecord, list[CopyItem]]:
    """A record and its items, as workers need them: several items of a step in a row."""
    record = StepRecord.load(folder, number)
    return record, copy_items(record)
