"""An adapter merged on the way: against PEFT's formula in plain numpy, and verified by the other road.

Exact cases have factors of small whole numbers and scales that are powers of two, so that any correct arithmetic gives
the same bits; the random ones are compared within float32.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from adapters import PREFIX, adapter_config, factors, merged, write_adapter
from checkpoints import (
    Sizes,
    llama_config,
    llama_expected,
    llama_tensors,
    qwen3_moe_config,
    qwen3_moe_expected,
    qwen3_moe_tensors,
    write_checkpoint,
)  # fmt: skip
from exports import here
from pairs import pairs
from stock_orbax import assert_restores, restore
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.convert import conversion as converting
from tensorferry.pipelines.verify import verify_conversion as verifying

from demo.quantise import per_block

SIZES = Sizes()
RANK, ALPHA = 3, 6
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
MODULES = tuple(f"model.layers.{layer}.{module}" for layer in range(3) for module in PROJECTIONS)
MODES = pytest.mark.parametrize("scan", [True, False], ids=["scan", "unscan"])
Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def without_beam(monkeypatch):
    monkeypatch.setattr(converting, "run_items", here)
    monkeypatch.setattr(verifying, "run_items", here)


def whole_numbers(weights: Arrays, modules=MODULES, rank: int = RANK, seed: int = 3) -> Arrays:
    """Factors whose products are exact."""
    random = np.random.default_rng(seed)
    return {name: random.integers(-2, 3, factor.shape).astype(np.float32)
            for name, factor in factors(weights, modules, rank).items()}  # fmt: skip


def adapter(folder: Path, tensors: Arrays, modules=MODULES, rank: int = RANK, alpha: float = ALPHA, **config: Any):
    return str(write_adapter(folder / "adapter", adapter_config(modules, rank, alpha, **config), tensors))


def mode(scan: bool) -> str:
    return "--scan-layers" if scan else "--no-scan-layers"


def convert(source: Path, lora: str, output: Path, *args: str) -> None:
    """Converts in small pieces and verifies."""
    small = ("--chunk-bytes", "160")
    assert main(["convert", "--source", str(source), "--lora", lora, "--output", str(output), *small, *args]) == 0
    assert main(["verify", "--source", str(source), "--output", str(output)]) == 0


@pytest.mark.by_turns
@pairs(dtype=("bfloat16", "float32"), lanes=("interleaved", "split"), scan=(True, False))
def test_merged_exactly_with_rope_lanes_and_query_factor(dtype, lanes, scan, tmp_path):
    weights = llama_tensors(SIZES)
    source = write_checkpoint(tmp_path / "hf", llama_config(SIZES), weights)
    modules = (*MODULES, "lm_head")
    tensors = whole_numbers(weights, modules)
    lora = adapter(tmp_path, tensors, modules)
    convert(source, lora, tmp_path / "out", "--dtype", dtype, mode(scan), "--rope-lanes", lanes)
    wanted = merged(weights, tensors, dict.fromkeys(modules, ALPHA / RANK))
    tree = llama_expected(wanted, SIZES, scan, dtype, interleaved=lanes == "interleaved")
    assert_restores(tmp_path / "out", tree)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_random_factors_agree_with_float32(dtype, tmp_path):
    weights = llama_tensors(SIZES)
    source = write_checkpoint(tmp_path / "hf", llama_config(SIZES), weights)
    tensors = factors(weights, MODULES, RANK, dtype=dtype)
    lora = adapter(tmp_path, tensors, alpha=7)
    convert(source, lora, tmp_path / "out", "--dtype", "float32")
    found = restore(tmp_path / "out")
    for key, array in llama_expected(merged(weights, tensors, dict.fromkeys(MODULES, 7 / 3)), dtype="float32").items():
        np.testing.assert_allclose(found[key], array, rtol=1e-6, atol=2e-6, err_msg=key)


def test_patterns_and_rslora_as_peft_resolves_them(tmp_path):
    """The first pattern that matches the end of a name after a dot wins; sqrt of the pattern's own rank."""
    weights = llama_tensors(SIZES)
    source = write_checkpoint(tmp_path / "hf", llama_config(SIZES), weights)
    ranks = {module: 4 if "layers.1." in module else 16 if module.endswith("down_proj") else 1 for module in MODULES}
    alphas = {module: 8 if module.endswith("q_proj") else 2 for module in MODULES}
    tensors: Arrays = {}
    for module in MODULES:
        tensors |= whole_numbers(weights, [module], ranks[module], seed=len(tensors))
    patterns = {
        "rank_pattern": {r"layers\.1\..*": 4, "down_proj": 16, "layers.1.mlp.down_proj": 9, "proj": 5},
        "alpha_pattern": {"^model.layers.[0-9].self_attn.q_proj": 8},
    }
    lora = adapter(tmp_path, tensors, rank=1, alpha=2, use_rslora=True, **patterns)
    convert(source, lora, tmp_path / "out")
    scales = {module: alphas[module] / ranks[module] ** 0.5 for module in MODULES}
    assert_restores(tmp_path / "out", llama_expected(merged(weights, tensors, scales)))


