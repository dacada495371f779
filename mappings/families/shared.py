"""Pieces that many families share: embeddings, an attention block, a gated MLP, a routed expert block."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.cycles import layer_cycle as layer_cycle
from tensorferry.mappings.families.cycles import refuse_layer_types as refuse_layer_types
from tensorferry.mappings.families.cycles import refuse_remainder as refuse_remainder
from tensorferry.mappings.families.family import FamilyOptions
from tensorferry.mappings.families.spelling import Spelling as Spelling
from tensorferry.mappings.families.spelling import spelling as spelling
from tensorferry.mappings.families.towers import Tower as Tower
from tensorferry.mappings.families.towers import left_out as left_out
from tensorferry.mappings.families.towers import with_towers as with_towers
from tensorferry.mappings.rules.rule import Ignore, Rule, Tie
from tensorferry.mappings.words.problems import PlanError, Problem
from tensorferry.transforms.ops import Op, Pad, Scale

ROTARY = Ignore("*rotary_emb.inv_freq", why="recomputed from rope_theta")
TIE = Tie("lm_head.weight", to="model.embed_tokens.weight")


def pad_vocab(config: Config, options: FamilyOptions) -> tuple[Op, ...]:
    """The padding of the vocabulary that ``--vocab-size`` asks for.

    Raises:
      PlanError: it asks for less than the checkpoint has.
    """
    wanted, stored = options.vocab_size or 0, config.size("vocab_size")
    if 0 < wanted < stored:
        fix = "Leave --vocab-size out, or give at least the size of the checkpoint's vocabulary."
        raise PlanError([Problem("--vocab-size", f"at least {stored}, vocab_size in config.json", str(wanted), fix)])
    return (Pad("vocab", to=wanted),) if wanted > stored else ()


def token_rules(
    config: Config,
    options: FamilyOptions,
    embed_ops: tuple[Op, ...] = (),
    norm_ops: tuple[Op, ...] = (),
    norm_dtype: str = "",
) -> tuple[Rule, ...]:
    """Embedding, final norm and, unless it is tied, the output head."""
    pad = pad_vocab(config, options)
    rules = (
        Rule("model.embed_tokens.weight", "params-token_embedder-embedding", "vocab embed -> vocab embed",
             (*embed_ops, *pad)),
        Rule("model.norm.weight", "params-decoder-decoder_norm-scale", "embed -> embed",
             norm_ops, norm_dtype),
    )  # fmt: skip
    if config.tied:
        return rules
    head = Rule("lm_head.weight", "params-decoder-logits_dense-kernel", "vocab embed -> embed vocab", pad)
    return (*rules, head)


def layer_rule(
    source: str, target: str, layout: str, ops: tuple[Op, ...] = (), layer: str = "layer", dtype: str = ""
) -> Rule:
    """A rule of every layer: ``model.layers.{layer}.SOURCE`` to ``params-decoder-[layer]-TARGET``."""
    return Rule(f"model.layers.{{{layer}}}.{source}", f"params-decoder-[{layer}]-{target}", layout, ops, dtype)


def query_scale(head_dim: int) -> Scale:
    """1/sqrt(head_dim), which MaxText's Llama, Mistral and Mixtral blocks expect inside the query kernel."""
    return Scale(1.0 / math.sqrt(head_dim))


