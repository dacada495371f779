"""New codes for changed weights, against loops over blocks in plain Python."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tensorferry.transforms.requantise import block_counts, blockwise, choose_scales, encode, spread, stored_scales

E4M3 = ml_dtypes.float8_e4m3fn
values_of = arrays(
    np.float32, st.tuples(st.integers(1, 9), st.integers(1, 11)), elements=st.floats(-1e6, 1e6, width=32)
)
blocks_of = st.sampled_from([(4, 3), (1, 0), (0, 0), (1, 4), (128, 128), (0, 5)])


def cells(shape, blocks):
    """(index in the grid, slices) of every block, by loops."""
    rows, columns = (block or length for block, length in zip(blocks, shape, strict=True))
    for i, top in enumerate(range(0, shape[0], rows)):
        for j, left in enumerate(range(0, shape[1], columns)):
            yield (i, j), (slice(top, top + rows), slice(left, left + columns))


@settings(max_examples=60, deadline=None)
@given(values=values_of, blocks=blocks_of, e8m0=st.booleans())
def test_each_block_by_a_loop(values, blocks, e8m0):
    encoding, dtype = ("e8m0", "float8_e8m0fnu") if e8m0 else ("float", "float32")
    scales = choose_scales(values, "float8_e4m3fn", blocks, encoding, dtype)
    codes = encode(values, spread(scales, values.shape, blocks), "float8_e4m3fn")
    stored = stored_scales(scales, encoding, dtype)
    assert scales.shape == block_counts(values.shape, blocks)
    assert (stored.astype(np.float32) == scales).all()
    for cell, where in cells(values.shape, blocks):
        largest = float(np.abs(values[where]).max())
        if largest == 0:
            wanted = 1.0
        elif e8m0:
            wanted = 2.0 ** math.ceil(math.log2(float(np.float32(largest) / np.float32(448))))
        else:
            wanted = max(float(np.float32(largest) / np.float32(448)), float(np.finfo(np.float32).tiny))
        if largest > 1e-30:
            assert scales[cell] == np.float32(wanted)
        exact = np.clip(values[where] / scales[cell], -448, 448).astype(E4M3)
        assert codes[where].tobytes() == exact.tobytes()
        assert np.isfinite(codes[where].astype(np.float32)).all()


def test_a_scale_is_rounded_before_it_divides():
    """A scale in bfloat16 is what readers multiply by, so it must also be what divides."""
    values = np.array([[1.01, -0.3]], np.float32)
    scales = choose_scales(values, "float8_e4m3fn", (1, 0), "float", "bfloat16")
    assert scales.astype(ml_dtypes.bfloat16).astype(np.float32) == scales
    assert scales != np.float32(1.01) / np.float32(448)


@pytest.mark.parametrize("exponent", [-127, -126, -1, 0, 1, 127])
def test_powers_of_two_stay_what_they_are(exponent):
    values = np.ldexp(np.float32(448), exponent).reshape(1, 1) if exponent < 119 else None
    if values is None:
        stored = stored_scales(np.full((1, 1), np.ldexp(np.float32(1), exponent)), "e8m0", "uint8")
        assert stored.item() == exponent + 127
        return
    scales = choose_scales(values, "float8_e4m3fn", (0, 0), "e8m0", "uint8")
    assert scales.item() == np.ldexp(np.float32(1), exponent)
    assert stored_scales(scales, "e8m0", "uint8").item() == exponent + 127


@settings(max_examples=30, deadline=None)
@given(values=values_of, blocks=blocks_of)
def test_spread_undoes_blockwise_for_constant_blocks(values, blocks):
    grid = blockwise(values, blocks, np.maximum)
    again = blockwise(spread(grid, values.shape, blocks), blocks, np.minimum)
    np.testing.assert_array_equal(again, grid)
