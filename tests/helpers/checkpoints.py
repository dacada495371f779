"""Small Hugging Face checkpoints of awkward sizes, and what MaxText's formulas make of them in plain numpy.

The expectations are written down from MaxText's own formulas, tensor by tensor; they use nothing of ours.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

Arrays = dict[str, np.ndarray]
Ready = Mapping[str, np.ndarray]
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a small decoder, all different, so that axes cannot be confused."""

    layers: int = 3
    vocab: int = 37
    embed: int = 10
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 8
    mlp: int = 14
    experts: int = 4
    expert_mlp: int = 5


def llama_config(sizes: Sizes = Sizes(), **changes: Any) -> dict[str, Any]:
    """A Llama 3.1 config: rope type ``llama3``, so rotary lanes get interleaved."""
    return _config(sizes, "llama", "LlamaForCausalLM") | {
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    } | changes  # fmt: skip


def qwen3_moe_config(sizes: Sizes = Sizes(), **changes: Any) -> dict[str, Any]:
    """A Qwen3-MoE config."""
    return _config(sizes, "qwen3_moe", "Qwen3MoeForCausalLM") | {
        "num_experts": sizes.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": sizes.expert_mlp,
        "rope_theta": 1000000.0,
    } | changes  # fmt: skip


def _config(sizes: Sizes, model_type: str, architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": sizes.embed,
        "intermediate_size": sizes.mlp,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


class _Noise:
    """Random tensors of one dtype; every call goes on with the same stream."""

    def __init__(self, dtype: str, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._dtype = DTYPES[dtype]

    def __call__(self, *shape: int) -> np.ndarray:
        return self._random.standard_normal(shape, np.float32).astype(self._dtype)


def llama_tensors(sizes: Sizes = Sizes(), dtype: str = "bfloat16", head: bool = True, seed: int = 1) -> Arrays:
    """A Llama checkpoint's tensors."""
    noise = _Noise(dtype, seed)
    tensors = _shared_tensors(sizes, noise, head)
    for layer in range(sizes.layers):
        mlp = f"model.layers.{layer}.mlp"
        tensors[f"{mlp}.gate_proj.weight"] = noise(sizes.mlp, sizes.embed)
        tensors[f"{mlp}.up_proj.weight"] = noise(sizes.mlp, sizes.embed)
        tensors[f"{mlp}.down_proj.weight"] = noise(sizes.embed, sizes.mlp)
    return tensors


def qwen3_moe_tensors(sizes: Sizes = Sizes(), dtype: str = "bfloat16", fused: bool = False, seed: int = 2) -> Arrays:
    """A Qwen3-MoE checkpoint's tensors, experts one by one or fused as transformers 5 writes them."""
    noise = _Noise(dtype, seed)
    tensors = _shared_tensors(sizes, noise, head=True)
    for layer in range(sizes.layers):
        block = f"model.layers.{layer}"
        for short in ("q", "k"):
            tensors[f"{block}.self_attn.{short}_norm.weight"] = noise(sizes.head_dim)
        tensors[f"{block}.mlp.gate.weight"] = noise(sizes.experts, sizes.embed)
        experts = f"{block}.mlp.experts"
        if fused:
            tensors[f"{experts}.gate_up_proj"] = noise(sizes.experts, 2 * sizes.expert_mlp, sizes.embed)
            tensors[f"{experts}.down_proj"] = noise(sizes.experts, sizes.embed, sizes.expert_mlp)
            continue
        for expert in range(sizes.experts):
            tensors[f"{experts}.{expert}.gate_proj.weight"] = noise(sizes.expert_mlp, sizes.embed)
            tensors[f"{experts}.{expert}.up_proj.weight"] = noise(sizes.expert_mlp, sizes.embed)
            tensors[f"{experts}.{expert}.down_proj.weight"] = noise(sizes.embed, sizes.expert_mlp)
    return tensors


def _shared_tensors(sizes: Sizes, noise: _Noise, head: bool) -> Arrays:
    tensors = {"model.embed_tokens.weight": noise(sizes.vocab, sizes.embed), "model.norm.weight": noise(sizes.embed)}
    if head:
        tensors["lm_head.weight"] = noise(sizes.vocab, sizes.embed)
    rows, kv_rows = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    for layer in range(sizes.layers):
        block = f"model.layers.{layer}"
        tensors[f"{block}.self_attn.q_proj.weight"] = noise(rows, sizes.embed)
        tensors[f"{block}.self_attn.k_proj.weight"] = noise(kv_rows, sizes.embed)
        tensors[f"{block}.self_attn.v_proj.weight"] = noise(kv_rows, sizes.embed)
        tensors[f"{block}.self_attn.o_proj.weight"] = noise(sizes.embed, rows)
        tensors[f"{block}.input_layernorm.weight"] = noise(sizes.embed)
        tensors[f"{block}.post_attention_layernorm.weight"] = noise(sizes.embed)
    return tensors


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Ready,
    shards: int = 3,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Writes config, shards and index as Hugging Face does; tensors are dealt round, so a layer lies in many shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    names = list(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        own = names[shard::shards]
        weight_map.update(dict.fromkeys(own, file))
        save_file({name: tensors[name] for name in own}, folder / file, {"format": "pt", **(metadata or {})})
    if shards > 1:
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# What MaxText makes of them. Keys are dotted paths below the train state.


def llama_expected(
    tensors: Ready, sizes: Sizes = Sizes(), scan: bool = True, dtype: str = "bfloat16", interleaved: bool = True,
    vocab: int = 0, tied: bool = False,
) -> Arrays:  # fmt: skip
    """MaxText's Llama tree."""
    layers = [_llama_layer(tensors, layer, sizes, interleaved) for layer in range(sizes.layers)]
    return _tree(tensors, layers, scan, dtype, vocab, tied)


def qwen3_moe_expected(
    tensors: Ready, sizes: Sizes = Sizes(), scan: bool = True, dtype: str = "bfloat16", fused: bool = False
) -> Arrays:
    """MaxText's Qwen3-MoE tree."""
    layers = [_qwen3_moe_layer(tensors, layer, sizes, fused) for layer in range(sizes.layers)]
    return _tree(tensors, layers, scan, dtype, 0, tied=False)


def interleave(lanes: np.ndarray) -> np.ndarray:
    """Half-split lanes on the last axis to interleaved ones: ``y[2i] = x[i]``, ``y[2i+1] = x[i + d/2]``."""
    out = np.empty_like(lanes)
    half = lanes.shape[-1] // 2
    out[..., 0::2] = lanes[..., :half]
    out[..., 1::2] = lanes[..., half:]
    return out


def _attention(tensors: Ready, layer: int, sizes: Sizes) -> Arrays:
    own = {n: tensors[f"model.layers.{layer}.self_attn.{n}_proj.weight"].astype(np.float32) for n in "qkvo"}
    kv = (sizes.embed, sizes.kv_heads, sizes.head_dim)
    return {
        "self_attention.query.kernel": own["q"].T.reshape(sizes.embed, sizes.heads, sizes.head_dim),
        "self_attention.key.kernel": own["k"].T.reshape(kv),
        "self_attention.value.kernel": own["v"].T.reshape(kv),
        "self_attention.out.kernel": own["o"].T.reshape(sizes.heads, sizes.head_dim, sizes.embed),
        "pre_self_attention_layer_norm.scale": tensors[f"model.layers.{layer}.input_layernorm.weight"],
        "post_self_attention_layer_norm.scale": tensors[f"model.layers.{layer}.post_attention_layernorm.weight"],
    }


def _llama_layer(tensors: Ready, layer: int, sizes: Sizes, interleaved: bool) -> Arrays:
    leaves = _attention(tensors, layer, sizes)
    if interleaved:
        for name in ("query", "key"):
            leaves[f"self_attention.{name}.kernel"] = interleave(leaves[f"self_attention.{name}.kernel"])
    leaves["self_attention.query.kernel"] = leaves["self_attention.query.kernel"] * np.float32(sizes.head_dim**-0.5)
    for ours, theirs in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down")):
        leaves[f"mlp.{ours}.kernel"] = tensors[f"model.layers.{layer}.mlp.{theirs}_proj.weight"].T
    return leaves


def _qwen3_moe_layer(tensors: Ready, layer: int, sizes: Sizes, fused: bool) -> Arrays:
    leaves = _attention(tensors, layer, sizes)
    block = f"model.layers.{layer}"
    leaves["self_attention.query_norm.scale"] = tensors[f"{block}.self_attn.q_norm.weight"]
    leaves["self_attention.key_norm.scale"] = tensors[f"{block}.self_attn.k_norm.weight"]
    leaves["moe_block.gate.kernel"] = tensors[f"{block}.mlp.gate.weight"].T
    gate, up, down = _experts(tensors, f"{block}.mlp.experts", sizes, fused)
    leaves["moe_block.wi_0"], leaves["moe_block.wi_1"], leaves["moe_block.wo"] = gate, up, down
    return leaves


def _experts(tensors: Ready, experts: str, sizes: Sizes, fused: bool) -> list[np.ndarray]:
    if fused:
        both = tensors[f"{experts}.gate_up_proj"]
        halves = both[:, : sizes.expert_mlp], both[:, sizes.expert_mlp :], tensors[f"{experts}.down_proj"]
        return [stack.transpose(0, 2, 1) for stack in halves]
    return [
        np.stack([tensors[f"{experts}.{expert}.{name}_proj.weight"].T for expert in range(sizes.experts)])
        for name in ("gate", "up", "down")
    ]


def _tree(tensors: Ready, layers: list[Arrays], scan: bool, dtype: str, vocab: int, tied: bool) -> Arrays:
    def padded(table: np.ndarray) -> np.ndarray:
        return np.pad(table.astype(np.float32), ((0, max(0, vocab - len(table))), (0, 0)))

    tree = {
        "token_embedder.embedding": padded(tensors["model.embed_tokens.weight"]),
        "decoder.decoder_norm.scale": tensors["model.norm.weight"],
    }
    if not tied:
        tree["decoder.logits_dense.kernel"] = padded(tensors["lm_head.weight"]).T
    for name in layers[0]:
        if scan:
            tree[f"decoder.layers.{name}"] = np.stack([leaves[name] for leaves in layers], axis=1)
            continue
        for layer, leaves in enumerate(layers):
            tree[f"decoder.layers_{layer}.{name}"] = leaves[name]
    wanted = DTYPES[dtype]
    return {f"params.params.{name}": np.asarray(a).astype(np.float32).astype(wanted) for name, a in tree.items()}
