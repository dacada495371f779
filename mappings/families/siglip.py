"""Gemma 3's vision tower, SigLIP, and its projector: plain layers, spelt out one by one in both modes."""

from collections.abc import Collection
from typing import Any

from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import FamilyOptions
from tensorferry.mappings.families.shared import Tower, left_out
from tensorferry.mappings.rules.rule import Rule
from tensorferry.transforms.ops import Shift

_TOWER = "params-vision_encoder-Gemma3VisionEncoderLayer_0"
_LAYER = f"{_TOWER}-Transformer-encoderblock_{{vision_layer}}"
_EMBED = "vision_embed"
_HEADS = "vision_heads vision_head_dim"
_SIZES = {
    "vision_embed": "hidden_size",
    "vision_mlp": "intermediate_size",
    "vision_heads": "num_attention_heads",
    "vision_layer": "num_hidden_layers",
}


def tower(config: Config, names: Collection[str], options: FamilyOptions) -> Tower:
    """The tower of a Gemma 3 checkpoint: its rules with ``--multimodal``, else its names to leave out."""
    patterns = ("*vision_tower.*", "*multi_modal_projector.*")
    if not options.multimodal:
        return left_out(patterns, "vision tower and its projector, which a text model lacks")
    prefix = "model." if any(name.startswith("model.vision_tower.") for name in names) else ""
    vision = config.part("vision_config")
    patch, image = vision.size("patch_size"), vision.size("image_size")
    return Tower(
        dims={word: vision.size(key) for word, key in _SIZES.items()} | {
            "vision_layer": range(vision.size("num_hidden_layers")),
            "vision_head_dim": vision.size("hidden_size") // vision.size("num_attention_heads"),
            "channel": vision.size("num_channels", 3),
            "patch_row": patch,
            "patch_col": patch,
            "place": (image // patch) ** 2,
        },
        rules=_rules(f"{prefix}vision_tower.vision_model.", f"{prefix}multi_modal_projector."),
        settings=_settings(vision, patch),
        sizes_from={word: f"vision_config.{key}" for word, key in _SIZES.items()},
        notes=("vision tower and projector included",),
    )  # fmt: skip


def _rules(source: str, projector: str) -> tuple[Rule, ...]:
    layer = f"{source}encoder.layers.{{vision_layer}}."
    embedder = "params-vision_encoder-VisionEmbedder_0"
    return (
        Rule(f"{source}embeddings.patch_embedding.weight", f"{_TOWER}-embedding-kernel",
             f"{_EMBED} channel patch_row patch_col -> patch_row patch_col channel {_EMBED}"),
        Rule(f"{source}embeddings.patch_embedding.bias", f"{_TOWER}-embedding-bias", f"{_EMBED} -> {_EMBED}"),
        Rule(f"{source}embeddings.position_embedding.weight", f"{_TOWER}-pos_embedding",
             f"place {_EMBED} -> 1 place {_EMBED}"),
        *_norm(f"{source}post_layernorm", f"{_TOWER}-Transformer-encoder_norm"),
        *_norm(f"{layer}layer_norm1", f"{_LAYER}-LayerNorm_0"),
        *_norm(f"{layer}layer_norm2", f"{_LAYER}-LayerNorm_1"),
        *_linear(f"{layer}mlp.fc1", f"{_LAYER}-MlpBlockViT_0-Dense_0", "vision_mlp", _EMBED),
        *_linear(f"{layer}mlp.fc2", f"{_LAYER}-MlpBlockViT_0-Dense_1", _EMBED, "vision_mlp"),
        *(rule for short, name in (("q", "query"), ("k", "key"), ("v", "value"))
          for rule in _linear(f"{layer}self_attn.{short}_proj", f"{_LAYER}-MultiHeadDotProductAttention_0-{name}",
                              _HEADS, _EMBED)),
        *_linear(f"{layer}self_attn.out_proj", f"{_LAYER}-MultiHeadDotProductAttention_0-out", _EMBED, _HEADS),
        Rule(f"{projector}mm_input_projection_weight", f"{embedder}-mm_input_projection-w",
             f"{_EMBED} embed -> {_EMBED} embed"),
        Rule(f"{projector}mm_soft_emb_norm.weight", f"{embedder}-mm_soft_embedding_norm-scale",
             f"{_EMBED} -> {_EMBED}", (Shift(1.0),), "float32"),
    )  # fmt: skip


def _norm(source: str, target: str) -> tuple[Rule, ...]:
    leaves = {"weight": "scale", "bias": "bias"}
    return tuple(Rule(f"{source}.{hf}", f"{target}-{mt}", f"{_EMBED} -> {_EMBED}") for hf, mt in leaves.items())


def _linear(source: str, target: str, out: str, into: str) -> tuple[Rule, ...]:
    """A linear layer with bias; several dims in one axis of the checkpoint are axes of their own in MaxText."""
    return (
        Rule(f"{source}.weight", f"{target}-kernel", f"({out}) ({into}) -> {into} {out}"),
        Rule(f"{source}.bias", f"{target}-bias", f"({out}) -> {out}"),
    )


def _settings(vision: Config, patch: int) -> dict[str, Any]:
    return {
        "use_multimodal": True,
        "vision_encoder_block": "gemma3",
        "image_size_for_vit": vision.size("image_size"),
        "num_channels_for_vit": vision.size("num_channels", 3),
        "patch_size_for_vit": patch,
        "conv_stride_for_vit": patch,
        "hidden_size_for_vit": vision.size("hidden_size"),
        "intermediate_size_for_vit": vision.size("intermediate_size"),
        "num_hidden_layers_for_vit": vision.size("num_hidden_layers"),
        "num_attention_heads_for_vit": vision.size("num_attention_heads"),
    }
