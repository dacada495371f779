"""Optional: MaxText's own model with a moved adapter, and transformers' with an exported one, against merged weights.

Where TENSORFERRY_MAXTEXT_PYTHON names an interpreter with maxtext 0.2.5, and TENSORFERRY_TRANSFORMERS_PYTHON one with
torch, transformers and peft.
"""

import os
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from adapters import adapter_config, factors, merged, write_adapter
from checkpoints import Sizes, llama_config, llama_tensors, write_checkpoint
from commands import environment, tensorferry

RANK, ALPHA = 5, 10
SIZES = Sizes(embed=12)
TARGETS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
MODULES = tuple(f"model.layers.{layer}.{module}" for layer in range(3) for module in TARGETS)
PROBE = Path(__file__).parents[2] / "helpers" / "maxtext_lora_probe.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    """A base, an adapter of it, and the weights with the adapter in them."""
    where = tmp_path_factory.mktemp("lora")
    weights = {name: array * np.float32(0.2) for name, array in llama_tensors(SIZES, dtype="float32").items()}
    adapter = {name: array * np.float32(0.2) for name, array in factors(weights, MODULES, RANK).items()}
    config = llama_config(SIZES, max_position_embeddings=64, torch_dtype="float32")
    write_checkpoint(where / "base", config, weights)
    write_adapter(where / "adapter", adapter_config(MODULES, RANK, ALPHA), adapter)
    write_checkpoint(where / "merged", config, merged(weights, adapter, dict.fromkeys(MODULES, ALPHA / RANK)))
    return where


def interpreter(variable: str) -> str:
    if variable not in os.environ:
        pytest.skip(f"{variable} names no interpreter")
    return os.environ[variable]


def converted(*args: str | Path) -> list[str]:
    """Converts, and gives the MaxText overrides that it prints."""
    done = tensorferry("convert", *args)
    assert done.returncode == 0, done.stderr
    return next(shlex.split(line) for line in done.stdout.splitlines() if "override_model_config=true" in line)


def run(python: str, *args: str | Path) -> None:
    done = subprocess.run([python, *map(str, args)], env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("mode", ["--scan-layers", "--no-scan-layers"])
def test_maxtext_restores_it_and_computes_as_with_merged_weights(mode, places, tmp_path):
    python = interpreter("TENSORFERRY_MAXTEXT_PYTHON")
    base = converted("--source", places / "base", "--output", tmp_path / "base", "--dtype", "float32", mode)
    both = converted("--source", places / "merged", "--output", tmp_path / "merged", "--dtype", "float32", mode)
    lora = converted(
        "--lora-only", places / "adapter", "--source", places / "base", "--output", tmp_path / "lora", mode
    )
    run(python, PROBE, tmp_path / "adapted", *lora, base[-1])
    run(python, PROBE, tmp_path / "both", *both)
    run(python, PROBE, tmp_path / "bare", *base)
    adapted, both, bare = (np.load(tmp_path / f"{name}.npz") for name in ("adapted", "both", "bare"))
    assert len(adapted.files) == 1 + 2 * (5 if mode == "--scan-layers" else 15)
    np.testing.assert_allclose(adapted["logits"], both["logits"], atol=1e-6)
    assert np.abs(bare["logits"] - both["logits"]).max() > 0.05


_PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, exported, merged = sys.argv[1:]
tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
with torch.no_grad():
    wanted, bare = load(merged)(tokens).logits, load(base)(tokens).logits
    found = []
    for folder in (adapter, exported):
        model = PeftModel.from_pretrained(load(base), folder)
        lora = {name: value for name, value in model.named_parameters() if "lora_" in name}
        assert len(lora) == 30 and all(value.abs().max() > 0 for value in lora.values()), sorted(lora)
        found.append(model(tokens).logits)
assert (found[0] - found[1]).abs().max() < 1e-6
assert (found[1] - wanted).abs().max() < 1e-5
assert (wanted - bare).abs().max() > 0.05
"""


@pytest.mark.parametrize("mode", ["--scan-layers", "--no-scan-layers"])
def test_peft_loads_what_comes_back(mode, places, tmp_path):
    python = interpreter("TENSORFERRY_TRANSFORMERS_PYTHON")
    converted("--lora-only", places / "adapter", "--source", places / "base", "--output", tmp_path / "lora", mode)
    words = ("--source", tmp_path / "lora", "--config", places / "base", "--output", tmp_path / "back")
    done = tensorferry("export", "--lora", *words)
    assert done.returncode == 0, done.stderr
    folders = (places / "base", places / "adapter", tmp_path / "back", places / "merged")
    run(python, "-c", _PEFT, *folders)


def test_peft_merges_as_we_do(places):
    """The formula that the other tests take for granted, against PEFT's own."""
    run(
        interpreter("TENSORFERRY_TRANSFORMERS_PYTHON"),
        "-c",
        _MERGE,
        places / "base",
        places / "adapter",
        places / "merged",
    )


_MERGE = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, merged = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
ours = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).state_dict()
for name, value in model.merge_and_unload().state_dict().items():
    torch.testing.assert_close(value, ours[name], rtol=1e-6, atol=1e-6)
"""
