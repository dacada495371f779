"""Conversions from end to end, in this process: what stock Orbax restores against formulas in plain numpy."""

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    Sizes,
    interleave,
    llama_config,
    llama_expected,
    llama_tensors,
    qwen3_moe_config,
    qwen3_moe_expected,
    qwen3_moe_tensors,
    write_checkpoint,
)
from stock_orbax import assert_restores, custom_metadata, restore
from tensorferry.pipelines.cli.main import main

# Every array that can be cut is cut: into chunks of at most 160 bytes.
SMALL_CHUNKS = ("--chunk-bytes", "160")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), llama_config(), llama_tensors())


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen"), qwen3_moe_config(), qwen3_moe_tensors())


def convert(source: Path, output: Path, *args: str) -> int:
    return main(["convert", "--source", str(source), "--output", str(output), *args])


def manifest_of(output: Path) -> dict:
    return json.loads((output / "0" / "items" / "tensorferry.manifest.json").read_text())


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("store_format", ["zarr3", "ocdbt", "zarr2"])
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
def test_llama_restores_in_stock_orbax(scan, store_format, llama, tmp_path):
    mode = "--scan-layers" if scan else "--no-scan-layers"
    assert convert(llama, tmp_path, mode, "--format", store_format, *SMALL_CHUNKS) == 0
    assert_restores(tmp_path, llama_expected(llama_tensors(), scan=scan))
    assert custom_metadata(tmp_path) == {"scan_layers": scan}
    chunks = [len(array["chunk_digests"]) for array in manifest_of(tmp_path)["arrays"].values()]
    assert max(chunks) > 3, "the test should meet arrays of many chunks"


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_qwen3_moe_restores_in_stock_orbax(scan, fused, tmp_path):
    tensors = qwen3_moe_tensors(fused=fused)
    source = write_checkpoint(tmp_path / "hf", qwen3_moe_config(), tensors)
    mode = "--scan-layers" if scan else "--no-scan-layers"
    assert convert(source, tmp_path / "out", mode, *SMALL_CHUNKS) == 0
    assert_restores(tmp_path / "out", qwen3_moe_expected(tensors, scan=scan, fused=fused))


def test_float32_from_bfloat16_scales_without_rounding(llama, tmp_path):
    assert convert(llama, tmp_path, "--dtype", "float32") == 0
    assert_restores(tmp_path, llama_expected(llama_tensors(), dtype="float32"))


def test_float32_weights_are_rounded_once(tmp_path):
    tensors = llama_tensors(dtype="float32")
    source = write_checkpoint(tmp_path / "hf", llama_config(), tensors, shards=1)
    assert convert(source, tmp_path / "out") == 0
    assert_restores(tmp_path / "out", llama_expected(tensors))


def test_dtype_source_keeps_what_each_tensor_has(tmp_path):
    tensors = llama_tensors()
    float32 = llama_tensors(dtype="float32", seed=7)
    mixed = {name: float32[name] if "norm" in name else tensor for name, tensor in tensors.items()}
    source = write_checkpoint(tmp_path / "hf", llama_config(), mixed)
    assert convert(source, tmp_path / "out", "--dtype", "source") == 0
    expected = llama_expected(tensors)
    for key, array in llama_expected(float32, dtype="float32").items():
        if "norm" in key:
            expected[key] = array
    assert_restores(tmp_path / "out", expected)


def test_rope_lanes_follow_the_option(llama, tmp_path):
    assert convert(llama, tmp_path, "--rope-lanes", "split") == 0
    assert_restores(tmp_path, llama_expected(llama_tensors(), interleaved=False))
    assert 'rope_type: "default"' in (tmp_path / "maxtext.yml").read_text()


def test_interleaving_of_the_oracle_is_not_its_own_inverse():
    lanes = np.arange(8)
    assert (interleave(interleave(lanes)) != lanes).any()


