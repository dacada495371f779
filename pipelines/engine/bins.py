"""Packing work items into as many bins as there are local workers."""

import heapq
from collections.abc import Sequence


def longest_first(sizes: Sequence[int], bins: int) -> list[list[int]]:
    """Packs items into bins so that the fullest bin is nearly as small as it can be.

    The longest item goes first, each to the bin with the least in it: at most 4/3 - 1/(3 * bins) times the
    best packing there is.

    Args:
      sizes: one size per item, in any unit, zero or more.
      bins: how many bins, one or more.

    Returns:
      One list of positions in `sizes` per bin, the longest item first; a bin may be empty.

    Raises:
      ValueError: when there is no bin to pack into.
    """
    if bins < 1:
        raise ValueError(f"items need at least one bin, not {bins}")
    packed: list[list[int]] = [[] for _ in range(bins)]
    lightest = [(0, bin_index) for bin_index in range(bins)]
    for position in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, bin_index = heapq.heappop(lightest)
        packed[bin_index].append(position)
        heapq.heappush(lightest, (load + sizes[position], bin_index))
    return packed
