"""Progress through a side channel: each worker counts in a small file of its own, the launcher adds them up.

It works the same for threads, processes and any engine whose workers see the launcher's directory, and it
never fails a run: where a slot cannot be made or read, nothing is counted.
"""

import os
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

_SLOT = struct.Struct("<qq48x")
# A reading that takes long, as the listing of a bucket does, is repeated after this many times as long.
_READ_PAUSES = 20


@dataclass(frozen=True)
class Done:
    """How much is finished: bytes of arrays and work items."""

    nbytes: int = 0
    items: int = 0

    def plus(self, other: "Done") -> "Done":
        """The sum of both."""
        return Done(self.nbytes + other.nbytes, self.items + other.items)

    def at_most(self, other: "Done") -> "Done":
        """The smaller of each: a repeated attempt counts twice, and a bar must not pass its end."""
        return Done(min(self.nbytes, other.nbytes), min(self.items, other.items))


_own = threading.local()


def begin() -> None:
    """Forgets what `advance` counted of an item that this thread begins again."""
    slot: Slot | None = getattr(_own, "slot", None)
    if slot:
        slot.begin()


def advance(nbytes: int) -> None:
    """Counts bytes of a work item that this thread is in the middle of; nothing where nobody counts."""
    slot: Slot | None = getattr(_own, "slot", None)
    if slot:
        slot.advance(nbytes)


class Slot:
    """One worker's counter: a 64-byte file with one writer."""

    def __init__(self, directory: str) -> None:
        self._done = Done()
        self._ahead_bytes = 0
        self._file = -1
        if os.path.isdir(directory):
            self._open(os.path.join(directory, f"slot-{os.getpid()}-{uuid.uuid4().hex[:12]}"))

    def _open(self, path: str) -> None:
        try:
            self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except OSError:
            self._file = -1

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Lets `advance` count here what this thread does within the ``with`` block."""
        _own.slot = self
        try:
            yield
        finally:
            _own.slot = None

    def advance(self, nbytes: int) -> None:
        """Counts bytes of an item that is not finished."""
        self._ahead_bytes += nbytes
        self.add(nbytes)

    def begin(self) -> None:
        """Forgets what `advance` counted of an attempt that failed."""
        ahead_bytes, self._ahead_bytes = self._ahead_bytes, 0
        if ahead_bytes:
            self.add(-ahead_bytes)

    def finish(self, nbytes: int) -> None:
        """Counts a finished item, of which `advance` may have counted some."""
        self.add(nbytes - self._ahead_bytes, items=1)
        self._ahead_bytes = 0

    def add(self, nbytes: int, items: int = 0) -> None:
        """Counts finished bytes and items."""
        self._done = self._done.plus(Done(nbytes, items))
        if self._file < 0:
            return
        try:
            # Written, not mapped: a mapped page on a full disk would kill the worker with SIGBUS.
            os.pwrite(self._file, _SLOT.pack(self._done.nbytes, self._done.items), 0)
        except OSError:
            self.close()

    def close(self) -> None:
        """Gives the file back; what was counted stays counted."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def read_slots(directory: str) -> Done:
    """The sum of every worker's counter in a directory; what cannot be read counts as nothing."""
    try:
        paths = [entry.path for entry in os.scandir(directory) if entry.name.startswith("slot-")]
    except OSError:
        return Done()
    total = Done()
    for path in paths:
        total = total.plus(_read_slot(path))
    return total


def _read_slot(path: str) -> Done:
    try:
        with open(path, "rb") as file:
            data = file.read(_SLOT.size)
    except OSError:
        return Done()
    return Done(*_SLOT.unpack(data)) if len(data) == _SLOT.size else Done()