def test_vocabulary_is_padded_with_zero_rows(llama, tmp_path):
    assert convert(llama, tmp_path, "--vocab-size", "41", *SMALL_CHUNKS) == 0
    assert_restores(tmp_path, llama_expected(llama_tensors(), vocab=41))
    assert "vocab_size: 41" in (tmp_path / "maxtext.yml").read_text()


def test_vocabulary_does_not_shrink(llama, tmp_path, capsys):
    assert convert(llama, tmp_path / "out", "--vocab-size", "36") == 2
    told = capsys.readouterr().err
    assert "--vocab-size: expected at least 37, the vocab_size of config.json" in told
    assert "found 36" in told
    assert not (tmp_path / "out").exists()


# The output head: stored, tied, or both.


def head_source(folder: Path, tied: bool, head: np.ndarray | None, metadata: dict | None = None) -> Path:
    tensors = llama_tensors(head=False)
    if head is not None:
        tensors["lm_head.weight"] = head
    return write_checkpoint(folder, llama_config(tie_word_embeddings=tied), tensors, metadata=metadata)


def stored_head() -> np.ndarray:
    return llama_tensors()["lm_head.weight"]


def embedding() -> np.ndarray:
    return llama_tensors(head=False)["model.embed_tokens.weight"]


def expected_head(head: np.ndarray | None) -> dict[str, np.ndarray]:
    tensors = llama_tensors(head=False)
    if head is None:
        return llama_expected(tensors, tied=True)
    return llama_expected(tensors | {"lm_head.weight": head})


def test_a_tied_head_has_no_array(tmp_path):
    source = head_source(tmp_path / "hf", tied=True, head=None)
    assert convert(source, tmp_path / "out") == 0
    assert_restores(tmp_path / "out", expected_head(None))
    assert "logits_via_embedding: true" in (tmp_path / "out" / "maxtext.yml").read_text()


def test_a_head_that_config_ties_and_that_is_the_embedding_is_left_out(tmp_path):
    source = head_source(tmp_path / "hf", tied=True, head=embedding())
    assert convert(source, tmp_path / "out") == 0
    assert_restores(tmp_path / "out", expected_head(None))
    assert "lm_head.weight" in manifest_of(tmp_path / "out")["left_out"]


def test_a_head_that_config_ties_but_differs_is_a_conflict_and_nothing_is_written(tmp_path, capsys):
    source = head_source(tmp_path / "hf", tied=True, head=stored_head())
    assert convert(source, tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert (
        "lm_head.weight (in model-00003-of-00003.safetensors): expected the same bytes as model.embed_tokens.weight: "
        "config.json says tie_word_embeddings=true; found other bytes. "
        "Choose with --lm-head stored (keep it, untied) or --lm-head tied (leave it out)." in told
    ), told
    assert "Nothing was written." in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("choice", "kept"), [("stored", True), ("tied", False)])
def test_the_conflict_is_the_user_s_to_decide(choice, kept, tmp_path):
    source = head_source(tmp_path / "hf", tied=True, head=stored_head())
    assert convert(source, tmp_path / "out", "--lm-head", choice) == 0
    assert_restores(tmp_path / "out", expected_head(stored_head() if kept else None))
    settings = (tmp_path / "out" / "maxtext.yml").read_text()
    assert f"logits_via_embedding: {'false' if kept else 'true'}" in settings


def test_a_head_stored_under_the_embedding_s_name_is_tied_whatever_config_says(tmp_path):
    source = head_source(
        tmp_path / "hf", tied=False, head=None, metadata={"lm_head.weight": "model.embed_tokens.weight"}
    )
    assert convert(source, tmp_path / "out") == 0
    assert_restores(tmp_path / "out", expected_head(None))


def test_an_untied_head_that_is_missing_is_a_problem(tmp_path, capsys):
    source = head_source(tmp_path / "hf", tied=False, head=None)
    assert convert(source, tmp_path / "out") == 2
    assert "lm_head.weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# The same bytes, however they are run.


