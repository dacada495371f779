"""gpt-oss as published, in MXFP4: the same arrays as from its bfloat16 form, through the family's own rules."""

import ml_dtypes
import numpy as np
import pytest
from in_memory import convert, run_plan
from oracle_data import values
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import FamilyOptions
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.lowbit.quantisation import resolve
from tensorferry.mappings.lowbit.tensors import StoredTensor
from tensorferry.mappings.plan.conversion_plan import PlanOptions, make_plan

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def quantised(seed: int, experts: int, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random blocks and scales as the file has them, and the bfloat16 weights [experts, inputs, outputs] they mean."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
    scales = rng.integers(118, 130, (experts, outputs, inputs // 32)).astype(np.uint8)
    pairs = np.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], axis=-1).reshape(experts, outputs, inputs // 32, 32)
    weights = pairs * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return blocks, scales, weights.reshape(experts, outputs, inputs).transpose(0, 2, 1).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("chunk_bytes", [64 << 20, 3000], ids=["whole", "cut"])
@pytest.mark.parametrize("scan", [True, False])
def test_mxfp4_equals_its_bfloat16_form(scan: bool, chunk_bytes: int) -> None:
    checkpoint = values("gpt-oss-20b")
    plain, packed = dict(checkpoint.tensors), dict(checkpoint.tensors)
    for seed, (name, tensor) in enumerate(checkpoint.tensors.items()):
        if name.endswith(EXPERTS):
            blocks, scales, plain[name] = quantised(seed, *tensor.shape)
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    family = make_family(Config(checkpoint.config), plain, FamilyOptions(scan_layers=scan))
    options = PlanOptions(scan_layers=scan, chunk_bytes=chunk_bytes)
    stored = {n: StoredTensor(n, a.dtype.name, a.shape, "memory", 0) for n, a in packed.items()}
    found = resolve(stored, {**checkpoint.config, "quantization_config": {"quant_method": "mxfp4"}})
    assert not found.problems
    ours = run_plan(make_plan(family, found.logical, options), packed)
    wanted = convert(family, plain, options)
    assert {key.removeprefix("params."): array.tobytes() for key, array in ours.items()} == {
        key: array.tobytes() for key, array in wanted.items()
    }
