"""Statistics of an array's values, from the bits: read as integers, floats sort by sign and magnitude."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from tensorferry.transforms.views import blocks, codes

_BLOCK_BYTES = 1 << 19


@dataclass(frozen=True)
class Statistics:
    """What the values of an array are like; ``min`` and ``max`` leave NaN out and keep infinities.

    Integer arrays have exact integer extremes. With no value at all, ``min`` is inf and ``max`` is -inf.

    Attributes:
      count: elements, NaN included.
      min: smallest value.
      max: largest value.
      nan_count: NaN elements.
      inf_count: infinite elements, of both signs.
    """

    count: int = 0
    min: float | int = math.inf
    max: float | int = -math.inf
    nan_count: int = 0
    inf_count: int = 0

    @property
    def absmax(self) -> float | int:
        """Largest magnitude; 0 with no value at all."""
        return max(abs(self.min), abs(self.max)) if self.count > self.nan_count else 0

    def merge(self, other: "Statistics") -> "Statistics":
        """The statistics of both arrays together; associative, commutative, ``Statistics()`` is neutral."""
        return Statistics(
            count=self.count + other.count,
            min=min(self.min, other.min),
            max=max(self.max, other.max),
            nan_count=self.nan_count + other.nan_count,
            inf_count=self.inf_count + other.inf_count,
        )

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values; infinities as the strings ``inf`` and ``-inf``."""
        return {
            "count": self.count,
            "min": _plain(self.min),
            "max": _plain(self.max),
            "absmax": _plain(self.absmax),
            "nan_count": self.nan_count,
            "inf_count": self.inf_count,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Statistics":
        """The inverse of ``to_json``."""
        low, high = (float(v) if isinstance(v, str) else v for v in (value["min"], value["max"]))
        return cls(value["count"], low, high, value["nan_count"], value["inf_count"])


def statistics(array: np.ndarray) -> Statistics:
    """The statistics of an array of any strides: bool, integers, floats up to 64 bits, those of ml_dtypes too.

    Raises:
      TypeError: complex or other dtypes.
    """
    measure = _measure(array.dtype)
    total = Statistics()
    for (block,) in blocks(array, items=max(1, _BLOCK_BYTES // array.itemsize)):
        total = total.merge(measure(block))
    return total


def _plain(value: float | int) -> float | int | str:
    return value if math.isfinite(value) else str(value)


def _measure(dtype: np.dtype) -> Callable[[np.ndarray], Statistics]:
    if dtype.kind in "biu":
        return _of_integers
    if dtype in _SIGNED_FLOATS:
        return _of_floats
    if dtype.kind == "V" and dtype.itemsize == 1 and dtype.fields is None and dtype.name in dir(ml_dtypes):
        return _of_bytes
    raise TypeError(f"no statistics of {dtype}")


def _of_integers(block: np.ndarray) -> Statistics:
    return Statistics(block.size, int(block.min()), int(block.max()))


def _infinity_codes() -> dict[np.dtype, int]:
    """Per float dtype of sign and magnitude, the largest magnitude's code that is not NaN."""
    floats = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2]
    table = {np.dtype(f): int(codes(np.array([np.inf], f))[0]) for f in floats}
    return table | {np.dtype(ml_dtypes.float8_e4m3fn): 0x7E}


_SIGNED_FLOATS = _infinity_codes()


def _of_floats(block: np.ndarray) -> Statistics:
    """Two maxima: as unsigned the most negative value (or the largest), as signed the most positive one."""
    bits = codes(block)
    largest = _SIGNED_FLOATS[block.dtype]
    sign = 1 << (8 * bits.itemsize - 1)
    top, positive = int(bits.max()), int(bits.view(f"i{bits.itemsize}").max())
    if positive > largest or top > sign | largest:
        return _without_nan(block, bits & (sign - 1) > largest)
    low = top if top >= sign else int(bits.min())
    high = positive if positive >= 0 else int(bits.min())
    low, high = (float(v) for v in np.array([low, high], bits.dtype).view(block.dtype))
    infinite = math.isinf(low) or math.isinf(high)
    return Statistics(block.size, low, high, 0, _count_of(bits & (sign - 1) == largest) if infinite else 0)


def _without_nan(block: np.ndarray, nan: np.ndarray) -> Statistics:
    values = block[~nan]
    rest = _of_floats(values) if values.size else Statistics()
    return rest.merge(Statistics(count=_count_of(nan), nan_count=_count_of(nan)))


def _of_bytes(block: np.ndarray) -> Statistics:
    """By histogram: the 1-byte dtypes whose codes do not sort by sign and magnitude."""
    seen = np.bincount(codes(block).reshape(-1), minlength=256)
    with np.errstate(all="ignore"):
        values = np.arange(256, dtype=np.uint8).view(block.dtype).astype(np.float64)
    nan, inf = np.isnan(values), np.isinf(values)
    present = values[(seen > 0) & ~nan]
    extremes = (float(present.min()), float(present.max())) if present.size else (math.inf, -math.inf)
    return Statistics(block.size, *extremes, int(seen[nan].sum()), int(seen[inf].sum()))


def _count_of(mask: np.ndarray) -> int:
    return int(np.count_nonzero(mask))
