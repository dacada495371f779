"""How far FP8 conversions are from the bfloat16 weights they were quantised from, as a table in Markdown.

``python -m demo.fp8_error BFLOAT16 NAME=FP8 …`` compares MaxText checkpoints, restored by stock Orbax; carried codes
are multiplied by their scales as MaxText's loader does it.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray]


def restored(output: Path) -> dict[str, np.ndarray]:
    """Every array of a checkpoint's only step."""
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(output.absolute()) as manager:
        tree = manager.restore(0, args=ocp.args.Composite(items=ocp.args.PyTreeRestore()))["items"]
    return dict(_leaves(tree, ()))


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(node, Mapping):
        for name, below in node.items():
            yield from _leaves(below, (*path, str(name)))
    elif hasattr(node, "shape"):
        yield ".".join(path), np.asarray(node)


def weights(arrays: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    """Weights as float32: codes times their scale, and every other array as it is."""
    for key, array in arrays.items():
        scale = arrays.get(f"{key}_scale")
        if not key.endswith("_scale"):
            values = array.astype(np.float32)
            yield key, values if scale is None else values * spread(scale.astype(np.float32), values.shape)


def spread(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A scale to multiply by: one per layer (``[layers]``), or a grid of blocks of even lengths."""
    if scale.ndim < len(shape):
        return scale.reshape(1, *scale.shape, *[1] * (len(shape) - 1 - scale.ndim))
    for axis, length in enumerate(shape):
        scale = np.repeat(scale, length // scale.shape[axis], axis=axis)
    return scale


def errors(true: Arrays, other: Arrays) -> tuple[float, float, int]:
    """Relative root mean square and largest relative error of the arrays that differ in kind, and bytes stored."""
    squares = total = largest = 0.0
    quantised = 0
    for key, values in weights(other):
        exact = true[key].astype(np.float32)
        difference = np.abs(values - exact)
        if difference.any():
            quantised += 1
            squares += float(np.square(difference, dtype=np.float64).sum())
            total += float(np.square(exact, dtype=np.float64).sum())
            largest = max(largest, float(difference.max() / np.abs(exact).max()))
    return (squares / total) ** 0.5 if total else 0.0, largest, sum(array.nbytes for array in other.values())


def main(argv: list[str]) -> int:
    true = restored(Path(argv[0]))
    print("| conversion | relative RMS error | largest error / largest weight | bytes |")
    print("| --- | ---: | ---: | ---: |")
    for word in argv[1:]:
        name, _, output = word.rpartition("=")
        rms, largest, nbytes = errors(true, restored(Path(output)))
        print(f"| {name} | {rms:.2%} | {largest:.2%} | {nbytes:,} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
