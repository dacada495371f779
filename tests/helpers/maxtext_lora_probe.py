"""MaxText's own model with an adapter, in an interpreter that has MaxText. Knows nothing of our code.

python maxtext_lora_probe.py OUT SETTING=VALUE …   writes OUT.npz: logits, and every low-rank factor as restored
"""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.configs import pyconfig
from maxtext.utils import lora_utils, model_creation_utils

CONFIG = Path(pyconfig.__file__).with_name("base.yml")
RUN = (
    "run_name=probe", "enable_checkpointing=false", "log_config=false", "skip_jax_distributed_system=true",
    "hardware=cpu", "attention=dot_product", "weight_dtype=float32", "dtype=float32", "matmul_precision=highest",
    "per_device_batch_size=1", "max_target_length=7",
)  # fmt: skip
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2]], np.int32)


def main(out: str, *settings: str) -> None:
    config = pyconfig.initialize(["probe", str(CONFIG), *RUN, *settings])
    model, mesh = model_creation_utils.from_pretrained(config)
    factors: dict[str, Any] = {}
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        if config.lora.enable_lora:
            model = lora_utils.apply_lora_to_model(model, mesh, config)
            model = lora_utils.restore_lora_from_path(model, config)
            state = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
            factors = {"/".join(map(str, path)): np.asarray(value.get_value()) for path, value in state}
        positions = np.arange(TOKENS.shape[1], dtype=np.int32)[None]
        logits = model(decoder_input_tokens=TOKENS, decoder_positions=positions)
    np.savez(out, logits=np.asarray(logits), **factors)


if __name__ == "__main__":
    main(*sys.argv[1:])
