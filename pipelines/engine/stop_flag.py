"""How workers learn that no new work item should be started."""

import os
from dataclasses import dataclass
from pathlib import Path

_stopped_runs: set[str] = set()


@dataclass(frozen=True)
class StopFlag:
    """One flag per run: seen at once in this process, and in every process that shares the directory.

    Attributes:
      run_token: names the run.
      directory: the run's scratch directory on this machine; where a worker does not see it, the flag
        reaches the worker's own process only.
    """

    run_token: str
    directory: str

    @property
    def _file(self) -> str:
        return os.path.join(self.directory, "stop")

    def set(self) -> None:
        """Asks every worker to start nothing new."""
        _stopped_runs.add(self.run_token)
        if os.path.isdir(self.directory):
            try:
                Path(self._file).touch()
            except OSError:
                return

    def is_set(self) -> bool:
        """Whether somebody asked to stop."""
        return self.run_token in _stopped_runs or os.path.exists(self._file)
