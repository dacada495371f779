"""Writes a synthetic Llama-3.1-shaped Hugging Face checkpoint of a chosen size, with random weights.

``python -m benchmarks.make_checkpoint DIRECTORY --gigabytes 2``; ``--fp8-block 128`` makes FP8 weights with
block scales.
"""

import argparse
import json
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from benchmarks.shapes import ITEM_BYTES, LlamaShapes

POOL_ELEMENTS = 1 << 24  # 32 MB of bfloat16: further apart than a compressor looks for repeats
Header = dict[str, tuple[str, tuple[int, ...]]]


class RandomWeights:
    """Bytes of normally distributed values, cut from one pool per dtype at a random place per tensor."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        values = self._random.standard_normal(POOL_ELEMENTS, dtype=np.float32)
        self._pools = {
            "BF16": (values * 0.02).astype(ml_dtypes.bfloat16).view(np.uint8),
            "F8_E4M3": (values * 64).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8),
            "F32": (np.abs(values) * 3e-4 + 1e-5).view(np.uint8),
        }

    def pieces(self, dtype: str, elements: int) -> Iterator[memoryview]:
        """Yields ``elements`` values of safetensors dtype ``dtype``, piece by piece, without a copy."""
        pool, left = self._pools[dtype], elements * ITEM_BYTES[dtype]
        start = int(self._random.integers(POOL_ELEMENTS)) * ITEM_BYTES[dtype]
        while left:
            piece = pool[start : start + left]
            yield piece.data
            left -= piece.size
            start = 0


def make_checkpoint(directory: Path, shapes: LlamaShapes, shards: int = 4, seed: int = 0) -> None:
    """Writes config.json, ``shards`` safetensors files and their index into a new ``directory``."""
    directory.mkdir(parents=True)
    weights = RandomWeights(seed)
    weight_map: dict[str, str] = {}
    groups = _split(shapes.tensors(), shapes.nbytes / shards)
    for number, tensors in enumerate(groups, start=1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        with (directory / file).open("wb") as stream:
            _write_shard(stream, tensors, weights)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": shapes.nbytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(shapes.config(), indent=2) + "\n")


def _split(tensors: Header, shard_bytes: float) -> list[Header]:
    """Cuts the tensors, in order, where the running sum passes a multiple of ``shard_bytes``."""
    groups: dict[int, Header] = {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        groups.setdefault(int(offset / shard_bytes), {})[name] = (dtype, shape)
        offset += math.prod(shape) * ITEM_BYTES[dtype]
    return list(groups.values())


def _write_shard(stream: BinaryIO, tensors: Header, weights: RandomWeights) -> None:
    header = _header(tensors)
    stream.write(struct.pack("<Q", len(header)) + header)
    for dtype, shape in tensors.values():
        for piece in weights.pieces(dtype, math.prod(shape)):
            stream.write(piece)


def _header(tensors: Header) -> bytes:
    offset = 0
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a synthetic Llama-shaped checkpoint.")
    parser.add_argument("directory", type=Path, help="a directory that does not exist yet")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="about how much to write (default 2)")
    parser.add_argument("--fp8-block", type=int, metavar="SIDE", help="FP8 weights, one scale per SIDE x SIDE block")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shapes = LlamaShapes.of_size(options.gigabytes, options.fp8_block)
    make_checkpoint(options.directory, shapes, options.shards, options.seed)
    size = f"{shapes.nbytes / 1e9:.2f} GB"
    print(f"{options.directory}: {shapes.layers} layers, vocabulary {shapes.vocab}, {size}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
