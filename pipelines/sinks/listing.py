"""What is in the store against what was planned: the last look before a checkpoint is called complete."""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.words.problems import Problem
from tensorferry.pipelines.sinks.sink import ChunkError
from tensorferry.pipelines.storage.kvstores import is_local

MANIFEST_NAME = "tensorferry.manifest.json"
# What Orbax and we put beside the arrays. A rerun of the commit may find all of it.
NOT_ARRAYS = frozenset(
    {
        "_METADATA",
        "_sharding",
        "array_metadatas",
        "commit_success.txt",
        MANIFEST_NAME,
        "manifest.ocdbt",
        "d",
        "parts",
    }
)
_LOCK_SUFFIX = ".__lock"
_METADATA_NAMES = frozenset({"zarr.json", ".zarray"})
_TOLD = 5


def stored_keys(root: str) -> dict[str, int | None]:
    """Every key below a directory url, with its size in bytes."""
    if is_local(root):
        return _local_keys(root)
    from tensorferry.pipelines.storage.remote_source import BucketSource

    return dict(BucketSource(root).sizes_below())


def _local_keys(root: str) -> dict[str, int | None]:
    sizes: dict[str, int | None] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            sizes[path.relative_to(root).as_posix()] = path.stat().st_size
    return sizes


def clear_stale_locks(root: str) -> None:
    """Removes the half-written files of killed workers: TensorStore writes to ``NAME.__lock`` and renames."""
    for key in _local_keys(root) if is_local(root) else ():
        if key.endswith(_LOCK_SUFFIX):
            Path(root, key).unlink(missing_ok=True)


def remove_torn(root: str, sizes: Mapping[str, int] | None) -> None:
    """Removes local chunk files that do not have the planned size, so that they are written anew."""
    if sizes and is_local(root):
        for key, size in _local_keys(root).items():
            if sizes.get(key, size) != size:
                Path(root, key).unlink()


def compare(
    arrays: Sequence[ArraySpec],
    found: Mapping[str, Any],
    store_format: str,
    scalars: Collection[str] = (),
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Compares the store's keys with every chunk key of every grid.

    Args:
      arrays: every array of the plan.
      found: the store's keys; values are sizes in bytes, or None where unknown.
      store_format: ``zarr3``, ``zarr2`` or ``ocdbt``.
      scalars: keys of leaves that something else writes.
      sizes: exact sizes of chunk objects, where they follow from the plan.

    Raises:
      ChunkError: names array and chunk of what is missing, torn or extra.
    """
    planned = {chunk for array in arrays for chunk in array.chunk_keys(store_format)}
    missing = [chunk for chunk in sorted(planned) if chunk not in found or _is_torn(chunk, found, sizes)]
    passed_over = NOT_ARRAYS | set(scalars)
    metadata = {f"{array.key}/{name}" for array in arrays for name in _METADATA_NAMES}
    extra = sorted(key for key in found if key not in planned and key not in metadata and _head(key) not in passed_over)
    if missing:
        raise ChunkError(_missing_text(missing, found), missing, extra)
    if extra:
        raise ChunkError(_extra_text(extra), missing, extra)


def _is_torn(chunk: str, found: Mapping[str, Any], sizes: Mapping[str, int] | None) -> bool:
    size = found[chunk]
    return bool(sizes) and size is not None and size != sizes.get(chunk, size)


def _head(key: str) -> str:
    head = key.split("/", 1)[0]
    return "parts" if head.startswith("ocdbt.process_") else head


def _missing_text(missing: Sequence[str], found: Mapping[str, Any]) -> str:
    state = f"{found[missing[0]]} bytes, a torn chunk" if missing[0] in found else "no such chunk"
    fix = "The output lost data after it was written; remove the unfinished run and convert again."
    return _text(missing, "a chunk of the planned size", state, fix)


def _extra_text(extra: Sequence[str]) -> str:
    return _text(extra, "only planned chunks", "a chunk that nobody planned", "Remove it and run the command again.")


def _text(keys: Sequence[str], expected: str, found: str, fix: str) -> str:
    array, _, chunk = keys[0].partition("/")
    more = f" (and {len(keys) - 1} more: {', '.join(keys[1:_TOLD])}{', …' * (len(keys) > _TOLD)})" * (len(keys) > 1)
    return str(Problem(f"array {array}, chunk {chunk}", expected, found + more, fix))
