"""Relayout: moving elements into another axis order, exactly, at a few times the cost of a plain copy."""

from collections.abc import Iterable
from math import prod

import numpy as np
from tensorferry.transforms.views import boxes, codes

# A tile of 256 source elements by 512 target elements measured best for items of 1 to 8 bytes: both sides move
# whole cache lines, and the tile stays inside an L2 cache.
_SOURCE_RUN = 256
_OUT_RUN = 512
_TILE_ITEMS = 1 << 16
_TILE_RUN_BYTES = 4096
_SMALL_BYTES = 1 << 15
_LONG_RUN_BYTES = 128
_SHORT_AXIS = 16
# Rows of a power of two would meet in the same few cache sets.
_PAD_BYTES = 64


def transpose_into(out: np.ndarray, source: np.ndarray, axes: tuple[int, ...]) -> None:
    """Writes ``source.transpose(axes)`` into ``out``, bit for bit, with a scratch of at most 1 MiB.

    Args:
      out: the target, any strided view (a slice of a larger chunk buffer); must not overlap ``source``.
      source: elements of 1, 2, 4 or 8 bytes, any strides, of the dtype of ``out``.
      axes: ``out`` axis ``i`` is ``source`` axis ``axes[i]``.

    Raises:
      ValueError: dtypes or shapes differ, ``axes`` is no permutation, or the item size is not supported.
    """
    copy_into(out, source.transpose(axes))


def copy_into(out: np.ndarray, source: np.ndarray) -> None:
    """Copies ``source`` into ``out``: strided views of one shape and dtype, whatever axis is fastest in each.

    Raises:
      ValueError: dtypes or shapes differ, or the item size is not 1, 2, 4 or 8 bytes.
    """
    if out.shape != source.shape or out.dtype != source.dtype:
        raise ValueError(f"cannot copy {source.dtype}{source.shape} into {out.dtype}{out.shape}")
    out, source = codes(out), codes(source)
    if out.nbytes > _SMALL_BYTES:
        out, source = _widened(*_merged(out, source))
        if not _share_long_run(out, source):
            _copy_tiles(out, source)
            return
    np.copyto(out, source)


def _merged(out: np.ndarray, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both views, slowest axis of ``out`` first, no axes of length 1, neighbours that stay together merged."""
    order = sorted((d for d in range(out.ndim) if out.shape[d] > 1), key=lambda d: -abs(out.strides[d]))
    rest = tuple(d for d in range(out.ndim) if out.shape[d] <= 1)
    out, source = out.transpose((*rest, *order)), source.transpose((*rest, *order))
    shape: list[int] = []
    for axis in range(len(rest), out.ndim):
        size = out.shape[axis]
        if shape and all(a.strides[axis - 1] == a.strides[axis] * size for a in (out, source)):
            shape[-1] *= size
        else:
            shape.append(size)
    return out.reshape(shape), source.reshape(shape)


def _widened(out: np.ndarray, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A contiguous run that stays at the end of both, as wider items: fewer and larger moves."""
    width = _wide_itemsize(out, source)
    if width == out.itemsize:
        return out, source
    # complex128 is numpy's only 16-byte item that it moves in one go.
    wide = np.dtype(np.complex128 if width == 16 else f"u{width}")
    out, source = out.view(wide), source.view(wide)
    return (out[..., 0], source[..., 0]) if out.shape[-1] == 1 else (out, source)


def _wide_itemsize(out: np.ndarray, source: np.ndarray) -> int:
    size = out.itemsize
    if out.strides[-1] != size or source.strides[-1] != size:
        return size
    steps = [out.shape[-1] * size, *out.strides[:-1], *source.strides[:-1]]
    places = [a.__array_interface__["data"][0] for a in (out, source)]
    for width in (16, 8, 4, 2):
        if width > size and not any(s % width for s in steps) and not any(p % min(width, 8) for p in places):
            return width
    return size


def _share_long_run(out: np.ndarray, source: np.ndarray) -> bool:
    if out.ndim <= 1:
        return True
    run_bytes = out.shape[-1] * out.itemsize
    return out.strides[-1] == source.strides[-1] == out.itemsize and run_bytes >= _LONG_RUN_BYTES


def _copy_tiles(out: np.ndarray, source: np.ndarray) -> None:
    """Tile by tile through a scratch in the order of ``source``, so neither side is walked in long strides."""
    by_source = sorted(range(source.ndim), key=lambda d: -abs(source.strides[d]))
    tile = _tile_shape(out.shape, by_source, out.itemsize)
    scratch = _scratch(tile, by_source, out.dtype)
    for box in boxes(out.shape, tile):
        piece = source[box]
        held = scratch[tuple(map(slice, piece.shape))]
        np.copyto(held, piece)
        _scatter(out[box], held)


def _tile_shape(shape: tuple[int, ...], by_source: list[int], itemsize: int) -> list[int]:
    tile = [1] * len(shape)
    fastest_first = range(len(shape) - 1, -1, -1)
    _grow(tile, shape, reversed(by_source), _SOURCE_RUN)
    _grow(tile, shape, fastest_first, min(_OUT_RUN, _TILE_RUN_BYTES // itemsize))
    _fill(tile, shape, fastest_first)
    return tile


def _grow(tile: list[int], shape: tuple[int, ...], fastest_first: Iterable[int], run: int) -> None:
    """Makes the fastest axes of ``tile`` hold at least ``run`` elements, where the array has them."""
    for axis in fastest_first:
        if run > 1:
            whole = shape[axis] <= run * 3 // 2
            tile[axis] = max(tile[axis], shape[axis] if whole else run)
            run = -(-run // tile[axis])


def _fill(tile: list[int], shape: tuple[int, ...], fastest_first: Iterable[int]) -> None:
    """Short axes make small tiles: adds length until the cost of a step no longer shows."""
    for axis in fastest_first:
        spare = _TILE_ITEMS // prod(tile)
        if spare > 1:
            tile[axis] = min(shape[axis], tile[axis] * spare)


def _scratch(tile: list[int], by_source: list[int], dtype: np.dtype) -> np.ndarray:
    """An empty tile whose memory order is that of the source, rows padded apart."""
    ordered = [tile[d] for d in by_source]
    row = ordered[-1]
    padded = row + max(1, _PAD_BYTES // dtype.itemsize) if row * dtype.itemsize >= 128 else row
    flat = np.empty((prod(ordered[:-1]), padded), dtype)[:, :row]
    return flat.reshape(ordered).transpose(np.argsort(by_source))


def _scatter(out: np.ndarray, held: np.ndarray) -> None:
    """numpy's innermost loop runs along the last axis: short ones are taken apart to leave a longer one there."""
    short = out.shape[-1]
    if out.ndim > 1 and short < _SHORT_AXIS and out.size >= 1024 * short:
        for index in range(short):
            _scatter(out[..., index], held[..., index])
    else:
        np.copyto(out, held)
