"""Qwen3-Next. Names: transformers ``models/qwen3_next/modeling_qwen3_next.py``.

Each cycle of layers ends with full attention, gated; the others are gated delta nets. Scanned, the delta nets of a
cycle are stacked inside the stack of cycles: two axes. Norms stay centred on zero: MaxText's block adds the 1 itself.
"""

from collections.abc import Collection
from typing import Any

from tensorferry.mappings.families import mtp, shared
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions, make_dims, register
from tensorferry.mappings.families.qwen import SEPARATE
from tensorferry.mappings.rules.dims import Grid
from tensorferry.mappings.rules.rule import Block, Rule
from tensorferry.mappings.words.problems import PlanError, Problem

NORMS = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}


@register("qwen3_next", "qwen3_next", "Qwen3NextForCausalLM")
def qwen3_next(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """Qwen3-Next: three delta nets and one full attention in a cycle, routed experts and a shared one in each."""
    layers, period = config.size("num_hidden_layers"), cycle_period(config)
    cycle = {
        "block": range(0, layers, period),
        "local": range(period - 1),
        "linear": Grid(("block", "local")),
        "full": range(period - 1, layers, period),
    }
    rules = (
        *shared.token_rules(config, options),
        *_fused_projections("linear"),
        *delta_net("linear", options),
        *gated_attention("full"),
        *(rule for word in ("linear", "full") for rule in block(names, word)),
    )
    return Family(
        name="qwen3_next",
        dims=make_dims(hybrid_dims(config) | cycle),
        blocks={"linear": Block("layers-local_layers", "layers_{linear}"),
                "full": Block("layers-global_layer", "layers_{full}")},
        rules=rules,
        ties=(shared.TIE,),
        ignores=(shared.ROTARY, mtp.unsupported("mtp.*")),
        settings=hybrid_settings(config, options, "qwen3_next"),
        sizes_from=SIZES_FROM,
        notes=(shared.experts_note(names),),
    )  # fmt: skip


def cycle_period(config: Config) -> int:
    """How many layers make a cycle; the last of each attends to everything.

    Raises:
      PlanError: config.json has other cycles than MaxText runs.
    """
    types = list(config.get("layer_types") or [])
    first = types.index("full_attention") + 1 if "full_attention" in types else 4
    period = config.size("full_attention_interval", first)
    never = "MaxText cannot run this model; there is no layout to convert to."
    shared.refuse_remainder(config.size("num_hidden_layers"), period, fix=never)
    shared.refuse_layer_types(config, period, "MaxText's block has it", others="linear_attention")
    _refuse_dense_layers(config, never)
    return period


def block(names: Collection[str], word: str) -> tuple[Rule, ...]:
    """What every layer has: norms, routed experts, a shared expert and its gate."""
    return (
        *shared.norms(NORMS, layer=word),
        *shared.experts(names, "mlp", "mlp-routed_experts", SEPARATE, word),
        *shared.gated_mlp("mlp.shared_expert", "mlp-shared_expert", word, "shared_mlp"),
        shared.layer_rule("mlp.shared_expert_gate.weight", "mlp-shared_expert_gate-kernel",
                          f"1 embed -> embed {word} 1", layer=word),
    )  # fmt: skip


def gated_attention(word: str) -> tuple[Rule, ...]:
    """Full attention: each head's query and its output gate side by side, the output kernel with merged heads."""
    target = "attention-attention"
    changed = {
        "query": f"(heads query_gate) embed -> embed {word} heads query_gate",
        "out": f"embed (heads head_dim) -> (heads head_dim) {word} embed",
    }
    kept = shared.attention(qk_norm=True, target=target, layer=word)
    return (
        shared.layer_rule("self_attn.q_proj.weight", f"{target}-query-kernel", changed["query"], layer=word),
        *(rule for rule in kept if not rule.source.endswith(("q_proj.weight", "o_proj.weight"))),
        shared.layer_rule("self_attn.o_proj.weight", f"{target}-out-kernel", changed["out"], layer=word),
    )


def delta_net(word: str, options: FamilyOptions) -> tuple[Rule, ...]:
    """A gated delta net without its input projections.

    ``A_log`` is the logarithm of a decay rate, stored in float32 and exponentiated: it stays float32 unless MaxText's
    converter is followed bit for bit.
    """
    leaves = (
        ("conv1d.weight", "conv1d-kernel", f"channel 1 tap -> tap {word} 1 channel", ""),
        ("A_log", "A_log", f"value_heads -> value_heads {word}", shared.kept_float32(options)),
        ("dt_bias", "dt_bias", f"value_heads -> value_heads {word}", ""),
        ("norm.weight", "norm-rms_norm-scale", f"value_dim -> value_dim {word}", ""),
        ("out_proj.weight", "out_proj-kernel", f"embed (value_heads value_dim) -> (value_heads value_dim) {word} embed",
         ""),
    )  # fmt: skip
    return tuple(
        shared.layer_rule(f"linear_attn.{hf}", f"attention-{maxtext}", layout, layer=word, dtype=dtype)
        for hf, maxtext, layout, dtype in leaves
    )


def _fused_projections(word: str) -> tuple[Rule, ...]:
    """Both input projections, stored as MaxText wants them: rows grouped by key head."""
    return tuple(
        shared.layer_rule(f"linear_attn.in_proj_{name}.weight", f"attention-in_proj_{name}-kernel",
                          f"{name} embed -> embed {word} {name}", layer=word)
        for name in ("qkvz", "ba")
    )  # fmt: skip


def hybrid_dims(config: Config) -> dict[str, Any]:
    """Dims of attention, delta nets and experts."""
    keys, values = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    key_dim, value_dim = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
    return shared.common_dims(config) | {
        "query_gate": 2 * config.head_dim,
        "value_heads": values,
        "value_dim": value_dim,
        "channel": 2 * keys * key_dim + values * value_dim,
        "tap": config.size("linear_conv_kernel_dim"),
        "qkvz": 2 * keys * key_dim + 2 * values * value_dim,
        "ba": 2 * values,
        "expert": range(config.size("num_experts")),
        "expert_mlp": config.size("moe_intermediate_size"),
        "shared_mlp": config.size("shared_expert_intermediate_size"),
    }


SIZES_FROM = shared.SIZES_FROM | {
    "query_gate": "head_dim",
    "value_heads": "linear_num_value_heads",
    "value_dim": "linear_value_head_dim",
    "channel": "linear_num_key_heads and the other linear_ sizes",
    "qkvz": "linear_num_key_heads and the other linear_ sizes",
    "ba": "linear_num_value_heads",
    "tap": "linear_conv_kernel_dim",
    "shared_mlp": "shared_expert_intermediate_size",
}
_SETTINGS = {
    "base_mlp_dim": "moe_intermediate_size",
    "base_moe_mlp_dim": "moe_intermediate_size",
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "gdn_conv_kernel_dim": "linear_conv_kernel_dim",
    "gdn_key_head_dim": "linear_key_head_dim",
    "gdn_value_head_dim": "linear_value_head_dim",
    "gdn_num_key_heads": "linear_num_key_heads",
    "gdn_num_value_heads": "linear_num_value_heads",
}


def hybrid_settings(config: Config, options: FamilyOptions, decoder_block: str) -> dict[str, Any]:
    """MaxText settings of the hybrid models."""
    config = config.with_defaults({"intermediate_size": config.size("moe_intermediate_size")})
    rotary = config.get("partial_rotary_factor") or config.rope.get("partial_rotary_factor", 0.25)
    return shared.common_settings(config, options, decoder_block) | shared.settings_from(config, _SETTINGS) | {
        "shared_experts": 1,
        "norm_topk_prob": bool(config.get("norm_topk_prob", True)),
        "inhomogeneous_layer_cycle_interval": cycle_period(config),
        "partial_rotary_factor": float(rotary),
    }  # fmt: skip


def _refuse_dense_layers(config: Config, fix: str) -> None:
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    widths = config.size("shared_expert_intermediate_size"), config.size("moe_intermediate_size")
    if dense or step != 1 or widths[0] != widths[1]:
        raise PlanError([Problem(
            "config.json",
            "routed experts in every layer, and a shared expert as wide as they are: MaxText's block has no other",
            f"mlp_only_layers={dense}, decoder_sparse_step={step}, shared_expert_intermediate_size={widths[0]}, "
            f"moe_intermediate_size={widths[1]}",
            fix,
            file="config.json",
        )])  # fmt: skip
