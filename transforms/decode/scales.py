"""Scales as float32, what may be wrong with them, and the block of a position."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from tensorferry.transforms.decode.tables import ONE_BYTE_FLOATS, byte_table


@cache
def e8m0_table() -> np.ndarray:
    """The 256 values of an E8M0 byte, float32: 2^(byte - 127); byte 0 is 2^-127 (subnormal), byte 255 is NaN."""
    table = np.full(256, np.nan, np.float32)
    table[:255] = np.ldexp(np.float32(1), np.arange(255) - 127)
    table.setflags(write=False)
    return table


def scale_values(stored: np.ndarray, encoding: str = "float") -> np.ndarray:
    """The stored scales as float32, contiguous, same shape.

    Args:
      stored: any float dtype; for ``e8m0`` bytes, as ``uint8`` or as ``float8_e8m0fnu``.
      encoding: ``float`` (the number stored), ``e8m0`` (the byte is an exponent) or a one-byte float's name.
    """
    if encoding in ONE_BYTE_FLOATS or stored.dtype.name in ONE_BYTE_FLOATS:
        name = encoding if encoding in ONE_BYTE_FLOATS else stored.dtype.name
        return byte_table(name)[:, 0][stored.view(np.uint8)]
    if encoding == "e8m0" or stored.dtype.name == "float8_e8m0fnu":
        return e8m0_table()[stored.view(np.uint8)]
    return np.ascontiguousarray(stored, dtype=np.float32).reshape(stored.shape)


@dataclass(frozen=True)
class ScaleFault:
    """How many scales of each impossible kind there are.

    Attributes:
      total: scales looked at.
      nan, infinite, zero, negative: counts.
    """

    total: int
    nan: int
    infinite: int
    zero: int
    negative: int

    def __str__(self) -> str:
        counts = {"NaN": self.nan, "infinite": self.infinite, "zero": self.zero, "negative": self.negative}
        named = [f"{count:,} {kind}" for kind, count in counts.items() if count]
        return f"{', '.join(named)} of {self.total:,} scales"


def check_scale(stored: np.ndarray, encoding: str = "float", rule: str = "positive") -> ScaleFault | None:
    """Counts the scales that cannot be right; None when all are.

    Args:
      stored: the scales as stored.
      encoding: as in :func:`scale_values`.
      rule: ``positive`` (finite and above zero), ``nonnegative`` (zero allowed: the absmax of a block of
        zeros) or ``finite``.
    """
    values = scale_values(stored, encoding)
    # One pass in the good case: a NaN or an infinity makes the sum's comparison fail.
    low = float(values.min(initial=np.inf))
    good = low > 0 if rule == "positive" else low >= 0 if rule == "nonnegative" else low > -np.inf
    if good and float(values.max(initial=-np.inf)) < np.inf:
        return None
    fault = ScaleFault(
        total=values.size,
        nan=int(np.isnan(values).sum()),
        infinite=int(np.isinf(values).sum()),
        zero=int((values == 0).sum()) if rule == "positive" else 0,
        negative=int((values < 0).sum()) if rule != "finite" else 0,
    )
    return fault if fault.nan + fault.infinite + fault.zero + fault.negative else None


def block_index(length: int, block: int, offset: int, grain: int = 1) -> np.ndarray:
    """The block of each of ``length`` positions, ``grain`` apart, that start ``offset`` into block 0; block 0 means one
    for all."""
    positions = offset + grain * np.arange(length)
    return positions // block if block else np.zeros(length, np.intp)
