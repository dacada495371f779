"""The work on one item of an export: read its boxes, assemble its parts one by one, write each where it belongs."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mappings.export.grid import Chunk
from mappings.export.items import part_item
from mappings.work import WorkItem
from pipelines.assemble import assemble
from pipelines.exporting.files import ShardFiles
from pipelines.exporting.reading import from_regions, read_regions
from pipelines.memory import shared_budget
from pipelines.orbax_view import OrbaxItem
from pipelines.receipts import Receipts
from pipelines.regions import Scratch, ScratchPool
from transforms.digest import digest
from transforms.statistics import statistics

_pools: dict[str, ScratchPool] = {}


def export_item(
    item: WorkItem,
    places: list[tuple[str, int]],
    chunks: Mapping[str, Chunk],
    source: OrbaxItem,
    files: ShardFiles,
    scratch: Scratch,
) -> dict[str, Any]:
    """Does one work item.

    Args:
      item: what to read and write.
      places: of each part's tensor: its file and the offset of its first byte.
      chunks: of each array that is read: the shape of what is read in one go.
      source: the arrays.
      files: the files.
      scratch: memory to use again.

    Returns:
      The receipt: per part its tensor, grid index, digest and statistics; bytes read and written; seconds.
    """
    started = time.perf_counter()
    load = from_regions(read_regions(item, chunks, source, scratch))
    told = []
    for number, (part, (file, offset)) in enumerate(zip(item.parts, places, strict=True)):
        buffer = scratch.array("part", part.spec.box_shape(part.grid), part.spec.dtype)
        (array,) = assemble(part_item(item, number), load, [buffer])
        files.write(part, file, offset, array)
        told.append({
            "array": part.spec.key,
            "grid": list(part.grid),
            "digest": digest(array),
            "statistics": statistics(array).to_json(),
        })  # fmt: skip
    seconds = round(time.perf_counter() - started, 4)
    return {"item": item.id, "parts": told, "read_bytes": item.read_bytes, "bytes": item.write_bytes,
            "seconds": seconds}  # fmt: skip


@dataclass(frozen=True)
class ExportWork:
    """`export_item` as Beam carries it.

    Attributes:
      source: the arrays.
      files: the files.
      receipts: where receipts go.
      worker_memory_bytes: bound on tensor bytes that one worker process holds at once.
      run_token: names the run; all threads of a process share one budget under it.
    """

    source: OrbaxItem
    files: ShardFiles
    receipts: Receipts
    worker_memory_bytes: int
    run_token: str

    def setup(self) -> None:
        """Nothing to prepare: files open when first written."""

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        one = WorkItem.from_json(item)
        places = [(file, offset) for file, offset in item["places"]]
        chunks = {name: tuple(chunk) for name, chunk in item["chunks"].items()}
        pool = _pools.setdefault(self.run_token, ScratchPool(self.worker_memory_bytes // 2))
        budget = shared_budget(self.run_token, self.worker_memory_bytes)
        with budget.admit(item["held_bytes"]), pool.lend() as scratch:
            receipt = export_item(one, places, chunks, self.source, self.files, scratch)
        self.receipts.add(one.id, receipt)
        return receipt
