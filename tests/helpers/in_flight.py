"""How many reads a server of the tests does at once."""

import threading
import time
from dataclasses import replace

from hub_server import Content


class InFlight:
    """Counts the reads that a server does at once; each takes 20 ms, as on a network.

    Attributes:
      most: the most there were.
    """

    def __init__(self) -> None:
        self.most = self._now = 0
        self._lock = threading.Lock()

    def counted(self, content: Content) -> Content:
        def read(start: int, stop: int) -> bytes:
            self._add(1)
            time.sleep(0.02)
            self._add(-1)
            return content.read(start, stop)

        return replace(content, read=read)

    def _add(self, change: int) -> None:
        with self._lock:
            self._now += change
            self.most = max(self.most, self._now)
