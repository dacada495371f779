"""MaxText's own tree of a model, without weights. A program of its own: python maxtext_tree.py "model_name=… k=v".

Knows nothing of the rest of this package, so that any interpreter that has MaxText can run it.
"""

import json
import shlex
import sys
from pathlib import Path

QUIET = (
    "run_name=tree",
    "enable_checkpointing=false",
    "log_config=false",
    "skip_jax_distributed_system=true",
    "hardware=cpu",
)


def model_tree(settings: list[str]) -> dict:
    """Names to shapes of what a loader asks for, names of custom variables, names of random-number leaves."""
    import jax
    from flax import nnx  # pyright: ignore[reportMissingImports]
    from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]
    from maxtext.utils import maxtext_utils, model_creation_utils  # pyright: ignore[reportMissingImports]

    base = Path(pyconfig.__file__).with_name("base.yml")
    config = pyconfig.initialize(["tree", str(base), *QUIET, *settings])
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    with jax.set_mesh(mesh):
        _, model = model_creation_utils.create_nnx_abstract_model(config, mesh)
    weights, custom, aux = {}, [], []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        name = "/".join(str(key) for key in path)
        if isinstance(variable, nnx.RngState):
            aux.append(name)
        elif not isinstance(variable, nnx.Cache | nnx.Intermediate | nnx.BatchStat):
            weights[name] = list(variable.shape)
            custom += [] if isinstance(variable, nnx.Param) else [name]
    return {"weights": weights, "custom": custom, "aux": aux}


if __name__ == "__main__":
    print(json.dumps(model_tree(shlex.split(sys.argv[1]))))
