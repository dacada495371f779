"""Re-reads a committed checkpoint and its source by other code than wrote it, and compares every element.

Compares values bit for bit, digests and statistics with the manifest, and the tree as stock Orbax reads it. An output
that export wrote is compared with its Orbax source: every tensor, header, index and copied file.
Options that are not listed here go to Beam.
"""

import argparse
import sys
from collections.abc import Sequence

from pipelines.commands.arguments import named_path

EPILOG = """\
examples:
  tensorferry verify --source Llama-3.1-8B --output checkpoints/llama
  tensorferry verify --source Llama-3.1-8B --output checkpoints/llama --sample 0.05
  tensorferry verify --source Llama-3.1-8B --lora my-adapter --output checkpoints/tuned
  tensorferry verify --source checkpoints/llama --output exported/llama

exit codes: 0 nothing differs; 1 it could not be compared; 3 something differs.
"""
_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``verify``."""
    parser.add_argument("--source", required=True, metavar="PATH", help="the checkpoint it was made from")
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="what convert or export wrote, or one step of it"
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


def share(text: str) -> float:
    """A share above 0, up to 1.

    Raises:
      argparse.ArgumentTypeError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0, up to 1")
    return value


def run(args: argparse.Namespace, beam_args: Sequence[str]) -> int:
    """Compares; 0 when nothing differs, 3 otherwise."""
    from mappings.problems import FerryError
    from mappings.text import bytes_text
    from pipelines.convert import absolute
    from pipelines.exporting.verify import is_export, verify_export
    from pipelines.verify import verify

    source, output = absolute(args.source), absolute(args.output)
    if is_export(output) and args.lora:
        raise FerryError("--lora: an export merges no adapter. Leave it out.")
    if is_export(output):
        config = absolute(args.config) if args.config else ""
        verdict = verify_export(source, output, config, args.sample, tuple(beam_args))
    else:
        verdict = verify(source, output, args.sample, tuple(beam_args), lora=absolute(args.lora) if args.lora else "")
    part = "" if args.sample >= 1 else f" (a sample of {args.sample:g})"
    compared = f"{verdict.arrays:,} arrays, {bytes_text(verdict.nbytes)}, {verdict.elements:,} elements"
    if not verdict.differences:
        print(f"verified {verdict.item}: {compared} compared{part}, no difference")
        return 0
    count = f"{len(verdict.differences):,} difference{'s' if len(verdict.differences) > 1 else ''}"
    print(f"{verdict.item}: {count}; {compared} compared{part}", file=sys.stderr)
    for difference in verdict.differences[:_SHOWN]:
        print(f"  {difference}", file=sys.stderr)
    if len(verdict.differences) > _SHOWN:
        print(f"  and {len(verdict.differences) - _SHOWN:,} more", file=sys.stderr)
    return 3
