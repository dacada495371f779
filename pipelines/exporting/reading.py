"""Reading boxes of Orbax arrays, chunk by chunk: what is on its way stays small, whatever the box."""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from mappings.export.grid import Chunk
from mappings.export.items import read_box
from mappings.geometry import Box
from mappings.tensors import LogicalTensor
from mappings.work import BLOCK_BYTES, WorkItem
from pipelines.orbax_view import OrbaxItem, read_region
from pipelines.regions import Scratch, box_shape
from transforms.dtypes import numpy_dtype

if TYPE_CHECKING:
    from pipelines.assemble import Load

Regions = list[tuple[str, Box, np.ndarray]]


def read_regions(item: WorkItem, chunks: Mapping[str, Chunk], source: OrbaxItem, scratch: Scratch) -> Regions:
    """Everything that a work item reads: array name, box, values (C-contiguous, valid until the scratch is used)."""
    boxes = {(read.tensor.name, read_box(read, item.moves[read.move])): read.tensor for read in item.reads}
    sizes = [math.prod(box_shape(box)) * numpy_dtype(tensor.dtype).itemsize for (_, box), tensor in boxes.items()]
    arena, at, regions = scratch.take("regions", sum(-(-size // 64) * 64 for size in sizes)), 0, []
    for ((name, box), tensor), size in zip(boxes.items(), sizes, strict=True):
        out = arena[at : at + size].view(numpy_dtype(tensor.dtype)).reshape(box_shape(box))
        read_into(out, source, tensor, box, chunks[name])
        regions.append((name, box, out))
        at += -(-size // 64) * 64
    return regions


def read_into(out: np.ndarray, source: OrbaxItem, tensor: LogicalTensor, box: Box, chunk: Chunk) -> None:
    """Fills ``out`` with a box of an array.

    Raises:
      FerryError: its bytes are damaged or missing.
    """
    key = tensor.stored["values"].file
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
    """How parts are assembled from what was read: views, nothing is copied."""

    def load(tensor: LogicalTensor, box: Box, _: str) -> np.ndarray:
        for name, hull, values in regions:
            if name == tensor.name and _inside(box, hull):
                return values[tuple(slice(low - h, high - h) for (low, high), (h, _) in zip(box, hull, strict=True))]
        raise KeyError(tensor.name)

    return load


def _inside(box: Box, hull: Box) -> bool:
    return all(start <= low and high <= stop for (low, high), (start, stop) in zip(box, hull, strict=True))
