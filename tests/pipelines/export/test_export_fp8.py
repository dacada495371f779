"""Back to FP8: unchanged weights keep their codes and scales byte for byte, changed blocks get new ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import llama_config, llama_expected, llama_tensors
from exports import export_here, read_repository, stock, write_repository
from fp8_samples import E4M3, KINDS, Arrays, cells, quantised
from tensorferry.mappings.words.problems import FerryError, PlanError
from tensorferry.pipelines.cli.main import main


class Model:
    """A Llama whose projections are FP8, and what MaxText holds after converting it to bfloat16."""

    def __init__(self, where: Path, kind: str, dtype: str = "bfloat16") -> None:
        quantisation, self.blocks, suffix, scale_dtype = KINDS[kind]
        self.tensors: Arrays = {}
        self.values: Arrays = {}
        for name, array in llama_tensors().items():
            if not name.endswith("_proj.weight"):
                self.tensors[name] = self.values[name] = array
                continue
            codes, scales, values = quantised(array.astype(np.float32), self.blocks, scale_dtype)
            self.tensors[name] = codes
            self.tensors[name.removesuffix("weight") + suffix] = scales
            self.values[name] = values
        if kind == "tensor":
            for name in list(self.values):
                if name.endswith("_proj.weight"):
                    self.tensors[name.removesuffix("weight") + "input_scale"] = np.array(0.25, np.float32)
        self.suffix = suffix
        self.folder = write_repository(where / "fp8", llama_config(quantization_config=quantisation), self.tensors)
        self.arrays = llama_expected(self.values, dtype=dtype)
        self.where = where

    def export(self, monkeypatch, **options: Any):
        source = stock(self.where / "item", self.arrays)
        options = {"fp8_from": str(self.folder), "chunk_bytes": 600} | options
        return export_here(monkeypatch, source, self.folder, self.where / "out", **options)


def differing(a: Arrays, b: Arrays) -> set[str]:
    assert a.keys() == b.keys()
    assert {n: (t.dtype, t.shape) for n, t in a.items()} == {n: (b[n].dtype, b[n].shape) for n in a}
    return {name for name in a if a[name].tobytes() != b[name].tobytes()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_changed(kind, dtype, tmp_path, monkeypatch):
    """Every byte of every tensor is back, folded query scaling and permuted lanes or not; so is config.json."""
    model = Model(tmp_path, kind, dtype)
    outcome = model.export(monkeypatch)
    assert differing(read_repository(tmp_path / "out"), model.tensors) == set()
    assert len(outcome.changed) == 21
    assert {counts[0] for counts in outcome.changed.values()} == {0}
    assert (tmp_path / "out" / "config.json").read_bytes() == (model.folder / "config.json").read_bytes()


def test_masters_in_float32_of_weights_that_were_bfloat16(tmp_path, monkeypatch):
    model = Model(tmp_path, "block")
    model.arrays = {key: array.astype(np.float32) for key, array in model.arrays.items()}
    outcome = model.export(monkeypatch)
    assert {counts[0] for counts in outcome.changed.values()} == {0}
    assert differing(read_repository(tmp_path / "out"), model.tensors) == set()


@pytest.mark.parametrize("kind", KINDS)
def test_one_changed_element_changes_one_block(kind, tmp_path, monkeypatch, capsys):
    model = Model(tmp_path, kind)
    kernel = model.arrays["params.params.decoder.layers.mlp.wi_1.kernel"]
    kernel[7, 1, 9] = 50.5
    outcome = model.export(monkeypatch)
    found, name = read_repository(tmp_path / "out"), "model.layers.1.mlp.up_proj.weight"
    scale_name = name.removesuffix("weight") + model.suffix
    assert differing(found, model.tensors) == {name, scale_name}
    assert {n for n, counts in outcome.changed.items() if counts[0]} == {name}
    assert outcome.changed[name] == (1, model.tensors[scale_name].size)
    scales = found[scale_name].reshape(-1, 1) if kind == "tensor" else found[scale_name]
    for at, where in cells(found[name].shape, model.blocks):
        inside = where[0].start <= 9 < where[0].stop and where[1].start <= 7 < where[1].stop
        if not inside:
            assert found[name][where].tobytes() == model.tensors[name][where].tobytes()
            continue
        weight = kernel[:, 1].T[where].astype(np.float32)
        ideal = np.float32(50.5) / np.float32(448)
        wanted = np.float32(2.0**-3) if "two" in kind else ideal.astype(scales.dtype).astype(np.float32)
        assert scales[at].astype(np.float32) == wanted
        assert found[name][where].tobytes() == np.clip(weight / wanted, -448, 448).astype(E4M3).tobytes()
    words = ["verify", "--source", str(tmp_path / "item"), "--output", str(tmp_path / "out")]
    assert main(words) == 0
    assert "no difference" in capsys.readouterr().out


def test_verify_finds_a_wrong_code_and_a_wrong_scale(tmp_path, monkeypatch, capsys):
    model = Model(tmp_path, "block")
    outcome = model.export(monkeypatch)
    places = {name: place for shard in outcome.export.plan.shards for name, place in shard.places().items()}
    words = ["verify", "--source", str(tmp_path / "item"), "--output", str(tmp_path / "out")]
    file = tmp_path / "out" / "model.safetensors"
    whole = file.read_bytes()
    for name in ("model.layers.2.mlp.down_proj.weight", "model.layers.2.mlp.down_proj.weight_scale_inv"):
        damaged = bytearray(whole)
        damaged[places[name].offset + 3] ^= 0x40
        file.write_bytes(damaged)
        assert main(words) == 3
        assert "model.layers.2.mlp.down_proj.weight index" in capsys.readouterr().err


def test_a_plain_repository_learns_the_quantisation(tmp_path, monkeypatch):
    model = Model(tmp_path, "block")
    plain = write_repository(tmp_path / "plain", llama_config(), llama_tensors())
    source = stock(tmp_path / "item", model.arrays)
    outcome = export_here(monkeypatch, source, plain, tmp_path / "out", fp8_from=str(model.folder))
    assert "config.json: quantization_config as in --fp8-from" in outcome.export.notes
    assert differing(read_repository(tmp_path / "out"), model.tensors) == set()


def test_without_the_option_the_quantisation_leaves_config(tmp_path, monkeypatch):
    model = Model(tmp_path, "block")
    outcome = model.export(monkeypatch, fp8_from="")
    found = read_repository(tmp_path / "out")
    assert found.keys() == llama_tensors().keys()
    assert {array.dtype.name for array in found.values()} == {"bfloat16"}
    assert "config.json: quantization_config removed, the weights are bfloat16" in outcome.export.notes
    assert b"quantization" not in (tmp_path / "out" / "config.json").read_bytes()


def test_words(tmp_path, monkeypatch):
    model = Model(tmp_path, "block")
    plain = write_repository(tmp_path / "plain", llama_config(), llama_tensors())
    with pytest.raises(PlanError, match=r"expected quantised weights \(--fp8-from\); found none"):
        model.export(monkeypatch, fp8_from=str(plain))


def test_weights_that_are_not_finite(tmp_path, monkeypatch):
    model = Model(tmp_path, "block")
    model.arrays["params.params.decoder.layers.mlp.wi_0.kernel"][3, 2, 5] = np.inf
    with pytest.raises(FerryError, match=r"gate_proj.weight: expected finite weights to requantise"):
        model.export(monkeypatch)
