"""Carried FP8: codes times their scale, spread as MaxText's loader spreads it, are the dequantised weights."""

import hashlib
import itertools
import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_memory import Arrays, run_plan
from maxtext_scales import maxtext_dequantises
from oracle_data import MODES, model, values
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions, make_dims
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.lowbit.quantisation import resolve
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.conversion_plan import Plan, PlanOptions, make_plan
from tensorferry.mappings.rules.compiled import compile_rule, source_shape
from tensorferry.mappings.rules.dims import Concat
from tensorferry.mappings.rules.rule import Block, Rule
from tensorferry.transforms.ops import Pad, Scale, Shift

FP8 = ml_dtypes.float8_e4m3fn
FACTOR = 0.3
BLOCKS = {"layer": Block("layers", "layers_{layer}")}


@dataclass(frozen=True)
class Shape:
    """A way in which weights go into arrays.

    Attributes:
      sources: tensor name (with ``{layer}`` …) to its axes, as lists of dims.
      rules: the family's rules.
    """

    sources: dict[str, tuple[tuple[str, ...], ...]]
    rules: tuple[Rule, ...]


def one(source: str, layout: str, target: str = "params-decoder-[layer]-w-kernel", **more) -> Rule:
    return Rule(source, target, layout, **more)


W = "l.{layer}.w.weight"
SHAPES = {
    "transposed": Shape({W: (("mlp",), ("embed",))}, (one(W, "mlp embed -> embed layer mlp"),)),
    "heads": Shape(
        {W: (("heads", "lane"), ("embed",))},
        (one(W, "(heads lane) embed -> embed layer heads lane", ops=(Scale(FACTOR),)),),
    ),
    "out": Shape({W: (("embed",), ("heads", "lane"))}, (one(W, "embed (heads lane) -> heads layer lane embed"),)),
    "lanes permuted": Shape(
        {W: (("heads", "half", "pair"), ("embed",))},
        (one(W, "(heads half pair) embed -> embed layer heads (pair half)"),),
    ),
    "axes merged": Shape(
        {W: (("heads", "lane"), ("embed",))}, (one(W, "(heads lane) embed -> lane layer (embed heads)"),)
    ),
    "experts": Shape(
        {"l.{layer}.e.{expert}.w.weight": (("mlp",), ("embed",))},
        (one("l.{layer}.e.{expert}.w.weight", "mlp embed -> expert layer embed mlp"),),
    ),
    "fused halves": Shape(
        {"l.{layer}.e.gate_up": (("expert",), ("embed",), ("part", "mlp"))},
        (one("l.{layer}.e.gate_up", "expert embed (part mlp) -> expert layer embed mlp",
             "params-decoder-[layer]-moe-{part}"),),
    ),
    "fused interleaved": Shape(
        {"l.{layer}.e.gate_up": (("expert",), ("embed",), ("mlp", "part"))},
        (one("l.{layer}.e.gate_up", "expert embed (mlp part) -> expert layer embed mlp",
             "params-decoder-[layer]-moe-{part}"),),
    ),
    "split in uneven parts": Shape(
        {W: (("qkv",), ("embed",))},
        (one(W, "qkv.q(heads lane) embed -> embed layer heads lane", "params-[layer]-query-kernel",
             ops=(Scale(FACTOR),)),
         one(W, "qkv.k(lane) embed -> embed layer lane", "params-[layer]-key-kernel"),
         one(W, "qkv.v(lane2) embed -> embed layer lane2", "params-[layer]-value-kernel")),
    ),
    "joined in uneven parts": Shape(
        {"l.{layer}.a.weight": (("groups", "lane"), ("embed",)),
         "l.{layer}.b.weight": (("groups", "lane2"), ("embed",))},
        (one("l.{layer}.a.weight", "(groups lane) embed -> embed layer (groups ab.a(lane))"),
         one("l.{layer}.b.weight", "(groups lane2) embed -> embed layer (groups ab.b(lane2))")),
    ),
    "joined by name": Shape(
        {"l.{layer}.{part}.weight": (("mlp",), ("embed",))},
        (one("l.{layer}.{part}.weight", "mlp embed -> embed layer (part mlp)"),),
    ),
    "interleaved by name": Shape(
        {"l.{layer}.{part}.weight": (("mlp",), ("embed",))},
        (one("l.{layer}.{part}.weight", "mlp embed -> embed layer (mlp part)"),),
    ),
    "padded": Shape(
        {"head.weight": (("vocab",), ("embed",))},
        (one("head.weight", "vocab embed -> embed vocab", "params-logits_dense-kernel", ops=(Pad("vocab", 24),)),),
    ),
}  # fmt: skip

