"""Migrating: find the steps, plan them on workers, copy every chunk, publish each step by itself.

Three graphs of the same shape, one item for each step, chunk group and step again. Between them stand the two
decisions that need every step at once: which step of a run is odd, and whether all of it fits on the disk.
"""

import json
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from tensorferry.mappings.tunix.model_check import check_run
from tensorferry.mappings.words.problems import FerryError, PlanError, Problem
from tensorferry.mappings.words.text import bytes_text
from tensorferry.pipelines.convert.conversion import refuse_full_disk
from tensorferry.pipelines.engine.beam_args import choose_engine
from tensorferry.pipelines.engine.cluster_args import local_args, refuse_out_of_reach
from tensorferry.pipelines.engine.progress import Done
from tensorferry.pipelines.engine.runner import RunOptions, run_items
from tensorferry.pipelines.migrate.commit_work import CommitWork, is_whole
from tensorferry.pipelines.migrate.copy_items import CopyItem, copy_items
from tensorferry.pipelines.migrate.copy_work import CopyWork
from tensorferry.pipelines.migrate.declared_models import declared_model
from tensorferry.pipelines.migrate.migration_options import MigrationOptions, Say, is_inside
from tensorferry.pipelines.migrate.migration_report import Report, StepReport, of_found, of_record
from tensorferry.pipelines.migrate.migration_state import State, run_state
from tensorferry.pipelines.migrate.plan_work import PlanStepWork
from tensorferry.pipelines.migrate.step_record import StepRecord
from tensorferry.pipelines.orbax.listing_ahead import listed_ahead
from tensorferry.pipelines.orbax.step_discovery import Discovery, FoundStep, discover, select
from tensorferry.pipelines.output.run_dir import RunState
from tensorferry.pipelines.output.small_files import write_small
from tensorferry.pipelines.storage.kvstores import is_local
from tensorferry.pipelines.storage.tree_store import open_tree, pinned

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
    options = _with_engine(options)
    # A branch of a hub is a commit from here on, however it moves meanwhile.
    options = replace(options, source=pinned(options.source))
    model = declared_model(options)
    with listed_ahead(open_tree(options.source)) as store:
        found = discover(store, options.accept_uncommitted)
    discovery = select(found, options.include, options.exclude, options.steps, options.latest)
    _refuse_touching_source(options, discovery)
    with run_state(options) as state:
        migration = _Migration(options, discovery, state, say)
        migration.plan(PlanStepWork(options.source, state.places, model, options.form))
        if not options.dry_run:
            migration.write()
        return migration.report()


def _with_engine(options: MigrationOptions) -> MigrationOptions:
    """A dry run writes nothing, not even for workers elsewhere to read, so it runs here.

    Raises:
      FerryError: source or output are on this machine, and the workers are not.
    """
    if options.dry_run:
        return options if choose_engine(options.beam_args).is_local else replace(options, beam_args=())
    refuse_out_of_reach(options.source, options.output, options.beam_args)
    return options


def _refuse_touching_source(options: MigrationOptions, discovery: Discovery) -> None:
    """A source below the output is fine until a converted step would land in it."""
    if not options.output:
        return
    for found in discovery.steps:
        target = f"{options.output.rstrip('/')}/{found.path}"
        if found.status == "old" and is_inside(target, options.source):
            fix = "The source is never touched: choose another output."
            raise PlanError([Problem(target, f"a step outside the source {options.source}", "one inside it", fix)])


class _Migration:
    """One run over all steps. A step's number is its place in the discovery."""

    def __init__(self, options: MigrationOptions, discovery: Discovery, state: State, say: Say) -> None:
        self.options, self.discovery, self.say = options, discovery, say
        self.places, self.work = state.places, state.work
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
            lost = [number for number, result in self._results().items() if "lost" in result]
            if not lost:
                break
            for number in lost if attempt + 1 < _PASSES else ():
                self.places.results.discard(str(number))
        results = self._results()
        for number in self._planned:
            self.reports[number] = self.reports[number].ended(results.get(number))

    def _prepare(self) -> None:
        """Takes the place of every step; one that something else occupies is refused."""
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
        before, ended = Done(), self._results()
        for number in self._planned:
            if number in ended:
                continue
            record = self._record(number)
            receipts = self.places.run_dir(record, self.options.form).receipts.finished()
            for item in copy_items(record, self.options.form.store_format):
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
        if is_local(self.options.output):
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
        ended = self._results()
        numbers = [number for number in self._planned if number not in ended]
        lines = ({"id": self._found(number).path, "step": number} for number in numbers)
        path, count = self._items_file("commit", lines)
        run_items(
            path, [1] * count, CommitWork(self.options.source, self.places, self.options.form), self._how("commit")
        )

    def _results(self) -> dict[int, dict]:
        """What is known of steps that have come to an end."""
        results = {int(number): result for number, result in self.places.results.finished().items()}
        faults = self.places.faults.finished().items()
        return results | {int(number): {"refused": fault["sentence"]} for number, fault in faults}

    def _items_file(self, stage: str, lines: Iterable[dict]) -> tuple[str, int]:
        path, count = str(self.work / f"{stage}.jsonl"), 0
        with open(path, "w") as file:
            for line in lines:
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
                count += 1
        if is_local(self.places.state):
            return path, count
        write_small(self.places.state, f"{stage}.jsonl", Path(path).read_bytes())
        return f"{self.places.state}/{stage}.jsonl", count

    def _how(self, stage: str) -> RunOptions:
        is_far = not (is_local(self.options.source) or self.options.source.startswith("file:"))
        return RunOptions(
            beam_args=local_args(self.options.beam_args, is_far),
            local_items=str(self.work / f"{stage}.jsonl"),
            state_dir=str(self.work / stage),
            log_path=str(self.work / "beam.log"),
            show_progress=False,
            progress_seconds=self.options.progress_seconds,
        )
