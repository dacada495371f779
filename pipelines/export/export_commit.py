"""The commit of an export as the last step of its job. See `tensorferry.pipelines.convert.conversion_commit`."""

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorferry.pipelines.engine.commit_process import CommitApart, commit_program, refuse_other_plan
from tensorferry.pipelines.export.export_planning import ExportOptions, plan_export

if TYPE_CHECKING:
    from tensorferry.pipelines.export.export_output import ExportOutput


@dataclass(frozen=True)
class ExportCommit(CommitApart):
    """What the job carries of its commit: options, no plan and no secret.

    Attributes:
      options: what is exported; the step is named.
      output: where it goes.
      plan_digest: what the job writes.
      job: token that the output is left to.
    """

    options: ExportOptions
    output: "ExportOutput"
    plan_digest: str
    job: str

    @classmethod
    def parsed(cls, text: str) -> "ExportCommit":
        """What `encoded` told."""
        from tensorferry.pipelines.export.export_output import ExportOutput

        data: dict[str, Any] = json.loads(text)
        output = ExportOutput(**{**data["output"], "beam_args": tuple(data["output"]["beam_args"])})
        return cls(ExportOptions(**data["options"]), output, data["plan_digest"], data["job"])


def commit(job: ExportCommit) -> None:
    """Commits what a job has written.

    Raises:
      FerryError: the source changed meanwhile, a file is missing, or another process has the output.
    """
    from tensorferry.pipelines.export.streamed_run import run_streamed

    export = plan_export(job.options)
    export.plan.require()
    refuse_other_plan(job.options.source, job.plan_digest, export.plan.digest)
    run_streamed(export, job.options, job.output, print, job.job)


if __name__ == "__main__":
    sys.exit(commit_program(lambda text: commit(ExportCommit.parsed(text))))
