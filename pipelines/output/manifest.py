"""The manifest: what a checkpoint was made from and how, kept inside it."""

import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from tensorferry.mappings.plan.conversion_plan import Plan
from tensorferry.mappings.plan.groups import Group
from tensorferry.mappings.plan.work import WorkItem
from tensorferry.pipelines.huggingface.checkpoint import Checkpoint
from tensorferry.transforms.digest import combine
from tensorferry.transforms.statistics import Statistics

MANIFEST_FORMAT = 1
_VERSIONS = ("tensorferry", "apache-beam", "tensorstore", "orbax-checkpoint", "numpy", "ml_dtypes")

Receipt = Mapping[str, Any]
Work = TypeVar("Work", bound=WorkItem | Group)


def chunk_receipts(receipts: Iterable[Receipt]) -> dict[tuple[str, tuple[int, ...]], Mapping[str, Any]]:
    """What was written, by array key and grid index."""
    return {(part["array"], tuple(part["grid"])): part for receipt in receipts for part in receipt["parts"]}


def unfinished(items: Iterable[Work], receipts: Mapping[str, Receipt]) -> list[Work]:
    """Work items, or groups of them, without a receipt that tells of exactly their parts."""
    return [item for item in items if not _tells(receipts.get(item.id), item)]


def _tells(receipt: Receipt | None, item: WorkItem | Group) -> bool:
    if receipt is None:
        return False
    told = [(part.get("array"), part.get("grid")) for part in receipt.get("parts", ())]
    return told == [(part.spec.key, list(part.grid)) for part in item.parts]


def make_manifest(
    plan: Plan, checkpoint: Checkpoint, options: Mapping[str, Any], receipts: Mapping[str, Receipt]
) -> dict[str, Any]:
    """The manifest of a finished run; every chunk of every array must have its receipt.

    Raises:
      KeyError: a chunk has none.
    """
    chunks = chunk_receipts(receipts.values())
    return {
        "format": MANIFEST_FORMAT,
        "plan_digest": plan.digest,
        "source": checkpoint.root,
        "source_digest": checkpoint.digest,
        "source_files": {name: vars_of(info) for name, info in checkpoint.files.items()},
        "options": dict(options),
        "family": plan.family.name,
        "notes": list(plan.notes),
        "settings": dict(plan.family.settings),
        "arrays": {array.spec.key: _array(array, chunks) for array in plan.arrays},
        "left_out": dict(plan.account.ignored),
        "versions": versions(),
    }


def vars_of(info: Any) -> dict[str, Any]:
    """A small frozen record as plain data."""
    return {name: getattr(info, name) for name in info.__dataclass_fields__}


def _array(array: Any, chunks: Mapping[tuple[str, tuple[int, ...]], Mapping[str, Any]]) -> dict[str, Any]:
    spec = array.spec
    parts = [chunks[spec.key, index] for index in spec.indices()]
    total = Statistics.from_json(parts[0]["statistics"])
    for part in parts[1:]:
        total = total.merge(Statistics.from_json(part["statistics"]))
    return {
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "chunk": list(spec.chunk),
        "sources": array.sources,
        "ops": array.ops,
        "way": array.way,
        "digest": combine(part["digest"] for part in parts),
        "chunk_digests": [part["digest"] for part in parts],
        "statistics": total.to_json(),
    }


def versions() -> dict[str, str]:
    """Versions of what wrote the checkpoint."""
    found = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
