"""Exports from end to end: from MaxText's formulas, saved by stock Orbax, to files that others read."""

import json
import re
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import (
    Sizes,
    llama_config,
    llama_expected,
    llama_tensors,
    qwen3_moe_config,
    qwen3_moe_expected,
    qwen3_moe_tensors,
    write_checkpoint,
)
from exports import export_here, read_repository, stock, ulps, write_repository
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from sample_checkpoint import write_checkpoint as write_orbax
from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.words.problems import PlanError
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.export.export_planning import ExportOptions, plan_export


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A repository with weights, tokenizer and all, in three shards."""
    folder = write_checkpoint(tmp_path_factory.mktemp("llama"), llama_config(), llama_tensors())
    (folder / "generation_config.json").write_bytes(b'{"eos_token_id":   [7]}')
    (folder / "chat_template.jinja").write_bytes("{{ «bos» }}\r\n".encode())
    (folder / "README.md").write_text("a model card")
    return folder


@pytest.fixture(scope="module")
def orbax(tmp_path_factory) -> Path:
    """The same model in MaxText's layout, saved by stock Orbax with an optimizer."""
    arrays = llama_expected(llama_tensors())
    moments = {"mu": {"params": {"x": np.ones((3, 5), np.float32)}}, "count": np.int32(7)}
    return stock(tmp_path_factory.mktemp("orbax") / "100" / "items", arrays, opt_state=moments, step=np.int32(100))


def export(source: Path, config: Path, output: Path, *more: str) -> int:
    return main(["export", "--source", str(source), "--config", str(config), "--output", str(output), *more])


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], queries: int = 1) -> None:
    """The same tensors; query kernels to some units in the last place, since 1/sqrt(8) was folded into them."""
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        assert (array.dtype, array.shape) == (wanted[name].dtype, wanted[name].shape), name
        assert ulps(array, wanted[name]) <= (queries if "q_proj" in name else 0), name


