"""Casts between float dtypes: computed in float32, rounded once to nearest, ties to even; NaN stays NaN.

Values beyond the range of the target become infinite, or NaN where the target has no infinity
(float8_e4m3fn). A float64 source is rounded once too: the step through float32 is rounded to odd, which keeps
what the last rounding needs to know.
"""

from functools import cache

import numpy as np
from tensorferry.transforms.dtypes import numpy_dtype
from tensorferry.transforms.relayout import copy_into
from tensorferry.transforms.views import blocks, codes

# Half a dozen temporaries of 8 bytes per element.
_FLOAT64_ITEMS = 1 << 14


def cast(source: np.ndarray, dtype: str | np.dtype) -> np.ndarray:
    """``source`` in ``dtype``, same shape; the very same array where nothing changes.

    Raises:
      TypeError: a cast that is no rounding (float to integer, complex to real).
    """
    dtype = as_dtype(dtype)
    if source.dtype == dtype:
        return source
    out = np.empty(source.shape, dtype)
    cast_into(out, source)
    return out


def cast_into(out: np.ndarray, source: np.ndarray) -> None:
    """Writes ``source`` into ``out`` in the dtype of ``out``; scratch below 1 MiB.

    Same dtypes are copied bit for bit; 1-byte dtypes go through a table of 256 entries; wider integers are
    cast as numpy does.

    Args:
      out: target of the same shape, any strides.
      source: any strides; must not overlap ``out`` unless both are the same view of the same dtype.

    Raises:
      TypeError: a cast that is no rounding (float to integer, complex to real).
      ValueError: shapes differ.
    """
    _check(out, source)
    if out.dtype == source.dtype:
        copy_into(out, source)
    elif source.itemsize == 1 and is_float(out.dtype) and out.itemsize <= 4:
        _decode_into(out, source)
    elif source.dtype == np.float64 and out.itemsize < 4:
        _from_float64(out, source)
    else:
        with np.errstate(all="ignore"):
            np.copyto(out, source, casting="unsafe")


def as_dtype(dtype: str | np.dtype) -> np.dtype:
    """A numpy dtype from a name of the dtype table or from a dtype."""
    return numpy_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)


def is_float(dtype: np.dtype) -> bool:
    """Whether a dtype is a real float, those of ml_dtypes included."""
    return dtype.kind == "f" or (dtype.kind == "V" and "float" in dtype.name)


def _check(out: np.ndarray, source: np.ndarray) -> None:
    if out.shape != source.shape:
        raise ValueError(f"cannot cast shape {source.shape} into shape {out.shape}")
    to_whole = is_float(source.dtype) and not is_float(out.dtype) and out.dtype.kind != "c"
    if to_whole or (source.dtype.kind == "c" and out.dtype.kind != "c"):
        raise TypeError(f"a cast from {source.dtype} to {out.dtype} is not a rounding")


def _decode_into(out: np.ndarray, source: np.ndarray) -> None:
    """Looks bytes up, two at a time where both sides are contiguous: ten times as fast as ml_dtypes."""
    target, stored = codes(out), codes(source)
    if source.size % 2 == 0 and source.flags.c_contiguous and out.flags.c_contiguous:
        table = _pair_table(source.dtype, out.dtype)
        target, stored = target.reshape(-1).view(table.dtype), stored.reshape(-1).view(np.uint16)
    else:
        table = _byte_table(source.dtype, out.dtype)
    for part, some in blocks(target, stored):
        if part.flags.c_contiguous:
            np.take(table, some, out=part, mode="wrap")
        else:
            part[...] = np.take(table, some, mode="wrap")


@cache
def _byte_table(source: np.dtype, out: np.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        values = np.arange(256, dtype=np.uint8).view(source).astype(np.float32).astype(out)
    return codes(values)


@cache
def _pair_table(source: np.dtype, out: np.dtype) -> np.ndarray:
    """Entry ``i``: the decoded pair of bytes that is the 16-bit integer ``i`` in memory."""
    singles = _byte_table(source, out)
    pairs = singles[np.arange(1 << 16, dtype=np.uint16).view(np.uint8)]
    return pairs.view(f"u{2 * out.itemsize}")


def _from_float64(out: np.ndarray, source: np.ndarray) -> None:
    for part, some in blocks(out, source, items=_FLOAT64_ITEMS):
        with np.errstate(all="ignore"):
            np.copyto(part, _rounded_to_odd(some), casting="unsafe")


def _rounded_to_odd(wide: np.ndarray) -> np.ndarray:
    """float64 to float32, inexact results made odd, so that one more rounding is as if done directly."""
    near = wide.astype(np.float32)
    back = near.astype(np.float64)
    inexact = (back != wide) & ~np.isnan(wide)
    bits = near.view(np.uint32)
    # Back towards zero where rounding went away from it; then the odd one of the two neighbours.
    bits -= (inexact & (np.abs(back) > np.abs(wide))).view(np.uint8)
    bits |= inexact.view(np.uint8)
    return near
