"""Work items that go into one data file: a store of few large objects takes them together."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from tensorferry.mappings.plan.work import Part, WorkItem

T = TypeVar("T")

DATA_FILE_BYTES = 400_000_000
# A small model is cut finer, or most workers would have nothing to do.
LEAST_FILES = 16


@dataclass(frozen=True)
class Group:
    """Consecutive work items of a plan, done one after another, of which all count or none.

    Attributes:
      items: one or more.
    """

    items: tuple[WorkItem, ...]

    @property
    def id(self) -> str:
        """Tells which items: those of another grouping have another id."""
        return f"{self.items[0].id}-{self.items[-1].id}"

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Everything that is written, in order."""
        return tuple(part for item in self.items for part in item.parts)

    @property
    def write_bytes(self) -> int:
        return sum(item.write_bytes for item in self.items)

    @property
    def read_bytes(self) -> int:
        return sum(item.read_bytes for item in self.items)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; ``from_json`` is the inverse."""
        return {"id": self.id, "items": [item.to_json() for item in self.items]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Group":
        return cls(tuple(WorkItem.from_json(item) for item in data["items"]))


def grouped(items: Iterable[WorkItem], total_bytes: int, file_bytes: int = DATA_FILE_BYTES) -> Iterator[Group]:
    """Puts the work items of a plan together, the same ones each time.

    Args:
      items: all of them, in order.
      total_bytes: bytes that they write together.
      file_bytes: aim for one data file.
    """
    yield from map(Group, runs(items, lambda item: item.write_bytes, aim_bytes(total_bytes, file_bytes)))


def runs(things: Iterable[T], nbytes: Callable[[T], int], aim: int) -> Iterator[tuple[T, ...]]:
    """Cuts things into runs whose bytes come as near to an aim as whole things can, one thing at least.

    >>> list(runs([5, 4, 4, 30, 1, 1], lambda size: size, 10))
    [(5, 4), (4,), (30,), (1, 1)]
    """
    run: list[T] = []
    held_bytes = 0
    for thing in things:
        with_it = held_bytes + nbytes(thing)
        if run and with_it - aim > aim - held_bytes:
            yield tuple(run)
            run, with_it = [], nbytes(thing)
        run.append(thing)
        held_bytes = with_it
    if run:
        yield tuple(run)


def aim_bytes(total_bytes: int, file_bytes: int = DATA_FILE_BYTES, least_files: int = LEAST_FILES) -> int:
    """The aim for one data file where so many bytes are written in all.

    >>> aim_bytes(10**12), aim_bytes(16_000_000)
    (400000000, 1000000)
    """
    return max(1, min(file_bytes, total_bytes // least_files))
