"""One process at a time works on an output: a lock that the kernel drops when its holder dies."""

import fcntl
import os
from pathlib import Path

from tensorferry.mappings.words.problems import FerryError, Problem


class RunLock:
    """An exclusive lock on a file that says who holds it.

    Forked children share it, so a run counts as alive until the last of them is gone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """Whether this object has the lock."""
        return self._descriptor is not None

    def acquire(self) -> None:
        """Takes the lock.

        Raises:
          FerryError: another live process has it; the sentence names its pid.
        """
        while self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:  # a run that just ended removed the directory
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(descriptor)
                raise _held(self.path, pid) from error
            self._keep_if_current(descriptor)

    def _keep_if_current(self, descriptor: int) -> None:
        # A run that ended meanwhile removed the file; a lock on a removed file keeps nobody out.
        try:
            current = os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            current = False
        if not current:
            os.close(descriptor)
            return
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Drops the lock; the file stays."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _held(path: Path, pid: str) -> FerryError:
    found = f"process {pid} at work on it"
    fix = "Wait for it to end, or stop it and run the same command again."
    return FerryError(str(Problem(str(path.parent.parent), "an output that no other process writes", found, fix)))
