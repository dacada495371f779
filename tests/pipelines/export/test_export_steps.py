"""A folder of steps: the latest committed one is exported, or the one that is named; and it stays that one."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import llama_config, llama_expected, llama_tensors
from exports import export_here, read_repository, stock, write_repository
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.export.export_planning import ExportOptions, plan_export
from tensorferry.pipelines.export.export_source import open_export_source

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    return write_repository(tmp_path_factory.mktemp("hf"), llama_config(), llama_tensors())


@pytest.fixture
def steps(tmp_path) -> Path:
    """Steps 4, 12 and 100, told apart by the final norm; 200 was being written when the run was stopped."""
    for step in (4, 12, 100):
        tensors = llama_tensors() | {NORM: np.full(10, step, ml_dtypes.bfloat16)}
        stock(tmp_path / "run" / str(step) / "items", llama_expected(tensors))
    (tmp_path / "run" / "200.orbax-checkpoint-tmp" / "items").mkdir(parents=True)
    (tmp_path / "run" / "200" / "items").mkdir(parents=True)
    return tmp_path / "run"


def exported_step(folder: Path) -> float:
    return float(read_repository(folder)[NORM][0])


def test_the_latest_committed_step(steps, repository, tmp_path, monkeypatch):
    outcome = export_here(monkeypatch, steps, repository, tmp_path / "out")
    assert exported_step(tmp_path / "out") == 100
    assert "step 100 of 4 steps" in outcome.export.notes
    assert "not committed, or without weights, and passed over: step 200" in outcome.export.notes
    manifest = json.loads((tmp_path / "out" / "tensorferry.manifest.json").read_text())
    assert manifest["options"]["step"] == 100


def test_numbers_count_not_letters(steps, repository, tmp_path, capsys):
    (steps / "200" / "items").rmdir()
    (steps / "200").rmdir()
    assert main(["plan", "--source", str(steps), "--config", str(repository)]) == 0
    assert "step 100 of 3 steps, the latest\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("below", "options", "step"), [("", {"step": 12}, 12), ("4", {}, 4), ("4/items", {}, 4), ("12", {"step": 12}, 12)]
)
def test_a_step_that_is_named(below, options, step, steps, repository, tmp_path, monkeypatch):
    outcome = export_here(monkeypatch, steps / below, repository, tmp_path / "out", **options)
    assert exported_step(tmp_path / "out") == step
    assert not any("latest" in note or "passed over" in note for note in outcome.export.notes)


def test_a_newer_step_does_not_change_what_was_exported(steps, repository, tmp_path, monkeypatch, capsys):
    export_here(monkeypatch, steps, repository, tmp_path / "out")
    stock(steps / "300" / "items", llama_expected(llama_tensors()))
    assert plan_export(ExportOptions(str(steps), str(repository))).source.step == 300
    assert main(["verify", "--source", str(steps), "--output", str(tmp_path / "out")]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["verify", "--source", str(steps / "100" / "items"), "--output", str(tmp_path / "out")]) == 0


def test_in_a_bucket_the_commit_file_counts(steps, monkeypatch):
    from tensorferry.pipelines.storage.tree_store import LocalTree

    monkeypatch.setattr(LocalTree, "needs_commit_file", property(lambda tree: True))
    for step in (4, 12):
        (steps / str(step) / "commit_success.txt").write_text("done")
    source = open_export_source(str(steps))
    assert (source.step, source.item.path) == (12, f"{steps}/12/items")
