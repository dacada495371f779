"""Small runs in Tunix's old layout, written with plain Orbax."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

VOCAB, EMBED, LAYERS, MLP = 11, 6, 3, 8


def model_tree(seed: int, embed: int = EMBED, mlp_name: str = "wi_0", scale: int = 1) -> dict[str, Any]:
    """A scanned model, every leaf in a ``value``; the norm is all zeros."""
    random = np.random.default_rng(seed)

    def leaf(*shape: int) -> dict[str, np.ndarray]:
        return {"value": random.standard_normal(shape, dtype=np.float32)}

    return {
        "token_embedder": {"embedding": leaf(VOCAB * scale, embed)},
        "decoder": {
            "decoder_norm": {"scale": {"value": np.zeros(embed, np.float32)}},
            "layers": {"mlp": {mlp_name: {"kernel": leaf(embed, LAYERS, MLP * scale)}}},
            "rngs": {"params": {"count": {"value": np.uint32(seed)}}},
        },
    }


def optimizer_tree(seed: int, step: int, **sizes: Any) -> dict[str, Any]:
    """AdamW's state over the model's parameters."""

    def moments(shift: int) -> dict[str, Any]:
        tree = model_tree(seed + shift, **sizes)
        del tree["decoder"]["rngs"]
        return tree

    count = {"value": np.int32(step)}
    chain = {"0": {"count": count, "mu": moments(1), "nu": moments(2)}, "2": {"count": count}}
    return {"step": {"value": np.uint32(step)}, "opt_state": chain}


def save_step(root: Path, step: int, seed: int, **sizes: Any) -> Path:
    """Saves one step as Tunix's manager does, and returns its folder."""
    import orbax.checkpoint as ocp

    handlers = {"model_params": ocp.PyTreeCheckpointHandler(), "optimizer_state": ocp.PyTreeCheckpointHandler()}
    with ocp.CheckpointManager(root, item_handlers=handlers) as manager:
        trees = ocp.args.Composite(
            model_params=ocp.args.PyTreeSave(model_tree(seed, **sizes)),
            optimizer_state=ocp.args.PyTreeSave(optimizer_tree(seed, step, **sizes)),
        )
        manager.save(step, args=trees)
        manager.wait_until_finished()
    return root / str(step)


def repeat_step(step: Path, numbers: range) -> None:
    """Copies of a step under other numbers."""
    for number in numbers:
        shutil.copytree(step, step.with_name(str(number)))
