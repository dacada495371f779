"""Work items of an export: parts of Hugging Face tensors that share chunks of the arrays they come from."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mappings.arrays import TargetArray, Use
from mappings.chunking import SMALL_ARRAY_BYTES
from mappings.export.grid import Chunk, Cutting, hull, touched
from mappings.export.low_bit import BYTES_PER_ELEMENT, LowBit
from mappings.export.shards import Place
from mappings.geometry import Box, Range
from mappings.items import MAX_GROUPED_PARTS, merge_items
from mappings.tensors import LogicalTensor
from mappings.work import BLOCK_BYTES, BLOCK_COPIES, Emit, Move, Part, Read, WorkItem
from transforms.dtypes import numpy_dtype


class ExportItems:
    """Makes the work items of an export one by one."""

    def __init__(
        self,
        arrays: Sequence[TargetArray],
        tensors: Mapping[str, LogicalTensor],
        cuttings: Mapping[str, Cutting],
        chunks: Mapping[str, Chunk],
        aim_bytes: int,
    ) -> None:
        self._arrays, self._tensors = arrays, tensors
        self._cuttings, self._chunks = cuttings, chunks
        self._group_bytes = max(SMALL_ARRAY_BYTES, aim_bytes // 8)
        self._moves: dict[int, Move] = {}
        self._count = 0

    def items(self) -> Iterator[WorkItem]:
        """Every work item; those below a megabyte are grouped until they are worth a worker's while."""
        waiting: list[WorkItem] = []
        for item in self._single_items():
            if item.write_bytes >= SMALL_ARRAY_BYTES:
                yield self._numbered([item])
                continue
            waiting.append(item)
            parts = sum(len(one.parts) for one in waiting)
            if parts >= MAX_GROUPED_PARTS or sum(one.write_bytes for one in waiting) >= self._group_bytes:
                yield self._numbered(waiting)
                waiting = []
        if waiting:
            yield self._numbered(waiting)

    def _numbered(self, items: Sequence[WorkItem]) -> WorkItem:
        name = f"{self._count:07d}"
        self._count += 1
        return merge_items(name, items)

    def _single_items(self) -> Iterator[WorkItem]:
        for group in self._groups():
            for cell in group[0].spec.indices():
                yield self._item(group, cell)

    def _groups(self) -> Iterator[Sequence[TargetArray]]:
        """Tensors that lie in the same chunks of their sources, a layer or an expert each."""
        together: dict[tuple, list[TargetArray]] = {}
        for array in self._arrays:
            size = self._cuttings[array.name].group
            rules = tuple(id(use.compiled) for use in array.uses)
            at = tuple((atom, at // size.get(atom, 1)) for atom, at in array.uses[0].at.items())
            key = (rules, at, array.spec.dtype, array.spec.chunk)
            together.setdefault(key, []).append(array)
        yield from together.values()

    def _item(self, group: Sequence[TargetArray], cell: tuple[int, ...]) -> WorkItem:
        box = group[0].spec.box(cell)
        moves: list[Move] = []
        reads: list[Read] = []
        for number, use in enumerate(group[0].uses):
            ranges = use.compiled.ranges(box)
            if ranges is not None:
                moves.append(self._move(use))
                reads += self._reads(use, number, group, ranges, len(moves) - 1)
        parts = tuple(Part(array.spec, cell) for array in group)
        return WorkItem("", tuple(moves), parts, tuple(reads), sum(self._stored_bytes(r, moves) for r in reads))

    def _move(self, use: Use) -> Move:
        compiled = use.compiled
        if id(compiled) not in self._moves:
            ops = tuple(op.to_json() for op in compiled.arithmetic)
            self._moves[id(compiled)] = Move(compiled.source, compiled.target, compiled.sizes, ops)
        return self._moves[id(compiled)]

    def _reads(
        self, use: Use, number: int, group: Sequence[TargetArray], ranges: Mapping[str, Range], move: int
    ) -> Iterator[Read]:
        compiled = use.compiled
        places = [{atom: array.uses[number].at[atom] for atom in compiled.split} for array in group]
        emits = tuple(Emit(part, at) for part, at in enumerate(places))
        fixed = {atom: (min(p[atom] for p in places), max(p[atom] for p in places) + 1) for atom in compiled.split}
        partial = {a: r for a, r in ranges.items() if r != (0, compiled.sizes[a])} | fixed
        for positions in itertools.product(*(range(*ranges[atom]) for atom in compiled.stack)):
            at = dict(zip(compiled.stack, positions, strict=True))
            tensor = self._tensors[use.source_name(at)]
            yield Read(tensor, move, partial | {atom: (p, p + 1) for atom, p in at.items()}, emits)

    def _stored_bytes(self, read: Read, moves: Sequence[Move]) -> int:
        """Bytes that the source decodes for a read: whole chunks."""
        tensor = read.tensor
        elements = touched(read_box(read, moves[read.move]), self._chunks[tensor.name], tensor.shape)
        return numpy_dtype(tensor.dtype).itemsize * elements


def read_box(read: Read, move: Move) -> Box:
    """The box of the source array that a read needs in memory."""
    return hull(move.source, {atom: (0, size) for atom, size in move.sizes.items()} | dict(read.ranges))


def region_bytes(item: WorkItem) -> int:
    """Bytes of everything that an item reads, as it lies in memory."""
    total = 0
    for read in item.reads:
        lengths = (stop - start for start, stop in read_box(read, item.moves[read.move]))
        total += numpy_dtype(read.tensor.dtype).itemsize * math.prod(lengths)
    return total


def reading_bytes(chunk: Chunk, dtype: str) -> int:
    """Bytes that reading one box takes beside its result: a few chunks, as stored and decoded."""
    return 2 * max(BLOCK_BYTES, numpy_dtype(dtype).itemsize * math.prod(chunk))


def held_bytes(item: WorkItem, chunks: Mapping[str, Chunk], low_bit: Mapping[str, LowBit]) -> int:
    """Bound on the tensor bytes that an item holds at once: what it read, the chunks on their way in, one part, the
    blocks between them, and what a low-bit part is worked out from."""
    elements = (math.prod(part.spec.box_shape(part.grid)) for part in item.parts if part.spec.key in low_bit)
    coding = BYTES_PER_ELEMENT * max(elements, default=0)
    largest = max(part.nbytes for part in item.parts)
    reading = max(reading_bytes(chunks[read.tensor.name], read.tensor.dtype) for read in item.reads)
    return region_bytes(item) + reading + largest + BLOCK_COPIES * min(BLOCK_BYTES, largest) + coding


def part_item(item: WorkItem, part: int) -> WorkItem:
    """The item for one of its parts alone, its reads narrowed to what that part needs."""
    reads = [
        Read(read.tensor, read.move, _narrowed(read, item.moves[read.move], emit), (Emit(0, emit.at),))
        for read in item.reads
        for emit in read.emits
        if emit.part == part
    ]
    return WorkItem(item.id, item.moves, (item.parts[part],), tuple(reads), item.read_bytes)


def _narrowed(read: Read, move: Move, emit: Emit) -> Mapping[str, Range]:
    """Ranges of what one emit takes, where that lies together."""
    narrow = {**read.ranges, **{atom: (at, at + 1) for atom, at in emit.at.items()}}
    ranges = {atom: (0, size) for atom, size in move.sizes.items()} | narrow
    return read.ranges if any(axis.scattered(ranges) for axis in move.source) else narrow


def item_json(
    item: WorkItem, places: Mapping[str, Place], chunks: Mapping[str, Chunk], low_bit: Mapping[str, LowBit]
) -> dict[str, Any]:
    """A work item as Beam carries it: with the place of each part's tensor and the chunks of what it reads."""
    names = [low_bit[part.spec.key].codes.name if part.spec.key in low_bit else part.spec.key for part in item.parts]
    return item.to_json() | {
        "places": [[places[name].file, places[name].offset] for name in names],
        "chunks": {read.tensor.name: chunks[read.tensor.name] for read in item.reads},
        "held_bytes": held_bytes(item, chunks, low_bit),
        "low_bit": {part.spec.key: _low_bit_json(low_bit[part.spec.key], places) for part in item.parts
                    if part.spec.key in low_bit},
    }  # fmt: skip


def _low_bit_json(low_bit: LowBit, places: Mapping[str, Place]) -> dict[str, Any]:
    place = places[low_bit.scale.name]
    return {**low_bit.to_json(), "scale_place": [place.file, place.offset]}


def without_ops(item: WorkItem) -> WorkItem:
    """The item that moves elements and computes nothing."""
    return replace(item, moves=tuple(replace(move, ops=()) for move in item.moves))
