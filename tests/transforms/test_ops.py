import json
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorferry.transforms.dtypes import numpy_dtype
from tensorferry.transforms.ops import (
    Crop,
    Op,
    Ops,
    Pad,
    RoundTo,
    Scale,
    Shift,
    Spec,
    Whole,
    apply_elementwise,
    apply_elementwise_into,
)
from tensorferry.transforms.views import codes

SPEC = Spec("bfloat16", (("vocab", 5), ("embed", 7)))
EVERY_BFLOAT16 = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
EACH = [Scale(1 / math.sqrt(128)), Shift(1.0), RoundTo("float32"), Pad("vocab", 8), Crop("vocab", 3)]


def rounded_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16 by integer arithmetic."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def test_query_scaling_is_one_float32_product_and_one_rounding():
    found = apply_elementwise(EVERY_BFLOAT16, [Scale(1 / math.sqrt(96))], "bfloat16")
    wide = (codes(EVERY_BFLOAT16).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        product = wide * np.float32(1 / math.sqrt(96))
    nan = np.isnan(wide)
    assert found.dtype == ml_dtypes.bfloat16
    assert np.array_equal(codes(found)[~nan], rounded_to_bfloat16(product)[~nan])
    assert np.isnan(found[nan].astype(np.float32)).all()


def test_the_factor_is_a_float32():
    factor = 1 / math.sqrt(96)
    values = np.float32([3.3333333, 1e10, 7.123456])
    found = apply_elementwise(values, [Scale(factor)], "float32")
    assert found.tolist() == (values * np.float32(factor)).tolist()


def test_powers_of_two_are_exact_and_invertible():
    magnitude = np.abs(EVERY_BFLOAT16.astype(np.float32))
    values = EVERY_BFLOAT16[(magnitude > 1e-30) & np.isfinite(magnitude)]
    scale = Scale(0.125)
    down = apply_elementwise(values, [scale], "bfloat16")
    assert np.array_equal(down.astype(np.float64), values.astype(np.float64) / 8)
    back = apply_elementwise(down, [scale.inverse(SPEC)], "bfloat16")
    assert np.array_equal(codes(back), codes(values))


@pytest.mark.parametrize("head_dim", [48, 64, 80, 96, 112, 128, 160, 192, 256])
def test_inverse_of_query_scaling_is_the_square_root(head_dim):
    inverse = Scale(1 / math.sqrt(head_dim)).inverse(SPEC)
    assert np.float32(inverse.factor) == np.float32(math.sqrt(head_dim))
    assert np.float32(inverse.inverse(SPEC).factor) == np.float32(1 / math.sqrt(head_dim))


def test_shift_of_a_norm_comes_out_in_float32():
    values = np.array([0.1, -0.25, 3.0], ml_dtypes.bfloat16)
    found = apply_elementwise(values, [Shift(1.0)], "float32")
    assert found.dtype == np.float32
    assert found.tolist() == (values.astype(np.float32) + np.float32(1)).tolist()
    back = apply_elementwise(found, [Shift(1.0).inverse(SPEC)], "bfloat16")
    assert np.array_equal(codes(back), codes(values))


def test_a_chain_is_rounded_at_its_end_only():
    values = np.array([1 + 2**-7], ml_dtypes.bfloat16)
    ops = [Scale(1 + 2**-8), Shift(-1.0)]
    exact = np.float32(1 + 2**-7) * np.float32(1 + 2**-8) - np.float32(1)
    once = codes(apply_elementwise(values, ops, "bfloat16"))
    twice = codes(apply_elementwise(values, [ops[0], RoundTo("bfloat16"), ops[1]], "bfloat16"))
    assert once == rounded_to_bfloat16(np.float32([exact]))
    assert twice != once


def test_float64_is_rounded_once_by_round_to():
    value = np.float64([1 + 2**-8 + 2**-40])
    assert apply_elementwise(value, [RoundTo("bfloat16")], "bfloat16").astype(float).tolist() == [1 + 2**-7]
    assert apply_elementwise(value, [RoundTo("bfloat16")], "float32").tolist() == [1 + 2**-7]


@pytest.mark.parametrize("ops", [(), (Pad("vocab", 8),), (RoundTo("bfloat16"),)])
def test_nothing_to_do_returns_the_block_itself(ops):
    assert apply_elementwise(EVERY_BFLOAT16, ops, "bfloat16") is EVERY_BFLOAT16


def test_round_to_another_dtype_and_back_is_not_nothing():
    found = apply_elementwise(np.float32([1 + 2**-12]), [RoundTo("bfloat16")], "float32")
    assert found.tolist() == [1.0]


def test_codes_of_low_bit_dtypes_pass_untouched():
    carried = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    assert apply_elementwise(carried, Ops(), "float8_e4m3fn") is carried


def test_in_place_and_strided():
    rng = np.random.default_rng(2)
    values = rng.normal(size=(90, 1100)).astype(ml_dtypes.bfloat16)
    ops = Ops((Scale(0.3), Shift(0.5)))
    expected = apply_elementwise(values.copy(), ops, "bfloat16")
    turned = values.T.copy().T
    apply_elementwise_into(turned, turned, ops)
    assert np.array_equal(codes(turned), codes(expected))
    apply_elementwise_into(values, values, ops)
    assert np.array_equal(codes(values), codes(expected))


def test_the_source_is_never_changed():
    values = np.float32([1, 2, 3])
    apply_elementwise(values, [Scale(2.0), Shift(1.0)], "float32")
    assert values.tolist() == [1, 2, 3]


def test_into_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"\(3,\) into shape \(5,\)"):
        apply_elementwise_into(np.zeros(5), np.zeros(3), [Scale(2.0)])


