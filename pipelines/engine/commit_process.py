"""A commit in a process of its own, as a job's last step runs it: Orbax and JAX stay out of the workers."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

from tensorferry.mappings.words.problems import FerryError, Problem


@dataclass(frozen=True)
class CommitApart:
    """What a job carries of its commit; its module is the program that commits."""

    def __call__(self) -> None:
        """Commits in a process of its own.

        Raises:
          FerryError: it could not; the same command as the job's, or the job again, goes on.
        """
        commit_apart(type(self).__module__, self.encoded())

    def encoded(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


def commit_apart(module: str, text: str) -> None:
    """Runs a module as a program.

    Args:
      module: its name; what it does is `commit_program`.
      text: its standard input.

    Raises:
      FerryError: it could not commit; the same command as the job's, or the job again, goes on.
    """
    # Workers import what the launcher can import, from the same places.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    command, environment = [sys.executable, "-m", module], {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=environment)
    if done.returncode:
        words = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise FerryError(f"The work items are done, and the commit failed: {words[0]}")


def commit_program(commit: Callable[[str], None]) -> int:
    """The program of the process: commits what standard input tells; exit code 1 when it failed."""
    try:
        commit(sys.stdin.read())
    except FerryError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


def refuse_other_plan(source: str, wanted: str, found: str) -> None:
    """Refuses to commit when the source is not what the job was planned from.

    Raises:
      FerryError: the digests differ.
    """
    if found != wanted:
        fix = "Start again from a source at rest, with --overwrite or into another output."
        raise FerryError(str(Problem(source, f"the source as planned ({wanted})", found, fix)))
