"""Work items: what to read, how to turn it, what to write. Small plain data; the only thing that Beam carries."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensorferry.mappings.lowbit.schemes import factor_bytes, is_merged
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.rules.geometry import AxisGeometry, Factor, Geometry, Range, hull_of
from tensorferry.transforms.dtypes import numpy_dtype

# A read streams through in blocks of about this size; a block exists as stored bytes, decoded and cast.
BLOCK_BYTES = 4 << 20
BLOCK_COPIES = 4


@dataclass(frozen=True, slots=True)
class Move:
    """How one rule's source axes lie in its target axes; shared by all reads of an item that follow the rule.

    Attributes:
      source: geometry of a source tensor.
      target: geometry of the target array.
      sizes: length of every dim.
      ops: the rule's elementwise ops, as JSON.
    """

    source: Geometry
    target: Geometry
    sizes: Mapping[str, int]
    ops: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """One whole outer chunk of one target array (clipped to the array at its end).

    Attributes:
      spec: the target array.
      grid: chunk index per axis.
      fill: what elements without a source are (zero in a padded vocabulary); None when all have one.
    """

    spec: ArraySpec
    grid: tuple[int, ...]
    fill: float | None = None

    @property
    def nbytes(self) -> int:
        return numpy_dtype(self.spec.dtype).itemsize * math.prod(self.spec.box_shape(self.grid))


@dataclass(frozen=True, slots=True)
class Emit:
    """Where a read goes: a part of the item, at fixed positions of the dims that the source holds for all parts.

    Attributes:
      part: index into the item's parts.
      at: split dim to position (``{"part": 1}`` takes the up half of a fused gate_up).
    """

    part: int
    at: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Read:
    """One source tensor's region, read once, placed into one or more parts.

    Attributes:
      tensor: what is read.
      move: index into the item's moves.
      ranges: dim to range, for dims that are not whole; dims of stacked axes are single positions.
      emits: where it goes.
    """

    tensor: LogicalTensor
    move: int
    ranges: Mapping[str, Range]
    emits: tuple[Emit, ...]


@dataclass(frozen=True, slots=True)
class WorkItem:
    """What one worker does in one go, without looking at anything else.

    Attributes:
      id: unique in the plan.
      moves: geometries that the reads refer to.
      parts: chunks that it writes.
      reads: regions that it reads; together they fill the parts.
      read_bytes: bytes it reads from the source.
    """

    id: str
    moves: tuple[Move, ...]
    parts: tuple[Part, ...]
    reads: tuple[Read, ...]
    read_bytes: int

    @property
    def write_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def peak_bytes(self) -> int:
        """Bound on tensor bytes that the item holds at once when its parts are encoded one after the other."""
        return self.held_bytes + max((part.nbytes for part in self.parts), default=0)

    @property
    def held_bytes(self) -> int:
        """Bound on tensor bytes without what the writer encodes: the parts, and the blocks that stream into them."""
        return self.write_bytes + BLOCK_COPIES * min(BLOCK_BYTES, max(self.read_bytes, 1)) + self.factor_bytes

    @property
    def factor_bytes(self) -> int:
        """Bound on bytes of low-rank factors that are held at once, those of the largest read."""
        merged = (read for read in self.reads if is_merged(read.tensor))
        return max((_factor_bytes(read, self.moves[read.move]) for read in merged), default=0)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; ``from_json`` is the inverse."""
        return {
            "id": self.id,
            "moves": [_move_json(move) for move in self.moves],
            "parts": [[_spec_json(p.spec), p.grid, p.fill] for p in self.parts],
            "reads": [_read_json(read) for read in self.reads],
            "read_bytes": self.read_bytes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "WorkItem":
        parts = tuple(Part(_spec(spec), tuple(grid), fill) for spec, grid, fill in data["parts"])
        moves = tuple(_move(move) for move in data["moves"])
        return cls(data["id"], moves, parts, tuple(_read(read) for read in data["reads"]), data["read_bytes"])


def _factor_bytes(read: Read, move: Move) -> int:
    ranges = {atom: (0, size) for atom, size in move.sizes.items()} | dict(read.ranges)
    _, held = factor_bytes(read.tensor, hull_of(move.source, ranges))
    return held


def _spec_json(spec: ArraySpec) -> list[Any]:
    return [spec.path, spec.dtype, spec.shape, spec.chunk, spec.inner]


def _spec(data: list[Any]) -> ArraySpec:
    path, dtype, *lengths = data
    return ArraySpec(tuple(path), dtype, *(tuple(one) for one in lengths))


def _geometry_json(geometry: Geometry) -> list[Any]:
    return [[[f.extent, f.offset, f.atoms, f.sizes] for f in axis.factors] for axis in geometry]


def _geometry(data: list[Any]) -> Geometry:
    return tuple(
        AxisGeometry(tuple(Factor(e, o, tuple(atoms), tuple(sizes)) for e, o, atoms, sizes in axis)) for axis in data
    )


def _move_json(move: Move) -> list[Any]:
    return [_geometry_json(move.source), _geometry_json(move.target), dict(move.sizes), list(move.ops)]


def _move(data: list[Any]) -> Move:
    source, target, sizes, ops = data
    return Move(_geometry(source), _geometry(target), sizes, tuple(ops))


def _stored_json(tensor: StoredTensor) -> list[Any]:
    return [tensor.name, tensor.dtype, tensor.shape, tensor.file, tensor.offset]


def _read_json(read: Read) -> list[Any]:
    tensor = read.tensor
    stored = {role: _stored_json(one) for role, one in tensor.stored.items()}
    logical = [tensor.name, tensor.shape, tensor.dtype, stored, tensor.scheme, tensor.params]
    return [logical, read.move, dict(read.ranges), [[emit.part, dict(emit.at)] for emit in read.emits]]


def _stored(data: list[Any]) -> StoredTensor:
    name, dtype, shape, file, offset = data
    return StoredTensor(name, dtype, tuple(shape), file, offset)


def _read(data: list[Any]) -> Read:
    (name, shape, dtype, stored, scheme, params), move, ranges, emits = data
    roles = {role: _stored(one) for role, one in stored.items()}
    logical = LogicalTensor(name, tuple(shape), dtype, roles, scheme, params)
    return Read(
        logical,
        move,
        {atom: (start, stop) for atom, (start, stop) in ranges.items()},
        tuple(Emit(part, at) for part, at in emits),
    )
