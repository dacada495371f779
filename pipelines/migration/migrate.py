"""Migrating: find the steps, plan them on workers, copy every chunk, publish each step by itself.

Three graphs of the same shape, one item for each step, chunk group and step again. Between them stand the two
decisions that need every step at once: which step of a run is odd, and whether all of it fits on the disk.
"""

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from mappings.problems import FerryError, PlanError, Problem
from mappings.text import bytes_text
from mappings.tunix.model import check_run
from pipelines.convert import refuse_full_disk
from pipelines.kvstores import is_local
from pipelines.migration.commit_work import CommitWork, is_whole
from pipelines.migration.copy_work import CopyWork
from pipelines.migration.items import CopyItem, copy_items
from pipelines.migration.models import declared_model
from pipelines.migration.options import MigrationOptions, Say, is_inside
from pipelines.migration.places import Places
from pipelines.migration.plan_work import PlanStepWork
from pipelines.migration.record import StepRecord
from pipelines.migration.report import Report, StepReport, of_found, of_record
from pipelines.progress import Done
from pipelines.run_dir import RunState
from pipelines.run_lock import RunLock
from pipelines.runner import RunOptions, run_items
from pipelines.tunix_discovery import Discovery, FoundStep, discover, select
from pipelines.tunix_store import open_tree

STATE_NAME = ".tensorferry-migrate"
_PASSES = 2
_OPENING_AT_ONCE = 8


def migrate(options: MigrationOptions, say: Say) -> Report:
    """Migrates every step below a source, or says what would become of it.

    Args:
      options: what, checked against what, and how.
      say: shows the user a line.

    Returns:
      What became of every step; one bad step stops no other.

    Raises:
      PlanError: the options do not add up.
      FerryError: the run stopped; the same command resumes it.
    """
    options.require()
    model = declared_model(options)
    store = open_tree(options.source)
    found = discover(store, options.accept_uncommitted)
    discovery = select(found, options.include, options.exclude, options.steps, options.latest)
    _refuse_touching_source(options, discovery)
    with _state(options) as places:
        migration = _Migration(options, discovery, places, say)
        migration.plan(PlanStepWork(options.source, places, model, options.form))
        if not options.dry_run:
            migration.write()
        return migration.report()


def _refuse_touching_source(options: MigrationOptions, discovery: Discovery) -> None:
    """A source below the output is fine until a converted step would land in it."""
    if not options.output:
        return
    for found in discovery.steps:
        target = f"{options.output.rstrip('/')}/{found.path}"
        if found.status == "old" and is_inside(target, options.source):
            fix = "The source is never touched: choose another output."
            raise PlanError([Problem(target, f"a step outside the source {options.source}", "one inside it", fix)])


@contextmanager
def _state(options: MigrationOptions) -> Iterator[Places]:
    """The migration's own folder, for this process alone, and gone when it ends; a dry run has it elsewhere."""
    if options.dry_run:
        with tempfile.TemporaryDirectory(prefix="tensorferry-") as folder:
            yield _fresh(options, Path(folder))
        return
    if not is_local(options.output):
        problem = Problem(options.output, "a local directory", "a url", "Other stores are not supported yet.")
        raise PlanError([problem])
    home = Path(options.output, STATE_NAME)
    lock = RunLock(home / "lock")
    try:
        lock.acquire()
    except OSError as error:
        fix = "Give a directory that can be written."
        problem = Problem(options.output, "a directory for the converted runs", str(error.strerror or error), fix)
        raise PlanError([problem]) from error
    try:
        _remove_earlier(home)
        yield _fresh(options, home)
        _remove_earlier(home, log_too=True)
        (home / "lock").unlink(missing_ok=True)
        home.rmdir()
    finally:
        lock.release()


def _fresh(options: MigrationOptions, home: Path) -> Places:
    # A name of its own: what worker processes keep in memory is known by its path.
    places = Places(options.output, str(home / f"run-{uuid.uuid4().hex[:12]}"))
    for folder in (places.records, places.faults.folder, places.results.folder):
        os.makedirs(folder)
    return places


def _remove_earlier(home: Path, log_too: bool = False) -> None:
    for entry in home.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif log_too and entry.name != "lock":
            entry.unlink(missing_ok=True)


