"""Orbax's own files, written by Orbax: the tree of the item, and the step around it.

Importing orbax and jax takes seconds, so only the functions do it, and only the launcher calls them.
"""

import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.sinks.sink import store_error

# What a save of Orbax leaves in an item; an interrupted commit may have left it before.
_ORBAX_FILES = ("_METADATA", "_sharding", "array_metadatas")


def load_orbax() -> None:
    """Imports what `write_item_metadata` needs, which takes half a second and a core that waiting workers leave."""
    import orbax.checkpoint  # noqa: F401


def tree_of(arrays: Iterable[ArraySpec], leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """The checkpoint's tree as nested dicts: array specs, and extra leaves such as ``step`` and ``opt_state``.

    Raises:
      FerryError: a path is a leaf and a branch at once, or is used twice.
    """
    tree: dict[str, Any] = {}
    for path, leaf in [(spec.path, spec) for spec in arrays] + list(leaves.items()):
        _put(tree, path, leaf)
    return tree


def _put(tree: dict[str, Any], path: tuple[str, ...], leaf: Any) -> None:
    node = tree
    for name in path[:-1]:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            _refuse(path)
    if path[-1] in node:
        _refuse(path)
    node[path[-1]] = leaf


def _refuse(path: tuple[str, ...]) -> None:
    raise FerryError(str(Problem(".".join(path), "a place of its own in the tree", "another leaf there", "")))


def scalar_keys(leaves: Mapping[tuple[str, ...], Any]) -> tuple[str, ...]:
    """Store keys of the extra leaves that Orbax writes as arrays (``step``); an empty dict has none."""
    return tuple(".".join(path) for path, leaf in leaves.items() if not isinstance(leaf, dict))


def write_item_metadata(
    item: Path, arrays: Sequence[ArraySpec], leaves: Mapping[tuple[str, ...], Any], store_format: str
) -> None:
    """Writes ``_METADATA`` and the scalar leaves of an item whose arrays are already there. May be run again.

    Args:
      item: the item's directory.
      arrays: every array of the checkpoint.
      leaves: other leaves by path: ints (``{("step",): 0}``) and empty dicts (``{("opt_state",): {}}``).
      store_format: ``zarr3``, ``ocdbt`` or ``zarr2``.

    Raises:
      FerryError: two leaves share a place in the tree, or Orbax cannot write.
    """
    tree = tree_of(arrays, leaves)
    _forget_earlier(item, scalar_keys(leaves))
    _save(item, tree, store_format)


def write_tree_metadata(item: Path, tree: Any, store_format: str, prng_impls: Mapping[str, str]) -> None:
    """Writes ``_METADATA`` of an item whose arrays are all there already. May be run again.

    Args:
      item: the item's directory.
      tree: dicts and lists down to array specs, None and empty containers.
      store_format: ``zarr3``, ``ocdbt`` or ``zarr2``.
      prng_impls: implementation of each typed PRNG key by array key; its array holds the key's uint32 words.

    Raises:
      FerryError: Orbax cannot write.
    """
    _forget_earlier(item, ())
    _save(item, tree, store_format)
    if prng_impls:
        _mark_keys(item, list(_array_specs(tree)), prng_impls)


def _array_specs(tree: Any) -> Iterable[ArraySpec]:
    if isinstance(tree, ArraySpec):
        yield tree
    elif isinstance(tree, dict | list):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from _array_specs(child)


def _mark_keys(item: Path, arrays: Sequence[ArraySpec], prng_impls: Mapping[str, str]) -> None:
    """Writes the only mark by which Orbax knows a typed key from its words; it lists every array there."""
    entries = [
        {
            "param_name": spec.key,
            "write_shape": list(spec.shape),
            "chunk_shape": list(spec.chunk),
            "ext_metadata": {"random_key_impl": prng_impls[spec.key]} if spec.key in prng_impls else None,
        }
        for spec in arrays
    ]
    path = item / "array_metadatas" / "process_0"
    path.parent.mkdir()
    path.write_text(json.dumps({"array_metadatas": [{"array_metadata": entry} for entry in entries]}))


def _save(item: Path, tree: Any, store_format: str) -> None:
    import orbax.checkpoint as ocp
    from etils import epath
    from orbax.checkpoint import type_handlers

    # The step must be a leaf of Orbax's own scalar type: a 0-d array in its place restores as an array.
    registry = type_handlers.create_type_handler_registry(
        (ArraySpec, _external_handler()), (int, type_handlers.ScalarHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=store_format == "ocdbt", use_zarr3=store_format != "zarr2", type_handler_registry=registry
    )
    try:
        handler.save(epath.Path(item), args=ocp.args.PyTreeSave(tree))  # pyright: ignore[reportCallIssue]
        handler.finalize(epath.Path(item))
    except Exception as error:
        raise store_error(str(item), "Orbax's metadata written", error) from error
    finally:
        handler.close()


def _forget_earlier(item: Path, scalars: Iterable[str]) -> None:
    folders = [item / key for key in scalars] + sorted(item.glob("ocdbt.process_*"))
    for path in [item / name for name in _ORBAX_FILES] + folders:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _external_handler() -> Any:
    """A type handler for arrays that are already in the store: says what they are and writes no data."""
    from orbax.checkpoint import type_handlers

    class ExternalArrayHandler(type_handlers.TypeHandler):
        def typestr(self) -> str:
            # Not jax.Array: leaves of that type cannot be restored without saying a sharding.
            return "np.ndarray"

        async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
            raise NotImplementedError

        async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
            return []

        async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
            raise NotImplementedError

    return ExternalArrayHandler()


def write_step_metadata(
    step: Path,
    item: str,
    custom_metadata: Mapping[str, Any],
    init_timestamp_nsecs: int | None = None,
    other_handlers: Mapping[str, str] | None = None,
) -> None:
    """Writes ``_CHECKPOINT_METADATA``: which handler reads the item, and what MaxText asks of a step.

    Args:
      step: the step's directory.
      item: name of the item, ``items``.
      custom_metadata: JSON values such as ``{"scan_layers": True}``.
      init_timestamp_nsecs: when the conversion began; now when None.
      other_handlers: handler names of items that something else wrote, by item.

    Raises:
      FerryError: Orbax did not write it.
    """
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler
    now = time.time_ns()
    # Blocking: the default store writes in the background and only logs an error.
    store = ocp.metadata.metadata_store(enable_write=True, blocking_write=True)
    path = step / "_CHECKPOINT_METADATA"
    path.unlink(missing_ok=True)
    record = {
        "item_handlers": {**(other_handlers or {}), item: f"{handler.__module__}.{handler.__qualname__}"},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": init_timestamp_nsecs or now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": dict(custom_metadata),
    }
    try:
        store.write(path, record)
    except Exception as error:
        raise store_error(str(path), "Orbax's step metadata written", error) from error
    finally:
        store.close()
    if _custom_metadata(path) != record["custom_metadata"]:
        raise FerryError(str(Problem(str(path), "Orbax's step metadata", "none", "Run the same command again.")))


def _custom_metadata(path: Path) -> Any:
    """The custom metadata that a reader will find, or None."""
    import orbax.checkpoint as ocp

    record = ocp.metadata.metadata_store(enable_write=False).read(path)
    return None if record is None else record.get("custom_metadata")
