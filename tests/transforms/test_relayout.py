import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorferry.transforms.relayout import copy_into, transpose_into
from tensorferry.transforms.views import blocks, codes

CODES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def numbered(shape, dtype):
    """Every element differs from its neighbours in memory, for any item size."""
    count = int(np.prod(shape))
    return (np.arange(count, dtype=np.uint64) * 40503 % 65521).astype(dtype).reshape(shape)


@st.composite
def transpositions(draw, sizes, axes_count):
    shape = tuple(draw(st.lists(sizes, min_size=1, max_size=axes_count)))
    axes = tuple(draw(st.permutations(range(len(shape)))))
    return shape, axes, CODES[draw(st.sampled_from([1, 2, 4, 8]))]


@given(transpositions(st.integers(0, 9), 5))
def test_small_arrays_equal_numpy_transpose(case):
    shape, axes, dtype = case
    source = numbered(shape, dtype)
    expected = np.array(source.transpose(axes), order="C")
    out = np.zeros_like(expected)
    transpose_into(out, source, axes)
    assert np.array_equal(out, expected)


@settings(max_examples=80, deadline=None)
@given(
    transpositions(st.sampled_from([1, 2, 3, 5, 7, 16, 31]), 5),
    st.tuples(st.integers(0, 2), st.integers(0, 4), st.sampled_from([97, 300, 771])),
    st.booleans(),
)
def test_large_arrays_in_strided_views_equal_numpy_transpose(case, grow, reverse):
    shape, axes, dtype = case
    which, offset, long = grow
    shape = list(shape)
    shape[which % len(shape)] = long
    while np.prod(shape) > 400_000:
        shape[int(np.argmax(shape))] //= 2
    source = numbered([size + offset for size in shape], dtype)
    source = source[tuple(slice(offset, None) for _ in shape)]
    source = source[::-1] if reverse else source
    expected = source.transpose(axes).copy()
    room = np.full([size + 3 for size in expected.shape], 77, dtype)
    inside = tuple(slice(1, 1 + size) for size in expected.shape)
    transpose_into(room[inside], source, axes)
    assert np.array_equal(room[inside], expected)
    room[inside] = 77
    assert (room == 77).all(), "wrote outside the target"


LAYOUTS = {
    "embed mlp -> mlp embed": ((613, 521), (1, 0)),
    "heads half pair embed -> embed heads pair half": ((5, 2, 33, 307), (3, 0, 2, 1)),
    "heads pair half embed -> embed heads half pair": ((5, 33, 2, 307), (3, 0, 2, 1)),
    "expert embed mlp part -> part expert mlp embed": ((3, 101, 207, 2), (3, 0, 2, 1)),
    "embed heads head_dim -> heads embed head_dim": ((307, 5, 64), (1, 0, 2)),
    "a run of 3 kept": ((307, 211, 3), (1, 0, 2)),
    "a run of 8 kept": ((307, 111, 8), (1, 0, 2)),
    "many tiny transposes": ((7001, 3, 5), (0, 2, 1)),
    "all axes reversed": ((11, 13, 17, 7, 5), (4, 3, 2, 1, 0)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("itemsize", CODES)
def test_layouts_of_models(layout, itemsize):
    shape, axes = LAYOUTS[layout]
    source = numbered(shape, CODES[itemsize])
    out = np.zeros([shape[axis] for axis in axes], source.dtype)
    transpose_into(out, source, axes)
    assert np.array_equal(out, np.transpose(source, axes))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"])
def test_every_nan_payload_survives(dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    patterns = np.random.default_rng(7).integers(0, 256, 300 * 300 * dtype.itemsize, dtype=np.uint8)
    source = patterns.view(dtype).reshape(300, 300)
    out = np.zeros((300, 300), dtype)
    transpose_into(out, source, (1, 0))
    assert np.array_equal(codes(out), codes(source).T)


def test_wide_items_at_odd_addresses():
    held = np.arange(8 * 300 * 200 + 1, dtype=np.int64).astype(np.uint8)
    source = held[1:].reshape(300, 200, 8)
    out = np.zeros((200, 300, 8), np.uint8)
    transpose_into(out, source, (1, 0, 2))
    assert np.array_equal(out, source.transpose(1, 0, 2))


def test_sixteen_byte_runs_keep_signalling_nans():
    source = np.random.default_rng(3).integers(0, 2**63, (200, 300, 2), dtype=np.uint64)
    source[::3] = 0x7FF0_0000_0000_0001
    out = np.zeros((300, 200, 2), np.uint64)
    transpose_into(out, source, (1, 0, 2))
    assert np.array_equal(out, source.transpose(1, 0, 2))


def test_copy_broadcasts_from_a_view_without_strides():
    source = np.broadcast_to(numbered((1, 300), np.uint16), (200, 300))
    out = np.zeros((300, 200), np.uint16).T
    copy_into(out, source)
    assert np.array_equal(out, source)


@pytest.mark.parametrize(
    ("out", "axes"),
    [
        (np.zeros((5, 7), np.uint16), (1, 0)),
        (np.zeros((7, 5), np.int16), (1, 0)),
        (np.zeros((7, 5), np.uint16), (1, 1)),
        (np.zeros((5,), np.uint16), (0,)),
    ],
)
def test_mismatches_are_refused(out, axes):
    with pytest.raises(ValueError):
        transpose_into(out, np.ones((5, 7), np.uint16), axes)


def test_refusal_says_shapes_and_dtypes():
    with pytest.raises(ValueError, match=r"cannot copy uint16\(7, 5\) into uint16\(5, 7\)"):
        transpose_into(np.zeros((5, 7), np.uint16), np.ones((5, 7), np.uint16), (1, 0))
    with pytest.raises(ValueError, match="1, 2, 4 or 8 bytes are supported, not complex128"):
        transpose_into(np.zeros((5, 7), complex), np.ones((7, 5), complex), (1, 0))


def test_scratch_stays_small():
    source, out = np.zeros((2048, 1111), np.uint64), np.zeros((1111, 2048), np.uint64)
    tracemalloc.start()
    transpose_into(out, source, (1, 0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.2 * 2**20


def test_two_threads_write_two_halves():
    source, out = numbered((700, 900), np.uint16), np.zeros((900, 700), np.uint16)
    halves = [slice(0, 350), slice(350, 700)]
    threads = [threading.Thread(target=transpose_into, args=(out[:, h], source[h], (1, 0))) for h in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(out, source.T)


@given(st.lists(st.integers(0, 6), min_size=0, max_size=4), st.integers(1, 40), st.booleans())
def test_blocks_cover_every_element_once(shape, items, turned):
    array = np.zeros(shape, np.uint8)
    array = array.T if turned else array
    for (block,) in blocks(array, items=items):
        assert 0 < block.size <= items
        block += 1
    assert (array == 1).all()
