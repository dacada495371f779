"""What a plan needs of a cluster: machine, workers, threads; plain arithmetic on the plan's totals."""

import math
from dataclasses import dataclass

# Measured: reading, turning and writing cost three to ten core seconds a gigabyte; TLS is in the larger figure.
BYTES_PER_CORE_SECOND = 100e6
_WANTED_SECONDS = 15 * 60
_START_SECONDS = 4 * 60
# Fewer leave the last workers idle while one finishes; the service deals single items.
_ITEMS_PER_THREAD = 4
_MOST_THREADS = 16
_GIB = 1 << 30
# Python, Beam and the libraries before the first tensor, and buffers of requests in flight.
_BASE_BYTES = 2 * _GIB
# Cores to memory in bytes, of Compute Engine's n2-standard machines.
_MACHINES = {4: 16 * _GIB, 8: 32 * _GIB, 16: 64 * _GIB, 32: 128 * _GIB}


@dataclass(frozen=True)
class Resources:
    """A recommendation for Dataflow.

    Attributes:
      machine_type: of each worker; a worker is one process with all its cores.
      workers: how many.
      threads: work items that one worker has in flight.
      memory_bytes: what one worker needs.
      seconds: rough length of the job, the start of the machines included.
    """

    machine_type: str
    workers: int
    threads: int
    memory_bytes: int
    seconds: float

    def beam_args(self) -> tuple[str, ...]:
        """The recommendation as Beam options."""
        return (
            f"--machine_type={self.machine_type}",
            f"--num_workers={min(self.workers, 2)}",
            f"--max_num_workers={self.workers}",
            f"--number_of_worker_harness_threads={self.threads}",
            f"--resource_hints=min_ram={math.ceil(self.memory_bytes / _GIB)}GiB",
        )


def recommend(
    read_bytes: int, write_bytes: int, work_items: int, largest_item_bytes: int, worker_memory_bytes: int
) -> Resources:
    """Resources that finish a plan in about a quarter of an hour, where its work items allow it.

    Args:
      read_bytes: bytes read from the source.
      write_bytes: bytes written to the target.
      work_items: how many there are.
      largest_item_bytes: tensor bytes that the largest one holds at once.
      worker_memory_bytes: bound on tensor bytes per worker.

    >>> recommend(16 * 10**9, 16 * 10**9, 240, 144 << 20, 1 << 30)
    Resources(machine_type='n2-standard-8', workers=1, threads=7, memory_bytes=3221225472, seconds=260.0)
    """
    threads = max(1, min(worker_memory_bytes // max(largest_item_bytes, 1), _MOST_THREADS, max(work_items, 1)))
    memory = worker_memory_bytes + _BASE_BYTES
    moved = max(read_bytes, write_bytes)
    cores = _cores(memory, 8 if moved > _WANTED_SECONDS * BYTES_PER_CORE_SECOND / 16 else 4)
    rate = cores * BYTES_PER_CORE_SECOND
    useful = max(1, work_items // (threads * _ITEMS_PER_THREAD))
    workers = max(1, min(math.ceil(moved / rate / _WANTED_SECONDS), useful))
    return Resources(
        f"n2-standard-{cores}", workers, threads, memory, round(_START_SECONDS + moved / rate / workers, 1)
    )


def _cores(memory_bytes: int, wanted: int) -> int:
    """The smallest machine with the cores and, up to three quarters of it, the memory."""
    fitting = [cores for cores, memory in _MACHINES.items() if cores >= wanted and memory * 3 // 4 >= memory_bytes]
    return fitting[0] if fitting else max(_MACHINES)
