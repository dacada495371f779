"""A published checkpoint as stock Orbax and TensorStore see it; knows nothing of how it was written."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.sinks.listing import MANIFEST_NAME
from tensorferry.pipelines.storage.byte_source import MissingFileError, SourceError, open_source
from tensorferry.pipelines.storage.kvstores import below, is_local, kvstore, new_context, store_words

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
            found = store_words(error)
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
        found = store_words(error)
        raise FerryError(str(Problem(f"{key} {list(box)}", "readable chunks", found, "Convert it again."))) from error


def open_item(path: str) -> OrbaxItem:
    """Opens an item by its ``_METADATA``.

    Raises:
      FerryError: there is none.
    """
    data = _json(path, "_METADATA", "an Orbax item with _METADATA", "Is the path right?")
    return OrbaxItem(path, bool(data.get("use_ocdbt")), bool(data.get("use_zarr3")))


def find_item(output: str) -> str:
    """The item's directory below what the user gave: the output, a step, or the item itself.

    Raises:
      FerryError: there is no committed checkpoint, or several steps.
    """
    root = output.rstrip("/")
    files, folders = _look(root)
    if "_METADATA" in files:
        return output if is_local(output) else root
    if "items" in folders and "_METADATA" in _look(f"{root}/items")[0]:
        return f"{root}/items"
    steps = [name for name in folders if name.isdecimal()]
    whole = [step for step in steps if _is_whole(f"{root}/{step}")]
    if len(whole) == 1:
        return f"{root}/{whole[0]}/items"
    found = f"steps {', '.join(whole)}" if whole else _what(files, folders)
    fix = "Name one step." if whole else "Run convert first, or give the path of the step."
    raise FerryError(str(Problem(output, "a committed checkpoint at STEP/items", found, fix)))


def _look(folder: str) -> tuple[Collection[str], Collection[str]]:
    """Names of files and folders directly in a folder, wherever it is; none when it is not there."""
    if folder.lower().startswith(("hf://", "http://", "https://")):
        return _look_far(folder)
    source = open_source(folder)
    try:
        return source.list().keys(), source.folders()
    except MissingFileError:
        return (), ()


def _look_far(folder: str) -> tuple[Collection[str], Collection[str]]:
    """The same on the hub, where a repository has folders, or on a web server, which may not list."""
    from tensorferry.pipelines.storage.tree_store import open_tree

    try:
        listed = open_tree(folder).list("")
    except OSError:
        return (), ()
    return listed.files, listed.folders


def _is_whole(step: str) -> bool:
    """Whether a step is committed: on a bucket only its mark tells."""
    marked = not step.startswith("gs://") or "commit_success.txt" in _look(step)[0]
    return marked and "_METADATA" in _look(f"{step}/items")[0]


def _what(files: Collection[str], folders: Collection[str]) -> str:
    if not files and not folders:
        return "nothing there"
    if any(name.startswith(".tensorferry-") for name in folders):
        return "an unfinished run"
    return "no step"


def read_manifest(item: str) -> Mapping[str, Any]:
    """The manifest of a Tensorferry checkpoint.

    Raises:
      FerryError: there is none, or it cannot be read.
    """
    fix = "Only checkpoints that Tensorferry wrote can be verified against their source."
    return _json(item, MANIFEST_NAME, "the manifest", fix)


def _json(folder: str, name: str, expected: str, fix: str) -> dict[str, Any]:
    source = open_source(folder)
    try:
        return json.loads(source.read(name, 0, source.size(name)))
    except SourceError as error:
        raise FerryError(str(Problem(f"{folder}/{name}", expected, error.problem.found, fix))) from error
    except ValueError as error:
        raise FerryError(str(Problem(f"{folder}/{name}", expected, str(error), fix))) from error
