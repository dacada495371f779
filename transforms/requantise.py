"""Low-bit codes for weights that have changed: one scale per block, each block on its own."""

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

_E8M0_BIAS = 127


def blockwise(array: np.ndarray, blocks: Sequence[int], reduce: np.ufunc) -> np.ndarray:
    """Reduces each block of an array that begins at a block's border.

    Args:
      array: any shape.
      blocks: block length per axis, 0 for one block over the whole axis; the last of an axis may be short.
      reduce: such as ``np.maximum`` or ``np.logical_and``.

    Returns:
      One entry per block, as many axes as the array.
    """
    for axis, block in enumerate(blocks):
        starts = np.arange(0, array.shape[axis], block or array.shape[axis])
        array = reduce.reduceat(array, starts, axis=axis)
    return array


def spread(grid: np.ndarray, shape: Sequence[int], blocks: Sequence[int]) -> np.ndarray:
    """One entry per element from one per block: the inverse of ``blockwise``; axes of one block stay views of it."""
    for axis, (length, block) in enumerate(zip(shape, blocks, strict=True)):
        if block > 1:
            grid = np.repeat(grid, block, axis=axis).take(np.arange(length), axis=axis)
    return np.broadcast_to(grid, tuple(shape))


def choose_scales(values: np.ndarray, code: str, blocks: Sequence[int], encoding: str, dtype: str) -> np.ndarray:
    """The scale of each block: its largest magnitude becomes the largest code.

    Args:
      values: float32, finite.
      code: dtype of the codes, such as ``float8_e4m3fn``.
      blocks: as in ``blockwise``.
      encoding: ``e8m0`` for powers of two, rounded up so that nothing overflows; else ``float``.
      dtype: dtype in which scales are stored; they are rounded to it, since readers multiply by what is stored.

    Returns:
      Scales as readers see them: float32, one per block; 1 for a block of zeros.
    """
    largest = float(ml_dtypes.finfo(code).max)
    ideal = blockwise(np.abs(values), blocks, np.maximum).astype(np.float32) / np.float32(largest)
    ideal = np.where(ideal > 0, ideal, np.float32(1))
    if encoding == "e8m0":
        mantissa, exponent = np.frexp(ideal)
        exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
        return np.ldexp(np.float32(1), np.clip(exponent, -_E8M0_BIAS, _E8M0_BIAS)).astype(np.float32)
    stored = ideal.astype(np.dtype(getattr(ml_dtypes, dtype, dtype))).astype(np.float32)
    return np.where(stored > 0, stored, np.float32(np.finfo(np.float32).tiny))


def encode(values: np.ndarray, scales: np.ndarray, code: str) -> np.ndarray:
    """Codes of values divided by their scale, to nearest even, held inside the range of the code."""
    dtype = np.dtype(getattr(ml_dtypes, code, code))
    largest = np.float32(ml_dtypes.finfo(code).max)
    return np.clip(values / scales, -largest, largest).astype(dtype)


def stored_scales(scales: np.ndarray, encoding: str, dtype: str) -> np.ndarray:
    """Scales as they are stored: exponent bytes for ``e8m0``, else numbers."""
    wanted = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if encoding != "e8m0":
        return scales.astype(wanted)
    exponents = (np.frexp(scales)[1] - 1 + _E8M0_BIAS).astype(np.uint8)
    return exponents.view(wanted) if wanted.itemsize == 1 else scales.astype(wanted)


def block_counts(shape: Sequence[int], blocks: Sequence[int]) -> tuple[int, ...]:
    """Blocks per axis.

    >>> block_counts((300, 64, 7), (128, 0, 1))
    (3, 1, 7)
    """
    return tuple(math.ceil(length / block) if block else 1 for length, block in zip(shape, blocks, strict=True))
