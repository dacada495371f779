"""Finds every (run, role, step) below a root and says of each folder what it is; one bad folder stops nothing."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from tensorferry.mappings.tunix.step_tree import MODEL_ITEM, OPTIMIZER_ITEM
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.storage.tree_store import Listed, TreeStore

Status = Literal["old", "new", "unfinished", "damaged", "ambiguous"]

STEP_METADATA = "_CHECKPOINT_METADATA"
TREE_METADATA = "_METADATA"
COMMIT_FILE = "commit_success.txt"
NEW_ITEM = "items"

_STEP_NAME = re.compile(r"^(?:.*_)?(\d+)$")
_TEMPORARY = re.compile(r"^(.+)\.orbax-checkpoint-tmp(?:-\d+)?$")
_ITEMS = frozenset({MODEL_ITEM, OPTIMIZER_ITEM, NEW_ITEM})
_ROLES = frozenset({"actor", "critic", "reference", "reward", "rollout", "teacher", "student"})
_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True)
class FoundStep:
    """A folder that is, or was meant to be, one step.

    Attributes:
      path: of the folder, relative to the root.
      run: path of the run it belongs to; empty when the root is the run.
      role: ``actor``, ``critic``, … or empty.
      step: the number in its name.
      status: ``old`` can be migrated; ``new`` is in the new layout already; ``unfinished``, ``damaged`` and
        ``ambiguous`` are left alone.
      reason: why it is not ``old``, or what is odd about it; empty when there is nothing to say.
    """

    path: str
    run: str
    role: str
    step: int
    status: Status
    reason: str = ""

    @property
    def series(self) -> tuple[str, str]:
        """What its neighbours share: steps of one series must be one model."""
        return self.run, self.role


@dataclass(frozen=True, slots=True)
class Ignored:
    """Something beside the steps that is not one, or a folder that cannot be listed."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Discovery:
    """What lies below a root.

    Attributes:
      steps: every step, in the order of run, role and number.
      ignored: what is no step, with the reason.
      unreadable: folders that could not be listed; the command must not exit as if all were well.
    """

    steps: tuple[FoundStep, ...]
    ignored: tuple[Ignored, ...] = ()
    unreadable: tuple[Ignored, ...] = ()


def discover(store: TreeStore, accept_uncommitted: bool = False) -> Discovery:
    """Lists the folders below a root and judges each step by its names and its small metadata files.

    Args:
      store: the tree to search.
      accept_uncommitted: take a step under its final name that lacks its commit mark.

    Raises:
      FerryError: the root is not there, or is itself a step.
    """
    walk = _Walk(store, accept_uncommitted)
    walk.root()
    steps = sorted(_with_twins(walk.steps), key=lambda found: (found.run, found.role, found.step, found.path))
    return Discovery(tuple(steps), tuple(walk.ignored), tuple(walk.unreadable))


def select(
    discovery: Discovery,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    steps: Iterable[int] = (),
    latest: bool = False,
) -> Discovery:
    """Keeps what the user asked for.

    Args:
      discovery: everything found.
      include: globs; a step stays when its path, or a folder above it, matches one. None given keeps all.
      exclude: globs of what to leave out; stronger than ``include``.
      steps: step numbers to keep; none given keeps all.
      latest: of each run and role keep the highest finished step alone, whatever its layout.
    """
    wanted, included, excluded = set(steps), tuple(include), tuple(exclude)
    kept = [
        found
        for found in discovery.steps
        if (not included or _matches(found.path, included))
        and not _matches(found.path, excluded)
        and (not wanted or found.step in wanted)
    ]
    return replace(discovery, steps=tuple(_latest(kept) if latest else kept))


def _matches(path: str, globs: tuple[str, ...]) -> bool:
    parts = path.split("/")
    prefixes = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatchcase(prefix, glob.strip("/")) for prefix in prefixes for glob in globs)


def _latest(steps: list[FoundStep]) -> list[FoundStep]:
    finished = [found for found in steps if found.status in ("old", "new", "ambiguous")]
    highest = {series: max(f.step for f in finished if f.series == series) for series in _series(finished)}
    return [found for found in finished if found.step == highest[found.series]]


def _series(steps: Iterable[FoundStep]) -> set[tuple[str, str]]:
    return {found.series for found in steps}


def _with_twins(steps: list[FoundStep]) -> Iterator[FoundStep]:
    """Two folders of one series with the same number: nobody can say which is meant, so neither is taken."""
    whole = [found for found in steps if found.status != "unfinished"]
    times = Counter((found.series, found.step) for found in whole)
    for found in steps:
        twin = found.status != "unfinished" and times[found.series, found.step] > 1
        names = [other.path for other in whole if (other.series, other.step) == (found.series, found.step)]
        reason = f"{' and '.join(sorted(names))} are the same step: remove or rename one"
        yield replace(found, status="ambiguous", reason=reason) if twin else found


