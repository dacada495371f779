"""Assembling parts: blocks of source regions, turned and put where they belong in a chunk of the target."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tensorferry.mappings.lowbit.schemes import scheme_of
from tensorferry.mappings.lowbit.tensors import LogicalTensor
from tensorferry.mappings.plan.work import BLOCK_BYTES, Emit, Move, Part, Read, WorkItem
from tensorferry.mappings.rules.geometry import Box, Geometry, Range, box_of, grain_steps, stretches
from tensorferry.transforms.dtypes import numpy_dtype
from tensorferry.transforms.ops import Op, apply_elementwise
from tensorferry.transforms.relayout import transpose_into

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
    for block in blocks(move.source, ranges, max(1, BLOCK_BYTES // itemsize), storage_of(read.tensor)):
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


@dataclass(frozen=True)
class Storage:
    """How the axes of a quantised tensor lie in its files.

    Attributes:
      order: axes as they are stored, slowest first.
      grain: per axis, the multiple at which a read should start and end.
      shared: per axis, the length that shares a scale.
    """

    order: tuple[int, ...]
    grain: tuple[int, ...]
    shared: tuple[int, ...]


def storage_of(tensor: LogicalTensor) -> Storage:
    """The storage of a tensor; a plain one is stored as it is seen."""
    scheme, rank = scheme_of(tensor), len(tensor.shape)
    if scheme is None:
        return Storage(tuple(range(rank)), (1,) * rank, (1,) * rank)
    return Storage(scheme.stored_order(tensor), scheme.granularity(tensor), scheme.shared_runs(tensor))


def blocks(source: Geometry, ranges: Ranges, limit: int, storage: Storage | None = None) -> Iterator[dict[str, Range]]:
    """Cuts ranges of a source into pieces of at most ``limit`` elements, each one contiguous on every axis.

    Args:
      source: the axes.
      ranges: range of every dim.
      limit: elements of a piece; more only where the grains of all axes together are more.
      storage: which axis is cut first, and where.

    >>> from tensorferry.mappings.rules.geometry import AxisGeometry, Factor
    >>> axis = lambda atom, size: AxisGeometry((Factor(size, 0, (atom,), (size,)),))
    >>> [b["a"] for b in blocks((axis("a", 5), axis("b", 3)), {"a": (0, 5), "b": (0, 3)}, 6)]
    [(0, 2), (2, 4), (4, 5)]
    >>> words = Storage((0, 1), (2, 1), (2, 1))
    >>> [b["a"] for b in blocks((axis("a", 7), axis("b", 3)), {"a": (1, 7), "b": (0, 3)}, 8, words)]
    [(1, 2), (2, 4), (4, 6), (6, 7)]
    """
    ones = (1,) * len(source)
    how = storage or Storage(tuple(range(len(source))), ones, ones)
    units, runs = grain_steps(source, how.grain), grain_steps(source, how.shared)
    axes = [(source[axis].atoms, units[axis], runs[axis]) for axis in how.order]
    for stretch in stretches(source, ranges):
        yield from _cut(stretch, axes, limit)


Axes = Sequence[tuple[tuple[str, ...], Mapping[str, int], Mapping[str, int]]]


def _cut(ranges: dict[str, Range], axes: Axes, limit: int) -> Iterator[dict[str, Range]]:
    """Pieces along the first dim that can be cut; each piece is cut further where it is still too big."""
    count = math.prod(ranges[atom][1] - ranges[atom][0] for atoms, _, _ in axes for atom in atoms)
    found = _cuttable(ranges, axes) if count > limit else None
    if found is None:
        yield ranges
        return
    atom, unit, run = found
    low, stop = ranges[atom]
    step = _step(limit // (count // (stop - low)), unit, run)
    while low < stop:
        high = min(low // step * step + step, stop)
        yield from _cut(ranges | {atom: (low, high)}, axes, limit)
        low = high


def _cuttable(ranges: Ranges, axes: Axes) -> tuple[str, int, int] | None:
    """The first dim longer than its unit, with unit and run; on each axis the outermost, or pieces had holes."""
    for atoms, units, runs in axes:
        long = next((atom for atom in atoms if ranges[atom][1] - ranges[atom][0] > 1), None)
        if long is not None and ranges[long][1] - ranges[long][0] > units[long]:
            return long, units[long], runs[long]
    return None


def _step(wanted: int, unit: int, run: int) -> int:
    """At most ``wanted``, but at least ``unit``: whole runs, or an even part of one in whole units.

    >>> _step(300, 8, 128), _step(100, 8, 128), _step(5, 8, 128)
    (256, 64, 8)
    """
    run = math.lcm(unit, run)
    if wanted >= run:
        return wanted // run * run
    return next((step for step in range(wanted // unit * unit, 0, -unit) if run % step == 0), unit)


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
