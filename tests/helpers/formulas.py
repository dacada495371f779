"""Small checkpoints of made-up values, converted both ways, to be compared with formulas by hand."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from in_memory import convert, convert_back
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import FamilyOptions
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.plan.conversion_plan import PlanOptions

# Sizes that all models here share: embed, heads, head_dim, experts, their width, vocabulary.
E, N, D, X, M, V = 12, 4, 6, 3, 5, 14
Shapes = dict[str, tuple[int, ...]]
Tensors = Mapping[str, np.ndarray]


def mlp(prefix: str, width: int) -> Shapes:
    return {f"{prefix}gate_proj.weight": (width, E), f"{prefix}up_proj.weight": (width, E),
            f"{prefix}down_proj.weight": (E, width)}  # fmt: skip


def tensors_of(shapes: Shapes, float32: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Random bfloat16 tensors, all different; float32 where the name ends so, integers for tables."""
    random = np.random.default_rng(len(shapes))
    made: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        values = random.normal(size=shape).astype(np.float32)
        made[name] = values if name.endswith(float32 or ("\0",)) else values.astype(ml_dtypes.bfloat16)
        if name.endswith("tid2eid"):
            made[name] = random.integers(0, X, shape)
    return made


def ferried(config: dict[str, Any], tensors: Tensors, scan: bool, **options: Any) -> dict[str, np.ndarray]:
    """Converts whole and in small cuts, converts back, insists on the same values; the MaxText arrays."""
    family = make_family(Config(config), tensors, FamilyOptions(scan_layers=scan, **options))
    plan_options = PlanOptions(scan_layers=scan, dtype="source", chunk_bytes=300)
    arrays = convert(family, tensors, plan_options)
    whole = convert(family, tensors, PlanOptions(scan_layers=scan, dtype="source"))
    assert {key: a.tobytes() for key, a in arrays.items()} == {key: a.tobytes() for key, a in whole.items()}
    back = convert_back(family, arrays, plan_options)
    assert back.keys() == tensors.keys()
    for name, array in back.items():
        same(array, tensors[name])
    return arrays


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert np.array_equal(found.astype(np.float32), expected.astype(np.float32))
