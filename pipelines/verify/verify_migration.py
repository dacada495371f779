"""Verifying a migration: every published step against the old one, re-read by other code than copied it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tensorferry.mappings.tunix.model_check import check_run
from tensorferry.mappings.words.problems import FerryError, PlanError
from tensorferry.pipelines.migrate.places import Form, Places
from tensorferry.pipelines.migrate.plan_work import DeclaredModel, plan_step
from tensorferry.pipelines.migrate.step_record import StepRecord
from tensorferry.pipelines.orbax.step_discovery import Discovery, FoundStep, discover, select
from tensorferry.pipelines.orbax.step_source import read_step
from tensorferry.pipelines.storage.kvstores import is_local
from tensorferry.pipelines.storage.tree_store import open_tree, pinned
from tensorferry.pipelines.verify.compare_arrays import Compared
from tensorferry.pipelines.verify.difference import Difference
from tensorferry.pipelines.verify.verify_step import compare_step

KIND = "migration"
_AT_ONCE = 8


@dataclass(frozen=True)
class Choice:
    """Which steps of the source were asked for, as ``migrate`` was told.

    Attributes:
      include: globs of runs or steps.
      exclude: globs of runs or steps.
      steps: step numbers; all when empty.
      latest: of each run and role the highest step alone.
      accept_uncommitted: steps without a commit mark too.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    latest: bool = False
    accept_uncommitted: bool = False

    def of(self, discovery: Discovery) -> Discovery:
        """Those of a discovery."""
        return select(discovery, self.include, self.exclude, self.steps, self.latest)


@dataclass(frozen=True)
class MigrationVerdict:
    """What was compared, and what differs.

    Attributes:
      steps: steps compared.
      compared: arrays, bytes and elements of all of them, and every difference.
      left: steps of the source that are not migrated, with the reason.
    """

    steps: int
    compared: Compared
    left: Mapping[str, str] = field(default_factory=dict)


def is_migration(source: str, output: str) -> bool:
    """Whether a folder holds steps that ``migrate`` published, or should: the source holds old ones.

    Raises:
      FerryError: it is one migrated step.
    """
    places = Places(output, "")
    if is_local(output) or output.startswith("gs://"):
        if _kind(places.manifest("")) == KIND:
            raise FerryError(f"{output} is one migrated step. Give the folder above, as migrate had it, and --steps.")
        if any(_kind(places.manifest(step.path)) == KIND for step in _steps(output)):
            return True
    return any(step.status == "old" for step in _steps(source))


def _steps(url: str) -> Sequence[FoundStep]:
    """Steps below a folder; none where it is a checkpoint, or no folder of ours."""
    try:
        store = open_tree(url)
        return () if "_METADATA" in store.list("").files else discover(store).steps
    except (FerryError, OSError):
        return ()


def _kind(manifest: Mapping[str, Any] | None) -> str:
    return str((manifest or {}).get("kind", ""))


def verify_migration(source: str, output: str, sample: float = 1.0, choice: Choice | None = None) -> MigrationVerdict:
    """Compares every step of a migration with the old step at the same path.

    Args:
      source: url of the tree of runs.
      output: folder that ``migrate`` wrote.
      sample: share of the blocks to compare, above 0 up to 1; at least one per array.
      choice: the steps that were migrated; all when None.

    Raises:
      FerryError: the source cannot be listed.
    """
    choice = choice or Choice()
    source = pinned(source)
    found = choice.of(discover(open_tree(source), choice.accept_uncommitted))
    places = Places(output, "")
    manifests = _manifests(places, found.steps)
    left = {step.path: step.reason or f"{step.status}" for step in found.steps if step.status != "old"}
    left |= {folder.path: folder.reason for folder in found.unreadable}
    old = [step for step in found.steps if step.status == "old"]
    absent = [step for step in old if manifests[step.path] is None]
    reasons = _refusals(source, absent, old)
    total, steps = Compared(differences=tuple(_strangers(places, choice, found))), 0
    for step in old:
        manifest = manifests[step.path]
        if manifest is not None:
            total, steps = total + _compare(source, places, step, manifest, sample), steps + 1
        elif step.path in reasons:
            left[step.path] = reasons[step.path]
        else:
            total += Compared(differences=(_missing(places, step),))
    return MigrationVerdict(steps, total, left)


def _manifests(places: Places, steps: Sequence[FoundStep]) -> dict[str, dict[str, Any] | None]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        told = pool.map(lambda step: places.manifest(step.path), steps)
        return {step.path: manifest for step, manifest in zip(steps, told, strict=True)}


def _missing(places: Places, step: FoundStep) -> Difference:
    try:
        listed = open_tree(places.step_url(step.path)).list("")
        found = "one that is not published" if listed.files or listed.folders else "none"
    except OSError:
        found = "none"
    return Difference(step.path, "", "a migrated step", f"{found} (one that migrate left out or refused: --exclude it)")


def _strangers(places: Places, choice: Choice, source: Discovery) -> Iterator[Difference]:
    """Migrated steps of the output without an old one in the source."""
    known = {step.path for step in source.steps}
    for step in choice.of(discover(open_tree(places.output))).steps:
        if step.path not in known and _kind(places.manifest(step.path)) == KIND:
            yield Difference(step.path, "", "no such step: the source has none", "a migrated one")


def _compare(source: str, places: Places, step: FoundStep, manifest: Mapping[str, Any], sample: float) -> Compared:
    if _kind(manifest) != KIND:
        found = Difference(step.path, "manifest", "one that migrate wrote", json.dumps(manifest)[:80])
        return Compared(differences=(found,))
    try:
        tree = read_step(open_tree(source), step)
    except PlanError as error:
        found = Difference(step.path, "source", "a step that can be read", str(error.problems[0]))
        return Compared(differences=(found,))
    return compare_step(source, places.step_url(step.path), step.path, tree, manifest, sample)


def _refusals(source: str, absent: Sequence[FoundStep], old: Sequence[FoundStep]) -> dict[str, str]:
    """Why steps are not in the output, as far as migrate would refuse them without a model."""
    series = {step.series for step in absent}
    records = [plan_step(source, step, DeclaredModel(), Form()) for step in old if step.series in series]
    problems = {record.path: record.problems for record in records if record.status == "refused"}
    for one in series:
        problems |= check_run({r.path: r.weights for r in records if _is_sound(r) and r.found.series == one})
    return {path: str(found[0]) for path, found in problems.items() if found}


def _is_sound(record: StepRecord) -> bool:
    return record.status == "planned"
