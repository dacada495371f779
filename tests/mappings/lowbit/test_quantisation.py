"""Every stored tensor is plain, a role, ignored with a reason, or a problem that says what to do."""

import struct
import time

import pytest
from pace import pace
from tensorferry.mappings.lowbit.quantisation import resolve
from tensorferry.mappings.lowbit.tensors import StoredTensor

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def tensors(*entries):
    """(name, dtype, shape), each in a file of its own."""
    return {
        name: StoredTensor(name, dtype, shape, f"model-{k}.safetensors", 0)
        for k, (name, dtype, shape) in enumerate(entries)
    }


def compressed(*weights, **more):
    groups = {
        f"group_{k}": {"targets": list(w.pop("targets", ["Linear"])), "weights": {"symmetric": True, **w}}
        for k, w in enumerate(dict(w) for w in weights)
    }
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups, **more}}


def the_problem(found):
    assert len(found.problems) == 1, [str(p) for p in found.problems]
    return str(found.problems[0])


WEIGHT = ("a.weight", "float8_e4m3fn", (576, 7168))
SCALE = ("a.weight_scale_inv", "float32", (5, 56))
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def test_roles_are_joined_across_shards():
    found = resolve(tensors(WEIGHT, SCALE, ("norm.weight", "bfloat16", (7168,))), FP8)
    assert not found.problems
    weight = found.logical["a.weight"]
    assert (weight.scheme, weight.dtype, weight.shape) == ("fp8-block", "float32", (576, 7168))
    assert {role: stored.file for role, stored in weight.stored.items()} == {
        "values": "model-0.safetensors",
        "scale": "model-1.safetensors",
    }
    assert found.logical["norm.weight"].scheme == "plain"
    assert found.summary["schemes"] == {"fp8-block": 1, "plain": 1}


# ---- refusals, by their words


def test_one_byte_weight_without_a_scale():
    words = the_problem(resolve(tensors(WEIGHT), FP8))
    assert words.startswith("a.weight (in model-0.safetensors): expected a scale beside the float8_e4m3fn weight")
    assert "weight_scale_inv" in words
    assert "found no scale in any file" in words


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e5m2", "float8_e4m3fnuz"])
def test_any_one_byte_weight_needs_a_scale(dtype):
    assert "no scale in any file" in the_problem(resolve(tensors(("a.weight", dtype, (4, 6))), {}))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("a.weight_scale_inv", "float32"),
        ("a.weight_scale", "bfloat16"),
        ("a.weight_scale_2", "float32"),
        ("a.weight_global_scale", "float32"),
        ("experts.up_proj_scale_inv", "float32"),
        ("a.scale", "float8_e8m0fnu"),
        ("experts.gate_up_proj_scales", "uint8"),
        ("a.SCB", "float32"),
    ],
)
def test_orphan_scale(name, dtype):
    words = the_problem(resolve(tensors((name, dtype, (5, 7)), ("a.weight", "bfloat16", (50, 70))), {}))
    assert words.startswith(f"{name} (in model-0.safetensors): expected a quantised weight that uses it")
    assert "orphan" in words
    assert "no weight consumed" in words


def test_grid_that_does_not_match_the_shape_over_the_block():
    words = the_problem(resolve(tensors(WEIGHT, ("a.weight_scale_inv", "float32", (4, 56))), FP8))
    assert "ceil([576, 7168] / block) = [5, 56] for block [128, 128]" in words
    assert "quantization_config in config.json" in words
    assert "float32 [4, 56]" in words


def test_block_size_is_never_deduced_from_the_grid():
    words = the_problem(resolve(tensors(WEIGHT, SCALE), {"quantization_config": {"quant_method": "fp8"}}))
    assert "block size" in words
    assert "[5, 56]" in words
    assert "cannot be deduced" in words


def test_parts_whose_widths_are_unknown():
    found = resolve(tensors(("a.proj.weight", "float8_e4m3fn", (9, 7)), ("a.proj.weight_scale", "float32", (3,))), {})
    assert "one per part of a fused matrix" in the_problem(found)


