"""A PEFT adapter alone becomes what MaxText restores, and comes back; or is refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import PREFIX, adapter_config, factors, write_adapter
from checkpoints import Sizes, interleave, llama_config, llama_tensors, qwen3_moe_config, qwen3_moe_tensors
from exports import here, ulps
from oracle_data import read_safetensors
from pairs import pairs
from stock_orbax import custom_metadata, restore
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.convert import conversion as converting
from tensorferry.pipelines.export import export_run as exporting
from tensorferry.transforms.dtypes import numpy_dtype

RANK, ALPHA = 5, 15
SIZES = Sizes()
MODULES = tuple(
    f"model.layers.{layer}.{module}"
    for layer in range(3)
    for module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj")
)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A base model of which only config.json is there."""
    return write_base(tmp_path_factory.mktemp("base"), llama_config())


def write_base(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True)
def without_beam(monkeypatch):
    monkeypatch.setattr(converting, "run_items", here)
    monkeypatch.setattr(exporting, "run_items", here)


def tensors_of(modules=MODULES, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    return factors(llama_tensors(), modules, RANK, dtype=dtype)


@pytest.fixture
def adapter(tmp_path) -> Path:
    return write_adapter(tmp_path / "adapter", adapter_config(MODULES, RANK, ALPHA), tensors_of())


def convert(adapter: Path, base: Path, output: Path, *more: str) -> int:
    words = ["convert", "--lora-only", str(adapter), "--source", str(base), "--output", str(output)]
    return main([*words, "--chunk-bytes", "100", *more])


def expected(tensors: dict[str, np.ndarray], scan: bool) -> dict[str, np.ndarray]:
    """What qwix wants beside Llama 3's kernels, written down by hand."""
    found: dict[str, list[np.ndarray]] = {}
    for layer in range(3):
        for theirs, ours, heads in (
            ("self_attn.q_proj", "self_attention.query", SIZES.heads),
            ("self_attn.k_proj", "self_attention.key", SIZES.kv_heads),
            ("self_attn.o_proj", "self_attention.out", 0),
            ("mlp.down_proj", "mlp.wo", 0),
        ):
            a, b = (tensors[f"{PREFIX}model.layers.{layer}.{theirs}.lora_{half}.weight"].T for half in "AB")
            if heads:
                b = interleave(b.reshape(RANK, heads, SIZES.head_dim)).reshape(b.shape)
            if theirs.endswith("q_proj"):
                b = b * np.float32(SIZES.head_dim**-0.5)
            for half, array in (("a", a), ("b", b)):
                found.setdefault(f"{ours}.kernel_lora_{half}.value", []).append(array)
    if scan:
        return {f"decoder.layers.{name}": np.stack(arrays, axis=1) for name, arrays in found.items()}
    return {f"decoder.layers_{n}.{name}": array for name, arrays in found.items() for n, array in enumerate(arrays)}


@pytest.mark.parametrize("store_format", ["zarr3", "ocdbt"])
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_stock_orbax_restores_what_qwix_wants(scan, store_format, adapter, base, tmp_path, capsys):
    mode = "--scan-layers" if scan else "--no-scan-layers"
    assert convert(adapter, base, tmp_path / "out", mode, "--format", store_format) == 0
    found, wanted = restore(tmp_path / "out"), expected(tensors_of(), scan)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    told = custom_metadata(tmp_path / "out")
    assert told["scan_layers"] is scan
    assert (told["lora"]["lora_rank"], told["lora"]["lora_alpha"]) == (RANK, ALPHA)
    said = capsys.readouterr().out
    layers = "layers" if scan else "layers_[0-9]+"
    path = f"decoder/{layers}/self_attention/(query|key|out)|decoder/{layers}/mlp/wo"
    assert f"lora.enable_lora=true lora.lora_rank=5 lora.lora_alpha=15.0 lora.lora_module_path='{path}'" in said
    assert f"lora.lora_restore_path={tmp_path}/out/0/items" in said
    assert "load_parameters_path" not in said
    assert '"lora_rank": 5' in (tmp_path / "out" / "maxtext.yml").read_text()


@pairs(scan=(True, False), lanes=("interleaved", "split"), dtype=("float32", "bfloat16"))
def test_there_and_back(scan, lanes, dtype, base, tmp_path):
    tensors = tensors_of(dtype=numpy_dtype(dtype))
    adapter = write_adapter(tmp_path / "adapter", adapter_config(MODULES, RANK, ALPHA), tensors)
    mode = "--scan-layers" if scan else "--no-scan-layers"
    assert convert(adapter, base, tmp_path / "orbax", mode, "--rope-lanes", lanes) == 0
    words = ["export", "--lora", "--source", tmp_path / "orbax", "--config", base, "--output", tmp_path / "back"]
    assert main([*map(str, words)]) == 0
    back = read_safetensors((tmp_path / "back" / "adapter_model.safetensors").read_bytes())
    assert back.keys() == tensors.keys()
    for name, array in tensors.items():
        if "q_proj.lora_B" in name:
            assert ulps(back[name], array) <= (2 if dtype == "float32" else 1)
        else:
            assert back[name].tobytes() == array.tobytes(), name
    config = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    wanted = adapter_config(MODULES, RANK, ALPHA)
    for key in ("peft_type", "r", "lora_alpha", "target_modules", "task_type", "bias", "use_rslora"):
        assert config[key] == wanted[key], key


def test_verify_and_plan(adapter, base, tmp_path, capsys):
    words = ["--lora-only", str(adapter), "--source", str(base)]
    assert main(["plan", *words, "--json", str(tmp_path / "plan.json")]) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["dtype"] == "source"
    assert plan["settings"]["lora"]["lora_alpha"] == ALPHA
    said = capsys.readouterr().out
    assert "(heads half pair) lora_rank -> lora_rank layer (heads pair half); scale 0.354" in said
    assert convert(adapter, base, tmp_path / "out") == 0
    assert main(["verify", "--source", str(base), "--output", str(tmp_path / "out")]) == 0
    chunk = next((tmp_path / "out" / "0" / "items" / "decoder.layers.mlp.wo.kernel_lora_b.value").rglob("c/0/1/0"))
    octets = bytearray(chunk.read_bytes())
    octets[9] ^= 1
    chunk.write_bytes(octets)
    assert main(["verify", "--source", str(base), "--output", str(tmp_path / "out")]) == 3
    assert "kernel_lora_b" in capsys.readouterr().err


def test_the_base_is_no_place_for_what_comes_back(adapter, base, tmp_path, capsys):
    assert convert(adapter, base, tmp_path / "out") == 0
    before = sorted(base.iterdir())
    said = ["--source", str(tmp_path / "out"), "--config", str(base), "--output", str(base)]
    assert main(["export", "--lora", "--overwrite", *said]) == 1
    assert "expected an output apart from --config" in capsys.readouterr().err
    assert sorted(base.iterdir()) == before


def test_verify_after_the_adapter_has_moved(adapter, base, tmp_path, capsys):
    assert convert(adapter, base, tmp_path / "out") == 0
    adapter.rename(tmp_path / "elsewhere")
    words = ["verify", "--source", str(base), "--output", str(tmp_path / "out")]
    assert main(words) == 1
    assert main([*words, "--lora", str(tmp_path / "elsewhere")]) == 0
    write_adapter(tmp_path / "other", adapter_config(MODULES, RANK, 2 * ALPHA), tensors_of())
    assert main([*words, "--lora", str(tmp_path / "other")]) == 3
    assert "not the checkpoint that was converted" in capsys.readouterr().err


def test_rank_stabilised_scale_becomes_an_alpha(base, tmp_path):
    config = adapter_config(MODULES, RANK, ALPHA, use_rslora=True)
    assert convert(write_adapter(tmp_path / "a", config, tensors_of()), base, tmp_path / "out") == 0
    alpha = custom_metadata(tmp_path / "out")["lora"]["lora_alpha"]
    assert alpha / RANK == pytest.approx(ALPHA / np.sqrt(RANK), rel=1e-15)


def test_alphas_of_some_modules_go_into_their_b(base, tmp_path, capsys):
    config = adapter_config(MODULES, RANK, ALPHA, alpha_pattern={"down_proj": 2 * ALPHA})
    assert convert(write_adapter(tmp_path / "a", config, tensors_of()), base, tmp_path / "out") == 0
    found, plain = restore(tmp_path / "out"), expected(tensors_of(), True)
    name = "decoder.layers.mlp.wo.kernel_lora_b.value"
    np.testing.assert_array_equal(found.pop(name), 2 * plain.pop(name))
    for other, array in plain.items():
        np.testing.assert_array_equal(found[other], array)
    assert custom_metadata(tmp_path / "out")["lora"]["lora_alpha"] == ALPHA
    manifest = json.loads((tmp_path / "out" / "0" / "items" / "tensorferry.manifest.json").read_text())
    assert any("the rest of the scales of 3 modules" in note for note in manifest["notes"])


def test_alphas_of_stacked_layers_must_be_alike(base, tmp_path, capsys):
    config = adapter_config(MODULES, RANK, ALPHA, alpha_pattern={"layers.1.mlp.down_proj": 2 * ALPHA})
    adapter = write_adapter(tmp_path / "a", config, tensors_of())
    assert convert(adapter, base, tmp_path / "out") == 2
    assert "layers with scales of their own, stacked in one array" in capsys.readouterr().err
    assert convert(adapter, base, tmp_path / "out", "--no-scan-layers") == 0


def test_layers_left_alone_are_zero_and_told(base, tmp_path, capsys):
    modules = [module for module in MODULES if ".1." not in module]
    config = adapter_config(modules, RANK, ALPHA, layers_to_transform=[0, 2])
    assert convert(write_adapter(tmp_path / "a", config, tensors_of(modules)), base, tmp_path / "out") == 0
    for name, array in restore(tmp_path / "out").items():
        assert not array[:, 1].any(), name
        assert array[:, 2].all(), name
    main(["plan", "--lora-only", str(tmp_path / "a"), "--source", str(base)])
    assert "zero where the adapter leaves a stacked layer alone: 8 factors" in capsys.readouterr().out


def test_a_head_in_a_padded_vocabulary(base, tmp_path):
    tensors = factors(llama_tensors(), ["lm_head"], RANK)
    copy = {f"{PREFIX}lm_head.base_layer.weight": llama_tensors(dtype="float32")["lm_head.weight"]}
    adapter = write_adapter(tmp_path / "a", adapter_config(["lm_head"], RANK, ALPHA), tensors | copy)
    assert convert(adapter, base, tmp_path / "out", "--vocab-size", "40") == 0
    found = restore(tmp_path / "out")
    b = found["decoder.logits_dense.kernel_lora_b.value"]
    np.testing.assert_array_equal(b[:, :37], tensors[f"{PREFIX}lm_head.lora_B.weight"].T)
    assert b.shape == (RANK, 40)
    assert not b[:, 37:].any()
    manifest = json.loads((tmp_path / "out" / "0" / "items" / "tensorferry.manifest.json").read_text())
    assert manifest["left_out"] == {f"{PREFIX}lm_head.base_layer.weight": "a copy of the base model's tensor"}
    words = ["export", "--lora", "--source", tmp_path / "out", "--config", base, "--output", tmp_path / "back"]
    assert main([*map(str, words)]) == 0
    back = read_safetensors((tmp_path / "back" / "adapter_model.safetensors").read_bytes())
    assert {name: array.tobytes() for name, array in back.items()} == {n: a.tobytes() for n, a in tensors.items()}


class Killed(BaseException):
    """Stands for a process that is no more."""


def test_killed_and_run_again(adapter, base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tensorferry.mappings.plan.work_items.SMALL_ARRAY_BYTES", 1)
    done = []

    def half(items_path, item_sizes, work, options):
        work.setup()
        for line in Path(items_path).read_text().splitlines()[::2]:
            done.append(work(json.loads(line)))
        raise Killed

    monkeypatch.setattr(converting, "run_items", half)
    with pytest.raises(Killed):
        convert(adapter, base, tmp_path / "out")
    monkeypatch.setattr(converting, "run_items", here)
    # The same headers with another scale are another adapter.
    other = write_adapter(tmp_path / "other", adapter_config(MODULES, RANK, 2 * ALPHA), tensors_of())
    assert convert(other, base, tmp_path / "out") == 1
    assert convert(adapter, base, tmp_path / "out") == 0
    assert f"resuming: {len(done)} work items" in capsys.readouterr().out
    assert len(done) > 3
    for name, array in expected(tensors_of(), True).items():
        np.testing.assert_array_equal(restore(tmp_path / "out")[name], array)


@pytest.fixture
def refused(tmp_path, base, capsys):
    """Runs a conversion that must be refused, and gives what it said."""

    def run(config: dict[str, Any], tensors: dict[str, np.ndarray], source: Path = base) -> str:
        adapter = write_adapter(tmp_path / "adapter", config, tensors)
        assert convert(adapter, source, tmp_path / "out") == 2
        assert not (tmp_path / "out").exists()
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return run


def test_several_ranks(refused):
    odd = {"model.layers.1.mlp.up_proj": 4, "lm_head": 2}
    tensors = tensors_of()
    for module, rank in odd.items():
        tensors |= factors(llama_tensors(), [module], rank)
    said = refused(adapter_config(MODULES, RANK, ALPHA, rank_pattern=odd), tensors)
    for module, rank in odd.items():
        assert f"{module} (in adapter_model.safetensors): expected rank 5, as most modules have" in said
        assert f"MaxText has one rank for all; found {rank}" in said


def test_whole_tensors(refused):
    tensors = tensors_of() | {f"{PREFIX}model.norm.weight": np.ones(10, np.float32)}
    said = refused(adapter_config(MODULES, RANK, ALPHA, modules_to_save=["norm"]), tensors)
    assert "expected factors of linear layers alone: MaxText's model has no others" in said
    assert "found a whole tensor that was trained beside them. Merge it into the weights" in said


def test_an_embedding(refused):
    embedding = {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": np.ones((RANK, 37), np.float32),
        f"{PREFIX}model.embed_tokens.lora_embedding_B": np.ones((10, RANK), np.float32),
    }
    said = refused(adapter_config(MODULES, RANK, ALPHA), tensors_of() | embedding)
    assert "model.embed_tokens (in adapter_model.safetensors): expected factors of linear layers alone" in said
    assert "found factors of an embedding" in said


def test_experts(refused, tmp_path):
    modules = ["model.layers.1.mlp.experts.2.up_proj"]
    tensors = factors(qwen3_moe_tensors(), modules, RANK)
    source = write_base(tmp_path / "moe", qwen3_moe_config())
    said = refused(adapter_config(modules, RANK, ALPHA), tensors, source)
    assert (
        "model.layers.1.mlp.experts.2.up_proj: expected a module of which MaxText's model can hold an adapter" in said
    )
    assert "Leave it out of the adapter, or merge with convert --lora." in said


def test_a_module_of_another_model(refused):
    tensors = {name.replace("mlp.down_proj", "mlp.fc2"): array for name, array in tensors_of().items()}
    said = refused(adapter_config(MODULES, RANK, ALPHA), tensors)
    assert "model.layers.0.mlp.fc2 (in adapter_model.safetensors): expected a module of a llama model" in said
    assert "Is --source the model that it adapts?" in said


def test_a_base_of_another_size(refused, tmp_path):
    source = write_base(tmp_path / "wide", llama_config(intermediate_size=15))
    said = refused(adapter_config(MODULES, RANK, ALPHA), tensors_of(), source)
    assert "down_proj.lora_A.weight" in said
    assert "expected [lora_rank=5, mlp=15] from r of the adapter, intermediate_size in config.json" in said
    assert "found [5, 14]" in said


def test_a_scale_that_maxtext_cannot_have(refused):
    said = refused(adapter_config(MODULES, RANK, -3), tensors_of())
    assert "expected an alpha above 0, the only ones that MaxText takes; found scale -0.6" in said


def test_no_config(refused, tmp_path):
    (tmp_path / "none").mkdir()
    assert "expected a folder with config.json" in refused(
        adapter_config(MODULES, RANK, ALPHA), tensors_of(), tmp_path / "none"
    )
