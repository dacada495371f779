import threading
from collections.abc import Callable

import pytest
from tensorferry.pipelines.regions.read_turns import ReadTurns, shared_turns


class Started:
    """Items that start in threads of their own when their turn comes, and hold it."""

    def __init__(self, turns: ReadTurns, count: int) -> None:
        self.has_read: list[Callable[[], None]] = []
        self._turns, self._one_more, self._end = turns, threading.Semaphore(0), threading.Event()
        self._threads = [threading.Thread(target=self._start) for _ in range(count)]

    def __enter__(self) -> "Started":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(10)

    def _start(self) -> None:
        with self._turns.turn() as has_read:
            self.has_read.append(has_read)
            self._one_more.release()
            self._end.wait(10)

    def wait_for(self, count: int) -> None:
        """So many more start, and then no more."""
        for _ in range(count):
            assert self._one_more.acquire(timeout=10)
        assert not self._one_more.acquire(timeout=0.05)


def test_so_many_are_read_at_once():
    with Started(ReadTurns(3), 6) as items:
        items.wait_for(3)
        items.has_read[1]()
        items.wait_for(1)
        items.has_read[1]()  # work that is done again reads again
        items.wait_for(0)
        items.has_read[0]()
        items.has_read[3]()
        items.wait_for(2)


def test_an_item_that_failed_keeps_nobody_waiting():
    turns = ReadTurns(1)
    with pytest.raises(OSError), turns.turn():
        raise OSError
    with Started(turns, 2) as items:
        items.wait_for(1)


def test_the_same_turns_for_all_of_a_run():
    assert shared_turns("turns-a", 2) is shared_turns("turns-a", 5)
    assert shared_turns("turns-a", 2) is not shared_turns("turns-b", 2)
