"""What an export says when it cannot: one sentence each, and nothing written."""

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import llama_config, llama_expected, llama_tensors
from exports import stock, write_repository
from tensorferry.pipelines.cli.main import main

SOURCE = llama_expected(llama_tensors())


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    return write_repository(tmp_path_factory.mktemp("hf"), llama_config(), llama_tensors())


@pytest.fixture(scope="module")
def item(tmp_path_factory) -> Path:
    return stock(tmp_path_factory.mktemp("orbax") / "5" / "items", SOURCE)


@pytest.fixture
def refused(tmp_path, capsys):
    """Runs an export that must be refused, and gives what it said."""

    def run(source: Path, config: Path, code: int, *more: str, output: Path = tmp_path / "out") -> str:
        before = sorted(output.iterdir()) if output.is_dir() else []
        words = ["export", "--source", str(source), "--config", str(config), "--output", str(output), *more]
        assert main(words) == code
        assert (sorted(output.iterdir()) if output.is_dir() else []) == before
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return run


def test_no_checkpoint(refused, repository, tmp_path):
    assert "expected an Orbax checkpoint; found nothing there. Is the path right?" in refused(
        tmp_path / "none", repository, 1
    )
    assert "found a Hugging Face checkpoint" in refused(repository, repository, 1)
    (tmp_path / "empty").mkdir()
    assert "found an empty folder" in refused(tmp_path / "empty", repository, 1)


def test_a_step_that_is_not_there(refused, repository, tmp_path):
    for step in (4, 12):
        stock(tmp_path / "run" / str(step) / "items", SOURCE)
    said = refused(tmp_path / "run", repository, 1, "--step", "7")
    assert "expected a committed step 7 (--step); found committed steps: 12, 4. Name one of those." in said
    said = refused(tmp_path / "run" / "4", repository, 1, "--step", "12")
    assert "expected a folder with step 12 (--step); found step 4." in said


def test_no_parameters(refused, repository, tmp_path):
    source = stock(tmp_path / "item", {"params.params.weird": np.ones(3, np.float32)})
    assert "expected MaxText's parameters at params/params, params, the root, or base; found params/params" in refused(
        source, repository, 2
    )


def test_adapters(refused, repository, tmp_path):
    extra = {"params.params.decoder.layers.mlp.wi_0.kernel_lora_a": np.ones((3, 2), np.float32)}
    said = refused(stock(tmp_path / "item", SOURCE | extra), repository, 2)
    assert "kernel_lora_a: expected a model without LoRA factors; found 1 of them. Merge them" in said


def test_a_wrong_flag(refused, repository, item):
    said = refused(item, repository, 1, "--no-scan-layers")
    assert "--no-scan-layers: expected separate layers (layers_0/…) in the tree; found stacked layers" in said
    assert "Leave the flag out: the tree tells." in said


def test_wrong_metadata(refused, repository, tmp_path):
    source = stock(tmp_path / "7" / "items", SOURCE)
    (tmp_path / "7" / "_CHECKPOINT_METADATA").write_text(json.dumps({"custom_metadata": {"scan_layers": False}}))
    for path in (source, tmp_path / "7", tmp_path):
        said = refused(path, repository, 1)
        assert "custom metadata scan_layers=false: expected separate layers" in said
        assert "--scan-layers goes by the tree" in said


def test_a_config_of_another_size(refused, item, tmp_path):
    other = write_repository(tmp_path / "hf", llama_config(intermediate_size=15))
    said = refused(item, other, 2)
    assert "params-decoder-layers-mlp-wi_0-kernel" in said
    assert "mlp=15" in said
    assert "intermediate_size in config.json" in said
    assert "found [10, 3, 14]" in said


def test_no_config(refused, item, tmp_path):
    (tmp_path / "bare").mkdir()
    said = refused(item, tmp_path / "bare", 2)
    assert "expected a folder with config.json (--config); found none" in said


def test_a_head_that_config_ties(refused, item, tmp_path):
    tied = write_repository(tmp_path / "hf", llama_config(tie_word_embeddings=True))
    said = refused(item, tied, 2)
    assert "params-decoder-logits_dense-kernel" in said
    assert "no rule uses" in said


def test_an_output_with_something_in_it(refused, repository, item, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    said = refused(item, repository, 1, output=tmp_path / "full")
    assert "expected an empty or new directory, or an unfinished export; found mine.txt" in said
    assert "Nothing is ever overwritten" in said


def test_a_missing_chunk(refused, repository, tmp_path):
    from sample_checkpoint import write_checkpoint as write_orbax
    from tensorferry.mappings.plan.array_spec import ArraySpec

    specs = tuple(ArraySpec(tuple(k.split(".")), a.dtype.name, a.shape, a.shape, a.shape) for k, a in SOURCE.items())
    write_orbax(tmp_path / "ck", "zarr3", {k: np.ascontiguousarray(a) for k, a in SOURCE.items()}, specs)
    next((tmp_path / "ck" / "0" / "items").glob("*wi_0*/c/0/0/0")).unlink()
    said = refused(tmp_path / "ck", repository, 2)
    assert "wi_0.kernel" in said
    assert "The save did not finish, or files were lost." in said
