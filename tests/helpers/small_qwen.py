"""Config and shapes of small Qwen3-VL and Qwen3-Omni checkpoints."""

from collections.abc import Callable

from formulas import D, E, M, N, Shapes, V, X, mlp

DEPTH, VE, VH, VM, PATCH, FRAMES, PLACES = 3, 8, 2, 9, 3, 2, 11
VISION = {"depth": DEPTH, "hidden_size": VE, "num_heads": VH, "intermediate_size": VM, "patch_size": PATCH,
          "temporal_patch_size": FRAMES, "in_channels": 3, "spatial_merge_size": 2, "out_hidden_size": E,
          "num_position_embeddings": PLACES, "deepstack_visual_indexes": [0, 2]}  # fmt: skip
TEXT = {"vocab_size": V, "hidden_size": E, "num_hidden_layers": 3, "num_attention_heads": N, "num_key_value_heads": 2,
        "head_dim": D, "moe_intermediate_size": M, "num_experts": X, "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
        "rope_scaling": {"mrope_section": [1, 1, 1], "rope_type": "default"}}  # fmt: skip


def text_shapes(prefix: str, experts: Callable[[str], Shapes]) -> Shapes:
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (V, E), f"{prefix}norm.weight": (E,)}
    for layer in range(3):
        here = f"{prefix}layers.{layer}."
        shapes |= {
            f"{here}input_layernorm.weight": (E,), f"{here}post_attention_layernorm.weight": (E,),
            f"{here}self_attn.q_proj.weight": (N * D, E), f"{here}self_attn.k_proj.weight": (2 * D, E),
            f"{here}self_attn.v_proj.weight": (2 * D, E), f"{here}self_attn.o_proj.weight": (E, N * D),
            f"{here}self_attn.q_norm.weight": (D,), f"{here}self_attn.k_norm.weight": (D,),
            f"{here}mlp.gate.weight": (X, E),
        } | experts(f"{here}mlp.experts.")  # fmt: skip
    return shapes


def vision_shapes(prefix: str, mergers: str, merger: tuple[str, str, str]) -> Shapes:
    norm, first, second = merger
    joined = 4 * VE

    def with_bias(name: str, *shape: int) -> Shapes:
        return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}

    def merging(name: str, normed: int) -> Shapes:
        return with_bias(f"{name}{norm}", normed) | with_bias(f"{name}{first}", joined, joined) | with_bias(
            f"{name}{second}", E, joined)  # fmt: skip

    shapes = with_bias(f"{prefix}patch_embed.proj", VE, 3, FRAMES, PATCH, PATCH) | merging(f"{prefix}merger.", VE)
    shapes[f"{prefix}pos_embed.weight"] = (PLACES, VE)
    for layer in range(DEPTH):
        here = f"{prefix}blocks.{layer}."
        shapes |= with_bias(f"{here}norm1", VE) | with_bias(f"{here}norm2", VE)
        shapes |= with_bias(f"{here}attn.qkv", 3 * VE, VE) | with_bias(f"{here}attn.proj", VE, VE)
        shapes |= with_bias(f"{here}mlp.linear_fc1", VM, VE) | with_bias(f"{here}mlp.linear_fc2", VE, VM)
    for place in range(2):
        shapes |= merging(f"{prefix}{mergers}.{place}.", joined)
    return shapes


def fused_inputs_first(prefix: str) -> Shapes:
    return {f"{prefix}gate_up_proj": (X, E, 2 * M), f"{prefix}down_proj": (X, M, E)}


AUDIO = {"d_model": 10, "encoder_layers": 2, "encoder_attention_heads": 5, "encoder_ffn_dim": 7, "output_dim": E,
         "num_mel_bins": 20, "downsample_hidden_size": 6, "max_source_positions": 9, "n_window": 5,
         "n_window_infer": 40}  # fmt: skip


def audio_shapes() -> Shapes:
    prefix, shapes = "thinker.audio_tower.", {"thinker.audio_tower.conv_out.weight": (10, 6 * 3)}
    linears: Shapes = {"proj1": (10, 10), "proj2": (E, 10), "ln_post": (10,), "conv2d1": (6, 1, 3, 3),
                       "conv2d2": (6, 6, 3, 3), "conv2d3": (6, 6, 3, 3)}  # fmt: skip
    for layer in range(2):
        here = f"layers.{layer}."
        linears |= {f"{here}self_attn.{name}": (10, 10) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
        linears |= {f"{here}self_attn_layer_norm": (10,), f"{here}final_layer_norm": (10,), f"{here}fc1": (7, 10),
                    f"{here}fc2": (10, 7)}  # fmt: skip
    for name, shape in linears.items():
        shapes |= {f"{prefix}{name}.weight": shape, f"{prefix}{name}.bias": shape[:1]}
    return shapes


def separate(prefix: str) -> Shapes:
    return {name: shape for expert in range(X) for name, shape in mlp(f"{prefix}{expert}.", M).items()}