def test_stock_orbax_to_a_repository(orbax, llama, tmp_path, capsys):
    out = tmp_path / "out"
    assert export(orbax.parents[1], llama, out, "--shard-bytes", "1500") == 0
    assert_same(read_repository(out), llama_tensors())
    told = capsys.readouterr().out
    assert "opt_state: 2 leaves" in told
    assert "the optimizer's state" in told
    for name in ("config.json", "generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (llama / name).read_bytes()
    assert not (out / "README.md").exists()
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert shards == [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in llama_tensors().values())
    for shard in shards:
        with safe_open(out / shard, "np") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert {index["weight_map"][name] for name in opened.keys()} == {shard}  # noqa: SIM118
    assert not list(out.glob(".tensorferry*"))


def test_verify_finds_nothing_and_then_a_flipped_bit(orbax, llama, tmp_path, capsys):
    out = tmp_path / "out"
    assert export(orbax, llama, out) == 0
    words = ["verify", "--source", str(orbax), "--output", str(out)]
    assert main(words) == 0
    assert "30 arrays" in capsys.readouterr().out
    with (out / "model.safetensors").open("r+b") as file:
        file.seek(-3, 2)
        byte = file.read(1)
        file.seek(-3, 2)
        file.write(bytes([byte[0] ^ 1]))
    assert main(words) == 3
    assert "1 element differs" in capsys.readouterr().err


def test_plan_shows_the_export(orbax, llama, tmp_path, capsys):
    assert main(["plan", "--source", str(orbax), "--config", str(llama), "--json", str(tmp_path / "plan.json")]) == 0
    told = capsys.readouterr().out
    assert "model.layers.{0..2}.self_attn.q_proj.weight  x3" in told
    assert "the source is read 1.00 times" in told
    assert "1 safetensors files" in told
    assert len(json.loads((tmp_path / "plan.json").read_text())["arrays"]) == len(llama_tensors())


@pytest.mark.parametrize("under", ["params/params", "params", "", "base", "model"])
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
def test_every_layout_of_the_tree(under, scan, llama, tmp_path, monkeypatch):
    """Train states, bare parameters, the root itself, an adapter's level, a model saved whole."""
    source = stock(tmp_path / "item", llama_expected(llama_tensors(), scan=scan), under)
    outcome = export_here(monkeypatch, source, llama, tmp_path / "out")
    assert outcome.export.plan.options.scan_layers is scan
    assert_same(read_repository(tmp_path / "out"), llama_tensors())


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_experts_in_both_spellings(scan, fused, tmp_path, monkeypatch):
    tensors = qwen3_moe_tensors(fused=fused)
    source = stock(tmp_path / "item", qwen3_moe_expected(tensors, scan=scan, fused=fused))
    repository = write_repository(tmp_path / "hf", qwen3_moe_config(), tensors)
    export_here(monkeypatch, source, repository, tmp_path / "out")
    assert_same(read_repository(tmp_path / "out"), tensors, queries=0)


# Chunks of any shape.

CHUNKED = {"mlp.wi_0": 0, "self_attention.query": 1, "wo.kernel": 2, "logits_dense": 3, "embedding": 4}


def chunk_of(key: str, shape: tuple[int, ...], fractions: list[list[float]]) -> tuple[int, ...]:
    which = next((n for part, n in CHUNKED.items() if part in key), None)
    if which is None:
        return shape
    return tuple(max(1, round(length * share)) for length, share in zip(shape, fractions[which], strict=False))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fractions=st.lists(st.lists(st.floats(0.2, 1.0), min_size=4, max_size=4), min_size=5, max_size=5),
    chunk_bytes=st.integers(150, 4000),
    zarr=st.sampled_from(["zarr3", "zarr2"]),
)
def test_chunks_of_any_shape(fractions, chunk_bytes, zarr, llama, tmp_path_factory, monkeypatch):
    """Wherever the source's chunks end and however finely the files are cut, every element is there once."""
    where = tmp_path_factory.mktemp("chunks")
    arrays = llama_expected(llama_tensors())
    specs = []
    for key, array in arrays.items():
        chunk = chunk_of(key, array.shape, fractions)
        specs.append(ArraySpec(tuple(key.split(".")), array.dtype.name, array.shape, chunk, chunk))
    write_orbax(where / "ck", zarr, {key: np.ascontiguousarray(a) for key, a in arrays.items()}, tuple(specs))
    export_here(monkeypatch, where / "ck", llama, where / "out", chunk_bytes=chunk_bytes, shard_bytes=3000)
    assert_same(read_repository(where / "out"), llama_tensors())


# Dtypes, padding, ties, config.


def test_padded_vocabulary_is_cropped(llama, tmp_path, monkeypatch):
    source = stock(tmp_path / "item", llama_expected(llama_tensors(), vocab=43))
    outcome = export_here(monkeypatch, source, llama, tmp_path / "out")
    assert_same(read_repository(tmp_path / "out"), llama_tensors())
    told = [note for note in outcome.export.plan.notes if "padded" in note]
    assert told == [f"{name}: 6 padded rows of vocab are left out (43 to 37)"
                    for name in ("model.embed_tokens.weight", "lm_head.weight")]  # fmt: skip


def test_a_tied_head_is_written_once(tmp_path, monkeypatch):
    tensors = llama_tensors(head=False)
    repository = write_repository(tmp_path / "hf", llama_config(tie_word_embeddings=True), tensors)
    source = stock(tmp_path / "item", llama_expected(tensors, tied=True))
    export_here(monkeypatch, source, repository, tmp_path / "out")
    assert_same(read_repository(tmp_path / "out"), tensors)


