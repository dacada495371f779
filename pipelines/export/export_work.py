"""The work on one item of an export: read its boxes, assemble its parts one by one, write each where it belongs."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from tensorferry.mappings.export.export_grid import Chunk
from tensorferry.mappings.export.export_items import part_item, without_ops
from tensorferry.mappings.export.low_bit_exports import LowBit
from tensorferry.mappings.export.scale_finish import Finish
from tensorferry.mappings.plan.work import Part, WorkItem
from tensorferry.pipelines.export.array_reading import from_regions, read_regions
from tensorferry.pipelines.export.finishing import finish_scale
from tensorferry.pipelines.export.low_bit_parts import low_bit_part
from tensorferry.pipelines.export.shard_files import ShardFiles
from tensorferry.pipelines.orbax.orbax_view import OrbaxItem
from tensorferry.pipelines.output.receipts import Receipts
from tensorferry.pipelines.regions.assemble import assemble
from tensorferry.pipelines.regions.boxes import Scratch, ScratchPool
from tensorferry.pipelines.storage.byte_budget import shared_budget
from tensorferry.pipelines.storage.byte_source import open_source
from tensorferry.transforms.digest import digest
from tensorferry.transforms.requantise import block_counts
from tensorferry.transforms.statistics import statistics

_pools: dict[str, ScratchPool] = {}


class Files(Protocol):
    """Where parts of tensors are written."""

    def write(self, part: Part, file: str, offset: int, array: np.ndarray) -> None:
        """Writes one part; see `ShardFiles`."""
        ...


@dataclass(frozen=True)
class Task:
    """A work item with what only exports need.

    Attributes:
      item: what to read and write.
      places: of each part's tensor: its file and the offset of its first byte.
      chunks: of each array that is read: the shape of what is read in one go.
      low_bit: part's key to the tensor of the FP8 checkpoint, and the place of its scale.
      finishes: part's key to how the scale in it is finished.
      held_bytes: bound on the tensor bytes that it holds at once.
    """

    item: WorkItem
    places: tuple[tuple[str, int], ...]
    chunks: Mapping[str, Chunk]
    low_bit: Mapping[str, tuple[LowBit, tuple[str, int]]]
    finishes: Mapping[str, Finish]
    held_bytes: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Task":
        return cls(
            WorkItem.from_json(data),
            tuple((file, offset) for file, offset in data["places"]),
            {name: tuple(chunk) for name, chunk in data["chunks"].items()},
            {key: (LowBit.from_json(one), tuple(one["scale_place"])) for key, one in data["low_bit"].items()},
            {key: Finish.from_json(one) for key, one in data["finishes"].items()},
            data["held_bytes"],
        )


def export_item(task: Task, source: OrbaxItem, files: Files, fp8: str, scratch: Scratch) -> dict[str, Any]:
    """Does one work item.

    Args:
      task: what to read and write.
      source: the arrays.
      files: the files.
      fp8: URL of the FP8 checkpoint; empty without.
      scratch: memory to use again.

    Returns:
      The receipt: per part its tensor, grid index, digest and statistics; for low-bit parts those of the scale, and
      how many blocks changed; bytes read and written; seconds.
    """
    started, item = time.perf_counter(), task.item
    load = from_regions(read_regions(item, task.chunks, source, scratch))
    told, scales = [], []
    for number, (part, place) in enumerate(zip(item.parts, task.places, strict=True)):
        buffer = scratch.array("part", part.spec.box_shape(part.grid), part.spec.dtype)
        one = part_item(item, number)
        if part.spec.key in task.low_bit:
            (raw,) = assemble(without_ops(one), load, [buffer])
            written, scale = _write_low_bit(raw, one, task.low_bit[part.spec.key], place, files, fp8)
            scales.append(scale)
        else:
            (written,) = assemble(one, load, [buffer])
            written = _write(part, written, task.finishes.get(part.spec.key), place, files, fp8)
        told.append(_told(part.spec.key, part.grid, written))
    seconds = round(time.perf_counter() - started, 4)
    return {"item": item.id, "parts": told, "scales": scales, "read_bytes": item.read_bytes,
            "bytes": item.write_bytes, "seconds": seconds}  # fmt: skip


def _told(key: str, grid: tuple[int, ...], array: np.ndarray) -> dict[str, Any]:
    array = np.ascontiguousarray(array)
    return {"array": key, "grid": list(grid), "digest": digest(array), "statistics": statistics(array).to_json()}


def _write(
    part: Part, array: np.ndarray, finish: Finish | None, place: tuple[str, int], files: Files, fp8: str
) -> np.ndarray:
    """Writes a part, finished where it is a scale's; what was written."""
    if finish is None:
        files.write(part, *place, array)
        return array
    scale = finish_scale(array, finish, open_source(fp8) if finish.source else None)
    for one, row in _rows(scale, finish):
        files.write(one, *place, row)
    return scale


