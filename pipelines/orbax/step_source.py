"""Reads one step: its trees with true shapes and dtypes, and whether all its bytes are there. No array is read."""

import hashlib
import json
from dataclasses import replace
from typing import Any

from tensorferry.mappings.tunix.model_check import ModelTree
from tensorferry.mappings.tunix.step_tree import MODEL_ITEM, OPTIMIZER_ITEM, ItemTree, Leaf, StepTree
from tensorferry.mappings.words.problems import FerryError, PlanError, Problem
from tensorferry.pipelines.orbax.orbax_item import ItemReader, leaf_spec
from tensorferry.pipelines.orbax.step_discovery import NEW_ITEM, STEP_METADATA, TREE_METADATA, FoundStep
from tensorferry.pipelines.storage.byte_source import SourceError
from tensorferry.pipelines.storage.tree_store import TreeStore, open_tree

_GRAIN_ITEM = "iter"
_TEMPORARY_MARK = ".orbax-checkpoint-tmp"
# The counters of which the plan tells the value; everything else stays unread.
_COUNTERS = frozenset({"mini_step", "gradient_step", "step"})


def read_step(store: TreeStore, found: FoundStep) -> StepTree:
    """Reads the metadata of a step and checks that the files it points at are there and long enough.

    Args:
      store: the tree in which the step was found.
      found: a step with status ``old``.

    Raises:
      PlanError: the step is damaged; every damage of every item is listed.
    """
    try:
        return _StepReader(store, found).read()
    except OSError as error:
        raise PlanError([_unreadable(found.path, error)]) from error


def read_template(url: str) -> ModelTree:
    """The model that a checkpoint in the new layout holds: names, true shapes, and its optimizer's shape.

    Args:
      url: a step, its ``items`` folder, or a checkpoint without items.

    Raises:
      FerryError: there is no checkpoint in the new layout.
      PlanError: its metadata is damaged.
    """
    store = open_tree(url)
    try:
        listed = store.list("")
        folder = "" if TREE_METADATA in listed.files else NEW_ITEM
        if folder and NEW_ITEM not in listed.folders:
            raise FerryError(f"{url}: expected a MaxText checkpoint with {NEW_ITEM}/ for the template; found none.")
        item, problems = ItemReader(store, folder, NEW_ITEM, check_files=False).read()
    except OSError as error:
        raise FerryError(f"{url}: expected a MaxText checkpoint for the template; found {error}.") from error
    if problems:
        raise PlanError(problems)
    return ModelTree.from_template(item.leaves, f"the template {url}")


class _StepReader:
    def __init__(self, store: TreeStore, found: FoundStep) -> None:
        self.store, self.found = store, found
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.digest = hashlib.sha256()

    def read(self) -> StepTree:
        listed = self.store.list(self.found.path)
        raw = self.store.read(f"{self.found.path}/{STEP_METADATA}") if STEP_METADATA in listed.files else b""
        self.digest.update(raw)
        items = {name: item for name in listed.folders if (item := self.item(name))}
        if self.problems:
            raise PlanError(self.problems)
        return StepTree(
            step=self.found.step,
            items=items,
            copied_items=(_GRAIN_ITEM,) if _GRAIN_ITEM in listed.folders else (),
            custom_metadata=self.custom_metadata(raw),
            warnings=tuple(self.warnings),
            fingerprint=self.digest.hexdigest(),
            content=self.content(),
        )

    def content(self) -> str:
        etags = self.store.etags(self.found.path)
        return hashlib.sha256(json.dumps(sorted(etags.items())).encode()).hexdigest() if etags else ""

    def item(self, name: str) -> ItemTree | None:
        if name == NEW_ITEM or _TEMPORARY_MARK in name:
            return None
        folder = f"{self.found.path}/{name}"
        self.fingerprint(folder)
        if TREE_METADATA not in self.store.list(folder).files:
            return self.not_a_tree(name)
        item, problems = ItemReader(self.store, folder, name, _COUNTERS if name == OPTIMIZER_ITEM else ()).read()
        if problems and name not in (MODEL_ITEM, OPTIMIZER_ITEM):
            self.warnings.append(f"item {name} cannot be read, and is not carried over: {problems[0]}")
            return replace(item, leaves=())
        self.problems += problems
        return item

    def not_a_tree(self, name: str) -> None:
        if name in (MODEL_ITEM, OPTIMIZER_ITEM):
            fix = "The save did not finish, or files were lost."
            self.problems.append(Problem(name, TREE_METADATA, "no such file", fix, self.found.path))
        elif name != _GRAIN_ITEM:
            self.warnings.append(f"folder {name} is not carried over")

    def fingerprint(self, folder: str) -> None:
        sizes = self.store.sizes(folder)
        self.digest.update(json.dumps([folder.rpartition("/")[2], sorted(sizes.items())]).encode())
        for file in (TREE_METADATA, "manifest.ocdbt"):
            self.digest.update(self.store.read(f"{folder}/{file}") if file in sizes else b"")

    def custom_metadata(self, raw: bytes) -> dict[str, Any]:
        """The step's custom metadata, or else the item's: older writers kept it there."""
        sources = [raw] if raw else []
        for file in (STEP_METADATA, TREE_METADATA):
            try:
                sources.append(self.store.read(f"{self.found.path}/{MODEL_ITEM}/{file}"))
            except FileNotFoundError:
                continue
        return next((custom for source in sources if (custom := _custom(source))), {})


def _custom(raw: bytes) -> dict[str, Any]:
    try:
        metadata = json.loads(raw)
    except ValueError:
        return {}
    custom = metadata.get("custom_metadata") if isinstance(metadata, dict) else None
    return custom if isinstance(custom, dict) else {}


def array_spec(store: TreeStore, step_path: str, item: ItemTree, leaf: Leaf) -> dict[str, Any]:
    """The TensorStore spec that opens a leaf's array for reading.

    Args:
      store: the tree in which the step was found.
      step_path: path of the step, relative to the store's root.
      item: the item that holds the leaf.
      leaf: a leaf of kind ``array``.
    """
    url = store.kvstore_url(f"{step_path}/{item.name}" if step_path else item.name)
    return leaf_spec(url, item.use_ocdbt, item.use_zarr3, leaf.array_name)


def _unreadable(path: str, error: OSError) -> Problem:
    if isinstance(error.__cause__, SourceError):
        return error.__cause__.problem
    denied = isinstance(error, PermissionError)
    fix = "Give the account that runs this the right to read it." if denied else "Check the store."
    found = "permission denied" if denied else str(error.strerror or error)
    return Problem(path, "a readable step", found, fix)
