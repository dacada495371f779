"""`export --lora`: an adapter alone."""

import argparse
from collections.abc import Sequence


def run_adapter(args: argparse.Namespace, beam_args: Sequence[str]) -> int:
    """Exports an adapter; 0 when its folder is in place.

    Raises:
      PlanError: the plan does not add up, or an option does not go with an adapter.
      FerryError: anything else.
    """
    from tensorferry.mappings.words.problems import FerryError
    from tensorferry.mappings.words.text import bytes_text
    from tensorferry.pipelines.cli.export_command import show_export
    from tensorferry.pipelines.convert.conversion import absolute
    from tensorferry.pipelines.export.adapter_export import export_adapter, plan_adapter_export
    from tensorferry.pipelines.export.export_output import ExportOutput

    options = adapter_options(args)
    if args.plan_only:
        return show_export(plan_adapter_export(options))
    if not args.output:
        raise FerryError("--output: expected the adapter's directory; found none.")
    output = ExportOutput(absolute(args.output), "", tuple(beam_args), args.progress_seconds, overwrite=args.overwrite)
    outcome = export_adapter(options, output, lambda line: print(line, flush=True))
    totals = outcome.export.plan.totals
    print(f"{totals.arrays:,} tensors, {bytes_text(totals.write_bytes)}, an adapter in {outcome.output}")
    if outcome.kept_items:
        print(f"{outcome.kept_items:,} of {totals.work_items:,} work items were finished by an earlier run")
    return 0


def adapter_options(args: argparse.Namespace):
    """The options that the arguments tell.

    Raises:
      PlanError: ``--fp8-from`` does not go with an adapter.
    """
    from dataclasses import asdict

    from tensorferry.mappings.words.problems import PlanError, Problem
    from tensorferry.pipelines.cli.export_command import export_options
    from tensorferry.pipelines.export.adapter_export import AdapterOptions

    if args.fp8_from:
        fix = "Leave one of the two out."
        raise PlanError([Problem("--fp8-from", "an export of weights", "--lora: an adapter has no FP8 weights", fix)])
    return AdapterOptions(**asdict(export_options(args)), lora_alpha=args.lora_alpha)
