"""What the oracle's models need besides what the oracle says of them: one line per special case."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """What a model needs besides what the oracle says of it.

    Attributes:
      config: changes to the oracle's config.json, or the whole of it where the oracle has none.
      config_of: take the config.json of this other model.
      options: family options.
      moved: our array names that differ from the tree's on purpose, tree's name part to ours, with axes unchanged.
      names: tensors of the checkpoint that the oracle's mapping lacks.
      spurious: pattern of tensors that the oracle's synthetic checkpoint holds and no real one does.
      refused: why MaxText has no layout to compare with.
    """

    config: dict[str, Any] = field(default_factory=dict)
    config_of: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    moved: tuple[tuple[str, str], ...] = ()
    names: tuple[str, ...] = ()
    spurious: str = ""
    refused: str = ""


_NO_TABLE = "MaxText knows neither sizes nor names of this model: its tables disagree with each other"
# Published sizes of a model of which MaxText has a tree but no table.
_LLAMA4_SCOUT = {
    "model_type": "llama4",
    "architectures": ["Llama4ForConditionalGeneration"],
    "text_config": {
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "no_rope_layers": [1, 1, 1, 0] * 12,
        "vocab_size": 202_048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192},
        "use_qk_norm": True,
        "attention_chunk_size": 8192,
    },
}

# The router bias goes where both of MaxText's loaders take it, which is not where its tree declares it.
_ROUTER_BIAS = (("MoEBiasVar-", "params-"),)

# MaxText has no config.json for Kimi-K2: sizes as its model file states them, names as the published repository's.
_KIMI_K2: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": 163_840,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.827,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 131_072,
    "rope_theta": 50_000.0,
    "rope_scaling": {"type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale_all_dim": 1.0},
    "tie_word_embeddings": False,
}

_DEEPSEEK4_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 32,
    "moe_intermediate_size": 64,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "q_lora_rank": 16,
    "o_groups": 4,
    "o_lora_rank": 16,
    "sliding_window": 32,
    "max_position_embeddings": 4096,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rope_parameters": {"rope_theta": 10_000, "original_max_position_embeddings": 4096},
}

# MaxText's table leaves most of Qwen3-Omni's sizes at transformers' defaults, which are another model's.
_QWEN3_OMNI: dict[str, Any] = {
    "thinker_config": {
        "text_config": {
            "vocab_size": 152_064,
            "hidden_size": 2048,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000,
            "rope_scaling": {"mrope_section": [24, 20, 20], "rope_type": "default"},
            "tie_word_embeddings": False,
        },
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": 2048,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        "audio_config": {
            "d_model": 1280,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "max_source_positions": 1500,
            "num_mel_bins": 128,
            "downsample_hidden_size": 480,
            "output_dim": 2048,
            "n_window": 50,
            "n_window_infer": 400,
        },
    },
}

CASES: dict[str, Case] = {
    # MaxText's shape table of Gemma 3 lists biases; its config says that there are none.
    "gemma3-4b": Case(spurious="*_proj.bias"),
    "gemma3-4b+mm": Case(config_of="gemma3-4b", options={"multimodal": True}),
    "llama4-17b-16e": Case(config=_LLAMA4_SCOUT),
    "llama3.1-8b+fp8": Case(refused="FP8 trees: see test_carried_scales"),
    "llama3.1-8b+fp8block": Case(refused="FP8 trees: see test_carried_scales"),
    "weaver-mini": Case(refused="an experiment of MaxText's own, with no published checkpoint"),
    "qwen3.5-35b-fp8": Case(refused=_NO_TABLE),
    "deepseek3-671b": Case(moved=_ROUTER_BIAS),
    "deepseek3-671b+mtp": Case(config_of="deepseek3-671b", options={"mtp": True}, moved=_ROUTER_BIAS),
    "deepseek3.2-671b": Case(moved=_ROUTER_BIAS),
    "deepseek4-tiny": Case(config=_DEEPSEEK4_TINY, config_of="deepseek4-284b"),
    # These two were traced with fewer decoder layers, a few of which say it all.
    "qwen3-omni-30b-a3b": Case(config=_QWEN3_OMNI, options={"multimodal": True}),
    "qwen3.5-35b-a3b+mm": Case(options={"multimodal": True}),
    "qwen3-vl-2b": Case(options={"multimodal": True}),
    "qwen3-vl-4b": Case(options={"multimodal": True}),
    "qwen3-vl-30b-a3b": Case(options={"multimodal": True}),
    "kimi-k2-1t": Case(config=_KIMI_K2, moved=_ROUTER_BIAS),
}
