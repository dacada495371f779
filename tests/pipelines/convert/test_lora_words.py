"""What goes wrong with --lora is a sentence, all of it at once; another adapter is another run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import PREFIX, adapter_config, factors, write_adapter
from checkpoints import Sizes, llama_config, llama_tensors, qwen3_moe_config, qwen3_moe_tensors, write_checkpoint
from exports import here
from tensorferry.mappings.plan.conversion_plan import PlanOptions
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.convert import conversion as converting
from tensorferry.pipelines.convert.conversion_planning import ConversionOptions, plan_conversion
from tensorferry.pipelines.convert.lora_merge import open_merge
from tensorferry.pipelines.verify import verify_conversion as verifying

from demo.quantise import per_block

SIZES = Sizes()
RANK = 3
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"
Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def without_beam(monkeypatch):
    monkeypatch.setattr(converting, "run_items", here)
    monkeypatch.setattr(verifying, "run_items", here)


@pytest.fixture
def source(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "hf", llama_config(SIZES), llama_tensors(SIZES))


def adapter(folder: Path, tensors: Arrays, rank: int = RANK, **config: Any) -> Path:
    modules = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors}
    return write_adapter(folder, adapter_config(modules, rank, 6, **config), tensors)


def good(*modules: str, seed: int = 7, rank: int = RANK) -> Arrays:
    return factors(llama_tensors(SIZES), modules or (Q, DOWN), rank, seed)


def words(capsys, *args: str | Path) -> tuple[int, str]:
    """Exit code, and what standard error says in one line."""
    capsys.readouterr()
    code = main([str(arg) for arg in args])
    return code, " ".join(capsys.readouterr().err.split())


def refused(capsys, source: Path, lora: Path, *args: str) -> str:
    code, said = words(capsys, "convert", "--source", source, "--lora", lora, "--output", lora.parent / "out", *args)
    assert code == 2, said
    assert "Traceback" not in said
    assert not (lora.parent / "out").exists()
    return said


def test_every_misfit_is_told_at_once(source, tmp_path, capsys):
    tensors = good()
    tensors[f"{PREFIX}{Q}.lora_A.weight"] = np.zeros((RANK, 11), np.float32)
    tensors |= {name.replace("layers.0", "layers.9"): one for name, one in good(Q).items()}
    tensors[f"{PREFIX}model.layers.0.self_attn.k_proj.bias"] = np.zeros(16, np.float32)
    tensors[f"{PREFIX}model.embed_tokens.weight"] = np.zeros((38, 10), np.float32)
    said = refused(capsys, source, adapter(tmp_path / "a", tensors, target_modules=["q_proj", "down_proj", "v_proj"]))
    file = "(in adapter_model.safetensors)"
    for sentence in (
        "The plan does not add up: 5 problems.",
        f"{PREFIX}{Q}.lora_A.weight {file}: expected factors of a weight [48, 10]; found A [3, 11] and B [48, 3], "
        "those of one [48, 11]. Is --source the base model of this adapter?",
        f"{PREFIX}model.layers.9.self_attn.q_proj.lora_A.weight {file}: expected "
        "model.layers.9.self_attn.q_proj.weight in the checkpoint; found no tensor of this name. "
        "Is --source the base model of this adapter?",
        f"{PREFIX}model.layers.0.self_attn.k_proj.bias {file}: expected model.layers.0.self_attn.k_proj.bias in the "
        "checkpoint; found no tensor of this name.",
        f"{PREFIX}model.embed_tokens.weight {file}: expected [37, 10], the shape of model.embed_tokens.weight; found "
        "[38, 10]. Convert what PEFT saves merged: its config.json has the new vocabulary.",
        "target_modules: v_proj (in adapter_config.json): expected factors of at least one such module; found none. Is "
        "the adapter complete?",
    ):
        assert sentence in said


def test_folders_that_are_no_adapter(source, tmp_path, capsys):
    folder = tmp_path / "a"
    assert "expected a checkpoint's folder; found no such path" in refused(capsys, source, folder)
    folder.mkdir()
    said = refused(capsys, source, folder)
    assert f"{folder}: expected a PEFT adapter's folder, with adapter_config.json; found no such file." in said
    assert "with adapter_model.safetensors; found no such file. Give the folder that PEFT saved." in said
    (folder / "adapter_model.bin").write_bytes(b"x")
    assert "found adapter_model.bin alone. Save the adapter with safe_serialization=True." in (
        refused(capsys, source, folder)
    )
    adapter(folder, good())
    (folder / "adapter_config.json").write_text("{")
    assert "expected the config as JSON; found text that is not JSON" in refused(capsys, source, folder)


def test_a_head_or_an_embedding_that_is_tied(tmp_path, capsys):
    weights = llama_tensors(SIZES, head=False)
    source = write_checkpoint(tmp_path / "hf", llama_config(SIZES, tie_word_embeddings=True), weights)
    said = refused(capsys, source, adapter(tmp_path / "a", good("lm_head")))
    assert "expected an output head in the checkpoint; found none: it is tied to the embedding." in said
    stem = f"{PREFIX}model.embed_tokens"
    a, b = np.ones((RANK, SIZES.vocab), np.float32), np.ones((SIZES.embed, RANK), np.float32)
    lora = adapter(tmp_path / "b", {f"{stem}.lora_embedding_A": a, f"{stem}.lora_embedding_B": b})
    said = refused(capsys, source, lora)
    assert "expected model.embed_tokens.weight without a tie, so that the adapter changes it alone; found one" in said
    assert "found one that is lm_head.weight too. Merge with PEFT, which asks what is meant" in said


def test_fp8_codes_cannot_stay_as_they_are(tmp_path, capsys):
    tensors: Arrays = {}
    for name, weight in llama_tensors(SIZES).items():
        whole = weight.astype(np.float32)
        tensors |= per_block(name, whole, 4) if name.endswith("_proj.weight") else {name: weight}
    quant = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [4, 4]}
    source = write_checkpoint(tmp_path / "hf", llama_config(SIZES, quantization_config=quant), tensors)
    said = refused(capsys, source, adapter(tmp_path / "a", good()), "--dtype", "source")
    assert "The plan does not add up: 2 problems." in said
    assert (
        f"{Q}.weight (in adapter:adapter_model.safetensors): expected a weight that stays as it is, which --dtype "
        "source can carry; found one that an adapter is merged into: its codes would have to be made anew. Use --dtype"
    ) in said


def test_experts_whose_shapes_do_not_tell_which_is_which(tmp_path, capsys):
    sizes = Sizes(expert_mlp=5, embed=10)
    source = write_checkpoint(tmp_path / "hf", qwen3_moe_config(sizes), qwen3_moe_tensors(sizes))
    stem = f"{PREFIX}model.layers.0.mlp.experts"
    square = {f"{stem}.lora_A.weight": np.ones((8, 10)), f"{stem}.lora_B.weight": np.ones((10, 8))}
    how = {"target_parameters": ["mlp.experts.gate_up_proj"], "target_modules": []}
    lora = adapter(tmp_path / "a", {n: one.astype(np.float32) for n, one in square.items()}, 2, **how)
    said = refused(capsys, source, lora)
    assert "expected factors of (model.layers.0.mlp.experts.gate_up_proj [4, 10, 10]), one pair for each" in said
    assert "found [8, 10], [10, 8], which fit in 2 ways. Merge with PEFT" in said
    lora = adapter(tmp_path / "b", {n: one.astype(np.float32) for n, one in square.items()}, 3, **how)
    assert "found [8, 10], [10, 8], which do not fit. Is --source the base model" in refused(capsys, source, lora)


def test_one_adapter_at_a_time(source, tmp_path, capsys):
    tensors = good(Q)
    tensors |= {name.replace("model.layers", "layers"): one for name, one in good(Q, seed=1).items()}
    said = refused(capsys, source, adapter(tmp_path / "a", tensors))
    other = f"{PREFIX}{Q}.lora_A.weight".replace("model.layers", "layers")
    assert f"expected the one pair for {Q}.weight; found another one, {other}. Save one adapter alone." in said
    with pytest.raises(SystemExit) as end:
        main(["convert", "--source", "a", "--lora", "b", "--lora-only", "c", "--output", "d"])
    assert end.value.code == 2


@pytest.mark.parametrize("words", [("convert", "--lora"), ("plan", "--lora-only"), ("verify", "--lora")], ids=" ".join)
def test_an_empty_path_is_no_conversion_without_an_adapter(words, capsys):
    command, option = words
    with pytest.raises(SystemExit) as end:
        main([command, "--source", "a", option, "", *(["--output", "b"] if command != "plan" else [])])
    assert end.value.code == 2
    assert f"argument {option}: expected a path; found an empty one: is a variable not set?" in capsys.readouterr().err


def test_factors_that_are_no_numbers_stop_the_run(source, tmp_path, capsys):
    tensors = good()
    tensors[f"{PREFIX}{DOWN}.lora_B.weight"][1, 2] = np.nan
    lora = adapter(tmp_path / "a", tensors)
    code, said = words(capsys, "convert", "--source", source, "--lora", lora, "--output", tmp_path / "out")
    assert code == 1
    assert f"{PREFIX}{DOWN}.lora_B.weight (in adapter:adapter_model.safetensors): expected finite numbers; " in said
    assert "found 1 of 30 NaN or infinite. The adapter is damaged" in said


def test_another_adapter_is_another_run(source, tmp_path, capsys, monkeypatch):
    """Steps of one training have the same headers and the same config; their factors differ."""
    first, second = adapter(tmp_path / "a", good()), adapter(tmp_path / "b", good(seed=8))

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    def run(lora: Path) -> tuple[int, str]:
        return words(capsys, "convert", "--source", source, "--lora", lora, "--output", tmp_path / "out")

    with monkeypatch.context() as patch:
        patch.setattr(converting, "run_items", killed)
        assert "Run the same command again to resume." in run(first)[1]
    code, said = run(second)
    assert code == 1
    assert "expected an unfinished run of this plan (digest " in said
    assert "found one of another plan (digest " in said
    shutil.copytree(first, tmp_path / "copy")
    assert run(tmp_path / "copy")[0] == 0


def test_an_adapter_that_changes_meanwhile(source, tmp_path, capsys, monkeypatch):
    lora = adapter(tmp_path / "a", good())

    def rewritten(*args: Any) -> Any:
        done = here(*args)
        adapter(tmp_path / "a", good(seed=9))
        return done

    monkeypatch.setattr(converting, "run_items", rewritten)
    code, said = words(capsys, "convert", "--source", source, "--lora", lora, "--output", tmp_path / "out")
    assert code == 1
    assert "expected the adapter as it was planned (" in said
    assert "convert again from an adapter at rest." in said


def test_verify_knows_the_adapter(source, tmp_path, capsys):
    lora = adapter(tmp_path / "a", good())
    assert main(["convert", "--source", str(source), "--lora", str(lora), "--output", str(tmp_path / "out")]) == 0
    lora.rename(tmp_path / "moved")
    check = ("verify", "--source", source, "--output", tmp_path / "out")
    code, said = words(capsys, *check)
    assert (code, f"{lora}: expected a checkpoint's folder; found no such path." in said) == (1, True)
    assert words(capsys, *check, "--lora", tmp_path / "moved") == (0, "")
    code, said = words(capsys, *check, "--lora", adapter(tmp_path / "b", good(seed=8)))
    assert code == 3
    assert "not the adapter that was merged" in said
    assert main(["convert", "--source", str(source), "--output", str(tmp_path / "bare")]) == 0
    code, said = words(
        capsys, "verify", "--source", source, "--output", tmp_path / "bare", "--lora", tmp_path / "moved"
    )
    assert (code, "expected a checkpoint with an adapter merged; found one without." in said) == (1, True)


def test_verify_sees_a_changed_element(source, tmp_path, capsys):
    lora = adapter(tmp_path / "a", good())
    small = ("--chunk-bytes", "160", "--dtype", "float32", "--no-scan-layers")
    args = ("convert", "--source", source, "--lora", lora, "--output", tmp_path / "out")
    assert words(capsys, *args, *small)[0] == 0
    chunks = tmp_path / "out" / "0" / "items"
    key = "params.params.decoder.layers_2.mlp.wo.kernel"
    chunk = next(path for path in sorted((chunks / key).rglob("*")) if path.is_file() and "zarr" not in path.name)
    data = bytearray(chunk.read_bytes())
    data[1] ^= 1
    chunk.write_bytes(data)
    assert words(capsys, "verify", "--source", source, "--output", tmp_path / "out")[0] == 3


def test_the_plan_tells_of_it(source, tmp_path, capsys):
    lora = adapter(tmp_path / "a", good(), rank_pattern={"nothing": 9})
    assert main(["plan", "--source", str(source), "--lora", str(lora)]) == 0
    said = capsys.readouterr().out
    assert f"{lora}: 2 weights get an adapter of rank 3 x 2" in said
    assert "    merge 1 x lora r=3 x 2\n" in said


def test_weights_that_the_adapter_should_have_but_lacks_are_told(source, tmp_path, capsys):
    lora = adapter(tmp_path / "a", good())
    others = "without factors, though target_modules names them: 4 weights, such as model.layers.1.self_attn.q_proj"
    for command, *output in (["plan"], ["convert", "--output", str(tmp_path / "out")]):
        assert main([command, "--source", str(source), "--lora", str(lora), *output]) == 0
        said = capsys.readouterr().out
        assert f"{lora}: 2 weights get an adapter of rank 3 x 2\n" in said
        assert f"{others}.weight\n" in said
    some = adapter(tmp_path / "b", good(), layers_to_transform=[0])
    assert main(["plan", "--source", str(source), "--lora", str(some)]) == 0
    assert "though target_modules" not in capsys.readouterr().out


def test_parts_of_weights_that_are_left_out_are_listed(source, tmp_path):
    conversion = plan_conversion(ConversionOptions(str(source)))
    merge = open_merge(str(adapter(tmp_path / "a", good())), conversion.plan.tensors)
    ignored = replace(conversion.plan.account, ignored={f"{Q}.weight": "a tower"})
    plan = merge.checked(replace(conversion.plan, account=ignored))
    assert plan.account.ignored == {
        f"{Q}.weight": "a tower",
        f"{PREFIX}{Q}.lora_A.weight": "part of an adapter: a tower",
        f"{PREFIX}{Q}.lora_B.weight": "part of an adapter: a tower",
    }


def test_memory_counts_the_factors(source, tmp_path):
    """A and B as they are read, two limbs of float64 each, and scratch for their product."""
    rank = 200
    lora = adapter(tmp_path / "a", good(Q, rank=rank), rank)
    target = PlanOptions(scan_layers=False, chunk_bytes=1 << 20)
    options = ConversionOptions(str(source), target=target)
    merged = plan_conversion(replace(options, lora=str(lora))).plan
    item = next(item for item in merged.items() for read in item.reads if read.tensor.name == f"{Q}.weight")
    assert item.factor_bytes == rank * (48 + 10) * (4 + 17) + 40 * 48 * 10
    bare = next(one for one in plan_conversion(options).plan.items() if one.id == item.id)
    assert item.read_bytes == bare.read_bytes + rank * (48 + 10) * 4
    assert item.held_bytes >= bare.held_bytes + item.factor_bytes
    small = replace(options, lora=str(lora), target=replace(target, worker_memory_bytes=150_000))
    (problem,) = plan_conversion(small).plan.problems
    assert "--worker-memory-bytes" in str(problem)


def test_names_of_another_release(tmp_path, capsys):
    """An adapter of the text model alone, for a checkpoint that spells the way to it longer."""
    lora = adapter(tmp_path / "a", {**good(), **good("lm_head")})
    longer = {name.replace("model.", "model.language_model.", 1): one for name, one in llama_tensors(SIZES).items()}
    source = write_checkpoint(tmp_path / "hf", llama_config(SIZES), longer)
    tensors = plan_tensors(source)
    merge = open_merge(str(lora), tensors)
    assert sorted(merge.merged.scales) == sorted(
        [f"{Q}.weight".replace("model.", "model.language_model.", 1), "lm_head.weight",
         f"{DOWN}.weight".replace("model.", "model.language_model.", 1)]
    )  # fmt: skip
    assert "is model.language_model.layers." in merge.notes()[1]


def plan_tensors(source: Path):
    from tensorferry.pipelines.huggingface.checkpoint import open_checkpoint
    from tensorferry.pipelines.huggingface.low_bit_tensors import understand

    return understand(open_checkpoint(str(source))).logical


def test_the_manifest_keeps_the_adapters_config(source, tmp_path):
    lora = adapter(tmp_path / "a", good(), use_rslora=True)
    assert main(["convert", "--source", str(source), "--lora", str(lora), "--output", str(tmp_path / "out")]) == 0
    manifest = json.loads((tmp_path / "out" / "0" / "items" / "tensorferry.manifest.json").read_text())
    told = manifest["adapter"]
    assert told["config"] == json.loads((lora / "adapter_config.json").read_text())
    assert told["modules"][f"{Q}.weight"] == {"rank": 3, "scale": 6 / 3**0.5}
    assert manifest["options"]["lora"] == str(lora)
    assert len(told["digest"]) == 64
