"""What a user asks of a migration."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tensorferry.mappings.words.problems import PlanError, Problem
from tensorferry.pipelines.migrate.places import Form

Say = Callable[[str], None]


@dataclass(frozen=True)
class MigrationOptions:
    """What to migrate, checked against what, and how.

    Attributes:
      source: url of the tree of runs.
      output: folder that receives them; empty for a dry run that looks at none.
      template: a checkpoint in the new layout that holds the model.
      config: a Hugging Face ``config.json`` that describes it.
      maxtext: MaxText settings that build it.
      structural: check only that the steps of a run agree with each other.
      dry_run: write nothing.
      include: globs of runs or steps to take.
      exclude: globs of runs or steps to leave out.
      steps: step numbers to take; all when empty.
      latest: of each run and role the highest step alone.
      accept_uncommitted: take steps under their final name without a commit mark.
      form: how the new steps are stored, and the choices about their trees.
      worker_memory_bytes: bound on tensor bytes that one worker process holds at once.
      beam_args: Beam's options.
      progress_seconds: time between lines of progress where there is no terminal.
      take_over: take an output in a bucket from another process that is at work on it.
    """

    source: str
    output: str = ""
    template: str = ""
    config: str = ""
    maxtext: str = ""
    structural: bool = False
    dry_run: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    latest: bool = False
    accept_uncommitted: bool = False
    form: Form = field(default_factory=Form)
    worker_memory_bytes: int = 1 << 30
    beam_args: tuple[str, ...] = ()
    progress_seconds: float = 5.0
    take_over: bool = False

    def require(self) -> None:
        """Checks what can be checked without reading anything.

        Raises:
          PlanError: nothing says which model the steps must be, too much does, or the output is in the source.
        """
        problems = [*self._model_problems(), *self._output_problems()]
        if problems:
            raise PlanError(problems)

    def _model_problems(self) -> list[Problem]:
        ways = "--template CHECKPOINT, --config config.json, --maxtext SETTINGS or --structural"
        given = [way for way in (self.template, self.config, self.maxtext, self.structural) if way]
        if len(given) > 1:
            return [Problem("the model check", f"one of {ways}", f"{len(given)} of them", "Choose one.")]
        if given or self.dry_run:
            return []
        fix = (
            "Say which model the runs hold, or choose --structural, which compares the steps of a run with each other."
        )
        return [Problem("the model check", f"one of {ways}", "none of them", fix)]

    def _output_problems(self) -> list[Problem]:
        if not self.output:
            fix = "Give the folder that receives the converted runs."
            return [] if self.dry_run else [Problem("--output", "a folder", "nothing", fix)]
        if is_inside(self.output, self.source):
            fix = "The source is never touched: choose a folder outside it."
            return [Problem("--output", f"a folder outside the source {self.source}", self.output, fix)]
        return []


def is_inside(path: str, folder: str) -> bool:
    """Whether a path is a folder, or lies below it; links are followed.

    >>> is_inside("gs://b/runs/new", "gs://b/runs/"), is_inside("gs://b/runs-new", "gs://b/runs")
    (True, False)
    """
    return f"{_real(path)}/".startswith(f"{_real(folder)}/")


def _real(path: str) -> Any:
    path = path.removeprefix("file://")
    return path.rstrip("/") if "://" in path else os.path.realpath(os.path.expanduser(path))
