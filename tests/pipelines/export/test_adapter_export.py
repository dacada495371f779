"""Adapters in Orbax checkpoints, whoever wrote them, become folders as PEFT saves them, or are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import llama_config, llama_tensors, qwen3_moe_config, qwen3_moe_tensors
from exports import here, stock, write_repository
from oracle_data import read_safetensors
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.export import export_run as exporting
from tensorferry.pipelines.output.output_dir import OutputDir
from tunix_samples import open_stored, unpack

RANK = 4
PREFIX = "base_model.model.model.layers"


@pytest.fixture(autouse=True)
def without_beam(monkeypatch):
    monkeypatch.setattr(exporting, "run_items", here)


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    return write_repository(tmp_path_factory.mktemp("hf"), llama_config())


def export(source: Path, config: Path, output: Path, *more: str) -> int:
    words = ["export", "--lora", "--source", source, "--config", config, "--output", output, *more]
    return main([*map(str, words)])


def exported(folder: Path) -> dict[str, np.ndarray]:
    return read_safetensors((folder / "adapter_model.safetensors").read_bytes())


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())


def factors(scan: bool = True, layers: tuple[int, ...] = (0, 1, 2)) -> dict[str, np.ndarray]:
    """Factors of two kernels as qwix has them, below ``params.params``."""
    random, found = np.random.default_rng(5), {}
    for name, into, out in (("self_attention.value", 10, 16), ("mlp.wi_0", 10, 14)):
        shapes = {"a": (into, RANK), "b": (RANK, out)}
        for half, (rows, columns) in shapes.items():
            leaf = f"{name}.kernel_lora_{half}.value"
            if scan:
                found[f"params.params.decoder.layers.{leaf}"] = random.normal(size=(rows, 3, columns))
            for layer in () if scan else layers:
                found[f"params.params.decoder.layers_{layer}.{leaf}"] = random.normal(size=(rows, columns))
    return {name: array.astype(np.float32) for name, array in found.items()}


def step_with(folder: Path, arrays: dict[str, np.ndarray], under: str = "", **lora: Any) -> Path:
    """A step whose custom metadata tell of an adapter, as MaxText writes them."""
    stock(folder / "items", arrays, under)
    told = {"custom_metadata": {"scan_layers": True, "lora": lora} if lora else {}}
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(told))
    return folder


def test_an_adapter_that_tunix_saved(tmp_path):
    step = unpack(tmp_path / "tunix") / "lora_qwix" / "checkpoints" / "2"
    config = llama_config(hidden_size=16, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32,
                          num_hidden_layers=2, vocab_size=64)  # fmt: skip
    hf = write_repository(tmp_path / "hf", config)
    assert export(step, hf, tmp_path / "out", "--lora-alpha", "4") == 0
    found = exported(tmp_path / "out")
    stored = {
        f"{name}.{half}": open_stored(step / "model_params", f"decoder.layers.{name}.kernel_lora_{half}.value")
        .read()
        .result()
        for name in ("self_attention.query", "self_attention.value", "mlp.wi_0")
        for half in "ab"
    }
    for layer in range(2):
        own = f"{PREFIX}.{layer}"
        for module, name in (("self_attn.q_proj", "self_attention.query"), ("self_attn.v_proj", "self_attention.value"),
                             ("mlp.gate_proj", "mlp.wi_0")):  # fmt: skip
            a, b = (stored[f"{name}.{half}"][:, layer].T for half in "ab")
            if module.endswith("q_proj"):
                # Lanes of each head go from pairs to halves, and MaxText's 1/sqrt(head_dim) is taken out.
                b = b.reshape(2, 4, 2, -1).transpose(0, 2, 1, 3).reshape(b.shape) * np.sqrt(np.float32(8))
            np.testing.assert_array_equal(found.pop(f"{own}.{module}.lora_A.weight"), a)
            np.testing.assert_allclose(found.pop(f"{own}.{module}.lora_B.weight"), b, rtol=3e-7)
    assert not found
    told = config_of(tmp_path / "out")
    assert (told["r"], told["lora_alpha"]) == (2, 4)
    assert told["target_modules"] == ["gate_proj", "q_proj", "v_proj"]
    assert told["base_model_name_or_path"] == str(hf)


def test_verify(repository, tmp_path, capsys):
    step = step_with(tmp_path / "7", factors(), lora_rank=RANK, lora_alpha=9.0)
    assert export(step, repository, tmp_path / "out") == 0
    words = ["verify", "--source", str(step), "--output", str(tmp_path / "out")]
    assert main(words) == 0
    (tmp_path / "out" / "adapter_config.json").write_text("{}")
    assert main(words) == 3
    assert "adapter_config.json: expected rank, alpha and modules as the plan has them" in capsys.readouterr().err


def test_verify_finds_an_element_that_differs(repository, tmp_path, capsys):
    step = step_with(tmp_path / "7", factors(), lora_rank=RANK, lora_alpha=9.0)
    assert export(step, repository, tmp_path / "out") == 0
    path = tmp_path / "out" / "adapter_model.safetensors"
    octets = bytearray(path.read_bytes())
    octets[-2] ^= 1
    path.write_bytes(octets)
    assert main(["verify", "--source", str(step), "--output", str(tmp_path / "out")]) == 3
    assert "lora_B.weight index" in capsys.readouterr().err


@pytest.mark.parametrize("under", ["", "params/params", "base", "params"])
def test_wherever_the_factors_lie(under, repository, tmp_path):
    step = step_with(tmp_path / "7", factors(), under, lora_rank=RANK, lora_alpha=9.0)
    assert export(step, repository, tmp_path / "out") == 0
    found, stored = exported(tmp_path / "out"), factors()
    assert len(found) == 2 * 2 * 3
    for layer in range(3):
        for half in "ab":
            array = stored[f"params.params.decoder.layers.mlp.wi_0.kernel_lora_{half}.value"]
            ours = found[f"{PREFIX}.{layer}.mlp.gate_proj.lora_{half.upper()}.weight"]
            np.testing.assert_array_equal(ours, array[:, layer].T)
    assert config_of(tmp_path / "out")["lora_alpha"] == 9


def test_weights_beside_them_are_left_out(repository, tmp_path, capsys):
    base = {"params.params.decoder.layers.mlp.wi_0.kernel": np.ones((10, 3, 14), np.float32)}
    step = step_with(tmp_path / "7", factors() | base, lora_rank=RANK, lora_alpha=9.0)
    assert export(step, repository, tmp_path / "out") == 0
    assert "left out: 1 arrays that are no low-rank factors" in capsys.readouterr().out
    assert len(exported(tmp_path / "out")) == 12


def test_some_unrolled_layers_are_named_one_by_one(repository, tmp_path):
    step = step_with(tmp_path / "7", factors(scan=False, layers=(0, 2)))
    assert export(step, repository, tmp_path / "out", "--lora-alpha", "2.5") == 0
    told = config_of(tmp_path / "out")
    assert told["lora_alpha"] == 2.5
    layers = [f"model.layers.{layer}" for layer in (0, 2)]
    assert told["target_modules"] == [f"{one}.{m}" for one in layers for m in ("mlp.gate_proj", "self_attn.v_proj")]
    assert {name.split(".")[4] for name in exported(tmp_path / "out")} == {"0", "2"}


def test_modules_of_an_old_multimodal_checkpoint_are_called_as_transformers_does(tmp_path):
    text = {"hidden_size": 10, "intermediate_size": 14, "num_hidden_layers": 6, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 37, "model_type": "gemma3_text"}  # fmt: skip
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    hf = write_repository(tmp_path / "hf", config)
    factor = {f"params.params.decoder.layers.layers_5.mlp.wi_0.kernel_lora_{half}.value": np.ones(shape, np.float32)
              for half, shape in (("a", (10, 1, 2)), ("b", (2, 1, 14)))}  # fmt: skip
    step = step_with(tmp_path / "7", factor)
    assert export(step, hf, tmp_path / "out", "--lora-alpha", "2") == 2
    names = ["language_model.model.embed_tokens.weight", "vision_tower.layers.5.mlp.gate_proj.weight"]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    assert export(step, hf, tmp_path / "out", "--lora-alpha", "2") == 0
    name = "model.language_model.layers.5.mlp.gate_proj"
    assert sorted(exported(tmp_path / "out")) == [f"base_model.model.{name}.lora_{half}.weight" for half in "AB"]
    assert config_of(tmp_path / "out")["target_modules"] == [name]


class Killed(BaseException):
    """Stands for a process that is no more."""


def test_killed_at_every_step_of_the_commit(repository, tmp_path, monkeypatch):
    step = step_with(tmp_path / "7", factors(), lora_rank=RANK, lora_alpha=9.0)
    every: list[str] = []
    monkeypatch.setattr(OutputDir, "_step", lambda self, name: every.append(name))
    assert export(step, repository, tmp_path / "whole") == 0
    publishing = [name for name in every if name.startswith("publish")]
    assert publishing[-1] == "publish adapter_model.safetensors"
    for number, stop in enumerate(every):

        def at(self, name, stop=stop):
            if name == stop:
                raise Killed

        out = tmp_path / f"out{number}"
        monkeypatch.setattr(OutputDir, "_step", at)
        with pytest.raises(Killed):
            export(step, repository, out)
        monkeypatch.setattr(OutputDir, "_step", lambda self, name: None)
        assert export(step, repository, out) == 0
        assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in (tmp_path / "whole").iterdir()), stop
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), stop


def test_plan_only(repository, tmp_path, capsys):
    step = step_with(tmp_path / "7", factors(), lora_rank=RANK, lora_alpha=9.0)
    assert export(step, repository, tmp_path / "out", "--plan-only") == 0
    said = capsys.readouterr().out
    assert "adapter_model.safetensors: 12 tensors" in said
    assert "lora_rank layer (kv_heads head_dim) -> (kv_heads head_dim) lora_rank" in said
    assert not (tmp_path / "out").exists()


@pytest.fixture
def refused(repository, tmp_path, capsys):
    """Runs an export that must be refused, and gives what it said."""

    def run(source: Path, *more: str, code: int = 2, config: Path = repository) -> str:
        assert export(source, config, tmp_path / "out", *more) == code
        assert not (tmp_path / "out").exists()
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return run


def test_no_alpha_on_record(refused, tmp_path):
    said = refused(step_with(tmp_path / "7", factors()))
    assert "--lora-alpha: expected the adapter's alpha (its rank, 4, is known from shapes)" in said
    assert "found none on record in the checkpoint. Give the lora_alpha that the adapter was trained with" in said


def test_another_alpha_on_record(refused, tmp_path):
    said = refused(step_with(tmp_path / "7", factors(), lora_rank=RANK, lora_alpha=9.0), "--lora-alpha", "8")
    assert "--lora-alpha: expected 9, which is on record in the step's metadata; found 8. Leave the option out." in said


def test_another_rank_on_record(refused, tmp_path):
    said = refused(step_with(tmp_path / "7", factors(), lora_rank=8, lora_alpha=9.0))
    assert "custom metadata lora_rank: expected 4, the rank of the factors; found 8." in said


def test_no_factors(refused, tmp_path):
    weights = {"params.params.decoder.layers.mlp.wi_0.kernel": np.ones((10, 3, 14), np.float32)}
    said = refused(step_with(tmp_path / "7", weights), "--lora-alpha", "8")
    assert "expected low-rank factors (…/kernel_lora_a, …/kernel_lora_b); found 1 arrays, none of them" in said


def test_half_a_pair(refused, tmp_path):
    whole = factors()
    del whole["params.params.decoder.layers.mlp.wi_0.kernel_lora_b.value"]
    said = refused(step_with(tmp_path / "7", whole), "--lora-alpha", "8")
    assert "wi_0-kernel_lora_a: expected its other half params-decoder-layers-mlp-wi_0-kernel_lora_b beside it" in said


def test_several_ranks(refused, tmp_path):
    odd = {
        "params.params.decoder.layers.mlp.wo.kernel_lora_a.value": np.ones((14, 3, 2), np.float32),
        "params.params.decoder.layers.mlp.wo.kernel_lora_b.value": np.ones((2, 3, 10), np.float32),
    }
    said = refused(step_with(tmp_path / "7", factors() | odd), "--lora-alpha", "8")
    assert "mlp-wo-kernel_lora_a: expected rank 4, as most factors have; found 2." in said


def test_a_model_of_another_kind(refused, tmp_path):
    strange = {name.replace("mlp.wi_0", "mlp.wi_9"): array for name, array in factors().items()}
    said = refused(step_with(tmp_path / "7", strange), "--lora-alpha", "8")
    assert "mlp-wi_9-kernel_lora_a: expected factors of a kernel that a llama model of config.json's sizes has" in said


def test_a_model_of_another_size(refused, tmp_path):
    other = write_repository(tmp_path / "wide", llama_config(intermediate_size=15))
    said = refused(step_with(tmp_path / "7", factors()), "--lora-alpha", "8", config=other)
    assert "mlp-wi_0-kernel_lora_b" in said
    assert "mlp=15" in said


def test_factors_of_experts(refused, tmp_path):
    other = write_repository(tmp_path / "moe", qwen3_moe_config(), qwen3_moe_tensors())
    experts = {
        "params.params.decoder.layers.moe_block.wi_0_lora_a.value": np.ones((4, 3, 10, RANK), np.float32),
        "params.params.decoder.layers.moe_block.wi_0_lora_b.value": np.ones((RANK, 3, 5), np.float32),
    }
    said = refused(step_with(tmp_path / "7", experts), "--lora-alpha", "8", config=other)
    assert "model.layers.0.mlp.experts.0.gate_proj: expected a module of which MaxText's model can hold" in said


def test_options_that_do_not_go_together(refused, tmp_path):
    step = step_with(tmp_path / "7", factors())
    said = refused(step, "--fp8-from", str(tmp_path))
    assert "--fp8-from: expected an export of weights; found --lora: an adapter has no FP8 weights." in said


def test_an_alpha_without_an_adapter(repository, tmp_path, capsys):
    words = ["export", "--source", str(tmp_path), "--config", str(repository), "--output", str(tmp_path / "out")]
    assert main([*words, "--lora-alpha", "4"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "--lora-alpha: expected --lora beside it: without, weights are exported and no adapter; found it alone" in said
    )


def test_a_bucket_is_no_place_for_it(repository, tmp_path, capsys):
    step = step_with(tmp_path / "7", factors())
    words = ["export", "--lora", "--source", step, "--config", repository, "--output", "gs://bucket/adapter",
             "--lora-alpha", "8"]  # fmt: skip
    assert main([*map(str, words)]) == 2
    assert "--output: expected a local directory for an adapter; found gs://bucket/adapter" in capsys.readouterr().err


def test_without_lora_an_adapter_is_told_of(tmp_path, capsys):
    hf = write_repository(tmp_path / "hf", llama_config(), llama_tensors())
    step = step_with(tmp_path / "7", factors())
    assert main(["export", "--source", str(step), "--config", str(hf), "--output", str(tmp_path / "out")]) == 2
    assert "or export them alone, as an adapter, with --lora" in capsys.readouterr().err
