"""Converting: plan, prepare, ferry, commit. Killed at any moment, the same command goes on where it was."""

import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mappings.problems import FerryError, PlanError, Problem
from mappings.text import bytes_text
from mappings.work import WorkItem
from pipelines.byte_source import ByteSource
from pipelines.checkpoint import open_checkpoint
from pipelines.ferry import FerryWork
from pipelines.manifest import make_manifest, unfinished
from pipelines.maxtext_settings import write_settings
from pipelines.orbax_log import quiet_orbax
from pipelines.orbax_metadata import scalar_keys, write_item_metadata, write_step_metadata
from pipelines.planning import Conversion, ConversionOptions, plan_conversion
from pipelines.progress import Done
from pipelines.run_dir import RunDir, RunState
from pipelines.run_files import write_json
from pipelines.runner import RunOptions, run_items
from pipelines.sink import ChunkError, open_sink
from pipelines.sinks.listing import MANIFEST_NAME

# MaxText's train state beside the weights: a step counter and no optimizer.
EXTRA_LEAVES: dict[tuple[str, ...], Any] = {("step",): 0, ("opt_state",): {}}
_COMPARE_BYTES = 8 << 20
_PASSES = 2

Say = Callable[[str], None]


@dataclass(frozen=True)
class OutputOptions:
    """Where and how the checkpoint is written.

    Attributes:
      output: directory that will hold the step.
      store_format: ``zarr3``, ``ocdbt`` or ``zarr2``.
      compression: ``none`` or ``zstd1``.
      overwrite: replace a complete Tensorferry checkpoint.
      beam_args: Beam's options.
      progress_seconds: time between lines of progress where there is no terminal.
    """

    output: str
    store_format: str = "zarr3"
    compression: str = "none"
    overwrite: bool = False
    beam_args: tuple[str, ...] = ()
    progress_seconds: float = 5.0


@dataclass(frozen=True)
class Outcome:
    """What a conversion did.

    Attributes:
      conversion: the source and the plan.
      step: the published step.
      settings: MaxText's settings file.
      redone_items: work items done in this run.
      kept_items: work items found finished.
      peak_rss_bytes: largest resident set of a worker process.
    """

    conversion: Conversion
    step: Path
    settings: Path
    redone_items: int
    kept_items: int
    peak_rss_bytes: int


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
    conversion = plan_conversion(options)
    conversion.plan.require()
    compare_tied(conversion)
    # A branch of a hub is a commit from here on, however it moves meanwhile.
    options = replace(options, source=conversion.source.url)
    run = RunDir(Path(output.output), run_digest(conversion, output), asdict(options), overwrite=output.overwrite)
    state = run.open()
    try:
        done = _Conversion(conversion, options, output, run, say)
        if state is RunState.PUBLISHED:
            done.kept_items = conversion.plan.totals.work_items
        else:
            done.finish()
        return done.outcome()
    finally:
        run.close()


def run_digest(conversion: Conversion, output: OutputOptions) -> str:
    """The plan's digest, with what the sink adds to it, and what tells one content of the source from another."""
    digest = f"{conversion.plan.digest}-{output.store_format}-{output.compression}"
    return f"{digest}-{conversion.revision[:16]}" if conversion.revision else digest


