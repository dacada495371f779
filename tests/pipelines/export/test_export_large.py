"""Exports of the largest published models, planned from metadata: every tensor once, in seconds, in little memory."""

import json
import time
import tracemalloc
from collections.abc import Mapping

import deepseek_headers
import pytest
from oracle_models import case_of, compiled_rules, family_of, headers, oracle
from tensorferry.mappings.export.export_plan import ExportPlan, make_export_plan
from tensorferry.mappings.export.wanted import Wanted
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.lowbit.quantisation import resolve
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.conversion_plan import PlanOptions, make_plan
from tensorferry.pipelines.huggingface.repository import Repository, exported_config
from tensorferry.transforms.dtypes import SAFETENSORS_TO_NAME

# Ten times what it takes here, for machines that have much else to do.
MOST_SECONDS_PER_TENSOR = 15e-4
MOST_BYTES = 600 << 20


def way_home(family: Family, tensors: Mapping[str, LogicalTensor], scan: bool) -> ExportPlan:
    """The plan of the export of what a conversion of these tensors writes, in the chunks that it writes."""
    forward = make_plan(family, tensors, PlanOptions(scan_layers=scan))
    assert not forward.problems
    stored = {a.name: StoredTensor(a.name, a.spec.dtype, a.spec.shape, a.name, 0) for a in forward.arrays}
    sources = {name: LogicalTensor.plain(tensor) for name, tensor in stored.items()}
    chunks = {array.name: array.spec.inner for array in forward.arrays}
    started = time.perf_counter()
    wanted = Wanted(default_dtype="bfloat16", order=tuple(tensors), scan_layers=scan)
    plan = make_export_plan(family, sources, chunks, wanted, "digest")
    assert not plan.problems
    assert plan.totals.work_items
    assert time.perf_counter() - started < max(30, MOST_SECONDS_PER_TENSOR * len(tensors))
    assert plan.amplification < 1.1
    return plan


BIG = ("deepseek3-671b", "kimi-k2-1t", "qwen3-235b-a22b")


QUICK = (("llama3.1-405b", "scan"), ("gpt-oss-120b", "scan"), ("gpt-oss-120b", "unscan"))
CASES = [
    pytest.param(name, mode, marks=[] if (name, mode) in QUICK else pytest.mark.slow)
    for name in (*BIG, "llama3.1-405b", "gpt-oss-120b")
    for mode in ("scan", "unscan")
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_tensor_of_a_large_model(name: str, mode: str) -> None:
    """Exactly the names and shapes that a conversion consumes."""
    scan, tree = mode == "scan", oracle(name).trees[mode]
    family = family_of(name, tree.names | set(case_of(name).names), scan_layers=scan)
    tensors = headers(compiled_rules(family, scan))
    plan = way_home(family, tensors, scan)
    assert {array.name: array.spec.shape for array in plan.arrays} == {n: t.shape for n, t in tensors.items()}
    placed = [tensor.key for shard in plan.shards for tensor in shard.tensors]
    assert sorted(placed) == sorted(tensors)
    assert max(shard.data_bytes for shard in plan.shards) <= 5_000_000_000


@pytest.mark.slow
def test_deepseek_v3_as_published() -> None:
    """All 91,991 tensors: FP8 weights come home in bfloat16 without scales, and config.json tells of no FP8."""
    stored, nbytes = {}, {"BF16": 2, "F32": 4, "F8_E4M3": 1}
    for name, dtype, shape in deepseek_headers.tensors():
        assert dtype in nbytes
        stored[name] = StoredTensor(name, SAFETENSORS_TO_NAME[dtype], shape, "model.safetensors", 0)
    assert len(stored) == 91_991
    found = resolve(stored, deepseek_headers.CONFIG)
    family = make_family(Config(deepseek_headers.CONFIG), stored, FamilyOptions())
    plan = way_home(family, found.logical, True)
    ahead = f"model.layers.{deepseek_headers.LAYERS}."
    weights = {name for name in stored if not name.endswith("_scale_inv") and not name.startswith(ahead)}
    assert {array.name: array.spec.shape for array in plan.arrays} == {name: stored[name].shape for name in weights}
    dtypes = {array.name: array.spec.dtype for array in plan.arrays}
    assert set(dtypes.values()) == {"bfloat16"}  # what --config's headers say of a tensor would come first
    raw = json.dumps(deepseek_headers.CONFIG).encode()
    repository = Repository(None, raw, deepseek_headers.CONFIG, {}, quantised=True)  # pyright: ignore[reportArgumentType]
    config, told = exported_config(repository, "bfloat16")
    assert "quantization_config" not in json.loads(config)
    assert told == ("config.json: quantization_config removed, the weights are bfloat16",)


@pytest.mark.slow
def test_a_plan_of_many_tensors_is_small() -> None:
    """What planning holds at its peak, for 36,945 tensors; it grows with their number."""
    tree = oracle("qwen3-235b-a22b").trees["scan"]
    family = family_of("qwen3-235b-a22b", tree.names)
    tensors = headers(compiled_rules(family, True))
    forward = make_plan(family, tensors, PlanOptions())
    sources = {
        a.name: LogicalTensor.plain(StoredTensor(a.name, a.spec.dtype, a.spec.shape, a.name, 0)) for a in forward.arrays
    }
    chunks = {array.name: array.spec.inner for array in forward.arrays}
    tracemalloc.start()
    try:
        plan = make_export_plan(family, sources, chunks, Wanted(order=tuple(tensors)), "digest")
        assert plan.totals.arrays == len(tensors) == 36_945
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES * len(tensors) / 100_000
    finally:
        tracemalloc.stop()