sizes = st.fixed_dictionaries(
    {
        **{dim: st.integers(1, 12) for dim in ("mlp", "embed", "lane", "lane2", "vocab")},
        **{dim: st.integers(1, 4) for dim in ("heads", "pair")},
        "groups": st.integers(2, 4),
    }
)


@dataclass(frozen=True)
class Case:
    """A checkpoint in memory: stored arrays, the same weights dequantised, the family."""

    family: Family
    stored: dict[str, np.ndarray]
    config: dict
    weights: dict[str, np.ndarray]


def dims_of(lengths: dict[str, int]) -> dict:
    """Every dim of the shapes above."""
    heads, lane, lane2 = lengths["heads"], lengths["lane"], lengths["lane2"]
    return {
        **lengths,
        "half": 3,
        "layer": range(2),
        "expert": range(3),
        "part": ("wi_0", "wi_1"),
        "qkv": Concat.of(q=heads * lane, k=lane, v=lane2),
        "ab": Concat.of(a=lane, b=lane2),
    }


def made(shape: Shape, lengths: dict[str, int], kind: str, block: tuple[int, int], seed: int, dtype: str) -> Case:
    """Quantised tensors of every source, scales chosen at random; the weights by indexing one element at a time."""
    rng = np.random.default_rng(seed)
    dims = make_dims(dims_of(lengths))
    family = Family("test", dims, BLOCKS, shape.rules)
    stored, weights = {}, {}
    for name in (n for rule in shape.rules for n in names_of(rule, dims)):
        axes = shape.sources[next(r.source for r in shape.rules if name in names_of(r, dims))]
        lengths_of_axes = [math.prod(size_of(dims, d) for d in axis) for axis in axes]
        codes = rng.integers(0, 0x7E, lengths_of_axes, np.uint8) | (rng.integers(0, 2, lengths_of_axes, np.uint8) << 7)
        blocks = blocks_of(kind, lengths_of_axes, block)
        grid = [-(-n // b) for n, b in zip(lengths_of_axes, blocks, strict=True)]
        scale = (rng.random(grid) + 0.5).astype(dtype)
        index = np.ix_(*(np.arange(n) // b for n, b in zip(lengths_of_axes, blocks, strict=True)))
        stored[name] = codes.view(FP8)
        stored[scale_name(name)] = scale.reshape(()) if kind == "tensor" else scale
        weights[name] = codes.view(FP8).astype(np.float32) * scale.astype(np.float32)[index]
    return Case(family, stored, config_of(kind, block), weights)


def names_of(rule: Rule, dims) -> list[str]:
    words = [word for word in ("layer", "expert", "part") if f"{{{word}}}" in rule.source]
    labels = itertools.product(*(dims[word].labels for word in words))
    return [rule.source.format(**dict(zip(words, some, strict=True))) for some in labels]


def size_of(dims, dim: str) -> int:
    return dims[dim].length if isinstance(dims[dim], Concat) else dims.size(dim)


def scale_name(name: str) -> str:
    return name.removesuffix(".weight") + ".weight_scale" if name.endswith(".weight") else name + "_scale"


def blocks_of(kind: str, lengths: list[int], block: tuple[int, int]) -> list[int]:
    """Block length per axis; every leading axis (experts) counts one by one, except for one scale for all."""
    if kind == "tensor":
        return lengths
    if kind == "channel":
        return [1] * (len(lengths) - 1) + lengths[-1:]
    last = (1, block[1]) if kind == "group" else block
    return [1] * (len(lengths) - 2) + list(last)


def config_of(kind: str, block: tuple[int, int]) -> dict:
    if kind == "block":
        return {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    weights = {"num_bits": 8, "type": "float", "strategy": kind, "symmetric": True}
    if kind == "group":
        weights["group_size"] = block[1]
    return {"quantization_config": {"quant_method": "compressed-tensors",
                                    "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}}  # fmt: skip


def headers(arrays: Arrays) -> dict[str, StoredTensor]:
    return {n: StoredTensor(n, array.dtype.name, array.shape, "memory", 0) for n, array in arrays.items()}


def plan_of(case: Case, dtype: str, scan: bool, layout: str = "declared", chunk_bytes: int = 64 << 20) -> Plan:
    found = resolve(headers(case.stored), case.config)
    assert not found.problems, [str(p) for p in found.problems]
    return make_plan(case.family, found.logical, PlanOptions(scan, dtype, chunk_bytes, scale_layout=layout))


def plain_plan(case: Case, scan: bool) -> Plan:
    tensors = {name: LogicalTensor.plain(stored) for name, stored in headers(case.weights).items()}
    return make_plan(case.family, tensors, PlanOptions(scan, "float32"))


def declared_form(codes: np.ndarray, scale: np.ndarray, scan: bool) -> np.ndarray:
    """A scale per layer (and expert) as MaxText's FP8 models mean it: those axes in the weight's order, no other.

    The loader cannot multiply a scale ``[layers]`` by a weight ``[embed, layers, …]``; the FP8 model can.
    """
    if scan and scale.shape == (2,) and codes.ndim > 1:
        return scale.reshape(1, 2, *[1] * (codes.ndim - 2))
    return scale


CHOICES = {
    "shape": st.sampled_from(sorted(SHAPES)),
    "lengths": sizes,
    "kind": st.sampled_from(["tensor", "channel", "group", "block"]),
    "block": st.tuples(st.integers(2, 8), st.integers(2, 8)),
    "scan": st.booleans(),
    "layout": st.sampled_from(["declared", "broadcast"]),
    "chunk_bytes": st.sampled_from([64 << 20, 40]),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
    "seed": st.integers(0, 99),
}


@settings(max_examples=300, deadline=None)
@given(**CHOICES)
def test_codes_times_scale_are_the_weights(shape, lengths, kind, block, scan, layout, chunk_bytes, dtype, seed):
    case = made(SHAPES[shape], lengths, kind, block, seed, dtype)
    found = run_plan(plan_of(case, "source", scan, layout, chunk_bytes), case.stored)
    plain = plain_plan(case, scan)
    wanted, folded = run_plan(plain, case.weights), folded_keys(plain)
    assert found.keys() == wanted.keys() | {f"{key}_scale" for key in wanted}
    for key, weights in wanted.items():
        codes, scale = found[key], found[f"{key}_scale"]
        assert codes.dtype == FP8
        if layout == "broadcast":
            assert scale.ndim == codes.ndim
        else:
            scale = declared_form(codes, scale, scan)
        again = maxtext_dequantises(codes, scale)
        if key in folded:
            assert scale.dtype == np.float32
            np.testing.assert_allclose(again, weights, rtol=3e-7)
        else:
            assert scale.dtype == dtype
            np.testing.assert_array_equal(again, weights)


def folded_keys(plan: Plan) -> set[str]:
    """Arrays whose rule multiplies by a factor, which the scale takes up in float32."""
    uses = ((array.spec.key, use.compiled.rule.ops) for array in plan.arrays for use in array.uses)
    return {key for key, ops in uses if any(isinstance(op, Scale) for op in ops)}


@settings(max_examples=60, deadline=None)
@given(**CHOICES)
def test_dequantised_arrays_are_the_weights(shape, lengths, kind, block, scan, layout, chunk_bytes, dtype, seed):
    case = made(SHAPES[shape], lengths, kind, block, seed, dtype)
    found = run_plan(plan_of(case, "float32", scan, layout, chunk_bytes), case.stored)
    for key, weights in run_plan(plain_plan(case, scan), case.weights).items():
        np.testing.assert_array_equal(found[key], weights)


# ---- against MaxText's own trees and values

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0},
}


def llama_headers(family: Family, block: int | None) -> dict[str, StoredTensor]:
    """An FP8 checkpoint of Llama 3.1 8B: every projection and the head quantised."""
    tensors: dict[str, StoredTensor] = {}

    def add(name: str, dtype: str, shape: tuple[int, ...]) -> None:
        tensors[name] = StoredTensor(name, dtype, shape, "memory", 0)

    for rule in (compile_rule(rule, family.dims) for rule in family.plain_rules(True)):
        shape = source_shape(rule)
        for name in rule.sources():
            quantised = name.endswith("_proj.weight") or name == "lm_head.weight"
            add(name, "float8_e4m3fn" if quantised else "bfloat16", shape)
            if quantised:
                ending, grid = (
                    ("weight_scale_inv", tuple(-(-n // block) for n in shape)) if block else ("weight_scale", ())
                )
                add(name.removesuffix("weight") + ending, "float32", grid)
    return tensors


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "block"), [("llama3.1-8b+fp8", None), ("llama3.1-8b+fp8block", 128)])
def test_declared_scales_are_those_of_maxtexts_fp8_models(name, block, mode):
    tree = model(name).trees[mode]
    family = make_family(Config(LLAMA_8B), {"lm_head.weight"}, FamilyOptions(scan_layers=mode == "scan"))
    quant = {"quant_method": "fp8"} | ({"weight_block_size": [block, block]} if block else {})
    found = resolve(llama_headers(family, block), {"quantization_config": quant})
    assert not found.problems
    plan = make_plan(family, found.logical, PlanOptions(mode == "scan", "source"))
    assert not plan.problems
    assert {a.name: a.spec.shape for a in plan.arrays} == tree.shapes
    # MaxText declares the embedding in its weight dtype; checkpoints keep it in bfloat16, and so do we.
    dtypes = tree.dtypes | {"params-token_embedder-embedding": "bfloat16"}
    assert {a.name: a.spec.dtype for a in plan.arrays} == dtypes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [None, 128])
def test_broadcast_scales_have_their_weights_rank_and_any_loader_multiplies_them(block, mode):
    family = make_family(Config(LLAMA_8B), {"lm_head.weight"}, FamilyOptions(scan_layers=mode == "scan"))
    quant = {"quant_method": "fp8"} | ({"weight_block_size": [block, block]} if block else {})
    found = resolve(llama_headers(family, block), {"quantization_config": quant})
    plan = make_plan(family, found.logical, PlanOptions(mode == "scan", "source", scale_layout="broadcast"))
    shapes = {a.name: a.spec.shape for a in plan.arrays}
    scales = {name: shape for name, shape in shapes.items() if name.endswith("_scale")}
    assert len(scales) == (8 if mode == "scan" else 7 * 32 + 1)
    for name, scale in scales.items():
        weight = shapes[name.removesuffix("_scale")]
        assert len(scale) == len(weight)
        assert all(n % m == 0 for n, m in zip(weight, scale, strict=True))
        assert math.prod(scale) <= math.prod(weight) // (128 * 128 if block else 4096 * 1024)


def oracle_case(mode: str) -> tuple[Family, dict[str, LogicalTensor]]:
    checkpoint = values("qwen3.5-35b-a3b-fp8")
    found = resolve(headers(checkpoint.tensors), checkpoint.config)
    assert not found.problems
    options = FamilyOptions(scan_layers=mode == "scan", vocab_size=512, match_maxtext=True)
    return make_family(Config(checkpoint.config), found.logical, options), found.logical


# Cut into small chunks, test_families.py compares the same arrays.
@pytest.mark.parametrize("chunk_bytes", [64 << 20, pytest.param(5000, marks=pytest.mark.slow)], ids=["whole", "cut"])
@pytest.mark.parametrize("mode", MODES)
def test_carried_arrays_equal_maxtexts_bit_for_bit(mode, chunk_bytes):
    """Qwen3.5 is the one model for which MaxText's own converter carries FP8."""
    family, tensors = oracle_case(mode)
    plan = make_plan(family, tensors, PlanOptions(mode == "scan", "source", chunk_bytes))
    found = run_plan(plan, values("qwen3.5-35b-a3b-fp8").tensors)
    expected = values("qwen3.5-35b-a3b-fp8").expected[mode].arrays
    told = {k: {"shape": list(a.shape), "dtype": a.dtype.name, "sha256": hashlib.sha256(a.tobytes()).hexdigest()}
            for k, a in found.items()}  # fmt: skip
    assert sorted(told) == sorted(expected)
    assert [key for key in expected if told[key] != expected[key]] == []
    assert sum(key.endswith("kernel_scale") for key in told) > 0


@pytest.mark.parametrize("mode", MODES)
def test_maxtexts_arrays_are_what_dequantising_gives(mode):
    family, tensors = oracle_case(mode)
    stored = values("qwen3.5-35b-a3b-fp8").tensors
    carried = run_plan(make_plan(family, tensors, PlanOptions(mode == "scan", "source")), stored)
    plain = run_plan(make_plan(family, tensors, PlanOptions(mode == "scan", "float32")), stored)
    for key, weights in plain.items():
        scale = carried.get(f"{key}_scale")
        again = carried[key].astype(np.float32) if scale is None else maxtext_dequantises(carried[key], scale)
        np.testing.assert_array_equal(again, weights, err_msg=key)


# ---- notes and refusals


def case_with(rules: tuple[Rule, ...], sources: dict, block: tuple[int, int] = (4, 4), **lengths: int) -> Case:
    every = {"mlp": 8, "embed": 12, "lane": 6, "lane2": 5, "vocab": 8, "heads": 4, "groups": 2, "pair": 2}
    return made(Shape(sources, rules), every | lengths, "block", block, 1, "float32")


def test_expansion_is_told_with_its_cost():
    """12 rows of 2 heads of 6 in blocks of 4: a block lies across two heads, so entries of 2, 6 instead of 3."""
    shape = SHAPES["heads"]
    notes = plan_of(case_with(shape.rules, shape.sources, heads=2), "source", True).notes
    assert notes == (
        "params-decoder-layers-w-kernel_scale: its blocks would not be an even grid of the array, so "
        "heads\u00b7lane=12 in entries of 2 instead of 4: 36 bytes more for each source tensor",
    )
    assert plan_of(case_with(shape.rules, shape.sources, lane=4), "source", True).notes == ()


def test_a_ragged_axis_is_cut_into_even_parts_of_blocks():
    """576 in blocks of 128 is 4.5 blocks, or 9 halves; 12 in blocks of 8 is 3 halves."""
    case = case_with(SHAPES["transposed"].rules, SHAPES["transposed"].sources, (8, 128), mlp=12, embed=576)
    plan = plan_of(case, "source", True)
    assert [a.spec.shape for a in plan.arrays] == [(576, 2, 12), (9, 2, 3)]
    (note,) = plan.notes
    assert note.endswith(
        "so mlp=12 in entries of 4 instead of 8 and embed=576 in entries of 64 instead of 128: 68 bytes more for each "
        "source tensor"
    )


def test_a_rule_that_shifts_is_not_carried():
    rules = (one(W, "mlp embed -> embed layer mlp", ops=(Shift(1.0),)),)
    plan = plan_of(case_with(rules, {W: (("mlp",), ("embed",))}), "source", True)
    assert [(a.name, a.spec.dtype) for a in plan.arrays] == [("params-decoder-layers-w-kernel", "bfloat16")]
    assert plan.notes == (
        "params-decoder-layers-w-kernel: dequantised to bfloat16, not carried: its rule does more than scale",
    )


def test_an_array_of_quantised_and_plain_layers_is_not_carried_but_unrolled_layers_are():
    case = case_with(SHAPES["transposed"].rules, SHAPES["transposed"].sources)
    case.stored["l.1.w.weight"] = case.weights["l.1.w.weight"].astype(ml_dtypes.bfloat16)
    del case.stored["l.1.w.weight_scale"]
    stacked, unrolled = plan_of(case, "source", True), plan_of(case, "source", False)
    assert [a.spec.dtype for a in stacked.arrays] == ["bfloat16"]
    assert "not quantised alike" in stacked.notes[0]
    assert {a.name.removeprefix("params-decoder-"): a.spec.dtype for a in unrolled.arrays} == {
        "layers_0-w-kernel": "float8_e4m3fn", "layers_0-w-kernel_scale": "float32", "layers_1-w-kernel": "bfloat16",
    }  # fmt: skip
    found = run_plan(unrolled, case.stored)
    codes, scale = (found[f"params.params.decoder.layers_0.w.kernel{end}"] for end in ("", "_scale"))
    np.testing.assert_array_equal(maxtext_dequantises(codes, scale).T, case.weights["l.0.w.weight"])


def test_a_tensor_is_not_carried_in_part():
    rules = (
        one(W, "qkv.q(heads lane) embed -> embed layer heads lane", "params-[layer]-query-kernel", ops=(Shift(1.0),)),
        one(W, "qkv.k(lane) embed -> embed layer lane", "params-[layer]-key-kernel"),
        one(W, "qkv.v(lane2) embed -> embed layer lane2", "params-[layer]-value-kernel"),
    )
    problems = plan_of(case_with(rules, {W: (("qkv",), ("embed",))}), "source", True).problems
    assert [p.name for p in problems] == ["l.0.w.weight", "l.1.w.weight"]
    assert "parts go into arrays that are dequantised" in str(problems[0])


def test_what_cannot_be_carried_is_named_with_its_scheme():
    tensors = {
        "l.0.w.weight": ("uint8", (8, 16)),
        "l.0.w.weight_scale": ("float8_e4m3fn", (8, 2)),
        "l.0.w.weight_scale_2": ("float32", ()),
    }
    stored = {n: StoredTensor(n, dtype, shape, "model.safetensors", 0) for n, (dtype, shape) in tensors.items()}
    found = resolve(stored, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}})
    dims = make_dims({"mlp": 8, "embed": 32, "layer": range(1)})
    family = Family("test", dims, BLOCKS, (one(W, "mlp embed -> embed layer mlp"),))
    (problem,) = make_plan(family, found.logical, PlanOptions(True, "source")).problems
    assert str(problem).startswith("l.0.w.weight (in model.safetensors): expected FP8 codes with a scale")
    assert "nvfp4 1x16, scale l.0.w.weight_scale" in str(problem)
    assert "--dtype bfloat16" in str(problem)


@pytest.mark.parametrize(("kind", "shape"), [("block", (3, 6)), ("tensor", (1, 1)), ("channel", (1, 24))])
def test_scales_of_a_padded_vocabulary(kind, shape):
    """24 of which 8 are stored, in blocks of 4; one scale for all serves the padding too."""
    lengths = {"mlp": 8, "embed": 12, "lane": 6, "lane2": 5, "vocab": 8, "heads": 4, "groups": 2, "pair": 2}
    case = made(SHAPES["padded"], lengths, kind, (4, 4), 1, "float32")
    found = run_plan(plan_of(case, "source", True, "broadcast"), case.stored)
    codes, scale = (found[f"params.params.logits_dense.kernel{end}"] for end in ("", "_scale"))
    assert scale.shape == shape
    again = maxtext_dequantises(codes, scale)
    np.testing.assert_array_equal(again[:, :8], case.weights["head.weight"].T)
    assert not again[:, 8:].any()


@pytest.mark.parametrize(("layout", "shape"), [("declared", (3, 2, 4, 6)), ("broadcast", (3, 2, 2, 1))])
def test_blocks_across_heads_are_kept_apart_where_maxtext_declares_so(layout, shape):
    """A block of 12 holds two heads of 6; MaxText's models keep axes that are shorter than a block."""
    case = case_with(SHAPES["heads"].rules, SHAPES["heads"].sources, (12, 4))
    shapes = {a.name.rpartition("-")[2]: a.spec.shape for a in plan_of(case, "source", True, layout).arrays}
    assert shapes == {"kernel": (12, 2, 4, 6), "kernel_scale": shape}
