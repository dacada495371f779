"""Exporting into a bucket: workers write whole files, front to back; nothing is kept on any disk."""

import json
import shutil
import tempfile
import uuid
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tensorferry.mappings.export.shards import INDEX_FILE
from tensorferry.mappings.export.streamed import not_streamable, streamed_shards
from tensorferry.mappings.words.problems import FerryError, PlanError, Problem
from tensorferry.mappings.words.text import bytes_text
from tensorferry.pipelines.engine.beam_args import choose_engine
from tensorferry.pipelines.engine.cluster_args import complete_args, plan_resources
from tensorferry.pipelines.engine.progress import Done
from tensorferry.pipelines.engine.receipt_count import ReceiptCount
from tensorferry.pipelines.engine.runner import OnlyBuilt, RunOptions, run_items
from tensorferry.pipelines.export.export_commit import ExportCommit
from tensorferry.pipelines.export.export_output import ExportOutcome, ExportOutput
from tensorferry.pipelines.export.export_planning import Export, ExportOptions
from tensorferry.pipelines.export.export_run import Say, current_digest
from tensorferry.pipelines.export.repository_files import small_files
from tensorferry.pipelines.export.shard_stream import StreamWork
from tensorferry.pipelines.huggingface.repository import CONFIG
from tensorferry.pipelines.output.export_manifest import export_manifest
from tensorferry.pipelines.output.output_bucket import OutputBucket
from tensorferry.pipelines.output.run_dir import RunState
from tensorferry.pipelines.sinks.listing import MANIFEST_NAME
from tensorferry.pipelines.storage.bucket_stream import require_client

Line = dict[str, Any]
_OFTEN = 1.5


def run_streamed(
    export: Export, options: ExportOptions, output: ExportOutput, say: Say, job: str = ""
) -> ExportOutcome:
    """Exports into a bucket, or commits what a job has written there. See `run_export`.

    Args:
      export: the plan.
      options: what it was made from.
      output: where it goes.
      say: shows the user a line.
      job: token of the job whose commit this is, which writes no file; empty for a launcher.
    """
    problem = not_streamable(export.plan)
    if problem:
        raise PlanError([problem])
    require_client(output.output)
    run = OutputBucket(output.output, export.plan.digest, asdict(options), output.take_over, output.overwrite, job)
    state = run.open()
    try:
        if state is RunState.PUBLISHED:
            return ExportOutcome(export, output.output, 0, export.plan.totals.work_items)
        for note in (*export.notes, *_read_often(export.plan.amplification)):
            say(note)
        return _StreamedRun(export, options, output, run, say).finish()
    finally:
        run.close()


def _read_often(times: float) -> list[str]:
    """What to say when chunks over many layers are read anew for each file."""
    if times < _OFTEN:
        return []
    return [f"the source is read {times:.1f} times: its chunks reach over several files; --staging DIR reads it once"]


class _StreamedRun:
    """A run whose output is taken."""

    def __init__(
        self, export: Export, options: ExportOptions, output: ExportOutput, run: OutputBucket, say: Say
    ) -> None:
        self.export, self.plan = export, export.plan
        self.options, self.output, self.run, self.say = options, output, run, say
        self.is_committed = False

    def finish(self) -> ExportOutcome:
        """Ferries what is left and publishes."""
        lines = {shard.file: line for shard, line, _ in streamed_shards(self.plan)}
        data_bytes = {shard.file: shard.data_bytes for shard in self.plan.shards}
        todo = [name for name in lines if name not in self._finished()]
        kept = Done(sum(data_bytes[name] for name in lines if name not in todo), len(lines) - len(todo))
        if kept.items:
            self.say(f"resuming: {kept.items:,} files of {bytes_text(kept.nbytes)} are finished already")
        peak = 0
        if todo and not self.run.job:
            peak = self._ferry([lines[name] for name in todo], [data_bytes[name] for name in todo], kept)
        if not self.is_committed:
            self._commit(lines.keys())
        return ExportOutcome(self.export, self.output.output, len(todo), kept.items, peak)

    def _commit(self, files: Collection[str]) -> None:
        missing = set(files) - self._finished()
        if missing:
            raise FerryError(f"{len(missing):,} files left no receipt. Run the same command again to resume.")
        self._refuse_changed_source()
        small = small_files(self.export)
        manifest = export_manifest(self.export, self.options, self.run.receipts.finished())
        small[MANIFEST_NAME] = (json.dumps(manifest, indent=1) + "\n").encode()
        self.run.commit(small, INDEX_FILE if INDEX_FILE in small else CONFIG)

    def _finished(self) -> set[str]:
        """Files that have a receipt and are there at full size; other receipts are forgotten."""
        sizes, wanted = self.run.sizes(), {shard.file: shard.nbytes for shard in self.plan.shards}
        found = self.run.receipts.ids()
        whole = {name for name in found if sizes.get(name) == wanted.get(name, -1)}
        for name in found - whole:
            self.run.receipts.discard(name)
        return whole

    def _ferry(self, todo: list[Line], sizes: list[int], before: Done) -> int:
        scratch = Path(tempfile.mkdtemp(prefix="tensorferry-"))
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in todo)
        local = scratch / "items.jsonl"
        local.write_text(text)
        here = choose_engine(self.output.beam_args).is_local
        how = RunOptions(
            beam_args=complete_args(self.output.beam_args, plan_resources(self.plan), scratch, is_far=True),
            local_items=str(local),
            state_dir=str(scratch),
            before=before,
            progress_seconds=self.output.progress_seconds,
            count_done=ReceiptCount(
                self.run.receipts, {line["id"]: size for line, size in zip(todo, sizes, strict=True)}
            ),
        )
        bound = self.options.worker_memory_bytes
        work = StreamWork(self.export.source.item, self.output.output, self.run.receipts, bound, uuid.uuid4().hex)
        peak = self._do(str(local) if here else self.run.reachable(text), sizes, work, how)
        shutil.rmtree(scratch, ignore_errors=True)  # after a failure its log stays
        return peak

    def _do(self, path: str, sizes: list[int], work: StreamWork, how: RunOptions) -> int:
        """The files, and the commit with them where that is the job's; the largest resident set."""
        if not self.output.job_commits:
            return run_items(path, sizes, work, how).peak_rss_bytes
        job = uuid.uuid4().hex
        self.run.leave_to(job)
        commit = ExportCommit(self.options, self.output, self.plan.digest, job)
        try:
            tally = run_items(path, sizes, work, replace(how, commit=commit))
        except OnlyBuilt:
            if choose_engine(self.output.beam_args).is_template:
                self.run.keep_left()
            raise
        self.is_committed = True
        return tally.peak_rss_bytes

    def _refuse_changed_source(self) -> None:
        if current_digest(self.options, self.export) != self.plan.source_digest:
            fix = f"Remove {self.run.output} and start again on a source at rest."
            expected = "source and --config as they were planned"
            raise FerryError(str(Problem(self.options.source, expected, "other metadata", fix)))
