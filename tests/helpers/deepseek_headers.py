"""DeepSeek-V3's 91,991 tensors in 163 shards, headers only: names and shapes by formula, weights never exist."""

import json
import math
from collections.abc import Iterator

from hub_server import Content

LAYERS, EXPERTS, EMBED, EXPERT_MLP, MLP, HEADS = 61, 256, 7168, 2048, 18432, 128
Q_RANK, KV_RANK, NOPE, ROPE, V_DIM, VOCAB, BLOCK = 1536, 512, 128, 64, 128, 129280, 128
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
    "hidden_size": EMBED,
    "intermediate_size": MLP,
    "moe_intermediate_size": EXPERT_MLP,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": KV_RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": V_DIM,
    "vocab_size": VOCAB,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [BLOCK, BLOCK]},
}  # fmt: skip
Entry = tuple[str, str, tuple[int, ...]]


def tensors() -> Iterator[Entry]:
    """Name, dtype and shape of every tensor."""
    yield "model.embed_tokens.weight", "BF16", (VOCAB, EMBED)
    for layer in range(LAYERS + 1):  # the last one predicts ahead
        yield from _layer(f"model.layers.{layer}", layer)
    yield "model.norm.weight", "BF16", (EMBED,)
    yield "lm_head.weight", "BF16", (VOCAB, EMBED)


def _layer(prefix: str, layer: int) -> Iterator[Entry]:
    if layer == LAYERS:
        yield f"{prefix}.embed_tokens.weight", "BF16", (VOCAB, EMBED)
        yield f"{prefix}.enorm.weight", "BF16", (EMBED,)
        yield f"{prefix}.hnorm.weight", "BF16", (EMBED,)
        yield f"{prefix}.eh_proj.weight", "BF16", (EMBED, 2 * EMBED)
        yield f"{prefix}.shared_head.norm.weight", "BF16", (EMBED,)
        yield f"{prefix}.shared_head.head.weight", "BF16", (VOCAB, EMBED)
    for name, length in (("input_layernorm", EMBED), ("post_attention_layernorm", EMBED),
                         ("self_attn.q_a_layernorm", Q_RANK), ("self_attn.kv_a_layernorm", KV_RANK)):  # fmt: skip
        yield f"{prefix}.{name}.weight", "BF16", (length,)
    yield from _fp8(f"{prefix}.self_attn.q_a_proj", Q_RANK, EMBED)
    yield from _fp8(f"{prefix}.self_attn.q_b_proj", HEADS * (NOPE + ROPE), Q_RANK)
    yield from _fp8(f"{prefix}.self_attn.kv_a_proj_with_mqa", KV_RANK + ROPE, EMBED)
    yield from _fp8(f"{prefix}.self_attn.kv_b_proj", HEADS * (NOPE + V_DIM), KV_RANK)
    yield from _fp8(f"{prefix}.self_attn.o_proj", EMBED, HEADS * V_DIM)
    if layer < 3:
        yield from _mlp(f"{prefix}.mlp", MLP)
        return
    yield f"{prefix}.mlp.gate.weight", "BF16", (EXPERTS, EMBED)
    yield f"{prefix}.mlp.gate.e_score_correction_bias", "F32", (EXPERTS,)
    yield from _mlp(f"{prefix}.mlp.shared_experts", EXPERT_MLP)
    for expert in range(EXPERTS):
        yield from _mlp(f"{prefix}.mlp.experts.{expert}", EXPERT_MLP)


def _mlp(prefix: str, width: int) -> Iterator[Entry]:
    yield from _fp8(f"{prefix}.gate_proj", width, EMBED)
    yield from _fp8(f"{prefix}.up_proj", width, EMBED)
    yield from _fp8(f"{prefix}.down_proj", EMBED, width)


def _fp8(prefix: str, rows: int, columns: int) -> Iterator[Entry]:
    yield f"{prefix}.weight", "F8_E4M3", (rows, columns)
    yield f"{prefix}.weight_scale_inv", "F32", (math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))


def repository(shards: int = 163) -> dict[str, Content]:
    """Every file: config and index whole, shards as their headers and nothing but zeros behind."""
    entries = list(tensors())
    names = [f"model-{number:05}-of-{shards:06}.safetensors" for number in range(1, shards + 1)]
    groups = [entries[len(entries) * i // shards : len(entries) * (i + 1) // shards] for i in range(shards)]
    weight_map = {name: shard for shard, group in zip(names, groups, strict=True) for name, _, _ in group}
    index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    files = {"config.json": Content.of(json.dumps(CONFIG).encode())}
    files["model.safetensors.index.json"] = Content.of(index)
    return files | {name: _shard(group) for name, group in zip(names, groups, strict=True)}


def _shard(group: list[Entry]) -> Content:
    header, at = {}, 0
    for name, dtype, shape in group:
        nbytes = math.prod(shape) * {"BF16": 2, "F32": 4, "F8_E4M3": 1}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text

    def read(start: int, stop: int) -> bytes:
        return head[start:stop].ljust(stop - start, b"\0")

    return Content(len(head) + at, read)
