"""Gemma 4's vision tower and its projector: plain layers, spelt out one by one in both modes."""

from collections.abc import Collection
from typing import Any

from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import FamilyOptions
from tensorferry.mappings.families.shared import Tower, left_out
from tensorferry.mappings.rules.rule import Rule

_TOWER = "params-vision_encoder-Gemma4VisionEncoderLayer_0"
_EMBED = "vision_embed"
_PATTERNS = ("*vision_tower.*", "*embed_vision.*", "*audio_tower.*", "*embed_audio.*")
_SIZES = {
    "vision_embed": "hidden_size",
    "vision_mlp": "intermediate_size",
    "vision_heads": "num_attention_heads",
    "vision_head_dim": "head_dim",
    "vision_layer": "num_hidden_layers",
    "vision_place": "position_embedding_size",
}
_NORMS = {
    "input_layernorm": "pre_attention_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "pre_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def tower(config: Config, names: Collection[str], options: FamilyOptions) -> Tower:
    """The tower of a Gemma 4 checkpoint: its rules with ``--multimodal``, else its names to leave out."""
    if not options.multimodal:
        return left_out(_PATTERNS, "vision or audio tower, which a text model lacks")
    if config.get("hidden_size_per_layer_input"):
        tower = left_out(_PATTERNS, "MaxText's gemma4_small block has no towers")
        return Tower(ignores=tower.ignores, notes=("towers left out: MaxText's gemma4_small block has none",))
    prefix = "model." if any(name.startswith("model.vision_tower.") for name in names) else ""
    vision = config.part("vision_config")
    patch = vision.size("patch_size")
    sizes = {word: vision.size(key) for word, key in _SIZES.items()}
    return Tower(
        dims=sizes | {"vision_layer": range(sizes["vision_layer"]), "patch": 3 * patch * patch, "axis": 2},
        rules=_rules(f"{prefix}vision_tower.", f"{prefix}embed_vision.", bool(vision.get("standardize"))),
        settings=_settings(config, vision),
        sizes_from={word: f"vision_config.{key}" for word, key in _SIZES.items()},
        notes=("vision tower and projector included",),
    )


def _rules(source: str, projector: str, standardize: bool) -> tuple[Rule, ...]:
    entry = f"{_TOWER}-vision_entry"
    layer, block = f"{source}encoder.layers.{{vision_layer}}.", f"{_TOWER}-layer_{{vision_layer}}-"
    heads = "vision_heads vision_head_dim"
    rules = (
        Rule(f"{source}patch_embedder.input_proj.weight", f"{entry}-input_projection-kernel",
             f"{_EMBED} patch -> patch {_EMBED}"),
        Rule(f"{source}patch_embedder.position_embedding_table", f"{entry}-pos_emb_param",
             f"axis vision_place {_EMBED} -> vision_place axis {_EMBED}"),
        Rule(f"{projector}embedding_projection.weight",
             "params-vision_encoder-Gemma4VisionProjector_0-projection-kernel", f"embed {_EMBED} -> {_EMBED} embed"),
        *(Rule(f"{layer}{hf}.weight", f"{block}{maxtext}-scale", f"{_EMBED} -> {_EMBED}")
          for hf, maxtext in _NORMS.items()),
        *(Rule(f"{layer}self_attn.{short}_norm.weight", f"{block}attention-{name}_norm-scale",
               "vision_head_dim -> vision_head_dim") for short, name in (("q", "query"), ("k", "key"))),
        *(Rule(f"{layer}self_attn.{short}_proj.linear.weight", f"{block}attention-{name}-kernel",
               f"({heads}) {_EMBED} -> {_EMBED} {heads}")
          for short, name in (("q", "query"), ("k", "key"), ("v", "value"))),
        Rule(f"{layer}self_attn.o_proj.linear.weight", f"{block}attention-out-kernel",
             f"{_EMBED} ({heads}) -> {heads} {_EMBED}"),
        *(Rule(f"{layer}mlp.{hf}.linear.weight", f"{block}mlp-{maxtext}-kernel", f"{out} {into} -> {into} {out}")
          for hf, maxtext, out, into in (("gate_proj", "wi_0", "vision_mlp", _EMBED),
                                         ("up_proj", "wi_1", "vision_mlp", _EMBED),
                                         ("down_proj", "wo", _EMBED, "vision_mlp"))),
    )  # fmt: skip
    if not standardize:
        return rules
    return (*rules, *(Rule(f"{source}{name}", f"{_TOWER}-{name}", f"{_EMBED} -> {_EMBED}")
                      for name in ("std_scale", "std_bias")))  # fmt: skip


def _settings(config: Config, vision: Config) -> dict[str, Any]:
    patch = vision.size("patch_size")
    return {
        "use_multimodal": True,
        "vision_encoder_block": "gemma4",
        "rope_theta_for_vit": int(vision.rope.get("rope_theta", 100)),
        "num_channels_for_vit": 3,
        "patch_size_for_vit": patch,
        "conv_stride_for_vit": patch,
        "hidden_size_for_vit": vision.size("hidden_size"),
        "intermediate_size_for_vit": vision.size("intermediate_size"),
        "num_hidden_layers_for_vit": vision.size("num_hidden_layers"),
        "num_attention_heads_for_vit": vision.size("num_attention_heads"),
        "vision_output_length": config.size("vision_soft_tokens_per_image", 280),
        "num_position_embeddings_for_vit": vision.size("position_embedding_size"),
    }