class _Conversion:
    """A run whose output is taken."""

    def __init__(
        self, conversion: Conversion, options: ConversionOptions, output: OutputOptions, run: RunDir, say: Say
    ) -> None:
        self.conversion, self.plan = conversion, conversion.plan
        self.options, self.output, self.run, self.say = options, output, run, say
        self.sink = open_sink(str(run.item_dir), output.store_format, output.compression)
        self.specs = [array.spec for array in self.plan.arrays]
        self.work_dir = run.state_dir / "work"
        self.done_items = self.kept_items = self.peak_rss_bytes = 0

    def finish(self) -> None:
        """Ferries what is left and publishes."""
        self.sink.prepare(self.specs)
        for attempt in range(_PASSES):
            self._ferry(first=attempt == 0)
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
        settings = self.run.output / "maxtext.yml"
        write_settings(settings, self.plan.family, self.plan.options)
        items = self.done_items, self.kept_items
        return Outcome(self.conversion, self.run.published, settings, *items, self.peak_rss_bytes)

    def _ferry(self, first: bool) -> None:
        receipts = self.run.receipts.finished()
        todo = unfinished(self.plan.items(), receipts)
        before = self._before(todo)
        if first:
            self.kept_items = before.items
            if before.items:
                self.say(f"resuming: {before.items:,} work items of {bytes_text(before.nbytes)} are finished already")
            refuse_full_disk(self.run.state_dir, sum(item.write_bytes for item in todo))
        if todo:
            tally = run_items(self._items_file(todo), [i.write_bytes for i in todo], self._work(), self._how(before))
            self.done_items += tally.done
            self.peak_rss_bytes = max(self.peak_rss_bytes, tally.peak_rss_bytes)
        missing = unfinished(self.plan.items(), self.run.receipts.finished())
        if missing:
            raise FerryError(f"{len(missing):,} work items left no receipt. Run the same command again to resume.")

    def _before(self, todo: Iterable[WorkItem]) -> Done:
        left_items, left_bytes = 0, 0
        for item in todo:
            left_items, left_bytes = left_items + 1, left_bytes + item.write_bytes
        totals = self.plan.totals
        return Done(totals.write_bytes - left_bytes, totals.work_items - left_items)

    def _items_file(self, items: Iterable[WorkItem]) -> str:
        import json

        self.work_dir.mkdir(exist_ok=True)
        path = self.work_dir / "items.jsonl"
        with open(path, "w") as file:
            for item in items:
                file.write(json.dumps(item.to_json(), separators=(",", ":")) + "\n")
        return str(path)

    def _work(self) -> FerryWork:
        bound = self.options.target.worker_memory_bytes
        return FerryWork(self.conversion.source.url, self.sink, self.run.receipts, bound, uuid.uuid4().hex)

    def _how(self, before: Done) -> RunOptions:
        return RunOptions(
            beam_args=self.output.beam_args,
            state_dir=str(self.work_dir),
            before=before,
            progress_seconds=self.output.progress_seconds,
        )

    def _check_chunks(self) -> None:
        winners = [receipt["attempt"] for receipt in self.run.receipts.finished().values()]
        self.sink.finalize(self.specs, winners, scalar_keys(EXTRA_LEAVES))

    def _forget(self, error: ChunkError) -> None:
        """Drops the receipts of chunks that are not there after all (a machine that lost power)."""
        lost = set(error.missing)
        for item in self.plan.items():
            keys = {part.spec.chunk_key(part.grid, self.sink.store_format) for part in item.parts}
            if keys & lost:
                self.run.receipts.discard(item.id)

    def _refuse_changed_source(self) -> None:
        # Where the source can tell its revision, no header has to be read again.
        if self.conversion.revision and self.conversion.source.revision() == self.conversion.revision:
            return
        now = open_checkpoint(self.options.source).digest
        if self.conversion.revision or now != self.conversion.checkpoint.digest:
            raise FerryError(str(Problem(
                self.options.source, f"the source as it was planned ({self.conversion.checkpoint.digest[:16]})",
                f"other content (headers {now[:16]})",
                f"Remove {self.run.state_dir} and start again on a source at rest.",
            )))  # fmt: skip

    def _write_metadata(self) -> None:
        with quiet_orbax():
            write_item_metadata(self.run.item_dir, self.specs, EXTRA_LEAVES, self.sink.store_format)
            write_step_metadata(self.run.building, self.run.item, {"scan_layers": self.plan.options.scan_layers})
        receipts = self.run.receipts.finished()
        options = {**asdict(self.options), **asdict(self.output)}
        manifest = make_manifest(self.plan, self.conversion.checkpoint, options, receipts)
        write_json(self.run.item_dir / MANIFEST_NAME, manifest)
        shutil.rmtree(self.work_dir, ignore_errors=True)


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


def compare_tied(conversion: Conversion) -> None:
    """Compares stored tensors that config.json declares to be one, before anything is written.

    Raises:
      PlanError: they differ.
    """
    problems = [
        Problem(
            name, f"the same bytes as {to}: config.json says tie_word_embeddings=true", "other bytes",
            "Choose with --lm-head stored (keep it, untied) or --lm-head tied (leave it out).",
            file=conversion.checkpoint.tensors[name].file,
        )
        for name, to in conversion.compare
        if not same_bytes(conversion, name, to)
    ]  # fmt: skip
    if problems:
        raise PlanError(problems)


def same_bytes(conversion: Conversion, one: str, other: str) -> bool:
    """Whether two stored tensors hold the same dtype, shape and bytes; reads blocks until they differ."""
    a, b = conversion.checkpoint.tensors[one], conversion.checkpoint.tensors[other]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    source: ByteSource = conversion.source
    starts = range(0, a.nbytes, _COMPARE_BYTES)
    lengths = (min(_COMPARE_BYTES, a.nbytes - start) for start in starts)
    return all(
        source.read(a.file, a.offset + start, length) == source.read(b.file, b.offset + start, length)
        for start, length in zip(starts, lengths, strict=True)
    )


def absolute(path: str) -> str:
    """A local path made absolute; a URL as it is."""
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))
