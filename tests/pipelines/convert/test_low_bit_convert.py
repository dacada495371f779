"""FP8 checkpoints from end to end: dequantised, carried, verified, refused; quantised by the demo's own quantiser."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import Sizes, llama_config, llama_expected, llama_tensors, write_checkpoint
from maxtext_scales import maxtext_dequantises
from pairs import pairs
from stock_orbax import assert_restores, restore
from tensorferry.pipelines.cli.main import main

from demo.quantise import per_block, per_tensor

FP8 = ml_dtypes.float8_e4m3fn
SIZES = Sizes()
BLOCK = 4
CONFIGS = {
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
}


def quantised(scheme: str) -> dict[str, np.ndarray]:
    """A small Llama whose projections are FP8; blocks of 4 leave ragged edges on the axes of 10 and 14."""
    tensors: dict[str, np.ndarray] = {}
    for name, weight in llama_tensors(SIZES).items():
        weight32 = weight.astype(np.float32)
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
        else:
            tensors |= per_tensor(name, weight32) if scheme == "tensor" else per_block(name, weight32, BLOCK)
    return tensors


def dequantised(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every weight as it is meant, float32 where it was FP8; by indexing with whole grids."""
    out = {}
    for name, array in tensors.items():
        if array.dtype == FP8:
            scale = tensors.get(f"{name}_scale", tensors.get(f"{name}_scale_inv"))
            if scale.ndim:
                scale = scale.repeat(BLOCK, 0).repeat(BLOCK, 1)[: array.shape[0], : array.shape[1]]
            out[name] = array.astype(np.float32) * scale
        elif "scale" not in name:
            out[name] = array
    return out


def checkpoint(folder: Path, scheme: str, **changes: np.ndarray | None) -> Path:
    """Shards dealt round, so that scales lie in other shards than their weights; ``None`` leaves a tensor out."""
    tensors = quantised(scheme)
    tensors |= {name: array for name, array in changes.items() if array is not None}
    tensors = {name: array for name, array in tensors.items() if changes.get(name, array) is not None}
    return write_checkpoint(folder / "hf", llama_config(SIZES, quantization_config=CONFIGS[scheme]), tensors)


def convert(source: Path, output: Path, *args: str) -> None:
    small = ("--chunk-bytes", "400")
    assert main(["convert", "--source", str(source), "--output", str(output), *small, *args]) == 0
    assert main(["verify", "--source", str(source), "--output", str(output)]) == 0


MODES = pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
SCHEMES = ("tensor", "block")


def mode(scan: bool) -> str:
    return "--scan-layers" if scan else "--no-scan-layers"


@pytest.mark.by_turns
@pairs(dtype=("bfloat16", "float32"), scheme=SCHEMES, scan=(True, False))
def test_dequantised_exactly_and_rounded_once(dtype, scheme, scan, tmp_path):
    source = checkpoint(tmp_path, scheme)
    convert(source, tmp_path / "out", "--dtype", dtype, mode(scan))
    assert_restores(tmp_path / "out", llama_expected(dequantised(quantised(scheme)), SIZES, scan, dtype))


@pytest.mark.by_turns
@pairs(layout=("declared", "broadcast"), scheme=SCHEMES, scan=(True, False))
def test_carried_with_their_scales(layout, scheme, scan, tmp_path):
    source = checkpoint(tmp_path, scheme)
    convert(source, tmp_path / "out", "--dtype", "source", "--scale-layout", layout, mode(scan))
    found = restore(tmp_path / "out")
    wanted = llama_expected(dequantised(quantised(scheme)), SIZES, scan, "float32")
    projections = {key for key in wanted if ".layers" in key and "norm" not in key}
    assert found.keys() - {"step", "opt_state"} == wanted.keys() | {f"{key}_scale" for key in projections}
    for key, weights in wanted.items():
        if key not in projections:
            assert found[key].dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(found[key].astype(np.float32), weights)
            continue
        codes, scale = found[key], found[f"{key}_scale"]
        assert (codes.dtype, scale.dtype) == (FP8, np.float32)
        if (scheme, layout) == ("tensor", "declared"):
            assert scale.shape == ((SIZES.layers,) if scan else ())
            scale = scale.reshape(1, -1, *[1] * (codes.ndim - 2)) if scan else scale
        else:
            assert scale.ndim == codes.ndim
        again = maxtext_dequantises(codes, scale)
        # The query's factor of 1 / sqrt(8) goes into the scale, which moves one rounding.
        np.testing.assert_allclose(again, weights, rtol=3e-7 if "query" in key else 0)


