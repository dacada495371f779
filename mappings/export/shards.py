"""Safetensors files laid out before any weight is read: which tensor goes to which bytes of which file."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.transforms.dtypes import NAME_TO_SAFETENSORS, numpy_dtype

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies.

    Attributes:
      file: name of the shard.
      offset: absolute offset of its first byte in the file.
    """

    file: str
    offset: int


@dataclass(frozen=True)
class Shard:
    """One safetensors file.

    Attributes:
      file: its name.
      tensors: in the order of their bytes.
    """

    file: str
    tensors: tuple[ArraySpec, ...]

    @cached_property
    def header(self) -> bytes:
        """The file's first bytes: length, JSON, spaces up to a multiple of eight, so that tensors stay aligned."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for tensor in self.tensors:
            entries[tensor.key] = {
                "dtype": NAME_TO_SAFETENSORS[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, at + tensor.nbytes],
            }
            at += tensor.nbytes
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def data_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + self.data_bytes

    def places(self) -> dict[str, Place]:
        """Tensor name to its place."""
        found, at = {}, len(self.header)
        for tensor in self.tensors:
            found[tensor.key] = Place(self.file, at)
            at += tensor.nbytes
        return found


def lay_out(tensors: Iterable[ArraySpec], shard_bytes: int, order: Sequence[str] = ()) -> tuple[Shard, ...]:
    """Packs tensors into files of at most ``shard_bytes`` of data, named as the hub names them.

    Args:
      tensors: what to write.
      shard_bytes: bound on the data of a file; a bigger tensor has a file for itself.
      order: names in the order of an existing checkpoint; others follow, by name with numbers counted.
    """
    ranks = {name: rank for rank, name in enumerate(order)}
    ordered = sorted(tensors, key=lambda t: (ranks.get(t.key, len(ranks)), natural(t.key)))
    packs: list[list[ArraySpec]] = []
    used = 0
    for tensor in ordered:
        if not packs or used + tensor.nbytes > shard_bytes:
            packs.append([])
            used = 0
        packs[-1].append(tensor)
        used += tensor.nbytes
    return tuple(Shard(shard_name(n, len(packs)), _aligned(pack)) for n, pack in enumerate(packs, 1))


def shard_name(number: int, count: int) -> str:
    """The hub's name of a shard, counted from 1.

    >>> shard_name(1, 1), shard_name(2, 31)
    ('model.safetensors', 'model-00002-of-00031.safetensors')
    """
    return SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def index_of(shards: Sequence[Shard]) -> dict[str, Any]:
    """The content of ``model.safetensors.index.json``."""
    places = {tensor.key: shard.file for shard in shards for tensor in shard.tensors}
    return {
        "metadata": {
            "total_parameters": sum(math.prod(tensor.shape) for shard in shards for tensor in shard.tensors),
            "total_size": sum(shard.data_bytes for shard in shards),
        },
        "weight_map": dict(sorted(places.items())),
    }


def all_places(shards: Iterable[Shard]) -> Mapping[str, Place]:
    """Tensor name to its place, over all files."""
    return {name: place for shard in shards for name, place in shard.places().items()}


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts layer 10 after layer 9.

    >>> sorted(["a.10", "a.9", "a.b"], key=natural)
    ['a.9', 'a.10', 'a.b']
    """
    parts = [part for part in _DIGITS.split(name) if part]
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


def _aligned(pack: Sequence[ArraySpec]) -> tuple[ArraySpec, ...]:
    """Widest elements first, so that every tensor begins at a multiple of its element's size."""
    return tuple(sorted(pack, key=lambda tensor: -numpy_dtype(tensor.dtype).itemsize))