def bytes_text(nbytes: float) -> str:
    """Bytes for people, in powers of 1000: `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 999.5 or unit == "TB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 99.95 else f"{nbytes:.1f} {unit}"


def seconds_text(seconds: float) -> str:
    """A length of time for people: `45 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def progress_line(done: Done, total: Done, fresh_bytes: int, run_seconds: float) -> str:
    """One line of progress.

    Args:
      done: everything finished, earlier attempts included.
      total: everything there is to do.
      fresh_bytes: what this attempt finished; the rate and the time left come from it alone.
      run_seconds: how long this attempt has been running.
    """
    share = 100 * done.nbytes / total.nbytes if total.nbytes else 100.0
    line = (
        f"{bytes_text(done.nbytes)} of {bytes_text(total.nbytes)} ({share:.0f} %), "
        f"{done.items:,} of {total.items:,} work items"
    )
    if fresh_bytes <= 0 or run_seconds <= 0:
        return line
    rate = fresh_bytes / run_seconds
    left = seconds_text((total.nbytes - done.nbytes) / rate)
    return f"{line}, {bytes_text(rate)}/s, {left} left"


class ProgressMonitor:
    """Draws the progress of a run from a thread of the launcher, between `with` and its end.

    On a terminal a bar; anywhere else a line every few seconds. What goes wrong while drawing is dropped.
    """

    def __init__(
        self,
        total: Done,
        read: Callable[[], Done],
        before: Done | None = None,
        line_seconds: float = 5.0,
        stream: IO[str] | None = None,
        read_seconds: float = 0.0,
    ) -> None:
        """Prepares a monitor; nothing is drawn yet.

        Args:
          total: everything there is to do, earlier attempts included.
          read: tells what this attempt has finished so far.
          before: what earlier attempts have finished.
          line_seconds: time between two lines where there is no terminal.
          stream: where to draw; standard error when not given.
          read_seconds: least time between two readings; what was read last is shown in between.
        """
        self._total = total
        self._read = read
        self._before = before or Done()
        self._stream = stream or sys.stderr
        self._on_terminal = self._stream.isatty()
        self._wait_seconds = 0.2 if self._on_terminal else line_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._draw_until_end, name="progress", daemon=True)
        self._started_at = 0.0
        self._fresh = Done()
        self._read_seconds = read_seconds
        self._next_read_at = 0.0

    def __enter__(self) -> "ProgressMonitor":
        self._started_at = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        # A terminal or pipe that takes no more output must not hold the run.
        self._thread.join(timeout=2.0)

    def _draw_until_end(self) -> None:
        try:
            if self._on_terminal:
                self._draw_bar()
            else:
                self._print_lines()
        except Exception:
            return

    def _now(self) -> tuple[Done, int]:
        started = time.monotonic()
        # The last reading tells the end, and is never an old one.
        if started >= self._next_read_at or self._ended.is_set():
            self._fresh = self._read()
            took_seconds = time.monotonic() - started
            self._next_read_at = started + max(self._read_seconds, _READ_PAUSES * took_seconds)
        return self._before.plus(self._fresh).at_most(self._total), self._fresh.nbytes

    def _print_lines(self) -> None:
        if self._before.items:
            done = f"{bytes_text(self._before.nbytes)} in {self._before.items:,} work items"
            self._print(f"already finished by an earlier attempt: {done}")
        while not self._ended.wait(self._wait_seconds):
            self._print_now()
        self._print_now()

    def _print_now(self) -> None:
        done, fresh_bytes = self._now()
        self._print(progress_line(done, self._total, fresh_bytes, time.monotonic() - self._started_at))

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def _draw_bar(self) -> None:
        bar = _bar(self._stream)
        start = self._before.at_most(self._total)
        task = bar.add_task("", total=self._total.nbytes, completed=start.nbytes)
        with bar:
            while True:
                ended = self._ended.wait(self._wait_seconds)
                done, _ = self._now()
                items = f"{done.items:,} of {self._total.items:,} work items"
                bar.update(task, completed=done.nbytes, description=items)
                if ended:
                    return


def _bar(stream: IO[str]) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=Console(file=stream),
    )
