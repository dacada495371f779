"""Scale names are aliases; whether one is a scale is decided by the weight beside it."""

import pytest
from tensorferry.mappings.lowbit.companion_names import logical_name, scale_of
from tensorferry.mappings.lowbit.quantisation import resolve
from tensorferry.mappings.lowbit.tensors import StoredTensor


@pytest.mark.parametrize("leaf", ["weight_scale_inv", "weight_scale", "scale_inv", "scale", "qscale_weight"])
@pytest.mark.parametrize("weight", ["weight", "weight_packed"])
def test_every_alias_of_a_modules_scale(weight, leaf):
    names = {f"model.layers.3.mlp.up_proj.{leaf}", "model.layers.3.mlp.down_proj.weight_scale"}
    assert scale_of(f"model.layers.3.mlp.up_proj.{weight}", names) == f"model.layers.3.mlp.up_proj.{leaf}"


@pytest.mark.parametrize("ending", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("parameter", ["mlp.experts.gate_up_proj", "experts.w13_weight", "experts.w2_weight"])
def test_parameters_without_a_module_carry_their_name_in_the_scales(parameter, ending):
    assert scale_of(parameter, {parameter + ending, "mlp.scale"}) == parameter + ending


def test_another_modules_scale_is_not_taken():
    assert scale_of("a.b.weight", {"a.weight_scale", "a.b.c.weight_scale", "a.b_scale", "a.b.input_scale"}) is None


@pytest.mark.parametrize(
    ("stored", "logical"),
    [
        ("a.weight", "a.weight"),
        ("a.weight_packed", "a.weight"),
        ("a.qweight", "a.weight"),
        ("a.experts.down_proj_blocks", "a.experts.down_proj"),
        ("a.experts.w2_weight", "a.experts.w2_weight"),
    ],
)
def test_logical_names(stored, logical):
    assert logical_name(stored) == logical


def _tensors(*entries):
    return {name: StoredTensor(name, dtype, shape, "m.safetensors", 0) for name, dtype, shape in entries}


def test_a_norms_scale_is_a_weight_of_its_own_beside_a_linears_scale():
    found = resolve(
        _tensors(
            ("q_norm.scale", "bfloat16", (7,)),
            ("wo.weight", "float8_e4m3fn", (5, 7)),
            ("wo.scale", "float8_e8m0fnu", (2, 2)),
        ),
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 6]}},
    )
    assert not found.problems
    assert {name: tensor.scheme for name, tensor in found.logical.items()} == {
        "q_norm.scale": "plain",
        "wo.weight": "fp8-block",
    }
    assert found.logical["wo.weight"].stored["scale"].name == "wo.scale"


def test_a_norm_with_weight_and_scale_in_bfloat16_stays_plain():
    found = resolve(_tensors(("norm.scale", "float32", (7,)), ("norm.weight", "bfloat16", (7,))), {})
    assert not found.problems
    assert set(found.logical) == {"norm.scale", "norm.weight"}


def test_two_scales_for_one_weight_are_a_problem():
    found = resolve(
        _tensors(
            ("a.weight", "float8_e4m3fn", (5, 7)),
            ("a.weight_scale", "float32", ()),
            ("a.scale", "float32", ()),
        ),
        {},
    )
    assert [problem.name for problem in found.problems] == ["a.scale"]
    assert "orphan" in str(found.problems[0])
