"""The grid of a target array."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorferry.mappings.plan.array_spec import ArraySpec

WI = ArraySpec(("params", "layers", "wi"), "bfloat16", (7, 3, 10), (4, 1, 10), (2, 1, 5))


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3), st.integers(1, 3)), max_size=4))
def test_the_boxes_of_a_grid_tile_the_array(axes):
    shape = tuple(length for length, _, _ in axes)
    inner = tuple(inner for _, inner, _ in axes)
    spec = ArraySpec(("w",), "float32", shape, tuple(inner * count for _, inner, count in axes), inner)
    hits = np.zeros(shape, int)
    for index in spec.indices():
        hits[tuple(slice(start, stop) for start, stop in spec.box(index))] += 1
    assert (hits == 1).all()


def test_the_last_chunk_of_an_axis_is_clipped():
    assert WI.grid == (2, 3, 1)
    assert WI.box((1, 2, 0)) == ((4, 7), (2, 3), (0, 10))
    assert WI.box_shape((1, 2, 0)) == (3, 1, 10)
    assert (WI.nbytes, WI.chunk_bytes) == (7 * 3 * 10 * 2, 4 * 10 * 2)


@pytest.mark.parametrize("index", [(2, 0, 0), (-1, 0, 0), (0, 0), (0, 0, 0, 0)])
def test_an_index_outside_the_grid_is_an_error(index):
    with pytest.raises(IndexError, match="outside the grid"):
        WI.box(index)


def test_chunk_keys_are_those_of_the_formats():
    assert WI.chunk_key((1, 2, 0), "zarr3") == WI.chunk_key((1, 2, 0), "ocdbt") == "params.layers.wi/c/1/2/0"
    assert WI.chunk_key((1, 2, 0), "zarr2") == "params.layers.wi/1.2.0"
    assert len(set(WI.chunk_keys("zarr3"))) == 6


def test_a_scalar_is_one_chunk():
    scale = ArraySpec(("s",), "float32", (), (), ())
    assert list(scale.indices()) == [()]
    assert list(scale.chunk_keys("zarr3")) == ["s/c"]
    assert list(scale.chunk_keys("zarr2")) == ["s/0"]
    assert scale.nbytes == 4


@pytest.mark.parametrize(
    ("path", "shape", "chunk", "inner", "words"),
    [
        ((), (3,), (3,), (3,), "no name"),
        (("a", ""), (3,), (3,), (3,), "empty"),
        (("a",), (3,), (3, 1), (3,), "ranks"),
        (("a",), (3,), (3,), (2,), "inner must divide chunk"),
        (("a",), (3,), (0,), (1,), "positive"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(path, shape, chunk, inner, words):
    with pytest.raises(ValueError, match=words):
        ArraySpec(path, "float32", shape, chunk, inner)
