"""A small Llama checkpoint with odd sizes, as bytes: for tests of where bytes come from and go to."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save

LAYERS, EMBED, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 3, 24, 40, 6, 2, 4, 52
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": EMBED,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Every weight, in an order that is not the layers' own."""
    shapes = {"model.embed_tokens.weight": (VOCAB, EMBED), "model.norm.weight": (EMBED,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            shapes[f"{prefix}.self_attn.{name}.weight"] = (rows * HEAD_DIM, EMBED)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (EMBED, HEADS * HEAD_DIM)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = shapes[f"{prefix}.mlp.up_proj.weight"] = (MLP, EMBED)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (EMBED, MLP)
        shapes[f"{prefix}.input_layernorm.weight"] = (EMBED,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (EMBED,)
    shapes["lm_head.weight"] = (VOCAB, EMBED)
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}


def files(shards: int = 3, seed: int = 0) -> dict[str, bytes]:
    """config.json, the index and the shards, by name."""
    weights = tensors(seed)
    names = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
    place = {name: names[number % shards] for number, name in enumerate(weights)}
    found = {"config.json": json.dumps(CONFIG).encode()}
    found["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": place}).encode()
    for shard in names:
        found[shard] = save({name: weights[name] for name in weights if place[name] == shard}, {"format": "pt"})
    return found


def write(folder: Path, shards: int = 3, seed: int = 0) -> Path:
    """The checkpoint as a folder."""
    folder.mkdir(parents=True)
    for name, data in files(shards, seed).items():
        (folder / name).write_bytes(data)
    return folder
