"""The one table of dtypes: how safetensors spells them and what numpy (with ml_dtypes) calls them."""

import math
from functools import cache

import ml_dtypes
import numpy as np

SAFETENSORS_TO_NAME: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F6_E2M3": "float6_e2m3fn",
    "F6_E3M2": "float6_e3m2fn",
    "F4": "float4_e2m1fn",
}
NAME_TO_SAFETENSORS: dict[str, str] = {name: code for code, name in SAFETENSORS_TO_NAME.items()}

# Sub-byte dtypes pack several elements into a byte on disk; numpy would give each a byte of its own.
_BITS = {"float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}


@cache
def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a dtype name, e.g. ``bfloat16`` or ``float8_e4m3fn``.

    Raises:
      ValueError: the name is not a dtype of the table.
    """
    if name not in NAME_TO_SAFETENSORS:
        raise ValueError(f"unknown dtype {name!r}; known: {', '.join(sorted(NAME_TO_SAFETENSORS))}")
    return np.dtype(getattr(ml_dtypes, name, name))


def bits_of(name: str) -> int:
    """Bits per stored element: 4 for ``float4_e2m1fn``, 16 for ``bfloat16``."""
    return _BITS.get(name) or numpy_dtype(name).itemsize * 8


def stored_bytes(name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a whole tensor in a safetensors file, sub-byte dtypes packed.

    >>> stored_bytes("bfloat16", (3, 5)), stored_bytes("float4_e2m1fn", (3, 6))
    (30, 9)
    """
    bits = bits_of(name) * math.prod(shape)
    return -(-bits // 8)
