"""Mixtral. Names: transformers ``models/mixtral/modeling_mixtral.py``. Query scaled as Llama's, lanes kept."""

from collections.abc import Collection

from tensorferry.mappings.families import shared
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions, make_dims, register
from tensorferry.mappings.rules.rule import Block

_NAMES = {"wi_0": "w1", "wi_1": "w3", "wo": "w2"}


@register("mixtral", "mixtral", "MixtralForCausalLM")
def mixtral(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """Mixtral 8x7B and 8x22B; experts one by one, or fused as transformers 5 writes them."""
    fused = "model.layers.0.mlp.experts.gate_up_proj" in names
    source = "mlp" if fused else "block_sparse_moe"
    routed = shared.routed_experts(source, "MoeBlock_0", _NAMES, mlp="mlp")
    if fused:
        routed = (routed[0], *shared.fused_experts(source, "MoeBlock_0", mlp="mlp"))
    mlp, experts = config.size("intermediate_size"), config.size("num_local_experts")
    return Family(
        name="mixtral",
        dims=make_dims(shared.common_dims(config) | {"mlp": mlp, "expert": range(experts)}),
        blocks={"layer": Block("layers", "layers_{layer}")},
        rules=(
            *shared.token_rules(config, options),
            *shared.norms(shared.LLAMA_NORMS),
            *shared.attention(query_ops=(shared.query_scale(config.head_dim),)),
            *routed,
        ),
        ties=(shared.TIE,),
        ignores=(shared.ROTARY,),
        settings=shared.common_settings(config, options, "mixtral") | {
            "base_moe_mlp_dim": mlp,
            "num_experts": experts,
            "num_experts_per_tok": config.size("num_experts_per_tok"),
        },
        sizes_from=shared.SIZES_FROM | {"mlp": "intermediate_size"},
        notes=(f"experts: {'fused, as transformers 5 writes them' if fused else 'one tensor each'}",),
    )  # fmt: skip
