"""DeepSeek where MaxText's converter leaves no values to compare: formulas by hand, odd sizes."""

from typing import Any

import numpy as np
import pytest
from formulas import D, E, M, N, Shapes, V, X, ferried, mlp, same, tensors_of
from in_memory import convert

from mappings.config import Config
from mappings.family import FamilyOptions, make_family
from mappings.plan import PlanOptions, make_plan
from mappings.problems import PlanError
from mappings.tensors import LogicalTensor, StoredTensor

# ---- DeepSeek V4 ----

STREAMS, RANK, GROUPS, O_RANK, HEADS_I, DIM_I, HEAVY, CHOSEN = 2, 7, 2, 3, 5, 4, 9, 2
JOINED, MIX = STREAMS * E, 2 * STREAMS + STREAMS * STREAMS
V4: dict[str, Any] = {
    "model_type": "deepseek_v4", "vocab_size": V, "hidden_size": E, "num_hidden_layers": 7, "num_attention_heads": N,
    "num_key_value_heads": 1, "head_dim": D, "qk_rope_head_dim": 2, "q_lora_rank": RANK, "o_groups": GROUPS,
    "o_lora_rank": O_RANK, "index_n_heads": HEADS_I, "index_head_dim": DIM_I, "index_topk": 8, "hc_mult": STREAMS,
    "moe_intermediate_size": M, "n_routed_experts": X, "n_shared_experts": 1, "num_experts_per_tok": CHOSEN,
    "num_hash_layers": 3, "compress_ratios": [0, 0, 4, HEAVY, 4, HEAVY, 4], "sliding_window": 8,
    "max_position_embeddings": 64, "swiglu_limit": 10.0,
}  # fmt: skip


