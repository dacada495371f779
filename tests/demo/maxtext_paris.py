"""MaxText runs a converted checkpoint with the settings that were written beside it. Knows nothing of our code.

python maxtext_paris.py SETTINGS STEP TOKEN...   prints the most likely next token
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from maxtext.configs import pyconfig
from maxtext.utils import model_creation_utils

CONFIG = Path(pyconfig.__file__).with_name("base.yml")
HOW = {
    "run_name": "probe",
    "model_name": "default",
    "override_model_config": "true",
    "weight_dtype": "float32",
    "dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
    "enable_checkpointing": "true",
    "log_config": "false",
    "skip_jax_distributed_system": "true",
    "hardware": "cpu",
    "per_device_batch_size": "1",
    "convert_checkpoint_if_possible": "false",
}


def settings(path: str) -> dict[str, str]:
    """Values of a flat YAML file whose values are JSON."""
    lines = [line for line in Path(path).read_text().splitlines() if line and not line.startswith("#")]
    pairs = (line.split(": ", 1) for line in lines)
    return {key: str(json.loads(value)) for key, value in pairs}


def main(settings_file: str, step: str, *tokens: str) -> None:
    ids = jnp.asarray([[int(token) for token in tokens]], jnp.int32)
    sizes = {"max_target_length": str(ids.shape[1]), "load_parameters_path": f"{step}/items"}
    options = {**HOW, **settings(settings_file), **sizes}
    config = pyconfig.initialize(["probe", str(CONFIG), *(f"{key}={value}" for key, value in options.items())])
    model = model_creation_utils.from_pretrained(config)
    model = model[0] if isinstance(model, tuple) else model
    positions = jnp.arange(ids.shape[1])[None]
    mask = jnp.ones_like(ids)
    logits = model(ids, positions, decoder_segment_ids=mask, enable_dropout=False)
    print(int(jnp.argmax(logits[0, -1])))


if __name__ == "__main__":
    with jax.default_matmul_precision("highest"):
        main(*sys.argv[1:])
