"""What dequantising costs: GB/s of bfloat16 that one core makes, beside a plain cast and PyTorch on the same data.

Run ``python -m benchmarks.low_bit``; ``--write`` keeps the figures in BENCHMARKS.md. Seconds are of CPU, the best of
several runs, so other work on the machine matters less. PyTorch is measured, on one thread, where it is installed.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tensorferry.mappings.lowbit.quantisation import resolve
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.pipelines.regions.decode_region import decode_region
from tensorferry.transforms.cast import cast_into
from tensorferry.transforms.decode.tables import decode_bytes
from tensorferry.transforms.relayout import transpose_into

from benchmarks.report import write_section

ROWS, COLUMNS, BLOCK = 4096, 7168, 128
BF16 = np.dtype(ml_dtypes.bfloat16)
OUTPUT_GB = ROWS * COLUMNS * 2 / 1e9
# As many values as are decoded at a time.
PIECE = 1 << 17


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    run: Callable[[], object]


def cpu_seconds(run: Callable[[], object], repeats: int) -> float:
    """CPU seconds of the fastest run, all threads counted."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best


def random_bytes(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def fp8_codes() -> np.ndarray:
    """Every code but the two NaNs."""
    codes = random_bytes(ROWS, COLUMNS)
    codes[codes & 0x7F == 0x7F] = 0
    return codes.view(ml_dtypes.float8_e4m3fn)


def scales(*shape: int) -> np.ndarray:
    return (np.random.default_rng(1).random(shape) * 0.02 + 0.001).astype(np.float32)


def exponents(*shape: int) -> np.ndarray:
    return np.random.default_rng(2).integers(110, 128, shape).astype(np.uint8)


FP8 = {"w.weight": fp8_codes(), "w.weight_scale_inv": scales(ROWS // BLOCK, COLUMNS // BLOCK)}
MXFP4 = {"w.weight_packed": random_bytes(ROWS, COLUMNS // 2), "w.weight_scale": exponents(ROWS, COLUMNS // 32)}
GPT_OSS = {"w_blocks": random_bytes(1, ROWS, COLUMNS // 32, 16), "w_scales": exponents(1, ROWS, COLUMNS // 32)}
NVFP4 = {
    "w.weight": random_bytes(ROWS, COLUMNS // 2),
    "w.weight_scale": exponents(ROWS, COLUMNS // 16).clip(1, 120).view(ml_dtypes.float8_e4m3fn),
    "w.weight_scale_2": scales(),
}
INT4 = {
    "w.weight_packed": random_bytes(ROWS, COLUMNS // 2).view(np.int32),
    "w.weight_scale": scales(ROWS, COLUMNS // 32).astype(ml_dtypes.bfloat16),
}


def compressed(kind: str, bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": "group", "group_size": 32, "symmetric": True}
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


SCHEMES: dict[str, tuple[dict[str, np.ndarray], dict[str, Any]]] = {
    "FP8, blocks of 128x128": (FP8, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
    "MXFP4": (MXFP4, compressed("float", 4)),
    "MXFP4 of gpt-oss, seen transposed": (GPT_OSS, {"quant_method": "mxfp4"}),
    "NVFP4": (NVFP4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "INT4, groups of 32": (INT4, compressed("int", 4)),
}


def logical(arrays: dict[str, np.ndarray], quant: dict[str, Any]) -> LogicalTensor:
    """The one weight of a checkpoint in memory."""
    stored = {n: StoredTensor(n, a.dtype.name, a.shape, "memory", 0) for n, a in arrays.items()}
    (tensor,) = resolve(stored, {"quantization_config": quant}).logical.values()
    return tensor


def decoding(arrays: dict[str, np.ndarray], quant: dict[str, Any]) -> Callable[[], object]:
    """Decodes the whole weight to bfloat16, as workers do block by block."""
    tensor = logical(arrays, quant)
    roles = {role: arrays[one.name] for role, one in tensor.stored.items()}
    box = tuple((0, n) for n in tensor.shape)
    order = tensor.params.get("order") or range(len(tensor.shape))
    out = np.zeros([tensor.shape[a] for a in order], BF16).transpose(np.argsort(list(order)))
    return lambda: decode_region(tensor, box, roles, "bfloat16", out)


def schemes() -> Iterator[Row]:
    for name, (arrays, quant) in SCHEMES.items():
        yield Row(f"{name} → bfloat16", decoding(arrays, quant))


def references() -> Iterator[Row]:
    """What moves as many bytes and does less."""
    values = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    out, turned = np.zeros((ROWS, COLUMNS), BF16), np.zeros((COLUMNS, ROWS), BF16)
    yield Row("float32 → bfloat16, plain cast", lambda: cast_into(out, values))
    yield Row("bfloat16 transposed", lambda: transpose_into(turned, out, (1, 0)))


def steps() -> Iterator[Row]:
    """Where the time of FP8 goes: the same work on pieces that stay in cache, step by step."""
    codes = FP8["w.weight"].view(np.uint8).reshape(-1, PIECE)
    piece, rounded = np.zeros(PIECE, np.float32), np.zeros(PIECE, BF16)
    factor = np.repeat(scales(PIECE // BLOCK), BLOCK)
    yield Row("of FP8: codes → float32", lambda: [decode_bytes(some, "float8_e4m3fn", piece) for some in codes])
    yield Row("of FP8: times scale", lambda: [np.multiply(piece, factor, out=piece) for _ in codes])
    piece[:] = 1
    yield Row("of FP8: float32 → bfloat16", lambda: [cast_into(rounded, piece) for _ in codes])


def torch_rows() -> Iterator[Row]:
    """PyTorch's usual way on the same data."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return
    torch.set_num_threads(1)
    codes = torch.from_numpy(FP8["w.weight"].view(np.uint8)).view(torch.float8_e4m3fn)
    scale = torch.from_numpy(FP8["w.weight_scale_inv"])
    packed, exponent = torch.from_numpy(MXFP4["w.weight_packed"]), torch.from_numpy(MXFP4["w.weight_scale"])
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.bfloat16)

    def fp8() -> object:
        tiles = codes.to(torch.float32).view(ROWS // BLOCK, BLOCK, COLUMNS // BLOCK, BLOCK)
        return (tiles * scale[:, None, :, None]).to(torch.bfloat16)

    def mxfp4() -> object:
        pairs = torch.stack([table[(packed & 15).int()], table[(packed >> 4).int()]], -1)
        return torch.ldexp(pairs.view(ROWS, COLUMNS // 32, 32), (exponent.int() - 127)[..., None])

    values = torch.randn(ROWS, COLUMNS)
    version = torch.__version__.partition("+")[0]
    yield Row(f"PyTorch {version}: float32 → bfloat16", lambda: values.to(torch.bfloat16))
    yield Row(f"PyTorch {version}: FP8, blocks of 128x128 → bfloat16", fp8)
    yield Row(f"PyTorch {version}: MXFP4 → bfloat16", mxfp4)


GROUPS = (references, schemes, torch_rows, steps)


def report(lines: list[str]) -> str:
    """The section of BENCHMARKS.md."""
    return "\n".join([
        "## Dequantising",
        "",
        f"A weight of {ROWS:,} x {COLUMNS:,} in memory, on one core: GB of bfloat16 per second of CPU, the best "
        "of several runs.",
        "PyTorch, on one thread, allocates its results as its users' code does; ours go into one buffer, used again. "
        "The last rows",
        "take the kernel of FP8 apart. `python -m benchmarks.low_bit --write` measures again.",
        "",
        "| work | GB/s |",
        "|---|--:|",
        *lines,
    ])  # fmt: skip


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="runs of each row, of which the best counts")
    parser.add_argument("--write", action="store_true", help="keep the figures in BENCHMARKS.md")
    options = parser.parse_args()
    lines = []
    for row in (row for group in GROUPS for row in group()):
        lines.append(f"| {row.name} | {OUTPUT_GB / cpu_seconds(row.run, options.repeats):.2f} |")
        print(lines[-1], flush=True)
    if options.write:
        write_section(Path(__file__).parents[1] / "BENCHMARKS.md", "low-bit", report(lines))


if __name__ == "__main__":
    main()