def test_some_layers_some_modules_and_a_named_adapter(tmp_path):
    weights = llama_tensors(SIZES)
    source = write_checkpoint(tmp_path / "hf", llama_config(SIZES), weights)
    modules = ("model.layers.1.self_attn.v_proj", "model.layers.2.mlp.down_proj")
    tensors = whole_numbers(weights, modules)
    named = {name.replace(".weight", ".default.weight"): one for name, one in tensors.items()}
    lora = adapter(tmp_path, named, modules, layers_to_transform=[1, 2])
    convert(source, lora, tmp_path / "out")
    assert_restores(tmp_path / "out", llama_expected(merged(weights, tensors, dict.fromkeys(modules, 2.0))))


def test_embedding_padded_and_its_head(tmp_path):
    """An embedding's factors are stored the other way round."""
    weights = llama_tensors(SIZES)
    source = write_checkpoint(tmp_path / "hf", llama_config(SIZES), weights)
    random = np.random.default_rng(5)
    a = random.integers(-2, 3, (RANK, SIZES.vocab)).astype(np.float32)
    b = random.integers(-2, 3, (SIZES.embed, RANK)).astype(np.float32)
    stem = f"{PREFIX}model.embed_tokens"
    tensors = {f"{stem}.lora_embedding_A": a, f"{stem}.lora_embedding_B": b}
    lora = adapter(tmp_path, tensors, ["model.embed_tokens"])
    convert(source, lora, tmp_path / "out", "--vocab-size", "40")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].astype(np.float32) + 2 * (b @ a).T
    assert_restores(tmp_path / "out", llama_expected(weights, vocab=40))


@MODES
def test_experts_one_by_one(scan, tmp_path):
    weights = qwen3_moe_tensors(SIZES)
    source = write_checkpoint(tmp_path / "hf", qwen3_moe_config(SIZES), weights)
    modules = [name.removesuffix(".weight") for name in weights if ".experts." in name and ".layers.2." not in name]
    tensors = whole_numbers(weights, modules)
    convert(source, adapter(tmp_path, tensors, modules), tmp_path / "out", mode(scan))
    wanted = merged(weights, tensors, dict.fromkeys(modules, 2.0))
    assert_restores(tmp_path / "out", qwen3_moe_expected(wanted, SIZES, scan))


def fused_adapter(folder: Path, old: bool, seed: int = 6) -> tuple[str, Arrays]:
    """An adapter of parameters as PEFT saves it, and what it adds, by name of the parameter.

    Args:
      old: as PEFT 0.17 took them, which called the rows of such a parameter its inputs.
    """
    random = np.random.default_rng(seed)
    tensors: Arrays = {}
    added: Arrays = {}
    count, both = SIZES.experts, {"gate_up_proj": (2 * SIZES.expert_mlp, 10), "down_proj": (10, SIZES.expert_mlp)}
    ranks = {"gate_up_proj": 2, "down_proj": 4}
    for layer in (0, 2):
        module = f"model.layers.{layer}.mlp.experts"
        # PEFT wraps the parameter that it meets first, so that is the inner one.
        for name, wrapper in (("gate_up_proj", f"{module}.base_layer"), ("down_proj", module)):
            (rows, cols), rank = both[name], ranks[name]
            out, into = (cols, rows) if old else (rows, cols)
            a = random.integers(-2, 3, (count * rank, into)).astype(np.float32)
            b = random.integers(-2, 3, (out, rank * count)).astype(np.float32)
            tensors[f"{PREFIX}{wrapper}.lora_A.weight"], tensors[f"{PREFIX}{wrapper}.lora_B.weight"] = a, b
            spec = "ore,eri->eio" if old else "ore,eri->eoi"
            product = np.einsum(spec, b.reshape(out, rank, count), a.reshape(count, rank, into))
            added[f"{module}.{name}"] = 8 / rank * product
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = adapter(folder, tensors, (), 2, 8, target_parameters=parameters, rank_pattern={"down_proj": 4})
    return lora, added


