import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorferry.transforms.cast import cast, cast_into, is_float
from tensorferry.transforms.dtypes import numpy_dtype
from tensorferry.transforms.views import codes

# Mantissa digits with the hidden one, exponent of the smallest subnormal, largest finite value.
FORMATS = {
    "bfloat16": (8, -133, 255 * 2.0**120),
    "float16": (11, -24, 65504.0),
    "float32": (24, -149, (2**24 - 1) * 2.0**104),
    "float8_e5m2": (3, -16, 57344.0),
}


def nearest(value: float, dtype: str) -> float:
    """The value of ``dtype`` nearest to ``value``, ties to even, in integer arithmetic on the 53 bits of a double."""
    digits, smallest, largest = FORMATS[dtype]
    fraction, exponent = math.frexp(abs(value))
    whole, exponent = int(fraction * 2**53), exponent - 53
    drop = max(smallest, exponent + 53 - digits) - exponent
    if drop > 0:
        kept, rest = whole >> drop, whole & ((1 << drop) - 1)
        half = 1 << (drop - 1)
        whole, exponent = kept + (rest > half or (rest == half and kept & 1)), exponent + drop
    rounded = math.inf if whole.bit_length() + exponent > 1024 else math.ldexp(whole, exponent)
    return math.copysign(math.inf if rounded > largest else rounded, value)