class _Migration:
    """One run over all steps. A step's number is its place in the discovery."""

    def __init__(self, options: MigrationOptions, discovery: Discovery, places: Places, say: Say) -> None:
        self.options, self.discovery, self.places, self.say = options, discovery, places, say
        self.reports: dict[int, StepReport] = {
            number: of_found(found) for number, found in enumerate(discovery.steps) if found.status != "old"
        }
        self.token = uuid.uuid4().hex

    @property
    def _planned(self) -> list[int]:
        return [number for number, report in sorted(self.reports.items()) if report.outcome == "planned"]

    def report(self) -> Report:
        steps = tuple(self.reports[number] for number in sorted(self.reports))
        return Report(steps, self.discovery, self.options.dry_run)

    # Planning.

    def plan(self, work: PlanStepWork) -> None:
        numbers = [number for number, found in enumerate(self.discovery.steps) if found.status == "old"]
        self.say(f"{len(self.discovery.steps):,} steps found, {len(numbers):,} in the old layout")
        lines = (
            {"id": self._found(number).path, "step": number, "found": asdict(self._found(number))} for number in numbers
        )
        path, count = self._items_file("plan", lines)
        run_items(path, [1] * count, work, self._how("plan"))
        for number in numbers:
            self.reports[number] = of_record(self._record(number))
        self._check_runs()

    def _found(self, number: int) -> FoundStep:
        return self.discovery.steps[number]

    def _check_runs(self) -> None:
        """Where no model checks a step, the other steps of its run do."""
        series: dict[tuple[str, str], dict[str, int]] = {}
        for number in self._planned:
            record = self.reports[number].record
            if record and not record.check.origin:
                series.setdefault(record.found.series, {})[record.path] = number
        for members in series.values():
            weights = {path: self._record(number).weights for path, number in members.items()}
            for path, problems in check_run(weights).items():
                self.reports[members[path]] = of_record(self._record(members[path]).refused(problems))

    def _record(self, number: int) -> StepRecord:
        return StepRecord.load(self.places.records, number)

    # Writing.

    def write(self) -> None:
        self._prepare()
        for attempt in range(_PASSES):
            todo, before = self._unfinished()
            self._copy(todo, before)
            self._commit()
            lost = [number for number in self._planned if "lost" in self._result(number)]
            if not lost:
                break
            for number in lost if attempt + 1 < _PASSES else ():
                self.places.results.discard(str(number))
        for number in self._planned:
            self.reports[number] = self.reports[number].ended(self._result(number) or None)

    def _prepare(self) -> None:
        """Takes the place of every step; one that something else occupies is refused."""
        Path(self.options.output).mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(_OPENING_AT_ONCE) as pool:
            for number, trouble in pool.map(self._prepare_step, self._planned):
                if trouble:
                    self.reports[number] = replace(self.reports[number], outcome="refused", reason=trouble, counts=None)

    def _prepare_step(self, number: int) -> tuple[int, str]:
        record = self._record(number)
        run = self.places.run_dir(record, self.options.form)
        try:
            if run.open() is RunState.PUBLISHED:
                self.places.results.add(str(number), {"counts": record.counts})
            else:
                self.options.form.sink(run, record).prepare([array.spec for array in record.arrays])
            run.close()
        except FerryError as error:
            return number, str(error)
        finally:
            run.close()
        return number, ""

    def _unfinished(self) -> tuple[list[tuple[int, CopyItem]], Done]:
        todo: list[tuple[int, CopyItem]] = []
        before = Done()
        for number in self._planned:
            if self.places.results.has(str(number)) or self.places.faults.has(str(number)):
                continue
            record = self._record(number)
            receipts = self.places.run_dir(record, self.options.form).receipts.finished()
            for item in copy_items(record):
                if is_whole(receipts.get(item.id), item):
                    before = before.plus(Done(item.nbytes, 1))
                else:
                    todo.append((number, item))
        return todo, before

    def _copy(self, todo: Sequence[tuple[int, CopyItem]], before: Done) -> None:
        sizes = [item.nbytes for _, item in todo]
        if before.items:
            self.say(f"resuming: {before.items:,} work items of {bytes_text(before.nbytes)} are finished already")
        peak = max((item.peak_bytes for _, item in todo), default=0)
        if peak > self.options.worker_memory_bytes:
            self.say(f"the largest stored chunk needs {bytes_text(peak)} of a worker's memory: it is copied alone")
        refuse_full_disk(Path(self.options.output), sum(sizes))
        lines = (
            {"id": f"{self._found(n).path} item {item.number}", "step": n, "item": item.number} for n, item in todo
        )
        path, _ = self._items_file("copy", lines)
        work = CopyWork(
            self.options.source, self.places, self.options.form, self.options.worker_memory_bytes, self.token
        )
        run_items(path, sizes, work, replace(self._how("copy"), before=before, show_progress=True))

    def _commit(self) -> None:
        done = (self.places.faults.has, self.places.results.has)
        numbers = [number for number in self._planned if not any(has(str(number)) for has in done)]
        lines = ({"id": self._found(number).path, "step": number} for number in numbers)
        path, count = self._items_file("commit", lines)
        run_items(
            path, [1] * count, CommitWork(self.options.source, self.places, self.options.form), self._how("commit")
        )

    def _result(self, number: int) -> dict:
        fault = self.places.faults.get(str(number))
        return {"refused": fault["sentence"]} if fault else self.places.results.get(str(number)) or {}

    def _items_file(self, stage: str, lines: Iterable[dict]) -> tuple[str, int]:
        path, count = os.path.join(self.places.state, f"{stage}.jsonl"), 0
        with open(path, "w") as file:
            for line in lines:
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
                count += 1
        return path, count

    def _how(self, stage: str) -> RunOptions:
        return RunOptions(
            beam_args=self.options.beam_args,
            state_dir=os.path.join(self.places.state, stage),
            log_path=os.path.join(os.path.dirname(self.places.state), "beam.log"),
            show_progress=False,
            progress_seconds=self.options.progress_seconds,
        )
