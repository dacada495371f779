"""Converts a Hugging Face checkpoint into an Orbax checkpoint in MaxText's layout, at OUTPUT/0/items.

Options that are not listed here go to Beam: --runner, --direct_num_workers, --project, … Without --runner the
conversion runs in this process, one thread per core. A run that was stopped goes on when the command is given again.
"""

import argparse
from collections.abc import Sequence

from tensorferry.pipelines.cli.arguments import add_bucket_arguments, add_conversion_arguments, conversion_options

EPILOG = """\
examples:
  tensorferry convert --source Llama-3.1-8B --output checkpoints/llama
  tensorferry convert --source Mixtral-8x7B --output checkpoints/mixtral --format ocdbt --worker-memory-bytes 512MiB
  tensorferry convert --source Qwen3-30B --output checkpoints/qwen --direct_num_workers 8
  tensorferry convert --source Llama-3.1-8B --lora my-adapter --output checkpoints/tuned
  tensorferry convert --lora-only my-adapter --source Llama-3.1-8B --output adapters/mine

exit codes: 0 done; 1 it failed and nothing was committed, the same command resumes; 2 the plan does not add up.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``convert``."""
    add_conversion_arguments(parser)
    parser.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="where step 0 of the checkpoint goes: a directory, or gs://bucket/path",
    )
    parser.add_argument(
        "--format", default="zarr3", choices=("zarr3", "ocdbt", "zarr2"),
        help="zarr3 (default): one object per chunk; ocdbt: Orbax's default form, in files of about 400 MB; zarr2: for "
        "Pathways",
    )  # fmt: skip
    parser.add_argument("--compression", default="none", choices=("none", "zstd1"), help="of inner chunks")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a complete Tensorferry checkpoint once the new one is whole; on gs:// the old one goes first",
    )
    add_bucket_arguments(parser)
    parser.add_argument(
        "--progress-seconds", type=float, default=5.0, metavar="S",
        help="time between lines of progress where there is no terminal (default 5)",
    )  # fmt: skip


def run(args: argparse.Namespace, beam_args: Sequence[str]) -> int:
    """Converts; 0 when the checkpoint is in place."""
    from tensorferry.mappings.words.text import bytes_text
    from tensorferry.pipelines.convert.conversion import OutputOptions, absolute, convert
    from tensorferry.pipelines.convert.maxtext_settings import overrides

    output = OutputOptions(
        absolute(args.output), args.format, args.compression, args.overwrite, tuple(beam_args), args.progress_seconds,
        args.take_over, args.commit_in_job,
    )  # fmt: skip
    outcome = convert(conversion_options(args), output, lambda line: print(line, flush=True))
    plan = outcome.conversion.plan
    totals = plan.totals
    print(f"{totals.arrays:,} arrays, {bytes_text(totals.write_bytes)}, in {outcome.step}/items")
    if outcome.conversion.merge:
        print(*outcome.conversion.merge.notes(), sep="\n")
    if outcome.kept_items:
        print(f"{outcome.kept_items:,} of {outcome.all_items:,} work items were finished by an earlier run")
    print(f"MaxText settings: {outcome.settings}")
    loads = "lora.lora_restore_path" if outcome.conversion.lora else "load_parameters_path"
    print(f"  {overrides(plan.family, plan.options)} {loads}={outcome.step}/items")
    return 0
