"""What a user decides about a conversion's output: where it goes, in what form, and who commits it."""

from dataclasses import dataclass

from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.engine.beam_args import choose_engine
from tensorferry.pipelines.storage.kvstores import is_local


@dataclass(frozen=True)
class OutputOptions:
    """Where and how the checkpoint is written.

    Attributes:
      output: directory that will hold the step.
      store_format: ``zarr3``, ``ocdbt`` or ``zarr2``.
      compression: ``none`` or ``zstd1``.
      overwrite: replace a complete Tensorferry checkpoint.
      take_over: take the output in a bucket from another process that is at work on it.
      commit_in_job: let the job's last step commit; always so where this process does not wait for the job.
      beam_args: Beam's options.
      progress_seconds: time between lines of progress where there is no terminal.
    """

    output: str
    store_format: str = "zarr3"
    compression: str = "none"
    overwrite: bool = False
    beam_args: tuple[str, ...] = ()
    progress_seconds: float = 5.0
    take_over: bool = False
    commit_in_job: bool = False

    @property
    def job_commits(self) -> bool:
        """Whether a worker commits, and not this process."""
        return self.commit_in_job or choose_engine(self.beam_args).is_template

    def require(self) -> None:
        """Refuses what does not go together.

        Raises:
          FerryError: a job is to commit into a local directory.
        """
        refuse_local_commit(self.job_commits, self.output)


def refuse_local_commit(job_commits: bool, output: str) -> None:
    """Refuses a job that is to commit into a local directory.

    Raises:
      FerryError: it is one.
    """
    if job_commits and is_local(output):
        expected = "gs://bucket/path, since the job's last step commits"
        raise FerryError(str(Problem(output, expected, "a local path", "Leave --commit-in-job out.")))
