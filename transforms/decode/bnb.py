"""Kernel for bitsandbytes 4-bit: one flat run of nibbles, high nibble first, absmax per flat block."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from tensorferry.transforms.decode.rows import CHUNK_VALUES, write_rounded
from tensorferry.transforms.decode.scales import scale_values
from tensorferry.transforms.decode.tables import as_items, gather, nibble_table


def decode_bnb4(
    arrays: Mapping[str, np.ndarray],
    out: np.ndarray,
    *,
    row_shape: Sequence[int],
    window: Sequence[Sequence[int]],
    lead: int,
    block: int,
    block_offset: int,
    nested_block: int = 0,
    nested_offset: int = 0,
    absmax_plus: float = 0.0,
) -> None:
    """Decodes whole rows of a flat 4-bit tensor and keeps a window of each.

    Args:
      arrays: ``values`` uint8 (flat, or ``[bytes, 1]``), ``code`` float32 ``[16]``, ``absmax`` (float32, or
        uint8 with ``nested_code`` float32 ``[256]`` and ``nested_absmax`` float32).
      out: float32 or bfloat16 ``[rows, *window]``.
      row_shape: shape of a whole row; ``window``: (start, stop) of the region along each of its axes.
      lead: values before the region in its first byte (0 or 1).
      block: values per absmax; ``block_offset``: how far into the first absmax' block the region starts.
      nested_block, nested_offset: the same for absmax values per nested absmax.
      absmax_plus: added to a nested absmax.
    """
    values = arrays["values"].reshape(-1)
    items = as_items(nibble_table(arrays["code"].astype(np.float32), high_first=True))
    absmax = _absmax(arrays, nested_block, nested_offset, absmax_plus)
    row = math.prod(row_shape)
    step = max(1, CHUNK_VALUES // max(row, 1))
    keep = (slice(None), *(slice(start, stop) for start, stop in window))
    for start in range(0, out.shape[0], step):
        rows = min(step, out.shape[0] - start)
        chunk = _decode_flat(values, items, absmax, lead, start * row, rows * row, block, block_offset)
        write_rounded(out[start : start + rows], chunk.reshape(rows, *row_shape)[keep])


def _absmax(arrays: Mapping[str, np.ndarray], block: int, offset: int, plus: float) -> np.ndarray:
    stored = arrays["absmax"].reshape(-1)
    if "nested_absmax" not in arrays:
        return scale_values(stored)
    nested = np.repeat(scale_values(arrays["nested_absmax"].reshape(-1)), block)[offset : offset + stored.size]
    return arrays["nested_code"].astype(np.float32)[stored] * nested + np.float32(plus)


def _decode_flat(
    values: np.ndarray,
    items: np.ndarray,
    absmax: np.ndarray,
    lead: int,
    start: int,
    count: int,
    block: int,
    block_offset: int,
) -> np.ndarray:
    """Values ``[start, start + count)`` of the region, float32."""
    first, last = (lead + start) // 2, -(-(lead + start + count) // 2)
    decoded = np.empty((last - first) * 2, np.float32)
    gather(items, values[first:last], decoded)
    skip = (lead + start) % 2
    flat = decoded[skip : skip + count]
    first_block, offset = divmod(block_offset + start, block)
    entries = absmax[first_block : -(-(block_offset + start + count) // block)]
    return np.multiply(flat, np.repeat(entries, block)[offset : offset + count], out=flat)