def test_swizzled_nvfp4_scale():
    found = resolve(
        tensors(
            ("a.weight", "uint8", (8, 32)),
            ("a.weight_scale", "uint8", (512,)),
            ("a.weight_scale_2", "float32", ()),
        ),
        {},
    )
    words = the_problem(found)
    assert words.startswith("a.weight_scale")
    assert "swizzled" in words
    assert "one-dimensional uint8 [512]" in words


def test_packed_shape_that_disagrees_with_the_config():
    found = resolve(
        tensors(("a.weight_packed", "int32", (5, 8)), ("a.weight_scale", "bfloat16", (5, 4))), compressed(INT4)
    )
    words = the_problem(found)
    assert "packed shape disagrees" in words
    assert "group_size 32" in words
    assert "bfloat16 [5, 4]" in words


@pytest.mark.parametrize("dims", [(4, 6, 6)])
def test_square_experts_with_an_ambiguous_scale_axis(dims):
    found = resolve(
        tensors(("experts.up_proj", "float8_e4m3fn", dims), ("experts.up_proj_scale", "float32", (4, 6))), {}
    )
    words = the_problem(found)
    assert "axes 1 and 2 are equally long" in words
    assert "Ambiguous scale axis" in words


UNSUPPORTED = (
    *("hqq", "aqlm", "vptq", "spqr", "eetq", "quanto", "higgs", "fp_quant", "bitnet", "torchao", "gguf"),
    *("gemma", "auto-round", "metal", "sinq", "fouroversix"),
)
SUPPORTED = ("awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt", "mxfp4", "quark")


@pytest.mark.parametrize("method", UNSUPPORTED)
def test_other_methods_are_refused_by_name_with_what_is_supported(method):
    found = resolve(tensors(("a.weight", "bfloat16", (4, 6))), {"quantization_config": {"quant_method": method}})
    words = the_problem(found)
    assert f"{method} is not supported" in words
    for name in (
        "awq",
        "bitsandbytes",
        "compressed-tensors",
        "fbgemm_fp8",
        "fp8",
        "gptq",
        "modelopt",
        "mxfp4",
        "quark",
    ):
        assert name in words
    assert found.logical == {}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ version gemv"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "GPTQ checkpoint_format marlin"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "modelopt quant_algo W4A16_AWQ"),
        ({"quant_method": "quark", "export": {"pack_method": "reorder"}}, "Quark pack_method reorder"),
    ],
)
def test_variants_are_refused_by_name(section, words):
    found = resolve(tensors(("a.weight", "bfloat16", (4, 6))), {"quantization_config": section})
    assert words in the_problem(found)


def test_a_factor_on_the_activations_is_not_dropped():
    found = resolve(tensors(("a.pre_quant_scale", "float32", (6,)), ("a.weight", "bfloat16", (4, 6))), {})
    assert "Dropping it would change the model" in the_problem(found)


def test_nvfp4_without_its_global_scale():
    found = resolve(tensors(("a.weight_packed", "uint8", (4, 16)), ("a.weight_scale", "float8_e4m3fn", (4, 2))), {})
    assert "weight_global_scale" in the_problem(found)


# ---- header and config


@pytest.mark.parametrize(
    ("entries", "config", "both"),
    [
        (
            [("a.weight", "float8_e4m3fn", (4, 6)), ("a.weight_scale", "bfloat16", (4, 1))],
            compressed(INT4),
            ("num_bits 4", "float8_e4m3fn [4, 6]"),
        ),
        (
            [("a.weight", "float8_e4m3fn", (4, 6)), ("a.weight_scale", "bfloat16", (4, 1))],
            compressed({"num_bits": 8, "type": "float", "strategy": "tensor"}),
            ("strategy tensor", "bfloat16 [4, 1]"),
        ),
        (
            [
                ("a.weight", "uint8", (4, 16)),
                ("a.weight_scale", "float8_e4m3fn", (4, 2)),
                ("a.weight_scale_2", "float32", ()),
            ],
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
            ("quant_algo FP8", "uint8 [4, 16]"),
        ),
        (
            [("a.weight", "float8_e4m3fn", (256, 384)), ("a.weight_scale", "float32", (256, 1))],
            FP8,
            ("[2, 3] for block [128, 128]", "float32 [256, 1]"),
        ),
        (
            [
                ("a.qweight", "int32", (4, 32)),
                ("a.qzeros", "int32", (1, 4)),
                ("a.scales", "float16", (1, 32)),
                ("a.g_idx", "int32", (32,)),
            ],
            {"quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": 32}},
            ("bits 8", "int32 [4, 32]"),
        ),
        (
            [("a.qweight", "int32", (32, 4)), ("a.qzeros", "int32", (1, 4)), ("a.scales", "float16", (1, 32))],
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
            ("bits 4", "the layout of AWQ"),
        ),
    ],
)
def test_a_disagreement_shows_both(entries, config, both):
    words = the_problem(resolve(tensors(*entries), config))
    for fact in both:
        assert fact in words


