"""Exports an Orbax checkpoint in MaxText's layout as a Hugging Face repository that loads first try.

Sizes, tokenizer and everything else that is no weight come from --config, a repository of the same model, whose
weights need not be there. Options that are not listed here go to Beam. A run that was stopped goes on when the
command is given again.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence

from tensorferry.pipelines.cli.arguments import add_bucket_arguments, byte_count, number_above_zero

EPILOG = """\
examples:
  tensorferry export --source checkpoints/llama/0 --config Llama-3.1-8B --output exported/llama
  tensorferry export --source checkpoints/run --step 500 --config Llama-3.1-8B --output exported/llama-500
  tensorferry export --source gs://bucket/run/200/items --config hf://Qwen/Qwen3-8B --output exported/qwen --plan-only
  tensorferry export --source gs://bucket/run/200 --config hf://Qwen/Qwen3-8B --output gs://bucket/qwen
  tensorferry verify --source checkpoints/llama/0 --output exported/llama
  tensorferry export --lora --source runs/lora/200 --config Llama-3.1-8B --lora-alpha 32 --output adapters/mine

exit codes: 0 done; 1 it failed and nothing was committed, the same command resumes; 2 the plan does not add up.
"""
_SHOWN = 10
FLOAT_DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``export``."""
    parser.add_argument(
        "--source",
        required=True,
        metavar="PATH",
        help="an Orbax checkpoint: its item, its step, or a folder of steps, of which the latest is taken",
    )
    parser.add_argument(
        "--output", metavar="PATH", help="the repository: a directory, new or empty, or gs://bucket/path"
    )
    parser.add_argument(
        "--staging", default="", metavar="DIR",
        help="build the files here before they go to a bucket (default: workers write them there, whole)",
    )  # fmt: skip
    add_bucket_arguments(parser)
    parser.add_argument("--dtype", choices=FLOAT_DTYPES, help="dtype of the weights (default: as --config has them)")
    layers = parser.add_mutually_exclusive_group()
    layers.add_argument(
        "--scan-layers", dest="scan_layers", action="store_true", default=None, help="the source's layers are stacked"
    )
    layers.add_argument(
        "--no-scan-layers", dest="scan_layers", action="store_false",
        help="the source's layers are separate (default: found from its tree)",
    )  # fmt: skip
    parser.add_argument(
        "--fp8-from", default="", metavar="PATH",
        help="an FP8 checkpoint of the model: what is unchanged since keeps its codes and scales, what changed is "
        "requantised in the same scheme",
    )  # fmt: skip
    parser.add_argument(
        "--lora", action="store_true",
        help="export the low-rank adapter that the source holds, alone, into a folder that PEFT loads",
    )  # fmt: skip
    parser.add_argument(
        "--lora-alpha", type=positive_number, metavar="N",
        help="the adapter's alpha, where the checkpoint does not tell it (its rank follows from shapes)",
    )  # fmt: skip
    parser.add_argument("--family", default="auto", help="model family; auto (default) takes it from config.json")
    parser.add_argument(
        "--rope-lanes", default="auto", choices=("auto", "interleaved", "split"),
        help="order of rotary lanes in the source; auto follows its manifest, or config.json",
    )  # fmt: skip
    parser.add_argument(
        "--worker-memory-bytes", type=byte_count, default=1 << 30, metavar="BYTES",
        help="bound on tensor bytes that one worker process holds at once (default 1GiB)",
    )  # fmt: skip
    parser.add_argument(
        "--chunk-bytes", type=byte_count, default=64 << 20, metavar="BYTES",
        help="aim for what is written at once (default 64MiB); never more than an eighth of --worker-memory-bytes",
    )  # fmt: skip
    parser.add_argument(
        "--overwrite", action="store_true",
        help="replace a complete Tensorferry export in --output once the new one is complete; on gs:// the old one "
        "goes first",
    )  # fmt: skip
    parser.add_argument("--plan-only", action="store_true", help="show what would be written, and write nothing")
    parser.add_argument(
        "--progress-seconds", type=float, default=5.0, metavar="S",
        help="time between lines of progress where there is no terminal (default 5)",
    )  # fmt: skip
    add_repository_arguments(parser, required=True)


def add_repository_arguments(parser: argparse.ArgumentParser, required: bool) -> None:
    """What ``plan`` needs too, to plan an export."""
    parser.add_argument(
        "--config",
        required=required,
        metavar="PATH",
        help="a Hugging Face repository of the model: config.json, tokenizer",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="which step of a folder of steps (default: the latest that is committed)"
    )
    parser.add_argument(
        "--shard-bytes", type=decimal_bytes, default=5_000_000_000, metavar="BYTES",
        help="most tensor bytes of one safetensors file (default 5GB)",
    )  # fmt: skip


