"""Tables from stored codes to float32 values, one per code, and the gather that applies them.

A code is named by what a byte means:

- ``float8_e4m3fn``, ``float8_e5m2``, ``float8_e4m3fnuz``, ``float8_e5m2fnuz``, ``int8``: one value.
- ``fp4``: two E2M1 values, the low nibble first.
- ``uint2``, ``uint4``, ``uint8``: four, two or one unsigned integers, the low bits first.
- ``int2_offset``, ``int4_offset``, ``int8_offset``: the same minus half the range (4 bits: minus 8).

Other widths (``uint3``, ``int5_offset``, …) run across bytes: see :mod:`tensorferry.transforms.decode.bits`.
"""

from functools import cache

import ml_dtypes
import numpy as np

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
ONE_BYTE_FLOATS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")

# A gather copies whole items: 2 or 4 float32 values travel as one item of 8 or 16 bytes.
_ITEM_OF_VALUES = {1: np.dtype(np.uint32), 2: np.dtype(np.uint64), 4: np.dtype(np.complex128)}


@cache
def byte_table(code: str) -> np.ndarray:
    """The values of each byte, float32, shape ``[256, values per byte]``.

    Raises:
      ValueError: the code is not one of whole bytes.
    """
    raw = np.arange(256, dtype=np.uint8)
    if code in ONE_BYTE_FLOATS:
        table = raw.view(getattr(ml_dtypes, code)).astype(np.float32)[:, None]
    elif code == "int8":
        table = raw.view(np.int8).astype(np.float32)[:, None]
    elif code == "fp4":
        table = nibble_table(np.array(E2M1_VALUES, np.float32))
    else:
        table = _integer_table(raw, *integer_code(code))
    table.setflags(write=False)
    return table


def nibble_table(values: np.ndarray, high_first: bool = False) -> np.ndarray:
    """Two values a byte, float32 ``[256, 2]``, from the 16 values of a nibble."""
    raw = np.arange(256)
    order = (raw >> 4, raw & 15) if high_first else (raw & 15, raw >> 4)
    return np.stack([values[nibble] for nibble in order], axis=1).astype(np.float32)


def integer_code(code: str) -> tuple[int, int]:
    """The bits of an integer code and what is subtracted from it.

    >>> integer_code("uint4"), integer_code("int4_offset")
    ((4, 0), (4, 8))

    Raises:
      ValueError: the name is not an integer code of 2 to 8 bits.
    """
    signed = code.startswith("int") and code.endswith("_offset")
    digits = code.removeprefix("int").removesuffix("_offset") if signed else code.removeprefix("uint")
    if digits not in ("2", "3", "4", "5", "6", "7", "8"):
        raise ValueError(f"unknown code {code!r}")
    bits = int(digits)
    return bits, (1 << (bits - 1)) if signed else 0


def _integer_table(raw: np.ndarray, bits: int, minus: int) -> np.ndarray:
    if 8 % bits:
        raise ValueError(f"values of {bits} bits run across bytes; they have no byte table")
    lanes = [(raw >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(lanes, axis=1).astype(np.float32) - np.float32(minus)


@cache
def _items(code: str) -> np.ndarray:
    return as_items(byte_table(code))


@cache
def _pair_items(code: str) -> np.ndarray:
    """Both values of every two neighbouring bytes: half the gathers for codes of one value a byte."""
    pairs = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    return as_items(byte_table(code)[:, 0][pairs])


def as_items(table: np.ndarray) -> np.ndarray:
    """A ``[codes, values per code]`` table as ``[codes]`` items that a gather copies whole."""
    return np.ascontiguousarray(table).view(_ITEM_OF_VALUES[table.shape[1]])[:, 0]


def gather(items: np.ndarray, codes: np.ndarray, out: np.ndarray) -> None:
    """Writes the item of each code, 1-D ``codes`` to 1-D float32 ``out`` (contiguous)."""
    # "clip" lets numpy write straight into ``out``; no code can exceed a full table.
    np.take(items, codes, out=out.view(items.dtype), mode="clip")


def decode_bytes(codes: np.ndarray, code: str, out: np.ndarray) -> None:
    """Decodes 1-D uint8 ``codes`` into 1-D float32 ``out``, ``len(codes) * values per byte`` long, both contiguous."""
    if byte_table(code).shape[1] > 1:
        gather(_items(code), codes, out)
        return
    even = len(codes) & ~1
    gather(_pair_items(code), codes[:even].view(np.uint16), out[:even])
    if even < len(codes):
        out[-1] = byte_table(code)[codes[-1], 0]
