"""What MaxText itself says about its models: parameter trees and converted values, packed in ``tests/data/oracle``."""

import json
import lzma
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tensorferry.transforms.dtypes import SAFETENSORS_TO_NAME, numpy_dtype

_FOLDER = Path(__file__).parents[1] / "data" / "oracle"
MODES = ("scan", "unscan")


@dataclass(frozen=True)
class Tree:
    """MaxText's parameter tree of one model in one mode.

    Attributes:
      shapes: ``params-decoder-…`` to shape.
      sources: parameter to the Hugging Face names that MaxText's own converter reads for it; empty without a mapping.
      extra: the same for parameters that its mapping has and this tree has not (a vision tower).
      dtypes: only for FP8 trees, where they matter.
    """

    shapes: dict[str, tuple[int, ...]]
    sources: dict[str, frozenset[str]]
    extra: dict[str, frozenset[str]]
    dtypes: dict[str, str]

    @property
    def names(self) -> frozenset[str]:
        """Every Hugging Face name that the tree is made of."""
        return frozenset().union(*self.sources.values())


@dataclass(frozen=True)
class Model:
    """One model of MaxText: its sizes and its trees.

    Attributes:
      hf_config: the config.json that MaxText's tables assume; None where they have none.
      dims: MaxText's own sizes.
    """

    name: str
    hf_config: dict[str, Any] | None
    dims: dict[str, Any]
    trees: dict[str, Tree]


@dataclass(frozen=True)
class Expected:
    """What MaxText's converter wrote: dotted array name to shape, dtype and SHA-256 of the C-order bytes."""

    arrays: dict[str, dict[str, Any]]
    worked_round: bool


@dataclass(frozen=True)
class Values:
    """A small synthetic checkpoint and what MaxText's converter made of it, by mode."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    expected: dict[str, Expected]


def model_names() -> list[str]:
    """Every model with a tree."""
    return sorted(path.name.removesuffix(".json.xz") for path in (_FOLDER / "trees").iterdir())


def value_names() -> list[str]:
    """Every model with converted values."""
    return sorted(path.name.removesuffix(".json.xz") for path in (_FOLDER / "values").glob("*.json.xz"))


def _read(path: Path) -> Any:
    return json.loads(lzma.decompress(path.read_bytes()))


def model(name: str) -> Model:
    """The trees of one model; not cached, the biggest hold a hundred thousand names."""
    data = _read(_FOLDER / "trees" / f"{name}.json.xz")
    trees = {mode: _tree(tree) for mode, tree in data["modes"].items()}
    return Model(data["model"], data["hf_config"], data["dims"], trees)


def _tree(data: dict[str, Any]) -> Tree:
    shapes = {name: tuple(shape) for name, shape in data["shapes"].items()}
    sources: dict[str, frozenset[str]] = {}
    extra: dict[str, frozenset[str]] = {}
    for parameters, names in data["sources"]:
        flat = frozenset(_flat(names))
        for parameter in _flat(parameters):
            (sources if parameter in shapes else extra)[parameter] = flat
    return Tree(shapes, sources, extra, data.get("dtypes", {}))


def _flat(names: Any) -> Iterator[str]:
    if isinstance(names, str):
        yield names
        return
    for one in names or ():
        yield from _flat(one)


@cache
def values(name: str) -> Values:
    """The synthetic checkpoint of one model and its conversions."""
    data = _read(_FOLDER / "values" / f"{name}.json.xz")
    expected = {mode: Expected(data[mode]["arrays"], data[mode]["worked_round"]) for mode in MODES}
    raw = lzma.decompress((_FOLDER / "values" / f"{name}.safetensors.xz").read_bytes())
    return Values(data["config"], read_safetensors(raw), expected)


def read_safetensors(raw: bytes) -> dict[str, np.ndarray]:
    """Every tensor of a safetensors file in memory."""
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            dtype = numpy_dtype(SAFETENSORS_TO_NAME[entry["dtype"]])
            count = math.prod(entry["shape"])
            array = np.frombuffer(raw, dtype, count, start + entry["data_offsets"][0])
            tensors[name] = array.reshape(entry["shape"])
    return tensors


@cache
def settings() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """MaxText's default of every setting that some model sets, and what each model sets."""
    data = _read(_FOLDER / "settings.json.xz")
    return data["defaults"], data["models"]
