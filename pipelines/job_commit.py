"""The commit as the last step of a job, for launchers that end when the job has started, as a flex template's does.

A worker runs it in a process of its own, so that Orbax and JAX stay out of the workers. It plans anew from the options,
which shows too whether the source has changed since, and may run again, or on two workers at once: one waits for the
other, and what is committed stays as it is.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from mappings.problems import FerryError, Problem
from pipelines.output_options import OutputOptions
from pipelines.planning import ConversionOptions, options_of


@dataclass(frozen=True)
class JobCommit:
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

    def __call__(self) -> None:
        """Commits in a process of its own.

        Raises:
          FerryError: it could not; the same command as the job's, or the job again, goes on.
        """
        # Workers import what the launcher can import, from the same places.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        command, environment = [sys.executable, "-m", __name__], {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(command, input=self.encoded(), capture_output=True, text=True, env=environment)
        if done.returncode:
            words = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise FerryError(f"The work items are done, and the commit failed: {words[0]}")

    def encoded(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

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
    from pipelines.bucket_run import BucketRun
    from pipelines.convert import do_run, run_digest
    from pipelines.planning import plan_conversion

    conversion = plan_conversion(job.options)
    conversion.plan.require()
    digest = run_digest(conversion, job.output)
    if digest != job.run_digest:
        fix = "Convert again from a source at rest, with --overwrite or into another output."
        raise FerryError(str(Problem(job.options.source, f"the source as planned ({job.run_digest})", digest, fix)))
    run = BucketRun(job.output.output, digest, asdict(job.options), overwrite=job.output.overwrite, job=job.job)
    do_run(conversion, job.options, job.output, run, print)


def main() -> int:
    """The program of the process; exit code 1 when it failed."""
    try:
        commit(JobCommit.parsed(sys.stdin.read()))
    except FerryError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
