"""Llama 2, 3, 3.1, 3.2, 3.3 and look-alikes: SmolLM2, Mistral 7B.

Names: transformers ``models/llama/modeling_llama.py``. Query scaling and rope lanes follow what MaxText's Llama and
Mistral decoder blocks compute: no 1/sqrt(head_dim) at run time, interleaved lanes only with ``rope_type: llama3.1``.
"""

from collections.abc import Collection
from typing import Any

from tensorferry.mappings.families import shared
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions, make_dims, register
from tensorferry.mappings.rules.rule import Block
from tensorferry.mappings.words.problems import PlanError, Problem

_LLAMA3_SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192}  # fmt: skip


@register("llama", "llama", "LlamaForCausalLM")
def llama(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """The Llama block."""
    return _make("llama", "llama2", config, names, options)


@register("mistral", "mistral", "MistralForCausalLM")
def mistral(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """The Mistral 7B block: Llama's names and arithmetic, half-split lanes."""
    return _make("mistral", "mistral", config, names, options)


def _make(name: str, block: str, config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    _refuse_biases(config, names)
    interleaved = lanes_interleaved(config, options)
    dims = shared.common_dims(config) | {"mlp": config.size("intermediate_size")}
    scale = shared.query_scale(config.head_dim)
    return Family(
        name=name,
        dims=make_dims(dims),
        blocks={"layer": Block("layers", "layers_{layer}")},
        rules=(
            *shared.token_rules(config, options),
            *shared.norms(shared.LLAMA_NORMS),
            *shared.attention(interleaved=interleaved, query_ops=(scale,)),
            *shared.gated_mlp(),
        ),
        ties=(shared.TIE,),
        ignores=(shared.ROTARY,),
        settings=shared.common_settings(config, options, block) | _rope_settings(config, interleaved),
        sizes_from=shared.SIZES_FROM,
        notes=(_lanes_note(config, options, interleaved),),
    )


def lanes_interleaved(config: Config, options: FamilyOptions) -> bool:
    """Whether q and k lanes are permuted: the checkpoint asks for Llama 3's rope, or the user does."""
    if options.rope_lanes == "auto":
        return config.rope_type == "llama3"
    return options.rope_lanes == "interleaved"


def _rope_settings(config: Config, interleaved: bool) -> dict[str, Any]:
    if not interleaved:
        return {"rope_type": "default"}
    return {"rope_type": "llama3.1", "rope_use_scale": config.rope_type == "llama3"}


def _lanes_note(config: Config, options: FamilyOptions, interleaved: bool) -> str:
    order = "interleaved (MaxText rope_type llama3.1)" if interleaved else "half-split (MaxText rope_type default)"
    why = f"--rope-lanes {options.rope_lanes}"
    if options.rope_lanes == "auto":
        why = f"config.json says rope type {config.rope_type!r}"
    note = f"rope lanes: {order}, because {why}"
    custom = {k: v for k, v in _LLAMA3_SCALING.items() if config.rope.get(k, v) != v}
    if config.rope_type == "llama3" and custom:
        note += f"; config.json scales rope by its own {', '.join(sorted(custom))}, MaxText by {custom}"
    return note


def _refuse_biases(config: Config, names: Collection[str]) -> None:
    """MaxText's Llama blocks have no biases; a checkpoint with them would lose them."""
    biases = [name for name in names if name.endswith("_proj.bias")]
    if biases:
        raise PlanError([Problem(
            biases[0],
            "a Llama block without biases, the only one that MaxText's llama2 and mistral decoder blocks have",
            f"{len(biases)} bias tensors (attention_bias={config.get('attention_bias', False)}, "
            f"mlp_bias={config.get('mlp_bias', False)} in config.json)",
            "If the checkpoint is a Qwen2 under another name, use --family qwen2.",
        )])  # fmt: skip