def test_every_way_to_run_gives_the_same_bytes(tmp_path, capfd):
    sizes = Sizes(vocab=120_011)
    source = write_checkpoint(tmp_path / "hf", qwen3_moe_config(sizes), qwen3_moe_tensors(sizes))
    args = ("--chunk-bytes", "200KiB")
    ways = {
        "default": (),
        "one": ("--direct_running_mode=in_memory",),
        "threads": ("--direct_running_mode=multi_threading", "--direct_num_workers=3"),
        "processes": ("--direct_running_mode=multi_processing", "--direct_num_workers=2"),
        "repeated": ("--direct_runner_bundle_repeat=2",),
    }
    found = {}
    for name, way in ways.items():
        assert convert(source, tmp_path / name, *args, *way) == 0
        found[name] = files(tmp_path / name / "0" / "items")
        assert not [p for p in (tmp_path / name).iterdir() if p.name.startswith(".")], "state is left behind"
    assert "of 5 work items" in capfd.readouterr().err, "every worker should have something to do"
    for name in ways:
        assert found[name].keys() == found["default"].keys()
        assert same_but_options(found[name], found["default"]), name


@pytest.mark.parametrize("store_format", ["ocdbt", "zarr2"])
def test_repeated_bundles_give_the_same_arrays_in_other_formats(store_format, qwen, tmp_path):
    args = ("--format", store_format, *SMALL_CHUNKS, "--direct_runner_bundle_repeat=2")
    assert convert(qwen, tmp_path, *args) == 0
    assert_restores(tmp_path, qwen3_moe_expected(qwen3_moe_tensors()))


def same_but_options(one: dict[str, bytes], other: dict[str, bytes]) -> bool:
    """Equal files; the manifest and the success mark name the output itself."""
    manifest = "tensorferry.manifest.json"
    a, b = (json.loads(each[manifest]) | {"options": {}} for each in (one, other))
    rest = [name for name in one if name not in (manifest, "commit_success.txt")]
    return a == b and all(one[name] == other[name] for name in rest)


# The manifest and what is printed.


def test_the_manifest_tells_where_everything_came_from(qwen, tmp_path):
    assert convert(qwen, tmp_path, *SMALL_CHUNKS) == 0
    manifest = manifest_of(tmp_path)
    assert manifest["family"] == "qwen3_moe"
    assert sorted(manifest["source_files"]) == sorted(path.name for path in qwen.glob("*.safetensors"))
    assert {info["bytes"] for info in manifest["source_files"].values()} == {
        path.stat().st_size for path in qwen.glob("*.safetensors")
    }
    wi_0 = manifest["arrays"]["params.params.decoder.layers.moe_block.wi_0"]
    assert wi_0["sources"] == "model.layers.{0..2}.mlp.experts.{0..3}.gate_proj.weight"
    values = restore(tmp_path)["params.params.decoder.layers.moe_block.wi_0"].astype(np.float64)
    assert wi_0["statistics"]["min"] == values.min()
    assert wi_0["statistics"]["max"] == values.max()


def test_what_a_conversion_prints(llama, tmp_path, capfd):
    assert convert(llama, tmp_path) == 0
    told = capfd.readouterr()
    lines = told.out.splitlines()
    assert lines[0] == f"12 arrays, 11.54 KiB, in {tmp_path}/0/items"
    assert lines[1] == f"MaxText settings: {tmp_path}/maxtext.yml"
    assert f"load_parameters_path={tmp_path}/0/items" in lines[2]
    assert told.err.endswith("\n")
    assert all("work items" in line for line in told.err.splitlines())


def test_sizes_are_what_the_plan_says(tmp_path):
    sizes = Sizes(layers=1, vocab=11, embed=6, heads=3, kv_heads=1, head_dim=4, mlp=7)
    tensors = llama_tensors(sizes)
    source = write_checkpoint(tmp_path / "hf", llama_config(sizes), tensors, shards=1)
    assert convert(source, tmp_path / "out", "--no-scan-layers") == 0
    assert_restores(tmp_path / "out", llama_expected(tensors, sizes, scan=False))
