"""Every family against MaxText's own trees and converted values, in both modes, and there and back."""

import hashlib
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from family_cases import Case
from in_memory import convert, convert_back, load_region, logical, run_plan
from oracle_data import MODES, Tree, Values, model_names, value_names, values
from oracle_models import case_of, compiled_rules, family_of, headers, oracle
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.lowbit.quantisation import resolve
from tensorferry.mappings.lowbit.schemes import scheme_of
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.account import take_account
from tensorferry.mappings.plan.conversion_plan import PlanOptions, make_plan
from tensorferry.mappings.plan.target_arrays import TargetArray, target_arrays
from tensorferry.mappings.rules.compiled import compile_rule
from tensorferry.mappings.words.problems import PlanError


def sources_of(array: TargetArray) -> frozenset[str]:
    uses = [use for use in array.uses if use.compiled.rule.value is None]
    return frozenset(u.source_name(at) for u in uses for at in u.compiled.dims.positions(u.compiled.stack))


def tree_cases() -> list[Any]:
    found = []
    for name in model_names():
        refused = case_of(name).refused
        marks = [pytest.mark.skip(reason=refused)] if refused else []
        found += [pytest.param(name, mode, marks=marks, id=f"{name}-{mode}") for mode in MODES]
    return found


@pytest.mark.parametrize(("name", "mode"), tree_cases())
def test_tree_equals_maxtexts(name: str, mode: str) -> None:
    """Names, collections and shapes of every array, and which tensors each is made of."""
    trees = oracle(name).trees
    if mode not in trees:
        pytest.skip("MaxText has no such tree")
    tree = trees[mode]
    if fp8_names(tree):
        pytest.skip("see test_fp8_tree_equals_maxtexts")
    scan = mode == "scan"
    family = family_of(name, tree.names | set(case_of(name).names), scan_layers=scan)
    rules = compiled_rules(family, scan)
    constants = [compile_rule(rule, family.dims) for rule in family.plain_constants(scan)]
    arrays, problems = target_arrays([*rules, *constants], {}, "bfloat16", 64 << 20)
    assert not problems
    ours = {array.name: array for array in arrays}
    wanted = {_moved(parameter, case_of(name)): parameter for parameter in tree.shapes}
    assert sorted(ours) == sorted(wanted)
    assert {n: a.spec.shape for n, a in ours.items()} == {n: tree.shapes[p] for n, p in wanted.items()}
    for ours_name, parameter in wanted.items():
        if parameter in tree.sources:
            assert sources_of(ours[ours_name]) == tree.sources[parameter], ours_name
    account = take_account(rules, headers(rules), family)
    assert not account.problems


def fp8_names(tree: Tree) -> frozenset[str]:
    """Weights that have a scale beside them."""
    return frozenset(name.removesuffix("_scale_inv") for name in tree.names if name.endswith("_scale_inv"))


# Unscanned, names, shapes and dtypes of the smaller one are test_values_equal_maxtexts's too.
FP8_TREES = [
    pytest.param(name, mode, marks=[] if (name, mode) == ("qwen3.5-35b-a3b-fp8", "scan") else pytest.mark.slow)
    for name in ("qwen3.5-35b-a3b-fp8", "qwen3.5-397b-a17b-fp8")
    for mode in MODES
]


