"""What workers are dealt: single work items, or those that a data file takes together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tensorferry.mappings.plan.conversion_plan import Plan
from tensorferry.mappings.plan.groups import Group, grouped
from tensorferry.mappings.plan.work import WorkItem

Unit = WorkItem | Group


@dataclass(frozen=True)
class Units:
    """A plan's work in units that count whole or not at all, each with one receipt. The same ones each time.

    Attributes:
      plan: what will be done.
      store_format: ``ocdbt`` groups.
    """

    plan: Plan
    store_format: str

    @property
    def are_groups(self) -> bool:
        """Whether a unit is a data file."""
        return self.store_format == "ocdbt"

    @cached_property
    def count(self) -> int:
        """How many there are."""
        return sum(1 for _ in self) if self.are_groups else self.plan.totals.work_items

    def __iter__(self) -> Iterator[Unit]:
        if not self.are_groups:
            return self.plan.items()
        return grouped(self.plan.items(), self.plan.totals.write_bytes)

    def attempts(self, receipts: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """The attempts that count, of which every unit has one. Data files that an earlier version of the program
        grouped in another way would write their chunks twice."""
        return [receipts[one]["attempt"] for one in ([unit.id for unit in self] if self.are_groups else receipts)]