def test_a_stale_config_over_bfloat16_weights_is_harmless():
    found = resolve(tensors(("a.weight", "bfloat16", (4, 6))), FP8)
    assert not found.problems
    assert found.logical["a.weight"].scheme == "plain"


@pytest.mark.parametrize("status", ["frozen", "compressed", "initialized"])
def test_the_status_word_means_nothing(status):
    config = compressed({"num_bits": 8, "type": "float", "strategy": "channel"}, quantization_status=status)
    found = resolve(tensors(("a.weight", "float8_e4m3fn", (4, 6)), ("a.weight_scale", "bfloat16", (4, 1))), config)
    assert not found.problems
    assert found.logical["a.weight"].scheme == "fp8-channel"


def test_two_schemes_in_one_layer():
    config = {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "layers.0.shared": {"quant_algo": "MXFP8", "group_size": 32},
                "layers.0.experts.0": {"quant_algo": "NVFP4", "group_size": 16},
            },
        }
    }
    found = resolve(
        tensors(
            ("model.layers.0.shared.weight", "float8_e4m3fn", (5, 96)),
            ("model.layers.0.shared.weight_scale", "uint8", (5, 3)),
            ("model.layers.0.experts.0.weight", "uint8", (5, 24)),
            ("model.layers.0.experts.0.weight_scale", "float8_e4m3fn", (5, 3)),
            ("model.layers.0.experts.0.weight_scale_2", "float32", ()),
        ),
        config,
    )
    assert not found.problems
    assert [tensor.scheme for tensor in found.logical.values()] == ["mxfp8", "nvfp4"]


@pytest.mark.parametrize(
    "section",
    [
        {"config": {"quantization_config": FP8["quantization_config"]}},
        {"config": {"text_config": {"quantization_config": FP8["quantization_config"]}}},
        {"config": {"compression_config": FP8["quantization_config"]}},
    ],
)
def test_the_section_may_be_nested(section):
    found = resolve(tensors(WEIGHT, SCALE), section["config"])
    assert not found.problems
    assert found.logical["a.weight"].params["blocks"] == [128, 128]


def test_hf_quant_config_file():
    files = {"hf_quant_config.json": {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}}
    found = resolve(tensors(("a.weight", "float8_e4m3fn", (4, 6)), ("a.weight_scale", "float32", ())), {}, files)
    assert not found.problems
    assert (found.quant.method, found.logical["a.weight"].scheme) == ("modelopt", "fp8-tensor")


# ---- ignored, never silently


IGNORED = (
    *("a.input_scale", "a.activation_scale", "a.input_global_scale", "a.input_scale_ub", "a.qscale_act"),
    *("attn.k_scale", "attn.k_proj.k_scale", "attn.qkv_proj.v_scale", "attn.kv_scale", "attn.q_scale"),
    *("attn.prob_scale", "attn.k_proj.output_scale"),
)


@pytest.mark.parametrize("name", IGNORED)
def test_activation_and_cache_scales_are_ignored_with_a_reason(name):
    found = resolve(tensors(WEIGHT, SCALE, (name, "float32", ())), FP8)
    assert not found.problems
    assert [ignored for ignored, _ in found.ignored] == [name]
    assert "run time" in found.ignored[0][1]
    assert name not in found.logical


def test_ignored_tensors_are_counted():
    extra = [(f"layers.{k}.input_scale", "float32", ()) for k in range(3)]
    found = resolve(tensors(WEIGHT, SCALE, *extra), FP8)
    assert list(found.summary["ignored"].values()) == [3]


