"""Qwen3-Omni's thinker. Names: transformers ``models/qwen3_omni_moe/modeling_qwen3_omni_moe.py``.

A Qwen3 with routed experts that sees and hears; the talker, which speaks, has no counterpart in MaxText.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from tensorferry.mappings.families import qwen, qwen_vision, shared
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions, register
from tensorferry.mappings.families.qwen_vision import linear, norm
from tensorferry.mappings.rules.rule import Ignore, Rule

_VISION = qwen_vision.Spelling(
    "thinker.visual.", "Qwen3OmniMoeVision", "qwen3_omni", mergers="merger_list", merger=("ln_q", "mlp.0", "mlp.2")
)
_AUDIO = "thinker.audio_tower."
_SPEECH = "speech output, which MaxText's model lacks"
_EMBED = "audio_embed"
_HEADS = "audio_heads audio_head_dim"


@register("qwen3_omni_moe", "qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration")
def qwen3_omni_moe(config: Config, names: Collection[str], options: FamilyOptions) -> Family:
    """Qwen3-Omni: the thinker's language model, with ``--multimodal`` its vision and audio towers too."""
    text = qwen.qwen3_moe(config, names, options)
    towers = qwen_vision.tower(config, options, _VISION), _audio(config.part("audio_config"), options)
    family = shared.with_towers(text, "qwen3_omni_moe", shared.spelling(names), *towers)
    return replace(
        family,
        ignores=(*family.ignores, Ignore("talker.*", why=_SPEECH), Ignore("code2wav.*", why=_SPEECH)),
        settings={**family.settings, **shared.mrope_settings(config)},
    )


def _audio(audio: Config, options: FamilyOptions) -> shared.Tower:
    if not options.multimodal:
        return shared.left_out((f"{_AUDIO}*",), "audio tower, which a text model lacks")
    channels, embed, bins = (audio.size(key) for key in ("downsample_hidden_size", "d_model", "num_mel_bins"))
    for _ in range(3):
        bins = (bins + 1) // 2
    return shared.Tower(
        dims={
            "audio_layer": range(audio.size("encoder_layers")),
            "audio_embed": embed,
            "audio_inner": embed,
            "audio_heads": audio.size("encoder_attention_heads"),
            "audio_head_dim": embed // audio.size("encoder_attention_heads"),
            "audio_mlp": audio.size("encoder_ffn_dim"),
            "audio_out": audio.size("output_dim"),
            "audio_channel": channels,
            "audio_channel_in": channels,
            "bins": channels * bins,
            "tap_row": 3,
            "tap_col": 3,
        },
        rules=_audio_rules(),
        settings=_audio_settings(audio),
        sizes_from={"audio_embed": "audio_config.d_model", "audio_mlp": "audio_config.encoder_ffn_dim"},
        notes=("audio tower and projector included",),
    )  # fmt: skip


def _audio_rules() -> tuple[Rule, ...]:
    tower = "params-audio_encoder-Qwen3OmniAudioEncoder_0"
    projector = "params-audio_encoder-Qwen3OmniAudioProjector_0"
    layer, block = f"{_AUDIO}layers.{{audio_layer}}.", f"{tower}-layers_{{audio_layer}}-"
    convolutions = [
        rule
        for number, into in ((1, "1"), (2, "audio_channel_in"), (3, "audio_channel_in"))
        for rule in (
            Rule(f"{_AUDIO}conv2d{number}.weight", f"{tower}-conv2d{number}-kernel",
                 f"audio_channel {into} tap_row tap_col -> tap_row tap_col {into} audio_channel"),
            Rule(f"{_AUDIO}conv2d{number}.bias", f"{tower}-conv2d{number}-bias", "audio_channel -> audio_channel"),
        )
    ]  # fmt: skip
    attention = [
        rule
        for short, name in (("q", "query"), ("k", "key"), ("v", "value"))
        for rule in linear(f"{layer}self_attn.{short}_proj", f"{block}self_attention_audio-{name}", _HEADS, _EMBED)
    ]
    return (
        *convolutions,
        *linear(f"{_AUDIO}conv_out", f"{tower}-conv_out", _EMBED, "bins", bias=False),
        *norm(f"{layer}self_attn_layer_norm", f"{block}input_layer_norm", _EMBED),
        *norm(f"{layer}final_layer_norm", f"{block}post_attention_layer_norm", _EMBED),
        *attention,
        *linear(f"{layer}self_attn.out_proj", f"{block}self_attention_audio-out", _EMBED, _HEADS),
        *linear(f"{layer}fc1", f"{block}AudioMLP-wi", "audio_mlp", _EMBED),
        *linear(f"{layer}fc2", f"{block}AudioMLP-wo", _EMBED, "audio_mlp"),
        *norm(f"{_AUDIO}ln_post", f"{tower}-layernorm_post", _EMBED),
        *linear(f"{_AUDIO}proj1", f"{projector}-proj1", "audio_inner", _EMBED),
        *linear(f"{_AUDIO}proj2", f"{projector}-proj2", "audio_out", _EMBED),
    )


def _audio_settings(audio: Config) -> dict[str, Any]:
    names = (
        "d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "max_source_positions",
        "num_mel_bins", "downsample_hidden_size", "output_dim", "n_window", "n_window_infer",
    )  # fmt: skip
    return {
        "use_audio": True,
        "use_multimodal": True,
        "conv_chunksize_for_audio": audio.size("conv_chunksize", 500),
    } | {f"{name}_for_audio": audio.size(name) for name in names}
