"""The commit as the last step of a job, for launchers that end when the job has started, as a flex template's does.

A worker runs it in a process of its own, so that Orbax and JAX stay out of the workers. It plans anew from the options,
which shows too whether the source has changed since, and may run again, or on two workers at once: one waits for the
other, and what is committed stays as it is.
"""

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from tensorferry.pipelines.convert.conversion_planning import ConversionOptions, options_of
from tensorferry.pipelines.engine.commit_process import CommitApart, commit_program, refuse_other_plan
from tensorferry.pipelines.output.output_options import OutputOptions


@dataclass(frozen=True)
class JobCommit(CommitApart):
    """What the job carries of its commit: options, no plan and no secret.

    Attributes:
      options: what is converted.
      output: where it goes.
      run_digest: what the job writes.
      job: token that the output is left to.
    """

    options: ConversionOptions
    output: OutputOptions
    run_digest: str
    job: str

    @classmethod
    def parsed(cls, text: str) -> "JobCommit":
        """What `encoded` told."""
        data: dict[str, Any] = json.loads(text)
        options = options_of(data["options"], data["options"]["source"])
        output = OutputOptions(**{**data["output"], "beam_args": tuple(data["output"]["beam_args"])})
        return cls(options, output, data["run_digest"], data["job"])


def commit(job: JobCommit) -> None:
    """Commits what a job has finished.

    Raises:
      FerryError: the source changed meanwhile, a receipt or a chunk is missing, or another process has the output.
    """
    from tensorferry.pipelines.convert.conversion import do_run, run_digest
    from tensorferry.pipelines.convert.conversion_planning import plan_conversion
    from tensorferry.pipelines.output.bucket_run import BucketRun

    conversion = plan_conversion(job.options)
    conversion.plan.require()
    digest = run_digest(conversion, job.output)
    refuse_other_plan(job.options.source, job.run_digest, digest)
    run = BucketRun(job.output.output, digest, asdict(job.options), overwrite=job.output.overwrite, job=job.job)
    do_run(conversion, job.options, job.output, run, print)


if __name__ == "__main__":
    sys.exit(commit_program(lambda text: commit(JobCommit.parsed(text))))