def test_config_alone_gives_dtype_and_order(tmp_path, monkeypatch):
    """No weights beside config.json: its dtype, layers in the order of their numbers."""
    sizes = Sizes(layers=11)
    tensors = llama_tensors(sizes)
    repository = write_repository(tmp_path / "hf", llama_config(sizes))
    source = stock(tmp_path / "item", llama_expected(tensors, sizes, dtype="float32"))
    outcome = export_here(monkeypatch, source, repository, tmp_path / "out")
    assert_same(read_repository(tmp_path / "out"), tensors)
    names = [tensor.key for tensor in outcome.export.plan.shards[0].tensors]
    assert names.index("model.layers.9.mlp.up_proj.weight") < names.index("model.layers.10.mlp.up_proj.weight")


def test_another_dtype_changes_config_and_says_so(llama, orbax, tmp_path, monkeypatch):
    outcome = export_here(monkeypatch, orbax, llama, tmp_path / "out", dtype="float32")
    found = read_repository(tmp_path / "out")
    assert {array.dtype.name for array in found.values()} == {"float32"}
    wanted = llama_tensors()
    exact = {name: array.astype(ml_dtypes.bfloat16) for name, array in found.items()}
    assert_same(exact, wanted)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == llama_config() | {"torch_dtype": "float32"}
    assert "config.json: torch_dtype bfloat16 becomes float32" in outcome.export.notes


def test_each_tensor_keeps_the_dtype_it_has_in_the_repository(tmp_path, monkeypatch):
    tensors = llama_tensors()
    mixed = {n: t.astype(np.float32) if "norm" in n else t for n, t in tensors.items()}
    repository = write_repository(tmp_path / "hf", llama_config(), mixed)
    source = stock(tmp_path / "item", llama_expected(tensors))
    export_here(monkeypatch, source, repository, tmp_path / "out", shard_bytes=1000)
    assert_same(read_repository(tmp_path / "out"), mixed)


# Memory.


def test_chunks_over_all_layers_are_read_once(orbax, llama):
    """Stock Orbax saved each array as one chunk of all layers: a work item writes a part of every layer."""
    plan = plan_export(ExportOptions(str(orbax), str(llama), chunk_bytes=200)).plan
    assert plan.amplification == 1
    assert max(len(item.parts) for item in plan.items()) > 3


def test_a_chunk_that_does_not_fit_is_refused_with_the_memory_it_needs(orbax, llama):
    options = ExportOptions(str(orbax), str(llama), worker_memory_bytes=1 << 20)
    with pytest.raises(PlanError, match=r"a stored chunk is decoded whole\. Run with --worker-memory-bytes") as error:
        plan_export(options).plan.require()
    enough = max(int(number) for number in re.findall(r"--worker-memory-bytes (\d+)", str(error.value)))
    assert not plan_export(replace(options, worker_memory_bytes=enough)).plan.problems


BIG = Sizes(layers=6, vocab=50, embed=256, heads=4, kv_heads=2, head_dim=8, mlp=2000)


def test_a_chunk_of_all_layers_is_decoded_once_when_two_of_it_fit(tmp_path, monkeypatch):
    """Stock Orbax, one compressed chunk per array: whatever it is exported to, no chunk is read twice."""
    tensors = llama_tensors(BIG)
    source = stock(tmp_path / "item", llama_expected(tensors, BIG))
    repository = write_repository(tmp_path / "hf", llama_config(BIG), tensors)
    bound = 2 * 256 * 6 * 2000 * 2
    options = ExportOptions(str(source), str(repository), worker_memory_bytes=bound - 1)
    with pytest.raises(PlanError, match=rf"needs {bound:,} for .*gate_proj.*--worker-memory-bytes {bound}"):
        plan_export(options).plan.require()
    outcome = export_here(monkeypatch, source, repository, tmp_path / "out", worker_memory_bytes=bound)
    assert outcome.export.plan.amplification == 1
    assert_same(read_repository(tmp_path / "out"), tensors)
    wider = plan_export(replace(options, worker_memory_bytes=bound + (5 << 20), dtype="float32")).plan
    assert not wider.problems
    assert wider.amplification == 1
