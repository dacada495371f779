"""W + scale B A with the same bits however W is cut, and whatever multiplies B by A.

A sum of products in floating point depends on its order, and so on the library, the machine and the shape of the
region. Here every entry of A and B is first split into a high and a low limb on grids common to its column of A or row
of B, of just so many bits (24 for a rank up to 32, 22 for 512) that a sum of products of limbs over the rank is exact
in float64, in any order; so is that of high with low and low with high together. Both add up to far more than float32
holds.
"""

import numpy as np
from tensorferry.transforms.cast import cast, cast_into

# Scratch of 3 MiB, used again: two products in float64, and their sum with the weights in float32.
_STRIP_ITEMS = 1 << 17
_EXACT_BITS = 53
# One row or column in so many is few: multiplied apart, they cost less than all do.
_FEW = 8


def add_product(
    out: np.ndarray,
    values: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    *,
    scale: float,
    rank: int,
    transposed: bool = False,
    experts: int = 1,
    first_expert: int = 0,
) -> None:
    """Writes ``values + scale * (b @ a)``: product exact, scaled and added in float32, rounded once to ``out``.

    Args:
      out: the region, ``[rows, cols]`` or ``[experts in it, rows, cols]``, any strides; may be ``values``.
      values: the weights of the region, of any float dtype.
      a: ``[rank, cols]``; with several experts ``[rank of expert after expert, cols]`` for the region's own.
      b: ``[rows, rank]``; with several experts ``[rows, (rank expert)]`` for all of them.
      scale: what the product is multiplied by.
      rank: of one expert.
      transposed: the weights are ``[in, out]``: ``a`` is then ``[rank, rows]`` and ``b`` is ``[cols, rank]``.
      experts: how many ``b`` holds.
      first_expert: the expert of the region's first entry.
    """
    whole, weights = (out, values) if out.ndim == 3 else (out[None], values[None])
    for n, (target, some) in enumerate(zip(whole, weights, strict=True)):
        own_a = a[n * rank : (n + 1) * rank]
        own_b = b.reshape(len(b), rank, experts)[:, :, first_expert + n]
        left, right = (own_a.T, own_b.T) if transposed else (own_b, own_a)
        _add(target, some, limbs(left, 1), limbs(right, 0), scale)


def _add(out: np.ndarray, values: np.ndarray, left: np.ndarray, right: np.ndarray, scale: float) -> None:
    rank, cols = left.shape[1] // 2, out.shape[1]
    step = max(1, min(len(out), _STRIP_ITEMS // max(1, cols)))
    product, small = np.empty((step, cols)), np.empty((step, cols))
    added = np.empty((step, cols), np.float32)
    low = np.flatnonzero(right[:rank].any(0))
    few = right[:rank, low] if len(low) * _FEW <= cols else None
    for row in range(0, len(out), step):
        some = left[row : row + step]
        n = len(some)
        np.matmul(some[:, :rank], right[rank:], out=product[:n])
        if _low_product(some, right, low, few, small[:n]):
            np.add(product[:n], small[:n], out=product[:n])
        np.multiply(product[:n], scale, out=added[:n], casting="same_kind")
        with np.errstate(all="ignore"):
            # A zero from a multiplication may have either sign.
            np.add(added[:n], np.float32(0), out=added[:n])
            np.add(added[:n], cast(values[row : row + step], "float32"), out=added[:n])
        cast_into(out[row : row + step], added[:n])


def _low_product(left: np.ndarray, right: np.ndarray, low: np.ndarray, few: np.ndarray | None, out: np.ndarray) -> bool:
    """The sum of high with low and low with high; False, and nothing written, where there is no low limb.

    Factors of few bits, such as bfloat16, have few low limbs: then those alone are multiplied. Being exact, the sum is
    the same either way.

    Args:
      left: ``[rows, (high low)]``.
      right: ``[(low high), cols]``.
      low: the columns of ``right`` with a low limb.
      few: their low limbs, where they are few.
      out: ``[rows, cols]``.
    """
    rank = left.shape[1] // 2
    rows = np.flatnonzero(left[:, rank:].any(1))
    if not len(rows) and not len(low):
        return False
    if few is None or len(rows) * _FEW > len(left):
        np.matmul(left, right, out=out)
        return True
    out.fill(0)
    out[:, low] = left[:, :rank] @ few
    out[rows] += left[rows, rank:] @ right[rank:]
    return True


def limbs(factor: np.ndarray, axis: int) -> np.ndarray:
    """A factor as two, whose sum it is, each with its entries along the rank on a grid common to them.

    Args:
      factor: two axes, finite.
      axis: that of the rank.

    Returns:
      Both along the axis of the rank, in float64: of B ``[out, (high low)]``, of A ``[(low high), in]``, so that one
      product of the whole is that of high with low and of low with high.
    """
    rank = factor.shape[axis]
    out = np.empty((factor.shape[0], 2 * rank) if axis else (2 * rank, factor.shape[1]), np.float64)
    high, low = (out[:, :rank], out[:, rank:]) if axis else (out[rank:], out[:rank])
    bits = limb_bits(rank)
    step = max(1, _STRIP_ITEMS // 4 // rank)
    for start in range(0, factor.shape[1 - axis], step):
        at = (slice(None),) * (1 - axis) + (slice(start, start + step),)
        wide = factor[at].astype(np.float64)
        _, exponent = np.frexp(np.abs(wide).max(axis, keepdims=True))
        _round_to(wide, exponent - bits, high[at])
        _round_to(wide - high[at], exponent - 2 * bits, low[at])
    return out


def _round_to(values: np.ndarray, exponent: np.ndarray, out: np.ndarray) -> None:
    """Rounds to multiples of two to the power of an exponent."""
    steps = np.ldexp(values, -exponent)
    np.ldexp(np.rint(steps, out=steps), exponent, out=out)


def limb_bits(rank: int) -> int:
    """Bits of a limb so that a sum of ``rank`` products of two limbs is exact in float64.

    >>> limb_bits(1), limb_bits(16), limb_bits(64), limb_bits(512)
    (26, 24, 23, 22)
    """
    return (_EXACT_BITS - (rank - 1).bit_length()) // 2
