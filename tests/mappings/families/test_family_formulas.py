"""Families that MaxText's converter cannot convert, or converts only full size: small odd sizes, formulas by hand."""

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from formulas import Shapes
from in_memory import convert, convert_back
from small_gemma import (
    GEMMA4,
    LLAMA4,
    D,
    E,
    F,
    K,
    M,
    N,
    V,
    gemma2_config,
    gemma2_shapes,
    gemma4_shapes,
    gemma4_small_config,
    gemma4_small_shapes,
    llama4_shapes,
)  # fmt: skip
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import FamilyOptions
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.plan.conversion_plan import PlanOptions
from tensorferry.mappings.words.problems import PlanError

Tensors = Mapping[str, np.ndarray]


def tensors_of(shapes: Shapes) -> dict[str, np.ndarray]:
    """Random bfloat16 tensors, all different."""
    random = np.random.default_rng(len(shapes))
    return {name: random.normal(size=shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}


def ferried(
    config: dict[str, Any], tensors: Tensors, scan: bool, chunk_bytes: int = 200, **options: Any
) -> dict[str, np.ndarray]:
    """Converts, converts back, insists on the same bytes, and returns the MaxText arrays."""
    family = make_family(Config(config), tensors, FamilyOptions(scan_layers=scan, **options))
    plan_options = PlanOptions(scan_layers=scan, chunk_bytes=chunk_bytes)
    arrays = convert(family, tensors, plan_options)
    back = convert_back(family, arrays, plan_options)
    assert back.keys() == tensors.keys()
    exact = {name for name in back if back[name].tobytes() == tensors[name].tobytes()}
    assert back.keys() - exact <= {name for name in back if name.endswith("embed_tokens.weight")}
    return arrays


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert np.array_equal(found.astype(np.float32), expected.astype(np.float32))


def stack(tensors: Tensors, name: str, layers: list[int], turn: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """One kind of tensor of some layers, turned one by one, stacked on axis 1."""
    return np.stack([turn(tensors[name.format(layer)]) for layer in layers], axis=1)


# ---- Gemma 4 ----


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_gemma4_scanned(prefix: str) -> None:
    """Two whole cycles in nested stacks, two layers left over; whatever the checkpoint's prefix."""
    tensors = tensors_of(gemma4_shapes(prefix))
    arrays = ferried(GEMMA4, tensors, scan=True)
    local = arrays["params.decoder.scanned_blocks.local_layers.self_attention.query.kernel"]
    full = arrays["params.decoder.scanned_blocks.global_layer.self_attention.key.kernel"]
    rest = arrays["params.decoder.layers_remainder.layers_1.mlp.moe_block.MoeBlock_0.wi_1"]
    assert local.shape == (E, 2, 5, N, D)
    for block in range(2):
        for place in range(5):
            wanted = tensors[f"{prefix}layers.{6 * block + place}.self_attn.q_proj.weight"]
            same(local[:, block, place], wanted.T.reshape(E, N, D))
        same(full[:, block], tensors[f"{prefix}layers.{6 * block + 5}.self_attn.k_proj.weight"].T.reshape(E, 1, 2 * D))
    same(rest, tensors[f"{prefix}layers.13.experts.gate_up_proj"][:, M:].swapaxes(1, 2))
    experts = arrays["params.decoder.scanned_blocks.local_layers.mlp.moe_block.MoeBlock_0.wi_0"]
    same(experts[:, 1, 3], tensors[f"{prefix}layers.9.experts.gate_up_proj"][:, :M].swapaxes(1, 2))
    scalars = arrays["params.decoder.scanned_blocks.local_layers.layer_scalar"]
    assert scalars.shape == (1, 2, 5)
    same(scalars[:, 1, 2], tensors[f"{prefix}layers.8.layer_scalar"])
    scaled = tensors[f"{prefix}embed_tokens.weight"].astype(np.float32) * np.float32(np.sqrt(E))
    same(arrays["params.token_embedder.embedding"], scaled.astype(ml_dtypes.bfloat16))
    assert "params.decoder.scanned_blocks.global_layer.self_attention.value.kernel" not in arrays


def test_gemma4_unrolled() -> None:
    tensors = tensors_of(gemma4_shapes())
    arrays = ferried(GEMMA4, tensors, scan=False)
    layer = "model.language_model.layers.11."
    same(arrays["params.decoder.layers_11.self_attention.out.kernel"],
         tensors[f"{layer}self_attn.o_proj.weight"].T.reshape(N, 2 * D, E))  # fmt: skip
    same(
        arrays["params.decoder.layers_11.mlp.moe_block.MoeBlock_0.gate.kernel"], tensors[f"{layer}router.proj.weight"].T
    )
    same(arrays["params.decoder.layers_11.mlp.pre_forward_scale_2"], tensors[f"{layer}router.scale"])


def test_gemma4_small() -> None:
    """Layers that reuse keys and values have neither; theirs are wider MLPs."""
    tensors = tensors_of(gemma4_small_shapes())
    arrays = ferried(gemma4_small_config(), tensors, scan=False)
    prefix = "model.language_model.layers."
    same(arrays["params.decoder.layers_5.mlp.wo.kernel"], tensors[f"{prefix}5.mlp.down_proj.weight"].T)
    same(arrays["params.decoder.layers_4.per_layer_projection.kernel"],
         tensors[f"{prefix}4.per_layer_projection.weight"].T)  # fmt: skip
    assert "params.decoder.layers_4.self_attention.key.kernel" not in arrays
    assert arrays["params.decoder.layers_2.self_attention.value.kernel"].shape == (E, K, 2 * D)


def test_gemma4_small_leaves_reused_keys_out() -> None:
    """Some checkpoints store keys and values that no layer reads."""
    tensors = tensors_of(gemma4_small_shapes())
    unread = {f"model.language_model.layers.4.self_attn.{n}.weight": np.zeros((3, 5)) for n in ("k_proj", "k_norm")}
    family = make_family(Config(gemma4_small_config()), tensors, FamilyOptions(scan_layers=False))
    arrays = convert(family, {**tensors, **unread}, PlanOptions(scan_layers=False))
    assert "params.decoder.layers_4.self_attention.key.kernel" not in arrays


def test_gemma4_small_is_never_scanned() -> None:
    with pytest.raises(PlanError, match=r"unrolled layers.*--no-scan-layers"):
        make_family(Config(gemma4_small_config()), gemma4_small_shapes(), FamilyOptions(scan_layers=True))


# ---- Llama 4 ----


def test_llama4_scanned() -> None:
    """A dense and a routed layer in turn, stacked by place in a cycle of four."""
    tensors = tensors_of(llama4_shapes())
    arrays = ferried(LLAMA4, tensors, scan=True)
    prefix = "language_model.model.layers.{}."
    layer = "params.decoder.layers.layers_"
    same(
        arrays[f"{layer}2.mlp.wi_1.kernel"],
        stack(tensors, f"{prefix}feed_forward.up_proj.weight", [2, 6], np.transpose),
    )
    routed = f"{layer}3.Llama4MoEBlock_0."
    fused = f"{prefix}feed_forward.experts.gate_up_proj"
    same(arrays[f"{routed}MoeBlock_0.wi_0"], stack(tensors, fused, [3, 7], lambda w: w[..., :M]))
    same(arrays[f"{routed}MoeBlock_0.wi_1"], stack(tensors, fused, [3, 7], lambda w: w[..., M:]))
    same(arrays[f"{routed}MoeBlock_0.wo"],
         stack(tensors, f"{prefix}feed_forward.experts.down_proj", [3, 7], lambda w: w))  # fmt: skip
    same(arrays[f"{routed}shared_experts.wo.kernel"],
         stack(tensors, f"{prefix}feed_forward.shared_expert.down_proj.weight", [3, 7], np.transpose))  # fmt: skip
    same(arrays[f"{layer}0.self_attention.query.kernel"],
         stack(tensors, f"{prefix}self_attn.q_proj.weight", [0, 4], lambda w: w.T.reshape(E, N, D)))  # fmt: skip
    same(arrays["params.decoder.logits_dense.kernel"], tensors["language_model.lm_head.weight"].T)


def test_llama4_unrolled() -> None:
    tensors = tensors_of(llama4_shapes())
    arrays = ferried(LLAMA4, tensors, scan=False)
    same(arrays["params.decoder.layers_5.Llama4MoEBlock_0.MoeBlock_0.gate.kernel"],
         tensors["language_model.model.layers.5.feed_forward.router.weight"].T)  # fmt: skip


def test_llama4_with_rope_in_other_layers_is_refused() -> None:
    text = LLAMA4["text_config"] | {"no_rope_layers": [0, 1, 1, 1] * 2}
    with pytest.raises(PlanError, match=r"no_rope_layers.*no layout to convert to"):
        make_family(Config({**LLAMA4, "text_config": text}), llama4_shapes(), FamilyOptions())


# ---- Gemma 2 ----


@pytest.mark.parametrize(("match_maxtext", "scalar"), [(False, 11), (True, D)])
def test_gemma2_scales_queries_by_what_its_config_says(match_maxtext: bool, scalar: int) -> None:
    """Gemma 2 27B: 144, not its head_dim of 128; MaxText's converter takes head_dim."""
    tensors = tensors_of(gemma2_shapes())
    options = FamilyOptions(scan_layers=True, match_maxtext=match_maxtext)
    family = make_family(Config(gemma2_config()), tensors, options)
    arrays = convert(family, tensors, PlanOptions())
    query = arrays["params.decoder.layers.self_attention_global.query.kernel"][:, 1]
    plain = tensors["model.layers.3.self_attn.q_proj.weight"].T.reshape(E, N, D).astype(np.float32)
    same(query, (plain * np.float32(1 / np.sqrt(scalar))).astype(ml_dtypes.bfloat16))
    norm = arrays["params.decoder.layers.pre_ffw_norm_local.scale"]
    assert norm.dtype == np.float32
    same(norm[:, 1], tensors["model.layers.2.pre_feedforward_layernorm.weight"].astype(np.float32) + 1)


def test_an_odd_number_of_layers_has_no_pairs() -> None:
    with pytest.raises(PlanError, match=r"num_hidden_layers.*a multiple of 2.*found 3"):
        make_family(Config(gemma2_config() | {"num_hidden_layers": 3}), gemma2_shapes(), FamilyOptions())


def test_layers_left_over_are_refused_in_scanned_mode_only() -> None:
    config = {"model_type": "olmo3", "hidden_size": E, "num_attention_heads": N, "num_hidden_layers": 6,
              "vocab_size": V, "intermediate_size": F}  # fmt: skip
    with pytest.raises(PlanError, match=r"cycles of 4 layers; found 6. Convert with --no-scan-layers"):
        make_family(Config(config), [], FamilyOptions(scan_layers=True))
    family = make_family(Config(config), [], FamilyOptions(scan_layers=False))
    names = {name for rule in family.plain_rules(False) for name in [rule.target.pattern(family.dims)]}
    assert "params-decoder-layers_{4..5}-mlp-wo-kernel" in names
    assert not any("remainder" in name for name in names)
