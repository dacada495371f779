"""The Orbax checkpoint that is exported: found, its parameters named, nothing of its weights read."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tensorferry.mappings.export.export_grid import Chunk
from tensorferry.mappings.export.parameter_tree import Parameters, find_parameters, with_collections
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.tunix.step_tree import Leaf
from tensorferry.mappings.words.problems import FerryError, PlanError, Problem
from tensorferry.pipelines.orbax.orbax_item import ItemReader
from tensorferry.pipelines.orbax.orbax_view import OrbaxItem
from tensorferry.pipelines.sinks.listing import MANIFEST_NAME
from tensorferry.pipelines.storage.tree_store import Listed, TreeStore, open_tree
from tensorferry.transforms.dtypes import NAME_TO_SAFETENSORS

FindParameters = Callable[[Iterable[Leaf], str], Parameters]
_TREE = "_METADATA"
_STEP = "_CHECKPOINT_METADATA"
_COMMITTED = "commit_success.txt"
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
      step: which step it is, when that was chosen in a folder of steps.
      notes: what to say of that choice.
    """

    item: OrbaxItem
    parameters: Parameters
    custom: Mapping[str, Any]
    manifest: Mapping[str, Any]
    digest: str
    step: int | None = None
    notes: tuple[str, ...] = ()

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


def open_export_source(url: str, find: FindParameters = find_parameters, step: int | None = None) -> ExportSource:
    """Opens the checkpoint at a path or URL: a folder of steps, a step, or an item.

    Args:
      url: where it lies.
      find: finds what is exported among the leaves of the item.
      step: which step of a folder of steps; None takes the latest that is committed.

    Raises:
      FerryError: there is no checkpoint, or not that step.
      PlanError: it is damaged, or holds no parameters.
    """
    scheme = url.partition("://")[0].lower()
    if scheme in ("hf", "http", "https"):
        fix = "Copy the checkpoint to one of those."
        raise FerryError(str(Problem(url, "a local path or gs:// for an export's source", f"{scheme}://", fix)))
    store = open_tree(url)
    try:
        folder, notes = _find(store, url, step)
        source = _open(store, folder, find)
    except FileNotFoundError as error:
        raise FerryError(str(Problem(url, "an Orbax checkpoint", "nothing there", "Is the path right?"))) from error
    except OSError as error:
        found = error.strerror or str(error)
        raise FerryError(str(Problem(url, "an Orbax checkpoint that can be read", found, "Check access."))) from error
    top = folder.partition("/")[0]
    return replace(source, notes=notes, step=int(top) if top.isdecimal() else None)


def _find(store: TreeStore, url: str, step: int | None) -> tuple[str, tuple[str, ...]]:
    """The folder of the item, relative to the store's root, and what to say of the choice."""
    listed = store.list("")
    item = _item_in(store, "", listed)
    if item is not None:
        _refuse_another(url, step)
        return item, ()
    steps = sorted((name for name in listed.folders if name.isdecimal()), key=int, reverse=True)
    for number, name in enumerate(steps):
        found = _committed(store, name) if step in (None, int(name)) else None
        if found is not None:
            return found, tuple(_chosen(name, steps, steps[:number] if step is None else ()))
    committed = [name for name in steps if _committed(store, name) is not None]
    raise FerryError(str(_nothing(url, listed, committed, step)))


def _item_in(store: TreeStore, folder: str, listed: Listed) -> str | None:
    """The item that a folder is or has."""
    if _TREE in listed.files:
        return folder
    items = (_below(folder, name) for name in _ITEMS if name in listed.folders)
    return next((item for item in items if _is_item(store, item)), None)


def _committed(store: TreeStore, step: str) -> str | None:
    """The item of a step; None when it is not committed, or has none."""
    listed = store.list(step)
    if store.needs_commit_file and _COMMITTED not in listed.files:
        return None
    return _item_in(store, step, listed)


def _chosen(chosen: str, steps: Sequence[str], passed: Sequence[str]) -> Iterator[str]:
    if len(steps) > 1:
        yield f"step {chosen} of {len(steps):,} steps" + (
            "" if passed else ", the latest" if chosen == steps[0] else ""
        )
    if passed:
        shown = ", ".join(passed[:_LISTED])
        yield f"not committed, or without weights, and passed over: step {shown}"


def _refuse_another(url: str, step: int | None) -> None:
    """Refuses ``--step`` beside the path of another step."""
    named = [int(name) for name in url.rstrip("/").split("/")[-2:] if name.isdecimal()]
    if step is not None and named and named[-1] != step:
        fix = "Give the folder of the steps, or leave --step out."
        raise FerryError(str(Problem(url, f"a folder with step {step} (--step)", f"step {named[-1]}", fix)))


def _is_item(store: TreeStore, folder: str) -> bool:
    return _TREE in store.list(folder).files


def _below(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _nothing(url: str, listed: Listed, steps: Sequence[str], step: int | None) -> Problem:
    expected = "an Orbax checkpoint: a step, or an item with _METADATA"
    if step is not None:
        shown = ", ".join(steps[:_LISTED]) or "none"
        fix = "Name one of those."
        return Problem(url, f"a committed step {step} (--step)", f"committed steps: {shown}", fix)
    names = [*(f"{name}/" for name in listed.folders), *listed.files]
    found = ", ".join(names[:_LISTED]) or "an empty folder"
    if any(name.endswith(".safetensors") for name in names):
        return Problem(url, expected, f"a Hugging Face checkpoint: {found}", "Convert it with tensorferry convert.")
    return Problem(url, expected, found, "Give the folder of the steps, of one, or of its item.")


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
