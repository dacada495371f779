"""The demo's checkpoint in stock MaxText, with the settings that convert wrote: it knows the capital of France.

Runs where TENSORFERRY_MAXTEXT_PYTHON names an interpreter that can import maxtext 0.2.5.
"""

import os
import subprocess
from pathlib import Path

import pytest
from tensorferry.pipelines.cli.main import main

from demo.smollm2 import smollm2

PROBE = Path(__file__).with_name("maxtext_paris.py")
# "The capital of France is" and " Paris" in the model's own tokenizer.
PROMPT, ANSWER = ("504", "3575", "282", "4649", "314"), "7042"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "TENSORFERRY_MAXTEXT_PYTHON" not in os.environ,
        reason="TENSORFERRY_MAXTEXT_PYTHON names no interpreter with maxtext",
    ),
]


@pytest.mark.parametrize("layers", ["--scan-layers", "--no-scan-layers"])
@pytest.mark.parametrize("lanes", ["split", "interleaved"])
def test_stock_maxtext_talks_sense(tmp_path: Path, layers: str, lanes: str) -> None:
    source = smollm2(Path(".demo"))
    command = ["convert", "--source", str(source), "--output", str(tmp_path), layers, "--rope-lanes", lanes]
    assert main(command) == 0
    probe = [os.environ["TENSORFERRY_MAXTEXT_PYTHON"], str(PROBE), str(tmp_path / "maxtext.yml"), str(tmp_path / "0")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    told = subprocess.run([*probe, *PROMPT], env=environment, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert told.returncode == 0, told.stderr[-3000:]
    assert told.stdout.split()[-1] == ANSWER
