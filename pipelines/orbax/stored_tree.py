"""The tree of a checkpoint as stock Orbax reads it."""

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.orbax.orbax_log import quiet_orbax
from tensorferry.pipelines.storage.kvstores import is_local

# Array key to shape and dtype.
Leaves = dict[str, tuple[tuple[int, ...], str]]


def stored_tree(item: str) -> Leaves | None:
    """Array key to shape and dtype, read by stock Orbax; None where it cannot.

    Raises:
      FerryError: the item is in a bucket, and what Orbax reads buckets with is not installed.
    """
    import orbax.checkpoint as ocp

    if not is_local(item) and importlib.util.find_spec("gcsfs") is None:
        fix = "pip install 'tensorferry[gcp]'"
        raise FerryError(f"{item}: Orbax needs gcsfs to read a bucket, and it is not installed: {fix}.")
    with quiet_orbax(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        metadata = checkpointer.metadata(item).item_metadata
    if metadata is None:
        return None
    leaves: Leaves = {}
    _flatten(metadata.tree, (), leaves)
    return leaves


def _flatten(node: Any, path: tuple[str, ...], leaves: Leaves) -> None:
    if isinstance(node, Mapping):
        for name, below in node.items():
            _flatten(below, (*path, str(name)), leaves)
    elif hasattr(node, "shape"):
        leaves[".".join(path)] = (tuple(node.shape), np.dtype(node.dtype).name)
    else:
        leaves[".".join(path)] = ((), str(getattr(node, "dtype", type(node).__name__)))
