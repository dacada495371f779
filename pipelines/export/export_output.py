"""Where an export goes, and what it did."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.engine.beam_args import choose_engine
from tensorferry.pipelines.export.export_planning import Export, ExportOptions
from tensorferry.pipelines.output.output_options import refuse_local_commit
from tensorferry.pipelines.storage.kvstores import is_local


@dataclass(frozen=True)
class ExportOutput:
    """Where the files go, and how the export runs.

    Attributes:
      output: a local directory, new or empty; or ``gs://bucket/path``.
      staging: where the files are built before they go to a bucket: a local directory, new or empty; without one,
        workers write whole files into the bucket.
      beam_args: Beam's options.
      progress_seconds: time between lines of progress where there is no terminal.
      overwrite: replace a complete Tensorferry export.
      take_over: take the output in a bucket from another process that is at work on it.
      commit_in_job: let the job's last step commit; always so where this process does not wait for the job.
    """

    output: str
    staging: str = ""
    beam_args: tuple[str, ...] = ()
    progress_seconds: float = 5.0
    take_over: bool = False
    overwrite: bool = False
    commit_in_job: bool = False

    @property
    def job_commits(self) -> bool:
        """Whether a worker commits, and not this process."""
        return self.commit_in_job or choose_engine(self.beam_args).is_template

    def require(self, options: ExportOptions) -> None:
        """Refuses what does not go together.

        Raises:
          FerryError: a job is to commit into a local directory, or on a machine that does not see ``--config``.
        """
        if not self.job_commits:
            return
        refuse_local_commit(True, self.staging or self.output)
        if choose_engine(self.beam_args).is_dataflow:
            for option, place in (("--config", options.config), ("--fp8-from", options.fp8_from)):
                if place and is_local(place):
                    expected = f"gs://, hf:// or https:// ({option}): the job's last step reads it"
                    raise FerryError(str(Problem(place, expected, "a local path", "Copy its small files to a bucket.")))

    def streamed(self, options: ExportOptions) -> ExportOptions:
        """The options with what follows from where the files go."""
        return replace(options, streamed=not is_local(self.output) and not self.staging)


@dataclass(frozen=True)
class ExportOutcome:
    """What an export did.

    Attributes:
      export: source, repository and plan.
      output: the repository's path or URL.
      done_items: work items done in this run.
      kept_items: work items found finished.
      peak_rss_bytes: largest resident set of a worker process.
      changed: FP8 weight to how many blocks of its scale changed, and how many it has.
    """

    export: Export
    output: str
    done_items: int = 0
    kept_items: int = 0
    peak_rss_bytes: int = 0
    changed: Mapping[str, tuple[int, int]] = field(default_factory=dict)
