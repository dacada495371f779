"""An adapter moved alone, then merged in MaxText's layout, equals the merged weights moved: every kind of kernel."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from adapters import PREFIX, factors, merged, merged_kernels
from checkpoints import llama_config, qwen3_moe_config, qwen3_moe_tensors
from in_memory import convert, convert_back
from small_family import headers, small_family
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.lora.adapter_family import AdapterFamily, Wish, adapter_family
from tensorferry.mappings.plan.conversion_plan import PlanOptions

RANK, SCALE = 5, 0.6
GEMMA: dict[str, Any] = {
    "hidden_size": 10, "intermediate_size": 14, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
    "vocab_size": 22, "query_pre_attn_scalar": 24, "rope_theta": 10000.0, "sliding_window": 8,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 10, "vocab_size": 22, "num_hidden_layers": 5,
    "first_k_dense_replace": 2, "intermediate_size": 14, "moe_intermediate_size": 7, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "num_attention_heads": 3, "num_key_value_heads": 3,
    "q_lora_rank": 8, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 11,
    "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "routed_scaling_factor": 1.0,
    "norm_topk_prob": True, "max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
LATENT = tuple(f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
SHARED = tuple(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down"))


def layers(numbers: Iterable[int], *modules: str) -> tuple[str, ...]:
    return tuple(f"model.layers.{number}.{module}" for number in numbers for module in modules)


CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama3, lanes interleaved": (llama_config(), (*layers(range(3), *ATTENTION, *MLP), "lm_head")),
    "llama2, lanes split": (llama_config(rope_scaling=None), layers(range(3), *ATTENTION, *MLP)),
    "gemma2, two layers a cycle, queries scaled": (
        GEMMA | {"model_type": "gemma2", "num_hidden_layers": 6},
        layers(range(6), *ATTENTION, *MLP),
    ),
    "gemma3, a remainder": (
        GEMMA | {"model_type": "gemma3_text", "num_hidden_layers": 8},
        layers(range(8), *ATTENTION),
    ),
    "deepseek, two blocks, latent attention": (
        DEEPSEEK,
        (*layers(range(5), *LATENT), *layers(range(2), *MLP), *layers(range(2, 5), *SHARED)),
    ),
}


def family_of(config: dict[str, Any], scan: bool) -> Family:
    return make_family(Config(config), (), FamilyOptions(scan_layers=scan))


def weights_of(family: Family) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    return {name: random.normal(size=t.shape).astype(np.float32) for name, t in headers(family).items()}


def adapted(family: Family, modules: Iterable[str], scan: bool) -> AdapterFamily:
    wish = Wish.of_weights({f"{module}.weight": 1.0 for module in modules})
    found, problems = adapter_family(family, scan, RANK, wish)
    assert not problems
    assert sorted(found.modules) == sorted(modules)
    return found


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("case", CASES)
def test_equals_merged_weights(case, scan):
    config, modules = CASES[case]
    family, options = family_of(config, scan), PlanOptions(scan, "float32", chunk_bytes=300)
    weights = weights_of(family)
    adapter = factors(weights, modules, RANK)
    moved = convert(adapted(family, modules, scan), adapter, options)
    assert len(moved) == 2 * len({name.rpartition("_lora_")[0] for name in moved})
    ours = merged_kernels(convert(family, weights, options), moved, SCALE, scan)
    wanted = convert(family, merged(weights, adapter, dict.fromkeys(modules, SCALE)), options)
    assert ours.keys() == wanted.keys()
    changed = 0
    for name, kernel in wanted.items():
        np.testing.assert_allclose(ours[name], kernel, rtol=2e-6, atol=2e-5, err_msg=name)
        changed += name.endswith("kernel")
    assert changed >= len(moved) // 2


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case, scan):
    config, modules = CASES[case]
    family, options = family_of(config, scan), PlanOptions(scan, "source", chunk_bytes=300)
    adapter = factors(weights_of(family), modules, RANK)
    found = adapted(family, modules, scan)
    back = convert_back(found, convert(found, adapter, options), options)
    assert back.keys() == adapter.keys()
    for name, array in adapter.items():
        if "q_proj.lora_B" in name and "deepseek" not in case and "gemma3" not in case:
            # The factor, its inverse and two products are each rounded to float32.
            np.testing.assert_array_max_ulp(back[name], array, 2)
        else:
            assert back[name].tobytes() == array.tobytes(), name


def test_shapes_are_those_of_qwix():
    # As MaxText 0.2.5 itself declared them for a model of these sizes.
    modules = layers(range(3), *ATTENTION, *MLP)
    family = family_of(llama_config(), scan=True)
    adapter = factors(weights_of(family), modules, RANK)
    moved = convert(adapted(family, modules, True), adapter, PlanOptions(True, "source"))
    shapes = {name.removeprefix("params.decoder.layers."): array.shape for name, array in moved.items()}
    for name, into, out in (
        ("self_attention.query", 10, 48), ("self_attention.key", 10, 16), ("self_attention.value", 10, 16),
        ("self_attention.out", 48, 10), ("mlp.wi_0", 10, 14), ("mlp.wi_1", 10, 14), ("mlp.wo", 14, 10),
    ):  # fmt: skip
        assert shapes.pop(f"{name}.kernel_lora_a") == (into, 3, RANK)
        assert shapes.pop(f"{name}.kernel_lora_b") == (RANK, 3, out)
    assert not shapes


def test_layers_without_an_adapter_are_zero_when_stacked():
    modules = layers((0, 2), *ATTENTION)
    family = family_of(llama_config(), scan=True)
    adapter = factors(weights_of(family), modules, RANK)
    moved = convert(adapted(family, modules, True), adapter, PlanOptions(True, "source"))
    for name, array in moved.items():
        assert not array[:, 1].any(), name
        assert array[:, 0].any(), name
        assert array[:, 2].any(), name


def test_layers_without_an_adapter_have_no_array_when_unrolled():
    modules = layers((0, 2), *ATTENTION)
    family = family_of(llama_config(), scan=False)
    adapter = factors(weights_of(family), modules, RANK)
    found = adapted(family, modules, False)
    moved = convert(found, adapter, PlanOptions(False, "source"))
    assert {name.split(".")[2] for name in moved} == {"layers_0", "layers_2"}
    back = convert_back(found, moved, PlanOptions(False, "source"))
    assert back.keys() == adapter.keys()


def test_a_factor_goes_to_b_alone():
    modules = layers(range(3), "self_attn.q_proj")
    family = family_of(llama_config(), scan=True)
    wish = Wish.of_weights({f"{module}.weight": 0.5 for module in modules})
    found, _ = adapter_family(family, True, RANK, wish)
    a, b = found.plain
    assert not a.ops
    (scale,) = b.ops
    assert scale.to_json() == {"op": "scale", "factor": 0.5 / np.sqrt(8)}


@pytest.mark.parametrize(
    ("modules", "path"),
    [
        (layers(range(3), *MLP), "decoder/layers/mlp/(wi_0|wi_1|wo)"),
        (layers(range(3), "self_attn.v_proj"), "decoder/layers/self_attention/value"),
        (("lm_head", *layers((1,), "mlp.up_proj")), "decoder/logits_dense|decoder/layers/mlp/wi_1"),
    ],
)
def test_module_path(modules, path):
    found = adapted(family_of(llama_config(), True), modules, True)
    assert found.module_path == path


def test_module_path_of_unrolled_layers():
    found = adapted(family_of(llama_config(), False), layers(range(3), *MLP), False)
    assert found.module_path == "decoder/layers_[0-9]+/mlp/(wi_0|wi_1|wo)"
    found = adapted(family_of(llama_config(), False), layers((0, 2), "mlp.up_proj"), False)
    assert found.module_path == "decoder/layers_0/mlp/wi_1|decoder/layers_2/mlp/wi_1"


@pytest.mark.parametrize(
    ("numbers", "path"),
    [
        (range(8), "decoder/layers_[0-9]+/self_attention/query"),
        # All layers of one place in the cycle of six, for which one rule stands, are not all layers.
        ((0, 6), "decoder/layers_0/self_attention/query|decoder/layers_6/self_attention/query"),
    ],
)
def test_module_path_of_layers_in_cycles(numbers, path):
    config, _ = CASES["gemma3, a remainder"]
    assert adapted(family_of(config, False), layers(numbers, "self_attn.q_proj"), False).module_path == path


def refusals(family: Family, scan: bool, *weights: str) -> list[str]:
    return [
        str(problem) for problem in adapter_family(family, scan, RANK, Wish.of_weights(dict.fromkeys(weights, 1.0)))[1]
    ]


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_what_has_no_factors_is_named(scan):
    moe = make_family(Config(qwen3_moe_config()), qwen3_moe_tensors(), FamilyOptions(scan_layers=scan))
    (said,) = refusals(moe, scan, "model.layers.1.mlp.experts.2.up_proj.weight")
    assert said.startswith("model.layers.1.mlp.experts.2.up_proj: expected a module of which MaxText's model can hold")
    (said,) = refusals(family_of(llama_config(), scan), scan, "model.embed_tokens.weight")
    assert "model.embed_tokens: expected" in said
    assert "found embedding in MaxText's model, which is no kernel" in said
    assert "merge with convert --lora" in said
    (said,) = refusals(family_of(llama_config(), scan), scan, "model.layers.2.input_layernorm.weight")
    assert "found scale in MaxText's model, which is no kernel" in said


def test_fused_weights_are_refused():
    family = small_family()
    rules = [replace(r, target=r.target.replace("-query", "-query-kernel")) for r in family.rules]
    said = refusals(replace(family, rules=tuple(rules)), True, "model.layers.0.qkv.weight")
    assert len(said) == 1
    assert "a fused weight, of which MaxText's model has the parts" in said[0]
    assert PREFIX not in said[0]