def v4_shapes() -> Shapes:
    shapes: Shapes = {"embed.weight": (V, E), "norm.weight": (E,), "head.weight": (V, E), "hc_head_scale": (1,),
                      "hc_head_fn": (STREAMS, JOINED), "hc_head_base": (STREAMS,)}  # fmt: skip
    for layer, ratio in enumerate(V4["compress_ratios"]):
        here = f"layers.{layer}."
        leaves: Shapes = {
            "attn_norm.weight": (E,), "ffn_norm.weight": (E,),
            "attn.wq_a.weight": (RANK, E), "attn.q_norm.weight": (RANK,), "attn.wq_b.weight": (N * D, RANK),
            "attn.wkv.weight": (D, E), "attn.kv_norm.weight": (D,), "attn.attn_sink": (N,),
            "attn.wo_a.weight": (GROUPS * O_RANK, N * D // GROUPS), "attn.wo_b.weight": (E, GROUPS * O_RANK),
            "ffn.gate.weight": (X, E),
        }  # fmt: skip
        leaves |= {"ffn.gate.tid2eid": (V, CHOSEN)} if layer < 3 else {"ffn.gate.bias": (X,)}
        for name in ("shared_experts", *(f"experts.{expert}" for expert in range(X))):
            leaves |= {
                f"ffn.{name}.w1.weight": (M, E),
                f"ffn.{name}.w3.weight": (M, E),
                f"ffn.{name}.w2.weight": (E, M),
            }
        for part in ("attn", "ffn"):
            leaves |= {f"hc_{part}_fn": (MIX, JOINED), f"hc_{part}_base": (MIX,), f"hc_{part}_scale": (3,)}
        if ratio:
            leaves |= compressor("attn.compressor.", 2 * D if ratio == 4 else D, D, ratio)
        if ratio == 4:
            leaves |= compressor("attn.indexer.compressor.", 2 * DIM_I, DIM_I, ratio)
            leaves |= {"attn.indexer.weights_proj.weight": (HEADS_I, E),
                       "attn.indexer.wq_b.weight": (HEADS_I * DIM_I, RANK)}  # fmt: skip
        shapes |= {here + name: shape for name, shape in leaves.items()}
    return shapes


def compressor(prefix: str, width: int, normed: int, ratio: int) -> Shapes:
    return {f"{prefix}wgate.weight": (width, E), f"{prefix}wkv.weight": (width, E), f"{prefix}norm.weight": (normed,),
            f"{prefix}ape": (ratio, width)}  # fmt: skip


@pytest.mark.parametrize("scan", [True, False])
def test_deepseek4(scan: bool) -> None:
    tensors = tensors_of(v4_shapes(), float32=("gate.bias", "_fn", "_base", "_scale"))
    arrays = ferried(V4, tensors, scan)

    def leaf(layer: int, name: str, collection: str = "params", axis: int = 1) -> np.ndarray:
        """One layer's part of an array, wherever the mode puts it."""
        if not scan or layer < 3:
            return arrays[f"{collection}.decoder.layers_{layer}.{name}"]
        stacked = arrays[f"{collection}.decoder.scanned_blocks.layers_{(layer - 3) % 2}.{name}"]
        return np.take(stacked, (layer - 3) // 2, axis=axis)

    for layer in range(7):
        here = f"layers.{layer}."
        mix, base, scale = (tensors[f"{here}hc_ffn_{part}"] for part in ("fn", "base", "scale"))
        s = STREAMS
        same(leaf(layer, "mhc_mlp.pre_alpha"), mix[:s].T)
        same(leaf(layer, "mhc_mlp.post_alpha"), mix[s : 2 * s].T)
        same(leaf(layer, "mhc_mlp.res_alpha"), mix[2 * s :].T)
        same(leaf(layer, "mhc_mlp.post_beta"), base[s : 2 * s])
        same(leaf(layer, "mhc_mlp.res_beta"), base[2 * s :].reshape(s, s))
        same(leaf(layer, "mhc_mlp.post_alpha_scale"), scale[1:2])
        same(leaf(layer, "mhc_attention.mhc_norm.scale"), np.ones(JOINED))
        out = tensors[f"{here}attn.wo_a.weight"].reshape(GROUPS, O_RANK, N * D // GROUPS).transpose(0, 2, 1)
        same(leaf(layer, "self_attention.o_a_proj.kernel"), out)
        same(leaf(layer, "self_attention.wkv.kernel"), tensors[f"{here}attn.wkv.weight"].T.reshape(E, 1, D))
        same(leaf(layer, "mlp.MoeBlock_0.wo")[2], tensors[f"{here}ffn.experts.2.w2.weight"].T)
        same(leaf(layer, "mlp.shared_experts.wi_1.kernel"), tensors[f"{here}ffn.shared_experts.w3.weight"].T)
    same(leaf(4, "self_attention.csa_compressor.position_bias"), tensors["layers.4.attn.compressor.ape"])
    same(leaf(6, "self_attention.csa_compressor.indexer.q_proj.kernel"), tensors["layers.6.attn.indexer.wq_b.weight"].T)
    same(leaf(5, "self_attention.hca_compressor.kv_proj.kernel"), tensors["layers.5.attn.compressor.wkv.weight"].T)
    same(leaf(5, "mlp.MoeBlock_0.gate.bias", "MoEBiasVar", axis=0), tensors["layers.5.ffn.gate.bias"])
    table = arrays["Tid2EidVar.decoder.layers_1.mlp.MoeBlock_0.tid2eid"]
    assert table.dtype == np.float32
    same(table, tensors["layers.1.ffn.gate.tid2eid"])


def test_deepseek4_scans_its_own_cycle_only() -> None:
    config = V4 | {"compress_ratios": [0, 0, 4, 4, HEAVY, 4, HEAVY]}
    with pytest.raises(PlanError, match=r"compress_ratios.*--no-scan-layers"):
        make_family(Config(config), v4_shapes(), FamilyOptions(scan_layers=True))
    make_family(Config(config), v4_shapes(), FamilyOptions(scan_layers=False))


# ---- DeepSeek V3 with prediction layers ----

V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": V, "hidden_size": E, "num_hidden_layers": 4, "num_attention_heads": N,
    "intermediate_size": 10, "moe_intermediate_size": M, "first_k_dense_replace": 1, "n_routed_experts": X,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "q_lora_rank": 7, "kv_lora_rank": 8, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 2, "v_head_dim": 9, "topk_method": "noaux_tc", "max_position_embeddings": 64,
    "num_nextn_predict_layers": 2,
}  # fmt: skip


def v3_layer(layer: int) -> Shapes:
    leaves: Shapes = {
        "input_layernorm.weight": (E,), "post_attention_layernorm.weight": (E,),
        "self_attn.q_a_proj.weight": (7, E), "self_attn.q_a_layernorm.weight": (7,),
        "self_attn.q_b_proj.weight": (N * 8, 7), "self_attn.kv_a_proj_with_mqa.weight": (10, E),
        "self_attn.kv_a_layernorm.weight": (8,), "self_attn.kv_b_proj.weight": (N * 15, 8),
        "self_attn.o_proj.weight": (E, N * 9),
    }  # fmt: skip
    if layer == 0:
        leaves |= mlp("mlp.", 10)
    else:
        leaves |= {"mlp.gate.weight": (X, E), "mlp.gate.e_score_correction_bias": (X,)} | mlp("mlp.shared_experts.", M)
        for expert in range(X):
            leaves |= mlp(f"mlp.experts.{expert}.", M)
    return {f"model.layers.{layer}.{name}": shape for name, shape in leaves.items()}


def v3_tensors() -> dict[str, np.ndarray]:
    shapes: Shapes = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,), "lm_head.weight": (V, E)}
    for layer in range(6):
        shapes |= v3_layer(layer)
    for layer in (4, 5):
        here = f"model.layers.{layer}."
        shapes |= {f"{here}enorm.weight": (E,), f"{here}hnorm.weight": (E,), f"{here}eh_proj.weight": (E, 2 * E),
                   f"{here}shared_head.norm.weight": (E,)}  # fmt: skip
    return tensors_of(shapes, float32=("e_score_correction_bias",))


