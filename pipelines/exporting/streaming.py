"""Writing a whole safetensors file into a bucket, front to back: what is in memory is a part of one tensor."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from mappings.export.streamed import PIECES, piece_bytes
from mappings.problems import FerryError, Problem
from mappings.work import Part
from pipelines.bucket_receipts import BucketReceipts
from pipelines.buckets import split_bucket_url, upload_store
from pipelines.exporting.files import runs
from pipelines.exporting.upload import tried
from pipelines.exporting.work import Task, export_item
from pipelines.memory import shared_budget
from pipelines.orbax_view import OrbaxItem
from pipelines.regions import Scratch, ScratchPool

_pools: dict[str, ScratchPool] = {}


class UploadStream:
    """One object that is being written; takes the place of `ShardFiles` where parts come in the order of their bytes.

    Until it is closed, no reader sees anything of it.
    """

    def __init__(self, url: str, name: str, nbytes: int) -> None:
        import obstore

        bucket, prefix = split_bucket_url(url)
        self._store, self._key, self._nbytes, self._at = upload_store(bucket), prefix + name, nbytes, 0
        self._writer = obstore.open_writer(
            self._store, self._key, buffer_size=piece_bytes(nbytes), max_concurrency=PIECES - 1
        )

    def append(self, octets: bytes | memoryview) -> None:
        """Writes the next bytes."""
        for start in range(0, len(octets), 1 << 20):
            self._writer.write(bytes(octets[start : start + (1 << 20)]))
        self._at += len(octets)

    def write(self, part: Part, file: str, offset: int, array: np.ndarray) -> None:
        """Writes a part of a tensor, whose place must be where the file ends by now.

        Raises:
          ValueError: it is not, a mistake in the plan.
        """
        (start, _), *more = runs(part.spec.shape, array.itemsize, part.spec.box(part.grid))
        if more or offset + start != self._at:
            raise ValueError(f"{part.spec.key} {part.grid} does not follow byte {self._at:,} of {file}")
        self.append(memoryview(array.reshape(-1).view(np.uint8)))  # pyright: ignore[reportArgumentType]

    def close(self) -> None:
        """Makes the object, whole.

        Raises:
          FerryError: the store has another size of it.
        """
        import obstore

        self._writer.close()
        found = obstore.head(self._store, self._key)["size"]
        if not self._at == found == self._nbytes:
            fix = "Something else writes there; run the same command again."
            raise FerryError(str(Problem(self._key, f"{self._nbytes:,} bytes as planned", f"{found:,}", fix)))


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
    """
    started = time.perf_counter()
    stream = UploadStream(url, shard["id"], shard["nbytes"])
    stream.append(shard["header"].encode("latin-1"))
    told = [export_item(Task.from_json(task), source, stream, "", scratch) for task in shard["tasks"]]
    stream.close()
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
            receipt = tried(self.url, lambda: stream_shard(item, self.source, self.url, scratch))
        self.receipts.add(item["id"], receipt)
        return receipt
