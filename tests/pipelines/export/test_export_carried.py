"""FP8 that a conversion carried goes home: byte for byte as FP8, or dequantised as its source would be."""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import llama_config, llama_tensors, qwen3_moe_config, qwen3_moe_tensors
from exports import export_here, read_repository, write_plan, write_repository
from fp8_samples import BLOCK, KINDS, Arrays, decoded, fp8_tensors
from in_memory import run_plan
from oracle_data import MODES, values
from pairs import pairs
from tensorferry.mappings.plan.conversion_plan import PlanOptions
from tensorferry.mappings.words.problems import FerryError, PlanError
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.convert.conversion_planning import ConversionOptions, plan_conversion

LAYOUTS = ("declared", "broadcast")


class Carried:
    """An FP8 checkpoint, and what a conversion with ``--dtype source`` makes of it."""

    def __init__(
        self, where: Path, kind: str, scan: bool = True, layout: str = "declared", model: str = "llama", plain: str = ""
    ) -> None:
        self.kind, self.where = kind, where
        if model == "llama":
            config, weights = llama_config(), llama_tensors()
        else:
            config, weights = qwen3_moe_config(), qwen3_moe_tensors(fused=model == "fused")
        self.tensors = fp8_tensors(kind, weights)
        self.config = config | {"quantization_config": KINDS[kind][0]}
        self.folder = write_repository(where / "fp8", self.config, self.tensors)
        target = PlanOptions(scan, "source", 300, scale_layout=layout)
        converted = self.with_plain(plain) if plain else self.tensors
        source = write_repository(where / "converted", self.config, converted)
        self.plan = plan_conversion(ConversionOptions(str(source), target=target)).plan
        self.arrays = {k.removeprefix("params."): a for k, a in run_plan(self.plan, converted).items()}

    def with_plain(self, name: str) -> Arrays:
        """The checkpoint with one weight dequantised to bfloat16."""
        scale = name.removesuffix("weight") + KINDS[self.kind][2]
        values = decoded(self.kind, self.tensors)[name].astype(ml_dtypes.bfloat16)
        return {n: array for n, array in self.tensors.items() if n != scale} | {name: values}

    def export(self, monkeypatch, config: Path | None = None, output: str = "out", **options: Any):
        shutil.rmtree(self.where / "item", ignore_errors=True)
        write_plan(self.where / "item", self.plan, self.arrays)
        options = {"chunk_bytes": 600} | options
        return export_here(monkeypatch, self.where / "item", config or self.folder, self.where / output, **options)


def differing(a: Arrays, b: Arrays) -> set[str]:
    assert a.keys() == b.keys()
    assert {n: (t.dtype, t.shape) for n, t in a.items()} == {n: (b[n].dtype, b[n].shape) for n in a}
    return {name for name in a if a[name].tobytes() != b[name].tobytes()}


def verified(carried: Carried) -> bool:
    return main(["verify", "--source", str(carried.where / "item"), "--output", str(carried.where / "out")]) == 0


@pairs(kind=KINDS, scan=(True, False), layout=LAYOUTS)
def test_home_as_fp8_byte_for_byte(kind, scan, layout, tmp_path, monkeypatch):
    """Ragged blocks, expanded scales, folded factors, permuted lanes: codes, scales and config are the source's."""
    carried = Carried(tmp_path, kind, scan, layout)
    outcome = carried.export(monkeypatch)
    assert differing(read_repository(tmp_path / "out"), carried.tensors) == set()
    assert (tmp_path / "out" / "config.json").read_bytes() == (carried.folder / "config.json").read_bytes()
    assert outcome.export.plan.amplification < 1.2


@pytest.mark.parametrize("model", ["llama", "fused"])
@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
def test_verify_reads_what_was_dequantised(scan, model, tmp_path, monkeypatch):
    carried = Carried(tmp_path, "block", scan, model=model)
    carried.export(monkeypatch, dtype="bfloat16")
    assert verified(carried)


@pytest.mark.parametrize("kind", ["block", "channel", "tensor"])
def test_verify_reads_what_was_carried(kind, tmp_path, monkeypatch, capsys):
    carried = Carried(tmp_path, kind)
    outcome = carried.export(monkeypatch)
    assert verified(carried)
    places = {name: place for shard in outcome.export.plan.shards for name, place in shard.places().items()}
    file = tmp_path / "out" / "model.safetensors"
    whole = file.read_bytes()
    for name in ("model.layers.2.mlp.down_proj.weight", f"model.layers.2.self_attn.q_proj.{KINDS[kind][2]}"):
        damaged = bytearray(whole)
        damaged[places[name].offset] ^= 0x02
        file.write_bytes(damaged)
        assert not verified(carried)
        assert name in capsys.readouterr().err


@pairs(kind=KINDS, scan=(True, False), layout=LAYOUTS)
def test_dequantised_as_the_source_is(kind, scan, layout, tmp_path, monkeypatch):
    carried = Carried(tmp_path, kind, scan, layout)
    outcome = carried.export(monkeypatch, dtype="bfloat16")
    wanted = {name: array.astype(ml_dtypes.bfloat16) for name, array in decoded(kind, carried.tensors).items()}
    assert differing(read_repository(tmp_path / "out"), wanted) == set()
    assert "config.json: quantization_config removed, the weights are bfloat16" in outcome.export.notes
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_plain_repository_gets_plain_weights(tmp_path, monkeypatch):
    carried = Carried(tmp_path, "block")
    plain = write_repository(tmp_path / "plain", llama_config(), llama_tensors())
    carried.export(monkeypatch, plain)
    wanted = {name: array.astype(ml_dtypes.bfloat16) for name, array in decoded("block", carried.tensors).items()}
    assert differing(read_repository(tmp_path / "out"), wanted) == set()
    carried.export(monkeypatch, plain, "again", fp8_from=str(carried.folder))
    assert differing(read_repository(tmp_path / "again"), carried.tensors) == set()


