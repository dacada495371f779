"""Work items of an export: parts of Hugging Face tensors that share chunks of the arrays they come from."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tensorferry.mappings.export.export_grid import Chunk, Cutting, hull, in_one_chunk, reading_extra, touched
from tensorferry.mappings.export.low_bit_exports import BYTES_PER_ELEMENT, LowBit
from tensorferry.mappings.export.scale_finish import COPIES, Finish
from tensorferry.mappings.export.shards import Place
from tensorferry.mappings.lowbit.schemes import scheme_of
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.target_arrays import TargetArray, Use
from tensorferry.mappings.plan.work import BLOCK_BYTES, BLOCK_COPIES, Emit, Move, Part, Read, WorkItem
from tensorferry.mappings.plan.work_items import MAX_GROUPED_PARTS, merge_items
from tensorferry.mappings.rules.chunking import SMALL_ARRAY_BYTES
from tensorferry.mappings.rules.compiled import CompiledRule
from tensorferry.mappings.rules.geometry import Box, Range
from tensorferry.transforms.dtypes import numpy_dtype


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
        self._moves: dict[tuple[int, bool], Move] = {}
        self._count = 0

    def items(self) -> Iterator[WorkItem]:
        """Every work item; those below a megabyte are grouped until they are worth a worker's while."""
        waiting: list[WorkItem] = []
        parts = nbytes = 0
        for item in self._single_items():
            item_bytes = item.write_bytes
            if item_bytes >= SMALL_ARRAY_BYTES:
                yield self._numbered([item])
                continue
            waiting.append(item)
            parts, nbytes = parts + len(item.parts), nbytes + item_bytes
            if parts >= MAX_GROUPED_PARTS or nbytes >= self._group_bytes:
                yield self._numbered(waiting)
                waiting, parts, nbytes = [], 0, 0
        if waiting:
            yield self._numbered(waiting)

    def of_tensor(self, array: TargetArray) -> Iterator[WorkItem]:
        """The work items of one tensor alone, its parts in the order of their bytes."""
        for cell in array.spec.indices():
            yield self._item([array], cell)

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
                moves.append(self._move(use.compiled, self._is_unfolded(use)))
                reads += self._reads(use, number, group, ranges, len(moves) - 1)
        parts = tuple(Part(array.spec, cell) for array in group)
        return WorkItem("", tuple(moves), parts, tuple(reads), sum(self._stored_bytes(r, moves) for r in reads))

    def _is_unfolded(self, use: Use) -> bool:
        """Whether factors are taken out of scales as they are read, so that none is left for the values."""
        first = self._tensors[use.source_name(dict.fromkeys(use.compiled.stack, 0))]
        return bool(first.params.get("folded"))

    def _move(self, compiled: CompiledRule, unfolded: bool) -> Move:
        key = (id(compiled), unfolded)
        if key not in self._moves:
            ops = () if unfolded else tuple(op.to_json() for op in compiled.arithmetic)
            self._moves[key] = Move(compiled.source, compiled.target, compiled.sizes, ops)
        return self._moves[key]

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
        return sum(
            numpy_dtype(stored.dtype).itemsize * touched(box, self._chunks[stored.name], stored.shape)
            for stored, box in stored_boxes(read.tensor, read_box(read, moves[read.move]))
        )


def stored_dtype(tensor: LogicalTensor) -> str:
    """The dtype of an array's elements, decoded or not."""
    return tensor.stored["values"].dtype


def stored_boxes(tensor: LogicalTensor, box: Box) -> list[tuple[StoredTensor, Box]]:
    """What a box of a tensor needs of arrays: a box of the codes and one of their scale where it is decoded."""
    scheme = scheme_of(tensor)
    boxes = {"values": box} if scheme is None else scheme.stored_box(tensor, box)
    return [(tensor.stored[role], boxes[role]) for role in boxes]


def read_box(read: Read, move: Move) -> Box:
    """The box of the source array that a read needs in memory."""
    return hull(move.source, {atom: (0, size) for atom, size in move.sizes.items()} | dict(read.ranges))


