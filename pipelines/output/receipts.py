"""Receipts: one small JSON file for each finished work item, the whole memory of a resumable run."""

import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from tensorferry.pipelines.sinks.sink import store_error

_SUFFIX = ".json"


@dataclass(frozen=True)
class Receipts:
    """A directory of receipts; small and picklable, so every worker may write its own.

    Attributes:
      folder: a local directory, made on first use.
    """

    folder: str

    def add(self, item_id: str, receipt: dict[str, Any]) -> dict[str, Any]:
        """Keeps the receipt unless the item has one already, and returns the one that counts: the first wins.

        Raises:
          FerryError: the directory cannot be written.
        """
        final = self._file(item_id)
        draft = Path(self.folder, f".{uuid.uuid4().hex}")
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(receipt, sort_keys=True))
            return _keep_first(draft, final, receipt)
        except OSError as error:
            raise store_error(str(final), "the receipt written", error) from error
        finally:
            draft.unlink(missing_ok=True)

    def get(self, item_id: str) -> dict[str, Any] | None:
        """The item's whole receipt, if it has one."""
        return _read(self._file(item_id))

    def finished(self) -> dict[str, dict[str, Any]]:
        """Every whole receipt by work item id; a torn one counts for nothing, and its item is done again."""
        folder = Path(self.folder)
        files = sorted(folder.glob(f"[!.]*{_SUFFIX}")) if folder.is_dir() else ()
        receipts = {unquote(file.name.removesuffix(_SUFFIX)): _read(file) for file in files}
        return {item_id: receipt for item_id, receipt in receipts.items() if receipt is not None}

    def ids(self) -> set[str]:
        """Ids of the items that have a receipt, by the listing alone."""
        files = Path(self.folder).glob(f"[!.]*{_SUFFIX}")
        return {unquote(file.name.removesuffix(_SUFFIX)) for file in files}

    def discard(self, item_id: str) -> None:
        """Forgets a receipt whose chunks turned out to be missing."""
        self._file(item_id).unlink(missing_ok=True)

    def _file(self, item_id: str) -> Path:
        return Path(self.folder, quote(item_id, safe="").replace(".", "%2E") + _SUFFIX)


def _keep_first(draft: Path, final: Path, receipt: dict[str, Any]) -> dict[str, Any]:
    try:
        os.link(draft, final)  # atomic, and fails when the name is taken, which a rename does not
        return receipt
    except FileExistsError:
        earlier = _read(final)
    if earlier is not None:
        return earlier
    os.replace(draft, final)
    return receipt


def _read(file: Path) -> dict[str, Any] | None:
    try:
        receipt = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return receipt if isinstance(receipt, dict) else None
