"""The command line as a user runs it: a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_COMMAND = (sys.executable, "-m", "tensorferry")


def environment(**changes: str) -> dict[str, str]:
    """The environment of a process that runs this source tree."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **changes}


def tensorferry(*args: str | Path, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    words = [*_COMMAND, *map(str, args)]
    return subprocess.run(words, capture_output=True, text=True, timeout=seconds, env=environment(), cwd=ROOT)


def start(*args: str | Path) -> "subprocess.Popen[str]":
    """Starts a command in a process group of its own."""
    words = [*_COMMAND, *map(str, args)]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip


def python(code: str, *args: str | Path, seconds: float = 120) -> str:
    """What a program of a process of its own prints; it must succeed."""
    words = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout
