"""Runs a command and measures it: wall time, CPU time of all its processes, memory that is not mapped files."""

import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 0.02
TREE_SECONDS = 0.2


@dataclass(frozen=True)
class Measured:
    """One run.

    Attributes:
      wall_seconds: from start to exit.
      cpu_seconds: user and system time of the process and of every child it waited for.
      peak_bytes: largest sum, over the process tree, of anonymous and shared resident memory. Pages of mapped
        files are left out: the kernel takes them back whenever it needs them.
    """

    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int


class CommandFailed(Exception):
    """A measured command ended with another code than 0; the message holds the end of its output."""


def measure(command: list[str], log: Path, env: Mapping[str, str] | None = None) -> Measured:
    """Runs ``command``, its output going to ``log``.

    Raises:
      CommandFailed: when it ends with another code than 0.
    """
    with log.open("wb") as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env)
        sampler = _Sampler(process.pid)
        sampler.start()
        # wait4 rather than Popen.wait: it alone reports the CPU time of this one process and its children.
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        sampler.stop()
    if process.returncode:
        end = log.read_text(errors="replace")[-2000:]
        raise CommandFailed(f"exit code {process.returncode}: {' '.join(command)}\n{end}")
    return Measured(wall, usage.ru_utime + usage.ru_stime, sampler.peak_bytes)


class _Sampler(threading.Thread):
    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._root = pid
        self._finished = threading.Event()

    def run(self) -> None:
        pids, listed = [self._root], 0.0
        while not self._finished.is_set():
            if time.monotonic() - listed > TREE_SECONDS:
                pids, listed = list(process_tree(self._root)), time.monotonic()
            self.peak_bytes = max(self.peak_bytes, sum(map(resident_bytes, pids)))
            self._finished.wait(SAMPLE_SECONDS)

    def stop(self) -> None:
        self._finished.set()
        self.join()


def process_tree(pid: int) -> Iterator[int]:
    """Yields ``pid`` and its living descendants."""
    yield pid
    for thread in _threads(pid):
        for child in _text(f"/proc/{pid}/task/{thread}/children").split():
            yield from process_tree(int(child))


def resident_bytes(pid: int) -> int:
    """Anonymous and shared resident memory of one process; 0 when it has ended."""
    fields = dict(line.split(":", 1) for line in _text(f"/proc/{pid}/status").splitlines())
    return sum(int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _text(path: str) -> str:
    """The file's text; nothing when the process or thread it tells of has ended."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
