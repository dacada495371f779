"""Re-reads a committed checkpoint and its source by other code than wrote it, and compares every element.

Compares values bit for bit, digests and statistics with the manifest, and the tree as stock Orbax reads it. An output
that export wrote is compared with its Orbax source: every tensor, header, index and copied file. Of a folder that
migrate wrote every step is compared with the old one.
Options that are not listed here go to Beam.
"""

import argparse
import sys
from collections.abc import Sequence

from tensorferry.pipelines.cli.arguments import named_path, number_above_zero
from tensorferry.pipelines.cli.migrate_command import add_choice

EPILOG = """\
examples:
  tensorferry verify --source Llama-3.1-8B --output checkpoints/llama
  tensorferry verify --source Llama-3.1-8B --output checkpoints/llama --sample 0.05
  tensorferry verify --source Llama-3.1-8B --lora my-adapter --output checkpoints/tuned
  tensorferry verify --source checkpoints/llama --output exported/llama
  tensorferry verify --source runs --output converted --include 'sft-*'

exit codes: 0 nothing differs; 1 it could not be compared; 3 something differs.
"""
_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``verify``."""
    parser.add_argument("--source", required=True, metavar="PATH", help="the checkpoint it was made from")
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="what convert, export or migrate wrote; of convert one step too"
    )
    parser.add_argument(
        "--config", default="", metavar="PATH", help="for an export: the repository that it followed, if that has moved"
    )
    parser.add_argument(
        "--lora", type=named_path, metavar="PATH",
        help="for an adapter, merged or alone: where it is now, if it has moved",
    )  # fmt: skip
    parser.add_argument(
        "--sample", type=share, default=1.0, metavar="P",
        help="share of the work items to compare, such as 0.1; at least one per array (default 1: all)",
    )  # fmt: skip
    add_choice(parser)


def share(text: str) -> float:
    """A share above 0, up to 1.

    Raises:
      argparse.ArgumentTypeError: it is none.
    """
    return number_above_zero(text, 1, "a share above 0, up to 1")


def run(args: argparse.Namespace, beam_args: Sequence[str]) -> int:
    """Compares; 0 when nothing differs, 3 otherwise."""
    from tensorferry.mappings.words.problems import FerryError
    from tensorferry.mappings.words.text import bytes_text
    from tensorferry.pipelines.convert.conversion import absolute
    from tensorferry.pipelines.verify.verify_conversion import verify
    from tensorferry.pipelines.verify.verify_export import is_export, verify_export
    from tensorferry.pipelines.verify.verify_migration import is_migration

    source, output = absolute(args.source), absolute(args.output)
    if is_export(output) and args.lora:
        raise FerryError("--lora: an export merges no adapter. Leave it out.")
    if is_export(output):
        config = absolute(args.config) if args.config else ""
        verdict = verify_export(source, output, config, args.sample, tuple(beam_args))
    elif is_migration(source, output):
        _refuse(args.lora or args.config or beam_args, "--lora, --config and Beam's options", "for a migration")
        return _migration(args, source, output)
    else:
        chosen = args.include or args.exclude or args.steps or args.latest or args.accept_uncommitted
        _refuse(chosen, "options that choose steps", "for what convert wrote")
        verdict = verify(source, output, args.sample, tuple(beam_args), lora=absolute(args.lora) if args.lora else "")
    part = "" if args.sample >= 1 else f" (a sample of {args.sample:g})"
    compared = f"{verdict.arrays:,} arrays, {bytes_text(verdict.nbytes)}, {verdict.elements:,} elements"
    if not verdict.differences:
        print(f"verified {verdict.item}: {compared} compared{part}, no difference")
        return 0
    return _differ(verdict.item, verdict.differences, f"{compared} compared{part}")


def _refuse(given: object, what: str, where: str) -> None:
    from tensorferry.mappings.words.problems import FerryError

    if given:
        raise FerryError(f"{what}: they have no meaning {where}. Leave them out.")


def _migration(args: argparse.Namespace, source: str, output: str) -> int:
    """Compares every step of a migration."""
    from tensorferry.mappings.words.text import bytes_text
    from tensorferry.pipelines.verify.verify_migration import Choice, verify_migration

    choice = Choice(tuple(args.include), tuple(args.exclude), args.steps, args.latest, args.accept_uncommitted)
    verdict = verify_migration(source, output, args.sample, choice)
    for path, reason in sorted(verdict.left.items()):
        print(f"not migrated: {path}: {reason}")
    part = "" if args.sample >= 1 else f" (a sample of {args.sample:g})"
    told = verdict.compared
    counts = f"{verdict.steps:,} steps, {told.arrays:,} arrays, {bytes_text(told.nbytes)}, {told.elements:,} elements"
    if told.differences:
        return _differ(output, told.differences, f"{counts} compared{part}")
    print(f"verified {output}: {counts} compared{part}, no difference")
    return 0


def _differ(item: str, differences: Sequence[object], compared: str) -> int:
    """Tells of the first differences; the exit code."""
    count = f"{len(differences):,} difference{'s' if len(differences) > 1 else ''}"
    print(f"{item}: {count}; {compared}", file=sys.stderr)
    for difference in differences[:_SHOWN]:
        print(f"  {difference}", file=sys.stderr)
    if len(differences) > _SHOWN:
        print(f"  and {len(differences) - _SHOWN:,} more", file=sys.stderr)
    return 3
