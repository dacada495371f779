"""A stored step as plain data: its leaves, where they sit, and the true shape and dtype of each array."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

KeyKind = Literal["dict", "sequence"]
LeafKind = Literal["array", "none", "empty_dict", "empty_list", "empty_tuple", "unsupported"]

MODEL_ITEM = "model_params"
OPTIMIZER_ITEM = "optimizer_state"


@dataclass(frozen=True, slots=True)
class Key:
    """One level of a path: a name in a dict, or a position in a list or tuple (Orbax keeps them alike)."""

    name: str
    kind: KeyKind = "dict"


Path = tuple[Key, ...]


def dict_path(*names: str) -> Path:
    """A path of dict keys only.

    >>> spell(dict_path("params", "params", "decoder"))
    'params/params/decoder'
    """
    return tuple(Key(name) for name in names)


def spell(path: Path) -> str:
    """A path as people write it: names and positions joined by ``/``."""
    return "/".join(key.name for key in path)


def _element_bytes(dtype: str) -> int:
    """Bytes of one decoded element; TensorStore gives the kinds below a byte a byte each."""
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return max(int(bits[1]) // 8, 1) if bits else 1


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of a stored item.

    Attributes:
      item: name of the item that holds it, e.g. ``model_params``.
      path: keys from the item's root.
      kind: ``array`` has bytes; the others are marks in the metadata only.
      value_type: Orbax's word for the value (``jax.Array``, ``np.ndarray``, ``scalar``, ``None``, …).
      shape: true global shape; ``()`` for a 0-d array and for what is not an array. Typed PRNG keys have
        the shape of their key data, so the last axis counts words.
      dtype: stored dtype name, ``uint32`` for key data; empty for what is not an array.
      chunk_shape: shape of one stored chunk (of one outer chunk where chunks are sharded).
      prng_impl: implementation of a typed PRNG key (``threefry2x32``, …); empty for everything else.
      value: the number itself, for the few integer counters of the optimizer that the plan speaks about.
      codecs: how one chunk is encoded, as the JSON of zarr v3 codecs; empty where v3 has no words for it.
    """

    item: str
    path: Path
    kind: LeafKind = "array"
    value_type: str = "jax.Array"
    shape: tuple[int, ...] = ()
    dtype: str = ""
    chunk_shape: tuple[int, ...] = ()
    prng_impl: str = ""
    value: int | None = None
    codecs: str = ""

    @property
    def array_name(self) -> str:
        """Name of the array in the item's key-value store."""
        return ".".join(key.name for key in self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded array; 0 for what is not an array."""
        return _element_bytes(self.dtype) * math.prod(self.shape) if self.kind == "array" else 0

    def __str__(self) -> str:
        return f"{self.item}/{spell(self.path)}"


@dataclass(frozen=True, slots=True)
class ItemTree:
    """One item of a step: its leaves, and how its arrays are stored.

    Attributes:
      name: directory name of the item.
      leaves: all leaves, in the order of the item's metadata.
      use_ocdbt: arrays live in one OCDBT database; otherwise each has a directory of its own.
      use_zarr3: arrays are zarr v3; otherwise zarr v2.
    """

    name: str
    leaves: tuple[Leaf, ...]
    use_ocdbt: bool = True
    use_zarr3: bool = False


@dataclass(frozen=True, slots=True)
class StepTree:
    """Everything the migration of one step decides from; no array values.

    Attributes:
      step: the number in the directory's name.
      items: the items that are trees of arrays, by name.
      copied_items: items that are files of their own (grain's ``iter``), copied as they are.
      custom_metadata: the user's metadata of the step.
      warnings: what the reader had to guess or could not read, as sentences.
      fingerprint: digest of the source's metadata and of its files' names and sizes.
      content: digest of what names the content of its files, where the source tells; else empty.
    """

    step: int
    items: Mapping[str, ItemTree]
    copied_items: tuple[str, ...] = ()
    custom_metadata: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    fingerprint: str = ""
    content: str = ""

    def leaves(self) -> Iterable[Leaf]:
        """Every leaf of every item."""
        return (leaf for item in self.items.values() for leaf in item.leaves)


@dataclass(frozen=True, slots=True)
class DroppedLeaf:
    """A leaf that has no place in the new layout, and why."""

    leaf: Leaf
    reason: str
