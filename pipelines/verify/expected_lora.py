"""What a merged weight must hold, worked out in whole numbers: another road than the one that wrote it.

Entries of the factors are split into two limbs, whole multiples of a unit of their row or column; products and sums of
limbs are whole numbers below 2**53.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tensorferry.mappings.lowbit.merged import FACTORS, factor_boxes
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.rules.geometry import Box
from tensorferry.transforms.lowrank import limb_bits

Read = Callable[[StoredTensor, Box], np.ndarray]

_STRIP_ITEMS = 1 << 17


def merged_region(tensor: LogicalTensor, box: Box, base: np.ndarray, read: Read) -> np.ndarray:
    """A box of a merged weight in float32, from the same box of its base.

    Args:
      tensor: the merged weight.
      box: (start, stop) per axis.
      base: its base there.
      read: gives a box of a stored tensor.
    """
    boxes = factor_boxes(tensor, box)
    a, b = (read(tensor.stored[role], boxes[role]) for role in FACTORS)
    own = tensor.params["expert"]
    return expected_merged(base, a, b, tensor.params, own if own >= 0 else box[0][0])


def expected_merged(
    values: np.ndarray, a: np.ndarray, b: np.ndarray, params: Mapping[str, Any], first_expert: int
) -> np.ndarray:
    """A region of W + scale B A in float32.

    Args:
      values: W there, ``[rows, cols]`` or ``[experts, rows, cols]``.
      a: the rows of A for the region's experts, its columns for the region.
      b: the rows of B for the region, all its columns: those of expert e are every ``experts``-th from e on.
      params: see :mod:`tensorferry.mappings.lowbit.merged`.
      first_expert: of the region.
    """
    out = values.astype(np.float32)
    stack = out if out.ndim == 3 else out[None]
    rank = params["rank"]
    for n in range(len(stack)):
        own_a, own_b = a[n * rank : (n + 1) * rank], b[:, first_expert + n :: params["experts"]]
        rows, cols = (own_a.T, own_b.T) if params["transposed"] else (own_b, own_a)
        left, right = _whole(rows.T), _whole(cols)
        step = max(1, _STRIP_ITEMS // max(1, stack.shape[2]))
        for row in range(0, stack.shape[1], step):
            here = slice(row, row + step)
            exact = _scaled(left, right, here, 0, 0)
            exact = exact + (_scaled(left, right, here, 0, 1) + _scaled(left, right, here, 1, 0))
            # The sum with zero makes a negative zero a positive one.
            stack[n, here] += (exact * params["scale"]).astype(np.float32) + np.float32(0)
    return out


@dataclass(frozen=True)
class _Whole:
    """``[rank, columns]`` as whole numbers: two limbs, and each column's unit of each."""

    limbs: tuple[np.ndarray, np.ndarray]
    units: tuple[np.ndarray, np.ndarray]


def _scaled(left: _Whole, right: _Whole, here: slice, one: int, other: int) -> np.ndarray:
    whole = left.limbs[one].T[here] @ right.limbs[other]
    return whole * left.units[one][here, None] * right.units[other]


def _whole(factor: np.ndarray) -> _Whole:
    wide, bits = factor.astype(np.float64), limb_bits(len(factor))
    largest = np.abs(wide).max(0)
    # The power of two above the largest entry; a logarithm may be one off next to a power of two.
    above = np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 0.5))) + 1)
    above = np.where(above <= largest, above * 2, np.where(above > 2 * largest, above / 2, above))
    units = above * 2.0**-bits, above * 2.0 ** (-2 * bits)
    high = np.rint(wide / units[0])
    return _Whole((high, np.rint((wide - high * units[0]) / units[1])), units)
