"""The loop all kernels share: decode a few rows into cache, scale them in float32, round once, write."""

import math

import numpy as np
from tensorferry.transforms.cast import cast, cast_into
from tensorferry.transforms.decode.bits import decode_rows, values_in
from tensorferry.transforms.decode.grid import Grid
from tensorferry.transforms.relayout import copy_into

# Values decoded at a time: 512 KiB of float32 stay in a core's L2, and a call's overhead hardly shows.
CHUNK_VALUES = 1 << 17


def scaled_rows(
    target: np.ndarray,
    codes: np.ndarray,
    code: str,
    scale: Grid,
    zero: Grid | None = None,
    lead: int = 0,
    divisor: float = 1.0,
) -> None:
    """Writes ``(value of code - zero) * scale / divisor`` in float32, rounded once to the target's dtype.

    Args:
      target: float32 or bfloat16, ``[..., rows, columns]``, any strides.
      codes: uint8 ``[..., rows, bytes]`` with the same leading axes.
      code: a name of :mod:`tensorferry.transforms.decode.tables`.
      scale, zero: their value for every block of the target; the same blocks.
      lead: values decoded before the first wanted one in each row.
      divisor: a constant; 1 costs nothing.
    """
    decoded = values_in(codes.shape[-1], code)
    limit = max(1, CHUNK_VALUES // max(decoded, 1))
    scratch = np.empty(min(limit, codes.shape[-2]) * decoded, np.float32)
    width = target.shape[-1]
    for index in np.ndindex(target.shape[:-2]):
        matrix, scales, zeros = target[index], scale.at(index), zero.at(index) if zero else None
        for start, stop in scales.row_runs(matrix.shape[0], limit):
            values = decode_rows(codes[index][start:stop], code, scratch)[:, lead : lead + width]
            if zeros is not None:
                np.subtract(values, zeros.rows(start, stop, width), out=values)
            np.multiply(values, scales.rows(start, stop, width), out=values)
            if divisor != 1.0:
                np.divide(values, np.float32(divisor), out=values)
            write_rounded(matrix[start:stop], values)


def write_rounded(target: np.ndarray, values: np.ndarray) -> None:
    """Writes float32 values, rounded to the nearest (ties to even) when the target is narrower."""
    if target.strides[-1] == target.itemsize:
        cast_into(target, values)
        return
    # A cast through a transposed view is several times slower than a cast and a transposed copy.
    copy_into(target, cast(values, target.dtype))


def as_matrix(array: np.ndarray) -> np.ndarray:
    """A view with at least two axes: scalars and vectors become one row."""
    return array.reshape((1,) * (2 - array.ndim) + array.shape) if array.ndim < 2 else array


def code_bytes(stored: np.ndarray, ndim: int) -> np.ndarray:
    """The bytes of stored codes as uint8 ``[..., rows, bytes]``, axes past ``ndim`` merged into the last."""
    leading = stored.shape[: ndim - 1] if ndim > 1 else (1,)
    contiguous = np.ascontiguousarray(stored).reshape(*leading, math.prod(stored.shape[ndim - 1 :]))
    return contiguous.view(np.uint8)
