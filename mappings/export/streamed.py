"""Files written front to back, for stores that take whole objects: each is one piece of work, its parts in order."""

from collections.abc import Iterator
from typing import Any

from tensorferry.mappings.export.export_items import ExportItems
from tensorferry.mappings.export.export_plan import ExportPlan
from tensorferry.mappings.export.shards import Shard, all_places
from tensorferry.mappings.plan.work import WorkItem
from tensorferry.mappings.words.problems import Problem

# Beside the tensors: the pieces of a file that are on their way to the store.
UPLOAD_BYTES = 24 << 20


def not_streamable(plan: ExportPlan) -> Problem | None:
    """Why the files of an export cannot be written front to back; None when they can."""
    if not (plan.low_bit or plan.copied or plan.finishes):
        return None
    return Problem(
        "--fp8-from",
        "weights without scales of their own, whose files are written front to back",
        "codes and scales, which are made together and lie apart",
        "Give --staging DIR: the files are built there and then copied.",
    )


def streamed_shards(plan: ExportPlan) -> Iterator[tuple[Shard, dict[str, Any], tuple[WorkItem, ...]]]:
    """Every file, its work as Beam carries it, and the work items that write it, in the order of its bytes.

    Args:
      plan: one whose tensors are cut along their first axis alone (``Wanted.streamed``).
    """
    places = all_places(plan.shards)
    arrays = {array.name: array for array in plan.arrays}
    maker = ExportItems(plan.arrays, plan.tensors, plan.cuttings, plan.chunks, plan.options.effective_chunk_bytes)
    for shard in plan.shards:
        items = tuple(item for tensor in shard.tensors for item in maker.of_tensor(arrays[tensor.key]))
        tasks = [plan.item_json(item, places) for item in items]
        line = {
            "id": shard.file,
            "header": shard.header.decode("latin-1"),
            "nbytes": shard.nbytes,
            "held_bytes": max((task["held_bytes"] for task in tasks), default=0) + UPLOAD_BYTES,
            "tasks": tasks,
        }
        yield shard, line, items
