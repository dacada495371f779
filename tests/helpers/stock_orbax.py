"""A checkpoint restored by stock Orbax alone, flat."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def restore(output: Path, step: int = 0) -> dict[str, Any]:
    """Every leaf by its dotted path, through ``CheckpointManager``; an empty dict is a leaf."""
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(output) as manager:
        assert manager.all_steps() == [step]
        restored = manager.restore(step, args=ocp.args.Composite(items=ocp.args.PyTreeRestore()))
    return dict(_leaves(restored["items"], ()))


def custom_metadata(output: Path, step: int = 0) -> dict[str, Any]:
    """What the step says to MaxText."""
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(output) as manager:
        return manager.metadata(step).custom_metadata


def steps(output: Path) -> list[int]:
    """The steps that a trainer would see."""
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(output) as manager:
        return list(manager.all_steps())


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for name, below in node.items():
            yield from _leaves(below, (*path, str(name)))
    else:
        yield ".".join(path), np.asarray(node) if hasattr(node, "shape") else node


def assert_restores(output: Path, expected: Mapping[str, np.ndarray]) -> None:
    """The restored train state holds exactly the expected arrays, bit for bit."""
    found = restore(output)
    assert found.pop("step") == 0
    assert found.pop("opt_state") == {}
    assert sorted(found) == sorted(expected)
    for key, array in expected.items():
        assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape), key
        assert found[key].tobytes() == np.ascontiguousarray(array).tobytes(), f"{key}: bits differ"
