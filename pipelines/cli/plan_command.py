"""Shows what a conversion would write, from config.json and headers only: no weight is read, nothing is written.

With --config, the source is an Orbax checkpoint and the plan is that of its export.
"""

import argparse
import json
import math
import sys

from tensorferry.pipelines.cli.arguments import add_conversion_arguments, conversion_options
from tensorferry.pipelines.cli.export_command import add_repository_arguments, export_options, show_plan

EPILOG = """\
examples:
  tensorferry plan --source Llama-3.1-8B
  tensorferry plan --source Llama-3.1-8B --no-scan-layers --dtype float32 --json plan.json
  tensorferry plan --source Llama-3.1-8B --format ocdbt
  tensorferry plan --source Llama-3.1-8B --lora my-adapter
  tensorferry plan --source checkpoints/llama --config Llama-3.1-8B

exit codes: 0 the plan adds up; 2 it does not, and every problem is listed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``plan``."""
    add_conversion_arguments(parser)
    add_repository_arguments(parser, required=False)
    # What was not asked for is found from the source, when that is an Orbax checkpoint.
    parser.set_defaults(dtype=None, scan_layers=None)
    parser.add_argument(
        "--format", default="zarr3", choices=("zarr3", "ocdbt", "zarr2"),
        help="what convert will write (default zarr3): ocdbt has data files of about 400 MB",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="also write the plan as JSON, - for standard output")


def run(args: argparse.Namespace) -> int:
    """Prints the plan; 0 when it adds up, 2 when not."""
    if args.config:
        return _show_export(args)
    from tensorferry.mappings.plan.conversion_plan import plan_json
    from tensorferry.mappings.plan.plan_report import plan_text
    from tensorferry.pipelines.convert.conversion_planning import plan_conversion
    from tensorferry.pipelines.convert.units import Units

    args.scan_layers = args.scan_layers is not False
    conversion = plan_conversion(conversion_options(args))
    plan = conversion.plan
    if args.json:
        text = json.dumps(plan_json(plan), indent=1)
        if args.json == "-":
            print(text)
        else:
            with open(args.json, "w") as file:
                file.write(text + "\n")
    print(plan_text(plan), end="", file=sys.stderr if args.json == "-" else sys.stdout)
    if not plan.problems:
        units = Units(plan, args.format)
        shown = [f"on Dataflow    {_recommended(plan, units.count)}"]
        if units.are_groups:
            shown.insert(0, f"data files     {units.count:>20,}  each one work item, with a manifest beside it")
        print(*shown, sep="\n", file=sys.stderr if args.json == "-" else sys.stdout)
    _print_notes(conversion)
    return 2 if plan.problems else 0


def _show_export(args: argparse.Namespace) -> int:
    """Prints the plan of an export."""
    args.dtype = "" if args.dtype == "source" else args.dtype
    return show_plan(export_options(args), args.json or "")


def _recommended(plan, units: int) -> str:
    """What a cluster needs for the plan, as Beam options; convert takes the same when they are not given."""
    from tensorferry.pipelines.engine.cluster_args import plan_resources

    found = plan_resources(plan, units)
    return f"{' '.join(found.beam_args())}  (about {math.ceil(found.seconds / 60)} minutes)"


def _print_notes(conversion) -> None:
    checkpoint = conversion.checkpoint
    if checkpoint.unindexed:
        names = ", ".join(checkpoint.unindexed[:5])
        print(f"not in the index, left alone: {len(checkpoint.unindexed):,} tensors ({names} …)", file=sys.stderr)
    for name, to in conversion.compare:
        print(f"{name} is stored although tied to {to}: convert compares their bytes first", file=sys.stderr)
