"""Qwen2 and 2.5, Qwen3 dense, Qwen3-MoE. Names: transformers ``models/qwen3_moe/modeling_qwen3_moe.py``.

No rope permutation and no query scaling: MaxText's Qwen blocks rotate half-split lanes and scale at run time.
"""

from collections.abc import Collection

from tensorferry.mappings.families import shared
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions, make_dims, register
from tensorferry.mappings.rules.rule import Block, Rule
from tensorferry.mappings.words.problems import PlanError, Problem

SEPARATE = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}


@register("qwen2", "qwen2", "Qwen2ForCausalLM")
def qwen2(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """Qwen2 and 2.5: biases on q, k and v."""
    return _dense("qwen2", config, options, bias=True, qk_norm=False)


@register("qwen3", "qwen3", "Qwen3ForCausalLM")
def qwen3(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """Qwen3 dense: a norm on each query and key head."""
    return _dense("qwen3", config, options, bias=False, qk_norm=True)


@register("qwen3_moe", "qwen3_moe", "Qwen3MoeForCausalLM")
def qwen3_moe(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """Qwen3 with a routed expert block in every layer."""
    return routed(config, options, shared.experts(names, "mlp", "moe_block", SEPARATE), shared.experts_note(names))


def routed(config: Config, options: FamilyOptions, experts: tuple[Rule, ...], note: str) -> Family:
    """A Qwen3 of routed experts, however the checkpoint spells them.

    Args:
      experts: rules of the router and the experts.
      note: what was found, for the plan.
    """
    _refuse_dense_layers(config)
    dims = shared.common_dims(config) | {
        "expert": range(config.size("num_experts")),
        "expert_mlp": config.size("moe_intermediate_size"),
    }
    # A model of experts only: MaxText wants both widths equal, whatever intermediate_size says.
    config = config.with_defaults({"intermediate_size": config.size("moe_intermediate_size")})
    settings = shared.common_settings(config, options, "qwen3_moe") | {
        "base_mlp_dim": config.size("moe_intermediate_size"),
        "base_moe_mlp_dim": config.size("moe_intermediate_size"),
        "num_experts": config.size("num_experts"),
        "num_experts_per_tok": config.size("num_experts_per_tok"),
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
        "use_qk_norm": True,
    }
    rules = (
        *shared.token_rules(config, options),
        *shared.norms(shared.LLAMA_NORMS),
        *shared.attention(qk_norm=True),
        *experts,
    )
    return _family("qwen3_moe", dims, rules, settings, (note,))


def _dense(name: str, config: Config, options: FamilyOptions, bias: bool, qk_norm: bool) -> Family:
    dims = shared.common_dims(config) | {"mlp": config.size("intermediate_size")}
    settings = shared.common_settings(config, options, name) | {
        "use_qk_norm": qk_norm,
        "attention_bias": bias,
    }
    rules = (
        *shared.token_rules(config, options),
        *shared.norms(shared.LLAMA_NORMS),
        *shared.attention(bias=bias, qk_norm=qk_norm),
        *shared.gated_mlp(),
    )
    return _family(name, dims, rules, settings)


def _family(name: str, dims: dict, rules: tuple[Rule, ...], settings: dict, notes: tuple[str, ...] = ()) -> Family:
    return Family(
        name=name,
        dims=make_dims(dims),
        blocks={"layer": Block("layers", "layers_{layer}")},
        rules=rules,
        ties=(shared.TIE,),
        ignores=(shared.ROTARY,),
        settings=settings,
        sizes_from=shared.SIZES_FROM,
        notes=notes,
    )


def _refuse_dense_layers(config: Config) -> None:
    dense = config.get("mlp_only_layers") or []
    step = config.get("decoder_sparse_step", 1)
    if dense or step != 1:
        raise PlanError([Problem(
            "config.json",
            "routed experts in every layer: MaxText's qwen3_moe block has no dense layers",
            f"mlp_only_layers={dense}, decoder_sparse_step={step}",
            "MaxText cannot run this model; there is no layout to convert to.",
            file="config.json",
        )])  # fmt: skip