def positive_number(text: str) -> float:
    """A finite number above zero.

    Raises:
      argparse.ArgumentTypeError: it is none.
    """
    return number_above_zero(text, sys.float_info.max, "a number above zero")


def decimal_bytes(text: str) -> int:
    """A number of bytes as the hub counts them: ``5GB`` is five thousand million, ``5GiB`` is 5 x 2^30.

    >>> decimal_bytes("5GB"), decimal_bytes("2MiB"), decimal_bytes("700")
    (5000000000, 2097152, 700)

    Raises:
      argparse.ArgumentTypeError: the text is not a number of bytes.
    """
    powers = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    number, unit = text.strip()[:-2], text.strip()[-2:].upper()
    if unit in powers and number.strip().isdecimal() and int(number):
        return int(number) * powers[unit]
    return byte_count(text)


def run(args: argparse.Namespace, beam_args: Sequence[str]) -> int:
    """Exports; 0 when the repository is in place."""
    from tensorferry.mappings.words.problems import FerryError, PlanError, Problem
    from tensorferry.mappings.words.text import bytes_text
    from tensorferry.pipelines.convert.conversion import absolute
    from tensorferry.pipelines.export.export_output import ExportOutput
    from tensorferry.pipelines.export.export_run import run_export

    if args.lora:
        from tensorferry.pipelines.cli.export_adapter_command import run_adapter

        return run_adapter(args, beam_args)
    if args.lora_alpha is not None:
        expected = "--lora beside it: without, weights are exported and no adapter"
        raise PlanError([Problem("--lora-alpha", expected, "it alone", "Add --lora, or leave it out.")])
    options = export_options(args)
    if args.plan_only:
        where = ExportOutput(args.output or ".", args.staging)
        return show_plan(where.streamed(options))
    if not args.output:
        raise FerryError("--output: expected the repository's directory or gs://bucket/path; found none.")
    staging = absolute(args.staging) if args.staging else ""
    output = ExportOutput(
        absolute(args.output), staging, tuple(beam_args), args.progress_seconds, args.take_over, args.overwrite,
        args.commit_in_job,
    )  # fmt: skip
    outcome = run_export(options, output, lambda line: print(line, flush=True))
    totals, plan = outcome.export.plan.totals, outcome.export.plan
    print(
        f"{totals.arrays:,} tensors, {bytes_text(totals.write_bytes)}, {len(plan.shards):,} files in {outcome.output}"
    )
    _tell_low_bit(outcome.changed)
    if outcome.kept_items:
        print(f"{outcome.kept_items:,} of {totals.work_items:,} work items were finished by an earlier run")
    return 0


def _tell_low_bit(changed: Mapping[str, tuple[int, int]]) -> None:
    """Which weights were requantised."""
    if changed:
        new = {name: counts for name, counts in changed.items() if counts[0]}
        print(f"{len(changed) - len(new):,} FP8 weights are unchanged and kept byte for byte, {len(new):,} requantised")
        for name, (blocks, total) in list(new.items())[:_SHOWN]:
            print(f"  {name}: {blocks:,} of {total:,} blocks")
        if len(new) > _SHOWN:
            print(f"  and {len(new) - _SHOWN:,} more: all in tensorferry.manifest.json")


def export_options(args: argparse.Namespace):
    """The options that the arguments tell."""
    from tensorferry.pipelines.convert.conversion import absolute
    from tensorferry.pipelines.export.export_planning import ExportOptions

    fp8_from = getattr(args, "fp8_from", "")
    return ExportOptions(
        absolute(args.source), absolute(args.config), args.family, args.dtype or "", args.scan_layers, args.rope_lanes,
        absolute(fp8_from) if fp8_from else "", args.shard_bytes, args.chunk_bytes, args.worker_memory_bytes,
        args.step,
    )  # fmt: skip


def show_plan(options, json_path: str = "") -> int:
    """Prints the plan of an export; 0 when it adds up, 2 when not."""
    from tensorferry.pipelines.export.export_planning import plan_export

    return show_export(plan_export(options), json_path)


def show_export(export, json_path: str = "") -> int:
    """Prints a plan; 0 when it adds up, 2 when not."""
    import json
    import sys

    from tensorferry.mappings.export.export_plan import export_text
    from tensorferry.mappings.plan.conversion_plan import plan_json
    from tensorferry.mappings.plan.plan_report import plan_text

    out = sys.stderr if json_path == "-" else sys.stdout
    if json_path:
        text = json.dumps(plan_json(export.plan), indent=1) + "\n"
        if json_path == "-":
            print(text, end="")
        else:
            with open(json_path, "w") as file:
                file.write(text)
    print(plan_text(export.plan), end="", file=out)
    if not export.plan.problems:
        print(*export_text(export.plan), sep="\n", file=out)
    print(*export.notes, sep="\n", file=out)
    return 2 if export.plan.problems else 0
