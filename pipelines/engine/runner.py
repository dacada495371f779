"""Runs work on every item of a plan through Beam, and says in sentences how it went."""

import os
import shutil
import tempfile
import traceback
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.engine.beam_args import EngineChoice, choose_engine, pipeline_options
from tensorferry.pipelines.engine.beam_log import last_words, logs_to
from tensorferry.pipelines.engine.progress import Done, ProgressMonitor, read_slots
from tensorferry.pipelines.engine.stop_flag import StopFlag
from tensorferry.pipelines.engine.stretches import Stretch, dealt_stretches, even_stretches
from tensorferry.pipelines.engine.supervisor import RESUME_HINT, Interrupted, supervise
from tensorferry.pipelines.engine.tally import Tally

if TYPE_CHECKING:
    from tensorferry.pipelines.engine.local_engine import Crew

_REMOTE_STRETCHES = 256


class OnlyBuilt(FerryError):
    """The user asked for the job's description only: there is nothing to read, write or commit."""

    exit_code = 0

    def __init__(self, commits: bool = False) -> None:
        last = " Its last step commits." if commits else ""
        super().__init__(f"The job was built and not run, as --dry_run or --template_location ask.{last}")


class Work(Protocol):
    """What to do with a work item. Frozen, importable and picklable; each worker thread has its own copy."""

    def setup(self) -> None:
        """Called once per worker thread, before its first item."""
        ...

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        """Does an item; doing it twice, even at once, must give the same bytes.

        Args:
          item: one line of the plan's file; `id` names it in messages.

        Returns:
          The receipt; `bytes` is what counts as progress, in the unit of the plan's item sizes.

        Raises:
          FerryError: for a foreseeable fault, with the sentence to show.
        """
        ...


@dataclass(frozen=True)
class RunOptions:
    """How to run.

    Attributes:
      beam_args: Beam's options as given on the command line.
      state_dir: a local scratch directory for progress, stop flag and log; a temporary one when empty.
      log_path: where tracebacks and Beam's messages go; `beam.log` in `state_dir` when empty.
      tally_path: where workers leave the tally: a path they all can write. Local engine: in `state_dir`;
        elsewhere beside the plan.
      before: what earlier attempts have finished, for the progress.
      show_progress: whether to draw.
      progress_seconds: time between two lines of progress where there is no terminal.
      grace_seconds: how long items in flight may go on after Ctrl-C.
      local_items: the plan's file on this machine, where `items_path` is elsewhere.
      count_done: tells what this run has finished, for engines whose workers do not see `state_dir`.
      commit: what a worker calls when every item is done, where the launcher is not to commit; picklable.
      meanwhile: what the launcher does while workers work, a second or so.
    """

    beam_args: tuple[str, ...] = ()
    state_dir: str = ""
    log_path: str = ""
    tally_path: str = ""
    before: Done = field(default_factory=Done)
    show_progress: bool = True
    progress_seconds: float = 5.0
    grace_seconds: float = 3.0
    local_items: str = ""
    count_done: Callable[[], Done] | None = None
    commit: Callable[[], None] | None = None
    meanwhile: Callable[[], None] = lambda: None


def run_items(items_path: str, item_sizes: Sequence[int], work: Work, options: RunOptions) -> Tally:
    """Does `work` on every item of a plan.

    Args:
      items_path: a file with one JSON object per line, one per work item; every worker must be able to
        read it (a local path for the local engine, a bucket for a cluster).
      item_sizes: bytes per item, in the file's order; what receipts call `bytes`.
      work: what to do with an item.
      options: how to run.

    Returns:
      The tally: every item done, none failed.

    Raises:
      FerryError: when an item failed, a worker died or a Beam option is wrong.
      Interrupted: on Ctrl-C.
    """
    if not item_sizes:
        return Tally()
    try:
        return _Run(items_path, item_sizes, work, options).result()
    except KeyboardInterrupt:
        raise Interrupted from None