class _Walk:
    """One walk over the tree; what it finds gathers here."""

    def __init__(self, store: TreeStore, accept_uncommitted: bool) -> None:
        self.store, self.accept_uncommitted = store, accept_uncommitted
        self.steps: list[FoundStep] = []
        self.ignored: list[Ignored] = []
        self.unreadable: list[Ignored] = []

    def root(self) -> None:
        try:
            listed = self.store.list("")
        except OSError as error:
            if isinstance(error.__cause__, FerryError):
                raise error.__cause__ from error
            raise FerryError(f"{self.store.url}: expected a folder of runs; found {_words(error)}.") from error
        if _looks_like_step(listed):
            raise FerryError(
                f"{self.store.url} is one step. Give the folder above it, and choose the step with --steps."
            )
        self.folder("", listed)

    def folder(self, path: str, listed: Listed) -> None:
        """Judges or enters each folder; a folder with steps also accounts for its stray files."""
        before = len(self.steps)
        for name in listed.folders:
            self.child(_join(path, name), name)
        if any(_parent(found.path) == path for found in self.steps[before:]):
            self.ignored += [Ignored(_join(path, name), "a file, not a step") for name in listed.files]

    def child(self, path: str, name: str) -> None:
        temporary = _TEMPORARY.match(name)
        number = _STEP_NAME.match(temporary[1] if temporary else name)
        try:
            listed = self.store.list(path)
            if temporary and number:
                self.found(path, int(number[1]), "unfinished", "still under its temporary name")
            elif _looks_like_step(listed) and not temporary:
                self.step(path, number, listed)
            elif name.isdigit() and not (listed.folders or listed.files):
                self.found(path, int(name), "damaged", "an empty folder")
            elif not temporary:
                self.folder(path, listed)
        except OSError as error:
            self.unreadable.append(Ignored(path, _words(error)))

    def step(self, path: str, number: re.Match[str] | None, listed: Listed) -> None:
        if number is None:
            self.ignored.append(Ignored(path, "looks like a step, but there is no step number in its name"))
            return
        status, reason = _judge(self.store, path, listed, self.accept_uncommitted)
        self.found(path, int(number[1]), status, reason)

    def found(self, path: str, step: int, status: Status, reason: str) -> None:
        run, role = _run_and_role(_parent(path))
        self.steps.append(FoundStep(path, run, role, step, status, reason))


def _looks_like_step(listed: Listed) -> bool:
    names = {match[1] if (match := _TEMPORARY.match(name)) else name for name in listed.folders}
    return STEP_METADATA in listed.files or not _ITEMS.isdisjoint(names)


def _judge(store: TreeStore, path: str, listed: Listed, accept_uncommitted: bool) -> tuple[Status, str]:
    temporary = sorted(match[1] for name in listed.folders if (match := _TEMPORARY.match(name)))
    late = [item for item in temporary if item != NEW_ITEM]
    if late:
        return "unfinished", f"{late[0]} is still under its temporary name"
    uncommitted = _uncommitted(store, path, listed)
    if uncommitted and not accept_uncommitted:
        return "unfinished", uncommitted
    half = ""
    if NEW_ITEM in listed.folders:
        half = _half_written(store, _join(path, NEW_ITEM))
        if not half:
            return "new", "already in the new layout"
    elif NEW_ITEM in temporary:
        half = "a new-layout conversion was left unfinished beside it"
    if MODEL_ITEM not in listed.folders:
        return "damaged", half or f"{MODEL_ITEM} is missing"
    if TREE_METADATA not in store.list(_join(path, MODEL_ITEM)).files:
        return "damaged", f"{MODEL_ITEM} has no {TREE_METADATA}"
    return "old", half


def _uncommitted(store: TreeStore, path: str, listed: Listed) -> str:
    """Why a step counts as not committed; empty when it is."""
    if COMMIT_FILE in listed.files:
        return ""
    if store.needs_commit_file:
        return f"no {COMMIT_FILE}: the save did not finish"
    metadata = _json_or_none(store, _join(path, STEP_METADATA)) if STEP_METADATA in listed.files else None
    if metadata is None or metadata.get("commit_timestamp_nsecs"):
        return ""
    return f"neither {COMMIT_FILE} nor a commit time: the save did not finish (--accept-uncommitted takes it)"


def _half_written(store: TreeStore, items: str) -> str:
    """Why an ``items`` folder is not a finished checkpoint; empty when it is."""
    metadata = _json_or_none(store, _join(items, TREE_METADATA))
    return "" if metadata and metadata.get("tree_metadata") else "its items/ folder is half-written"


def _json_or_none(store: TreeStore, path: str) -> dict[str, Any] | None:
    try:
        value = json.loads(store.read(path))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _run_and_role(series: str) -> tuple[str, str]:
    """Splits a path ``<run>/checkpoints/[role]`` or ``<run>/[role]``."""
    parts = series.split("/") if series else []
    if _CHECKPOINTS in parts:
        cut = len(parts) - 1 - parts[::-1].index(_CHECKPOINTS)
        return "/".join(parts[:cut]), "/".join(parts[cut + 1 :])
    if parts and parts[-1] in _ROLES:
        return "/".join(parts[:-1]), parts[-1]
    return series, ""


def _words(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such folder"
    if isinstance(error, PermissionError):
        return "permission denied"
    return str(error.strerror or error)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
