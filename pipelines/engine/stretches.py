"""Cutting the file of work items into stretches of whole lines, the only thing the job graph carries."""

import os
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import IO

from tensorferry.pipelines.engine.bins import longest_first

# A stretch of the file of work items: path, first byte, length in bytes; whole lines.
Stretch = tuple[str, int, int]


def open_plan(path: str) -> IO[bytes]:
    """Opens a file of work items, here or in a bucket."""
    if "://" not in path:
        return open(path, "rb")
    from tensorferry.pipelines.storage.remote_file import open_remote_file

    return open_remote_file(path)


def line_ends(path: str) -> list[int]:
    """Where each line of a file ends, in bytes from its start, the newline included."""
    with open_plan(path) as file:
        return list(accumulate(len(line) for line in file))


def even_stretches(path: str, items: int, stretches: int, copy: str = "") -> list[Stretch]:
    """Cuts a plan where it lies into consecutive stretches of nearly as many items each.

    Args:
      path: the file of work items.
      items: how many lines it must have.
      stretches: at most how many stretches.
      copy: the same file on this machine, to spare a download.

    Raises:
      ValueError: when the file has another number of lines.
    """
    ends = _checked_ends(copy or path, items)
    count = min(stretches, items)
    borders = [items * index // count for index in range(count + 1)]
    offsets = [0, *ends]
    return [(path, offsets[first], offsets[last] - offsets[first]) for first, last in pairwise(borders)]


def dealt_stretches(path: str, sizes: Sequence[int], workers: int, directory: str) -> list[Stretch]:
    """Copies a plan in an order in which each worker's share is one stretch, its longest item first.

    Args:
      path: the file of work items.
      sizes: bytes per item.
      workers: how many shares.
      directory: where to put the copy.

    Raises:
      ValueError: when the file has not one line per size.
    """
    offsets = [0, *_checked_ends(path, len(sizes))]
    copy = os.path.join(directory, "items.jsonl")
    stretches: list[Stretch] = []
    with open(path, "rb") as source, open(copy, "wb") as target:
        for share in longest_first(sizes, workers):
            first_byte = target.tell()
            for item in share:
                source.seek(offsets[item])
                target.write(source.read(offsets[item + 1] - offsets[item]).rstrip(b"\n") + b"\n")
            stretches.append((copy, first_byte, target.tell() - first_byte))
    return [stretch for stretch in stretches if stretch[2]]


def _checked_ends(path: str, items: int) -> list[int]:
    ends = line_ends(path)
    if len(ends) != items:
        raise ValueError(f"{path} has {len(ends)} work items, but {items} sizes were given")
    return ends
