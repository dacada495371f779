"""MaxText's own converter on a synthetic checkpoint: run by an interpreter that has MaxText 0.2.5.

Usage: ``python run_maxtext.py CHECKPOINT OUTPUT``. MaxText knows Llama-3.1-8B by fixed sizes; the sizes of the
checkpoint's config.json are put in their place, in its table of Hugging Face configs and as overrides.
"""

import json
import runpy
import sys
from pathlib import Path

MODEL = "llama3.1-8b"


SIZES = {
    "head_dim": "head_dim",
    "hidden_size": "base_emb_dim",
    "intermediate_size": "base_mlp_dim",
    "num_attention_heads": "base_num_query_heads",
    "num_hidden_layers": "base_num_decoder_layers",
    "num_key_value_heads": "base_num_kv_heads",
    "vocab_size": "vocab_size",
}


def overrides(config: dict) -> list[str]:
    """MaxText settings that say what config.json says."""
    return [f"{setting}={config[name]}" for name, setting in SIZES.items()]


def main(checkpoint: Path, output: Path) -> None:
    from maxtext.checkpoint_conversion.utils.hf_model_configs import (  # pyright: ignore[reportMissingImports]
        HF_MODEL_CONFIGS,
    )
    from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]

    config = json.loads((checkpoint / "config.json").read_text())
    for name in SIZES:
        setattr(HF_MODEL_CONFIGS[MODEL], name, config[name])
    base = Path(pyconfig.__file__).with_name("base.yml")
    sys.argv[1:] = [str(base), f"model_name={MODEL}", "override_model_config=true", *overrides(config)]
    sys.argv += [f"base_output_directory={output.absolute()}", f"--hf_model_path={checkpoint.absolute()}"]
    sys.argv += ["hardware=cpu", "skip_jax_distributed_system=true", "scan_layers=true", "hf_access_token=none"]
    # As a program, so that its own defaults hold: lazy loading, 16 virtual devices.
    runpy.run_module("maxtext.checkpoint_conversion.to_maxtext", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
