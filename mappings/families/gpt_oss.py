"""gpt-oss. Names: transformers ``models/gpt_oss/modeling_gpt_oss.py``; MXFP4 checkpoints present the same names.

Experts are stored input first, so nothing is transposed; gate and up lie interleaved. Lanes stay half-split and
queries unscaled, as MaxText's block computes.
"""

from collections.abc import Collection

from tensorferry.mappings.families import shared
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions, make_dims, register
from tensorferry.mappings.rules.rule import Rule

_PERIOD = 2


@register("gpt_oss", "gpt_oss", "GptOssForCausalLM")
def gpt_oss(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """gpt-oss 20B and 120B: sliding and full attention in turn, experts with biases in every layer."""
    layers = config.size("num_hidden_layers")
    shared.refuse_layer_types(config, _PERIOD, "MaxText's gpt_oss block has it")
    if options.scan_layers:
        shared.refuse_remainder(layers, _PERIOD)
    cycle, blocks = shared.layer_cycle(layers, _PERIOD)
    mlp, experts = config.size("intermediate_size"), config.size("num_local_experts")
    return Family(
        name="gpt_oss",
        dims=make_dims(shared.common_dims(config) | {"expert_mlp": mlp, "expert": range(experts)} | cycle),
        blocks=blocks,
        rules=(*shared.token_rules(config, options), *(rule for word in cycle for rule in _layer_rules(word))),
        ties=(shared.TIE,),
        ignores=(shared.ROTARY,),
        settings=shared.common_settings(config, options, "gpt_oss") | shared.yarn_settings(config) | {
            "base_moe_mlp_dim": mlp,
            "num_experts": experts,
            "num_experts_per_tok": config.get("num_experts_per_tok") or config.size("experts_per_token"),
            "mlp_activations": ["sigmoid", "linear"],
            "mlp_activations_limit": float(config.get("swiglu_limit", 7.0)),
            "attention_bias": True,
            "attention_sink": True,
            "routed_bias": True,
            "mlp_bias": True,
            "sliding_window_size": config.size("sliding_window", 128),
            "inhomogeneous_layer_cycle_interval": _PERIOD,
            "rope_type": "yarn",
            "rope_interleave": False,
            "rope_attention_scaling": True,
            "max_position_embeddings": config.size("max_position_embeddings", 131_072),
        },
        sizes_from=shared.SIZES_FROM | {"expert_mlp": "intermediate_size", "expert": "num_local_experts"},
    )  # fmt: skip


def _layer_rules(layer: str) -> tuple[Rule, ...]:
    def rule(source: str, target: str, layout: str) -> Rule:
        return shared.layer_rule(source, target, layout, layer=layer)

    experts, mlp = "mlp.experts", "GptOssMlp"
    return (
        *shared.norms(shared.LLAMA_NORMS, layer=layer),
        *shared.attention(bias=True, out_bias=True, target="GptOssAttention", layer=layer),
        rule("self_attn.sinks", "GptOssAttention-sinks", f"heads -> heads {layer}"),
        rule("mlp.router.weight", f"{mlp}-gate-kernel", f"expert embed -> embed {layer} expert"),
        rule("mlp.router.bias", f"{mlp}-gate-bias", f"expert -> expert {layer}"),
        rule(f"{experts}.gate_up_proj", f"{mlp}-{{part}}",
             f"expert embed (expert_mlp part) -> expert {layer} embed expert_mlp"),
        rule(f"{experts}.gate_up_proj_bias", f"{mlp}-{{part}}_bias",
             f"expert (expert_mlp part) -> expert {layer} expert_mlp"),
        rule(f"{experts}.down_proj", f"{mlp}-wo", f"expert expert_mlp embed -> expert {layer} expert_mlp embed"),
        rule(f"{experts}.down_proj_bias", f"{mlp}-wo_bias", f"expert embed -> expert {layer} embed"),
    )  # fmt: skip
