"""MaxText's own two readers on migrated runs, in an interpreter that has MaxText. Knows nothing of our code.

python maxtext_resume_probe.py CASES

CASES is a JSON list: `impl`, the reader's PRNG implementation; `run`, a folder of steps; `step`; MaxText's `settings`;
`expected`, leaf name to SHA-256 (of the key data for keys). Loads the step's items as parameters alone, then resumes
from the run as pre-training does, and compares every leaf of both.
"""

import hashlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from maxtext.common import checkpointing, train_state_nnx
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils, model_creation_utils, train_utils

QUIET = (
    "run_name=probe",
    "log_config=false",
    "skip_jax_distributed_system=true",
    "hardware=cpu",
    "enable_checkpointing=true",
    "async_checkpointing=false",
    "override_model_config=true",
    "dataset_type=synthetic",
    "per_device_batch_size=1",
    "max_target_length=16",
)


def flat(node: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    if isinstance(node, dict | list):
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        return {name: leaf for key, child in pairs for name, leaf in flat(child, (*path, str(key))).items()}
    return {} if node is None else {"/".join(path): node}


def digest(leaf: Any) -> str:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return hashlib.sha256(np.asarray(leaf, order="C").tobytes()).hexdigest()


def compare(what: str, loaded: dict[str, Any], expected: dict[str, str]) -> int:
    absent = sorted(set(expected) - set(loaded))
    assert not absent, f"{what}: {absent} were not loaded"
    wrong = [name for name, wanted in expected.items() if digest(loaded[name]) != wanted]
    assert not wrong, f"{what}: other values in {wrong}"
    return len(expected)


def probe(case: dict[str, Any]) -> dict[str, Any]:
    """Both readers on one step; the answer counts what is equal and names what was not in the checkpoint."""
    jax.config.update("jax_default_prng_impl", case["impl"])
    run, expected = case["run"], case["expected"]
    base = Path(pyconfig.__file__).with_name("base.yml")
    settings = [*QUIET, f"base_output_directory={run}", *case["settings"]]
    config = pyconfig.initialize(["probe", str(base), *settings])
    mesh = maxtext_utils.get_mesh_from_config(config)
    create_model, model = model_creation_utils.create_nnx_abstract_model(config, mesh)
    _, params = nnx.split_state(nnx.state(model), nnx.RngState, ...)
    loaded = checkpointing.load_params_from_path(
        f"{run}/{case['step']}/items", params, config.checkpoint_storage_concurrent_gb, True, True
    )
    weights = {f"params/params/{name}": leaf for name, leaf in flat(loaded.to_pure_dict()).items()}
    wanted = {name: sha for name, sha in expected.items() if name.startswith("params/")}
    assert set(weights) == set(wanted), (sorted(weights), sorted(wanted))
    told = {"weights": compare("params", weights, wanted)}
    _, tx = train_utils.create_training_optimizer(config, model, mesh=mesh)

    def init_state() -> Any:
        built = create_model()
        return train_state_nnx.TrainStateNNX(built, nnx.Optimizer(built, tx, wrt=nnx.Param))

    manager = checkpointing.create_orbax_checkpoint_manager(run, True, False, 1, "synthetic")
    state, *_, restored = maxtext_utils.setup_training_state(None, config, mesh, manager, init_state)
    assert restored
    resumed = flat(train_state_nnx.to_checkpoint_dict(state))
    # A custom variable lies in both places; the state has it once.
    once = {name: sha for name, sha in expected.items() if name in resumed or not _is_second(name, expected)}
    return told | {"resumed": compare("resume", resumed, once), "fresh": sorted(set(resumed) - set(expected))}


def _is_second(name: str, expected: dict[str, str]) -> bool:
    return name.replace("params/params/", "nnx_aux/model/") != name and (
        name.replace("params/params/", "nnx_aux/model/") in expected
    )


def main(cases_file: str) -> None:
    """Probes every case of a JSON list; a failure is an answer too."""
    for case in json.loads(Path(cases_file).read_text()):
        try:
            print("TOLD " + json.dumps(probe(case)), flush=True)
        except Exception as error:
            traceback.print_exc()
            print("TOLD " + json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
