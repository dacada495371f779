"""A budget of bytes that all threads of one worker process share."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class ByteBudget:
    """Admits work while the bytes it holds fit under a limit; first come, first served.

    A request above the limit is clamped to the limit, so such an item runs, alone. A thread that holds
    bytes must not ask for more: it would wait for itself.

    Attributes:
      limit_bytes: what the admitted requests never add up past.
    """

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise ValueError(f"a budget needs at least one byte, not {limit_bytes}")
        self.limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._used_bytes = 0
        self._peak_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes admitted at this moment, clamped requests counted as the limit."""
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were admitted at one moment."""
        return self._peak_bytes

    @contextmanager
    def admit(self, nbytes: int) -> Iterator[None]:
        """Waits until `nbytes` fit, holds them for the length of the `with` block, gives them back.

        Raises:
          ValueError: when `nbytes` is negative.
        """
        if nbytes < 0:
            raise ValueError(f"cannot admit {nbytes} bytes")
        held_bytes = min(nbytes, self.limit_bytes)
        self._enter(held_bytes)
        try:
            yield
        finally:
            self._leave(held_bytes)

    def _enter(self, held_bytes: int) -> None:
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                self._changed.wait_for(lambda: self._queue[0] is ticket and self._fits(held_bytes))
                self._used_bytes += held_bytes
                self._peak_bytes = max(self._peak_bytes, self._used_bytes)
            finally:
                # Also when the wait was interrupted: a ticket left behind would block everybody after it.
                self._queue.remove(ticket)
                self._changed.notify_all()

    def _leave(self, held_bytes: int) -> None:
        with self._changed:
            self._used_bytes -= held_bytes
            self._changed.notify_all()

    def _fits(self, held_bytes: int) -> bool:
        return self._used_bytes + held_bytes <= self.limit_bytes


_budgets: dict[str, ByteBudget] = {}
_budgets_lock = threading.Lock()


def shared_budget(run_token: str, limit_bytes: int) -> ByteBudget:
    """The budget of this process for one run: every caller with the same token gets the same one.

    Args:
      run_token: names the run; travels with the work to every worker.
      limit_bytes: the limit, taken from the first caller.
    """
    with _budgets_lock:
        return _budgets.setdefault(run_token, ByteBudget(limit_bytes))
