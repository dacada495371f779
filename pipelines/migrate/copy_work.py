"""The work on one copy item: read its chunks, write them, leave a receipt. A step that cannot be read fails alone."""

import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorferry.pipelines.engine import progress
from tensorferry.pipelines.migrate.copy_items import CopyItem, Part, load_items
from tensorferry.pipelines.migrate.decode_chunk import decode_chunk
from tensorferry.pipelines.migrate.places import Form, Places
from tensorferry.pipelines.migrate.step_reader import ReadFault, StepReader
from tensorferry.pipelines.migrate.step_record import StepRecord
from tensorferry.pipelines.regions.boxes import Scratch, ScratchPool
from tensorferry.pipelines.sinks.sink import PartWriter, Sink
from tensorferry.pipelines.storage.bucket_stream import whole_again
from tensorferry.pipelines.storage.byte_budget import shared_budget
from tensorferry.transforms.digest import digest
from tensorferry.transforms.dtypes import numpy_dtype
from tensorferry.transforms.statistics import statistics

if TYPE_CHECKING:
    import numpy as np

_pools: dict[str, ScratchPool] = {}


def copy_item(
    item: CopyItem, reader: StepReader, writer: PartWriter, scratch: Scratch, look: bool = True
) -> list[dict[str, Any]]:
    """Copies every chunk of an item.

    Args:
      item: the chunks.
      reader: of the old step.
      writer: of the new one.
      scratch: memory to use again.
      look: take digest and statistics of the values of chunks that move as they are stored, which decodes them.

    Returns:
      For each part its array, grid index, digest of the values, statistics, and the bytes of a moved chunk.

    Raises:
      ReadFault: the old step cannot be read.
      FerryError: the new one cannot be written.
      PassingFault: an upload is lost that may succeed when the whole is done again.
    """
    copied = []
    for batch in item.batches:
        # All at once: the parts of a batch are small, and a bucket takes tens of milliseconds for each.
        started = [_start(part, reader) for part in batch]
        for part in batch:
            copied.append(_copy(part, started.pop(0), reader, writer, scratch, look))
        progress.advance(sum(part.nbytes for part in batch))
    return copied


def _start(part: Part, reader: StepReader) -> Any:
    array = part.array
    return reader.start(array.source, part.index) if array.codecs and array.source else None


def _copy(
    part: Part, started: Any, reader: StepReader, writer: PartWriter, scratch: Scratch, look: bool
) -> dict[str, Any]:
    array, spec = part.array, part.array.spec
    stored = reader.stored(array.source, part.index, started) if started and array.source else None
    if stored is None:
        values = _values(part, reader)
        writer.write(spec, part.index, values)
        return _told(part, values)
    writer.write_stored(spec, part.index, stored)
    if not look:
        import numpy as np

        told = {"stored_digest": digest(np.frombuffer(stored, np.uint8)), "stored_bytes": len(stored)}
        return {"array": spec.key, "grid": list(part.index), **told}
    return {**_told(part, _moved_values(part, stored, scratch)), "stored_bytes": len(stored)}


def _values(part: Part, reader: StepReader) -> "np.ndarray":
    import numpy as np

    array, spec = part.array, part.array.spec
    wanted = numpy_dtype(spec.dtype)
    if array.source is None:
        return np.array(array.constant, wanted)
    values = reader.values(array.source, spec.box(part.index))
    return values if values.dtype == wanted else values.astype(wanted, order="C")


def _moved_values(part: Part, stored: bytes, scratch: Scratch) -> "np.ndarray":
    import numpy as np

    spec = part.array.spec
    whole = decode_chunk(part.array.codecs, spec.dtype, spec.chunk, stored, scratch)
    return np.asarray(whole[tuple(slice(0, length) for length in spec.box_shape(part.index))], order="C")


def _told(part: Part, values: "np.ndarray") -> dict[str, Any]:
    receipt = {"array": part.array.spec.key, "grid": list(part.index), "digest": digest(values)}
    # Zarr has complex numbers; they have no order, so no statistics.
    return receipt if values.dtype.kind == "c" else {**receipt, "statistics": statistics(values).to_json()}


@dataclass(frozen=True)
class CopyWork:
    """`copy_item` as Beam carries it: paths and numbers only.

    Attributes:
      source: url of the tree of runs.
      places: where records, receipts and steps are.
      form: how the new steps are stored.
      worker_memory_bytes: bound on tensor bytes that one worker process holds at once.
      run_token: names the run; all threads of a process share one budget under it.
    """

    source: str
    places: Places
    form: Form
    worker_memory_bytes: int
    run_token: str

    def setup(self) -> None:
        """Nothing to prepare: stores open when first read."""

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        number = item["step"]
        faults = self.places.faults
        if faults.get(str(number)):
            return {"bytes": 0}
        record, items = load_items(self.places.records, number, self.form.store_format)
        work = items[item["item"]]
        try:
            pool = _pools.setdefault(self.run_token, ScratchPool(self.worker_memory_bytes // 4))
            sink = self.form.sink(self.places.run_dir(record, self.form), record).within(self.worker_memory_bytes)
            budget, needed = shared_budget(self.run_token, self.worker_memory_bytes), work.peak_bytes
            with budget.admit(needed + sink.buffer_bytes), pool.lend() as scratch:
                return whole_again(work.id, lambda: self._copied(record, work, sink, scratch))
        except ReadFault as fault:
            faults.add(str(number), {"sentence": str(fault)})
            return {"bytes": 0}

    def _copied(self, record: StepRecord, item: CopyItem, sink: Sink, scratch: Scratch) -> dict[str, Any]:
        progress.begin()
        started = time.perf_counter()
        run = self.places.run_dir(record, self.form)
        attempt = f"{item.id}-{uuid.uuid4().hex[:8]}"
        with sink.open_part(attempt) as writer:
            reader = StepReader(self.source, record.path, self.run_token)
            parts = copy_item(item, reader, writer, scratch, self.form.look)
        seconds = round(time.perf_counter() - started, 4)
        receipt = {"attempt": attempt, "parts": parts, "bytes": item.nbytes, "seconds": seconds}
        run.receipts.add(item.id, receipt)
        return receipt
