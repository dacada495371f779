"""The work on one item, or on a group of them: read ranges, fill parts, write them, leave a receipt."""

import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from tensorferry.mappings.lowbit.schemes import scheme_of
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.groups import Group
from tensorferry.mappings.plan.work import Part, WorkItem
from tensorferry.mappings.rules.geometry import Box
from tensorferry.pipelines.engine import progress
from tensorferry.pipelines.engine.cluster_args import NETWORK_THREADS
from tensorferry.pipelines.output.bucket_receipts import BucketReceipts
from tensorferry.pipelines.output.receipts import Receipts
from tensorferry.pipelines.regions.adapter_bytes import open_with_adapter
from tensorferry.pipelines.regions.assemble import Load, assemble
from tensorferry.pipelines.regions.boxes import Scratch, ScratchPool, box_shape, read_box
from tensorferry.pipelines.regions.decode_region import decode_region
from tensorferry.pipelines.regions.read_turns import shared_turns
from tensorferry.pipelines.sinks.sink import Sink
from tensorferry.pipelines.storage.bucket_stream import whole_again
from tensorferry.pipelines.storage.byte_budget import shared_budget
from tensorferry.pipelines.storage.byte_source import ByteSource
from tensorferry.pipelines.storage.kvstores import is_local
from tensorferry.transforms.digest import digest
from tensorferry.transforms.dtypes import numpy_dtype
from tensorferry.transforms.statistics import statistics

_ALIGNMENT = 64
_pools: dict[str, ScratchPool] = {}


def _nothing() -> None:
    """Nobody wants to know."""


def load_region(source: ByteSource, scratch: Scratch) -> Load:
    """How a box of a logical tensor is read and decoded.

    The result is valid until the next call; a quantised tensor comes rounded once to the dtype that is wanted.
    """
    read = reading(source, scratch)

    def load(tensor: LogicalTensor, box: Box, wanted: str) -> np.ndarray:
        scheme = scheme_of(tensor)
        if scheme is None:
            return read_box(source, tensor.stored["values"], box, scratch)
        boxes = scheme.stored_box(tensor, box)
        arrays = {role: read(role, tensor.stored[role], stored_box) for role, stored_box in boxes.items()}
        order, shape = scheme.memory_order(tensor), box_shape(box)
        out = scratch.array("decoded", tuple(shape[axis] for axis in order), wanted).transpose(np.argsort(order))
        return decode_region(tensor, box, arrays, wanted, out)

    return load


def reading(source: ByteSource, scratch: Scratch) -> Callable[[str, StoredTensor, Box], np.ndarray]:
    """How the parts of a quantised tensor are read, by role: what it has beside its codes is kept until another
    region of that role is asked for, as the blocks of a tensor share their scales."""
    held: dict[str, tuple[StoredTensor, Box, np.ndarray]] = {}

    def read(role: str, stored: StoredTensor, box: Box) -> np.ndarray:
        if role in held and held[role][:2] == (stored, box):
            return held[role][2]
        array = read_box(source, stored, box, scratch, role)
        if role != "values":
            held[role] = (stored, box, array)
        return array

    return read


def ferry(
    item: WorkItem | Group, source: ByteSource, sink: Sink, scratch: Scratch, has_read: Callable[[], None] = _nothing
) -> dict[str, Any]:
    """Does one work item, or those of a group one after another.

    Args:
      item: what to read and write.
      source: the checkpoint's files.
      sink: takes whole chunks.
      scratch: memory to use again.
      has_read: called before a work item is written.

    Returns:
      The receipt: per part its array, grid index, digest and statistics; bytes read and written; seconds.

    Raises:
      FerryError: the source or the sink failed, with the sentence to show.
      PassingFault: an upload is lost that may succeed when the whole is done again.
    """
    started = time.perf_counter()
    attempt = f"{item.id}-{uuid.uuid4().hex[:8]}"
    parts: list[dict[str, Any]] = []
    progress.begin()
    with sink.open_part(attempt) as writer:
        for one in _items(item):
            arrays = assemble(one, load_region(source, scratch), part_buffers(one, scratch))
            has_read()
            parts += [_part_receipt(part, array, writer.write) for part, array in zip(one.parts, arrays, strict=True)]
            progress.advance(one.write_bytes)
    return {
        "item": item.id,
        "attempt": attempt,
        "parts": parts,
        "read_bytes": item.read_bytes,
        "bytes": item.write_bytes,
        "seconds": round(time.perf_counter() - started, 4),
    }


def _items(item: WorkItem | Group) -> tuple[WorkItem, ...]:
    return item.items if isinstance(item, Group) else (item,)


def held_bytes(item: WorkItem | Group, sink: Sink) -> int:
    """Bound on the bytes that `ferry` holds at once, the writer's included."""
    return max(one.held_bytes + sink.encoding_bytes([part.nbytes for part in one.parts]) for one in _items(item))


def part_buffers(item: WorkItem, scratch: Scratch) -> list[np.ndarray]:
    """One C-contiguous buffer per part, all cut from one stretch of memory."""
    sizes = [-(-part.nbytes // _ALIGNMENT) * _ALIGNMENT for part in item.parts]
    arena, at = scratch.take("parts", sum(sizes)), 0
    buffers = []
    for part, size in zip(item.parts, sizes, strict=True):
        octets = arena[at : at + part.nbytes]
        buffers.append(octets.view(numpy_dtype(part.spec.dtype)).reshape(part.spec.box_shape(part.grid)))
        at += size
    return buffers


def _part_receipt(part: Part, array: np.ndarray, write: Callable[..., None]) -> dict[str, Any]:
    receipt = {
        "array": part.spec.key,
        "grid": list(part.grid),
        "digest": digest(array),
        "statistics": statistics(array).to_json(),
    }
    write(part.spec, part.grid, array)
    return receipt


@dataclass(frozen=True)
class FerryWork:
    """`ferry` as Beam carries it: urls and numbers only; each worker opens what it needs.

    Attributes:
      source: url of the source.
      sink: the target item.
      receipts: where receipts go.
      worker_memory_bytes: bound on tensor bytes that one worker process holds at once.
      run_token: names the run; all threads of a process share one budget under it.
      adapter: url of an adapter that is merged; empty for none.
    """

    source: str
    sink: Sink
    receipts: Receipts | BucketReceipts
    worker_memory_bytes: int
    run_token: str
    adapter: str = ""

    def setup(self) -> None:
        """Nothing to prepare: files open when first read."""

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        one = Group.from_json(item) if "items" in item else WorkItem.from_json(item)
        pool = _pools.setdefault(self.run_token, ScratchPool(self.worker_memory_bytes // 2))
        budget = shared_budget(self.run_token, self.worker_memory_bytes)
        held = held_bytes(one, self.sink)
        with self._turn(held) as has_read, budget.admit(held), pool.lend() as scratch:
            source = open_with_adapter(self.source, self.adapter)
            receipt = whole_again(one.id, lambda: ferry(one, source, self.sink, scratch, has_read))
        self.receipts.add(one.id, receipt)
        return receipt

    def _turn(self, held: int) -> AbstractContextManager[Callable[[], None]]:
        """Where both ends are a network away, half of the items that run at once are read at once."""
        if is_local(self.source) or is_local(self.sink.root):
            return nullcontext(_nothing)
        at_once = min(NETWORK_THREADS, self.worker_memory_bytes // max(held, 1))
        return shared_turns(self.run_token, -(-at_once // 2)).turn()
