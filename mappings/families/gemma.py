"""Gemma 2 and 3. Names: transformers ``models/gemma2/modeling_gemma2.py``, ``models/gemma3/modeling_gemma3.py``.

MaxText multiplies norms by their stored scale, Gemma by 1 + scale: the 1 is added here, in float32 and kept float32
(bfloat16 would lose up to 8 bits of a small scale). MaxText's embedding holds the factor sqrt(embed) that Gemma
applies at run time, and its logits divide by it again.
"""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from tensorferry.mappings.families import shared, siglip
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions, make_dims, register
from tensorferry.mappings.rules.rule import Block, Rule
from tensorferry.transforms.dtypes import numpy_dtype
from tensorferry.transforms.ops import Op, Scale, Shift

NORM = {"norm_ops": (Shift(1.0),), "norm_dtype": "float32"}
NORMS = {
    "input_layernorm": "pre_self_attention_norm",
    "post_attention_layernorm": "post_self_attention_norm",
    "pre_feedforward_layernorm": "pre_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_PERIOD = 6
# What config.json may leave out: transformers' Gemma3TextConfig fills these in, and Gemma2Config the last two.
_DEFAULTS = {"tie_word_embeddings": True, "query_pre_attn_scalar": 256}
_DEFAULTS_3 = _DEFAULTS | {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
}


@register("gemma2", "gemma2", "Gemma2ForCausalLM")
def gemma2(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """Gemma 2: MaxText's layer is a pair, a sliding layer and a global one."""
    config = config.with_defaults(_DEFAULTS)
    layers = config.size("num_hidden_layers")
    shared.refuse_layer_types(config, 2, "MaxText's gemma2 block has it")
    shared.refuse_remainder(layers, 2, fix="MaxText cannot run this model; there is no layout to convert to.")
    spelled = shared.spelling(names)
    scale, note = _query_scale(config, options)
    pairs = {"local": range(0, layers, 2), "global": range(1, layers, 2)}
    rules = [rule for kind in pairs for rule in _pair_rules(kind, scale)]
    return Family(
        name="gemma2",
        dims=make_dims(shared.common_dims(config) | {"mlp": config.size("intermediate_size")} | pairs),
        blocks={kind: Block("layers", f"layers_{{{kind}.pos}}") for kind in pairs},
        rules=spelled.rules((*_tokens(config, options, math.sqrt(config.size("hidden_size"))), *rules)),
        ties=(spelled.tie,),
        ignores=(shared.ROTARY,),
        settings=gemma_settings(config, options, "gemma2") | {"base_num_decoder_layers": layers // 2},
        sizes_from=shared.SIZES_FROM,
        notes=(spelled.note, note),
    )  # fmt: skip


@register("gemma3", "gemma3", "gemma3_text", "Gemma3ForConditionalGeneration", "Gemma3ForCausalLM")
def gemma3(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """Gemma 3, text or multimodal: five sliding layers and a global one in a cycle; the last cycle may be short."""
    config = config.with_defaults(_DEFAULTS_3)
    layers = config.size("num_hidden_layers")
    shared.refuse_layer_types(config, _PERIOD, "MaxText's gemma3 block has it")
    spelled = shared.spelling(names)
    cycle, blocks = shared.layer_cycle(layers, _PERIOD)
    # The model itself rounds this factor to the dtype of its weights before it multiplies.
    factor = float(numpy_dtype("bfloat16").type(math.sqrt(config.size("hidden_size"))))
    rules = [rule for word in cycle for rule in _layer_rules(word)]
    vision = siglip.tower(config, names, options)
    return Family(
        name="gemma3",
        dims=make_dims(
            shared.common_dims(config) | {"mlp": config.size("intermediate_size")} | cycle | vision.dims
        ),
        blocks=blocks,
        rules=(*spelled.rules((*_tokens(config, options, factor), *rules)), *vision.rules),
        ties=(spelled.tie,),
        ignores=(shared.ROTARY, *vision.ignores),
        settings=gemma_settings(config, options, "gemma3") | _gemma3_settings(config) | vision.settings,
        sizes_from=shared.SIZES_FROM | vision.sizes_from,
        notes=(spelled.note, *vision.notes),
    )  # fmt: skip


def _tokens(config: Config, options: FamilyOptions, factor: float) -> tuple[Rule, ...]:
    return shared.token_rules(config, options, (Scale(factor),), **NORM)


def _layer_rules(word: str, query_ops: tuple[Op, ...] = (), qk_norm: bool = True) -> tuple[Rule, ...]:
    return (
        *shared.norms(NORMS, NORM["norm_ops"], word, NORM["norm_dtype"]),
        *shared.attention(query_ops=query_ops, qk_norm=qk_norm, layer=word, **NORM),
        *shared.gated_mlp(layer=word),
    )


def _pair_rules(kind: str, scale: Scale) -> tuple[Rule, ...]:
    """A layer's rules with the pair's suffix on every module: ``mlp_local``, ``self_attention_global``."""
    rules = _layer_rules(kind, (scale,), qk_norm=False)
    return tuple(replace(rule, target=_suffixed(rule.target, kind)) for rule in rules)


def _suffixed(target: str, kind: str) -> str:
    before, after = target.split("]-")
    module, leaf = after.split("-", 1)
    return f"{before}]-{module}_{kind}-{leaf}"


def _query_scale(config: Config, options: FamilyOptions) -> tuple[Scale, str]:
    """1/sqrt of the scalar that config.json names; MaxText's own converter takes head_dim for it."""
    scalar, head_dim = config.get("query_pre_attn_scalar", config.head_dim), config.head_dim
    if options.match_maxtext:
        return shared.query_scale(head_dim), "queries scaled by 1/sqrt(head_dim), as MaxText's converter does"
    return shared.query_scale(scalar), f"queries scaled by 1/sqrt({scalar}), query_pre_attn_scalar of config.json"


def gemma_settings(config: Config, options: FamilyOptions, block: str) -> dict[str, Any]:
    """MaxText settings that all Gemmas share, from config.json."""
    settings = shared.common_settings(config, options, block) | {
        "mlp_activations": ["gelu", "linear"],
        "normalize_embedding_logits": True,
        "final_logits_soft_cap": config.get("final_logit_softcapping"),
        "attn_logits_soft_cap": config.get("attn_logit_softcapping"),
        "sliding_window_size": config.get("sliding_window"),
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
    }
    return {key: value for key, value in settings.items() if value is not None}


def _gemma3_settings(config: Config) -> dict[str, Any]:
    """Two rotary bases and a factor, in the spellings of transformers 4 and 5; and a model name, by which alone
    MaxText's block knows whether the query scalar is head_dim or hidden size over heads."""
    full, sliding = (config.rope.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
    local = sliding.get("rope_theta") or config.get("rope_local_base_freq", 10_000)
    per_head = config.size("hidden_size") // config.size("num_attention_heads")
    divided = config.get("query_pre_attn_scalar") == per_head != config.head_dim
    return {
        "model_name": "gemma3-27b" if divided else "gemma3-4b",
        "rope_max_timescale": int(full.get("rope_theta") or config.rope_theta),
        "local_rope_max_timescale": int(local),
        "rope_linear_scaling_factor": float((full or config.rope).get("factor") or 1.0),
    }
