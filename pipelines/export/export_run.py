"""Exporting: plan, prepare, ferry, commit. Killed at any moment, the same command goes on where it was."""

import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from tensorferry.mappings.export.export_plan import ExportPlan
from tensorferry.mappings.export.shards import INDEX_FILE, Place, all_places
from tensorferry.mappings.plan.work import Part, WorkItem
from tensorferry.mappings.words.problems import FerryError, PlanError, Problem
from tensorferry.mappings.words.text import bytes_text
from tensorferry.pipelines.convert.conversion import refuse_full_disk
from tensorferry.pipelines.engine.cluster_args import refuse_out_of_reach
from tensorferry.pipelines.engine.progress import Done
from tensorferry.pipelines.engine.runner import RunOptions, run_items
from tensorferry.pipelines.export.export_output import ExportOutcome, ExportOutput
from tensorferry.pipelines.export.export_planning import Export, ExportOptions, plan_export
from tensorferry.pipelines.export.export_source import open_export_source
from tensorferry.pipelines.export.export_work import ExportWork
from tensorferry.pipelines.export.repository_files import small_files
from tensorferry.pipelines.export.shard_files import ShardFiles
from tensorferry.pipelines.huggingface.fp8_source import open_fp8_source
from tensorferry.pipelines.huggingface.repository import CONFIG, open_repository
from tensorferry.pipelines.output.export_manifest import export_manifest
from tensorferry.pipelines.output.manifest import unfinished
from tensorferry.pipelines.output.output_dir import OutputDir
from tensorferry.pipelines.output.overlap import refuse_overlap
from tensorferry.pipelines.output.run_dir import RunState
from tensorferry.pipelines.output.upload import delete_objects, replaced_objects, upload
from tensorferry.pipelines.sinks.listing import MANIFEST_NAME
from tensorferry.pipelines.storage.kvstores import is_local
from tensorferry.pipelines.storage.local_files import read_json, write_json
from tensorferry.transforms.digest import digest
from tensorferry.transforms.dtypes import numpy_dtype

Say = Callable[[str], None]


def run_export(options: ExportOptions, output: ExportOutput, say: Say) -> ExportOutcome:
    """Exports an Orbax checkpoint into a directory that ``from_pretrained`` loads.

    Args:
      options: what to export, and as what.
      output: where it goes.
      say: shows the user a line.

    Raises:
      PlanError: the plan does not add up; nothing was written.
      FerryError: anything else; nothing was committed, and the same command resumes.
    """
    refuse_out_of_reach(options.source, output.staging or output.output, output.beam_args)
    output.require(options)
    options = output.streamed(options)
    export = plan_export(options)
    export.plan.require()
    refuse_overlap(export, options, output.output)
    refuse_other_constants(export)
    options = export.pinned(options)
    if options.streamed:
        from tensorferry.pipelines.export.streamed_run import run_streamed  # which needs what is here

        return run_streamed(export, options, output, say)
    if is_local(output.output):
        return build(export, options, output, output.output, say)
    return _build_and_upload(export, options, output, say)


def build(
    export: Export,
    options: ExportOptions,
    output: ExportOutput,
    folder: str,
    say: Say,
    kind: "type[ExportRun] | None" = None,
) -> ExportOutcome:
    """Builds what is exported in a local directory; ``kind`` is the run of something else than a whole model."""
    overwrite = output.overwrite and is_local(output.output)  # a staging directory holds nothing that is replaced
    run = OutputDir(Path(folder), export.plan.digest, asdict(options), overwrite)
    state = run.open()
    try:
        if state is RunState.PUBLISHED:
            return ExportOutcome(export, str(run.output), 0, export.plan.totals.work_items)
        for note in export.notes:
            say(note)
        return (kind or ExportRun)(export, options, output, run, say).finish()
    finally:
        run.close()


def _build_and_upload(export: Export, options: ExportOptions, output: ExportOutput, say: Say) -> ExportOutcome:
    """Builds the repository in the staging directory, copies it to the bucket, and clears the directory."""
    staging, last = Path(output.staging), last_file(export.plan)
    small = (*export.repository.files, *export.fp8.files(), CONFIG, MANIFEST_NAME, INDEX_FILE)
    names = {*small, *(shard.file for shard in export.plan.shards)}
    old = replaced_objects(output.output, names, last, export.plan.digest, output.overwrite)
    whole = read_json(staging / MANIFEST_NAME) or {}
    if whole.get("plan_digest") == export.plan.digest and (staging / last).exists():
        outcome = ExportOutcome(export, output.output, 0, export.plan.totals.work_items)
    else:
        outcome = replace(build(export, options, output, output.staging, say), output=output.output)
    names = [path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file()]
    delete_objects(output.output, old)
    upload(staging, output.output, names, last, say)
    for name in names:
        (staging / name).unlink()
    for folder in {Path(name).parent for name in names} - {Path()}:
        (staging / folder).rmdir()
    return outcome


def last_file(plan: ExportPlan) -> str:
    """The file that makes a repository a checkpoint to readers: the index, or the only shard."""
    return plan.shards[0].file if len(plan.shards) == 1 else INDEX_FILE


def current_digest(options: ExportOptions, export: Export) -> str:
    """The digest of what a plan was made from, as it is now."""
    opened = (
        open_export_source(options.source, step=options.step),
        open_repository(options.config),
        open_fp8_source(export.fp8.url),
    )
    return "/".join(filter(None, (one.digest for one in opened)))


