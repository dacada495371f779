"""What a checkpoint holds, Hugging Face or Orbax, from headers and metadata only."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorferry.mappings.lowbit.tensors import LogicalTensor
from tensorferry.mappings.words.problems import FerryError, PlanError, Problem
from tensorferry.pipelines.huggingface.checkpoint import open_checkpoint
from tensorferry.pipelines.huggingface.low_bit_tensors import understand
from tensorferry.transforms.dtypes import stored_bytes

_SHOWN = 8
# hf://org/name
_SLASHES_OF_REPOSITORY = 3


@dataclass(frozen=True)
class Entry:
    """One tensor or array.

    Attributes:
      name: its name.
      shape: logical shape.
      dtype: dtype of the stored values.
      nbytes: bytes stored for it, companions included.
      scheme: ``plain``, or the quantisation scheme and what belongs to it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    scheme: str = "plain"


@dataclass(frozen=True)
class Contents:
    """A checkpoint's inventory.

    Attributes:
      kind: ``Hugging Face`` or ``Orbax``.
      facts: lines that describe the whole.
      entries: tensors or arrays by name.
      notes: what is odd: left-out tensors, problems.
    """

    kind: str
    facts: tuple[str, ...]
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = field(default=())


def contents_of(path: str) -> Contents:
    """The inventory of a checkpoint.

    Raises:
      PlanError: it is neither kind of checkpoint, or a damaged one.
    """
    item = _orbax_item(path)
    if item:
        return _orbax(item)
    _refuse_runs(path)
    return _hugging_face(path)


def _orbax_item(path: str) -> str:
    """The Orbax item that a path or a url means, or empty."""
    from tensorferry.pipelines.orbax.orbax_view import find_item

    try:
        return find_item(path)
    except FerryError:
        return ""


def _refuse_runs(path: str) -> None:
    """Says of a step of several items, and of a folder of runs in a repository, what to give instead.

    Raises:
      FerryError: it is one of those.
    """
    from tensorferry.mappings.tunix.step_tree import MODEL_ITEM
    from tensorferry.pipelines.storage.tree_store import open_tree

    try:
        listed = open_tree(path).list("")
    except OSError:
        return
    if MODEL_ITEM in listed.folders:
        others = " and ".join(name for name in listed.folders)
        raise FerryError(f"{path} is a step with {others}: give one of them, such as {path.rstrip('/')}/{MODEL_ITEM}.")
    if path.startswith("hf://") and "config.json" not in listed.files and path.count("/") > _SLASHES_OF_REPOSITORY:
        found = ", ".join((*(f"{name}/" for name in listed.folders), *listed.files)[:_SHOWN])
        fix = "Give the folder of an item; of a folder of runs `tensorferry migrate --dry-run` tells."
        raise FerryError(str(Problem(path, "an Orbax item with _METADATA", found, fix)))


def _hugging_face(path: str) -> Contents:
    checkpoint = open_checkpoint(path)
    found = understand(checkpoint)
    summary: dict[str, Any] = found.summary
    facts = [
        f"model_type {checkpoint.config.get('model_type')}, architectures {checkpoint.config.get('architectures')}",
        f"{len(checkpoint.tensors):,} stored tensors in {len(checkpoint.files):,} files",
        "quantisation: " + ", ".join(f"{name} {count:,}" for name, count in summary["schemes"].items()),
    ]
    if summary.get("method"):
        facts.append(f"config says: {summary['method']} (in {summary['config']})")
    notes = [f"left out: {reason}: {count:,}" for reason, count in summary["ignored"].items()]
    notes += [f"not in the index: {name}" for name in checkpoint.unindexed]
    notes += [f"problem: {problem}" for problem in found.problems]
    return Contents("Hugging Face", tuple(facts), tuple(map(_entry, found.logical.values())), tuple(notes))


def _entry(tensor: LogicalTensor) -> Entry:
    if tensor.scheme == "plain":
        return Entry(tensor.name, tensor.shape, tensor.dtype, tensor.nbytes)
    values, *others = tensor.stored.items()
    companions = ", ".join(f"{role} {one.dtype}{list(one.shape)}" for role, one in others)
    return Entry(tensor.name, tensor.shape, values[1].dtype, tensor.nbytes, f"{tensor.scheme} ({companions})")


def _orbax(item: str) -> Contents:
    from tensorferry.pipelines.orbax.orbax_item import ItemReader
    from tensorferry.pipelines.storage.tree_store import open_tree

    reader = ItemReader(open_tree(item), "", Path(item).name)
    tree, problems = reader.read()
    if problems:
        raise PlanError(problems)
    form = "ocdbt" if tree.use_ocdbt else ("zarr3" if tree.use_zarr3 else "zarr2")
    facts = [f"item {item}", f"format {form}", f"custom metadata {json.dumps(_custom(item))}"]
    arrays = [leaf for leaf in tree.leaves if leaf.kind == "array"]
    entries = [Entry(leaf.array_name, leaf.shape, leaf.dtype, stored_bytes(leaf.dtype, leaf.shape)) for leaf in arrays]
    others = [f"{leaf.array_name}: {leaf.kind}" for leaf in tree.leaves if leaf.kind != "array"]
    return Contents("Orbax", tuple(facts), tuple(entries), tuple(others))


def _custom(item: str) -> Any:
    """Custom metadata of the step around an item."""
    from tensorferry.pipelines.storage.tree_store import open_tree

    try:
        return json.loads(open_tree(item.rstrip("/").rpartition("/")[0]).read("_CHECKPOINT_METADATA"))[
            "custom_metadata"
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def total_bytes(entries: Sequence[Entry]) -> int:
    """Bytes of all entries."""
    return sum(entry.nbytes for entry in entries)
