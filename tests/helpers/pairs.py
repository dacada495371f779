"""Tests of several choices: every pair of values in every run, every combination with ``-m slow``."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

Case = tuple[Any, ...]


def pairs(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrises a test by every combination; those that no pair of values needs are slow."""
    names, values = list(axes), [list(some) for some in axes.values()]
    cases = list(itertools.product(*values))
    wanted = covering(cases)
    marks = {case: () if case in wanted else pytest.mark.slow for case in cases}
    return pytest.mark.parametrize(names, [pytest.param(*c, id=_id(names, c), marks=marks[c]) for c in cases])


def covering(cases: list[Case]) -> set[Case]:
    """Enough of the cases to meet each pair of values of any two choices."""
    chosen: set[Case] = set()
    left = {pair for case in cases for pair in _pairs_of(case)}
    while left:
        best = max(cases, key=lambda case: len(_pairs_of(case) & left))
        chosen.add(best)
        left -= _pairs_of(best)
    return chosen


def _pairs_of(case: Case) -> set[Any]:
    return set(itertools.combinations(enumerate(case), 2))


def _id(names: list[str], case: Case) -> str:
    """``block-unscan-declared``; a truth by its choice's name."""
    words = [(name if value else f"un{name}") if isinstance(value, bool) else str(value)
             for name, value in zip(names, case, strict=True)]  # fmt: skip
    return "-".join(words)