@MODES
@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_parameters_of_experts_in_one_tensor(old, scan, tmp_path):
    weights = qwen3_moe_tensors(SIZES, fused=True)
    source = write_checkpoint(tmp_path / "hf", qwen3_moe_config(SIZES), weights)
    lora, added = fused_adapter(tmp_path, old)
    convert(source, lora, tmp_path / "out", mode(scan))
    wanted = weights | {name: weights[name].astype(np.float32) + product for name, product in added.items()}
    assert_restores(tmp_path / "out", qwen3_moe_expected(wanted, SIZES, scan, fused=True))


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_parameters_of_experts_that_the_checkpoint_holds_one_by_one(old, tmp_path):
    weights = qwen3_moe_tensors(SIZES)
    source = write_checkpoint(tmp_path / "hf", qwen3_moe_config(SIZES), weights)
    lora, added = fused_adapter(tmp_path, old)
    convert(source, lora, tmp_path / "out")
    wanted = dict(weights)
    for name, product in added.items():
        module, _, last = name.rpartition(".")
        for expert in range(SIZES.experts):
            parts = np.split(product[expert], 2) if last == "gate_up_proj" else [product[expert]]
            for own, part in zip(("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",), parts, strict=True):
                key = f"{module}.{expert}.{own}.weight"
                wanted[key] = weights[key].astype(np.float32) + part
    assert_restores(tmp_path / "out", qwen3_moe_expected(wanted, SIZES))


@MODES
def test_into_dequantised_fp8(scan, tmp_path):
    tensors: Arrays = {}
    plain: Arrays = {}
    for name, weight in llama_tensors(SIZES).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = plain[name] = weight
            continue
        # Powers of two, so that codes times scale plus whole numbers is exact in float32.
        own = per_block(name, np.exp2(np.round(weight.astype(np.float32))), 4)
        own[f"{name}_scale_inv"] = np.exp2(np.round(np.log2(own[f"{name}_scale_inv"]))).astype(np.float32)
        tensors |= own
        grid = own[f"{name}_scale_inv"].repeat(4, 0).repeat(4, 1)[: weight.shape[0], : weight.shape[1]]
        plain[name] = own[name].astype(np.float32) * grid
    config = llama_config(SIZES, quantization_config={
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [4, 4]})  # fmt: skip
    source = write_checkpoint(tmp_path / "hf", config, tensors)
    added = whole_numbers(plain)
    convert(source, adapter(tmp_path, added), tmp_path / "out", mode(scan))
    wanted = merged(plain, added, dict.fromkeys(MODULES, 2.0))
    assert_restores(tmp_path / "out", llama_expected(wanted, SIZES, scan))


def test_dtype_source_keeps_what_the_base_has(tmp_path):
    weights = llama_tensors(SIZES, dtype="float32")
    source = write_checkpoint(tmp_path / "hf", llama_config(SIZES), weights)
    tensors = whole_numbers(weights)
    convert(source, adapter(tmp_path, tensors), tmp_path / "out", "--dtype", "source")
    found = restore(tmp_path / "out")
    for key, array in llama_expected(merged(weights, tensors, dict.fromkeys(MODULES, 2.0)), dtype="float32").items():
        assert found[key].dtype == np.float32
        # Added in float32, which an adapter of whole numbers does not make exact here.
        np.testing.assert_allclose(found[key], array, rtol=1e-6, atol=1e-6)


def test_tensors_that_the_adapter_holds_whole_take_the_bases_place(tmp_path):
    weights = llama_tensors(SIZES)
    source = write_checkpoint(tmp_path / "hf", llama_config(SIZES), weights)
    random = np.random.default_rng(8)
    head = random.normal(size=weights["lm_head.weight"].shape).astype(np.float32)
    norm = random.normal(size=(SIZES.embed,)).astype(np.float32)
    modules = ("model.layers.0.self_attn.q_proj",)
    tensors = whole_numbers(weights, modules)
    whole = {f"{PREFIX}lm_head.weight": head, f"{PREFIX}model.norm.modules_to_save.default.weight": norm}
    lora = adapter(tmp_path, tensors | whole, modules, modules_to_save=["lm_head", "norm"])
    convert(source, lora, tmp_path / "out")
    wanted = merged(weights, tensors, dict.fromkeys(modules, 2.0)) | {"lm_head.weight": head, "model.norm.weight": norm}
    assert_restores(tmp_path / "out", llama_expected(wanted))
    manifest = json.loads((tmp_path / "out" / "0" / "items" / "tensorferry.manifest.json").read_text())
    assert manifest["adapter"]["replaced"] == ["lm_head.weight", "model.norm.weight"]
    assert manifest["adapter"]["modules"] == {"model.layers.0.self_attn.q_proj.weight": {"rank": 3, "scale": 2.0}}
    assert manifest["adapter"]["path"] == lora
