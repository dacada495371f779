"""Qwen3-VL and Qwen3-Omni, whose values MaxText's converter leaves untested: formulas by hand, odd sizes."""

from collections.abc import Callable

import pytest
from formulas import D, E, M, N, Shapes, Tensors, V, X, ferried, mlp, same, tensors_of

from mappings.config import Config
from mappings.family import FamilyOptions, make_family
from mappings.plan import PlanOptions, make_plan
from mappings.problems import PlanError
from mappings.tensors import LogicalTensor, StoredTensor

DEPTH, VE, VH, VM, PATCH, FRAMES, PLACES = 3, 8, 2, 9, 3, 2, 11
VISION = {"depth": DEPTH, "hidden_size": VE, "num_heads": VH, "intermediate_size": VM, "patch_size": PATCH,
          "temporal_patch_size": FRAMES, "in_channels": 3, "spatial_merge_size": 2, "out_hidden_size": E,
          "num_position_embeddings": PLACES, "deepstack_visual_indexes": [0, 2]}  # fmt: skip
TEXT = {"vocab_size": V, "hidden_size": E, "num_hidden_layers": 3, "num_attention_heads": N, "num_key_value_heads": 2,
        "head_dim": D, "moe_intermediate_size": M, "num_experts": X, "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
        "rope_scaling": {"mrope_section": [1, 1, 1], "rope_type": "default"}}  # fmt: skip


def text_shapes(prefix: str, experts: Callable[[str], Shapes]) -> Shapes:
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (V, E), f"{prefix}norm.weight": (E,)}
    for layer in range(3):
        here = f"{prefix}layers.{layer}."
        shapes |= {
            f"{here}input_layernorm.weight": (E,), f"{here}post_attention_layernorm.weight": (E,),
            f"{here}self_attn.q_proj.weight": (N * D, E), f"{here}self_attn.k_proj.weight": (2 * D, E),
            f"{here}self_attn.v_proj.weight": (2 * D, E), f"{here}self_attn.o_proj.weight": (E, N * D),
            f"{here}self_attn.q_norm.weight": (D,), f"{here}self_attn.k_norm.weight": (D,),
            f"{here}mlp.gate.weight": (X, E),
        } | experts(f"{here}mlp.experts.")  # fmt: skip
    return shapes


def vision_shapes(prefix: str, mergers: str, merger: tuple[str, str, str]) -> Shapes:
    norm, first, second = merger
    joined = 4 * VE

    def with_bias(name: str, *shape: int) -> Shapes:
        return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}

    def merging(name: str, normed: int) -> Shapes:
        return with_bias(f"{name}{norm}", normed) | with_bias(f"{name}{first}", joined, joined) | with_bias(
            f"{name}{second}", E, joined)  # fmt: skip

    shapes = with_bias(f"{prefix}patch_embed.proj", VE, 3, FRAMES, PATCH, PATCH) | merging(f"{prefix}merger.", VE)
    shapes[f"{prefix}pos_embed.weight"] = (PLACES, VE)
    for layer in range(DEPTH):
        here = f"{prefix}blocks.{layer}."
        shapes |= with_bias(f"{here}norm1", VE) | with_bias(f"{here}norm2", VE)
        shapes |= with_bias(f"{here}attn.qkv", 3 * VE, VE) | with_bias(f"{here}attn.proj", VE, VE)
        shapes |= with_bias(f"{here}mlp.linear_fc1", VM, VE) | with_bias(f"{here}mlp.linear_fc2", VE, VM)
    for place in range(2):
        shapes |= merging(f"{prefix}{mergers}.{place}.", joined)
    return shapes


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


def fused_inputs_first(prefix: str) -> Shapes:
    return {f"{prefix}gate_up_proj": (X, E, 2 * M), f"{prefix}down_proj": (X, M, E)}


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


AUDIO = {"d_model": 10, "encoder_layers": 2, "encoder_attention_heads": 5, "encoder_ffn_dim": 7, "output_dim": E,
         "num_mel_bins": 20, "downsample_hidden_size": 6, "max_source_positions": 9, "n_window": 5,
         "n_window_infer": 40}  # fmt: skip


def audio_shapes() -> Shapes:
    prefix, shapes = "thinker.audio_tower.", {"thinker.audio_tower.conv_out.weight": (10, 6 * 3)}
    linears: Shapes = {"proj1": (10, 10), "proj2": (E, 10), "ln_post": (10,), "conv2d1": (6, 1, 3, 3),
                       "conv2d2": (6, 6, 3, 3), "conv2d3": (6, 6, 3, 3)}  # fmt: skip
    for layer in range(2):
        here = f"layers.{layer}."
        linears |= {f"{here}self_attn.{name}": (10, 10) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
        linears |= {f"{here}self_attn_layer_norm": (10,), f"{here}final_layer_norm": (10,), f"{here}fc1": (7, 10),
                    f"{here}fc2": (10, 7)}  # fmt: skip
    for name, shape in linears.items():
        shapes |= {f"{prefix}{name}.weight": shape, f"{prefix}{name}.bias": shape[:1]}
    return shapes


def separate(prefix: str) -> Shapes:
    return {name: shape for expert in range(X) for name, shape in mlp(f"{prefix}{expert}.", M).items()}


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
