"""A scale (or zero point) for every block of a tensor, handed out for a few rows at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tensorferry.transforms.decode.scales import block_index


@dataclass(frozen=True, eq=False)
class Grid:
    """One value per block of a region, same rank as the region.

    Attributes:
      values: float32, one entry per block touched, along every axis.
      blocks: block length per axis; 0 when one entry serves the whole axis.
      offsets: how far into its first block the region starts, per axis.
      column_index: entry of each column of the last axis, in place of its block (act-order), or None.
    """

    values: np.ndarray
    blocks: tuple[int, ...]
    offsets: tuple[int, ...]
    column_index: np.ndarray | None = None

    @classmethod
    def of(cls, values: np.ndarray, shape: tuple[int, ...], blocks: list[int], offsets: list[int]) -> "Grid":
        """A grid whose entries come in any shape of the right number of elements (axes of one entry left out)."""
        entries = [-(-(offset + n) // b) if b else 1 for n, b, offset in zip(shape, blocks, offsets, strict=True)]
        return cls(values.reshape(entries), tuple(blocks), tuple(offsets))

    def at(self, index: tuple[int, ...]) -> "Grid":
        """The grid of one matrix, at ``index`` of the leading axes."""
        steps = zip(index, self.blocks, self.offsets, strict=False)
        entry = tuple((offset + i) // b if b else 0 for i, b, offset in steps)
        return Grid(self.values[entry], self.blocks[-2:], self.offsets[-2:], self.column_index)

    def row_runs(self, rows: int, limit: int) -> Iterator[tuple[int, int]]:
        """Row ranges of a matrix, at most ``limit`` long, in which either all rows share entries or none do."""
        block, offset = (self.blocks[0], self.offsets[0]) if self.values.shape[0] > 1 else (0, 0)
        start = 0
        while start < rows:
            stop = min(rows, start + limit)
            if block > 1:
                stop = min(stop, ((offset + start) // block + 1) * block - offset)
            yield start, stop
            start = stop

    def rows(self, start: int, stop: int, width: int) -> np.ndarray:
        """Values for rows ``[start, stop)`` of a matrix ``width`` wide, to broadcast: ``[1 | rows, 1 | width]``."""
        block, offset = self.blocks[0], self.offsets[0]
        if self.values.shape[0] == 1:
            entries = self.values
        elif block == 1:
            entries = self.values[start:stop]
        else:
            entries = self.values[(offset + start) // block][None]
        return self._columns(entries, width)

    def _columns(self, entries: np.ndarray, width: int) -> np.ndarray:
        if self.column_index is not None:
            return np.take(entries, self.column_index, axis=1)
        block, offset = self.blocks[1], self.offsets[1]
        if entries.shape[1] == 1 or block == 1:
            return entries
        return np.repeat(entries, block, axis=1)[:, offset : offset + width]


def constant_grid(value: float, ndim: int) -> Grid:
    """The same value everywhere."""
    return Grid(np.full((1,) * ndim, value, np.float32), (0,) * ndim, (0,) * ndim)


def index_grid(grid: Grid, group_of_column: np.ndarray, group: int, first_column: int) -> Grid:
    """A grid whose columns follow ``g_idx``; left as it is when ``g_idx`` only counts groups in order."""
    columns = np.asarray(group_of_column).astype(np.intp)
    first_group = first_column // group if group else 0
    plain = first_group + block_index(len(columns), group, first_column % group if group else 0)
    if np.array_equal(columns, plain):
        entries = grid.values[:, first_group : first_group + int(plain[-1] - first_group) + 1]
        offsets = (grid.offsets[0], first_column % group if group else 0)
        return Grid(entries, (grid.blocks[0], group), offsets)
    return Grid(grid.values, grid.blocks, grid.offsets, columns)