def attention(
    *,
    interleaved: bool = False,
    query_ops: tuple[Op, ...] = (),
    bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
    norm_ops: tuple[Op, ...] = (),
    norm_dtype: str = "",
    target: str = "self_attention",
    layer: str = "layer",
    kv_heads: str = "kv_heads",
    head_dim: str = "head_dim",
) -> tuple[Rule, ...]:
    """Grouped-query attention: q, k, v, o, their biases and per-head norms.

    Args:
      interleaved: rotary lanes go from half-split (lane ``i`` pairs with ``i + head_dim/2``) to interleaved
        (``2i`` pairs with ``2i+1``), the order MaxText's ``rope_type: llama3.1`` rotates.
      query_ops: arithmetic on the query kernel alone.
      bias: q, k and v have biases.
      out_bias: o has one.
      qk_norm: queries and keys of each head are normalised.
      norm_ops: arithmetic on those norms.
      norm_dtype: their target dtype.
      kv_heads, head_dim: the words of these dims, where layers of one model differ in them.
    """
    into = "(pair half)" if interleaved else head_dim
    lanes = "half pair" if interleaved else head_dim
    rules = [
        layer_rule("self_attn.q_proj.weight", f"{target}-query-kernel",
                   f"(heads {lanes}) embed -> embed {layer} heads {into}", query_ops, layer),
        layer_rule("self_attn.k_proj.weight", f"{target}-key-kernel",
                   f"({kv_heads} {lanes}) embed -> embed {layer} {kv_heads} {into}", (), layer),
        layer_rule("self_attn.v_proj.weight", f"{target}-value-kernel",
                   f"({kv_heads} {head_dim}) embed -> embed {layer} {kv_heads} {head_dim}", (), layer),
        layer_rule("self_attn.o_proj.weight", f"{target}-out-kernel",
                   f"embed (heads {head_dim}) -> heads {layer} {head_dim} embed", (), layer),
    ]  # fmt: skip
    if bias:
        for short, name, heads in (
            ("q", "query", "heads"),
            ("k", "key", kv_heads),
            ("v", "value", kv_heads),
        ):
            split, merged = (lanes, into) if short != "v" else (head_dim, head_dim)
            rules.append(
                layer_rule(f"self_attn.{short}_proj.bias", f"{target}-{name}-bias",
                           f"({heads} {split}) -> {heads} {layer} {merged}",
                           query_ops if short == "q" else (), layer)
            )  # fmt: skip
    if out_bias:
        rules.append(layer_rule("self_attn.o_proj.bias", f"{target}-out-bias", f"embed -> embed {layer}", (), layer))
    if qk_norm:
        rules += [
            layer_rule(f"self_attn.{short}_norm.weight", f"{target}-{name}_norm-scale",
                       f"{head_dim} -> {head_dim} {layer}", norm_ops, layer, norm_dtype)
            for short, name in (("q", "query"), ("k", "key"))
        ]  # fmt: skip
    return tuple(rules)


def norms(
    names: Mapping[str, str], ops: tuple[Op, ...] = (), layer: str = "layer", dtype: str = ""
) -> tuple[Rule, ...]:
    """Per-layer norm scales: Hugging Face module name to MaxText module name."""
    return tuple(
        layer_rule(f"{hf}.weight", f"{maxtext}-scale", f"embed -> embed {layer}", ops, layer, dtype)
        for hf, maxtext in names.items()
    )


LLAMA_NORMS = {
    "input_layernorm": "pre_self_attention_layer_norm",
    "post_attention_layernorm": "post_self_attention_layer_norm",
}


def gated_mlp(source: str = "mlp", target: str = "mlp", layer: str = "layer", mlp: str = "mlp") -> tuple[Rule, ...]:
    """A gated MLP: gate, up and down projections, all transposed."""
    return tuple(
        layer_rule(f"{source}.{hf}.weight", f"{target}-{maxtext}-kernel",
                   f"{into} {out} -> {out} {layer} {into}", (), layer)
        for hf, maxtext, into, out in (
            ("gate_proj", "wi_0", mlp, "embed"),
            ("up_proj", "wi_1", mlp, "embed"),
            ("down_proj", "wo", "embed", mlp),
        )
    )  # fmt: skip


def routed_experts(
    source: str,
    target: str,
    spelling: Mapping[str, str],
    layer: str = "layer",
    mlp: str = "expert_mlp",
    router: str = "gate",
) -> tuple[Rule, ...]:
    """A routed expert block whose experts are separate tensors, and its router.

    Args:
      source: module name before ``.experts.{expert}``, e.g. ``mlp``.
      target: MaxText's block name, e.g. ``moe_block``.
      spelling: ``wi_0``, ``wi_1`` and ``wo`` to the checkpoint's names for them.
    """
    gate = layer_rule(f"{source}.{router}.weight", f"{target}-gate-kernel",
                      f"expert embed -> embed {layer} expert", (), layer)  # fmt: skip
    experts = tuple(
        layer_rule(f"{source}.experts.{{expert}}.{spelling[name]}.weight", f"{target}-{name}",
                   f"{rows} {cols} -> expert {layer} {cols} {rows}", (), layer)
        for name, rows, cols in (("wi_0", mlp, "embed"), ("wi_1", mlp, "embed"), ("wo", "embed", mlp))
    )  # fmt: skip
    return (gate, *experts)


