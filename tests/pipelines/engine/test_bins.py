"""Packing: everybody in one bin exactly, and the fullest bin within the known bound of the best packing."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorferry.pipelines.engine.bins import longest_first


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 7))
def test_every_item_is_in_one_bin_and_no_bin_could_have_given_its_last_item_away(sizes, bins):
    packed = longest_first(sizes, bins)

    assert len(packed) == bins
    assert sorted(item for bin_items in packed for item in bin_items) == list(range(len(sizes)))
    loads = [sum(sizes[item] for item in bin_items) for bin_items in packed]
    for bin_items, load in zip(packed, loads, strict=True):
        assert [sizes[item] for item in bin_items] == sorted((sizes[item] for item in bin_items), reverse=True)
        if bin_items:
            assert load - sizes[bin_items[-1]] <= min(loads)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_fullest_bin_is_within_four_thirds_of_the_best_packing(sizes, bins):
    def fullest(choice):
        return max(sum(size for size, where in zip(sizes, choice, strict=True) if where == b) for b in range(bins))

    best = min(fullest(choice) for choice in product(range(bins), repeat=len(sizes)))
    packed = longest_first(sizes, bins)
    assert max(sum(sizes[item] for item in share) for share in packed) <= best * (4 / 3 - 1 / (3 * bins)) + 1e-9


def test_known_packing():
    assert longest_first([5, 7, 3, 6, 4], 2) == [[1, 4, 2], [3, 0]]


def test_no_bin_is_refused():
    with pytest.raises(ValueError, match="at least one bin, not 0"):
        longest_first([1], 0)
