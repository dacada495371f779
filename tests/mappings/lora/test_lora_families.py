"""Adapters of every linear weight and every fused expert of every family: as if merged weights had been converted."""

from fnmatch import fnmatchcase
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from adapters import PREFIX, adapter_config
from in_memory import convert, logical, run_plan
from oracle_data import MODES, value_names, values
from oracle_models import case_of
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.lora.merged_weights import merge_adapter
from tensorferry.mappings.lora.peft_adapter import read_adapter
from tensorferry.mappings.lowbit.quantisation import resolve
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.conversion_plan import PlanOptions, make_plan

Arrays = dict[str, np.ndarray]
RANK, ALPHA = 2, 8


def whole(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.integers(-2, 3, shape).astype(ml_dtypes.bfloat16)


def tuned(weights: Arrays, names: list[str]) -> tuple[Arrays, Arrays, list[str]]:
    """An adapter's tensors, the merged weights in float32, and the parameters that have no module.

    Every other fused tensor of a module is wrapped once more; ``[experts, rows, cols]`` are ``[experts, in, out]``.
    """
    random, adapter, merged, parameters = np.random.default_rng(11), {}, {}, []
    for name in names:
        weight = weights[name].astype(np.float32)
        if name.endswith(".weight") and weight.ndim == 2:
            a, b = whole(random, RANK, weight.shape[1]), whole(random, weight.shape[0], RANK)
            stem, product = name.removesuffix(".weight"), b.astype(np.float32) @ a.astype(np.float32)
        elif not name.endswith(".weight") and weight.ndim == 3:
            count, rows, cols = weight.shape
            a, b = whole(random, count * RANK, rows), whole(random, cols, RANK * count)
            product = np.einsum("ore,eri->eio", b.reshape(cols, RANK, count).astype(np.float32),
                                a.reshape(count, RANK, rows).astype(np.float32))  # fmt: skip
            stem = name.rpartition(".")[0]
            stem += ".base_layer" if f"{PREFIX}{stem}.lora_A.weight" in adapter else ""
            parameters.append(name)
        else:
            continue
        adapter[f"{PREFIX}{stem}.lora_A.weight"], adapter[f"{PREFIX}{stem}.lora_B.weight"] = a, b
        merged[name] = weight + np.float32(ALPHA / RANK) * product
    return adapter, merged, parameters


def cases() -> list[Any]:
    """Merging knows nothing of modes: in every run each model in one of them, by turns."""
    found = []
    for number, name in enumerate(value_names()):
        for turn, mode in enumerate(MODES):
            marks = pytest.mark.slow if (number + turn) % 2 else ()
            found.append(pytest.param(name, mode, id=f"{name}-{mode}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "mode"), cases())
def test_the_same_as_from_merged_weights(name: str, mode: str) -> None:
    if name.endswith("-fp8"):
        pytest.skip("its bfloat16 form is here too")
    checkpoint, scan = values(name), mode == "scan"
    family = make_family(Config(checkpoint.config), checkpoint.tensors, FamilyOptions(scan))
    options = PlanOptions(scan, chunk_bytes=6000)
    weights = {n: one for n, one in checkpoint.tensors.items() if n not in spurious(name, checkpoint.tensors)}
    claims = make_plan(family, logical(weights), options).account.claims
    adapter, merged, parameters = tuned(weights, sorted(claims))
    ours = run(family, logical(weights), weights, adapter, parameters, options)
    wanted = convert(family, {**weights, **merged}, options)
    assert len(merged) >= 10
    assert sorted(ours) == sorted(wanted)
    assert [key for key in wanted if ours[key].tobytes() != wanted[key].tobytes()] == []


def spurious(name: str, tensors: Arrays) -> set[str]:
    return {one for one in tensors if fnmatchcase(one, case_of(name).spurious)}


def run(
    family: Family, tensors: dict[str, LogicalTensor], stored: Arrays, adapter: Arrays, parameters: list[str],
    options: PlanOptions,
) -> Arrays:  # fmt: skip
    """Converts with an adapter, in memory."""
    config = adapter_config([], RANK, ALPHA, target_parameters=parameters)
    headers = {n: StoredTensor(n, one.dtype.name, one.shape, "memory", 0) for n, one in adapter.items()}
    understood, problems = read_adapter(config, headers)
    found = merge_adapter(understood, tensors)
    assert not problems
    assert not found.problems, [str(problem) for problem in found.problems]
    plan = make_plan(family, found.tensors, options)
    return {key.removeprefix("params."): one for key, one in run_plan(plan, {**stored, **adapter}).items()}


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@pytest.mark.parametrize("scan", [True, False])
def test_into_experts_in_mxfp4(scan: bool) -> None:
    """gpt-oss as published: blocks stored as [experts, out, in], seen as [experts, in, out]."""
    checkpoint, random = values("gpt-oss-20b"), np.random.default_rng(2)
    plain, packed = dict(checkpoint.tensors), dict(checkpoint.tensors)
    names = [name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    for name in names:
        experts, inputs, outputs = plain[name].shape
        blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
        pairs = np.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], axis=-1)
        plain[name] = pairs.reshape(experts, outputs, inputs).transpose(0, 2, 1)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": np.full(blocks.shape[:3], 127, np.uint8)}
    stored = {n: StoredTensor(n, a.dtype.name, a.shape, "memory", 0) for n, a in packed.items()}
    found = resolve(stored, {**checkpoint.config, "quantization_config": {"quant_method": "mxfp4"}})
    family, options = make_family(Config(checkpoint.config), plain, FamilyOptions(scan)), PlanOptions(scan)
    adapter, merged, parameters = tuned(plain, names)
    assert sorted(merged) == sorted(names)
    ours = run(family, found.logical, packed, adapter, parameters, options)
    wanted = convert(family, {**plain, **merged}, options)
    assert [key for key in wanted if ours[key].tobytes() != wanted[key].tobytes()] == []
