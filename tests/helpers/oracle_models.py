"""The oracle's models as our families see them: which family each belongs to, and its plan."""

from functools import cache
from math import prod
from typing import Any

from family_cases import CASES, Case
from oracle_data import MODES, Model, model, model_names, value_names
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.conversion_plan import Plan, PlanOptions, make_plan
from tensorferry.mappings.rules.compiled import CompiledRule, compile_rule, source_shape

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@cache
def oracle(name: str) -> Model:
    """One model of the oracle."""
    return model(name)


def case_of(name: str) -> Case:
    """What a model needs besides what the oracle says of it."""
    return CASES.get(name, Case())


def family_of(name: str, names: Any, change: Any = dict, **options: Any) -> Family:
    """The family of an oracle model, by the config.json that the oracle assumes, changed by ``change``."""
    case = case_of(name)
    base = oracle(case.config_of or name).hf_config or {}
    vocab = oracle(name).dims["vocab_size"]
    chosen = FamilyOptions(vocab_size=vocab, **{**case.options, **options})
    return make_family(Config(change({**base, **case.config})), names, chosen)


def compiled_rules(family: Family, scan_layers: bool) -> list[CompiledRule]:
    """A family's rules for one mode."""
    return [compile_rule(rule, family.dims) for rule in family.plain_rules(scan_layers)]


def headers(rules: list[CompiledRule]) -> dict[str, LogicalTensor]:
    """The headers of a checkpoint that the rules would take."""
    tensors = {}
    for rule in rules:
        for name in rule.sources():
            stored = StoredTensor(name, "bfloat16", source_shape(rule), "model.safetensors", 0)
            tensors[name] = LogicalTensor.plain(stored)
    return tensors


@cache
def models_by_family() -> dict[str, list[str]]:
    """Family name to the oracle's models of it that are compared, the smallest first."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in model_names():
        if not case_of(name).refused:
            trees = oracle(name).trees
            mode = "scan" if "scan" in trees else "unscan"
            family = family_of(name, trees[mode].names, scan_layers=mode == "scan")
            size = sum(prod(shape) for shape in trees[mode].shapes.values())
            found.setdefault(family.name, []).append((size, name))
    return {family: [name for _, name in sorted(pairs)] for family, pairs in sorted(found.items())}


def plan_of(name: str, mode: str) -> Plan | None:
    """The plan of an oracle model with a few experts, from made-up headers; None where MaxText has no such mode."""
    if mode not in oracle(name).trees:
        return None
    scan = mode == "scan"
    family = family_of(name, oracle(name).trees[mode].names, change=with_few_experts, scan_layers=scan)
    tensors = headers(compiled_rules(family, scan))
    return make_plan(family, tensors, PlanOptions(scan_layers=scan))


def with_few_experts(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with at most eight experts, wherever it counts them."""
    return {key: _few(key, value) for key, value in config.items()}


def _few(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return with_few_experts(value)
    return min(value, 8) if key in _EXPERT_COUNTS and value else value


def modes_of(name: str) -> list[str]:
    """The modes that MaxText has for a model."""
    return [mode for mode in MODES if mode in oracle(name).trees]


def has_values(name: str) -> bool:
    """Whether the oracle holds converted values of a model."""
    return name in value_names()
