"""Gemma 4: dense, mixture of experts, and the small E2B and E4B. Names: transformers ``models/gemma4/``.

Norms are plain here (no 1 + scale) and queries unscaled; the embedding holds sqrt(embed), as in Gemma 2.
Full-attention layers have heads of their own size, and may use their keys as values.
"""

import math
from collections.abc import Collection
from typing import Any

from tensorferry.mappings.families import gemma4_vision, shared
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions, make_dims, register
from tensorferry.mappings.families.gemma import NORMS, gemma_settings
from tensorferry.mappings.rules.dims import Grid
from tensorferry.mappings.rules.rule import Block, Ignore, Rule
from tensorferry.mappings.words.problems import PlanError, Problem
from tensorferry.transforms.ops import Scale

_PERIOD = 6
# What config.json may leave out: transformers' Gemma4TextConfig fills these in.
_DEFAULTS = {
    "tie_word_embeddings": True,
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
}
_EXPERT_NORMS = {
    "post_feedforward_layernorm_1": "mlp-post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2": "mlp-post_feedforward_layernorm_2",
    "pre_feedforward_layernorm_2": "mlp-pre_feedforward_layernorm_2",
}
_ROUTED = "mlp-moe_block-MoeBlock_0"


@register("gemma4", "gemma4", "gemma4_text", "Gemma4ForConditionalGeneration", "Gemma4ForCausalLM")
def gemma4(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """Gemma 4 of any size; those with embeddings per layer are MaxText's ``gemma4_small``."""
    config = config.with_defaults(_DEFAULTS)
    if config.get("hidden_size_per_layer_input"):
        return _small(config, names, options)
    shared.refuse_layer_types(config, _PERIOD, "MaxText's gemma4 block has it")
    layers, experts = config.size("num_hidden_layers"), _experts(config)
    whole = layers - layers % _PERIOD
    words = {"local": whole, "global": whole, "rest": layers - whole}
    rules = [rule for word, count in words.items() if count for rule in _layer_rules(config, word, bool(experts))]
    dims = {
        "cycle": range(0, whole, _PERIOD),
        "place": range(_PERIOD - 1),
        "local": Grid(("cycle", "place")),
        "global": range(_PERIOD - 1, whole, _PERIOD),
        "rest": range(whole, layers),
        "expert": range(experts),
        "expert_mlp": config.get("moe_intermediate_size") or 0,
    }
    blocks = {
        "local": Block("scanned_blocks-local_layers", "layers_{local}"),
        "global": Block("scanned_blocks-global_layer", "layers_{global}"),
        "rest": Block("layers_remainder-layers_{rest.pos}", "layers_{rest}", stacked=False),
    }
    return _family(config, names, options, "gemma4", dims, blocks, rules, _expert_settings(config, experts))


def _small(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """E2B and E4B: the last layers reuse keys and values of earlier ones; MaxText spells every layer out."""
    if options.scan_layers:
        raise PlanError([Problem("scan_layers", "unrolled layers, the only form of MaxText's gemma4_small block",
                                 "true", "Convert with --no-scan-layers.")])  # fmt: skip
    layers, per_layer = config.size("num_hidden_layers"), config.size("hidden_size_per_layer_input")
    first_shared = layers - int(config.get("num_kv_shared_layers", 0))
    groups: dict[str, list[int]] = {}
    for layer, kind in enumerate(config.get("layer_types")):
        reuse = "reusing" if layer >= first_shared else "own"
        groups.setdefault(f"{kind.removesuffix('_attention')}_{reuse}", []).append(layer)
    wide = 2 if config.get("use_double_wide_mlp") else 1
    dims = groups | {
        "per_layer": per_layer,
        "all_layers": layers * per_layer,
        "layer_vocab": config.size("vocab_size_per_layer_input"),
        "wide_mlp": wide * config.size("intermediate_size"),
    }
    rules = [rule for word in groups for rule in _small_layer_rules(word)]
    blocks = {word: Block(f"layers_{{{word}}}", f"layers_{{{word}}}", stacked=False) for word in groups}
    settings = {
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": config.size("vocab_size_per_layer_input"),
        "num_kv_shared_layers": layers - first_shared,
        "use_double_wide_mlp": wide == 2,
    }
    unused = tuple(
        Ignore(f"*.layers.{layer}.self_attn.[kv]_*", why="the layer reuses keys and values of an earlier one")
        for layer in range(first_shared, layers)
    )
    return _family(config, names, options, "gemma4_small", dims, blocks, [*_PER_LAYER, *rules], settings, unused)


def _family(
    config: Config,
    names: Collection[str],
    options: FamilyOptions,
    block: str,
    dims: dict[str, Any],
    blocks: dict[str, Block],
    rules: list[Rule],
    settings: dict[str, Any],
    ignores: tuple[Ignore, ...] = (),
) -> Family:
    spelled = shared.spelling(names)
    vision = gemma4_vision.tower(config, names, options)
    embed_ops = (Scale(math.sqrt(config.size("hidden_size"))),)
    sizes = {
        "mlp": config.size("intermediate_size"),
        "global_kv_heads": _of_full(config, "num_key_value_heads"),
        "global_head_dim": _of_full(config, "head_dim"),
    }
    return Family(
        name="gemma4",
        dims=make_dims(shared.common_dims(config) | sizes | dims | vision.dims),
        blocks=blocks,
        rules=(*spelled.rules((*shared.token_rules(config, options, embed_ops), *rules)), *vision.rules),
        ties=(spelled.tie,),
        ignores=(shared.ROTARY, *ignores, *vision.ignores),
        settings=gemma_settings(config, options, block) | _settings(config) | settings | vision.settings,
        sizes_from=shared.SIZES_FROM | vision.sizes_from,
        notes=(spelled.note, *vision.notes),
    )


def _attention(layer: str, full: bool, own: bool = True, value: bool = True) -> tuple[Rule, ...]:
    kv_heads, head_dim = ("global_kv_heads", "global_head_dim") if full else ("kv_heads", "head_dim")
    rules = shared.attention(qk_norm=True, layer=layer, kv_heads=kv_heads, head_dim=head_dim)
    left_out = () if own else (".k_proj.", ".v_proj.", ".k_norm.")
    left_out = left_out if value else (*left_out, ".v_proj.")
    return tuple(rule for rule in rules if not any(part in rule.source for part in left_out))


def _common(layer: str) -> tuple[Rule, ...]:
    return (*shared.norms(NORMS, layer=layer), shared.layer_rule("layer_scalar", "layer_scalar", f"1 -> 1 {layer}",
                                                                 layer=layer))  # fmt: skip


def _layer_rules(config: Config, layer: str, experts: bool) -> tuple[Rule, ...]:
    full = layer == "global"
    value = not (full and config.get("attention_k_eq_v"))
    mlp = _expert_rules(layer) if experts else shared.gated_mlp(layer=layer)
    return (*_common(layer), *_attention(layer, full, value=value), *mlp)


def _expert_rules(layer: str) -> tuple[Rule, ...]:
    def rule(source: str, target: str, layout: str) -> Rule:
        return shared.layer_rule(source, target, layout, layer=layer)

    return (
        *shared.norms(_EXPERT_NORMS, layer=layer),
        *shared.gated_mlp(target="mlp-moe_block-shared_experts", layer=layer),
        *shared.fused_experts("", _ROUTED, layer),
        rule("router.proj.weight", f"{_ROUTED}-gate-kernel", f"expert embed -> embed {layer} expert"),
        rule("router.per_expert_scale", f"{_ROUTED}-per_expert_scale", f"expert -> expert {layer}"),
        rule("router.scale", "mlp-pre_forward_scale_2", f"embed -> embed {layer}"),
    )


_PER_LAYER = (
    Rule("model.embed_tokens_per_layer.weight", "params-decoder-per_layer_embedder-embed_tokens_per_layer",
         "layer_vocab all_layers -> layer_vocab all_layers"),
    Rule("model.per_layer_model_projection.weight",
         "params-decoder-per_layer_embedder-per_layer_model_projection-kernel",
         "all_layers embed -> embed all_layers"),
    Rule("model.per_layer_projection_norm.weight",
         "params-decoder-per_layer_embedder-per_layer_projection_norm-scale", "per_layer -> per_layer"),
)  # fmt: skip


def _small_layer_rules(layer: str) -> tuple[Rule, ...]:
    own = layer.endswith("own")
    return (
        *_common(layer),
        *_attention(layer, layer.startswith("full"), own),
        *shared.gated_mlp(layer=layer, mlp="mlp" if own else "wide_mlp"),
        *shared.norms({"post_per_layer_input_norm": "post_per_layer_input_norm"}, layer=layer),
        shared.layer_rule("per_layer_input_gate.weight", "per_layer_input_gate-kernel",
                          f"per_layer embed -> embed {layer} per_layer", layer=layer),
        shared.layer_rule("per_layer_projection.weight", "per_layer_projection-kernel",
                          f"embed per_layer -> per_layer {layer} embed", layer=layer),
    )  # fmt: skip


def _experts(config: Config) -> int:
    return config.size("num_experts") if config.get("enable_moe_block") else 0


def _of_full(config: Config, key: str) -> int:
    """A size of the full-attention layers: transformers 5 lists it layer by layer, before it had a name of its own."""
    named = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}[key]
    by_layer = next(iter((config.get("per_layer_config") or {}).values()), {})
    usual = config.head_dim if key == "head_dim" else config.kv_heads
    return by_layer.get(key) or config.size(named, usual)


def _settings(config: Config) -> dict[str, Any]:
    full, sliding = (config.rope.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
    base = int(full.get("rope_theta", 1_000_000))
    return {
        "global_head_dim": _of_full(config, "head_dim"),
        "v_norm_with_scale": False,
        "rope_max_timescale": base,
        "global_rope_max_timescale": base,
        "local_rope_max_timescale": int(sliding.get("rope_theta", 10_000)),
        "global_rope_proportion": float(full.get("partial_rotary_factor", 0.25)),
        "local_rope_proportion": float(sliding.get("partial_rotary_factor", 1.0)),
    }


def _expert_settings(config: Config, experts: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "global_num_kv_heads": _of_full(config, "num_key_value_heads"),
        "share_kv_projections": bool(config.get("attention_k_eq_v")),
    }
    if not experts:
        return settings
    return settings | {
        "num_experts": experts,
        "num_experts_per_tok": config.size("top_k_experts"),
        "base_moe_mlp_dim": config.size("moe_intermediate_size"),
        "shared_experts": 1,
        "norm_topk_prob": True,
    }
