"""Writes a sharded safetensors checkpoint: shards, and the index that names each tensor's shard."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def split_into_shards(nbytes: dict[str, int], shard_bytes: int) -> list[list[str]]:
    """Groups names, in order, into shards of at most ``shard_bytes`` (a larger tensor stands alone)."""
    shards: list[list[str]] = []
    room = 0
    for name, size in nbytes.items():
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def write_sharded(
    directory: Path, nbytes: dict[str, int], arrays: Iterable[tuple[str, np.ndarray]], shard_bytes: int
) -> list[Path]:
    """Writes ``arrays`` as shards and an index; holds one shard in memory at a time.

    Args:
      directory: an existing directory.
      nbytes: bytes of every tensor, in the order in which ``arrays`` yields them.
      arrays: pairs of tensor name and array.
      shard_bytes: upper bound of a shard's tensor bytes.

    Returns:
      The paths of the shards.

    Raises:
      ValueError: when ``arrays`` come in another order than ``nbytes``.
    """
    shards = split_into_shards(nbytes, shard_bytes)
    stream = iter(arrays)
    paths, weight_map = [], {}
    for number, names in enumerate(shards, start=1):
        path = directory / f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = dict(next(stream) for _ in names)
        if list(tensors) != names:
            raise ValueError(f"arrays came in another order than nbytes: {list(tensors)}, expected {names}")
        save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path, {"format": "pt"})
        weight_map |= dict.fromkeys(names, path.name)
        paths.append(path)
    index = {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return paths
