"""Qwen3-VL and Qwen3-Omni, whose values MaxText's converter leaves untested: formulas by hand, odd sizes."""

import pytest
from formulas import E, M, Shapes, Tensors, V, ferried, same, tensors_of
from small_qwen import (
    AUDIO,
    TEXT,
    VE,
    VH,
    VISION,
    audio_shapes,
    fused_inputs_first,
    separate,
    text_shapes,
    vision_shapes,
)
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import FamilyOptions
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.conversion_plan import PlanOptions, make_plan
from tensorferry.mappings.words.problems import PlanError


def check_vision(arrays: Tensors, tensors: Tensors, prefix: str, classes: str) -> None:
    tower, block = f"params.vision_encoder.{classes}Encoder_0.", f"{prefix}blocks.2."
    patch = tensors[f"{prefix}patch_embed.proj.weight"]
    same(arrays[f"{tower}patch_embed.proj.kernel"], patch.transpose(2, 3, 4, 1, 0))
    for place, name in enumerate(("query", "key", "value")):
        rows = slice(place * VE, (place + 1) * VE)
        same(arrays[f"{tower}blocks_2.attn.attn.{name}.kernel"],
             tensors[f"{block}attn.qkv.weight"][rows].T.reshape(VE, VH, VE // VH))  # fmt: skip
        same(arrays[f"{tower}blocks_2.attn.attn.{name}.bias"],
             tensors[f"{block}attn.qkv.bias"][rows].reshape(VH, VE // VH))  # fmt: skip
    same(arrays[f"{tower}blocks_2.attn.attn.out.kernel"],
         tensors[f"{block}attn.proj.weight"].T.reshape(VH, VE // VH, VE))  # fmt: skip
    same(arrays[f"{tower}blocks_2.mlp.kernel"], tensors[f"{block}mlp.linear_fc1.weight"].T)


def test_qwen3_vl_moe() -> None:
    config = {"model_type": "qwen3_vl_moe", "text_config": TEXT, "vision_config": VISION, "tie_word_embeddings": False}
    shapes = text_shapes("model.language_model.", fused_inputs_first) | {"lm_head.weight": (V, E)}
    shapes |= vision_shapes("model.visual.", "deepstack_merger_list", ("norm", "linear_fc1", "linear_fc2"))
    tensors = tensors_of(shapes)
    arrays = ferried(config, tensors, scan=False, multimodal=True)
    experts = tensors["model.language_model.layers.1.mlp.experts.gate_up_proj"]
    same(arrays["params.decoder.layers_1.moe_block.wi_0"], experts[:, :, :M])
    same(arrays["params.decoder.layers_1.moe_block.wi_1"], experts[:, :, M:])
    same(arrays["params.decoder.layers_1.moe_block.wo"], tensors["model.language_model.layers.1.mlp.experts.down_proj"])
    check_vision(arrays, tensors, "model.visual.", "Qwen3VLVision")
    merger = "model.visual.deepstack_merger_list.1.linear_fc1.weight"
    same(arrays["params.vision_encoder.Qwen3VLVisionEncoder_0.merger_1.mlp_0.kernel"], tensors[merger].T)
    with pytest.raises(PlanError, match="--no-scan-layers"):
        make_family(Config(config), tensors, FamilyOptions(multimodal=True))


def test_qwen3_vl_without_its_tower_may_be_scanned() -> None:
    config = {"model_type": "qwen3_vl_moe", "text_config": TEXT, "vision_config": VISION, "tie_word_embeddings": True}
    tensors = tensors_of(text_shapes("model.language_model.", fused_inputs_first))
    arrays = ferried(config, tensors, scan=True)
    same(arrays["params.decoder.layers.moe_block.wi_1"][:, 2],
         tensors["model.language_model.layers.2.mlp.experts.gate_up_proj"][:, :, M:])  # fmt: skip
    assert "params.decoder.logits_dense.kernel" not in arrays


def test_qwen3_omni() -> None:
    thinker = {"text_config": TEXT, "vision_config": VISION, "audio_config": AUDIO}
    config = {"model_type": "qwen3_omni_moe", "thinker_config": thinker}
    shapes = text_shapes("thinker.model.", separate) | {"thinker.lm_head.weight": (V, E)} | audio_shapes()
    tensors = tensors_of(shapes | vision_shapes("thinker.visual.", "merger_list", ("ln_q", "mlp.0", "mlp.2")))
    arrays = ferried(config, tensors, scan=False, multimodal=True)
    check_vision(arrays, tensors, "thinker.visual.", "Qwen3OmniMoeVision")
    tower, source = "params.audio_encoder.Qwen3OmniAudioEncoder_0.", "thinker.audio_tower."
    same(arrays[f"{tower}conv2d3.kernel"], tensors[f"{source}conv2d3.weight"].transpose(2, 3, 1, 0))
    same(arrays[f"{tower}conv2d1.kernel"], tensors[f"{source}conv2d1.weight"].transpose(2, 3, 1, 0))
    same(arrays[f"{tower}layers_1.self_attention_audio.key.kernel"],
         tensors[f"{source}layers.1.self_attn.k_proj.weight"].T.reshape(10, 5, 2))  # fmt: skip
    same(arrays[f"{tower}layers_1.self_attention_audio.out.kernel"],
         tensors[f"{source}layers.1.self_attn.out_proj.weight"].T.reshape(5, 2, 10))  # fmt: skip
    same(arrays[f"{tower}layers_0.AudioMLP.wo.kernel"], tensors[f"{source}layers.0.fc2.weight"].T)
    same(arrays["params.audio_encoder.Qwen3OmniAudioProjector_0.proj2.kernel"], tensors[f"{source}proj2.weight"].T)
    same(arrays["params.decoder.layers_2.moe_block.wi_0"][1],
         tensors["thinker.model.layers.2.mlp.experts.1.gate_proj.weight"].T)  # fmt: skip


def test_qwen3_omni_leaves_towers_and_speech_out() -> None:
    thinker = {"text_config": TEXT, "vision_config": VISION, "audio_config": AUDIO}
    config = Config({"model_type": "qwen3_omni_moe", "thinker_config": thinker})
    text = text_shapes("thinker.model.", separate) | {"thinker.lm_head.weight": (V, E)}
    beside: Shapes = {"talker.model.norm.weight": (3,), "code2wav.decoder.0.weight": (4,)} | audio_shapes()
    tensors = {n: LogicalTensor.plain(StoredTensor(n, "bfloat16", s, "f", 0)) for n, s in (text | beside).items()}
    plan = make_plan(make_family(config, tensors, FamilyOptions()), tensors, PlanOptions())
    assert not plan.problems
    assert plan.account.ignored.keys() == beside.keys()