def refuse_other_constants(export: Export) -> None:
    """Refuses parameters that were trained away from the constant that the Hugging Face model has in their place.

    Raises:
      PlanError: there are some.
    """
    problems = []
    for name, value in export.constants.items():
        leaf = export.source.parameters.arrays[name]
        found = export.source.item.read(leaf.array_name, tuple((0, length) for length in leaf.shape))
        if not (found.astype(np.float32) == value).all():
            fix = "The Hugging Face model cannot hold these values; export would lose them."
            problems.append(Problem(name, f"{value:g} everywhere: no tensor has its place", "other values", fix))
    if problems:
        raise PlanError(problems)


class ExportRun:
    """A run whose output is taken."""

    def __init__(self, export: Export, options: ExportOptions, output: ExportOutput, run: OutputDir, say: Say) -> None:
        self.export, self.plan = export, export.plan
        self.options, self.output, self.run, self.say = options, output, run, say
        self.files = ShardFiles(str(run.files_dir))
        self.work_dir = run.state_dir / "queue"

    def finish(self) -> ExportOutcome:
        if self.run.rebooted:
            self._forget_lost()
        receipts = self.run.receipts.finished()
        lines = dict(_numbered(self.plan.lines()))
        todo = unfinished((item for _, item in lines.values()), receipts)
        left_bytes = sum(item.write_bytes for item in todo)
        before = Done(self.plan.totals.write_bytes - left_bytes, len(lines) - len(todo))
        if before.items:
            self.say(f"resuming: {before.items:,} work items of {bytes_text(before.nbytes)} are finished already")
        refuse_full_disk(self.run.state_dir, left_bytes)
        self.files.prepare(self.plan.shards)
        peak = self._ferry([lines[item.id] for item in todo], before) if todo else 0
        missing = unfinished((item for _, item in lines.values()), self.run.receipts.finished())
        if missing:
            raise FerryError(f"{len(missing):,} work items left no receipt. Run the same command again to resume.")
        self._refuse_changed_source()
        self._copy_tensors()
        manifest = self.write_small_files()
        self.files.check(self.plan.shards)
        shutil.rmtree(self.work_dir, ignore_errors=True)
        self.run.commit(last_file(self.plan))
        told = manifest["low_bit"].items()
        changed = {name: (one["changed_blocks"], one["blocks"]) for name, one in told}
        return ExportOutcome(self.export, str(self.run.output), len(todo), before.items, peak, changed)

    def _ferry(self, todo: list[tuple[str, WorkItem]], before: Done) -> int:
        self.work_dir.mkdir(exist_ok=True)
        path = self.work_dir / "items.jsonl"
        path.write_text("".join(f"{line}\n" for line, _ in todo))
        bound = self.options.worker_memory_bytes
        work = ExportWork(
            self.export.source.item, self.files, self.run.receipts, self.export.fp8.url, bound, uuid.uuid4().hex
        )
        how = RunOptions(
            beam_args=self.output.beam_args,
            state_dir=str(self.work_dir),
            before=before,
            progress_seconds=self.output.progress_seconds,
        )
        return run_items(str(path), [item.write_bytes for _, item in todo], work, how).peak_rss_bytes

    def _forget_lost(self) -> None:
        """After a restart of the machine: drops the receipts of parts that did not reach the disk."""
        places = all_places(self.plan.shards)
        receipts = self.run.receipts.finished()
        for item in self.plan.items():
            told = receipts.get(item.id, {}).get("parts", ())
            if told and not self._is_there(item, told, places):
                self.run.receipts.discard(item.id)

    def _is_there(self, item: WorkItem, told: Iterable[Mapping[str, str]], places: Mapping[str, Place]) -> bool:
        """Whether the parts of an item are in the files; low-bit ones and finished scales are always done again."""
        again = self.plan.low_bit.keys() | self.plan.finishes.keys()
        try:
            return all(
                part.spec.key not in again and digest(self._part(part, places)) == one["digest"]
                for part, one in zip(item.parts, told, strict=True)
            )
        except (OSError, ValueError):
            return False

    def _part(self, part: Part, places: Mapping[str, Place]) -> np.ndarray:
        out = np.empty(part.spec.box_shape(part.grid), numpy_dtype(part.spec.dtype))
        place = places[part.spec.key]
        self.files.read(part, place.file, place.offset, out)
        return out

    def source_digest(self) -> str:
        """The digest of what the plan was made from, as it is now."""
        return current_digest(self.options, self.export)

    def _refuse_changed_source(self) -> None:
        if self.source_digest() != self.plan.source_digest:
            raise FerryError(str(Problem(
                self.options.source, "source and --config as they were planned", "other metadata",
                f"Remove {self.run.state_dir} and start again on a source at rest.",
            )))  # fmt: skip

    def _copy_tensors(self) -> None:
        """Writes the FP8 checkpoint's tensors that belong to no weight."""
        places, checkpoint = all_places(self.plan.shards), self.export.fp8.checkpoint
        if checkpoint is None:
            return
        for tensor in self.plan.copied:
            spec = next(spec for spec in self.plan.specs if spec.key == tensor.name)
            octets = checkpoint.source.read(tensor.file, tensor.offset, tensor.nbytes)
            array = np.frombuffer(octets, numpy_dtype(tensor.dtype)).reshape(tensor.shape)
            place = places[tensor.name]
            self.files.write(Part(spec, (0,) * len(spec.shape)), place.file, place.offset, array)

    def write_small_files(self) -> dict[str, Any]:
        """Writes everything that is no shard, the manifest last; the manifest."""
        folder = self.run.files_dir
        for name, content in small_files(self.export).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        manifest = export_manifest(self.export, self.options, self.run.receipts.finished())
        write_json(folder / MANIFEST_NAME, manifest)
        return manifest


def _numbered(lines: Iterable[tuple[str, WorkItem]]) -> Iterable[tuple[str, tuple[str, WorkItem]]]:
    return ((item.id, (line, item)) for line, item in lines)
