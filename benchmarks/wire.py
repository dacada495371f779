"""A long, thin wire: what it carries, at which rate, and how much of the time."""

import threading
import time

# What a router before a slow link holds: without it, the link were idle while a thread of the server wakes up.
_QUEUE_SECONDS = 0.02


class Wire:
    """One direction of a link, which all streams share.

    Args:
      bytes_per_second: its rate.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._began = self._ended = 0.0
        self._carried_bytes = 0

    def carry(self, nbytes: int, counts: bool) -> float:
        """Takes bytes onto the wire; returns when they are through, on `time.perf_counter`'s clock."""
        with self._lock:
            now = time.perf_counter()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self._rate
            if counts:
                self._began = self._began or now
                self._ended = self._free_at
                self._carried_bytes += nbytes
            return self._free_at

    def stats(self) -> dict[str, float]:
        """Bytes of weights, seconds from the first to the last of them, and the share of that the wire was busy."""
        seconds = self._ended - self._began
        busy = self._carried_bytes / self._rate / seconds if seconds else 0.0
        return {"bytes": self._carried_bytes, "seconds": seconds, "busy": busy}


class Stream:
    """The body of one request or answer on a wire, with a rate of its own.

    Args:
      wire: what it goes over.
      bytes_per_second: of this stream alone.
      counts: whether it is weights.
    """

    def __init__(self, wire: Wire, bytes_per_second: float, counts: bool) -> None:
        self._wire, self._rate, self._counts = wire, bytes_per_second, counts
        self._began = time.perf_counter()
        self._carried_bytes = 0

    def carry(self, nbytes: int) -> None:
        """Waits until the next bytes are through, or nearly."""
        through = self._wire.carry(nbytes, self._counts)
        self._carried_bytes += nbytes
        due = max(through, self._began + self._carried_bytes / self._rate)
        time.sleep(max(0.0, due - _QUEUE_SECONDS - time.perf_counter()))
