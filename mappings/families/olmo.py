"""OLMo 3. Names: transformers ``models/olmo3/modeling_olmo3.py``.

Norms stand after attention and MLP; queries and keys are normalised over all their heads at once.
"""

from collections.abc import Collection
from typing import Any

from tensorferry.mappings.families import shared
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions, make_dims, register
from tensorferry.mappings.rules.rule import Rule

_PERIOD = 4
_NORMS = {
    "post_attention_layernorm": "post_self_attention_layer_norm",
    "post_feedforward_layernorm": "post_mlp_layer_norm",
}


@register("olmo3", "olmo3", "Olmo3ForCausalLM")
def olmo3(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """OLMo 3: three sliding layers and a full one in a cycle."""
    layers = config.size("num_hidden_layers")
    shared.refuse_layer_types(config, _PERIOD, "MaxText's olmo3 block has it")
    if options.scan_layers:
        shared.refuse_remainder(layers, _PERIOD)
    cycle, blocks = shared.layer_cycle(layers, _PERIOD)
    return Family(
        name="olmo3",
        dims=make_dims(shared.common_dims(config) | {"mlp": config.size("intermediate_size")} | cycle),
        blocks=blocks,
        rules=(*shared.token_rules(config, options), *(rule for word in cycle for rule in _layer_rules(word))),
        ties=(shared.TIE,),
        ignores=(shared.ROTARY,),
        settings=shared.common_settings(config, options, "olmo3") | _rope_settings(config) | {
            "use_qk_norm": True,
            "normalize_embedding_logits": False,
            "sliding_window_size": config.size("sliding_window", 4096),
            "inhomogeneous_layer_cycle_interval": _PERIOD,
        },
        sizes_from=shared.SIZES_FROM,
    )  # fmt: skip


def _layer_rules(layer: str) -> tuple[Rule, ...]:
    return (
        *shared.norms(_NORMS, layer=layer),
        *shared.attention(target="attention", layer=layer),
        *(
            shared.layer_rule(f"self_attn.{short}_norm.weight", f"attention-{name}_norm-scale",
                              f"({heads} head_dim) -> ({heads} head_dim) {layer}", layer=layer)
            for short, name, heads in (("q", "query", "heads"), ("k", "key", "kv_heads"))
        ),
        *shared.gated_mlp(layer=layer),
    )  # fmt: skip


def _rope_settings(config: Config) -> dict[str, Any]:
    """MaxText has one rope for all layers; the full layers' one is what the checkpoint was extended with."""
    rope = config.rope.get("full_attention") or config.rope
    settings: dict[str, Any] = {
        "rope_type": "default",
        "rope_interleave": False,
        "rope_max_timescale": int(rope.get("rope_theta") or config.rope_theta),
        "rope_attention_scaling": True,
        "rope_truncate": False,
    }
    if "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return settings
    original = rope.get("original_max_position_embeddings", 8192)
    return settings | {
        "rope_type": "yarn",
        "rope_factor": float(rope.get("factor", 8.0)),
        "original_max_position_embeddings": original,
        "beta_fast": float(rope.get("beta_fast", 32)),
        "beta_slow": float(rope.get("beta_slow", 1)),
        "rope_truncate": bool(rope.get("truncate", True)),
    }
