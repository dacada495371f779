"""A published checkpoint as stock Orbax and TensorStore see it; knows nothing of how it was written."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mappings.problems import FerryError, Problem
from pipelines.kvstores import below, kvstore, new_context
from pipelines.sinks.listing import MANIFEST_NAME

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class OrbaxItem:
    """A checkpoint item, found by what it says of itself.

    Attributes:
      path: the item's directory (``…/0/items``).
      use_ocdbt: arrays are in an OCDBT database.
      use_zarr3: arrays are zarr3, else zarr2.
    """

    path: str
    use_ocdbt: bool
    use_zarr3: bool

    def spec(self, key: str, zeros_for_missing: bool = True) -> dict[str, Any]:
        """The TensorStore spec that opens an array as stored."""
        store: dict[str, Any] = kvstore(self.path)
        store = {"driver": "ocdbt", "base": store, "path": f"{key}/"} if self.use_ocdbt else below(store, key)
        driver = "zarr3" if self.use_zarr3 else "zarr"
        return {"driver": driver, "kvstore": store, "fill_missing_data_reads": zeros_for_missing}

    def open(self, key: str, zeros_for_missing: bool = True) -> Any:
        """The array, opened for reading.

        Args:
          key: the array's key.
          zeros_for_missing: whether a chunk that is not there reads as zeros: some writers leave out chunks of
            nothing but zeros.

        Raises:
          FerryError: there is no such array, or it cannot be read.
        """
        import tensorstore as ts

        try:
            return ts.open(self.spec(key, zeros_for_missing), open=True, read=True, context=new_context()).result()
        except Exception as error:
            found = " ".join(str(error).split())[:200]
            raise FerryError(
                str(Problem(key, f"an array in {self.path}", found, "The checkpoint is damaged."))
            ) from error

    def read(self, key: str, box: tuple[tuple[int, int], ...]) -> "np.ndarray":
        """A box of an array, C-contiguous."""
        return read_region(self.open(key), key, box)


def read_region(array: Any, key: str, box: tuple[tuple[int, int], ...]) -> "np.ndarray":
    """A box of an opened array.

    Raises:
      FerryError: the bytes are damaged or missing.
    """
    try:
        return array[tuple(slice(*span) for span in box)].read(order="C").result()
    except Exception as error:
        found = " ".join(str(error).split())[:200]
        raise FerryError(str(Problem(f"{key} {list(box)}", "readable chunks", found, "Convert it again."))) from error


def open_item(path: str) -> OrbaxItem:
    """Opens an item by its ``_METADATA``.

    Raises:
      FerryError: there is none.
    """
    file = Path(path, "_METADATA")
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise FerryError(
            str(Problem(path, "an Orbax item with _METADATA", str(error), "Is the path right?"))
        ) from error
    return OrbaxItem(path, bool(data.get("use_ocdbt")), bool(data.get("use_zarr3")))


def find_item(output: str) -> str:
    """The item's directory below what the user gave: the output, a step, or the item itself.

    Raises:
      FerryError: there is no committed checkpoint, or several steps.
    """
    root = Path(output)
    if (root / "_METADATA").is_file():
        return str(root)
    if (root / "items" / "_METADATA").is_file():
        return str(root / "items")
    steps = sorted(p.name for p in root.iterdir() if p.name.isdecimal()) if root.is_dir() else []
    whole = [step for step in steps if (root / step / "items" / "_METADATA").is_file()]
    if len(whole) == 1:
        return str(root / whole[0] / "items")
    found = f"steps {', '.join(whole)}" if whole else _what(root)
    fix = "Name one step." if whole else "Run convert first, or give the path of the step."
    raise FerryError(str(Problem(output, "a committed checkpoint at STEP/items", found, fix)))


def _what(root: Path) -> str:
    if not root.exists():
        return "nothing there"
    if any(p.name.startswith(".tensorferry-") for p in root.iterdir()):
        return "an unfinished run"
    return "no step"


def read_manifest(item: str) -> Mapping[str, Any]:
    """The manifest of a Tensorferry checkpoint.

    Raises:
      FerryError: there is none, or it cannot be read.
    """
    path = Path(item, MANIFEST_NAME)
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        fix = "Only checkpoints that Tensorferry wrote can be verified against their source."
        raise FerryError(str(Problem(str(path), "the manifest", str(error), fix))) from error
