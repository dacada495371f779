"""--fp8-from with experts: unchanged ones keep codes and scales byte for byte, a changed block gets new ones."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import qwen3_moe_config, qwen3_moe_tensors
from exports import export_here, read_repository, write_plan, write_repository
from fp8_samples import KINDS, Arrays, fp8_tensors
from in_memory import run_plan
from pairs import pairs
from tensorferry.mappings.export.low_bit_exports import refusal
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.conversion_plan import PlanOptions
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.convert.conversion_planning import ConversionOptions, plan_conversion

E4M3 = ml_dtypes.float8_e4m3fn
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


class Experts:
    """A Qwen3-MoE in FP8, and the bfloat16 checkpoint that a conversion makes of it."""

    def __init__(self, where: Path, kind: str, fused: bool, scan: bool = True) -> None:
        self.where, self.tensors = where, fp8_tensors(kind, qwen3_moe_tensors(fused=fused))
        config = qwen3_moe_config() | {"quantization_config": KINDS[kind][0]}
        self.folder = write_repository(where / "fp8", config, self.tensors)
        options = ConversionOptions(str(self.folder), target=PlanOptions(scan, "bfloat16", 300))
        self.plan = plan_conversion(options).plan
        self.arrays = {k.removeprefix("params."): a for k, a in run_plan(self.plan, self.tensors).items()}

    def export(self, monkeypatch, **options: Any):
        write_plan(self.where / "item", self.plan, self.arrays)
        options = {"fp8_from": str(self.folder), "chunk_bytes": 600} | options
        return export_here(monkeypatch, self.where / "item", self.folder, self.where / "out", **options)


def differing(a: Arrays, b: Arrays) -> set[str]:
    assert {n: (t.dtype, t.shape) for n, t in a.items()} == {n: (t.dtype, t.shape) for n, t in b.items()}
    return {name for name in a if a[name].tobytes() != b[name].tobytes()}


@pairs(kind=("block", "block, powers of two", "channel"), fused=(True, False), scan=(True, False))
def test_unchanged_experts(kind, fused, scan, tmp_path, monkeypatch):
    experts = Experts(tmp_path, kind, fused, scan)
    outcome = experts.export(monkeypatch)
    assert differing(read_repository(tmp_path / "out"), experts.tensors) == set()
    assert {changed for changed, _ in outcome.changed.values()} == {0}


@pytest.mark.parametrize("kind", ["block", "block, powers of two"])
def test_one_changed_element_of_one_expert(kind, tmp_path, monkeypatch, capsys):
    """Of three axes: expert 2, an up row; the scale of its block alone is new, a power of two where they all are."""
    experts = Experts(tmp_path, kind, fused=True)
    key = next(key for key in experts.arrays if key.endswith("wi_1"))
    experts.arrays[key][2, 1, 7, 3] = 50.5
    outcome = experts.export(monkeypatch)
    found = read_repository(tmp_path / "out")
    scale = f"{GATE_UP}_scale_inv"
    assert differing(found, experts.tensors) == {GATE_UP, scale}
    assert {name: counts[0] for name, counts in outcome.changed.items() if counts[0]} == {GATE_UP: 1}
    row, column = 5 + 3, 7
    at = (2, row // 4, column // 3)
    new = np.argwhere(found[scale].astype(np.float32) != experts.tensors[scale].astype(np.float32))
    assert new.tolist() == [list(at)]
    ideal = np.float32(50.5) / np.float32(448)
    wanted = np.float32(2.0**-3) if "two" in kind else ideal
    assert found[scale][at].astype(np.float32) == wanted
    assert found[GATE_UP][2, row, column] == np.float32(50.5 / wanted).clip(-448, 448).astype(E4M3)
    block = (2, slice(at[1] * 4, at[1] * 4 + 4), slice(at[2] * 3, at[2] * 3 + 3))
    same = np.ones(found[GATE_UP].shape, bool)
    same[block] = False
    assert found[GATE_UP][same].tobytes() == experts.tensors[GATE_UP][same].tobytes()
    assert main(["verify", "--source", str(tmp_path / "item"), "--output", str(tmp_path / "out")]) == 0
    assert "no difference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scheme", "params", "roles"),
    [
        ("nvfp4", {"code": "fp4", "scale_axes": [0, 1], "global": "multiply"}, ("values", "scale", "global")),
        ("mxfp4", {"code": "fp4", "scale_axes": [0, 1]}, ("values", "scale")),
        ("int8", {"code": "int8", "scale_axes": [0]}, ("values", "scale", "zero")),
        ("fp8-parts", {"code": "float8_e4m3fn", "scale_axes": [0], "row_starts": [0, 2, 5]}, ("values", "scale")),
    ],
)
def test_what_cannot_be_written_again_names_the_step_to_take(scheme, params, roles):
    stored = {role: StoredTensor(f"w.{role}", "uint8", (5, 7), "f", 0) for role in roles}
    problem = refusal(LogicalTensor("w", (5, 7), "float32", stored, scheme, params))
    assert str(problem).endswith(f"found the scheme {scheme}. Leave --fp8-from out and export with --dtype bfloat16.")
