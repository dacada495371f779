"""Qwen3.5 with routed experts, bfloat16 and FP8. Names: transformers ``models/qwen3_5_moe/modeling_qwen3_5_moe.py``.

Qwen3-Next's layers with input projections stored apart: MaxText wants their rows grouped by key head. Scanned, each
place of the cycle is a stack of its own.
"""

from collections.abc import Collection
from typing import Any

from tensorferry.mappings.families import mtp, qwen_vision, shared
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions, make_dims, register
from tensorferry.mappings.families.qwen3_next import (
    SIZES_FROM,
    block,
    cycle_period,
    delta_net,
    gated_attention,
    hybrid_dims,
    hybrid_settings,
)
from tensorferry.mappings.rules.dims import Concat
from tensorferry.mappings.rules.rule import Block, Rule

_VISION = qwen_vision.Spelling("model.visual.", "Qwen3_5MoeVision", "qwen3_5")


@register("qwen3_5_moe", "qwen3_5_moe", "qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration",
          "Qwen3_5MoeForCausalLM")  # fmt: skip
def qwen3_5_moe(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """Qwen3.5: experts fused in bfloat16 checkpoints, one by one in FP8 ones."""
    layers, period = config.size("num_hidden_layers"), cycle_period(config)
    words = [f"layer_{place}" for place in range(period)]
    rules = [
        *shared.token_rules(config, options),
        *(rule for word in words[:-1] for rule in (*_split_projections(word), *delta_net(word, options))),
        *gated_attention(words[-1]),
        *(rule for word in words for rule in block(names, word)),
    ]
    text = Family(
        name="qwen3_5_moe",
        dims=make_dims(
            hybrid_dims(config) | _groups(config)
            | {word: range(place, layers, period) for place, word in enumerate(words)}
        ),
        blocks={word: Block(f"layers-{word}", f"layers_{{{word}}}") for word in words},
        rules=tuple(rules),
        ignores=(shared.ROTARY, mtp.unsupported("mtp.*")),
        settings=hybrid_settings(config, options, "qwen3_5") | shared.mrope_settings(config),
        sizes_from=SIZES_FROM,
        notes=(shared.experts_note(names),),
    )  # fmt: skip
    tower = qwen_vision.tower(config, options, _VISION)
    return shared.with_towers(text, text.name, shared.spelling(names), tower)


def _split_projections(word: str) -> tuple[Rule, ...]:
    """Queries, keys and values of one tensor, and the gate z, made one with rows grouped by key head; so are b, a."""
    leaves = (
        ("qkv", "qkvz", "qkv.q(key_heads key_dim)", "qkvz.q(key_dim)"),
        ("qkv", "qkvz", "qkv.k(key_heads key_dim)", "qkvz.k(key_dim)"),
        ("qkv", "qkvz", "qkv.v(key_heads group value_dim)", "qkvz.v(group value_dim)"),
        ("z", "qkvz", "(key_heads group value_dim)", "qkvz.z(group value_dim)"),
        ("b", "ba", "(key_heads group)", "ba.b(group)"),
        ("a", "ba", "(key_heads group)", "ba.a(group)"),
    )
    return tuple(
        shared.layer_rule(f"linear_attn.in_proj_{hf}.weight", f"attention-in_proj_{maxtext}-kernel",
                          f"{rows} embed -> embed {word} (key_heads {part})", layer=word)
        for hf, maxtext, rows, part in leaves
    )  # fmt: skip


def _groups(config: Config) -> dict[str, Any]:
    """Key heads, and what each of them serves."""
    heads, key_dim = config.size("linear_num_key_heads"), config.size("linear_key_head_dim")
    group, value_dim = config.size("linear_num_value_heads") // heads, config.size("linear_value_head_dim")
    values = group * value_dim
    return {
        "key_heads": heads,
        "key_dim": key_dim,
        "group": group,
        "qkv": Concat.of(q=heads * key_dim, k=heads * key_dim, v=heads * values),
        "qkvz": Concat.of(q=key_dim, k=key_dim, v=values, z=values),
        "ba": Concat.of(b=group, a=group),
    }
