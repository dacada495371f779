"""Every scheme through work items: decoded block by block into chunks, and hardly a byte read twice."""

import json
from collections import Counter

import numpy as np
import pytest
import tensorferry.pipelines.regions.assemble
from lowbit_zoo import ZOO, Repo
from tensorferry.mappings.families.family import Family, make_dims
from tensorferry.mappings.lowbit.quantisation import resolve
from tensorferry.mappings.lowbit.schemes import SCHEMES
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.conversion_plan import Plan, PlanOptions, make_plan
from tensorferry.mappings.plan.work import WorkItem
from tensorferry.mappings.rules.rule import Rule
from tensorferry.pipelines.convert.ferry import load_region, part_buffers, reading
from tensorferry.pipelines.regions.boxes import Scratch
from tensorferry.pipelines.storage.byte_source import LocalSource
from tensorferry.transforms.dtypes import numpy_dtype

REPOS = {kind: build() for kind, build in ZOO.items()}


def stored(repo: Repo, folder) -> dict[str, StoredTensor]:
    """The arrays of a checkpoint in files, at odd offsets."""
    tensors = {}
    for k, (name, (dtype, array)) in enumerate(repo.arrays.items()):
        (folder / f"{k}.bin").write_bytes(b"\xff" * (8 * k) + np.ascontiguousarray(array).tobytes())
        tensors[name] = StoredTensor(name, dtype, repo.shapes.get(name, array.shape), f"{k}.bin", 8 * k)
    return tensors


def plan_of(repo: Repo, tensors, dtype: str, chunk_bytes: int) -> Plan:
    def peek(wanted):
        return {tensor.name: repo.arrays[tensor.name][1].tobytes() for tensor in wanted}

    found = resolve(tensors, repo.config, {}, peek)
    assert not found.problems
    return turning_plan(found.logical[repo.name], dtype, chunk_bytes)


def turning_plan(tensor: LogicalTensor, dtype: str, chunk_bytes: int) -> Plan:
    """One rule that turns the last two axes."""
    dims = ["expert", "rows", "columns"][-len(tensor.shape) :]
    layout = f"{' '.join(dims)} -> {' '.join([*dims[:-2], *reversed(dims[-2:])])}"
    sizes = make_dims(dict(zip(dims, tensor.shape, strict=True)))
    family = Family("test", sizes, {}, (Rule(tensor.name, "params-kernel", layout),))
    plan = make_plan(family, {tensor.name: tensor}, PlanOptions(True, dtype, chunk_bytes))
    plan.require()
    return plan


def turned(weights: np.ndarray) -> np.ndarray:
    return np.swapaxes(weights, -1, -2) if weights.ndim > 1 else weights


def ferried(plan: Plan, source) -> np.ndarray:
    (spec,) = (array.spec for array in plan.arrays)
    out = np.zeros(spec.shape, numpy_dtype(spec.dtype))
    scratch = Scratch()
    for line, _ in plan.lines():
        item = WorkItem.from_json(json.loads(line))
        filled = tensorferry.pipelines.regions.assemble.assemble(
            item, load_region(source, scratch), part_buffers(item, scratch)
        )
        for part, array in zip(item.parts, filled, strict=True):
            out[tuple(slice(*span) for span in part.spec.box(part.grid))] = array
    return out


