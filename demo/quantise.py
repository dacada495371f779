"""Quantises a bfloat16 Hugging Face checkpoint to FP8 as published checkpoints are; knows nothing of Tensorferry.

``python -m demo.quantise CHECKPOINT OUTPUT --scheme tensor`` writes one ``weight_scale`` per projection and an
``input_scale`` beside it, ``--scheme block`` a ``weight_scale_inv`` per 128x128 block (ragged at the edges).
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

FP8 = ml_dtypes.float8_e4m3fn
FP8_MAX = np.float32(448)
BLOCK = 128
Arrays = dict[str, np.ndarray]


def per_tensor(name: str, weight: np.ndarray) -> Arrays:
    """One scale for all: the largest magnitude becomes the largest code."""
    scale = np.abs(weight).max() / FP8_MAX
    scales = {f"{name}_scale": scale, f"{name.removesuffix('weight')}input_scale": np.float32(0.02)}
    return {name: codes(weight / scale), **{key: np.array(value, np.float32) for key, value in scales.items()}}


def per_block(name: str, weight: np.ndarray, block: int = BLOCK) -> Arrays:
    """One scale per block of rows and columns; the blocks at the edges are cut short."""
    grid = np.array([[np.abs(tile).max() for _, tile in row] for row in tiles(weight, block)], np.float32)
    scale = grid / FP8_MAX
    out = np.empty(weight.shape, FP8)
    for i, row in enumerate(tiles(weight, block)):
        for j, (place, tile) in enumerate(row):
            out[place] = codes(tile / scale[i, j])
    return {name: out, f"{name}_scale_inv": scale}


def codes(scaled: np.ndarray) -> np.ndarray:
    """The nearest FP8 values."""
    return np.clip(scaled, -FP8_MAX, FP8_MAX).astype(FP8)


def tiles(weight: np.ndarray, block: int) -> Iterator[list[tuple[tuple[slice, slice], np.ndarray]]]:
    """Rows of blocks, each with its place."""
    rows, columns = weight.shape
    for top in range(0, rows, block):
        places = [np.s_[top : top + block, left : left + block] for left in range(0, columns, block)]
        yield [(place, weight[place]) for place in places]


SCHEMES = {
    "tensor": (per_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "block": (per_block, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}),
}


def quantise(checkpoint: Path, output: Path, scheme: str) -> None:
    """Writes ``output`` with every projection in FP8; embeddings, norms and the head stay as they are."""
    quantiser, quantization_config = SCHEMES[scheme]
    output.mkdir(parents=True)
    weight_map, total = {}, 0
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors: Arrays = {}
        for name, weight in load_file(file).items():
            is_projection = name.endswith("_proj.weight")
            tensors |= quantiser(name, weight.astype(np.float32)) if is_projection else {name: weight}
        save_file(tensors, output / file.name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
        total += sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (output / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((checkpoint / "config.json").read_text()) | {"quantization_config": quantization_config}
    (output / "config.json").write_text(json.dumps(config, indent=2))
    for extra in checkpoint.glob("*token*"):
        shutil.copy(extra, output)


def main() -> int:
    parser = argparse.ArgumentParser(description="Quantise a bfloat16 checkpoint's projections to FP8.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--scheme", choices=sorted(SCHEMES), default="block")
    args = parser.parse_args()
    shutil.rmtree(args.output, ignore_errors=True)
    quantise(args.checkpoint, args.output, args.scheme)
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