def test_without_any_quantisation_such_names_are_ordinary():
    found = resolve(tensors(("head.output_scale", "float32", (7,))), {})
    assert found.logical["head.output_scale"].scheme == "plain"
    assert not found.ignored


def test_byte_tensors_that_are_no_weights_stay_plain():
    found = resolve(tensors(("mask", "uint8", (4, 6)), ("table.ids", "int8", (9,))), {})
    assert not found.problems
    assert {t.scheme for t in found.logical.values()} == {"plain"}


def test_two_weights_of_one_name():
    found = resolve(
        tensors(
            ("a.weight", "bfloat16", (4, 96)),
            ("a.weight_packed", "uint8", (4, 48)),
            ("a.weight_scale", "uint8", (4, 3)),
        ),
        {},
    )
    assert "also a.weight_packed" in the_problem(found)


def test_every_stored_tensor_is_accounted_for_once():
    repo = tensors(
        WEIGHT,
        SCALE,
        ("norm.weight", "bfloat16", (7,)),
        ("a.input_scale", "float32", ()),
        ("b.weight", "float8_e4m3fn", (5, 6)),
        ("c.weight_scale", "float32", ()),
    )
    found = resolve(repo, FP8)
    roles = [stored.name for tensor in found.logical.values() for stored in tensor.stored.values()]
    told = roles + [name for name, _ in found.ignored] + [problem.name for problem in found.problems]
    assert sorted(told) == sorted(repo)


def test_packed_shapes_are_read_once_per_form_and_tell_the_true_width():
    asked = []

    def peek(wanted):
        asked.extend(tensor.name for tensor in wanted)
        return {name: struct.pack("<2q", 5, 45) for name in asked}

    repo = tensors(
        *(
            entry
            for k in range(3)
            for entry in (
                (f"e.{k}.weight_packed", "int32", (5, 6)),
                (f"e.{k}.weight_scale", "bfloat16", (5, 2)),
                (f"e.{k}.weight_shape", "int64", (2,)),
            )
        )
    )
    found = resolve(repo, compressed(INT4), {}, peek)
    assert asked == ["e.0.weight_shape"]
    assert [tensor.shape for tensor in found.logical.values()] == [(5, 45)] * 3
    assert [tensor.shape for tensor in resolve(repo, compressed(INT4)).logical.values()] == [(5, 48)] * 3


def test_bitsandbytes_needs_its_state_to_be_read():
    repo = tensors(("a.weight", "uint8", (24, 1)), ("a.weight.quant_state.bitsandbytes__nf4", "uint8", (90,)))
    assert "quant_state.bitsandbytes__nf4" in the_problem(resolve(repo, {}))


def test_a_hundred_thousand_plain_tensors_cost_a_fraction_of_a_second():
    many = tensors(*((f"layers.{k // 100}.experts.{k % 100}.up.weight", "bfloat16", (7, 9)) for k in range(100_000)))
    start = time.process_time()
    found = resolve(many, {})
    assert len(found.logical) == 100_000
    assert time.process_time() - start < 1.0 * pace()


@pytest.mark.parametrize(("bits", "columns"), [(3, 10), (5, 6), (6, 5), (7, 4)])
def test_a_packing_is_never_guessed(bits, columns):
    """Columns that fill one word by either packing tell nothing; more of them do."""
    config = compressed({"num_bits": bits, "type": "int", "strategy": "channel"})

    def found(columns, words):
        entries = tensors(
            ("a.weight_packed", "int32", (5, words)),
            ("a.weight_scale", "bfloat16", (5, 1)),
            ("a.weight_shape", "int64", (2,)),
        )
        return resolve(entries, config, {}, lambda asked: {t.name: struct.pack("<2q", 5, columns) for t in asked})

    assert "leave the packing ambiguous" in the_problem(found(columns, 1))
    stream, whole = -(-64 * bits // 32), -(-64 // (32 // bits))
    assert found(64, stream).logical["a.weight"].params["per_word"] == 0
    assert found(64, whole).logical["a.weight"].params["per_word"] == 32 // bits
    assert "disagrees with the config" in the_problem(found(64, whole + 1))