def fused_experts(source: str, target: str, layer: str = "layer", mlp: str = "expert_mlp") -> tuple[Rule, ...]:
    """Experts as transformers 5 fuses them: ``gate_up_proj [expert, 2 mlp, embed]`` and
    ``down_proj [expert, embed, mlp]``; ``source`` may be empty."""
    experts = f"{source}.experts".removeprefix(".")
    return (
        layer_rule(f"{experts}.gate_up_proj", f"{target}-{{part}}",
                   f"expert (part {mlp}) embed -> expert {layer} embed {mlp}", (), layer),
        layer_rule(f"{experts}.down_proj", f"{target}-wo",
                   f"expert embed {mlp} -> expert {layer} {mlp} embed", (), layer),
    )  # fmt: skip


def experts(
    names: Collection[str],
    source: str,
    target: str,
    spelling: Mapping[str, str],
    layer: str = "layer",
    mlp: str = "expert_mlp",
) -> tuple[Rule, ...]:
    """A routed expert block as the checkpoint spells it: one tensor per expert, or fused; arguments as
    ``routed_experts``."""
    separate = routed_experts(source, target, spelling, layer, mlp)
    return (separate[0], *fused_experts(source, target, layer, mlp)) if experts_fused(names) else separate


def experts_fused(names: Collection[str]) -> bool:
    """Whether the checkpoint holds its experts fused, as transformers 5 writes them."""
    return any(name.endswith(".experts.gate_up_proj") for name in names)


def experts_note(names: Collection[str]) -> str:
    """Which spelling of the experts was found, for the plan."""
    return f"experts: {'fused, as transformers 5 writes them' if experts_fused(names) else 'one tensor each'}"


def kept_float32(options: FamilyOptions) -> str:
    """The target dtype of float32 leaves whose rounding matters: float32, or as MaxText's converter rounds them."""
    return "" if options.match_maxtext else "float32"


def common_dims(config: Config) -> dict[str, Any]:
    """Dims that every decoder with grouped-query attention has."""
    head_dim = config.head_dim
    return {
        "layer": range(config.size("num_hidden_layers")),
        "vocab": config.size("vocab_size"),
        "embed": config.size("hidden_size"),
        "heads": config.size("num_attention_heads"),
        "kv_heads": config.kv_heads,
        "head_dim": head_dim,
        "half": 2,
        "pair": head_dim // 2,
        "part": ("wi_0", "wi_1"),
    }


SIZES_FROM = {
    "layer": "num_hidden_layers",
    "vocab": "vocab_size",
    "embed": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "pair": "head_dim",
    "mlp": "intermediate_size",
    "expert_mlp": "moe_intermediate_size",
    "expert": "num_experts",
}


def common_settings(config: Config, options: FamilyOptions, decoder_block: str) -> dict[str, Any]:
    """MaxText settings that every decoder needs, from config.json."""
    settings: dict[str, Any] = {
        "decoder_block": decoder_block,
        "base_emb_dim": config.size("hidden_size"),
        "base_num_query_heads": config.size("num_attention_heads"),
        "base_num_kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "base_mlp_dim": config.size("intermediate_size"),
        "base_num_decoder_layers": config.size("num_hidden_layers"),
        "vocab_size": options.vocab_size or config.size("vocab_size"),
        "mlp_activations": [config.get("hidden_act", "silu"), "linear"],
        "enable_dropout": False,
        "normalization_layer_epsilon": float(config.get("rms_norm_eps", 1e-5)),
        "rope_max_timescale": _number(config.rope_theta),
        "logits_via_embedding": config.tied,
    }
    if config.tied:
        settings["normalize_embedding_logits"] = False
    return settings


def settings_from(config: Config, keys: Mapping[str, str]) -> dict[str, Any]:
    """MaxText settings that are sizes of config.json under another name."""
    return {setting: config.size(key) for setting, key in keys.items()}


def mrope_settings(config: Config) -> dict[str, Any]:
    """MaxText's settings of rotary positions in time, height and width, where config.json splits the lanes so."""
    section = config.rope.get("mrope_section")
    return {"use_mrope": True, "mrope_section": list(section)} if section else {}


def yarn_settings(config: Config) -> dict[str, Any]:
    """MaxText's settings of YaRN, from config.json's rope parameters."""
    rope = config.rope
    return {
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", 4096),
        "rope_factor": rope.get("factor", 40),
        "beta_fast": rope.get("beta_fast", 32),
        "beta_slow": rope.get("beta_slow", 1),
        "rope_truncate": bool(rope.get("truncate", True)),
        "rope_attention_scaling": False,
    }


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


def holds(names: Collection[str], name: str) -> bool:
    """Whether the checkpoint holds a tensor of this name, for optional tensors such as biases."""
    return name in names
