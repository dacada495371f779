"""Watches a running pipeline: for Ctrl-C, and for worker processes that die."""

import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, Protocol

from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.engine import interrupts
from tensorferry.pipelines.engine.stop_flag import StopFlag

_POLL_SECONDS = 0.1
_DEATH_GRACE_SECONDS = 5.0
RESUME_HINT = "Run the same command again to resume."


class Deaths(Protocol):
    """Where the exit codes of dead workers turn up."""

    exit_codes: list[int]


class Interrupted(FerryError):
    """Ctrl-C. What was finished stays finished.

    Attributes:
      still_running: whether worker threads are still busy, so that only `leave` ends the process at once.
    """

    def __init__(self, still_running: bool = False) -> None:
        super().__init__(f"Interrupted. {RESUME_HINT}")
        self.still_running = still_running


def leave(exit_code: int) -> NoReturn:
    """Ends the process now, whatever its threads are doing; buffered output is written first."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # the reader of our output went away
        pass
    os._exit(exit_code)


class _Outcome(threading.Thread):
    """A thread that remembers how its function ended; a daemon, so that it cannot hold up the exit."""

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__(name="beam", daemon=True)
        self._run_function = run
        self.error: BaseException | None = None
        # Python 3.11 takes a thread for ended once Ctrl-C has interrupted a `join`; an event keeps the truth.
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self._run_function()
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()


def supervise(
    run: Callable[[], None],
    deaths: Deaths,
    stop: StopFlag,
    grace_seconds: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> BaseException | None:
    """Runs a function in a thread and comes back when it ends, fails or can no longer end.

    After a worker's death the engine gets a few seconds to notice; then it is left behind.

    Args:
      run: blocks until the pipeline has ended.
      deaths: fills up when workers die.
      stop: is raised on Ctrl-C and on a death.
      grace_seconds: how long items in flight may go on after Ctrl-C.
      meanwhile: called once `run` has begun.

    Returns:
      What `run` raised, if it did.

    Raises:
      Interrupted: on Ctrl-C.
    """
    thread = _Outcome(run)
    thread.start()
    try:
        with interrupts.watched() as asked:
            meanwhile()
            _wait(thread, deaths, stop, asked)
    except KeyboardInterrupt:
        stop.set()
        raise Interrupted(still_running=not _ends_within(grace_seconds, thread)) from None
    return thread.error


def _wait(thread: _Outcome, deaths: Deaths, stop: StopFlag, asked: threading.Event) -> None:
    while not thread.ended.wait(_POLL_SECONDS) and not deaths.exit_codes:
        if asked.is_set():
            raise KeyboardInterrupt
    if not thread.ended.is_set():
        stop.set()
        thread.ended.wait(_DEATH_GRACE_SECONDS)


def _ends_within(seconds: float, thread: _Outcome) -> bool:
    try:
        return thread.ended.wait(seconds)
    except KeyboardInterrupt:
        return False
