"""Config and shapes of small Gemma 2, Gemma 4 and Llama 4 checkpoints."""

from typing import Any

from formulas import Shapes

E, N, K, D, F, V, X, M = 12, 4, 2, 6, 10, 14, 3, 5


def attention(prefix: str, kv: int, dim: int) -> Shapes:
    return {
        f"{prefix}q_proj.weight": (N * dim, E),
        f"{prefix}k_proj.weight": (kv * dim, E),
        f"{prefix}v_proj.weight": (kv * dim, E),
        f"{prefix}o_proj.weight": (E, N * dim),
    }


# ---- Gemma 4 ----

GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": E, "num_attention_heads": N, "num_key_value_heads": K, "head_dim": D, "intermediate_size": F,
    "vocab_size": V, "num_hidden_layers": 14, "global_head_dim": 2 * D, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": X,
    "moe_intermediate_size": M, "top_k_experts": 2, "rms_norm_eps": 1e-6, "sliding_window": 8,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2 + ["sliding_attention"] * 2,
}  # fmt: skip


def gemma4_shapes(prefix: str = "model.language_model.") -> Shapes:
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (V, E), f"{prefix}norm.weight": (E,)}
    for layer, kind in enumerate(GEMMA4["layer_types"]):
        here, full = f"{prefix}layers.{layer}.", kind == "full_attention"
        dim = 2 * D if full else D
        shapes |= attention(f"{here}self_attn.", 1 if full else K, dim)
        if full:
            del shapes[f"{here}self_attn.v_proj.weight"]
        norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                 "post_feedforward_layernorm", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_1",
                 "post_feedforward_layernorm_2")  # fmt: skip
        shapes |= {f"{here}{norm}.weight": (E,) for norm in norms}
        shapes |= {f"{here}self_attn.{short}_norm.weight": (dim,) for short in "qk"}
        shapes |= {f"{here}mlp.{name}_proj.weight": (F, E) for name in ("gate", "up")}
        shapes |= {f"{here}mlp.down_proj.weight": (E, F), f"{here}layer_scalar": (1,)}
        shapes |= {f"{here}router.proj.weight": (X, E), f"{here}router.scale": (E,),
                   f"{here}router.per_expert_scale": (X,), f"{here}experts.gate_up_proj": (X, 2 * M, E),
                   f"{here}experts.down_proj": (X, E, M)}  # fmt: skip
    return shapes


def gemma4_small_config() -> dict[str, Any]:
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    changes = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": V, "num_kv_shared_layers": 3,
               "use_double_wide_mlp": True, "num_hidden_layers": 6, "layer_types": kinds * 2,
               "attention_k_eq_v": False, "enable_moe_block": False, "num_global_key_value_heads": None}  # fmt: skip
    return GEMMA4 | changes


def gemma4_small_shapes() -> Shapes:
    prefix = "model.language_model."
    shapes: Shapes = {
        f"{prefix}embed_tokens.weight": (V, E), f"{prefix}norm.weight": (E,),
        f"{prefix}embed_tokens_per_layer.weight": (V, 24), f"{prefix}per_layer_model_projection.weight": (24, E),
        f"{prefix}per_layer_projection_norm.weight": (4,),
    }  # fmt: skip
    for layer in range(6):
        here, dim, own = f"{prefix}layers.{layer}.", 2 * D if layer % 3 == 2 else D, layer < 3
        wide = F if own else 2 * F
        found = attention(f"{here}self_attn.", K, dim)
        found |= {f"{here}self_attn.{short}_norm.weight": (dim,) for short in "qk"}
        shapes |= {n: s for n, s in found.items() if own or not any(f".{k}" in n for k in ("k_", "v_"))}
        norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                 "post_feedforward_layernorm", "post_per_layer_input_norm")  # fmt: skip
        shapes |= {f"{here}{norm}.weight": (E,) for norm in norms}
        shapes |= {f"{here}mlp.{name}_proj.weight": (wide, E) for name in ("gate", "up")}
        shapes |= {f"{here}mlp.down_proj.weight": (E, wide), f"{here}layer_scalar": (1,),
                   f"{here}per_layer_input_gate.weight": (4, E),
                   f"{here}per_layer_projection.weight": (E, 4)}  # fmt: skip
    return shapes


# ---- Llama 4 ----

LLAMA4: dict[str, Any] = {
    "model_type": "llama4",
    "text_config": {
        "hidden_size": E, "num_attention_heads": N, "num_key_value_heads": K, "head_dim": D, "intermediate_size": M,
        "intermediate_size_mlp": F, "vocab_size": V, "num_hidden_layers": 8, "num_local_experts": X,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 1, 0] * 2,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
    },
}  # fmt: skip


def llama4_shapes() -> Shapes:
    prefix = "language_model.model."
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (V, E), f"{prefix}norm.weight": (E,),
                      "language_model.lm_head.weight": (V, E)}  # fmt: skip
    for layer in range(8):
        here = f"{prefix}layers.{layer}."
        feed, width = f"{here}feed_forward.", F if layer % 2 == 0 else M
        shapes |= attention(f"{here}self_attn.", K, D)
        shapes |= {f"{here}{norm}_layernorm.weight": (E,) for norm in ("input", "post_attention")}
        mlp = feed if layer % 2 == 0 else f"{feed}shared_expert."
        shapes |= {f"{mlp}{name}_proj.weight": (width, E) for name in ("gate", "up")}
        shapes[f"{mlp}down_proj.weight"] = (E, width)
        if layer % 2:
            shapes |= {f"{feed}router.weight": (X, E), f"{feed}experts.gate_up_proj": (X, E, 2 * M),
                       f"{feed}experts.down_proj": (X, M, E)}  # fmt: skip
    return shapes


# ---- Gemma 2 ----


def gemma2_config() -> dict[str, Any]:
    return {"model_type": "gemma2", "hidden_size": E, "num_attention_heads": N, "num_key_value_heads": K,
            "head_dim": D, "intermediate_size": F, "vocab_size": V, "num_hidden_layers": 4,
            "query_pre_attn_scalar": 11, "rms_norm_eps": 1e-6}  # fmt: skip


def gemma2_shapes() -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,)}
    for layer in range(4):
        here = f"model.layers.{layer}."
        shapes |= attention(f"{here}self_attn.", K, D)
        norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                 "post_feedforward_layernorm")  # fmt: skip
        shapes |= {f"{here}{norm}.weight": (E,) for norm in norms}
        shapes |= {f"{here}mlp.{name}_proj.weight": (F, E) for name in ("gate", "up")}
        shapes[f"{here}mlp.down_proj.weight"] = (E, F)
    return shapes
