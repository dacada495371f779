"""Rewrites lock.txt: what `pip install` chooses today, on every Python that is given.

``python requirements/lock.py python3.11 python3.12 python3.13`` (or ``make lock``).
"""

import subprocess
import sys
import tempfile
import tomllib
from itertools import groupby
from pathlib import Path

HERE = Path(__file__).parent
# Not torch: its tests skip when it is absent, and its default build is for GPUs.
EXTRAS = ("demo", "dev", "gcp", "dask")
HEADER = "# Written by `make lock`. Everything that `make demo`, `make test` and `make lint` need.\n"
Version = tuple[int, int]


def wanted() -> list[str]:
    """Requirements of the package, its build and the extras, from pyproject.toml."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    chosen = [requirement for extra in EXTRAS for requirement in extras[extra]]
    return project["build-system"]["requires"] + project["project"]["dependencies"] + chosen


def resolve(python: str) -> tuple[Version, set[str]]:
    """Installs what is wanted into a fresh environment of ``python``; returns its version and its pins."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([python, "-m", "venv", scratch], check=True)
        inside = f"{scratch}/bin/python"
        subprocess.run([inside, "-m", "pip", "install", "--quiet", "--upgrade", *wanted()], check=True)
        freeze = [inside, "-m", "pip", "freeze", "--all", "--exclude", "pip", "--exclude", "wheel"]
        pins = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout.split()
        numbers = [inside, "-c", "import sys; print(*sys.version_info[:2])"]
        major, minor = subprocess.run(numbers, check=True, capture_output=True, text=True).stdout.split()
    return (int(major), int(minor)), set(pins)


def merge(resolved: dict[Version, set[str]]) -> list[str]:
    """One line per pin; a pin that not every Python shares gets a marker for the versions that do."""
    versions = sorted(resolved)
    lines = []
    for pin in sorted(set().union(*resolved.values()), key=str.lower):
        holders = [version for version in versions if pin in resolved[version]]
        lines.append(pin if holders == versions else f"{pin} ; {_marker(holders, versions)}")
    return lines


def _marker(holders: list[Version], versions: list[Version]) -> str:
    parts = []
    for held, run in groupby(versions, key=lambda version: version in holders):
        members = list(run)
        if held:
            parts.append(_range(members, versions))
    return " or ".join(parts)


def _range(members: list[Version], versions: list[Version]) -> str:
    # Open at the ends, so that a Python newer or older than those resolved takes its neighbour's pin.
    low = "" if members[0] == versions[0] else f'python_version >= "{members[0][0]}.{members[0][1]}"'
    following = [version for version in versions if version > members[-1]]
    high = f'python_version < "{following[0][0]}.{following[0][1]}"' if following else ""
    return " and ".join(filter(None, (low, high)))


def main(pythons: list[str]) -> None:
    resolved = dict(resolve(python) for python in pythons)
    (HERE / "lock.txt").write_text(HEADER + "\n".join(merge(resolved)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