@pytest.mark.parametrize("scan", [True, False])
def test_prediction_layers_are_kept_on_demand(scan: bool) -> None:
    tensors = v3_tensors()
    arrays = ferried(V3, tensors, scan, mtp=True)
    block = "params.mtp_block.mtp_layer_2.mtp_2_"
    same(arrays[f"{block}projection.kernel"], tensors["model.layers.5.eh_proj.weight"].T)
    same(arrays[f"{block}hidden_state_norm.scale"], tensors["model.layers.5.hnorm.weight"])
    layer = f"{block}transformer_layer."
    same(arrays[f"{layer}self_attention.wkv_b.kernel"],
         tensors["model.layers.5.self_attn.kv_b_proj.weight"].T.reshape(8, N, 15))  # fmt: skip
    same(
        arrays[f"{layer}DeepSeekMoeBlock_0.MoeBlock_0.wi_1"][1],
        tensors["model.layers.5.mlp.experts.1.up_proj.weight"].T,
    )


def test_prediction_layers_are_left_out_with_a_reason() -> None:
    tensors = {n: LogicalTensor.plain(StoredTensor(n, "bfloat16", t.shape, "f", 0)) for n, t in v3_tensors().items()}
    plan = make_plan(make_family(Config(V3), tensors, FamilyOptions()), tensors, PlanOptions())
    assert not plan.problems
    assert plan.account.ignored.keys() == {n for n in tensors if n.startswith(("model.layers.4.", "model.layers.5."))}
    assert all("--mtp" in why for why in plan.account.ignored.values())


def test_router_bias_stays_float32() -> None:
    """By default; MaxText's converter rounds it."""
    tensors = v3_tensors()
    for match, dtype in ((False, "float32"), (True, "bfloat16")):
        family = make_family(Config(V3), tensors, FamilyOptions(match_maxtext=match))
        arrays = convert(family, tensors, PlanOptions())
        bias = arrays["params.decoder.moe_layers.DeepSeekMoeBlock_0.MoeBlock_0.gate.bias"]
        assert bias.dtype.name == dtype
        wanted = np.stack([tensors[f"model.layers.{n}.mlp.gate.e_score_correction_bias"] for n in (1, 2, 3)])
        same(bias, wanted.astype(bias.dtype))
