"""Kernels for codes with a scale per block: FP8, MXFP8, MXFP4, NVFP4, int8."""

from collections.abc import Mapping, Sequence

import numpy as np
from tensorferry.transforms.decode.grid import Grid
from tensorferry.transforms.decode.rows import as_matrix, code_bytes, scaled_rows
from tensorferry.transforms.decode.scales import block_index, scale_values


def decode_scaled(
    arrays: Mapping[str, np.ndarray],
    out: np.ndarray,
    *,
    code: str,
    blocks: Sequence[int],
    offsets: Sequence[int],
    encoding: str = "float",
    lead: int = 0,
    order: Sequence[int] | None = None,
    row_edges: Sequence[int] = (),
    global_scale: str = "",
    divisor: float = 1.0,
) -> None:
    """Decodes a region of codes whose scales lie on a grid of blocks.

    Args:
      arrays: ``values`` (codes: one-byte floats or bytes), ``scale``, and, when the scheme has them, ``zero``
        (zero points on the scale's grid) and ``global`` (one factor, or one per entry of axis 0).
      out: float32 or bfloat16, the region.
      code: what a byte means, see :mod:`tensorferry.transforms.decode.tables`.
      blocks: block length per axis in stored order; 0 when one scale serves the whole axis.
      offsets: how far into its first block the region starts, per axis.
      encoding: of the scale, see :func:`tensorferry.transforms.decode.scales.scale_values`.
      lead: values in each stored row before the region.
      order: stored axis k is axis ``order[k]`` of ``out``; None when they agree.
      row_edges: when parts of the row axis have a scale each: where each part starts and ends in the region.
      global_scale: what ``global`` does to the scale: ``multiply`` or ``divide``.
      divisor: divides the result (127 for bitsandbytes int8).
    """
    target = as_matrix(out if order is None else out.transpose(order))
    pad = [0] * (target.ndim - len(blocks))
    shape, blocks, offsets = target.shape, pad + list(blocks), pad + list(offsets)
    scale = scale_values(arrays["scale"], encoding)
    if row_edges:
        scale, blocks[-2] = _rows_of_parts(scale, row_edges), 1
    if global_scale:
        scale = _apply_global(Grid.of(scale, shape, blocks, offsets).values, arrays["global"], global_scale)
    zero = arrays.get("zero")
    scaled_rows(
        target,
        code_bytes(arrays["values"], max(out.ndim, 1)),
        code,
        Grid.of(scale, shape, blocks, offsets),
        None if zero is None else Grid.of(scale_values(zero), shape, blocks, offsets),
        lead,
        divisor,
    )


def decode_scale(
    arrays: Mapping[str, np.ndarray],
    out: np.ndarray,
    *,
    encoding: str,
    blocks: Sequence[int],
    offsets: Sequence[int],
    grains: Sequence[int],
    row_edges: Sequence[int] = (),
) -> None:
    """Writes the scale itself as numbers: one per block, or one per even part of a block.

    Arguments as in :func:`decode_scaled`; ``out`` is float32 (or bfloat16, rounded once). ``blocks`` and ``offsets``
    count in elements of the weight; so do ``grains``, the elements per entry of ``out``, 0 where that is a block.
    """
    scale = scale_values(arrays["scale"], encoding)
    if row_edges:
        scale = _rows_of_parts(scale, row_edges)
    index = [
        block_index(n, block, offset, grain) if grain else np.arange(n)
        for n, block, offset, grain in zip(out.shape, blocks, offsets, grains, strict=True)
    ]
    scale = scale.reshape([int(places[-1]) + 1 for places in index])
    np.copyto(out, scale[np.ix_(*index)] if index else scale, casting="unsafe")


def _rows_of_parts(scale: np.ndarray, row_edges: Sequence[int]) -> np.ndarray:
    """``[..., parts]`` to ``[..., rows, 1]``: each part's scale once per row of it."""
    rows = np.diff(np.asarray(row_edges))
    return np.repeat(scale.reshape(*scale.shape[:-1], len(rows)), rows, axis=-1)[..., None]


def _apply_global(scale: np.ndarray, factor: np.ndarray, how: str) -> np.ndarray:
    factor = scale_values(factor)
    factor = factor.reshape(factor.size, *[1] * (scale.ndim - 1)) if factor.size > 1 else factor.reshape(())
    return scale * factor if how == "multiply" else scale / factor
