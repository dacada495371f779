"""Copy items: a big chunk alone, or many small ones of the same step together; several of those for one data file."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from tensorferry.mappings.plan.groups import aim_bytes, runs
from tensorferry.pipelines.migrate.array_plan import ArrayPlan
from tensorferry.pipelines.migrate.step_record import StepRecord
from tensorferry.transforms.dtypes import numpy_dtype

GROUP_BYTES = 16 << 20
GROUP_PARTS = 256
# Steps are many, so one of them need not keep all workers busy.
LEAST_FILES = 4


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
      number: its place among the step's items.
      first: the place of its first batch among all batches of the step.
      batches: chunks that are read together; one batch, or all that go into a data file.
    """

    number: int
    first: int
    batches: tuple[tuple[Part, ...], ...]

    @property
    def id(self) -> str:
        """Its receipt carries it; tells which batches."""
        last = self.first + len(self.batches) - 1
        return f"{self.first:06d}" if last == self.first else f"{self.first:06d}-{last:06d}"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The chunks."""
        return tuple(part for batch in self.batches for part in batch)

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(map(_nbytes, self.batches))

    @property
    def peak_bytes(self) -> int:
        """Most tensor bytes held at once: what is read, and the largest chunk's values and encoding."""
        return max(_nbytes(batch) + 2 * max(part.array.spec.chunk_bytes for part in batch) for batch in self.batches)


def _nbytes(batch: tuple[Part, ...]) -> int:
    return sum(part.nbytes for part in batch)


def copy_items(record: StepRecord, store_format: str) -> list[CopyItem]:
    """The step's work, always cut in the same way; of ``ocdbt``, an item is a data file."""
    batches = list(_groups(record))
    together = [(batch,) for batch in batches]
    if store_format == "ocdbt":
        together = list(runs(batches, _nbytes, aim_bytes(sum(map(_nbytes, batches)), least_files=LEAST_FILES)))
    starts = accumulate(map(len, together), initial=0)
    return [CopyItem(number, first, some) for number, (first, some) in enumerate(zip(starts, together, strict=False))]


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
def load_items(folder: str, number: int, store_format: str) -> tuple[StepRecord, list[CopyItem]]:
    """A record and its items, as workers need them: several items of a step in a row."""
    record = StepRecord.load(folder, number)
    return record, copy_items(record, store_format)
