"""MaxText's own loader dequantises carried FP8 into its own bfloat16 model.

Runs where TENSORFERRY_MAXTEXT_PYTHON names an interpreter that can import maxtext 0.2.5.
"""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import Sizes, llama_config, llama_tensors, write_checkpoint
from sample_checkpoint import save_expected
from stock_orbax import restore
from tensorferry.pipelines.cli.main import main
from test_maxtext_loader import PROBE, run

from demo.quantise import per_block, per_tensor

SIZES = Sizes(layers=3, vocab=40, embed=16, heads=4, kv_heads=2, head_dim=6, mlp=24)
BF16 = ml_dtypes.bfloat16

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "TENSORFERRY_MAXTEXT_PYTHON" not in os.environ,
        reason="TENSORFERRY_MAXTEXT_PYTHON names no interpreter with maxtext",
    ),
]


def checkpoint(folder: Path, block: int) -> Path:
    """The probe's model with FP8 projections; a block of 0 is one scale per tensor."""
    tensors: dict[str, np.ndarray] = {}
    for name, weight in llama_tensors(SIZES).items():
        weight32 = weight.astype(np.float32)
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
        else:
            tensors |= per_block(name, weight32, block) if block else per_tensor(name, weight32)
    quant = {"quant_method": "fp8"} | ({"weight_block_size": [block, block]} if block else {})
    return write_checkpoint(folder, llama_config(SIZES, quantization_config=quant), tensors)


def loaded_by_maxtext(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Codes times scale in bfloat16, the scale rounded first, every axis of the scale spread over even blocks."""
    out = {}
    for key, array in found.items():
        scale = found.get(f"{key}_scale")
        if scale is not None:
            for axis, length in enumerate(array.shape):
                scale = np.repeat(scale, length // scale.shape[axis], axis=axis)
            out[key] = array.astype(BF16) * scale.astype(BF16)
        elif not key.endswith("_scale"):
            out[key] = array
    return out


@pytest.mark.parametrize(
    ("block", "layout"), [(4, "declared"), (8, "declared"), (5, "declared"), (8, "broadcast"), (0, "broadcast")]
)
def test_maxtext_dequantises_carried_fp8(block, layout, tmp_path):
    """Blocks of 4 and 8 lie across heads of 6; 5 divides nothing."""
    output = tmp_path / "out"
    args = ["--source", str(checkpoint(tmp_path / "hf", block)), "--output", str(output)]
    assert main(["convert", *args, "--dtype", "source", "--scale-layout", layout]) == 0
    found = {key: array for key, array in restore(output).items() if key.startswith("params.")}
    assert sum(array.dtype == ml_dtypes.float8_e4m3fn for array in found.values()) == 7
    save_expected(tmp_path / "expected", loaded_by_maxtext(found))
    maxtext = os.environ["TENSORFERRY_MAXTEXT_PYTHON"]
    told = run(maxtext, str(PROBE), "load", str(tmp_path / "expected"), str(output / "0"), cwd=tmp_path)
    assert told.splitlines()[-1] == "12 arrays equal"
