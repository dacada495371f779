"""Receipts in a bucket: one small object for each finished work item."""

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from tensorferry.pipelines.storage.objects import Objects

_SUFFIX = ".json"


@dataclass(frozen=True)
class BucketReceipts:
    """A folder of receipts, with the interface of `Receipts`. Picklable, so every worker writes its own.

    Attributes:
      folder: ``gs://bucket/…/receipts``.
    """

    folder: str

    def add(self, item_id: str, receipt: dict[str, Any]) -> dict[str, Any]:
        """Keeps the receipt unless the item has one already, and returns the one that counts: the first wins.

        Raises:
          FerryError: the bucket refuses.
        """
        data = json.dumps(receipt, sort_keys=True).encode()
        if self._objects.create(_name(item_id), data):
            return receipt
        earlier = self.get(item_id)
        if earlier is not None:
            return earlier
        self._objects.write(_name(item_id), data)
        return receipt

    def get(self, item_id: str) -> dict[str, Any] | None:
        """The item's receipt, if it has one."""
        return _parsed(self._objects.read(_name(item_id)))

    def finished(self) -> dict[str, dict[str, Any]]:
        """Every receipt by work item id: one listing, and a read of each."""
        names = (name for name in self._objects.sizes() if name.endswith(_SUFFIX))
        found = {_item_id(name): _parsed(data) for name, data in self._objects.read_all(names).items()}
        return {item_id: receipt for item_id, receipt in sorted(found.items()) if receipt is not None}

    def ids(self) -> set[str]:
        """Ids of the items that have a receipt, by the listing alone."""
        return {_item_id(name) for name in self._objects.sizes() if name.endswith(_SUFFIX)}

    def discard(self, item_id: str) -> None:
        """Forgets a receipt whose chunks turned out to be missing."""
        self._objects.delete_all([_name(item_id)])

    @property
    def _objects(self) -> Objects:
        return Objects(self.folder)


def _name(item_id: str) -> str:
    return quote(item_id, safe="").replace(".", "%2E") + _SUFFIX


def _item_id(name: str) -> str:
    return unquote(name.removesuffix(_SUFFIX))


def _parsed(data: bytes | None) -> dict[str, Any] | None:
    try:
        receipt = json.loads(data) if data is not None else None
    except ValueError:
        return None
    return receipt if isinstance(receipt, dict) else None
