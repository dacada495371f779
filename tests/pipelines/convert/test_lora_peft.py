"""Optional: PEFT makes an adapter and merges it in float32; merging it on the way gives the same MaxText tree.

Where TENSORFERRY_TRANSFORMERS_PYTHON names an interpreter with torch, transformers and peft.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Sizes, llama_config, qwen3_moe_config
from commands import environment, tensorferry
from stock_orbax import restore

pytestmark = pytest.mark.slow

_PROGRAM = """
import json, sys, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
where, settings = sys.argv[1], json.loads(sys.argv[2])
torch.manual_seed(3)
config = AutoConfig.from_pretrained(where)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
model.save_pretrained(f"{where}/base")
# Random A and B: a fresh B is zero. Its start is not on record, as after training.
tuned = get_peft_model(model, LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **settings))
with torch.no_grad():
    for name, one in tuned.named_parameters():
        if "modules_to_save" in name:
            one.add_(torch.randn_like(one))
tuned.save_pretrained(f"{where}/adapter")
tuned.merge_and_unload().save_pretrained(f"{where}/merged")
"""

SIZES = Sizes(embed=12, heads=4)
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 12, "intermediate_size": 14,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 37,
    "query_pre_attn_scalar": 24, "sliding_window": 16, "tie_word_embeddings": True,
}  # fmt: skip
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (llama_config(SIZES), {
        "target_modules": [*LINEAR, "lm_head"], "r": 4, "lora_alpha": 6, "use_rslora": True,
        "rank_pattern": {"down_proj": 2, "^model.layers.1.self_attn.q_proj": 5, "proj": 3},
        "alpha_pattern": {r"layers\\.2\\..*": 9},
    }),
    "llama-embedding": (llama_config(SIZES), {
        "target_modules": ["embed_tokens", "q_proj"], "r": 3, "lora_alpha": 5, "modules_to_save": ["lm_head", "norm"],
    }),
    "llama-layers": (llama_config(SIZES), {
        "target_modules": ["q_proj", "embed_tokens"], "r": 3, "lora_alpha": 5, "layers_to_transform": [0, 2],
    }),
    "gemma2": (GEMMA2, {"target_modules": LINEAR, "r": 3, "lora_alpha": 7}),
    "qwen3-moe": (qwen3_moe_config(SIZES), {
        "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "r": 2, "lora_alpha": 5, "rank_pattern": {"experts.down_proj": 3},
    }),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_tree_is_that_of_pefts_merged_model(case, tmp_path):
    python = os.environ.get("TENSORFERRY_TRANSFORMERS_PYTHON")
    if not python:
        pytest.skip("TENSORFERRY_TRANSFORMERS_PYTHON names no interpreter")
    config, settings = CASES[case]
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = [python, "-c", _PROGRAM, str(tmp_path), json.dumps(settings)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    ours = converted(tmp_path, "ours", "--source", tmp_path / "base", "--lora", tmp_path / "adapter")
    theirs = converted(tmp_path, "theirs", "--source", tmp_path / "merged")
    bare = converted(tmp_path, "bare", "--source", tmp_path / "base")
    assert ours.keys() == theirs.keys() == bare.keys()
    for key, array in theirs.items():
        np.testing.assert_allclose(ours[key], array, rtol=1e-6, atol=1e-6, err_msg=key)
    assert sum(np.abs(ours[key] - bare[key]).max() > 1e-3 for key in ours) >= 1


def converted(where: Path, name: str, *args: str | Path) -> dict[str, np.ndarray]:
    done = tensorferry("convert", *args, "--output", where / name, "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    return {key: array for key, array in restore(where / name).items() if key.startswith("params")}