def _rows(scale: np.ndarray, finish: Finish) -> Iterator[tuple[Part, np.ndarray]]:
    """A whole scale in one piece; that of a part of a weight row by row of its own axis."""
    spec = finish.spec
    if scale.shape == spec.shape:
        yield Part(spec, (0,) * scale.ndim), np.ascontiguousarray(scale)
        return
    dim = finish.scale.params["scale_axes"].index(finish.part_axis)
    chunk = tuple(1 if at == dim else length for at, length in enumerate(spec.chunk))
    for row in range(*finish.box()[dim]):
        grid = tuple(row if at == dim else 0 for at in range(scale.ndim))
        rows = scale.take([row - finish.box()[dim][0]], axis=dim)
        yield Part(replace(spec, chunk=chunk, inner=chunk), grid), np.ascontiguousarray(rows)


def _write_low_bit(
    raw: np.ndarray,
    item: WorkItem,
    low_bit: tuple[LowBit, tuple[str, int]],
    place: tuple[str, int],
    files: Files,
    fp8: str,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Writes codes and scales of the item's only part; the codes, and what is told of the scales."""
    tensor, scale_place = low_bit
    part, ops = item.parts[0], item.moves[item.reads[0].move].ops
    box = part.spec.box(part.grid)
    codes, scales, changed = low_bit_part(raw, box, tensor, ops, open_source(fp8))
    code_spec, scale_spec = tensor.specs(part.spec.chunk)
    files.write(Part(code_spec, part.grid), *place, np.ascontiguousarray(codes))
    scale_part = Part(scale_spec, tensor.scale_grid(part.grid))
    files.write(scale_part, *scale_place, np.ascontiguousarray(scales))
    total = math.prod(block_counts(raw.shape, tensor.blocks))
    return codes, _told(scale_spec.key, scale_part.grid, scales) | {"changed_blocks": changed, "blocks": total}


@dataclass(frozen=True)
class ExportWork:
    """`export_item` as Beam carries it.

    Attributes:
      source: the arrays.
      files: the files.
      receipts: where receipts go.
      fp8: URL of the FP8 checkpoint; empty without.
      worker_memory_bytes: bound on tensor bytes that one worker process holds at once.
      run_token: names the run; all threads of a process share one budget under it.
    """

    source: OrbaxItem
    files: ShardFiles
    receipts: Receipts
    fp8: str
    worker_memory_bytes: int
    run_token: str

    def setup(self) -> None:
        """Nothing to prepare: files open when first written."""

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        task = Task.from_json(item)
        pool = _pools.setdefault(self.run_token, ScratchPool(self.worker_memory_bytes // 2))
        budget = shared_budget(self.run_token, self.worker_memory_bytes)
        with budget.admit(task.held_bytes):
            if 2 * task.held_bytes > self.worker_memory_bytes:
                pool.clear()  # what is kept for later items must not stand beside one that needs nearly all
            with pool.lend() as scratch:
                receipt = export_item(task, self.source, self.files, self.fp8, scratch)
        self.receipts.add(task.item.id, receipt)
        return receipt
