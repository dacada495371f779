"""Reading boxes of Orbax arrays, chunk by chunk: what is on its way stays small, whatever the box."""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from tensorferry.mappings.export.export_grid import Chunk
from tensorferry.mappings.export.export_items import is_taken_whole, read_box, stored_boxes
from tensorferry.mappings.lowbit.schemes import scheme_of
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.work import BLOCK_BYTES, WorkItem
from tensorferry.mappings.rules.geometry import Box
from tensorferry.pipelines.orbax.orbax_view import OrbaxItem, read_region
from tensorferry.pipelines.regions.boxes import Scratch, box_shape
from tensorferry.pipelines.regions.decode_region import decode_region
from tensorferry.transforms.decode.scales import scale_values
from tensorferry.transforms.dtypes import numpy_dtype
from tensorferry.transforms.unfold import unfold

if TYPE_CHECKING:
    from tensorferry.pipelines.regions.assemble import Load

Regions = list[tuple[str, Box, np.ndarray]]


def read_regions(item: WorkItem, chunks: Mapping[str, Chunk], source: OrbaxItem, scratch: Scratch) -> Regions:
    """Everything that a work item reads: array name, box, values (C-contiguous, valid until the scratch is used)."""
    boxes = {
        (stored.name, box): stored
        for read in item.reads
        for stored, box in stored_boxes(read.tensor, read_box(read, item.moves[read.move]))
    }
    copied = {key: stored for key, stored in boxes.items() if not _is_taken(key[1], stored, chunks)}
    sizes = [math.prod(box_shape(box)) * numpy_dtype(stored.dtype).itemsize for (_, box), stored in copied.items()]
    arena, at, regions = scratch.take("regions", sum(-(-size // 64) * 64 for size in sizes)), 0, []
    for ((name, box), stored), size in zip(copied.items(), sizes, strict=True):
        out = arena[at : at + size].view(numpy_dtype(stored.dtype)).reshape(box_shape(box))
        read_into(out, source, stored, box, chunks[name])
        regions.append((name, box, out))
        at += -(-size // 64) * 64
    taken = [(key, stored) for key, stored in boxes.items() if key not in copied]
    return regions + [(name, box, read_region(source.open(one.file), one.file, box)) for (name, box), one in taken]


def _is_taken(box: Box, stored: StoredTensor, chunks: Mapping[str, Chunk]) -> bool:
    return is_taken_whole(box, chunks[stored.name], stored.dtype)


def read_into(out: np.ndarray, source: OrbaxItem, stored: StoredTensor, box: Box, chunk: Chunk) -> None:
    """Fills ``out`` with a box of an array.

    Raises:
      FerryError: its bytes are damaged or missing.
    """
    key = stored.file
    array = source.open(key)
    for piece in pieces(box, chunk, max(1, BLOCK_BYTES // out.itemsize)):
        inside = tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(piece, box, strict=True))
        out[inside] = read_region(array, key, piece)


def pieces(box: Box, chunk: Chunk, limit: int) -> Iterator[Box]:
    """Cuts a box at chunk borders into pieces of at most ``limit`` elements; a bigger chunk is a piece of its own.

    >>> list(pieces(((1, 5), (0, 3)), (2, 3), 6))
    [((1, 2), (0, 3)), ((2, 4), (0, 3)), ((4, 5), (0, 3))]
    """
    steps, volume = list(chunk), math.prod(chunk)
    for axis in reversed(range(len(chunk))):
        start, stop = box[axis]
        most = max(1, limit // volume)
        cells = -(-stop // chunk[axis]) - start // chunk[axis]
        steps[axis] = chunk[axis] * min(most, cells)
        volume *= min(most, cells)
        if most < cells:
            break
    yield from itertools.product(
        *(_spans(span, step, unit) for span, step, unit in zip(box, steps, chunk, strict=True))
    )


def _spans(span: tuple[int, int], step: int, unit: int) -> list[tuple[int, int]]:
    first = span[0] // unit * unit
    return [(max(low, span[0]), min(low + step, span[1])) for low in range(first, span[1], step)]


def from_regions(regions: Regions) -> "Load":
    """How parts are assembled from what was read: views; only FP8 codes that leave as numbers are copied."""

    def view(name: str, box: Box) -> np.ndarray:
        for found, hull, values in regions:
            if found == name and _inside(box, hull):
                return values[tuple(slice(low - h, high - h) for (low, high), (h, _) in zip(box, hull, strict=True))]
        raise KeyError(name)

    def load(tensor: LogicalTensor, box: Box, dtype: str) -> np.ndarray:
        scheme = scheme_of(tensor)
        if scheme is None:
            return view(tensor.stored["values"].name, box)
        roles = scheme.stored_box(tensor, box)
        arrays = {role: view(tensor.stored[role].name, one) for role, one in roles.items()}
        arrays["scale"] = unfold(scale_values(arrays["scale"]), tensor.params["folded"])
        return decode_region(tensor, box, arrays, dtype)

    return load


def _inside(box: Box, hull: Box) -> bool:
    return all(start <= low and high <= stop for (low, high), (start, stop) in zip(box, hull, strict=True))
