"""Chunks: within the aim where the cuts allow it, tiling the array, split again for readers."""

import math

from hypothesis import given
from hypothesis import strategies as st
from tensorferry.mappings.rules.chunking import INNER_CHUNK_BYTES, MIB, Cut, choose_chunk, choose_inner

SHAPES = st.lists(st.integers(1, 60), min_size=1, max_size=5)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[Cut], list[Cut], int]:
    units, shape = [], []
    for _ in range(draw(st.integers(1, 5))):
        unit = draw(st.integers(1, 4))
        units.append(unit)
        shape.append(unit * draw(st.integers(1, 30)))
    order = draw(st.permutations(range(len(shape))))
    stacked = draw(st.integers(0, len(shape)))
    cuts = [Cut(axis, units[axis]) for axis in order]
    return shape, cuts[:stacked], cuts[stacked:], draw(st.integers(1, 4 * math.prod(shape)))


@given(cases(), st.sampled_from([1, 2, 4]))
def test_a_chunk_keeps_to_the_limit_unless_it_is_one_unit(
    case: tuple[list[int], list[Cut], list[Cut], int], itemsize: int
) -> None:
    shape, stacked, cuts, limit = case
    chunk = choose_chunk(shape, itemsize, stacked, cuts, limit)
    assert all(1 <= c <= n for c, n in zip(chunk, shape, strict=True))
    assert all(chunk[cut.axis] % cut.unit == 0 for cut in (*stacked, *cuts))
    smallest = [cut.unit for cut in sorted((*stacked, *cuts), key=lambda cut: cut.axis)]
    assert itemsize * math.prod(chunk) <= limit or list(chunk) == smallest


@given(cases())
def test_a_limit_that_holds_the_array_leaves_it_whole(case: tuple[list[int], list[Cut], list[Cut], int]) -> None:
    shape, stacked, cuts, _ = case
    assert choose_chunk(shape, 2, stacked, cuts, 2 * math.prod(shape)) == tuple(shape)


def test_stacked_axes_give_way_first_the_last_of_them_first() -> None:
    shape, stacked, cuts = (4, 6, 10, 14), [Cut(0, 1), Cut(1, 1)], [Cut(2, 1)]
    assert choose_chunk(shape, 1, stacked, cuts, 4 * 3 * 140) == (4, 3, 10, 14)
    assert choose_chunk(shape, 1, stacked, cuts, 2 * 140) == (2, 1, 10, 14)
    assert choose_chunk(shape, 1, stacked, cuts, 70) == (1, 1, 5, 14)


def test_cuts_are_even_where_a_divisor_is_near() -> None:
    assert choose_chunk((15,), 1, [], [Cut(0, 1)], 7) == (5,)
    assert choose_chunk((13,), 1, [], [Cut(0, 1)], 7) == (7,)


def test_an_experts_tensor_is_one_chunk() -> None:
    """DeepSeek-V3's wi_0: 256 experts, 58 layers, 29 MB each."""
    shape = (256, 58, 7168, 2048)
    chunk = choose_chunk(shape, 2, [Cut(0, 1), Cut(1, 1)], [Cut(3, 1)], 32 * MIB)
    assert chunk == (1, 1, 7168, 2048)
    assert choose_inner(chunk, 2, [0, 1]) == (1, 1, 1792, 1024)


@given(SHAPES, st.sampled_from([1, 2, 4]), st.integers(1, 1 << 22))
def test_an_inner_chunk_divides_the_outer_one(chunk: list[int], itemsize: int, limit: int) -> None:
    inner = choose_inner(chunk, itemsize, [0], limit)
    assert all(c % i == 0 for c, i in zip(chunk, inner, strict=True))
    small = itemsize * math.prod(chunk) <= MIB
    assert tuple(inner) == tuple(chunk) if small else itemsize * math.prod(inner) <= limit or set(inner) == {1}


def test_readers_find_both_large_axes_split() -> None:
    rows, cols = choose_inner((8192, 8192), 2, [])
    assert rows < 8192
    assert cols < 8192
    assert 2 * rows * cols <= INNER_CHUNK_BYTES