class _Run:
    """One attempt at a plan."""

    def __init__(self, items_path: str, item_sizes: Sequence[int], work: Work, options: RunOptions) -> None:
        self.items_path = items_path
        self.item_sizes = item_sizes
        self.work = work
        self.options = options
        self.choice = choose_engine(options.beam_args)
        self.keep_state = bool(options.state_dir)
        self.state_dir = options.state_dir or tempfile.mkdtemp(prefix="tensorferry-")
        self.log_path = options.log_path or os.path.join(self.state_dir, "beam.log")
        self.run_dir = os.path.join(self.state_dir, f"run-{uuid.uuid4().hex[:12]}")
        self.stop = StopFlag(os.path.basename(self.run_dir), self.run_dir)

    @property
    def tally_path(self) -> str:
        if self.options.tally_path:
            return self.options.tally_path
        return os.path.join(self.run_dir, "tally.json") if self.choice.is_local else self.items_path + ".tally"

    def result(self) -> Tally:
        os.makedirs(self.run_dir)
        try:
            with logs_to(self.log_path):
                self._prepare_and_run()
            tally = self._checked(self._read_tally())
        except BaseException as error:
            self._clean(keep_log=not isinstance(error, Interrupted | KeyboardInterrupt))
            raise
        self._clean(keep_log=False)
        return tally

    def _prepare_and_run(self) -> None:
        # gRPC's C core writes on the terminal by itself; it reads this when Beam is first imported.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from tensorferry.pipelines.engine import beam_job, local_engine

        stretches = self._stretches()
        ferry = beam_job.Ferry(self.work, self.stop, engine_retries=self.choice.retries)
        commit = beam_job.Commit(self.options.commit, not self.choice.is_template) if self.options.commit else None
        graph = beam_job.build(stretches, ferry, self.tally_path, not self.choice.is_local, commit)
        crew = local_engine.Crew(self.log_path)
        crew.register()
        pipeline = _pipeline(self.choice, stretches, crew)
        graph(pipeline)
        with self._monitor():
            try:
                self._supervise(lambda: _run_to_end(pipeline, self.choice), crew)
            finally:
                crew.dismiss()
        if self.choice.only_builds:
            raise OnlyBuilt(commits=bool(commit))

    def _stretches(self) -> list[Stretch]:
        if self.choice.is_local:
            return dealt_stretches(self.items_path, self.item_sizes, self.choice.workers, self.run_dir)
        return even_stretches(self.items_path, len(self.item_sizes), _REMOTE_STRETCHES, self.options.local_items)

    def _monitor(self) -> Any:
        if not self.options.show_progress:
            return nullcontext()
        fresh = Done(sum(self.item_sizes), len(self.item_sizes))
        total, seconds = self.options.before.plus(fresh), self.options.progress_seconds
        count = self.options.count_done
        # Slots are only seen where workers share this machine's disk.
        if count is None or self.choice.is_local:
            return ProgressMonitor(total, lambda: read_slots(self.run_dir), self.options.before, seconds)
        return ProgressMonitor(total, count, self.options.before, seconds, read_seconds=seconds)

    def _supervise(self, run: Callable[[], None], crew: "Crew") -> None:
        error = supervise(run, crew, self.stop, self.options.grace_seconds, self.options.meanwhile)
        if crew.exit_codes:
            raise FerryError(self._death(crew))
        if error:
            self._log("".join(traceback.format_exception(error)))
            raise FerryError(self._stopped_sentence(error)) from error

    def _death(self, crew: "Crew") -> str:
        if crew.missing:
            return f"{crew.missing}. {RESUME_HINT}"
        from tensorferry.pipelines.engine.local_engine import death_sentence

        advice = "Fewer workers or a smaller --worker-memory-bytes need less memory."
        return f"{death_sentence(crew.exit_codes[0])}. {RESUME_HINT} {advice} Details: {self.log_path}"

    def _stopped_sentence(self, error: BaseException) -> str:
        words = last_words(error).rstrip(".")
        if self.choice.pools and words.startswith("Channel closed"):
            return f"A worker of a pool died (out of memory?). {RESUME_HINT} Details: {self.log_path}"
        return f"Beam stopped: {words}. {RESUME_HINT} Details: {self.log_path}"

    def _log(self, text: str) -> None:
        try:
            with open(self.log_path, "a") as log:
                print(text, file=log)
        except OSError:
            return

    def _read_tally(self) -> Tally:
        from tensorferry.pipelines.engine.beam_job import read_tally
        from tensorferry.pipelines.storage.byte_source import MissingFileError

        try:
            return read_tally(self.tally_path)
        except (OSError, ValueError, MissingFileError) as error:
            if self.options.commit:  # which removes it with the rest of the run, once every item is done
                return Tally(done=len(self.item_sizes))
            sentence = f"The run ended without its tally at {self.tally_path}. {RESUME_HINT}"
            raise FerryError(f"{sentence} Details: {self.log_path}") from error

    def _checked(self, tally: Tally) -> Tally:
        if tally.failed:
            self._log("\n".join(f"{each.item}: {each.sentence}\n{each.trace}" for each in tally.failures))
            raise FerryError(self._failures_sentence(tally))
        if tally.done != len(self.item_sizes):
            counts = f"{tally.done:,} of {len(self.item_sizes):,} work items are done"
            raise FerryError(f"The run ended, but {counts}. {RESUME_HINT}")
        return tally

    def _failures_sentence(self, tally: Tally) -> str:
        details = f" Details: {self.log_path}" if any(each.trace for each in tally.failures) else ""
        return f"{tally.failures_text(len(self.item_sizes))} {RESUME_HINT}{details}"

    def _clean(self, keep_log: bool) -> None:
        shutil.rmtree(self.run_dir, ignore_errors=True)
        if not self.keep_state and not keep_log:
            shutil.rmtree(self.state_dir, ignore_errors=True)


def _pipeline(choice: EngineChoice, stretches: Sequence[Any], crew: "Crew") -> Any:
    import apache_beam as beam
    from tensorferry.pipelines.engine.local_engine import local_engine

    if not choice.runner:
        options, pools = pipeline_options(choice), None
        if choice.pools:
            from tensorferry.pipelines.engine.worker_pools import first_environment

            pools = first_environment(choice.pools, crew)
        return beam.Pipeline(runner=local_engine(options, pools), options=options)
    options = pipeline_options(choice.cut_for_dask(len(stretches)))
    try:
        return beam.Pipeline(options=options)
    except (ValueError, ImportError, AttributeError) as error:
        raise FerryError(f"--runner {choice.runner} cannot start: {last_words(error)}") from error


def _run_to_end(pipeline: Any, choice: EngineChoice) -> None:
    result = pipeline.run()
    if choice.only_builds:
        return
    state = result.wait_until_finish()
    if state is not None and state != "DONE":
        raise RuntimeError(f"the job ended as {state}")
