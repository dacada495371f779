"""DeepSeek V2, V3, V3.1, V3.2 and Kimi-K2. Names: transformers ``models/deepseek_v3/modeling_deepseek_v3.py``.

Multi-head latent attention; the first layers dense, the rest routed with shared experts. Rope lanes are kept: MaxText
rotates them interleaved, as these checkpoints store them. The router bias goes into ``params`` with layers first: the
one place where both of MaxText's loaders find it, although its model declares a collection ``MoEBiasVar``.
"""

from collections.abc import Collection
from typing import Any

from tensorferry.mappings.families import mtp, shared
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions, make_dims, register
from tensorferry.mappings.rules.rule import Block, Rule
from tensorferry.mappings.words.problems import PlanError, Problem

_LAYERS = "model.layers."
_MOE = "DeepSeekMoeBlock_0"
_EXPERTS = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}


@register("deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "DeepseekV2ForCausalLM",
          "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM")  # fmt: skip
def deepseek(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """V2 (with or without query compression), V3, V3.1, V3.2 (with its indexer) and Kimi-K2."""
    _refuse_sparse_moe(config)
    dense, layers = int(config.get("first_k_dense_replace", 0)), config.size("num_hidden_layers")
    moe_rules = (*_block("moe", config), *_moe(config, names, options))
    dense_rules = (*_block("dense", config), *shared.gated_mlp(layer="dense")) if dense else ()
    predicted = range(layers, layers + int(config.get("num_nextn_predict_layers", 0)))
    mtp_rules = mtp.rules(moe_rules, "moe", _LAYERS, predicted) if options.mtp else ()
    return Family(
        name="deepseek",
        dims=make_dims(_dims(config, dense, layers)),
        blocks={"dense": Block("dense_layers", "dense_layers_{dense}"),
                "moe": Block("moe_layers", "moe_layers_{moe.pos}")},
        rules=(*shared.token_rules(config, options), *dense_rules, *moe_rules, *mtp_rules),
        ties=(shared.TIE, *(mtp.ties(_LAYERS, predicted) if options.mtp else ())),
        ignores=(shared.ROTARY, *(() if options.mtp else mtp.ignores(_LAYERS, predicted))),
        settings=_settings(config, names, options, dense, len(predicted)),
        sizes_from=_SIZES_FROM,
        notes=_notes(config, names),
    )  # fmt: skip


def _block(layer: str, config: Config) -> tuple[Rule, ...]:
    """Norms and latent attention, the same in dense and routed layers."""
    rules = [
        ("kv_a_proj_with_mqa.weight", "wkv_a-kernel", f"kv_compressed embed -> embed {layer} kv_compressed"),
        ("kv_a_layernorm.weight", "kv_norm-scale", f"kv_rank -> kv_rank {layer}"),
        ("kv_b_proj.weight", "wkv_b-kernel", f"(heads key_value) kv_rank -> kv_rank {layer} heads key_value"),
        ("o_proj.weight", "out-kernel", f"embed (heads value_dim) -> heads {layer} value_dim embed"),
    ]
    if config.get("q_lora_rank"):
        rules += [
            ("q_a_proj.weight", "wq_a-kernel", f"q_rank embed -> embed {layer} q_rank"),
            ("q_a_layernorm.weight", "q_norm-scale", f"q_rank -> q_rank {layer}"),
            ("q_b_proj.weight", "wq_b-kernel", f"(heads query_dim) q_rank -> q_rank {layer} heads query_dim"),
        ]
    else:
        rules += [("q_proj.weight", "query-kernel", f"(heads query_dim) embed -> embed {layer} heads query_dim")]
    if config.get("index_n_heads"):
        rules += [
            ("indexer.wq_b.weight", "indexer-wq_b-kernel",
             f"(index_heads index_dim) q_rank -> q_rank {layer} index_heads index_dim"),
            ("indexer.wk.weight", "indexer-wk-kernel", f"index_dim embed -> embed {layer} index_dim"),
            ("indexer.k_norm.weight", "indexer-k_norm-scale", f"index_dim -> index_dim {layer}"),
            ("indexer.k_norm.bias", "indexer-k_norm-bias", f"index_dim -> index_dim {layer}"),
            ("indexer.weights_proj.weight", "indexer-weights_proj-kernel",
             f"index_heads embed -> embed {layer} index_heads"),
        ]  # fmt: skip
    attention = (
        shared.layer_rule(f"self_attn.{hf}", f"self_attention-{maxtext}", layout, layer=layer)
        for hf, maxtext, layout in rules
    )
    return (*shared.norms(shared.LLAMA_NORMS, layer=layer), *attention)


def _has_bias(config: Config, names: Collection[str]) -> bool:
    """Whether the router has a bias; configs that transformers wrote do not say."""
    return config.get("topk_method") == "noaux_tc" or any(n.endswith(".e_score_correction_bias") for n in names)


def _moe(config: Config, names: Collection[str], options: FamilyOptions) -> tuple[Rule, ...]:
    """Routed and shared experts, and the router's bias where the checkpoint has one.

    The bias stays float32 unless MaxText is followed bit for bit: it decides near ties between experts, and its
    bfloat16 rounding is coarser than the differences it is trained to.
    """
    bias = shared.layer_rule(
        "mlp.gate.e_score_correction_bias", f"{_MOE}-MoeBlock_0-gate-bias", "expert -> moe expert",
        layer="moe", dtype=shared.kept_float32(options),
    )  # fmt: skip
    return (
        *shared.experts(names, "mlp", f"{_MOE}-MoeBlock_0", _EXPERTS, layer="moe"),
        *((bias,) if _has_bias(config, names) else ()),
        *shared.gated_mlp("mlp.shared_experts", f"{_MOE}-shared_experts", layer="moe", mlp="shared_mlp"),
    )


def _dims(config: Config, dense: int, layers: int) -> dict[str, Any]:
    rope, nope = config.size("qk_rope_head_dim"), config.size("qk_nope_head_dim")
    value, expert_mlp = config.size("v_head_dim"), config.size("moe_intermediate_size")
    return {
        "dense": range(dense),
        "moe": range(dense, layers),
        "vocab": config.size("vocab_size"),
        "embed": config.size("hidden_size"),
        "heads": config.size("num_attention_heads"),
        "query_dim": nope + rope,
        "key_value": nope + value,
        "value_dim": value,
        "kv_rank": config.size("kv_lora_rank"),
        "kv_compressed": config.size("kv_lora_rank") + rope,
        "q_rank": config.get("q_lora_rank") or 0,
        "mlp": config.size("intermediate_size"),
        "expert": range(config.size("n_routed_experts")),
        "expert_mlp": expert_mlp,
        "shared_mlp": config.size("n_shared_experts") * expert_mlp,
        "index_heads": config.get("index_n_heads", 0),
        "index_dim": config.get("index_head_dim", 0),
        "joined": 2 * config.size("hidden_size"),
        "part": ("wi_0", "wi_1"),
    }


_SIZES_FROM = shared.SIZES_FROM | {
    "query_dim": "qk_nope_head_dim + qk_rope_head_dim",
    "key_value": "qk_nope_head_dim + v_head_dim",
    "value_dim": "v_head_dim",
    "kv_rank": "kv_lora_rank",
    "kv_compressed": "kv_lora_rank + qk_rope_head_dim",
    "q_rank": "q_lora_rank",
    "expert": "n_routed_experts",
    "shared_mlp": "n_shared_experts * moe_intermediate_size",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
}


_SETTINGS = {
    "base_moe_mlp_dim": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "shared_experts": "n_shared_experts",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "max_position_embeddings": "max_position_embeddings",
}
_INDEXER_SETTINGS = {
    "indexer_n_heads": "index_n_heads",
    "indexer_head_dim": "index_head_dim",
    "indexer_topk": "index_topk",
}


def _settings(
    config: Config, names: Collection[str], options: FamilyOptions, dense: int, predicted: int
) -> dict[str, Any]:
    settings = (
        shared.common_settings(config, options, "deepseek")
        | shared.settings_from(config, _SETTINGS)
        | {
            "first_num_dense_layers": dense,
            "routed_scaling_factor": float(config.get("routed_scaling_factor", 1.0)),
            "routed_score_func": config.get("scoring_func", "softmax"),
            "routed_bias": _has_bias(config, names),
            "attention_type": "mla",
            "q_lora_rank": config.get("q_lora_rank") or 0,
            "rope_type": config.rope_type,
            "rope_interleave": bool(config.get("rope_interleave", True)),
        }
    )
    # Heads of query, key and value have sizes of their own; MaxText ignores head_dim here.
    del settings["head_dim"]
    if config.rope_type == "yarn":
        settings |= shared.yarn_settings(config) | {"mscale": config.rope.get("mscale_all_dim", 1.0)}
    if settings["routed_bias"] and config.get("n_group", 1) > 1:
        settings |= {"n_routing_groups": config.size("n_group"), "topk_routing_group": config.size("topk_group")}
    if config.get("index_n_heads"):
        settings |= {"use_indexer": True} | shared.settings_from(config, _INDEXER_SETTINGS)
    return settings | ({"mtp_num_layers": predicted} if options.mtp and predicted else {})


def _notes(config: Config, names: Collection[str]) -> tuple[str, ...]:
    notes = [shared.experts_note(names)]
    if config.get("topk_method") == "group_limited_greedy" and config.get("n_group", 1) > 1:
        notes.append(
            "routing: config.json limits experts to groups by each group's best score; MaxText scores groups otherwise "
            "and is set to route without groups, as its own model files do"
        )
    return tuple(notes)


def _refuse_sparse_moe(config: Config) -> None:
    if config.get("moe_layer_freq", 1) != 1:
        raise PlanError([Problem(
            "config.json key moe_layer_freq",
            "1: MaxText's deepseek block has routed experts in every layer after the first dense ones",
            str(config.get("moe_layer_freq")),
            "MaxText cannot run this model; there is no layout to convert to.",
            file="config.json",
        )])  # fmt: skip