@pytest.mark.by_turns
@pairs(kind=("block", "block, powers of two", "channel"), model=("separate", "fused"), scan=(True, False))
def test_experts(kind, model, scan, tmp_path, monkeypatch):
    """Experts one by one, and fused ones of three axes whose gates and ups go into two arrays."""
    carried = Carried(tmp_path, kind, scan, model=model)
    carried.export(monkeypatch)
    assert differing(read_repository(tmp_path / "out"), carried.tensors) == set()
    carried.export(monkeypatch, output="plain", dtype="float32")
    wanted = {name: array.astype(np.float32) for name, array in decoded(kind, carried.tensors).items()}
    assert differing(read_repository(tmp_path / "plain"), wanted) == set()


@pytest.mark.parametrize("mode", MODES)
def test_what_maxtext_carries_goes_home(mode, tmp_path, monkeypatch):
    """Qwen3.5 FP8: fused projections of linear attention, experts, blocks of 128; the oracle's own names."""
    sample = values("qwen3.5-35b-a3b-fp8")
    tensors = dict(sample.tensors)
    folder = write_repository(tmp_path / "fp8", sample.config, tensors)
    plan = plan_conversion(ConversionOptions(str(folder), target=PlanOptions(mode == "scan", "source"))).plan
    arrays = {key.removeprefix("params."): array for key, array in run_plan(plan, tensors).items()}
    write_plan(tmp_path / "item", plan, arrays)
    export_here(monkeypatch, tmp_path / "item", folder, tmp_path / "out")
    found = read_repository(tmp_path / "out")
    assert differing(found, {name: tensors[name] for name in found}) == set()
    assert {name for name in tensors if name not in found} <= set(plan.account.ignored)


# config.json alone.


@pytest.mark.parametrize("indexed", [True, False])
def test_blocks_that_config_declares(indexed, tmp_path, monkeypatch):
    carried = Carried(tmp_path, "block")
    bare = write_repository(tmp_path / "bare", carried.config)
    if indexed:
        index = {"weight_map": dict.fromkeys(carried.tensors, "model-00001-of-00001.safetensors")}
        (bare / "model.safetensors.index.json").write_text(json.dumps(index))
    carried.export(monkeypatch, bare)
    found = read_repository(tmp_path / "out")
    queries = {name for name in found if "q_proj.weight_scale_inv" in name}
    assert differing(found, carried.tensors) <= queries
    for name in queries:  # two scales may fold to one: nothing but the source could tell them apart
        np.testing.assert_allclose(found[name], carried.tensors[name], rtol=1.2e-7)


# What cannot be.


def test_a_scheme_without_headers(tmp_path, monkeypatch):
    carried = Carried(tmp_path, "channel")
    bare = write_repository(tmp_path / "bare", carried.config)
    with pytest.raises(PlanError, match=r"expected the headers .*an hf:// address is enough.*--dtype bfloat16"):
        carried.export(monkeypatch, bare)


def test_scales_of_another_grid(tmp_path, monkeypatch):
    carried = Carried(tmp_path, "block")
    other = carried.config | {"quantization_config": BLOCK | {"weight_block_size": [2, 5]}}
    bare = write_repository(tmp_path / "bare", other)
    with pytest.raises(PlanError, match=r"_scale: expected a scale of shape .* --dtype bfloat16"):
        carried.export(monkeypatch, bare)


def test_a_weight_that_is_fp8_in_the_checkpoint_only(tmp_path, monkeypatch):
    """One that was dequantised since takes the codes of the checkpoint, and new ones where it has changed."""
    name = "model.layers.1.mlp.up_proj.weight"
    carried = Carried(tmp_path, "block", scan=False, plain=name)
    outcome = carried.export(monkeypatch)
    assert outcome.changed == {name: (0, 16)}
    assert differing(read_repository(tmp_path / "out"), carried.tensors) == set()
    carried.arrays["params.decoder.layers_1.mlp.wi_1.kernel"][7, 9] = 50.5
    outcome = carried.export(monkeypatch, output="again")
    assert outcome.changed == {name: (1, 16)}
    assert differing(read_repository(tmp_path / "again"), carried.tensors) == {name, f"{name}_scale_inv"}


def test_numbers_where_config_alone_tells_of_codes(tmp_path, monkeypatch):
    name = "model.layers.1.mlp.up_proj.weight"
    carried = Carried(tmp_path, "block", scan=False, plain=name)
    bare = write_repository(tmp_path / "bare", carried.config)
    index = {"weight_map": dict.fromkeys(carried.tensors, "model-00001-of-00001.safetensors")}
    (bare / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PlanError, match=rf"{name}: expected FP8 codes, .*; found numbers in the source.* --fp8-from"):
        carried.export(monkeypatch, bare)


def test_scales_that_differ_inside_a_block(tmp_path, monkeypatch):
    carried = Carried(tmp_path, "block")
    carried.arrays["params.decoder.layers.mlp.wi_1.kernel_scale"][0, 1, 0] *= 1.5
    with pytest.raises(FerryError, match=r"up_proj.weight_scale_inv: expected one scale for each of its blocks"):
        carried.export(monkeypatch)
