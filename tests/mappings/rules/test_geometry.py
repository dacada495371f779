"""Ranges of dims as stretches of stored axes, against counting every element."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tensorferry.mappings.rules.geometry import AxisGeometry, Factor, stretches


@st.composite
def axes(draw: st.DrawFn) -> tuple[AxisGeometry, dict[str, tuple[int, int]]]:
    """An axis of one to three factors, some of them a part of a longer stretch, and ranges of their dims."""
    names = iter("abcdefghi")
    factors, ranges = [], {}
    for _ in range(draw(st.integers(1, 3))):
        sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
        atoms = tuple(next(names) for _ in sizes)
        before, behind = draw(st.sampled_from([(0, 0), (0, 3), (2, 0), (1, 5)]))
        part = "whole.part" if before or behind else ""
        factors.append(Factor(before + int(np.prod(sizes)) + behind, before, atoms, sizes, part))
        for atom, size in zip(atoms, sizes, strict=True):
            low = draw(st.integers(0, size - 1))
            ranges[atom] = (low, draw(st.integers(low + 1, size))) if draw(st.booleans()) else (0, size)
    return AxisGeometry(tuple(factors)), ranges


def elements(axis: AxisGeometry, ranges: dict[str, tuple[int, int]]) -> list[int]:
    """Every index of the axis, one by one, row-major in the dims."""
    found = []
    for at in itertools.product(*(range(*ranges[atom]) for atom in axis.atoms)):
        where, flat = dict(zip(axis.atoms, at, strict=True)), 0
        for factor in axis.factors:
            inside = 0
            for atom, size in zip(factor.atoms, factor.sizes, strict=True):
                inside = inside * size + where[atom]
            flat = flat * factor.extent + factor.offset + inside
        found.append(flat)
    return found


@given(axes())
def test_stretches_are_contiguous_and_complete(case: tuple[AxisGeometry, dict[str, tuple[int, int]]]) -> None:
    axis, ranges = case
    pieces = list(stretches((axis,), ranges))
    spans = [list(range(*axis.span(piece))) for piece in pieces]
    assert [elements(axis, piece) for piece in pieces] == spans
    assert sorted(itertools.chain(*spans)) == elements(axis, ranges)


def test_a_part_of_each_group_lies_apart() -> None:
    axis = AxisGeometry((Factor(3, 0, ("group",), (3,)), Factor(7, 2, ("lane",), (4,), "all.part")))
    pieces = list(stretches((axis,), {"group": (0, 3), "lane": (0, 4)}))
    assert [axis.span(piece) for piece in pieces] == [(2, 6), (9, 13), (16, 20)]