some_ops = st.sampled_from([Scale(0.5), Shift(1.0), RoundTo("float32"), Pad("vocab", 8), Pad("embed", 9)])


@given(st.lists(some_ops))
def test_inverse_leads_back_to_the_spec(ops):
    chain = Ops(tuple(ops))
    inverse = chain.inverse(SPEC)
    assert inverse.output(chain.output(SPEC)) == SPEC
    assert inverse.inverse(chain.output(SPEC)).output(SPEC) == chain.output(SPEC)


def test_inverse_is_reversed_and_knows_what_was_there():
    chain = Ops((Scale(0.5), RoundTo("float32"), Pad("vocab", 8)))
    assert chain.inverse(SPEC) == Ops((Crop("vocab", 5), RoundTo("bfloat16"), Scale(2.0)))
    twice = Ops((RoundTo("float32"), RoundTo("float16"), Pad("vocab", 8), Pad("vocab", 9)))
    undone = (Crop("vocab", 8), Crop("vocab", 5), RoundTo("float32"), RoundTo("bfloat16"))
    assert twice.inverse(SPEC) == Ops(undone)
    assert chain.output(SPEC) == Spec("float32", (("vocab", 8), ("embed", 7)))
    assert chain.output(SPEC).shape == (8, 7)


@pytest.mark.parametrize("op", EACH)
def test_json_round_trip(op):
    assert Op.from_json(json.loads(json.dumps(op.to_json()))) == op


def test_json_of_a_chain():
    chain = Ops(tuple(EACH))
    assert Ops.from_json(json.loads(json.dumps(chain.to_json()))) == chain
    assert Pad("vocab", 8).to_json() == {"op": "pad", "dim": "vocab", "to": 8}


def test_descriptions():
    assert Ops(tuple(EACH)).describe() == ("scale 0.0884, shift +1, round to float32, pad vocab to 8, crop vocab to 3")
    assert Ops().describe() == ""


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Pad("vocab", 4).output(SPEC), "cannot pad vocab=5 to 4"),
        (lambda: Crop("vocab", 6).output(SPEC), "cannot crop vocab=5 to 6"),
        (lambda: Pad("mlp", 4).output(SPEC), r"no axis 'mlp' in \[vocab=5, embed=7\]"),
        (lambda: Scale(0.5).output(Spec("int32")), "scale 0.5 needs a float dtype; found int32"),
        (lambda: Shift(1).output(Spec("bool")), "shift \\+1 needs a float dtype; found bool"),
        (lambda: Scale(0.0), "finite and not zero"),
        (lambda: Scale(1e40), "finite and not zero"),
        (lambda: RoundTo("bf16"), "unknown dtype 'bf16'"),
        (lambda: Op.from_json({"op": "scael"}), "unknown op 'scael'; known: crop, pad"),
    ],
)
def test_refusals(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "float8_e4m3fn"])
def test_other_source_dtypes(dtype):
    values = np.array([0.5, -1.25, 3.0], numpy_dtype(dtype))
    assert apply_elementwise(values, [Scale(3.0)], "bfloat16").astype(float).tolist() == [1.5, -3.75, 9.0]


def test_whole_takes_indices_and_nothing_else() -> None:
    found = apply_elementwise(np.float32([0, 255, 257]), [Whole()], "int32")
    assert (found.dtype, found.tolist()) == (np.dtype("int32"), [0, 255, 257])
    for wrong in (0.5, np.nan, np.inf):
        with pytest.raises(ValueError, match="expected whole numbers, found"):
            apply_elementwise(np.float32([1, wrong]), [Whole()], "int64")
