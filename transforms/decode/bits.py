"""Integers of 2 to 8 bits in a little-endian bit stream, rows of bytes to rows of float32 values."""

import numpy as np
from tensorferry.transforms.decode.tables import decode_bytes, integer_code


def values_per_bytes(code: str) -> tuple[int, int]:
    """How many values the smallest whole run of bytes holds: ``(values, bytes)``.

    >>> values_per_bytes("float8_e4m3fn"), values_per_bytes("fp4"), values_per_bytes("uint3")
    ((1, 1), (2, 1), (8, 3))
    """
    if code.startswith("float8") or code == "int8":
        return 1, 1
    bits = 4 if code == "fp4" else integer_code(code)[0]
    return (8 // bits, 1) if 8 % bits == 0 else (8, bits)


def values_in(row_bytes: int, code: str) -> int:
    """Values that a row of bytes decodes to, those in a last incomplete run included."""
    per_run, run_bytes = values_per_bytes(code)
    return -(-row_bytes // run_bytes) * per_run


def decode_rows(codes: np.ndarray, code: str, out: np.ndarray) -> np.ndarray:
    """Decodes rows of bytes into the head of ``out``.

    Args:
      codes: uint8 ``[rows, bytes]``; bytes of a row may be followed by padding bits.
      code: a name of :mod:`tensorferry.transforms.decode.tables`, any width.
      out: float32 scratch, at least ``rows * values`` long, contiguous.

    Returns:
      The filled part of ``out`` as ``[rows, values]``.
    """
    rows, row_bytes = codes.shape
    per_run, run_bytes = values_per_bytes(code)
    width = values_in(row_bytes, code)
    flat = out.reshape(-1)[: rows * width]
    if run_bytes == 1:
        decode_bytes(np.ascontiguousarray(codes).reshape(-1), code, flat)
    else:
        whole_runs = np.pad(codes, ((0, 0), (0, -row_bytes % run_bytes)))
        _decode_runs(whole_runs, code, flat.reshape(rows, -1, per_run))
    return flat.reshape(rows, width)


def _decode_runs(codes: np.ndarray, code: str, out: np.ndarray) -> None:
    """Eight values in ``bits`` bytes: lane k starts at bit k * bits and spans at most two bytes."""
    bits, minus = integer_code(code)
    runs = codes.reshape(codes.shape[0], -1, bits).astype(np.uint16)
    for lane in range(8):
        byte, shift = divmod(lane * bits, 8)
        window = runs[:, :, byte]
        if shift + bits > 8:
            window = window | (runs[:, :, byte + 1] << 8)
        np.copyto(out[:, :, lane], (window >> shift) & ((1 << bits) - 1))
    if minus:
        np.subtract(out, np.float32(minus), out=out)


def unpack_integers(codes: np.ndarray, code: str) -> np.ndarray:
    """A small packed tensor (zero points) as a new float32 array ``[rows, values]``."""
    out = np.empty(codes.shape[0] * values_in(codes.shape[1], code), np.float32)
    return decode_rows(codes, code, out)


def word_bytes(words: np.ndarray) -> np.ndarray:
    """The little-endian bytes of 32-bit words: int32 ``[rows, words]`` to uint8 ``[rows, 4 * words]``."""
    little = np.ascontiguousarray(words).astype("<i4", copy=False)
    return little.view(np.uint8)
