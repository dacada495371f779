"""Config and tensors of small DeepSeek checkpoints: V4, and V3 with prediction layers."""

from typing import Any

import numpy as np
from formulas import D, E, M, N, Shapes, V, X, mlp, tensors_of

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
