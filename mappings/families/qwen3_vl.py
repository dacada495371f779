"""Qwen3-VL, dense and with routed experts. Names: transformers ``models/qwen3_vl_moe/modeling_qwen3_vl_moe.py``.

A Qwen3 whose fused experts are stored the other way round: inputs before outputs.
"""

from collections.abc import Collection
from dataclasses import replace

from tensorferry.mappings.families import qwen, qwen_vision, shared
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions, register
from tensorferry.mappings.rules.rule import Rule

_VISION = qwen_vision.Spelling("model.visual.", "Qwen3VLVision", "qwen3_vl")


@register("qwen3_vl", "qwen3_vl", "Qwen3VLForConditionalGeneration")
def qwen3_vl(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """Qwen3-VL, dense."""
    return _with_vision("qwen3_vl", qwen.qwen3(config, names, options), config, names, options)


@register("qwen3_vl_moe", "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration")
def qwen3_vl_moe(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """Qwen3-VL with a routed expert block in every layer."""
    text = qwen.routed(config, options, _experts(), "experts: fused, inputs before outputs")
    return _with_vision("qwen3_vl_moe", text, config, names, options)


def _with_vision(name: str, text: Family, config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    family = shared.with_towers(text, name, shared.spelling(names), qwen_vision.tower(config, options, _VISION))
    return replace(family, settings={**family.settings, **shared.mrope_settings(config)})


def _experts() -> tuple[Rule, ...]:
    gate = shared.routed_experts("mlp", "moe_block", qwen.SEPARATE)[0]
    return (
        gate,
        shared.layer_rule("mlp.experts.gate_up_proj", "moe_block-{part}",
                          "expert embed (part expert_mlp) -> expert layer embed expert_mlp"),
        shared.layer_rule("mlp.experts.down_proj", "moe_block-wo",
                          "expert expert_mlp embed -> expert layer expert_mlp embed"),
    )  # fmt: skip