@pytest.mark.parametrize("block_bytes", [4 << 20, 300], ids=["one block", "many blocks"])
@pytest.mark.parametrize("chunk_bytes", [64 << 20, 100], ids=["one chunk", "many chunks"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ZOO)
def test_every_scheme_in_any_pieces(kind, dtype, chunk_bytes, block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(tensorferry.pipelines.regions.assemble, "BLOCK_BYTES", block_bytes)
    repo = REPOS[kind]
    plan = plan_of(repo, stored(repo, tmp_path), dtype, chunk_bytes)
    found = ferried(plan, LocalSource(str(tmp_path)))
    wanted = turned(repo.expected).astype(numpy_dtype(dtype))
    assert found.dtype == wanted.dtype
    assert np.ascontiguousarray(found).tobytes() == np.ascontiguousarray(wanted).tobytes()


def words(name: str, shape: tuple[int, int], bits: int, group: int, zero: bool = False) -> dict:
    """Headers of compressed-tensors' packed words."""
    rows, columns = shape
    tensors = {
        f"{name}_packed": ("int32", (rows, columns * bits // 32)),
        f"{name}_scale": ("bfloat16", (rows, columns // group)),
    }
    if zero:
        tensors[f"{name}_zero_point"] = ("int32", (rows * bits // 32, columns // group))
    return tensors


def compressed(bits: int, group: int, symmetric: bool = True) -> dict:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": symmetric}
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
REAL = {
    "gpt-oss": ("e.down_proj", {"e.down_proj_blocks": ("uint8", (9, 2880, 90, 16)),
                                "e.down_proj_scales": ("uint8", (9, 2880, 90))}, {"quant_method": "mxfp4"}),
    "int4 g32": ("a.weight", words("a.weight", (7168, 18432), 4, 32), compressed(4, 32)),
    "int3 zero points": ("a.weight", words("a.weight", (4096, 14336), 3, 128, True), compressed(3, 128, False)),
    "gptq": ("a.weight", {"a.qweight": ("int32", (1024, 28672)), "a.scales": ("float16", (64, 28672)),
                          "a.qzeros": ("int32", (64, 3584))}, GPTQ),
    "gptq act order": ("a.weight", {"a.qweight": ("int32", (1024, 28672)), "a.scales": ("float16", (64, 28672)),
                                    "a.qzeros": ("int32", (64, 3584)), "a.g_idx": ("int32", (8192,))}, GPTQ),
    "awq": ("a.weight", {"a.qweight": ("int32", (8192, 3584)), "a.scales": ("float16", (64, 28672)),
                         "a.qzeros": ("int32", (64, 3584))}, AWQ),
    "fp8 block": ("a.weight", {"a.weight": ("float8_e4m3fn", (7168, 18432)),
                               "a.weight_scale_inv": ("float32", (56, 144))},
                  {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "nvfp4": ("a.weight", {"a.weight": ("uint8", (8192, 14336)), "a.weight_scale": ("float8_e4m3fn", (8192, 1792)),
                           "a.weight_scale_2": ("float32", ())}, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}  # fmt: skip


class Nothing:
    """Counts reads of files that are not there."""

    def __init__(self) -> None:
        self.nbytes: Counter[str] = Counter()

    def readinto(self, path, start, buffer):
        self.nbytes[path] += len(buffer)


# With act order a column's group may be any, so every chunk reads all scales.
@pytest.mark.parametrize(
    ("kind", "chunk_bytes", "most"),
    [
        *((kind, 32 << 20, 1.02) for kind in REAL if kind != "gptq act order"),
        *((kind, 5 << 20, 1.05) for kind in REAL if kind != "gptq act order"),
        ("gptq act order", 64 << 20, 1.3),
    ],
)
def test_hardly_a_byte_is_read_twice(kind, chunk_bytes, most):
    """Tensors of real sizes, headers only: cuts of chunks and blocks lie where words and groups end."""
    name, headers, quant = REAL[kind]
    tensors = {n: StoredTensor(n, dtype, shape, n, 0) for n, (dtype, shape) in headers.items()}
    found = resolve(tensors, {"quantization_config": quant})
    assert not found.problems, [str(p) for p in found.problems]
    plan = turning_plan(found.logical[name], "bfloat16", chunk_bytes)
    source, scratch = Nothing(), Scratch()
    for item in plan.items():
        read = reading(source, scratch)

        def load(tensor, box, wanted, read=read):
            for role, stored_box in SCHEMES[tensor.scheme].stored_box(tensor, box).items():
                read(role, tensor.stored[role], stored_box)
            return np.broadcast_to(numpy_dtype(wanted).type(0), [stop - start for start, stop in box])

        tensorferry.pipelines.regions.assemble.assemble(item, load, part_buffers(item, scratch))
    stored_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert plan.totals.objects >= 3
    assert sum(source.nbytes.values()) <= most * stored_bytes, (plan.totals.objects, source.nbytes)
