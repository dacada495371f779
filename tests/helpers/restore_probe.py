"""Restores a checkpoint through every reader of the Orbax at hand and compares bits. Knows nothing of our code.

Run as ``python restore_probe.py EXPECTED OUTPUT...``; prints one line for each output and reader.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # registers the dtypes' names
import numpy as np
import orbax.checkpoint as ocp

try:
    from orbax.checkpoint import v1
except ImportError:
    from orbax.checkpoint.experimental import v1

Tree = dict[str, Any]


def load_expected(folder: Path) -> Tree:
    index = json.loads((folder / "index.json").read_text())
    tree: Tree = {"step": 0, "opt_state": {}}
    for key, entry in index.items():
        dtype = np.dtype(getattr(ml_dtypes, entry["dtype"], entry["dtype"]))
        node, names = tree, key.split(".")
        for name in names[:-1]:
            node = node.setdefault(name, {})
        node[names[-1]] = np.frombuffer((folder / key).read_bytes(), dtype).reshape(entry["shape"])
    return tree


def sharding_of(shape: tuple[int, ...]) -> jax.sharding.Sharding:
    """Over all devices along the first axis that they divide, else on every device."""
    count = jax.device_count()
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    axis = next((axis for axis, length in enumerate(shape) if length % count == 0), None)
    spec = jax.sharding.PartitionSpec(*("x" if at == axis else None for at in range(len(shape))))
    return jax.sharding.NamedSharding(mesh, spec)


def abstract_of(tree: Tree) -> Tree:
    def abstract(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(leaf.shape))
        return leaf

    return jax.tree.map(abstract, tree)


def compare(found: Tree, expected: Tree, sharded: bool) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected), jax.tree.structure(found)
    leaves = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, leaf), value in leaves:
        name = jax.tree_util.keystr(path)
        if not isinstance(value, np.ndarray):
            assert leaf == value, (name, leaf)
            continue
        assert (leaf.dtype, leaf.shape) == (value.dtype, value.shape), (name, leaf.dtype, leaf.shape)
        assert np.asarray(leaf).tobytes() == value.tobytes(), f"{name}: bits differ"
        if sharded:
            assert leaf.sharding == sharding_of(value.shape), (name, leaf.sharding)


def readers(output: Path, abstract: Tree) -> Iterator[tuple[str, Callable[[], Tree], bool]]:
    """(name, restore, whether the result must be sharded as asked)."""
    item = output / "0" / "items"
    args = ocp.checkpoint_utils.construct_restore_args(abstract)
    targeted = ocp.args.PyTreeRestore(item=abstract, restore_args=args)
    yield "v0 Checkpointer", lambda: ocp.PyTreeCheckpointer().restore(item), False
    yield "v0 Checkpointer, target", lambda: _checkpointer(item, targeted), True
    yield "v0 CheckpointManager", lambda: _manager(output, ocp.args.PyTreeRestore()), False
    yield "v0 CheckpointManager, target", lambda: _manager(output, targeted), True
    yield "v0 StandardRestore, target", lambda: _manager(output, ocp.args.StandardRestore(abstract)), True
    step = output / "0"
    yield "v1 load", lambda: v1.load_pytree(step, checkpointable_name="items"), False
    yield "v1 load, target", lambda: v1.load_pytree(step, abstract, checkpointable_name="items"), True
    yield "v1 load_checkpointables", lambda: v1.load_checkpointables(step, {"items": abstract})["items"], True


def _checkpointer(item: Path, args: Any) -> Tree:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(item, args=args)


def _manager(output: Path, args: Any) -> Tree:
    with ocp.CheckpointManager(output) as manager:
        assert manager.latest_step() == 0
        assert dict(manager.metadata(0).custom_metadata) == {"scan_layers": True}
        return manager.restore(0, args=ocp.args.Composite(items=args))["items"]


def main(expected_folder: str, *outputs: str) -> None:
    expected = load_expected(Path(expected_folder))
    failures = 0
    for output in map(Path, outputs):
        for name, restore, sharded in readers(output, abstract_of(expected)):
            try:
                compare(restore(), expected, sharded)
                verdict = "equal"
            except Exception as error:
                failures += 1
                verdict = f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:500]}"
            print(f"{output.name} | {jax.device_count()} devices | {name} | {verdict}", flush=True)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main(*sys.argv[1:])
