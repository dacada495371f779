"""Llama 4. Names: transformers ``models/llama4/modeling_llama4.py``.

Its rotary embedding pairs neighbouring lanes already, so none are permuted; MaxText's block scales queries at run time.
Experts are stored input first, gate before up.
"""

import math
from collections.abc import Collection
from typing import Any

from tensorferry.mappings.families import shared
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions, make_dims, register
from tensorferry.mappings.rules.rule import Rule
from tensorferry.mappings.words.problems import PlanError, Problem

_NOPE = 4
_PATTERNS = ("vision_model.*", "model.vision_model.*", "multi_modal_projector.*", "model.multi_modal_projector.*")


@register("llama4", "llama4", "llama4_text", "Llama4ForConditionalGeneration", "Llama4ForCausalLM")
def llama4(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """Scout and Maverick: every fourth layer without rope, every ``interleave_moe_layer_step``-th one of experts."""
    layers, step = config.size("num_hidden_layers"), config.size("interleave_moe_layer_step", 1)
    period = math.lcm(_NOPE, step)
    _refuse_other_patterns(config, layers, step)
    if options.scan_layers:
        shared.refuse_remainder(layers, period)
    spelled = shared.spelling(names)
    cycle, blocks = shared.layer_cycle(layers, period)
    sizes = {"expert_mlp": config.size("intermediate_size"), "mlp": _dense_mlp(config, step)}
    experts = {"expert": range(config.size("num_local_experts"))}
    rules = [rule for word, places in cycle.items() for rule in _layer_rules(word, (places[0] + 1) % step == 0)]
    towers = tuple(shared.Ignore(pattern, why="vision tower, which is not converted") for pattern in _PATTERNS)
    return Family(
        name="llama4",
        dims=make_dims(shared.common_dims(config) | sizes | experts | cycle),
        blocks=blocks,
        rules=spelled.rules((*shared.token_rules(config, options), *rules)),
        ties=(spelled.tie,),
        ignores=(shared.ROTARY, *towers),
        settings=_settings(config, options, step, period),
        sizes_from=shared.SIZES_FROM | {"expert_mlp": "intermediate_size", "mlp": "intermediate_size_mlp"},
        notes=(spelled.note, "rope lanes: interleaved, as the checkpoint stores them"),
    )


def _layer_rules(layer: str, experts: bool) -> tuple[Rule, ...]:
    feed, block = "feed_forward", "Llama4MoEBlock_0"
    shell = (*shared.norms(shared.LLAMA_NORMS, layer=layer), *shared.attention(layer=layer))
    if not experts:
        return (*shell, *shared.gated_mlp(feed, "mlp", layer))
    return (
        *shell,
        *shared.gated_mlp(f"{feed}.shared_expert", f"{block}-shared_experts", layer, "expert_mlp"),
        shared.layer_rule(f"{feed}.router.weight", f"{block}-MoeBlock_0-gate-kernel",
                          f"expert embed -> embed {layer} expert", layer=layer),
        shared.layer_rule(f"{feed}.experts.gate_up_proj", f"{block}-MoeBlock_0-{{part}}",
                          f"expert embed (part expert_mlp) -> expert {layer} embed expert_mlp", layer=layer),
        shared.layer_rule(f"{feed}.experts.down_proj", f"{block}-MoeBlock_0-wo",
                          f"expert expert_mlp embed -> expert {layer} expert_mlp embed", layer=layer),
    )  # fmt: skip


def _dense_mlp(config: Config, step: int) -> int:
    """Width of the dense layers; a model without any has MaxText's two widths equal."""
    return config.size("intermediate_size") if step == 1 else config.size("intermediate_size_mlp")


def _settings(config: Config, options: FamilyOptions, step: int, period: int) -> dict[str, Any]:
    return shared.common_settings(config, options, "llama4") | {
        "base_mlp_dim": _dense_mlp(config, step),
        "base_moe_mlp_dim": config.size("intermediate_size"),
        "num_experts": config.size("num_local_experts"),
        "num_experts_per_tok": config.size("num_experts_per_tok", 1),
        "shared_experts": 1,
        "use_qk_norm": bool(config.get("use_qk_norm", True)),
        "rope_type": "llama3.1",
        "rope_use_scale": config.rope_type == "llama3",
        "nope_layer_interval": _NOPE,
        "interleave_moe_layer_step": step,
        "inhomogeneous_layer_cycle_interval": period,
        "temperature_tuning": bool(config.get("attn_temperature_tuning", True)),
        "chunk_attn_window_size": config.size("attention_chunk_size", 8192),
    }


def _refuse_other_patterns(config: Config, layers: int, step: int) -> None:
    """Which layers lack rope and which have experts is fixed by two intervals in MaxText.

    Raises:
      PlanError: config.json lists other layers.
    """
    rope = config.get("no_rope_layers") or []
    moe = config.get("moe_layers")
    expected_rope = [int((layer + 1) % _NOPE != 0) for layer in range(layers)]
    expected_moe = list(range(step - 1, layers, step))
    wrong = [
        Problem(f"config.json key {key}", str(expected), str(found),
                "MaxText cannot run this model; there is no layout to convert to.", file="config.json")
        for key, found, expected in (("no_rope_layers", rope or expected_rope, expected_rope),
                                     ("moe_layers", expected_moe if moe is None else moe, expected_moe))
        if list(found) != expected
    ]  # fmt: skip
    if wrong:
        raise PlanError(wrong)