def test_activation_scales_are_listed_with_a_reason(tmp_path, capsys):
    assert main(["plan", "--source", str(checkpoint(tmp_path, "tensor"))]) == 0
    out = capsys.readouterr().out
    assert "left out: 21 source tensors" in out
    assert "input_scale" in out
    assert "used at run time only" in out


def test_plan_shows_scheme_scale_and_way(tmp_path, capsys):
    source = checkpoint(tmp_path, "block")
    assert main(["plan", "--source", str(source)]) == 0
    assert "dequantise 3 x fp8-block 4x4, scale model.layers.0.mlp.up_proj.weight_scale_inv float32 [4, 3]" in (
        capsys.readouterr().out
    )
    assert main(["plan", "--source", str(source), "--dtype", "source"]) == 0
    out = capsys.readouterr().out
    assert "carry 3 x float8_e4m3fn codes bit for bit" in out
    assert "from model.layers.{0..2}.mlp.up_proj.weight_scale_inv  by  mlp embed -> embed layer mlp" in out
    assert "carry 3 x scale model.layers.0.mlp.up_proj.weight_scale_inv as float32 [7, 5], expanded along axes 0" in out
    assert "mlp=14 in entries of 2 instead of 4 and embed=10 in entries of 2 instead of 4" in out


@MODES
def test_plan_says_which_loader_takes_stacked_scales_per_tensor(scan, tmp_path, capsys):
    source = checkpoint(tmp_path, "tensor")
    hint = "with --scale-layout broadcast"
    for layout, told in (("declared", scan), ("broadcast", False)):
        assert main(["plan", "--source", str(source), "--dtype", "source", "--scale-layout", layout, mode(scan)]) == 0
        assert capsys.readouterr().out.count(hint) == told


def test_inspect_shows_the_scheme(tmp_path, capsys):
    assert main(["inspect", str(checkpoint(tmp_path, "block"))]) == 0
    out = capsys.readouterr().out
    assert "quantisation: fp8-block 21, plain 9" in out
    assert "config says: fp8 (in quantization_config in config.json)" in out
    assert "fp8-block (scale float32[4, 3])" in out


def test_pytorch_shards_are_read_as_bytes(tmp_path):
    torch = pytest.importorskip("torch")
    tensors = quantised("block")
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama_config(SIZES, quantization_config=CONFIGS["block"])))
    torch.save({name: as_torch(torch, array) for name, array in tensors.items()}, folder / "pytorch_model.bin")
    convert(folder, tmp_path / "out", "--dtype", "float32")
    assert_restores(tmp_path / "out", llama_expected(dequantised(tensors), SIZES, True, "float32"))


