"""Weights quantised to FP8 in the schemes that checkpoints use, with scales that Tensorferry would not choose."""

from typing import Any

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn
BLOCK = {"quant_method": "fp8", "weight_block_size": [4, 3], "fmt": "e4m3", "activation_scheme": "dynamic"}
CHANNEL = {"quant_method": "fbgemm_fp8"}
TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}
KINDS: dict[str, tuple[dict[str, Any], tuple[int, int], str, str]] = {
    "block": (BLOCK, (4, 3), "weight_scale_inv", "float32"),
    "block, powers of two": (BLOCK, (4, 3), "weight_scale_inv", "float8_e8m0fnu"),
    "channel": (CHANNEL, (1, 0), "weight_scale", "bfloat16"),
    "tensor": (TENSOR, (0, 0), "weight_scale", "float32"),
}
Arrays = dict[str, np.ndarray]


def cells(shape: tuple[int, ...], blocks: tuple[int, int]) -> list[tuple[tuple[int, int], tuple[slice, slice]]]:
    steps = [block or length for block, length in zip(blocks, shape, strict=True)]
    starts = [range(0, length, step) for length, step in zip(shape, steps, strict=True)]
    return [
        ((i, j), (slice(top, top + steps[0]), slice(left, left + steps[1])))
        for i, top in enumerate(starts[0])
        for j, left in enumerate(starts[1])
    ]


def quantised(weight: np.ndarray, blocks: tuple[int, int], dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and the float32 values that they mean; scales on purpose not those that we would choose."""
    codes, values = np.zeros(weight.shape, E4M3), np.zeros(weight.shape, np.float32)
    found = cells(weight.shape, blocks)
    grid = tuple(max(at[axis] for at, _ in found) + 1 for axis in (0, 1))
    scales = np.zeros(grid, getattr(ml_dtypes, dtype, dtype))
    for at, where in found:
        largest = np.abs(weight[where]).max()
        ideal = 2.0 ** np.ceil(np.log2(largest / 200)) if "e8m0" in dtype else largest / 300
        scales[at] = np.float32(ideal).astype(scales.dtype)
        scale = scales[at].astype(np.float32)
        codes[where] = (weight[where] / scale).astype(E4M3)
        values[where] = codes[where].astype(np.float32) * scale
    return codes, (scales.reshape(()) if blocks == (0, 0) else scales), values


def fp8_tensors(kind: str, plain: Arrays) -> Arrays:
    """Projections in FP8, experts too; scales in the names and the dtype of the kind."""
    _, blocks, suffix, dtype = KINDS[kind]
    found: Arrays = {}
    for name, array in plain.items():
        if not name.endswith(("_proj.weight", "_proj")):
            found[name] = array
            continue
        stem = name.removesuffix("weight") + suffix if name.endswith("weight") else f"{name}_{suffix[7:]}"
        ones = [quantised(one.astype(np.float32), blocks, dtype) for one in array.reshape(-1, *array.shape[-2:])]
        codes, scales = np.stack([one[0] for one in ones]), np.stack([one[1] for one in ones])
        found[name] = codes.reshape(array.shape)
        found[stem] = scales if array.ndim > 2 else np.array(scales[0])
    return found


def decoded(kind: str, tensors: Arrays) -> Arrays:
    """Every weight as its codes and scales mean it, in float32; by whole grids."""
    _, blocks, suffix, _ = KINDS[kind]
    found: Arrays = {}
    for name, array in tensors.items():
        if array.dtype != ml_dtypes.float8_e4m3fn:
            found |= {} if name.endswith((suffix, "input_scale", suffix[6:])) else {name: array}
            continue
        stem = name.removesuffix("weight") + suffix if name.endswith("weight") else f"{name}_{suffix[7:]}"
        scale = tensors[stem].astype(np.float32)
        for axis in (-2, -1) if scale.ndim == array.ndim else ():
            block = blocks[axis] or array.shape[axis]
            scale = np.take(scale, np.arange(array.shape[axis]) // block, axis=axis)
        scale = scale.reshape(*scale.shape, 1, 1) if scale.ndim < array.ndim and scale.ndim else scale
        found[name] = array.astype(np.float32) * scale
    return found
