"""What MaxText's converter makes of a checkpoint exports to that checkpoint; plans at the sizes of published models."""

from fnmatch import fnmatchcase
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from exports import export_here, read_repository, write_plan, write_repository
from family_cases import CASES, Case
from in_memory import convert, logical
from oracle_data import model, value_names, values
from tensorferry.mappings.export.export_plan import make_export_plan
from tensorferry.mappings.export.wanted import Wanted
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.conversion_plan import PlanOptions, make_plan
from tensorferry.mappings.rules.compiled import compile_rule, source_shape

# Carried FP8 trees are the subject of test_export_carried.
NAMES = [name for name in value_names() if not name.endswith("-fp8")]


def tensors_of(name: str) -> dict[str, np.ndarray]:
    """The synthetic checkpoint, without what no real one holds."""
    spurious = CASES[name].spurious if name in CASES else ""
    return {n: t for n, t in values(name).tensors.items() if not fnmatchcase(n, spurious)}


def family_of(name: str, mode: str, match_maxtext: bool) -> Family:
    embedding = values(name).expected[mode].arrays["params.params.token_embedder.embedding"]
    options = FamilyOptions(scan_layers=mode == "scan", vocab_size=embedding["shape"][0], match_maxtext=match_maxtext)
    return make_family(Config(values(name).config), tensors_of(name), options)


def rounded(array: np.ndarray) -> bytes:
    """The bytes after a detour through bfloat16, which MaxText's converter takes everywhere."""
    return array.astype(ml_dtypes.bfloat16).astype(array.dtype).tobytes()


def exported(name: str, mode: str, match_maxtext: bool, where: Path, monkeypatch) -> dict[str, np.ndarray]:
    """The checkpoint converted in memory, saved, and exported by reading the files."""
    tensors, family = tensors_of(name), family_of(name, mode, match_maxtext)
    options = PlanOptions(scan_layers=mode == "scan", chunk_bytes=9000)
    plan = make_plan(family, logical(tensors), options)
    write_plan(where / "orbax", plan, convert(family, tensors, options))
    repository = write_repository(where / "repository", values(name).config, tensors)
    outcome = export_here(monkeypatch, where / "orbax", repository, where / "out", chunk_bytes=5000)
    assert outcome.export.plan.amplification < 1.5
    found = read_repository(where / "out")
    assert found.keys() == tensors.keys() - plan.account.ignored.keys()
    assert {n: (a.shape, a.dtype) for n, a in found.items()} == {n: (tensors[n].shape, tensors[n].dtype) for n in found}
    return found


REAL = (
    "gemma2-2b", "gemma3-4b+mm", "gemma4-e2b", "gpt-oss-20b", "llama3.1-8b", "olmo3-7b", "qwen2.5-1.5b", "qwen3-0.6b",
    "qwen3-vl-2b", "qwen3.5-35b-a3b+mm",
)  # fmt: skip


@pytest.mark.by_turns
@pytest.mark.parametrize("name", REAL)
def test_plans_at_real_size(name: str) -> None:
    """Every array of a published model goes home once, and hardly a byte is read twice, whatever the mode."""
    case = CASES.get(name, Case())
    config = Config({**(model(case.config_of or name).hf_config or {}), **case.config})
    for mode, tree in model(name).trees.items():
        scan = mode == "scan"
        names = tree.names.union(case.names, *tree.extra.values())
        family = make_family(config, names, FamilyOptions(scan_layers=scan, **case.options))
        rules = [compile_rule(rule, family.dims) for rule in family.plain_rules(scan)]
        shapes = {source: source_shape(rule) for rule in rules for source in rule.sources()}
        tensors = {n: LogicalTensor.plain(StoredTensor(n, "bfloat16", shape, "f", 0)) for n, shape in shapes.items()}
        arrays = make_plan(family, tensors, PlanOptions(scan_layers=scan)).arrays
        stored = {a.name: StoredTensor(a.name, a.spec.dtype, a.spec.shape, "f", 0) for a in arrays}
        chunks = {array.name: array.spec.inner for array in arrays}
        sources = {name: LogicalTensor.plain(tensor) for name, tensor in stored.items()}
        plan = make_export_plan(family, sources, chunks, Wanted(scan_layers=scan), "digest")
        assert not plan.problems
        assert {array.name: array.spec.shape for array in plan.arrays} == shapes
        assert plan.amplification < 1.1
        assert sum(item.write_bytes for item in plan.items()) == sum(array.spec.nbytes for array in plan.arrays)


@pytest.mark.by_turns
@pytest.mark.parametrize("name", NAMES)
def test_maxtexts_own_bytes_export_to_their_source(name: str, tmp_path: Path, monkeypatch) -> None:
    """The conversion equals MaxText's output bit for bit (see test_families), so this exports MaxText's checkpoint."""
    found = exported(name, "scan", True, tmp_path, monkeypatch)
    tensors = tensors_of(name)
    wrong = {n for n, array in found.items() if array.tobytes() not in (tensors[n].tobytes(), rounded(tensors[n]))}
    assert not wrong
