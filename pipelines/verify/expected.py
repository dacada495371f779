"""What a chunk must hold, worked out the plain way: numpy's own reshape, transpose and astype, no blocks, no tricks.

Deliberately another road than ``assemble``: `verify` compares the two.
"""

from collections.abc import Callable, Mapping

import numpy as np
from tensorferry.mappings.lowbit.tensors import LogicalTensor
from tensorferry.mappings.plan.work import Emit, Move, Part, Read, WorkItem
from tensorferry.mappings.rules.geometry import AxisGeometry, Box, Range
from tensorferry.transforms.dtypes import numpy_dtype

Load = Callable[[LogicalTensor, Box], np.ndarray]


def expected_parts(item: WorkItem, load: Load) -> list[np.ndarray]:
    """The parts of a work item, from the source.

    Args:
      item: what was to be done.
      load: gives a box of a logical tensor, in its dtype.
    """
    parts = [
        np.full(part.spec.box_shape(part.grid), part.fill or 0, numpy_dtype(part.spec.dtype)) for part in item.parts
    ]
    for read in item.reads:
        move = item.moves[read.move]
        ranges = {atom: (0, size) for atom, size in move.sizes.items()} | dict(read.ranges)
        values = _load(read.tensor, move, ranges, load)
        for emit in read.emits:
            _lay_down(parts[emit.part], item.parts[emit.part], values, move, ranges, read, emit)
    return parts


def _load(tensor: LogicalTensor, move: Move, ranges: Mapping[str, Range], load: Load) -> np.ndarray:
    """The elements that ranges mean; where they lie apart, what lies between is read too and dropped."""
    positions = [axis_positions(axis, ranges) for axis in move.source]
    values = load(tensor, tuple((int(p[0]), int(p[-1]) + 1) for p in positions))
    return values[_selector([p - p[0] for p in positions])]


def _lay_down(
    out: np.ndarray, part: Part, values: np.ndarray, move: Move, ranges: Mapping[str, Range], read: Read, emit: Emit
) -> None:
    source_dims = [dim for axis in move.source for dim in axis.atoms]
    target_dims = [dim for axis in move.target for dim in axis.atoms]
    array = values.reshape([ranges[dim][1] - ranges[dim][0] for dim in source_dims])
    for position, dim in reversed(list(enumerate(source_dims))):
        if dim in emit.at:
            array = np.take(array, emit.at[dim] - ranges[dim][0], axis=position)
    kept = [dim for dim in source_dims if dim not in emit.at]
    new = [dim for dim in target_dims if dim not in kept]
    array = array.reshape(array.shape + (1,) * len(new))
    array = array.transpose([(kept + new).index(dim) for dim in target_dims])
    array = _rounded(_computed(array, move), part.spec.dtype)
    lengths, where = [], []
    for axis, (start, _) in zip(move.target, part.spec.box(part.grid), strict=True):
        positions = axis_positions(axis, ranges) - start
        lengths.append(len(positions))
        where.append(positions)
    out[_selector(where)] = array.reshape(lengths)


def axis_positions(axis: AxisGeometry, ranges: Mapping[str, Range]) -> np.ndarray:
    """Every index along a stored axis that ranges of its dims mean, in row-major order of the dims."""
    positions = np.zeros(1, np.int64)
    for factor in axis.factors:
        inside = np.zeros(1, np.int64)
        for dim, size in zip(factor.atoms, factor.sizes, strict=True):
            inside = (inside[:, None] * size + np.arange(*ranges[dim])).reshape(-1)
        positions = (positions[:, None] * factor.extent + factor.offset + inside).reshape(-1)
    return positions


def _selector(where: list[np.ndarray]) -> tuple:
    """Slices where the positions run on, else an open mesh of them."""
    if all(len(p) == p[-1] - p[0] + 1 for p in where):
        return tuple(slice(p[0], p[-1] + 1) for p in where)
    return np.ix_(*where)


def _computed(array: np.ndarray, move: Move) -> np.ndarray:
    for op in move.ops:
        array = array.astype(np.float32)
        if op["op"] == "scale":
            array = array * np.float32(op["factor"])
        elif op["op"] == "shift":
            array = array + np.float32(op["by"])
        elif op["op"] == "round_to":
            array = array.astype(numpy_dtype(op["dtype"]))
        else:
            raise ValueError(f"no plain form of op {op['op']!r}")
    return array


def _rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    wanted = numpy_dtype(dtype)
    return array if array.dtype == wanted else array.astype(wanted)