@pytest.mark.parametrize(("name", "mode"), FP8_TREES)
def test_fp8_tree_equals_maxtexts(name: str, mode: str) -> None:
    """Carried codes and their scales: names, shapes and dtypes of every array."""
    tree = oracle(name).trees[mode]
    family = family_of(name, tree.names, scan_layers=mode == "scan")
    stored, quantised = {}, fp8_names(tree)
    for tensor in headers(compiled_rules(family, mode == "scan")).values():
        dtype = "float8_e4m3fn" if tensor.name in quantised else "bfloat16"
        stored[tensor.name] = replace(tensor.stored["values"], dtype=dtype)
        if dtype == "float8_e4m3fn":
            scale, grid = f"{tensor.name}_scale_inv", tuple(-(-n // 128) for n in tensor.shape)
            stored[scale] = StoredTensor(scale, "bfloat16", grid, "model.safetensors", 0)
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = resolve(stored, {"quantization_config": quantisation})
    plan = make_plan(family, found.logical, PlanOptions(scan_layers=mode == "scan", dtype="source"))
    assert not [*found.problems, *plan.problems]
    assert {array.name: array.spec.shape for array in plan.arrays} == tree.shapes
    codes = {name for name, dtype in tree.dtypes.items() if dtype == "float8_e4m3fn"}
    assert {array.name for array in plan.arrays if array.spec.dtype == "float8_e4m3fn"} == codes


_TOWERS = ["gemma3-12b", "gemma3-27b", "gemma4-26b", "gemma4-31b"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", _TOWERS)
def test_towers_have_maxtexts_names(name: str, mode: str) -> None:
    """With towers: the parameters that MaxText's mapping has beyond its text tree, each from the same tensors."""
    tree = oracle(name).trees[mode]
    names = tree.names.union(*tree.extra.values())
    rules = compiled_rules(family_of(name, names, scan_layers=mode == "scan", multimodal=True), mode == "scan")
    arrays, problems = target_arrays(rules, {}, "bfloat16", 64 << 20)
    assert not problems
    beyond = {array.name: sources_of(array) for array in arrays if array.name not in tree.shapes}
    assert beyond == tree.extra


@pytest.mark.parametrize("name", [*_TOWERS, "gemma4-e2b"])
def test_towers_are_left_out_with_a_reason(name: str) -> None:
    tree = oracle(name).trees["unscan"]
    towers = {"model.vision_tower.encoder.layers.0.x", "model.audio_tower.y"} if "gemma4" in name else set()
    towers |= set().union(*tree.extra.values())
    family = family_of(name, tree.names | towers, scan_layers=False)
    rules = compiled_rules(family, False)
    spare = {n: LogicalTensor.plain(StoredTensor(n, "bfloat16", (3, 5), "f", 0)) for n in towers}
    account = take_account(rules, headers(rules) | spare, family)
    assert not account.problems
    assert account.ignored.keys() == towers
    assert all("--multimodal" in reason for reason in account.ignored.values())


def _moved(parameter: str, case: Case) -> str:
    for there, here in case.moved:
        parameter = parameter.replace(there, here)
    return parameter


@cache
def checkpoint_of(name: str) -> Values:
    """A synthetic checkpoint of the oracle without what no real one holds."""
    checkpoint, pattern = values(name), case_of(name).spurious
    return replace(checkpoint, tensors={n: t for n, t in checkpoint.tensors.items() if not fnmatchcase(n, pattern)})


def options_for(checkpoint: Values, mode: str, **options: Any) -> FamilyOptions:
    """Options as MaxText's converter has them: its vocabulary, its rounding."""
    vocab = checkpoint.expected[mode].arrays["params.params.token_embedder.embedding"]["shape"][0]
    return FamilyOptions(scan_layers=mode == "scan", vocab_size=vocab, **({"match_maxtext": True} | options))


def made(name: str, mode: str, **options: Any) -> Family:
    checkpoint = checkpoint_of(name)
    return make_family(Config(checkpoint.config), checkpoint.tensors, options_for(checkpoint, mode, **options))


def plan_options(name: str, mode: str, chunk_bytes: int) -> PlanOptions:
    dtype = "source" if name.endswith("-fp8") else "bfloat16"
    return PlanOptions(scan_layers=mode == "scan", dtype=dtype, chunk_bytes=chunk_bytes)


@cache
def logical_of(name: str) -> dict[str, LogicalTensor]:
    """What a checkpoint holds, low-bit weights with their scales."""
    checkpoint = checkpoint_of(name)
    stored = {n: tensor.stored["values"] for n, tensor in logical(checkpoint.tensors).items()}
    return resolve(stored, checkpoint.config).logical


VALUE_CASES = [(name, mode) for name in value_names() for mode in MODES]


@pytest.mark.parametrize("chunk_bytes", [64 << 20, 5000], ids=["whole", "cut"])
@pytest.mark.parametrize(("name", "mode"), VALUE_CASES)
def test_values_equal_maxtexts(name: str, mode: str, chunk_bytes: int) -> None:
    """Shape, dtype and bytes of every array, whatever the chunks."""
    plan = make_plan(made(name, mode), logical_of(name), plan_options(name, mode, chunk_bytes))
    arrays = run_plan(plan, checkpoint_of(name).tensors)
    expected = checkpoint_of(name).expected[mode].arrays
    found = {key: _summary(array) for key, array in arrays.items()}
    assert sorted(found) == sorted(expected)
    assert [key for key in expected if found[key] != expected[key]] == []


def _summary(array: np.ndarray) -> dict[str, Any]:
    digest = hashlib.sha256(array.tobytes()).hexdigest()
    return {"shape": list(array.shape), "dtype": array.dtype.name, "sha256": digest}


@pytest.mark.parametrize(("name", "mode"), VALUE_CASES)
def test_there_and_back(name: str, mode: str) -> None:
    """The inverse of every rule gives the checkpoint back: bit for bit, or to one unit in the last place."""
    family, tensors, stored = made(name, mode, match_maxtext=False), logical_of(name), checkpoint_of(name).tensors
    options = plan_options(name, mode, 9000)
    # Low-bit samples have sizes of ten times the others'.
    options = replace(options, dtype="float32", chunk_bytes=90_000) if options.dtype == "source" else options
    plan = make_plan(family, tensors, options)
    arrays = {key.removeprefix("params."): array for key, array in run_plan(plan, stored).items()}
    back = convert_back(family, arrays, options)
    assert back.keys() | plan.account.ignored.keys() == tensors.keys()
    for key, array in back.items():
        wanted = _decoded(tensors[key], stored).astype(array.dtype)
        assert array.shape == wanted.shape, key
        assert _ulps(array, wanted) <= 1, key


def _decoded(tensor: LogicalTensor, stored: dict[str, np.ndarray]) -> np.ndarray:
    whole = tuple((0, length) for length in tensor.shape)
    return load_region(stored, tensor, whole, "float32") if scheme_of(tensor) else stored[tensor.name]


def _ulps(a: np.ndarray, b: np.ndarray) -> int:
    """The largest distance in units of the last place, for codes of one or two bytes and float32."""
    kind = {1: np.int8, 2: np.int16, 4: np.int32}[a.dtype.itemsize]
    lines = []
    for array in (a, b):
        bits = np.ascontiguousarray(array).view(kind).astype(np.int64)
        lines.append(np.where(bits < 0, np.int64(np.iinfo(kind).min) - bits, bits))
    return int(np.abs(lines[0] - lines[1]).max(initial=0))


def test_ulps_measures_both_sides_of_zero() -> None:
    small = np.array([2.0**-133, 0.0, -(2.0**-133)], ml_dtypes.bfloat16)
    assert _ulps(small, small[::-1]) == 2
    assert _ulps(np.float32([1]), np.nextafter(np.float32([1]), np.float32(2))) == 1


@pytest.mark.parametrize("name", value_names())
def test_account_names_what_is_wrong(name: str) -> None:
    """A tensor that is missing, one too many, one misshapen: each a problem that names it, and nothing else."""
    tensors = logical_of(name)
    family, options = made(name, "scan"), plan_options(name, "scan", 64 << 20)
    norm = next(n for n in tensors if n.endswith(".layers.1.post_attention_layernorm.weight"))
    spare = norm.replace("post_attention", "made_up")
    assert not make_plan(family, tensors, options).problems

    without = {n: t for n, t in tensors.items() if n != norm}
    assert [p.name for p in make_plan(family, without, options).problems] == [norm]

    plus = {**tensors, spare: tensors[norm]}
    plus[spare] = replace(tensors[norm], name=spare)
    assert [p.name for p in make_plan(family, plus, options).problems] == [spare]

    misshapen = {**tensors, norm: replace(tensors[norm], shape=(7,))}
    (problem,) = make_plan(family, misshapen, options).problems
    assert (problem.name, problem.found) == (norm, "[7]")
    assert "hidden_size" in str(problem)


@pytest.mark.parametrize("name", value_names())
def test_wrong_sizes_are_refused_by_shape(name: str) -> None:
    """Right names, wrong config: every tensor that the size reaches is listed."""
    checkpoint = checkpoint_of(name)
    config = dict(checkpoint.config)
    wrong = {"hidden_size": 2 * Config(config).size("hidden_size")}
    config |= {"text_config": {**config["text_config"], **wrong}} if "text_config" in config else wrong
    family = make_family(Config(config), checkpoint.tensors, options_for(checkpoint, "scan"))
    problems = make_plan(family, logical_of(name), plan_options(name, "scan", 64 << 20)).problems
    named = {problem.name for problem in problems}
    norms = {n for n in checkpoint.tensors if n.endswith("post_attention_layernorm.weight")}
    assert norms <= named
    assert all("Wrong config.json" in problem.fix for problem in problems)


@pytest.mark.parametrize("name", value_names())
def test_wrong_family_is_refused_by_name(name: str) -> None:
    """Another family lists every name that it misses and every name that it does not know."""
    other = "qwen3_moe" if "moe" not in name and "a3b" not in name else "qwen2"
    checkpoint = checkpoint_of(name)
    config = Config({"num_experts": 3, "moe_intermediate_size": 5, "head_dim": 16, **checkpoint.config})
    try:
        family = make_family(config, checkpoint.tensors, options_for(checkpoint, "scan"), other)
    except PlanError:
        return
    tensors = logical_of(name)
    problems = make_plan(family, tensors, plan_options(name, "scan", 64 << 20)).problems
    missing = {p.name for p in problems if "no tensor of this name" in p.found}
    unknown = {p.name for p in problems if "no rule uses" in p.found}
    rules = compiled_rules(family, True)
    expected = {source for rule in rules for source in rule.sources()}
    ties = {tie.name for tie in family.ties}
    assert missing == expected - tensors.keys()
    assert unknown == tensors.keys() - expected - ties
    assert missing
    assert unknown


@pytest.mark.parametrize("prefix", ["model.", "language_model.model."])
def test_gemma3_spellings_give_the_same_arrays(prefix: str) -> None:
    """Older and text-only checkpoints put other words before the same names; the plan says which."""
    checkpoint = checkpoint_of("gemma3-4b")
    there = "model.language_model."
    respelt = {name.replace(there, prefix): array for name, array in checkpoint.tensors.items()}
    assert respelt.keys() != checkpoint.tensors.keys()
    family = make_family(Config(checkpoint.config), respelt, options_for(checkpoint, "scan"))
    assert f"the language model's tensors begin with {prefix!r}" in family.notes
    arrays = convert(family, respelt, PlanOptions())
    wanted = checkpoint.expected["scan"].arrays
    assert {f"params.{key}": _summary(array) for key, array in arrays.items()} == wanted
