"""Assembling parts: blocks of source regions, turned and put where they belong in a chunk of the target."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from mappings.geometry import Box, Geometry, Range, box_of, stretches
from mappings.tensors import LogicalTensor
from mappings.work import BLOCK_BYTES, Emit, Move, Part, Read, WorkItem
from transforms.dtypes import numpy_dtype
from transforms.ops import Op, apply_elementwise
from transforms.relayout import transpose_into

Ranges = Mapping[str, Range]
Load = Callable[[LogicalTensor, Box, str], np.ndarray]


def assemble(item: WorkItem, load: Load, buffers: list[np.ndarray]) -> list[np.ndarray]:
    """Fills the parts of a work item.

    Args:
      item: what to do.
      load: reads a box of a logical tensor, decoded to the dtype given where it is quantised; the result may be
        overwritten by the next call.
      buffers: per part a C-contiguous array of its box's shape and dtype; filled and returned.

    Returns:
      One array per part, of the shape of its chunk.
    """
    for part, buffer in zip(item.parts, buffers, strict=True):
        if part.fill is not None:
            buffer.fill(part.fill)
    ops = [tuple(Op.from_json(data) for data in move.ops) for move in item.moves]
    for read in item.reads:
        _place_read(item, read, ops[read.move], load, buffers)
    return buffers


def _place_read(item: WorkItem, read: Read, ops: Sequence[Op], load: Load, buffers: Sequence[np.ndarray]) -> None:
    move = item.moves[read.move]
    ranges = {atom: (0, size) for atom, size in move.sizes.items()} | dict(read.ranges)
    itemsize = numpy_dtype(read.tensor.dtype).itemsize
    wanted = _decoded_dtype(item, read, ops)
    for block in blocks(move.source, ranges, max(1, BLOCK_BYTES // itemsize)):
        raw = load(read.tensor, box_of(move.source, block), wanted)
        for emit in read.emits:
            if any(not block[atom][0] <= at < block[atom][1] for atom, at in emit.at.items()):
                continue
            part = item.parts[emit.part]
            array = apply_elementwise(_select(move.source, block, raw, emit), ops, part.spec.dtype)
            _put(move, block, emit, array, part, buffers[emit.part])


def _decoded_dtype(item: WorkItem, read: Read, ops: Sequence[Op]) -> str:
    """What a quantised tensor is decoded to: the target's dtype when nothing is left to compute, so that it is
    rounded once, else float32."""
    dtypes = {item.parts[emit.part].spec.dtype for emit in read.emits}
    return "bfloat16" if dtypes == {"bfloat16"} and not ops else "float32"


def blocks(source: Geometry, ranges: Ranges, limit: int) -> Iterator[dict[str, Range]]:
    """Cuts ranges of a source into pieces of at most ``limit`` elements, each one contiguous on every axis.

    >>> from mappings.geometry import AxisGeometry, Factor
    >>> axis = lambda atom, size: AxisGeometry((Factor(size, 0, (atom,), (size,)),))
    >>> [b["a"] for b in blocks((axis("a", 5), axis("b", 3)), {"a": (0, 5), "b": (0, 3)}, 6)]
    [(0, 2), (2, 4), (4, 5)]
    """
    atoms = [atom for axis in source for atom in axis.atoms]
    for stretch in stretches(source, ranges):
        yield from _cut(stretch, atoms, limit)


def _cut(ranges: dict[str, Range], atoms: Sequence[str], limit: int) -> Iterator[dict[str, Range]]:
    lengths = [ranges[atom][1] - ranges[atom][0] for atom in atoms]
    if math.prod(lengths) <= limit:
        yield ranges
        return
    first = next(i for i, length in enumerate(lengths) if length > 1)
    rest = math.prod(lengths[first + 1 :])
    step = max(1, limit // rest)
    start, stop = ranges[atoms[first]]
    for low in range(start, stop, step):
        piece = ranges | {atoms[first]: (low, min(low + step, stop))}
        yield from _cut(piece, atoms[first + 1 :], limit)


def _select(source: Geometry, block: Ranges, raw: np.ndarray, emit: Emit) -> np.ndarray:
    """The block as an array over the source's dims, without the dims that the emit fixes."""
    atoms = [atom for axis in source for atom in axis.atoms]
    array = raw.reshape([block[atom][1] - block[atom][0] for atom in atoms])
    index = tuple(emit.at[atom] - block[atom][0] if atom in emit.at else slice(None) for atom in atoms)
    return array[(*index, ...)]  # "..." keeps a scalar an array


def _put(move: Move, block: Ranges, emit: Emit, array: np.ndarray, part: Part, buffer: np.ndarray) -> None:
    source_atoms = [atom for axis in move.source for atom in axis.atoms if atom not in emit.at]
    target_atoms = [atom for axis in move.target for atom in axis.atoms]
    view = _window(move.target, block, part, buffer)
    own = set(source_atoms)
    view = view[(*(slice(None) if atom in own else 0 for atom in target_atoms), ...)]
    axes = tuple(source_atoms.index(atom) for atom in target_atoms if atom in own)
    transpose_into(view, array, axes)


def _window(target: Geometry, block: Ranges, part: Part, buffer: np.ndarray) -> np.ndarray:
    """The view of a part's buffer that a block fills, one axis per dim of the target."""
    factored: list[int] = []
    window: list[slice] = []
    lengths: list[int] = []
    for axis, (start, stop) in zip(target, part.spec.box(part.grid), strict=True):
        row = axis.row
        for f, factor in enumerate(axis.factors):
            low, high = factor.span(block)
            shift = start // row if f == 0 else 0
            factored.append((stop - start) // row if f == 0 else factor.extent)
            window.append(slice(low - shift, high - shift))
            lengths += [block[atom][1] - block[atom][0] for atom in factor.atoms]
    return buffer.reshape(factored)[(*window, ...)].reshape(lengths, copy=False)
