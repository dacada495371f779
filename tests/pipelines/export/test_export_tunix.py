"""Post-training checkpoints, written by Tunix and MaxText themselves, export to what their own arrays say."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exports import export_here, read_repository, write_repository
from tensorferry.mappings.words.problems import PlanError
from tunix_samples import open_stored, unpack

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "tie_word_embeddings": False,
    "hidden_size": 16, "vocab_size": 64, "num_hidden_layers": 2, "first_k_dense_replace": 1, "intermediate_size": 32,
    "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "routed_scaling_factor": 1.0, "norm_topk_prob": True, "max_position_embeddings": 64,
}  # fmt: skip
SCANNED = (
    "sft_llama_scan_adamw/checkpoints/3/model_params", "dpo_llama/checkpoints/2", "sharded_fsdp4/checkpoints/2",
    "pathways_no_ocdbt/checkpoints/2", "tunix_main_v1/checkpoints/3", "old_tunix_010/checkpoints/5",
    "rl_ppo/checkpoints/actor/4", "mixed_layout/checkpoints/3", "training_engine/checkpoints/2",
)  # fmt: skip


@pytest.fixture(scope="module")
def bucket(tmp_path_factory) -> Path:
    return unpack(tmp_path_factory.mktemp("tunix"))


class Stored:
    """The arrays of a model item by their names inside the model, read by TensorStore alone."""

    def __init__(self, step: Path) -> None:
        item = step if (step / "_METADATA").exists() else step / "model_params"
        self.item = item if item.exists() else step / "items"
        text = (self.item / "_METADATA").read_text()
        self._before = "params.params." if self.item.name == "items" else "base." if '"base"' in text else ""
        self._after = "" if self.item.name == "items" else ".value"

    def __call__(self, name: str) -> np.ndarray:
        return open_stored(self.item, f"{self._before}{name}{self._after}").read().result()


def rows(kernel: np.ndarray) -> np.ndarray:
    """``embed heads head_dim`` to Hugging Face's ``(heads head_dim) embed``."""
    return kernel.reshape(kernel.shape[0], -1).T


def config_of(stored: Stored, base: dict[str, Any], layers: int, query: np.ndarray, key: np.ndarray) -> dict[str, Any]:
    vocab, embed = stored("token_embedder.embedding").shape
    return base | {
        "hidden_size": embed, "vocab_size": vocab, "num_hidden_layers": layers, "head_dim": query.shape[-1],
        "num_attention_heads": query.shape[-2], "num_key_value_heads": key.shape[-2], "intermediate_size": 32,
    }  # fmt: skip


@pytest.mark.parametrize("path", SCANNED)
def test_llama_of_every_trainer(path, bucket, tmp_path, monkeypatch):
    stored = Stored(bucket / path)
    query, key = (stored(f"decoder.layers.self_attention.{name}.kernel") for name in ("query", "key"))
    config = config_of(stored, LLAMA, query.shape[1], query, key)
    repository = write_repository(tmp_path / "hf", config)
    outcome = export_here(monkeypatch, bucket / path, repository, tmp_path / "out")
    found = read_repository(tmp_path / "out")
    assert len(found) == 3 + 9 * query.shape[1]
    for layer in range(query.shape[1]):
        own = f"model.layers.{layer}"
        scaled = rows(query[:, layer]).astype(np.float32) * np.sqrt(np.float32(query.shape[-1]))
        np.testing.assert_allclose(found[f"{own}.self_attn.q_proj.weight"].astype(np.float32), scaled, rtol=1e-6)
        np.testing.assert_array_equal(found[f"{own}.self_attn.k_proj.weight"], rows(key[:, layer]))
        up = stored("decoder.layers.mlp.wi_1.kernel")[:, layer].T
        np.testing.assert_array_equal(found[f"{own}.mlp.up_proj.weight"], up)
    np.testing.assert_array_equal(found["lm_head.weight"], stored("decoder.logits_dense.kernel").T)
    left = " ".join(outcome.export.notes)
    assert "random-number state" in left or "optimizer's state" in left


def test_unrolled(bucket, tmp_path, monkeypatch):
    step = bucket / "sft_llama_unscan_adamw/checkpoints/3"
    stored = Stored(step)
    query, key = (stored(f"decoder.layers_1.self_attention.{name}.kernel") for name in ("query", "key"))
    repository = write_repository(tmp_path / "hf", config_of(stored, LLAMA, 2, query, key))
    outcome = export_here(monkeypatch, step, repository, tmp_path / "out")
    assert outcome.export.plan.options.scan_layers is False
    found = read_repository(tmp_path / "out")
    np.testing.assert_array_equal(found["model.layers.1.self_attn.k_proj.weight"], rows(key))


def test_qwen3_in_bfloat16(bucket, tmp_path, monkeypatch):
    step = bucket / "sft_qwen3_dropout_bf16/checkpoints/3"
    stored = Stored(step)
    query, key = (stored(f"decoder.layers.self_attention.{name}.kernel") for name in ("query", "key"))
    repository = write_repository(tmp_path / "hf", config_of(stored, QWEN3, 3, query, key))
    export_here(monkeypatch, step, repository, tmp_path / "out")
    found = read_repository(tmp_path / "out")
    assert {array.dtype for array in found.values()} == {np.dtype(ml_dtypes.bfloat16)}
    for layer in range(3):
        assert found[f"model.layers.{layer}.self_attn.q_proj.weight"].tobytes() == rows(query[:, layer]).tobytes()


def test_deepseeks_two_blocks_with_the_routers_bias(bucket, tmp_path, monkeypatch):
    step = bucket / "sft_moe_bias_deepseek3/checkpoints/1"
    stored = Stored(step)
    export_here(monkeypatch, step, write_repository(tmp_path / "hf", DEEPSEEK), tmp_path / "out")
    found = read_repository(tmp_path / "out")
    moe = "decoder.moe_layers.DeepSeekMoeBlock_0.MoeBlock_0"
    bias = found["model.layers.1.mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(bias, stored(f"{moe}.gate.bias")[0])
    for expert in range(4):
        up = found[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]
        np.testing.assert_array_equal(up, stored(f"{moe}.wi_1")[expert, 0].T)
    dense = found["model.layers.0.mlp.gate_proj.weight"]
    np.testing.assert_array_equal(dense, stored("decoder.dense_layers.mlp.wi_0.kernel")[:, 0].T)


def test_adapters_are_refused(bucket, tmp_path, monkeypatch):
    repository = write_repository(tmp_path / "hf", LLAMA)
    with pytest.raises(PlanError, match="a model without LoRA factors"):
        export_here(monkeypatch, bucket / "lora_qwix/checkpoints/2", repository, tmp_path / "out")
