"""Optional: transformers loads what export wrote, first try, and computes the same logits as with the original."""

import os
import subprocess
from pathlib import Path

import pytest
from commands import environment, tensorferry

DEMO = Path(__file__).parents[3] / ".demo" / "SmolLM2-135M-Instruct"
_LOGITS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
found = []
for folder in sys.argv[1:]:
    tokens = AutoTokenizer.from_pretrained(folder)("The capital of France is", return_tensors="pt")
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"], told
    found.append(model(**tokens).logits)
assert torch.equal(*found)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["--scan-layers", "--no-scan-layers"])
def test_smollm2_has_the_same_logits(mode, tmp_path):
    python = os.environ.get("TENSORFERRY_TRANSFORMERS_PYTHON")
    if not python or not DEMO.is_dir():
        pytest.skip("needs TENSORFERRY_TRANSFORMERS_PYTHON (torch, transformers) and the demo's weights")
    words = ("convert", "--source", DEMO, "--output", tmp_path / "orbax", mode)
    assert tensorferry(*words, seconds=300).returncode == 0
    words = ("export", "--source", tmp_path / "orbax", "--config", DEMO, "--output", tmp_path / "hf",
             "--shard-bytes", "100MB")  # fmt: skip
    done = tensorferry(*words, seconds=300)
    assert done.returncode == 0, done.stderr
    program = [python, "-c", _LOGITS, str(DEMO), str(tmp_path / "hf")]
    done = subprocess.run(program, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
