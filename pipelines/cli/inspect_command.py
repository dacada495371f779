"""Lists what a checkpoint holds: names, shapes, dtypes, bytes and quantisation scheme, from headers only."""

import argparse
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorferry.pipelines.cli.contents import Contents, Entry

EPILOG = """\
examples:
  tensorferry inspect Llama-3.1-8B            a Hugging Face checkpoint
  tensorferry inspect checkpoints/llama       an Orbax checkpoint, its step or its item
  tensorferry inspect hf://org/runs/sft/7/model_params    an item in a repository
  tensorferry inspect Llama-3.1-8B --all      every tensor on a line of its own

exit codes: 0 it is shown; 1 it is no checkpoint, or a damaged one.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``inspect``."""
    parser.add_argument("path", metavar="PATH", help="a Hugging Face or Orbax checkpoint")
    parser.add_argument("--all", action="store_true", help="do not group names that differ only in numbers")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the inventory."""
    from tensorferry.pipelines.cli.contents import contents_of
    from tensorferry.pipelines.convert.conversion import absolute

    contents = contents_of(absolute(args.path))
    if args.json:
        print(json.dumps(_as_data(contents), indent=1))
    else:
        print(*_lines(contents, args.all), sep="\n")
    return 0


def _as_data(contents: "Contents") -> dict:
    from dataclasses import asdict

    return asdict(contents)


def _lines(contents: "Contents", every: bool) -> Iterator[str]:
    from tensorferry.mappings.words.text import bytes_text, table_lines
    from tensorferry.pipelines.cli.contents import total_bytes

    yield f"{contents.kind} checkpoint"
    yield from (f"  {fact}" for fact in contents.facts)
    yield ""
    yield from table_lines([("name", "dtype", "shape", "bytes", "scheme"), *_rows(contents.entries, every)])
    yield ""
    yield from contents.notes
    nbytes = total_bytes(contents.entries)
    yield f"{len(contents.entries):,} tensors, {nbytes:,} bytes ({bytes_text(nbytes)})"


def _rows(entries: Iterable["Entry"], every: bool) -> Iterator[tuple[str, ...]]:
    from tensorferry.mappings.words.text import group_names, list_text

    if every:
        for entry in entries:
            yield entry.name, entry.dtype, list_text(entry.shape), f"{entry.nbytes:,}", entry.scheme
        return
    kinds = ((entry.name, (entry.dtype, entry.shape, entry.nbytes, entry.scheme)) for entry in entries)
    for pattern, (dtype, shape, nbytes, scheme), count in group_names(kinds):
        name = f"{pattern}  x{count}" if count > 1 else pattern
        yield name, dtype, list_text(shape), f"{nbytes * count:,}", scheme
