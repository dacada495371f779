"""Views of arrays that make the kernels fast: elements as unsigned integers, and blocks that fit in cache."""

import math
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

BLOCK_ITEMS = 1 << 16

_CODES = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


def codes(array: np.ndarray) -> np.ndarray:
    """The same elements as unsigned integers of the same size: a view, any strides, no copy.

    Kernels that only move elements use it: ml_dtypes arrays are slow to copy element by element, and a float
    copy may quieten a signalling NaN.

    Raises:
      ValueError: the elements are not of 1, 2, 4 or 8 bytes.
    """
    code = _CODES.get(array.dtype.itemsize)
    if code is None or array.dtype.hasobject:
        raise ValueError(f"elements of 1, 2, 4 or 8 bytes are supported, not {array.dtype}")
    return array.view(code)


def blocks(*arrays: np.ndarray, items: int = BLOCK_ITEMS) -> Iterator[tuple[np.ndarray, ...]]:
    """The same region of every array, block after block of at most ``items`` elements; all are views.

    Args:
      *arrays: arrays of one shape; contiguous ones are walked as one flat run.
      items: elements of a block; the default keeps a float32 scratch inside an L2 cache.
    """
    if all(array.flags.c_contiguous for array in arrays):
        flat = [array.reshape(-1) for array in arrays]
        for start in range(0, flat[0].size, items):
            yield tuple(array[start : start + items] for array in flat)
        return
    for box in boxes(arrays[0].shape, _steps(arrays[0].shape, items)):
        yield tuple(array[box] for array in arrays)


def boxes(shape: tuple[int, ...], tile: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """The index of every tile of an array, in C order; the last along an axis may be shorter."""
    for corner in product(*(range(0, size, step) for size, step in zip(shape, tile, strict=True))):
        yield tuple(slice(start, start + step) for start, step in zip(corner, tile, strict=True))


def _steps(shape: tuple[int, ...], items: int) -> list[int]:
    """Tile lengths that take the trailing axes whole, as far as ``items`` elements reach."""
    inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return [max(1, min(size, items // max(below, 1))) for size, below in zip(shape, inner, strict=True)]