def as_torch(torch, array: np.ndarray):
    kinds = {"float8_e4m3fn": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float32": torch.float32}
    octets = torch.from_numpy(np.ascontiguousarray(array).view(np.uint8))
    return octets.view(kinds[array.dtype.name]).reshape(array.shape)


# ---- refusals, as a user meets them

V = "model.layers.1.self_attn.v_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"


def f32(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def with_value(value: float) -> np.ndarray:
    scale = quantised("block")[f"{V}_scale_inv"].copy()
    scale[1, 2] = scale[3, 0] = value
    return scale


@pytest.mark.parametrize(
    ("scheme", "changes", "words"),
    [
        (
            "block",
            {f"{V}_scale_inv": None},
            [f"{V} (in ", "a scale beside the float8_e4m3fn weight", "no scale in any file"],
        ),
        ("tensor", {V: None}, [f"{V}_scale (in ", "an orphan float32 []", "no weight consumed"]),
        ("block", {"model.norm.weight_scale": f32(3)}, ["model.norm.weight_scale (in ", "an orphan float32 [3]"]),
        ("block", {f"{V}_scale_inv": f32(5, 3)}, [f"{V}_scale_inv (in ", "= [4, 3] for block [4, 4]", "[5, 3]"]),
        ("tensor", {f"{V}_scale": f32(4, 3)}, [V, "a block size for the scale grid [4, 3]", "cannot be deduced"]),
        ("block", {f"{V}_scale_inv": with_value(np.nan)}, [f"{V}_scale_inv (in ", "2 NaN of 12 scales"]),
        ("block", {f"{V}_scale_inv": with_value(np.inf)}, [f"{V}_scale_inv (in ", "2 infinite of 12 scales"]),
        ("block", {f"{V}_scale_inv": with_value(0)}, [f"{V}_scale_inv (in ", "2 zero of 12 scales"]),
        ("block", {f"{V}_scale_inv": with_value(-1)}, [f"{V}_scale_inv (in ", "2 negative of 12 scales"]),
        (
            "tensor",
            {V: np.zeros((16, 32), np.uint8), f"{V}_scale": np.zeros(256, FP8), f"{V}_scale_2": f32()},
            [f"{V}_scale (in ", "one-dimensional float8_e4m3fn [256]", "swizzled"],
        ),
        (
            "tensor",
            {V: np.zeros((16, 32), np.uint8), f"{V}_scale": np.ones((16, 5), FP8), f"{V}_scale_2": f32()},
            [V, "packed [16, 32] = [16, 64] in elements", "[16, 4] for groups of 16", "[16, 5]"],
        ),
        (
            "tensor",
            {EXPERTS: np.zeros((3, 6, 6), FP8), f"{EXPERTS}_scale": f32(3, 6)},
            [EXPERTS, "axes 1 and 2 are equally long", "Ambiguous scale axis"],
        ),
    ],
)  # fmt: skip
def test_refused(scheme, changes, words, tmp_path, capsys):
    source = checkpoint(tmp_path, scheme, **changes)
    assert main(["plan", "--source", str(source)]) == 2
    shown = capsys.readouterr().err
    assert [word for word in words if word not in shown] == [], shown
    assert "1 problem." in shown
    assert main(["convert", "--source", str(source), "--output", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["hqq", "aqlm", "bitnet", "gguf", "quanto"])
def test_other_methods_are_refused_by_name_and_without_noise(method, tmp_path, capsys):
    config = llama_config(SIZES, quantization_config={"quant_method": method})
    source = write_checkpoint(tmp_path / "hf", config, quantised("tensor"))
    assert main(["plan", "--source", str(source)]) == 2
    shown = capsys.readouterr().err
    assert f"{method} is not supported" in shown
    assert "awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, gptq, modelopt, mxfp4, mxfp8, quark" in shown
    assert "1 problem." in shown


def test_a_scale_that_went_bad_after_the_plan_stops_the_run(tmp_path, monkeypatch, capsys):
    """Workers check what they read, whatever the plan has checked."""
    monkeypatch.setattr("tensorferry.pipelines.huggingface.low_bit_tensors.CHECKED_BYTES", 0)
    source = checkpoint(tmp_path, "block", **{f"{V}_scale_inv": with_value(np.nan)})
    assert main(["plan", "--source", str(source)]) == 0
    assert main(["convert", "--source", str(source), "--output", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr().err
    assert f"{V}_scale_inv (in " in shown
    assert "2 NaN of 12 scales" in shown
    assert not (tmp_path / "out" / "0").exists()


@pytest.mark.parametrize(("config", "stored", "told"), [("gptq", 8, True), ("gptq", 7, False), ("gptq_v2", 7, True)])
def test_gptq_versions_that_disagree_are_told(config, stored, told, tmp_path, capsys):
    """Symmetric zero points are 7 everywhere in v1, 8 in v2."""
    sizes = Sizes(embed=16, heads=4, kv_heads=2, head_dim=8, mlp=24)
    tensors = {}
    for name, weight in llama_tensors(sizes).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        (rows, columns), stem = weight.shape, name.removesuffix("weight")
        tensors[f"{stem}qweight"] = np.full((columns // 8, rows), 0x76543210, np.int32)
        tensors[f"{stem}qzeros"] = np.full((columns // 8, rows // 8), stored * 0x11111111, np.uint32).view(np.int32)
        tensors[f"{stem}scales"] = np.full((columns // 8, rows), 0.5, np.float16)
    quant = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": True, "checkpoint_format": config}
    source = write_checkpoint(tmp_path / "hf", llama_config(sizes, quantization_config=quant), tensors)
    assert main(["plan", "--source", str(source)]) == 0
    assert ("the config says checkpoint_format" in capsys.readouterr().out) == told
    assert main(["convert", "--source", str(source), "--output", str(tmp_path / "out")]) == 0
    value = restore(tmp_path / "out")["params.params.decoder.layers.mlp.wi_0.kernel"]
    assert value[:, 0, 0].astype(np.float32).tolist() == [(k % 8 - 8) * 0.5 for k in range(16)]
