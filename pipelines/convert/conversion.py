"""Converting: plan, prepare, ferry, commit. Killed at any moment, the same command goes on where it was."""

import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.mappings.words.text import bytes_text
from tensorferry.pipelines.convert.conversion_commit import JobCommit
from tensorferry.pipelines.convert.conversion_planning import (
    Conversion,
    ConversionOptions,
    plan_conversion,
    source_digest,
)
from tensorferry.pipelines.convert.ferry import FerryWork
from tensorferry.pipelines.convert.maxtext_settings import write_settings
from tensorferry.pipelines.convert.tied import compare_tied
from tensorferry.pipelines.convert.units import Unit, Units
from tensorferry.pipelines.engine.beam_args import choose_engine
from tensorferry.pipelines.engine.cluster_args import complete_args, plan_resources, refuse_out_of_reach
from tensorferry.pipelines.engine.progress import Done
from tensorferry.pipelines.engine.receipt_count import ReceiptCount
from tensorferry.pipelines.engine.runner import OnlyBuilt, RunOptions, run_items
from tensorferry.pipelines.engine.tally import Tally
from tensorferry.pipelines.orbax.leaf_values import with_leaves
from tensorferry.pipelines.orbax.orbax_log import quiet_orbax
from tensorferry.pipelines.orbax.orbax_metadata import load_orbax, scalar_keys, write_item_metadata, write_step_metadata
from tensorferry.pipelines.output.bucket_run import BucketRun
from tensorferry.pipelines.output.manifest import make_manifest, unfinished
from tensorferry.pipelines.output.output_options import OutputOptions
from tensorferry.pipelines.output.run_dir import RunDir, RunState
from tensorferry.pipelines.sinks.listing import MANIFEST_NAME
from tensorferry.pipelines.sinks.sink import ChunkError, open_sink
from tensorferry.pipelines.storage.kvstores import is_local
from tensorferry.pipelines.storage.local_files import write_json

# MaxText's train state beside the weights: a step counter and no optimizer.
EXTRA_LEAVES: dict[tuple[str, ...], Any] = {("step",): 0, ("opt_state",): {}}
_SETTINGS = "maxtext.yml"
_PASSES = 2

Say = Callable[[str], None]
Run = RunDir | BucketRun


@dataclass(frozen=True)
class Outcome:
    """What a conversion did.

    Attributes:
      conversion: the source and the plan.
      step: path or url of the published step.
      settings: path or url of MaxText's settings file.
      redone_items: work items done in this run.
      kept_items: work items found finished.
      peak_rss_bytes: largest resident set of a worker process.
      all_items: work items in all; for ``ocdbt`` one is a data file.
    """

    conversion: Conversion
    step: str
    settings: str
    redone_items: int
    kept_items: int
    peak_rss_bytes: int
    all_items: int


def convert(options: ConversionOptions, output: OutputOptions, say: Say) -> Outcome:
    """Converts a Hugging Face checkpoint into ``OUTPUT/0/items``.

    Args:
      options: what to convert, and into what.
      output: where it goes.
      say: shows the user a line.

    Raises:
      PlanError: the plan does not add up; nothing was written.
      FerryError: anything else; nothing was committed, and the same command resumes.
    """
    output.require()
    for source in filter(None, (options.lora_only or options.source, options.lora)):
        refuse_out_of_reach(source, output.output, output.beam_args)
    conversion = plan_conversion(options)
    conversion.plan.require()
    compare_tied(conversion)
    # A branch of a hub is a commit from here on, however it moves meanwhile.
    options = conversion.pinned(options)
    run = _run_of(output, run_digest(conversion, output), asdict(options))
    return do_run(conversion, options, output, run, say)


def do_run(conversion: Conversion, options: ConversionOptions, output: OutputOptions, run: Run, say: Say) -> Outcome:
    """Does what is left of a run. See `convert`."""
    state = run.open()
    try:
        done = _Conversion(conversion, options, output, run, say)
        if state is RunState.PUBLISHED:
            done.kept_items = done.units.count
        else:
            done.finish()
        return done.outcome()
    finally:
        run.close()


def _run_of(output: OutputOptions, digest: str, options: dict[str, Any]) -> Run:
    if is_local(output.output):
        return RunDir(Path(output.output), digest, options, overwrite=output.overwrite)
    return BucketRun(
        output.output, digest, options, overwrite=output.overwrite, locked=True, take_over=output.take_over
    )


