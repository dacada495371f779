"""The vision tower of Qwen3-VL, Qwen3-Omni and Qwen3.5: plain layers, one array each in both modes."""

from dataclasses import dataclass, field
from typing import Any

from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import FamilyOptions
from tensorferry.mappings.families.shared import Tower, left_out
from tensorferry.mappings.rules.rule import Rule
from tensorferry.mappings.words.problems import PlanError, Problem

_EMBED = "vision_embed"
_HEADS = "vision_heads vision_head_dim"
_SIZES = {
    "vision_embed": "hidden_size",
    "vision_mlp": "intermediate_size",
    "vision_heads": "num_heads",
    "colour": "in_channels",
    "frame": "temporal_patch_size",
    "patch_row": "patch_size",
    "patch_col": "patch_size",
    "place": "num_position_embeddings",
    "vision_out": "out_hidden_size",
}
_SETTINGS = {
    "hidden_size_for_vit": "hidden_size",
    "intermediate_size_for_vit": "intermediate_size",
    "num_attention_heads_for_vit": "num_heads",
    "num_hidden_layers_for_vit": "depth",
    "num_channels_for_vit": "in_channels",
    "patch_size_for_vit": "patch_size",
    "temporal_patch_size_for_vit": "temporal_patch_size",
    "spatial_merge_size_for_vit": "spatial_merge_size",
    "out_hidden_size_for_vit": "out_hidden_size",
    "num_position_embeddings_for_vit": "num_position_embeddings",
}


@dataclass(frozen=True, slots=True)
class Spelling:
    """What differs between the towers.

    Attributes:
      source: prefix of the tower's tensors.
      classes: MaxText's class names before ``Encoder_0`` and ``Projector_0``.
      block: MaxText's ``vision_encoder_block``.
      mergers: name of the list of mergers that feed early decoder layers.
      merger: names of a merger's norm and two linear layers.
    """

    source: str
    classes: str
    block: str
    mergers: str = "deepstack_merger_list"
    merger: tuple[str, str, str] = field(default=("norm", "linear_fc1", "linear_fc2"))


def tower(config: Config, options: FamilyOptions, spelled: Spelling) -> Tower:
    """The tower: its rules with ``--multimodal``, else its names to leave out.

    Raises:
      PlanError: early decoder layers take the tower's features, which MaxText cannot scan.
    """
    if not options.multimodal:
        return left_out((f"{spelled.source}*",), "vision tower and its projector, which a text model lacks")
    vision = config.part("vision_config")
    deep = list(vision.get("deepstack_visual_indexes") or [])
    if deep and options.scan_layers:
        raise PlanError([Problem(
            "--multimodal",
            "layers that are not scanned: MaxText adds the vision tower's features to single decoder layers",
            "--scan-layers",
            "Convert with --no-scan-layers, or without --multimodal.",
        )])  # fmt: skip
    embed, merge = vision.size("hidden_size"), vision.size("spatial_merge_size")
    return Tower(
        dims={word: vision.size(key) for word, key in _SIZES.items()} | {
            "vision_layer": range(vision.size("depth")),
            "vision_head_dim": embed // vision.size("num_heads"),
            "projection": ("query", "key", "value"),
            "merged": embed * merge * merge,
            "inner": embed * merge * merge,
        } | ({"merger": range(len(deep))} if deep else {}),
        rules=_rules(spelled, bool(deep)),
        settings=_settings(vision, deep, spelled.block),
        sizes_from={word: f"vision_config.{key}" for word, key in _SIZES.items()},
        notes=("vision tower and projector included",),
    )  # fmt: skip


def _rules(spelled: Spelling, deep: bool) -> tuple[Rule, ...]:
    tower = f"params-vision_encoder-{spelled.classes}Encoder_0"
    layer, block = f"{spelled.source}blocks.{{vision_layer}}.", f"{tower}-blocks_{{vision_layer}}-"
    merger = f"{spelled.source}{spelled.mergers}.{{merger}}."
    return (
        Rule(f"{spelled.source}patch_embed.proj.weight", f"{tower}-patch_embed-proj-kernel",
             f"{_EMBED} colour frame patch_row patch_col -> frame patch_row patch_col colour {_EMBED}"),
        Rule(f"{spelled.source}patch_embed.proj.bias", f"{tower}-patch_embed-proj-bias", f"{_EMBED} -> {_EMBED}"),
        Rule(f"{spelled.source}pos_embed.weight", f"{tower}-pos_embed_interpolate-pos_embed",
             f"place {_EMBED} -> place {_EMBED}"),
        *norm(f"{layer}norm1", f"{block}ln1", _EMBED),
        *norm(f"{layer}norm2", f"{block}ln2", _EMBED),
        Rule(f"{layer}attn.qkv.weight", f"{block}attn-attn-{{projection}}-kernel",
             f"(projection {_HEADS}) {_EMBED} -> {_EMBED} {_HEADS}"),
        Rule(f"{layer}attn.qkv.bias", f"{block}attn-attn-{{projection}}-bias", f"(projection {_HEADS}) -> {_HEADS}"),
        *linear(f"{layer}attn.proj", f"{block}attn-attn-out", _EMBED, _HEADS),
        *linear(f"{layer}mlp.linear_fc1", f"{block}mlp", "vision_mlp", _EMBED),
        *linear(f"{layer}mlp.linear_fc2", f"{block}mlp_out", _EMBED, "vision_mlp"),
        *(_merger(merger, f"{tower}-merger_{{merger}}", spelled, "merged") if deep else ()),
        *_merger(f"{spelled.source}merger.", f"params-vision_encoder-{spelled.classes}Projector_0-merger", spelled,
                 _EMBED),
    )  # fmt: skip


def _merger(source: str, target: str, spelled: Spelling, normed: str) -> tuple[Rule, ...]:
    """Patches made one: a norm, before they are joined or after, and two linear layers."""
    name, first, second = spelled.merger
    # The inner width equals the joined one; as a dim of its own it can stand on both sides of one matrix.
    return (
        *norm(f"{source}{name}", f"{target}-ln_q", normed),
        *linear(f"{source}{first}", f"{target}-mlp_0", "inner", "merged"),
        *linear(f"{source}{second}", f"{target}-mlp_2", "vision_out", "inner"),
    )


def norm(source: str, target: str, dim: str) -> tuple[Rule, ...]:
    """A layer norm: scale and bias."""
    return tuple(
        Rule(f"{source}.{hf}", f"{target}-{maxtext}", f"{dim} -> {dim}")
        for hf, maxtext in (("weight", "scale"), ("bias", "bias"))
    )


def linear(source: str, target: str, out: str, into: str, bias: bool = True) -> tuple[Rule, ...]:
    """A linear layer; several dims in one axis of the checkpoint are axes of their own in MaxText."""
    kernel = Rule(f"{source}.weight", f"{target}-kernel", f"({out}) ({into}) -> {into} {out}")
    return (kernel, Rule(f"{source}.bias", f"{target}-bias", f"({out}) -> {out}")) if bias else (kernel,)


def _settings(vision: Config, deep: list[int], block: str) -> dict[str, Any]:
    return {setting: vision.size(key) for setting, key in _SETTINGS.items()} | {
        "use_multimodal": True,
        "vision_encoder_block": block,
        "deepstack_visual_indexes_for_vit": deep,
    }
