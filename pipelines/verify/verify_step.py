"""Comparing one migrated step with the old one: the trees, every array, and the files that were copied."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from tensorferry.mappings.rules.geometry import Box
from tensorferry.mappings.tunix.step_tree import StepTree
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.orbax.orbax_item import leaf_spec
from tensorferry.pipelines.orbax.orbax_view import OrbaxItem, open_item, read_region
from tensorferry.pipelines.output.small_files import read_small
from tensorferry.pipelines.storage.kvstores import store_words
from tensorferry.pipelines.storage.tree_store import open_tree
from tensorferry.pipelines.verify.compare_arrays import Compared, compare_array
from tensorferry.pipelines.verify.difference import Difference

_AT_ONCE = 4
_SHOWN = 4
_ARRAYS = ("np.ndarray", "jax.Array", "scalar")
# Pre-training counts its steps in int32, post-training in uint32.
STEP_DTYPE = np.dtype(np.int32)


def compare_step(
    source: str, step_url: str, path: str, tree: StepTree, manifest: Mapping[str, Any], sample: float
) -> Compared:
    """Compares all of one step; a few blocks of `compare.BLOCK_BYTES`, or single chunks, are held at once.

    Args:
      source: url of the tree of old runs.
      step_url: the new step.
      path: of the step, below the source and in differences.
      tree: the old step's metadata.
      manifest: of the new step; it tells which array came from where.
      sample: share of the blocks of each array.
    """
    try:
        item = open_item(f"{step_url}/items")
        stored = _stored_names(item.path)
    except (FerryError, ValueError, KeyError) as error:
        return Compared(differences=(Difference(path, "items", "a tree that Orbax can read", str(error)),))
    arrays = manifest["arrays"]
    found = [*_origin(path, tree, manifest), *_names(path, arrays, stored), *_accounts(path, tree, manifest)]
    found += _files(source, step_url, path, manifest)
    keys = sorted(arrays.keys() & stored)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        parts = pool.map(lambda key: _compare(source, item, path, key, arrays[key], tree, sample), keys)
        total = sum(parts, Compared(differences=tuple(found)))
    # Against another step everything differs: a few are enough to tell.
    is_other = tree.fingerprint != manifest["source_fingerprint"]
    return replace(total, differences=total.differences[:_SHOWN]) if is_other else total


def _stored_names(item: str) -> set[str]:
    """Arrays of an item, by Orbax's own metadata of its tree."""
    entries = json.loads(read_small(item, "_METADATA") or b"")["tree_metadata"].values()
    return {
        ".".join(str(key["key"]) for key in entry["key_metadata"])
        for entry in entries
        if entry["value_metadata"]["value_type"] in _ARRAYS
    }


def _origin(path: str, tree: StepTree, manifest: Mapping[str, Any]) -> Iterator[Difference]:
    told = manifest["source_fingerprint"]
    if told != tree.fingerprint:
        found = f"{tree.fingerprint[:16]}…: not the step that was migrated, or its files have changed"
        yield Difference(path, "source", f"files {told[:16]}…, as migrated", found)
    content = manifest.get("source_content", "")
    if told == tree.fingerprint and content and tree.content and content != tree.content:
        found = "other bytes under the same names: its files have changed"
        yield Difference(path, "source", "files as migrated", found)


def _names(path: str, arrays: Mapping[str, Any], stored: set[str]) -> Iterator[Difference]:
    for key in sorted(arrays.keys() - stored):
        yield Difference(f"{path} {key}", "", "an array", "no such array in Orbax's metadata")
    for key in sorted(stored - arrays.keys()):
        yield Difference(f"{path} {key}", "", "no such array", "one in Orbax's metadata")


def _accounts(path: str, tree: StepTree, manifest: Mapping[str, Any]) -> Iterator[Difference]:
    """Arrays of the old step that are neither in the new one nor told to be left out."""
    used = {array["source"] for array in manifest["arrays"].values()}
    dropped = {gone["name"] for gone in manifest["dropped"]}
    for leaf in tree.leaves():
        name = f"{leaf.item}/{leaf.array_name}"
        if leaf.kind == "array" and name not in used and str(leaf) not in dropped:
            yield Difference(f"{path} {name}", "", "an array of the new step, or a reason against it", "neither")


def _files(source: str, step_url: str, path: str, manifest: Mapping[str, Any]) -> Iterator[Difference]:
    """Items that are copied as files."""
    old, new = open_tree(source), open_tree(step_url)
    for item in manifest["copied_items"]:
        try:
            sizes = old.sizes(f"{path}/{item}")
            for name in sizes:
                if old.read(f"{path}/{item}/{name}") != new.read(f"{item}/{name}"):
                    yield Difference(path, f"{item}/{name}", "the bytes of the old file", "other bytes")
        except OSError as error:
            yield Difference(path, item, "files as in the old step", str(error.strerror or error))


def _compare(
    source: str, item: OrbaxItem, path: str, key: str, told: Mapping[str, Any], tree: StepTree, sample: float
) -> Compared:
    name = f"{path} {key}"
    try:
        target = item.open(key, zeros_for_missing=False)
    except FerryError as error:
        return Compared(1, differences=(Difference(name, "", "an array", str(error)),))
    if not isinstance(told["source"], str):
        constant = np.asarray(told["source"], told["dtype"])
        return _of_shape(name, target, constant.shape) or compare_array(
            name, target, lambda _: constant, constant.dtype
        )
    try:
        old = _open_old(source, path, told["source"], tree)
    except Exception as error:
        # TensorStore has no error class of its own that covers all of these.
        return Compared(1, differences=(Difference(name, "", f"{told['source']} in the source", store_words(error)),))

    dtype = STEP_DTYPE if key == "step" and old.dtype.numpy_dtype.kind in "iu" else old.dtype.numpy_dtype

    def wanted(box: Box) -> np.ndarray:
        return read_region(old, f"{path}/{told['source']}", box).astype(dtype, copy=False)

    return _of_shape(name, target, tuple(old.shape)) or compare_array(name, target, wanted, dtype, sample)


def _of_shape(name: str, target: Any, shape: tuple[int, ...]) -> Compared | None:
    found = tuple(target.shape)
    return None if found == shape else Compared(1, differences=(Difference(name, "shape", str(shape), str(found)),))


def _open_old(source: str, path: str, name: str, tree: StepTree) -> Any:
    import tensorstore as ts

    item, _, array = name.partition("/")
    stored = tree.items[item]
    url = open_tree(source).kvstore_url(f"{path}/{item}" if path else item)
    return ts.open(leaf_spec(url, stored.use_ocdbt, stored.use_zarr3, array), read=True).result()
