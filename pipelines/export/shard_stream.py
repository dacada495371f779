"""Writing a whole safetensors file into a bucket, front to back: what is in memory is a part of one tensor."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from tensorferry.mappings.plan.work import Part
from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.export.export_work import Task, export_item
from tensorferry.pipelines.export.shard_files import runs
from tensorferry.pipelines.orbax.orbax_view import OrbaxItem
from tensorferry.pipelines.output.bucket_receipts import BucketReceipts
from tensorferry.pipelines.output.upload import remote_size
from tensorferry.pipelines.regions.boxes import Scratch, ScratchPool
from tensorferry.pipelines.storage.bucket_stream import whole_again
from tensorferry.pipelines.storage.byte_budget import shared_budget
from tensorferry.pipelines.storage.streams import open_stream

_pools: dict[str, ScratchPool] = {}


class UploadStream:
    """One object that is being written; takes the place of `ShardFiles` where parts come in the order of their bytes.

    Until it is closed, no reader sees anything of it.
    """

    def __init__(self, url: str, name: str, nbytes: int) -> None:
        """Begins an object of exactly ``nbytes`` below ``gs://bucket/path``."""
        self._url, self._name, self._nbytes = url, name, nbytes
        self._stream = open_stream(f"{url.rstrip('/')}/{name}")

    def append(self, octets: bytes | memoryview) -> None:
        """Writes the next bytes."""
        self._stream.append(octets)

    def write(self, part: Part, file: str, offset: int, array: np.ndarray) -> None:
        """Writes a part of a tensor, whose place must be where the file ends by now.

        Raises:
          ValueError: it is not, a mistake in the plan.
        """
        (start, _), *more = runs(part.spec.shape, array.itemsize, part.spec.box(part.grid))
        if more or offset + start != self._stream.nbytes:
            raise ValueError(f"{part.spec.key} {part.grid} does not follow byte {self._stream.nbytes:,} of {file}")
        self.append(memoryview(array.reshape(-1).view(np.uint8)))  # pyright: ignore[reportArgumentType]

    def close(self) -> None:
        """Makes the object, whole.

        Raises:
          FerryError: what was written has another size, or the store has another size of it.
        """
        found = self._stream.nbytes
        if found == self._nbytes:
            self._stream.close()
            found = remote_size(self._url, self._name)
        if found != self._nbytes:
            fix = "Something else writes there; run the same command again."
            raise FerryError(str(Problem(self._name, f"{self._nbytes:,} bytes as planned", f"{found:,}", fix)))

    def abort(self) -> None:
        """Forgets the object."""
        self._stream.abort()


def stream_shard(shard: dict[str, Any], source: OrbaxItem, url: str, scratch: Scratch) -> dict[str, Any]:
    """Writes one file.

    Args:
      shard: a line of `streamed_shards`.
      source: the arrays.
      url: ``gs://bucket/path`` of the repository.
      scratch: memory to use again.

    Returns:
      The receipt: that of all its work items together.

    Raises:
      FerryError: the store refuses.
      PassingFault: the upload is lost; it may succeed from its start.
    """
    started = time.perf_counter()
    stream = UploadStream(url, shard["id"], shard["nbytes"])
    try:
        stream.append(shard["header"].encode("latin-1"))
        told = [export_item(Task.from_json(task), source, stream, "", scratch) for task in shard["tasks"]]
        stream.close()
    except BaseException:
        stream.abort()
        raise
    return {
        "item": shard["id"],
        "nbytes": shard["nbytes"],
        "parts": [part for one in told for part in one["parts"]],
        "read_bytes": sum(one["read_bytes"] for one in told),
        "bytes": sum(one["bytes"] for one in told),
        "seconds": round(time.perf_counter() - started, 4),
    }


@dataclass(frozen=True)
class StreamWork:
    """`stream_shard` as Beam carries it. A broken upload starts again; done twice, it makes the same object.

    Attributes:
      source: the arrays.
      url: ``gs://bucket/path`` of the repository.
      receipts: where receipts go.
      worker_memory_bytes: bound on tensor bytes that one worker process holds at once.
      run_token: names the run; all threads of a process share one budget under it.
    """

    source: OrbaxItem
    url: str
    receipts: BucketReceipts
    worker_memory_bytes: int
    run_token: str

    def setup(self) -> None:
        """Nothing to prepare."""

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        pool = _pools.setdefault(self.run_token, ScratchPool(self.worker_memory_bytes // 2))
        budget = shared_budget(self.run_token, self.worker_memory_bytes)
        with budget.admit(item["held_bytes"]), pool.lend() as scratch:
            receipt = whole_again(item["id"], lambda: stream_shard(item, self.source, self.url, scratch))
        self.receipts.add(item["id"], receipt)
        return receipt
