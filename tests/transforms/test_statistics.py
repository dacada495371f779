import json
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tensorferry.transforms.dtypes import numpy_dtype
from tensorferry.transforms.statistics import Statistics, statistics

FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"]
FLOATS += ["float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "float6_e3m2fn"]
CODE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def plainly(array: np.ndarray) -> Statistics:
    """The same by float64 numpy, no tricks."""
    values = array.astype(np.float64).reshape(-1)
    kept = values[~np.isnan(values)]
    low, high = (kept.min(), kept.max()) if kept.size else (math.inf, -math.inf)
    return Statistics(values.size, low, high, int(np.isnan(values).sum()), int(np.isinf(values).sum()))


def of_bits(dtype: str, bits: np.ndarray) -> np.ndarray:
    if dtype == "float4_e2m1fn":
        bits = bits & 0xF
    if dtype == "float6_e3m2fn":
        bits = bits & 0x3F
    return bits.view(numpy_dtype(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.filterwarnings("ignore:invalid value")
@given(data=st.data())
def test_any_bits_of_any_float(dtype, data):
    code = CODE[numpy_dtype(dtype).itemsize]
    array = of_bits(dtype, data.draw(arrays(code, st.integers(0, 40))))
    assert statistics(array) == plainly(array)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("keep", ["finite", "negative", "positive", "not nan"])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_one_sign_and_no_nan(dtype, keep):
    bits = np.random.default_rng(5).integers(0, 256, 60_000 * 8, dtype=np.uint8)
    array = bits.view(numpy_dtype(dtype))
    values = array.astype(np.float64)
    masks = {
        "finite": np.isfinite(values),
        "negative": values < 0,
        "positive": values > 0,
        "not nan": values == values,
    }
    assert statistics(array[masks[keep]]) == plainly(array[masks[keep]])


def test_signed_zeros_are_zero():
    found = statistics(np.array([-0.0, -0.0], ml_dtypes.bfloat16))
    assert (found.min, found.max, found.absmax) == (0.0, 0.0, 0.0)


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_exact(dtype):
    info = (False, True) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    array = np.array([info[0], 1, info[1]], dtype)
    assert statistics(array) == Statistics(3, int(info[0]), int(info[1]))
    assert Statistics.from_json(json.loads(json.dumps(statistics(array).to_json()))).max == int(info[1])


def test_strides_and_many_blocks():
    array = np.random.default_rng(1).normal(size=(701, 1301)).astype(ml_dtypes.bfloat16)
    array[400, 1000] = np.inf
    assert statistics(array.T[::3, ::-1]) == plainly(array.T[::3, ::-1])
    assert statistics(array[:, 1:]) == plainly(array[:, 1:])


def test_absmax_is_of_the_larger_side():
    assert statistics(np.float32([-3, 2, np.nan])).absmax == 3
    assert statistics(np.float32([np.nan])).absmax == 0
    assert Statistics().absmax == 0


values = st.builds(
    lambda xs: statistics(np.array(xs, np.float32)),
    st.lists(st.floats(width=32), max_size=4),
)


@given(values, values, values)
def test_merge_is_associative_and_commutative(a, b, c):
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(b) == b.merge(a)
    assert a.merge(Statistics()) == a


@given(st.lists(st.floats(width=32), max_size=9), st.integers(0, 9))
def test_merge_equals_the_statistics_of_both(xs, cut):
    array = np.array(xs, np.float32)
    assert statistics(array[:cut]).merge(statistics(array[cut:])) == statistics(array)


@given(values)
def test_json_round_trip(found):
    text = json.dumps(found.to_json(), allow_nan=False)
    assert Statistics.from_json(json.loads(text)) == found


@pytest.mark.parametrize("dtype", ["complex64", "V1", ">f4"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match="no statistics of"):
        statistics(np.zeros(3, dtype))
