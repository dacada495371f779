"""Work items from target arrays: one outer chunk each, tiny ones grouped, interleaved ones together."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from tensorferry.mappings.lowbit.schemes import factor_bytes, is_merged, merged_base
from tensorferry.mappings.lowbit.tensors import LogicalTensor
from tensorferry.mappings.plan.target_arrays import TargetArray, Use
from tensorferry.mappings.plan.work import Emit, Move, Part, Read, WorkItem
from tensorferry.mappings.rules.chunking import SMALL_ARRAY_BYTES
from tensorferry.mappings.rules.compiled import CompiledRule
from tensorferry.mappings.rules.geometry import Range, hull_of

MAX_GROUPED_PARTS = 256

# Arrays that one read must serve together, with the chunk grid they share.
_Group = Sequence[TargetArray]


class ItemMaker:
    """Makes the work items of a plan one by one."""

    def __init__(
        self, arrays: Sequence[TargetArray], tensors: Mapping[str, LogicalTensor], chunk_bytes: int, bound_bytes: int
    ) -> None:
        """Prepares to make the items.

        Args:
          arrays: every target array.
          tensors: the source.
          chunk_bytes: aim for one chunk.
          bound_bytes: what a worker may hold; no group takes more than half of it.
        """
        self._arrays = arrays
        self._tensors = tensors
        self._group_bytes = max(SMALL_ARRAY_BYTES, chunk_bytes // 8)
        self._bound_bytes = bound_bytes
        self._moves: dict[int, Move] = {}
        self._count = 0

    def items(self) -> Iterator[WorkItem]:
        """Every work item; those below a megabyte are grouped until they are worth a worker's while."""
        waiting: list[WorkItem] = []
        waiting_bytes = peak_bytes = 0
        for item in self._single_items():
            item_bytes = item.write_bytes
            if item_bytes >= SMALL_ARRAY_BYTES:
                yield self._numbered([item])
                continue
            if waiting and 2 * (peak_bytes + item.peak_bytes) > self._bound_bytes:
                yield self._numbered(waiting)
                waiting, waiting_bytes, peak_bytes = [], 0, 0
            waiting.append(item)
            waiting_bytes += item_bytes
            peak_bytes += item.peak_bytes
            if len(waiting) >= MAX_GROUPED_PARTS or waiting_bytes >= self._group_bytes:
                yield self._numbered(waiting)
                waiting, waiting_bytes, peak_bytes = [], 0, 0
        if waiting:
            yield self._numbered(waiting)

    def _numbered(self, items: Sequence[WorkItem]) -> WorkItem:
        name = f"{self._count:07d}"
        self._count += 1
        return merge_items(name, items)

    def _single_items(self) -> Iterator[WorkItem]:
        for group in _groups(self._arrays):
            for cell in group[0].spec.indices():
                yield self._item(group, cell)

    def _item(self, group: _Group, cell: tuple[int, ...]) -> WorkItem:
        box = group[0].spec.box(cell)
        moves: list[Move] = []
        reads: list[Read] = []
        for use in group[0].uses:
            ranges = use.compiled.ranges(box)
            if ranges is not None:
                moves.append(self._move(use.compiled))
                reads += self._reads(use, group, ranges, len(moves) - 1)
        fills = [use.compiled.fill for use in group[0].uses if use.compiled.fill is not None]
        parts = tuple(Part(array.spec, cell, fills[0] if fills else None) for array in group)
        return WorkItem("", tuple(moves), parts, tuple(reads), sum(_read_bytes(r, moves) for r in reads))

    def _move(self, compiled: CompiledRule) -> Move:
        key = id(compiled)
        if key not in self._moves:
            ops = tuple(op.to_json() for op in compiled.arithmetic)
            self._moves[key] = Move(compiled.source, compiled.target, compiled.sizes, ops)
        return self._moves[key]

    def _reads(self, use: Use, group: _Group, ranges: Mapping[str, Range], move: int) -> Iterator[Read]:
        compiled = use.compiled
        if compiled.rule.value is not None:
            return
        shared = compiled.shared_reads
        emits = tuple(
            Emit(i, {atom: array.uses[0].at[atom] for atom in compiled.split}) for i, array in enumerate(group)
        )
        fixed = {} if shared else {atom: (use.at[atom], use.at[atom] + 1) for atom in compiled.split}
        partial = {a: r for a, r in ranges.items() if r != (0, compiled.sizes[a])} | fixed
        stack = [range(*ranges[atom]) for atom in compiled.stack]
        for positions in itertools.product(*stack):
            at = dict(zip(compiled.stack, positions, strict=True))
            tensor = self._tensors.get(use.source_name(at))
            if tensor is None:
                assert compiled.rule.optional, f"no tensor {use.source_name(at)}"
                continue
            here = partial | {atom: (p, p + 1) for atom, p in at.items()}
            yield Read(tensor, move, here, emits)


def _groups(arrays: Sequence[TargetArray]) -> Iterator[_Group]:
    """Arrays one by one, except those whose elements interleave in one source: they go together."""
    together: dict[tuple, list[TargetArray]] = {}
    for array in arrays:
        compiled = array.uses[0].compiled
        key: tuple = (array.name,)
        if compiled.shared_reads:
            same = tuple(array.uses[0].at[atom] for atom in compiled.named if atom not in compiled.split)
            key = (id(compiled), same)
        together.setdefault(key, []).append(array)
    yield from together.values()


def _read_bytes(read: Read, moves: Sequence[Move]) -> int:
    """Bytes that a read takes from the source: its share of the stored tensors."""
    move = moves[read.move]
    ranges = {atom: (0, size) for atom, size in move.sizes.items()} | dict(read.ranges)
    share = math.prod(ranges[atom][1] - ranges[atom][0] for axis in move.source for atom in axis.atoms)
    total = math.prod(read.tensor.shape) or 1
    factors, _ = factor_bytes(read.tensor, hull_of(move.source, ranges)) if is_merged(read.tensor) else (0, 0)
    return -(-merged_base(read.tensor).nbytes * share // total) + factors


def merge_items(name: str, items: Sequence[WorkItem]) -> WorkItem:
    """Several small items as one; indices of parts and moves shift."""
    moves: list[Move] = []
    parts: list[Part] = []
    reads: list[Read] = []
    for item in items:
        reads += [_shift(read, len(moves), len(parts)) for read in item.reads]
        moves += item.moves
        parts += item.parts
    return WorkItem(name, tuple(moves), tuple(parts), tuple(reads), sum(item.read_bytes for item in items))


def _shift(read: Read, moves: int, parts: int) -> Read:
    if not moves and not parts:
        return read
    emits = tuple(Emit(emit.part + parts, emit.at) for emit in read.emits)
    return Read(read.tensor, read.move + moves, read.ranges, emits)
