"""W + scale B A with the same bits however W is cut, and whatever multiplies B by A.

A sum of products in floating point depends on its order, and so on the library, the machine and the shape of the
region. Here every entry of A and B is first rounded to a grid that is common to its column of A or row of B, of just
so many bits that any sum over the rank fits into float64 without rounding: 24 for a rank up to 32, 22 for 512. That
loses no more than float32 products and sums do, and makes the product exact in any order.
"""

import numpy as np

from transforms.cast import cast, cast_into

# Scratch of about 2 MiB: a product in float64, and its sum with the weights in float32.
_STRIP_ITEMS = 1 << 17
_EXACT_BITS = 53


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
        _add(target, some, on_grid(left, 1), on_grid(right, 0), scale)


def _add(out: np.ndarray, values: np.ndarray, left: np.ndarray, right: np.ndarray, scale: float) -> None:
    step = max(1, _STRIP_ITEMS // max(1, out.shape[1]))
    for row in range(0, len(out), step):
        product = left[row : row + step] @ right
        np.multiply(product, scale, out=product)
        added = product.astype(np.float32)
        with np.errstate(all="ignore"):
            np.add(added, cast(values[row : row + step], "float32"), out=added)
        cast_into(out[row : row + step], added)


def on_grid(factor: np.ndarray, axis: int) -> np.ndarray:
    """A factor in float64, its entries along the rank rounded to a grid of their largest.

    Args:
      factor: two axes, finite.
      axis: that of the rank.
    """
    out = np.empty(factor.shape, np.float64)
    bits = grid_bits(factor.shape[axis])
    step = max(1, _STRIP_ITEMS // max(1, factor.shape[axis]))
    for start in range(0, factor.shape[1 - axis], step):
        at = (slice(None),) * (1 - axis) + (slice(start, start + step),)
        wide = factor[at].astype(np.float64)
        _, exponent = np.frexp(np.abs(wide).max(axis, keepdims=True))
        np.ldexp(wide, bits - exponent, out=wide)
        np.ldexp(np.rint(wide, out=wide), exponent - bits, out=out[at])
    return out


def grid_bits(rank: int) -> int:
    """Bits of an entry so that a sum of ``rank`` products of two such is exact in float64.

    >>> grid_bits(1), grid_bits(16), grid_bits(64), grid_bits(512)
    (26, 24, 23, 22)
    """
    return (_EXACT_BITS - (rank - 1).bit_length()) // 2
