"""Code tables against the written specifications, value by value."""

import math

import numpy as np
import pytest
from tensorferry.transforms.decode.bits import decode_rows, values_in
from tensorferry.transforms.decode.scaled import decode_scale
from tensorferry.transforms.decode.scales import check_scale, e8m0_table, scale_values
from tensorferry.transforms.decode.tables import byte_table, decode_bytes

# OCP Microscaling v1.0, table of E2M1.
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
# Mantissa bits and exponent bias.
LAYOUTS = {
    "float8_e4m3fn": (3, 7),
    "float8_e5m2": (2, 15),
    "float8_e4m3fnuz": (3, 8),
    "float8_e5m2fnuz": (2, 16),
}


def one_byte_float(name, byte):
    mantissa_bits, bias = LAYOUTS[name]
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte & 0x7F) >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
    if name.endswith("fnuz"):
        if byte == 0x80:
            return math.nan
    elif name == "float8_e4m3fn":
        if byte & 0x7F == 0x7F:
            return math.nan
    elif exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("count", [256, 255, 1])
def test_one_byte_floats(name, count):
    codes = np.arange(256, dtype=np.uint8)[:count]
    out = np.empty(count, np.float32)
    decode_bytes(codes, name, out)
    expected = np.array([one_byte_float(name, byte) for byte in range(count)], np.float32)
    np.testing.assert_array_equal(out, expected)
    assert np.array_equal(np.signbit(out[expected == 0]), np.signbit(expected[expected == 0]))


def test_the_same_byte_is_half_as_much_in_fnuz_and_byte_0x80_is_nan():
    assert byte_table("float8_e4m3fn")[0x40, 0] == 2
    assert byte_table("float8_e4m3fnuz")[0x40, 0] == 1
    assert np.isnan(byte_table("float8_e4m3fnuz")[0x80, 0])
    assert byte_table("float8_e4m3fn")[0x80, 0] == 0


def test_fp4_low_nibble_first():
    out = np.empty(512, np.float32)
    decode_bytes(np.arange(256, dtype=np.uint8), "fp4", out)
    signed = [*E2M1, *(-v for v in E2M1)]
    expected = [signed[nibble] for byte in range(256) for nibble in (byte % 16, byte // 16)]
    np.testing.assert_array_equal(out, np.array(expected, np.float32))
    assert np.signbit(out[2 * 0x08])


def test_e8m0():
    table = e8m0_table()
    assert np.isnan(table[255])
    assert table[127] == 1
    assert table[254] == 2.0**127
    assert table[0] == np.float32(2.0**-127) > 0
    assert all(table[b] == np.float32(2.0 ** (b - 127)) for b in range(255))


def test_bytes_that_are_exponents_are_not_read_as_numbers():
    stored = np.array([0, 1, 127, 254], np.uint8)
    assert scale_values(stored, "e8m0").tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", [1, 7, 32, 45])
def test_integers_of_any_width_in_a_bit_stream(bits, count):
    rng = np.random.default_rng(bits)
    values = rng.integers(0, 1 << bits, (3, count))
    rows = []
    for row in values:
        number = sum(int(v) << (k * bits) for k, v in enumerate(row))
        rows.append(np.frombuffer(number.to_bytes(-(-count * bits // 32) * 4, "little"), np.uint8))
    codes = np.stack(rows)
    for code, minus in ((f"uint{bits}", 0), (f"int{bits}_offset", 1 << (bits - 1))):
        out = np.full(3 * values_in(codes.shape[1], code), np.nan, np.float32)
        decoded = decode_rows(codes, code, out)[:, :count]
        np.testing.assert_array_equal(decoded, values - minus)


@pytest.mark.parametrize(
    ("values", "rule", "words"),
    [
        ([1.0, 0.5], "positive", None),
        ([1.0, np.nan, np.nan], "positive", "2 NaN of 3 scales"),
        ([np.inf, -np.inf, 1.0], "positive", "2 infinite, 1 negative of 3 scales"),
        ([0.0, -0.0, -1.0], "positive", "2 zero, 1 negative of 3 scales"),
        ([0.0, 1.0], "nonnegative", None),
        ([0.0, -1.0], "nonnegative", "1 negative of 2 scales"),
        ([0.0, -1.0], "finite", None),
    ],
)
def test_scales_that_cannot_be_right(values, rule, words):
    fault = check_scale(np.array(values, np.float32), "float", rule)
    assert (None if fault is None else str(fault)) == words


def test_a_scale_is_expanded_by_copying_entries():
    grid = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    out = np.empty((7, 2), np.float32)
    decode_scale({"scale": grid}, out, encoding="float", blocks=[4, 5], offsets=[3, 0], grains=[1, 0])
    assert out[:, 0].tolist() == [1, 3, 3, 3, 3, 5, 5]


def test_a_scale_is_expanded_to_parts_of_blocks():
    """Blocks of 4, entries of 2, from element 2 on: 2 3 | 4 5 | 6 7 | 8 9."""
    out = np.empty((4,), np.float32)
    grid = np.array([1, 3, 5], np.float32)
    decode_scale({"scale": grid}, out, encoding="float", blocks=[4], offsets=[2], grains=[2])
    assert out.tolist() == [1, 3, 3, 5]
