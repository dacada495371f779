"""MaxText's own model and loader, in an interpreter that has MaxText. Knows nothing of our code.

python maxtext_probe.py tree               prints the parameters of a tiny Llama as JSON
python maxtext_probe.py load EXPECTED STEP  loads STEP/items with MaxText's loader and compares bits
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from maxtext.common import checkpointing
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils, model_creation_utils

CONFIG = Path(pyconfig.__file__).with_name("base.yml")
TINY_LLAMA = {
    "run_name": "probe",
    "model_name": "default",
    "override_model_config": "true",
    "decoder_block": "llama2",
    "base_emb_dim": 16,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 6,
    "base_mlp_dim": 24,
    "base_num_decoder_layers": 3,
    "vocab_size": 40,
    "mlp_activations": "['silu','linear']",
    "weight_dtype": "bfloat16",
    "dtype": "bfloat16",
    "enable_checkpointing": "false",
    "log_config": "false",
    "skip_jax_distributed_system": "true",
    "hardware": "cpu",
}


def abstract_params() -> tuple[Any, Any]:
    """MaxText's configuration and its abstract parameters."""
    config = pyconfig.initialize(["probe", str(CONFIG), *(f"{name}={value}" for name, value in TINY_LLAMA.items())])
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    with jax.set_mesh(mesh):
        _, model = model_creation_utils.create_nnx_abstract_model(config, mesh)
    return config, nnx.state(model, nnx.Param)


def flat(tree: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {".".join(path): tree}
    return {key: leaf for name, node in tree.items() for key, leaf in flat(node, (*path, str(name))).items()}


def main(command: str, *paths: str) -> None:
    config, params = abstract_params()
    if command == "tree":
        leaves = flat(params.to_pure_dict())
        print(json.dumps({key: {"shape": leaf.shape, "dtype": str(leaf.dtype)} for key, leaf in leaves.items()}))
        return
    expected, step = map(Path, paths)
    loaded = checkpointing.load_params_from_path(
        str(step / "items"),
        params,
        config.checkpoint_storage_concurrent_gb,
        config.checkpoint_storage_use_ocdbt,
        config.checkpoint_storage_use_zarr3,
    )
    leaves = flat(loaded.to_pure_dict())
    index = json.loads((expected / "index.json").read_text())
    assert {f"params.params.{key}" for key in leaves} == set(index), (sorted(leaves), sorted(index))
    for key, leaf in leaves.items():
        entry = index[f"params.params.{key}"]
        assert (str(leaf.dtype), list(leaf.shape)) == (entry["dtype"], entry["shape"]), key
        assert np.asarray(leaf).tobytes() == (expected / f"params.params.{key}").read_bytes(), f"{key}: bits differ"
    print(f"{len(leaves)} arrays equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