def region_bytes(item: WorkItem) -> int:
    """Bytes of everything that an item reads, as it lies in memory."""
    return sum(
        numpy_dtype(stored.dtype).itemsize * math.prod(stop - start for start, stop in box)
        for read in item.reads
        for stored, box in stored_boxes(read.tensor, read_box(read, item.moves[read.move]))
    )


def chunk_bytes(chunk: Chunk, dtype: str) -> int:
    """Bytes of what is read in one go, decoded."""
    return numpy_dtype(dtype).itemsize * math.prod(chunk)


def is_taken_whole(box: Box, chunk: Chunk, dtype: str) -> bool:
    """Whether a box is read in one go and stays where the store put it: it lies in one chunk, and that is big."""
    return chunk_bytes(chunk, dtype) > BLOCK_BYTES and in_one_chunk(box, chunk)


def held_bytes(
    item: WorkItem, chunks: Mapping[str, Chunk], low_bit: Mapping[str, LowBit], finishes: Mapping[str, Finish]
) -> int:
    """Bound on the tensor bytes that an item holds at once: what it read, and either the chunks on their way in, or one
    part, the blocks between them, and what a low-bit part or a finished scale is worked out from."""
    elements = (math.prod(part.spec.box_shape(part.grid)) for part in item.parts if part.spec.key in low_bit)
    coding = BYTES_PER_ELEMENT * max(elements, default=0)
    finishing = COPIES * max((part.nbytes for part in item.parts if part.spec.key in finishes), default=0)
    largest = max(part.nbytes for part in item.parts)
    writing = largest + BLOCK_COPIES * min(BLOCK_BYTES, largest) + coding + finishing
    return region_bytes(item) + max(writing, _reading_bytes(item, chunks))


def _reading_bytes(item: WorkItem, chunks: Mapping[str, Chunk]) -> int:
    """Bytes that reading takes at most beside what is read: a few chunks, as stored and decoded."""
    extra = 0
    for read in item.reads:
        for stored, box in stored_boxes(read.tensor, read_box(read, item.moves[read.move])):
            chunk, whole = chunks[stored.name], chunk_bytes(chunks[stored.name], stored.dtype)
            region = numpy_dtype(stored.dtype).itemsize * math.prod(stop - start for start, stop in box)
            one = is_taken_whole(box, chunk, stored.dtype)
            extra = max(extra, reading_extra(region, whole) if one else 2 * max(BLOCK_BYTES, whole))
    return extra


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
    item: WorkItem,
    places: Mapping[str, Place],
    chunks: Mapping[str, Chunk],
    low_bit: Mapping[str, LowBit],
    finishes: Mapping[str, Finish],
) -> dict[str, Any]:
    """A work item as Beam carries it: with the place of each part's tensor and the chunks of what it reads."""
    keys = [part.spec.key for part in item.parts]
    written = {key: low_bit[key].codes.name for key in keys if key in low_bit}
    written |= {key: finishes[key].stored.name for key in keys if key in finishes}
    where = [places[written.get(key, key)] for key in keys]
    return item.to_json() | {
        "places": [[place.file, place.offset] for place in where],
        "chunks": {one.name: chunks[one.name] for read in item.reads for one in read.tensor.stored.values()},
        "held_bytes": held_bytes(item, chunks, low_bit, finishes),
        "low_bit": {key: _low_bit_json(low_bit[key], places) for key in keys if key in low_bit},
        "finishes": {key: finishes[key].to_json() for key in keys if key in finishes},
    }


def _low_bit_json(low_bit: LowBit, places: Mapping[str, Place]) -> dict[str, Any]:
    place = places[low_bit.scale.name]
    return {**low_bit.to_json(), "scale_place": [place.file, place.offset]}


def without_ops(item: WorkItem) -> WorkItem:
    """The item that moves elements and computes nothing."""
    return replace(item, moves=tuple(replace(move, ops=()) for move in item.moves))
