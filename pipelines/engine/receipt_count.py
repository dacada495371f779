"""Progress of workers elsewhere: the receipts that they leave, counted by their names alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.engine.progress import Done


class Listed(Protocol):
    """Receipts that can be listed."""

    def ids(self) -> set[str]:
        """Ids of the work items that have one."""
        ...


@dataclass
class ReceiptCount:
    """Tells what a run has finished so far, each time it is called.

    Attributes:
      receipts: where workers leave them.
      item_bytes: work item id to its bytes; receipts of other items are not this run's.
    """

    receipts: Listed
    item_bytes: Mapping[str, int]
    _last: Done = field(default_factory=Done, init=False)

    def __call__(self) -> Done:
        try:
            found = self.receipts.ids() & self.item_bytes.keys()
        except FerryError:
            return self._last  # a store that is busy for a moment must not end the progress
        self._last = Done(sum(self.item_bytes[one] for one in found), len(found))
        return self._last
