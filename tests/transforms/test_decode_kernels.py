"""Kernels on their own: one rounding, given outputs, bounded scratch."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from tensorferry.transforms.decode import KERNELS, run_kernel
from tensorferry.transforms.decode.rows import CHUNK_VALUES

BLOCKS = {"code": "float8_e4m3fn", "blocks": [128, 128], "offsets": [0, 0]}


def block_weights(rows, columns, seed=0):
    rng = np.random.default_rng(seed)
    codes = np.clip(rng.standard_normal((rows, columns)) * 100, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    scale = (rng.random((-(-rows // 128), -(-columns // 128))) + 0.01).astype(np.float32)
    return {"values": codes, "scale": scale}


def test_one_rounding_and_not_two():
    """A multiplication in bfloat16 rounds the scale first: a quarter of the elements would differ."""
    arrays = block_weights(300, 260)
    out = run_kernel("scaled", arrays, (300, 260), BLOCKS, "bfloat16")
    wide = np.repeat(np.repeat(arrays["scale"], 128, 0)[:300], 128, 1)[:, :260]
    once = (arrays["values"].astype(np.float32) * wide).astype(ml_dtypes.bfloat16)
    twice = arrays["values"].astype(ml_dtypes.bfloat16) * wide.astype(ml_dtypes.bfloat16)
    assert out.tobytes() == once.tobytes()
    assert (out != twice).mean() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_strided_output_is_filled_in_place(dtype):
    arrays = block_weights(130, 257)
    expected = run_kernel("scaled", arrays, (130, 257), BLOCKS, dtype)
    big = np.zeros((257, 3, 130), expected.dtype)
    view = big[:, 1, :].T
    assert run_kernel("scaled", arrays, (130, 257), BLOCKS, dtype, view) is view
    assert np.array_equal(view, expected)
    assert not big[:, 0].any()
    assert not big[:, 2].any()


def test_an_output_of_another_shape_or_dtype_is_refused():
    arrays = block_weights(4, 5)
    with pytest.raises(ValueError, match="the region is float32"):
        run_kernel("scaled", arrays, (4, 5), BLOCKS, "float32", np.empty((5, 4), np.float32))


def test_an_empty_region_is_no_work():
    arrays = {"values": np.empty((0, 5), ml_dtypes.float8_e4m3fn), "scale": np.empty((0, 1), np.float32)}
    assert run_kernel("scaled", arrays, (0, 5), BLOCKS).shape == (0, 5)


def test_scratch_does_not_grow_with_the_weight():
    arrays = block_weights(2048, 1024)
    out = np.empty((2048, 1024), ml_dtypes.bfloat16)
    run_kernel("scaled", arrays, out.shape, BLOCKS, "bfloat16", out)
    tracemalloc.start()
    run_kernel("scaled", arrays, out.shape, BLOCKS, "bfloat16", out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * 4 * CHUNK_VALUES < out.nbytes


def test_uint8_views_of_codes_decode_like_the_codes():
    """Shards of PyTorch come as bytes."""
    arrays = block_weights(9, 130)
    bridged = arrays | {"values": arrays["values"].view(np.uint8)}
    assert np.array_equal(
        run_kernel("scaled", arrays, (9, 130), BLOCKS), run_kernel("scaled", bridged, (9, 130), BLOCKS)
    )


def test_kernels_are_named_as_schemes_name_them():
    from tensorferry.mappings.lowbit.schemes import SCHEMES

    assert {scheme.kernel for scheme in SCHEMES.schemes.values()} == set(KERNELS)
