"""The Orbax checkpoint that is exported: found, its parameters named, nothing of its weights read."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mappings.export.grid import Chunk
from mappings.export.tree import Parameters, find_parameters, with_collections
from mappings.problems import FerryError, PlanError, Problem
from mappings.tensors import LogicalTensor, StoredTensor
from mappings.tunix.tree import Leaf
from pipelines.orbax_item import ItemReader
from pipelines.orbax_view import OrbaxItem
from pipelines.sinks.listing import MANIFEST_NAME
from pipelines.tunix_store import Listed, TreeStore, open_tree
from transforms.dtypes import NAME_TO_SAFETENSORS

FindParameters = Callable[[Iterable[Leaf], str], Parameters]
_TREE = "_METADATA"
_STEP = "_CHECKPOINT_METADATA"
_ITEMS = ("items", "model_params", "default", "params", "state", "pytree", "model")
_LISTED = 8


@dataclass(frozen=True)
class ExportSource:
    """Parameters in an Orbax item.

    Attributes:
      item: the item, for opening its arrays.
      parameters: its arrays by MaxText's names, and what is left out.
      custom: custom metadata of the step.
      manifest: Tensorferry's manifest, when it wrote the checkpoint; empty otherwise.
      digest: SHA-256 (hex) of the tree's metadata, and of its files' names and sizes.
    """

    item: OrbaxItem
    parameters: Parameters
    custom: Mapping[str, Any]
    manifest: Mapping[str, Any]
    digest: str

    @property
    def tensors(self) -> dict[str, LogicalTensor]:
        """The arrays as mappings see them; ``file`` is the array's key in the item."""
        return {
            name: LogicalTensor.plain(StoredTensor(name, leaf.dtype, leaf.shape, leaf.array_name, 0))
            for name, leaf in self.parameters.arrays.items()
        }

    @property
    def chunks(self) -> dict[str, Chunk]:
        """What is read of each array in one go: inner chunks where chunks are sharded."""
        return {name: read_chunk(leaf) for name, leaf in self.parameters.arrays.items()}

    def renamed(self, expected: Collection[str]) -> "ExportSource":
        """The same source with its arrays in the collections where a family has them."""
        arrays = with_collections(self.parameters.arrays, expected)
        return replace(self, parameters=replace(self.parameters, arrays=arrays))


def open_export_source(url: str, find: FindParameters = find_parameters) -> ExportSource:
    """Opens the checkpoint at a path or URL: a folder of steps with one step, a step, or an item.

    Args:
      url: where it lies.
      find: finds what is exported among the leaves of the item.

    Raises:
      FerryError: there is no checkpoint, or there are several steps.
      PlanError: it is damaged, or holds no parameters.
    """
    store = open_tree(url)
    try:
        folder = _find(store, "", url)
        return _open(store, folder, find)
    except FileNotFoundError as error:
        raise FerryError(str(Problem(url, "an Orbax checkpoint", "nothing there", "Is the path right?"))) from error
    except OSError as error:
        found = error.strerror or str(error)
        raise FerryError(str(Problem(url, "an Orbax checkpoint that can be read", found, "Check access."))) from error


def _find(store: TreeStore, folder: str, url: str) -> str:
    """The folder of the item, relative to the store's root."""
    listed = store.list(folder)
    if _TREE in listed.files:
        return folder
    item = next((name for name in _ITEMS if name in listed.folders and _is_item(store, _below(folder, name))), None)
    if item:
        return _below(folder, item)
    steps = [name for name in listed.folders if name.isdecimal()]
    if len(steps) == 1 and not folder:
        return _find(store, steps[0], url)
    raise FerryError(str(_nothing(url, listed, steps)))


def _is_item(store: TreeStore, folder: str) -> bool:
    return _TREE in store.list(folder).files


def _below(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _nothing(url: str, listed: Listed, steps: list[str]) -> Problem:
    expected = "an Orbax checkpoint: a step, or an item with _METADATA"
    if len(steps) > 1:
        shown = ", ".join(sorted(steps, key=int)[-_LISTED:])
        return Problem(url, expected, f"{len(steps):,} steps (… {shown})", f"Name one: {url.rstrip('/')}/{steps[-1]}")
    names = [*(f"{name}/" for name in listed.folders), *listed.files]
    found = ", ".join(names[:_LISTED]) or "an empty folder"
    if any(name.endswith(".safetensors") for name in names):
        return Problem(url, expected, f"a Hugging Face checkpoint: {found}", "Convert it with tensorferry convert.")
    return Problem(url, expected, found, "Give the folder of the step or of its item.")


def _open(store: TreeStore, folder: str, find: FindParameters) -> ExportSource:
    name = folder.rpartition("/")[2] or store.url.rstrip("/").rpartition("/")[2]
    reader = ItemReader(store, folder, name)
    tree, problems = reader.read()
    if problems:
        raise PlanError(problems)
    parameters = find(tree.leaves, name)
    problems = [*parameters.problems, *_unreadable(parameters.arrays)]
    if problems:
        raise PlanError(problems)
    path = store.url if not folder else f"{store.url.rstrip('/')}/{folder}"
    item = OrbaxItem(path, tree.use_ocdbt, tree.use_zarr3)
    manifest = _json(store, _below(folder, MANIFEST_NAME))
    return ExportSource(item, parameters, _custom(store, folder), manifest, _digest(store, folder, tree.leaves))


def _unreadable(arrays: Mapping[str, Leaf]) -> list[Problem]:
    fix = "Tensorferry cannot export this array."
    return [
        Problem(name, "an array of a dtype that safetensors has", leaf.dtype or leaf.kind, fix)
        for name, leaf in arrays.items()
        if leaf.kind != "array" or leaf.dtype not in NAME_TO_SAFETENSORS
    ]


def _digest(store: TreeStore, folder: str, leaves: tuple[Leaf, ...]) -> str:
    arrays = [[leaf.array_name, leaf.dtype, leaf.shape, leaf.chunk_shape] for leaf in leaves]
    text = json.dumps([arrays, sorted(store.sizes(folder).items())])
    return hashlib.sha256(text.encode()).hexdigest()


def _json(store: TreeStore, path: str) -> dict[str, Any]:
    try:
        data = json.loads(store.read(path))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _custom(store: TreeStore, folder: str) -> dict[str, Any]:
    """Custom metadata of the step around the item, or of the item itself: older writers kept it there."""
    step = folder.rpartition("/")[0] if folder else ""
    places = [_below(step, _STEP), _below(folder, _STEP), _below(folder, _TREE)]
    if not folder:
        parent, _, item = store.url.rstrip("/").rpartition("/")
        if item in _ITEMS:
            outer = _json(open_tree(parent), _STEP).get("custom_metadata")
            if isinstance(outer, dict) and outer:
                return outer
    found = (_json(store, place).get("custom_metadata") for place in places)
    return next((one for one in found if isinstance(one, dict) and one), {})


def read_chunk(leaf: Leaf) -> Chunk:
    """The shape of the smallest piece that can be read of an array."""
    codecs = json.loads(leaf.codecs) if leaf.codecs else []
    inner = next((c["configuration"]["chunk_shape"] for c in codecs if c.get("name") == "sharding_indexed"), None)
    chunk = tuple(inner or leaf.chunk_shape or leaf.shape)
    return tuple(min(piece, length) for piece, length in zip(chunk, leaf.shape, strict=True))
