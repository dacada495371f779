"""Migrates Tunix runs into the layout that MaxText's pre-training reads: every step of every run, beside the old ones.

Post-training saves the whole model under `model_params` and the optimizer under `optimizer_state`; pre-training reads
`items` alone. Every (run, role, step) below --source is found at any depth and written to the same path below
--output. Options that are not listed here go to Beam: --runner, --direct_num_workers, …
"""

import argparse
from collections.abc import Sequence

from tensorferry.pipelines.cli.arguments import byte_count

EPILOG = """\
examples:
  tensorferry migrate --source runs --dry-run
  tensorferry migrate --source runs --output converted --structural
  tensorferry migrate --source runs --output converted --template pretrained/checkpoints/1000 --include 'sft-*'
  tensorferry migrate --source gs://bucket/runs --output converted --config Llama-3.1-8B/config.json --latest
  tensorferry migrate --source hf://org/runs@main/sft --output converted --structural

exit codes: 0 every step is migrated or was before; 1 it failed, the same command resumes; 2 the options do not add up;
4 some steps were refused or could not be read, the others are migrated.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``migrate``."""
    parser.add_argument(
        "--source", required=True, metavar="URL",
        help="folder of runs: a local path, gs://, hf://org/repo[@revision][/folder] or "
        "https:// of a server that lists its folders",
    )  # fmt: skip
    parser.add_argument("--output", default="", metavar="DIR", help="folder that receives them; never in the source")
    _add_model(parser)
    add_choice(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what each step would hold, and write nothing")
    parser.add_argument("--json", default="", metavar="FILE", help="write the report as JSON too")
    parser.add_argument(
        "--rng-impl", default="unsafe_rbg", choices=("unsafe_rbg", "threefry2x32", "keep"),
        help="PRNG keys of this implementation are kept, others left out (default unsafe_rbg: what pre-training runs; "
        "a key of another one makes a full resume fail); keep carries all",
    )  # fmt: skip
    parser.add_argument("--drop-optimizer", action="store_true", help="migrate the weights without the optimizer")
    parser.add_argument(
        "--format", default="zarr3", choices=("zarr3", "ocdbt", "zarr2"),
        help="zarr3 (default) and ocdbt take stored chunks as they are; zarr2, for Pathways, writes them anew",
    )  # fmt: skip
    parser.add_argument(
        "--no-statistics", action="store_true",
        help="do not decode chunks that move as they are stored: a third less CPU, but the manifest then has digests "
        "of their stored bytes alone, and no NaN or Inf counts",
    )  # fmt: skip
    parser.add_argument("--compression", default="none", choices=("none", "zstd1"), help="of chunks written anew")
    parser.add_argument(
        "--worker-memory-bytes", type=byte_count, default=1 << 30, metavar="BYTES",
        help="bound on tensor bytes that one worker process holds at once (default 1GiB); "
        "hf:// and https:// sources need up to 256 MiB more",
    )  # fmt: skip
    parser.add_argument(
        "--take-over", action="store_true",
        help="take an output on gs:// from another process that is at work on it, without waiting until it is silent",
    )  # fmt: skip
    parser.add_argument("--progress-seconds", type=float, default=5.0, metavar="S", help="between lines of progress")


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the model check: one of")
    group.add_argument("--template", default="", metavar="CHECKPOINT", help="a checkpoint in the new layout")
    group.add_argument("--config", default="", metavar="FILE", help="a Hugging Face config.json")
    group.add_argument("--maxtext", default="", metavar="SETTINGS", help="MaxText settings: 'model_name=… k=v …'")
    group.add_argument(
        "--structural", action="store_true",
        help="no model: the steps of a run must agree with each other; recorded as not validated",
    )  # fmt: skip


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Which steps: the same words for ``verify``."""
    group = parser.add_argument_group("which steps")
    group.add_argument("--include", action="append", default=[], metavar="GLOB", help="take these runs or steps alone")
    group.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="leave these out")
    some = group.add_mutually_exclusive_group()
    some.add_argument("--steps", type=step_numbers, default=(), metavar="N,N", help="take these step numbers alone")
    some.add_argument("--latest", action="store_true", help="of each run and role the highest step alone")
    group.add_argument(
        "--accept-uncommitted", action="store_true", help="take steps under their final name without a commit mark"
    )


def step_numbers(text: str) -> tuple[int, ...]:
    """Step numbers separated by commas.

    >>> step_numbers("100,200")
    (100, 200)

    Raises:
      argparse.ArgumentTypeError: something else.
    """
    numbers = [part.strip() for part in text.split(",") if part.strip()]
    if not numbers or not all(number.isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of step numbers, such as 100,200")
    return tuple(map(int, numbers))


def run(args: argparse.Namespace, beam_args: Sequence[str]) -> int:
    """Migrates; 0 when every step is in place, 4 when some were refused."""
    from tensorferry.pipelines.migrate.migration import migrate
    from tensorferry.pipelines.migrate.migration_report import plan_lines, table

    report = migrate(_options(args, beam_args), lambda line: print(line, flush=True))
    for step in report.steps if report.dry_run else ():
        print(*plan_lines(step), sep="\n")
    print(*table(report), sep="\n")
    if args.json:
        _write_json(args.json, report.to_json())
    return report.exit_code


def _options(args: argparse.Namespace, beam_args: Sequence[str]):
    from tensorferry.mappings.tunix.step_plan import MigrateOptions
    from tensorferry.pipelines.convert.conversion import absolute
    from tensorferry.pipelines.migrate.migration_options import MigrationOptions
    from tensorferry.pipelines.migrate.places import Form

    chunk_bytes = min(64 << 20, max(1, args.worker_memory_bytes // 8))
    choices = MigrateOptions(args.rng_impl, args.drop_optimizer)
    return MigrationOptions(
        source=absolute(args.source),
        output=absolute(args.output) if args.output else "",
        template=args.template,
        config=args.config,
        maxtext=args.maxtext,
        structural=args.structural,
        dry_run=args.dry_run,
        include=tuple(args.include),
        exclude=tuple(args.exclude),
        steps=args.steps,
        latest=args.latest,
        accept_uncommitted=args.accept_uncommitted,
        form=Form(args.format, args.compression, chunk_bytes, not args.no_statistics, choices),
        worker_memory_bytes=args.worker_memory_bytes,
        beam_args=tuple(beam_args),
        progress_seconds=args.progress_seconds,
        take_over=args.take_over,
    )


def _write_json(path: str, told: dict) -> None:
    import json

    from tensorferry.mappings.words.problems import FerryError

    try:
        with open(path, "w") as file:
            json.dump(told, file, indent=1)
    except OSError as error:
        raise FerryError(f"--json {path}: expected a file that can be written; found {error.strerror}.") from error
