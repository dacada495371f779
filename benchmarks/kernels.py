"""What each array kernel costs in CPU seconds per GB, beside a plain copy in the same run.

Run ``python benchmarks/kernels.py``; ``--only transpose`` picks rows by a word of their name, ``--megabytes`` sets
the size of the arrays. Seconds are of CPU, the best of three, so other work on the machine matters less; compare
the ratios, which matter least of all.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from tensorferry.transforms.cast import cast_into
from tensorferry.transforms.digest import digest
from tensorferry.transforms.dtypes import numpy_dtype
from tensorferry.transforms.ops import Scale, apply_elementwise_into
from tensorferry.transforms.relayout import transpose_into
from tensorferry.transforms.statistics import statistics


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
      name: the kernel and its case.
      run: the kernel on arrays made beforehand.
      source_bytes: bytes of the source, which the cost is stated per.
    """

    name: str
    run: Callable[[], object]
    source_bytes: int


def cpu_seconds(run: Callable[[], object], repeats: int = 3) -> float:
    """CPU seconds of the fastest of a few runs, all threads counted."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best


def weights(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random values of the size of real weights."""
    values = np.random.default_rng(0).normal(scale=0.02, size=shape).astype(np.float32)
    return values.astype(numpy_dtype(dtype))


LAYOUTS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "embed mlp -> mlp embed": ("bfloat16", (3584, 4096), (1, 0)),
    "embed mlp -> mlp embed, odd sizes": ("bfloat16", (3571, 4093), (1, 0)),
    "heads head_dim embed -> embed heads head_dim": ("bfloat16", (28, 128, 4096), (2, 0, 1)),
    "heads half pair embed -> embed heads pair half": ("bfloat16", (28, 2, 64, 4096), (3, 0, 2, 1)),
    "expert embed (mlp part) -> part expert embed mlp": ("bfloat16", (7, 512, 2048, 2), (3, 0, 1, 2)),
    "embed heads head_dim -> heads embed head_dim": ("bfloat16", (3584, 32, 128), (1, 0, 2)),
    "embed mlp -> mlp embed in float32": ("float32", (3584, 4096), (1, 0)),
    "embed mlp -> mlp embed in float8_e4m3fn": ("float8_e4m3fn", (3584, 4096), (1, 0)),
}
CASTS = [
    ("bfloat16", "float32"),
    ("float32", "bfloat16"),
    ("float16", "bfloat16"),
    ("float64", "bfloat16"),
    ("float8_e4m3fn", "bfloat16"),
    ("float8_e4m3fn", "float32"),
]
STATISTICS = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e4m3fnuz"]


def transposes(scale: int) -> Iterator[Row]:
    """Relayouts, and what numpy alone takes for the first of them."""
    for name, (dtype, shape, axes) in LAYOUTS.items():
        source = weights(dtype, (shape[0] * scale, *shape[1:]))
        out, size = np.zeros([source.shape[axis] for axis in axes], source.dtype), source.nbytes
        if name == "embed mlp -> mlp embed":
            yield Row(
                f"numpy copy: {name}", lambda o=out, s=source, a=axes: np.copyto(o, s.transpose(a)), source.nbytes
            )
        yield Row(f"transpose: {name}", lambda o=out, s=source, a=axes: transpose_into(o, s, a), size)


def casts(scale: int) -> Iterator[Row]:
    """Casts, per GB of source."""
    for source_dtype, dtype in CASTS:
        source = weights(source_dtype, (scale * 3584, 4096))
        out = np.zeros(source.shape, numpy_dtype(dtype))
        yield Row(f"cast: {source_dtype} -> {dtype}", lambda o=out, s=source: cast_into(o, s), source.nbytes)


def elementwise(scale: int) -> Iterator[Row]:
    """A multiplication of bfloat16 in place, in float32, rounded once."""
    block = weights("bfloat16", (scale * 3584, 4096))
    yield Row("scale: bfloat16 in place", lambda: apply_elementwise_into(block, block, [Scale(0.999)]), block.nbytes)


def readings(scale: int) -> Iterator[Row]:
    """Kernels that only read."""
    for dtype in STATISTICS:
        source = weights(dtype, (scale * 3584, 4096))
        yield Row(f"statistics: {dtype}", lambda s=source: statistics(s), source.nbytes)
    source = weights("bfloat16", (scale * 3584, 4096))
    yield Row("digest: xxh3-128", lambda: digest(source), source.nbytes)


def plain_copy(scale: int) -> Iterator[Row]:
    """The unit of the table."""
    source = np.ones((scale * 3584, 4096), np.uint16)
    out = np.zeros_like(source)
    yield Row("memcpy", lambda: np.copyto(out, source), source.nbytes)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose name has this word")
    parser.add_argument("--megabytes", type=int, default=120, help="size of a bfloat16 array (default: 120)")
    options = parser.parse_args()
    scale = max(1, round(options.megabytes / 29.4))
    print(f"{'kernel':64} {'CPU-s/GB':>8} {'x memcpy':>8}")
    unit = None
    for group in (plain_copy, transposes, casts, elementwise, readings):
        for row in group(scale):
            if unit is None or options.only in row.name:
                cost = cpu_seconds(row.run) / (row.source_bytes / 1e9)
                unit = unit or cost
                print(f"{row.name:64} {cost:8.2f} {cost / unit:8.1f}", flush=True)


if __name__ == "__main__":
    main()
