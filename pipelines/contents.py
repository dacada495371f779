"""What a checkpoint holds, Hugging Face or Orbax, from headers and metadata only."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mappings.problems import PlanError
from mappings.tensors import LogicalTensor
from pipelines.checkpoint import open_checkpoint
from pipelines.low_bit import understand
from transforms.dtypes import stored_bytes


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
    return _orbax(item) if item else _hugging_face(path)


def _orbax_item(path: str) -> str:
    """The Orbax item that a path or a bucket's url means, or empty."""
    if "://" in path and not path.startswith("gs://"):
        return ""
    from mappings.problems import FerryError
    from pipelines.orbax_view import find_item

    try:
        return find_item(path)
    except FerryError:
        return ""


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
    from pipelines.orbax_item import ItemReader
    from pipelines.tunix_store import open_tree

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
    from pipelines.tunix_store import open_tree

    try:
        return json.loads(open_tree(item.rstrip("/").rpartition("/")[0]).read("_CHECKPOINT_METADATA"))[
            "custom_metadata"
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def total_bytes(entries: Sequence[Entry]) -> int:
    """Bytes of all entries."""
    return sum(entry.nbytes for entry in entries)