def run_digest(conversion: Conversion, output: OutputOptions) -> str:
    """The plan's digest, with what the sink adds to it, and what tells one content of the source from another."""
    digest = f"{conversion.plan.digest}-{output.store_format}-{output.compression}"
    return f"{digest}-{conversion.revision[:16]}" if conversion.revision else digest


class _Conversion:
    """A run whose output is taken."""

    def __init__(
        self, conversion: Conversion, options: ConversionOptions, output: OutputOptions, run: Run, say: Say
    ) -> None:
        self.conversion, self.plan = conversion, conversion.plan
        self.options, self.output, self.run, self.say = options, output, run, say
        sink = open_sink(run.item_root, output.store_format, output.compression)
        self.units = Units(self.plan, output.store_format)
        self.sink = sink.within(options.target.worker_memory_bytes)
        self.specs = [array.spec for array in self.plan.arrays]
        # Work item id to receipt, as last read: in a bucket, reading them all takes a while.
        self.receipts: dict[str, dict[str, Any]] = {}
        self.done_items = self.kept_items = self.peak_rss_bytes = 0
        self.is_committed = False

    def finish(self) -> None:
        """Ferries what is left and publishes."""
        self.sink.prepare(self.specs)
        for attempt in range(_PASSES):
            self._ferry(first=attempt == 0)
            if self.is_committed:
                return
            try:
                self._check_chunks()
                break
            except ChunkError as error:
                self._forget(error)
                if attempt == _PASSES - 1:
                    raise
        self._refuse_changed_source()
        self._write_metadata()
        self.run.commit()

    def outcome(self) -> Outcome:
        """What was done; writes the settings, which must not stand beside an older checkpoint."""

        def write(path: Path) -> None:
            write_settings(path, self.plan.family, self.plan.options)

        told = f"{self.output.output}/{_SETTINGS}"
        settings = told if self.is_committed else self.run.write_beside(_SETTINGS, write)
        counts = self.done_items, self.kept_items, self.peak_rss_bytes, self.units.count
        return Outcome(self.conversion, str(self.run.published), settings, *counts)

    def _ferry(self, first: bool) -> None:
        self.receipts = self.run.receipts.finished()
        todo = unfinished(self.units, self.receipts)
        before = self._before(todo)
        if first:
            self.kept_items = before.items
            if before.items:
                self.say(f"resuming: {before.items:,} work items of {bytes_text(before.nbytes)} are finished already")
            if isinstance(self.run, RunDir):
                refuse_full_disk(self.run.state_dir, sum(item.write_bytes for item in todo))
        if todo and not self._is_in_job():
            tally = self._do(todo, before)
            self.done_items += tally.done
            self.peak_rss_bytes = max(self.peak_rss_bytes, tally.peak_rss_bytes)
            if self.is_committed:
                return
            self.receipts = self.run.receipts.finished()
        missing = unfinished(self.units, self.receipts)
        if missing:
            raise FerryError(f"{len(missing):,} work items left no receipt. Run the same command again to resume.")

    def _is_in_job(self) -> bool:
        """Whether this is the commit of a job, which does no work item."""
        return isinstance(self.run, BucketRun) and bool(self.run.job)

    def _do(self, todo: list[Unit], before: Done) -> Tally:
        how, sizes, path = self._how(before, todo), [item.write_bytes for item in todo], self._items_file(todo)
        if not (self.output.job_commits and isinstance(self.run, BucketRun)):
            return run_items(path, sizes, self._work(), how)
        job = uuid.uuid4().hex
        commit = JobCommit(self.options, self.output, self.run.plan_digest, job)
        self.run.leave_to(job)
        try:
            tally = run_items(path, sizes, self._work(), replace(how, commit=commit))
        except OnlyBuilt:
            if choose_engine(self.output.beam_args).is_template:
                self.run.keep_left()
            raise
        self.is_committed = True
        return tally

    def _before(self, todo: Iterable[Unit]) -> Done:
        left_items, left_bytes = 0, 0
        for item in todo:
            left_items, left_bytes = left_items + 1, left_bytes + item.write_bytes
        return Done(self.plan.totals.write_bytes - left_bytes, self.units.count - left_items)

    def _items_file(self, items: Iterable[Unit]) -> str:
        import json

        self.run.work_dir.mkdir(exist_ok=True)
        path = self.run.work_dir / "items.jsonl"
        with open(path, "w") as file:
            for item in items:
                file.write(json.dumps(item.to_json(), separators=(",", ":")) + "\n")
        return self.run.reachable(str(path), by_all=not choose_engine(self.output.beam_args).is_local)

    def _work(self) -> FerryWork:
        bound = self.options.target.worker_memory_bytes
        source, token = self.conversion.source.url, uuid.uuid4().hex
        return FerryWork(source, self.sink, self.run.receipts, bound, token, self.options.lora)

    def _how(self, before: Done, todo: Iterable[Unit]) -> RunOptions:
        needed = plan_resources(self.plan, self.units.count)
        return RunOptions(
            beam_args=complete_args(self.output.beam_args, needed, self.run.work_dir, self._is_far()),
            local_items=str(self.run.work_dir / "items.jsonl"),
            state_dir=str(self.run.work_dir),
            before=before,
            progress_seconds=self.output.progress_seconds,
            count_done=ReceiptCount(self.run.receipts, {item.id: item.write_bytes for item in todo}),
            meanwhile=load_orbax,
        )

    def _is_far(self) -> bool:
        """Whether a thread waits for a network, and not for a disk."""
        return not (is_local(self.conversion.source.url) and is_local(self.output.output))

    @property
    def _leaves(self) -> dict[tuple[str, ...], Any]:
        """What lies beside the arrays: an adapter has no train state of its own."""
        return {} if self.conversion.lora else EXTRA_LEAVES

    def _custom_metadata(self) -> dict[str, Any]:
        """What MaxText asks of a step, and of an adapter's rank and alpha."""
        told: dict[str, Any] = {"scan_layers": self.plan.options.scan_layers}
        return told | {"lora": dict(self.conversion.lora)} if self.conversion.lora else told

    def _check_chunks(self) -> None:
        winners = self.units.attempts(self.receipts)
        with_leaves(self.sink, self._leaves).finalize(self.specs, winners, scalar_keys(self._leaves))

    def _forget(self, error: ChunkError) -> None:
        """Drops the receipts of chunks that are not there after all (a machine that lost power)."""
        lost = set(error.missing)
        for item in self.units:
            keys = {part.spec.chunk_key(part.grid, self.sink.store_format) for part in item.parts}
            if keys & lost:
                self.run.receipts.discard(item.id)

    def _refuse_changed_source(self) -> None:
        if self.conversion.merge:
            self.conversion.merge.refuse_changed()
        # Where the source can tell its revision, no header has to be read again.
        if self.conversion.revision and self.conversion.source.revision() == self.conversion.revision:
            return
        now = source_digest(self.options)
        if self.conversion.revision or now != self.conversion.checkpoint.digest:
            raise FerryError(str(Problem(
                self.options.source, f"the source as it was planned ({self.conversion.checkpoint.digest[:16]})",
                f"other content (headers {now[:16]})",
                f"Remove {self.run.state_dir} and start again on a source at rest.",
            )))  # fmt: skip

    def _write_metadata(self) -> None:
        store_format = self.sink.store_format
        options = {**asdict(self.options), **asdict(self.output)}
        manifest = make_manifest(self.plan, self.conversion.checkpoint, options, self.receipts)
        if self.conversion.merge:
            manifest["adapter"] = self.conversion.merge.record()

        def write(step: Path) -> None:
            with quiet_orbax():
                write_item_metadata(step / self.run.item, self.specs, self._leaves, store_format)
                write_step_metadata(step, self.run.item, self._custom_metadata())
            write_json(step / self.run.item / MANIFEST_NAME, manifest)

        self.run.write_metadata(write, store_format)
        shutil.rmtree(self.run.work_dir, ignore_errors=True)


def refuse_full_disk(directory: Path, needed_bytes: int) -> None:
    """Refuses to start what cannot fit.

    Raises:
      FerryError: says how much is needed and free.
    """
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise FerryError(str(Problem(
            str(directory), f"{bytes_text(needed_bytes)} free for what is left to write", f"{bytes_text(free)} free",
            "Free space or choose another output, then run the same command again.",
        )))  # fmt: skip


def absolute(path: str) -> str:
    """A local path made absolute; a URL as it is."""
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))