def boundary_floats() -> np.ndarray:
    """float32 values at, and one step beside, every bfloat16 value and every midpoint between two."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    lows = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (high[:, None] | lows).reshape(-1).view(np.float32)


def is_nan(array: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.isnan(array.astype(np.float64))


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    """Equal bits, but any NaN equals any NaN."""
    assert found.dtype == expected.dtype
    equal = codes(found) == codes(expected)
    return bool((equal | (is_nan(expected) & is_nan(found))).all())


ALL_16_BITS = np.arange(1 << 16, dtype=np.uint16)


def test_every_bfloat16_widens_exactly():
    found = cast(ALL_16_BITS.view(ml_dtypes.bfloat16), "float32")
    expected = (ALL_16_BITS.astype(np.uint32) << 16).view(np.float32)
    assert same(found, expected)


def test_every_bfloat16_survives_a_round_trip():
    values = ALL_16_BITS.view(ml_dtypes.bfloat16)
    assert same(cast(cast(values, "float32"), "bfloat16"), values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e5m2"])
def test_every_float16(dtype):
    values = ALL_16_BITS.view(np.float16)
    finite = np.isfinite(values)
    expected = [nearest(float(value), dtype) for value in values[finite]]
    assert cast(values, dtype)[finite].astype(np.float64).tolist() == expected
    assert is_nan(cast(values, dtype)[np.isnan(values)]).all()
    assert cast(np.float16([np.inf, -np.inf]), dtype).astype(float).tolist() == [np.inf, -np.inf]


def test_every_bfloat16_to_float16():
    values = ALL_16_BITS.view(ml_dtypes.bfloat16)
    finite = np.isfinite(values.astype(np.float32))
    expected = [nearest(float(value), "float16") for value in values[finite]]
    assert cast(values, "float16")[finite].astype(np.float64).tolist() == expected


def test_float32_boundaries_to_bfloat16_by_integer_rounding():
    values = boundary_floats()
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    found = cast(values, "bfloat16")
    nan = np.isnan(values)
    assert np.array_equal(codes(found)[~nan], rounded[~nan])
    with np.errstate(invalid="ignore"):
        assert same(found, values.astype(ml_dtypes.bfloat16))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from(sorted(FORMATS)))
def test_float32_is_rounded_to_nearest_even(value, dtype):
    assert float(cast(np.float32([value]), dtype)[0]) == nearest(value, dtype)


@given(
    st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["bfloat16", "float16", "float8_e5m2", "float32"])
)
def test_float64_is_rounded_once(value, dtype):
    assert float(cast(np.float64([value]), dtype)[0]) == nearest(value, dtype)


@given(
    st.integers(0, 2**16 - 1),
    st.sampled_from([0, 1, -1, 2**20, -(2**20), 2**28, 2**29 - 1, 2**29 + 1]),
    st.sampled_from(["bfloat16", "float16"]),
)
def test_float64_beside_a_tie_is_rounded_once(pattern, nudge, dtype):
    """A midpoint of two 16-bit values, moved by less than float32 can see."""
    low = np.uint16(pattern & 0x7BFE).view(numpy_dtype(dtype)).astype(np.float64)
    high = np.uint16((pattern & 0x7BFE) + 1).view(numpy_dtype(dtype)).astype(np.float64)
    middle = (np.float64(low) + np.float64(high)) / 2
    value = (middle.view(np.int64) + nudge).view(np.float64)
    assert float(cast(np.float64([value]), dtype)[0]) == nearest(float(value), dtype)
    assert float(cast(np.float64([-value]), dtype)[0]) == nearest(float(-value), dtype)


def test_the_double_rounding_that_is_avoided():
    value = np.float64([1 + 2**-8 + 2**-40])
    assert float(value.astype(np.float32).astype(ml_dtypes.bfloat16)[0]) == 1.0
    assert float(cast(value, "bfloat16")[0]) == 1 + 2**-7


@pytest.mark.parametrize(
    "source", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu", "int8", "bool"]
)
@pytest.mark.parametrize("target", ["bfloat16", "float32", "float16", "float64"])
@pytest.mark.parametrize("count", [256, 255])
def test_every_byte_decodes_as_numpy_does(source, target, count):
    patterns = np.arange(count) % (2 if source == "bool" else 256)
    values = patterns.astype(np.uint8).view(numpy_dtype(source))
    with np.errstate(all="ignore"):
        expected = values.astype(np.float64).astype(numpy_dtype(target))
    assert same(cast(values, target), expected)


def test_strided_views_on_both_sides():
    whole = boundary_floats()[: 6 * 350 * 80].reshape(6, 350, 80)
    source = whole[::-1, 3:, ::2]
    for dtype in ("bfloat16", "float64", "float32"):
        room = np.zeros((40, 347, 6, 2), numpy_dtype(dtype))
        cast_into(room[..., 1].transpose(2, 1, 0), source)
        assert same(room[..., 1].transpose(2, 1, 0).copy(), source.copy().astype(numpy_dtype(dtype)))
        assert not codes(room[..., 0]).any()


def test_strided_bytes_and_strided_float64():
    source = np.arange(70 * 90, dtype=np.uint32).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(70, 90)
    assert same(cast(source.T, "bfloat16"), source.T.copy().astype(ml_dtypes.bfloat16))
    wide = source.astype(np.float64)[::3, ::-1]
    assert same(cast(wide, "bfloat16"), wide.copy().astype(ml_dtypes.bfloat16))


def test_same_dtype_is_untouched():
    source = ALL_16_BITS.view(ml_dtypes.bfloat16)
    assert cast(source, "bfloat16") is source
    out = np.zeros_like(source)
    cast_into(out, source)
    assert np.array_equal(codes(out), ALL_16_BITS)


def test_overflow_is_infinite_or_nan_without_warning():
    big = np.float32([3.4e38, -3.4e38])
    assert cast(big, "bfloat16").astype(float).tolist() == [np.inf, -np.inf]
    assert cast(big, "float16").astype(float).tolist() == [np.inf, -np.inf]
    assert np.isnan(cast(big, "float8_e4m3fn").astype(float)).all()


@pytest.mark.parametrize(("source", "target"), [("float32", "int32"), ("bfloat16", "uint8"), ("complex64", "float32")])
def test_what_is_no_rounding_is_refused(source, target):
    with pytest.raises(TypeError, match=f"from {source} to {target} is not a rounding"):
        cast(np.zeros(3, numpy_dtype(source)), target)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\(3, 5\) into shape \(5, 3\)"):
        cast_into(np.zeros((5, 3), np.float32), np.zeros((3, 5), np.float64))


def test_which_dtypes_are_floats():
    floats = ["bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn"]
    assert all(is_float(numpy_dtype(name)) for name in floats)
    assert not any(is_float(numpy_dtype(name)) for name in ["bool", "int8", "uint64", "complex64"])
    assert not is_float(np.dtype(ml_dtypes.int4))
