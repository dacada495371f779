"""A family of adapters: the rules of a base model's family that an adapter touches, each become a pair of rules."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tensorferry.mappings.families.family import Family
from tensorferry.mappings.lora.factors import KERNEL, RANK, WEIGHT, NotAdaptable, factor_rules
from tensorferry.mappings.rules.dims import Dims
from tensorferry.mappings.rules.rule import PlainRule
from tensorferry.mappings.words.problems import Problem

PREFIX = "base_model.model."
_LEVEL, _ANY = "-", "*"
_LAYER = re.compile(r"(?<=layers_)\d+")


@dataclass(frozen=True)
class AdapterFamily(Family):
    """A family whose rules are those of one adapter in one mode.

    Attributes:
      plain: its rules, with their mode resolved.
      modules: the Hugging Face modules that it adapts, such as ``model.layers.0.mlp.down_proj``.
      module_path: MaxText's ``lora_module_path``: a regular expression for the modules whose kernels are adapted.
    """

    plain: tuple[PlainRule, ...] = ()
    modules: tuple[str, ...] = ()
    module_path: str = ""

    def plain_rules(self, scan_layers: bool) -> tuple[PlainRule, ...]:
        return self.plain


def module_path(adapted: Collection[str], every: Collection[str]) -> str:
    """A regular expression for the modules of some kernels, which matches no module of the others.

    >>> every = [f"params-decoder-layers_{layer}-mlp-{name}-kernel" for layer in (0, 1) for name in ("wi_0", "wo")]
    >>> module_path(every, every), module_path(every[1:], every)
    ('decoder/layers_[0-9]+/mlp/(wi_0|wo)', 'decoder/layers_[0-9]+/mlp/wo|decoder/layers_1/mlp/wi_0')
    """
    rest = {_any_layer(kernel) for kernel in set(every).difference(adapted)}
    patterns = (kernel if _any_layer(kernel) in rest else _any_layer(kernel) for kernel in adapted)
    groups: dict[str, dict[str, None]] = {}
    for pattern in patterns:
        path = "/".join(pattern.removesuffix(KERNEL).split(_LEVEL)[1:]).replace(_ANY, "[0-9]+")
        block, _, module = path.rpartition("/")
        groups.setdefault(block, {})[module] = None
    return "|".join(f"{block}/{_either(tuple(modules))}" for block, modules in groups.items())


def _any_layer(kernel: str) -> str:
    """A kernel's name with every number of a layer left open."""
    return _LAYER.sub(_ANY, kernel)


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"({'|'.join(words)})"


@dataclass(frozen=True)
class Wish:
    """Which weights an adapter touches.

    Attributes:
      touches: whether a weight is adapted, by its Hugging Face name and its kernel's name in MaxText's tree.
      scales: Hugging Face name of a weight to a factor that its B takes on the way; 1 where it is not named.
    """

    touches: Callable[[str, str], bool]
    scales: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_weights(cls, scales: Mapping[str, float]) -> "Wish":
        """Those of given Hugging Face names, with their factors."""
        return cls(lambda weight, kernel: weight in scales, scales)

    @classmethod
    def of_kernels(cls, kernels: Collection[str]) -> "Wish":
        """Those whose kernels have given names."""
        return cls(lambda weight, kernel: kernel in kernels)


def weight_names(base: Family) -> frozenset[str]:
    """Every tensor of a model that its family's rules read; they are the same in either mode."""
    dims, templates = base.dims, [rule.source for rule in base.plain_rules(False)]
    return frozenset(one.fill(dims, at) for one in templates for at in dims.positions(one.atoms(dims)))


def adapter_family(base: Family, scan_layers: bool, rank: int, wish: Wish) -> tuple[AdapterFamily, list[Problem]]:
    """The family of an adapter, and what of it has no place in MaxText's model.

    Args:
      base: the family of the model that is adapted.
      scan_layers: whether its layers are stacked.
      rank: of the adapter.
      wish: which weights it touches.
    """
    dims = Dims({**dict(base.dims.items()), RANK: rank})
    plain, modules, problems = [], [], []
    kernels: dict[str, bool] = {}
    for rule in base.plain_rules(scan_layers):
        for at in dims.positions(rule.target.atoms(dims)):
            kernels.setdefault(rule.target.fill(dims, at), False)
        for own, weights in _touched(rule, dims, wish):
            found = [name.removesuffix(WEIGHT) for name in weights]
            modules += found
            try:
                plain += factor_rules(own, dims, PREFIX, _scale(weights, wish))
            except NotAdaptable as reason:
                problems += [_problem(name, str(reason)) for name in found]
            kernels |= {own.target.fill(dims, at): True for at in dims.positions(own.target.atoms(dims))}
    told = {RANK: "r of the adapter", **base.sizes_from}
    family = AdapterFamily(
        base.name, dims, base.blocks, (), settings=base.settings, sizes_from=told, notes=base.notes,
        plain=tuple(plain), modules=tuple(dict.fromkeys(modules)),
        module_path=module_path([name for name, adapted in kernels.items() if adapted], kernels.keys()),
    )  # fmt: skip
    return family, list({problem.name: problem for problem in reversed(problems)}.values())[::-1]


def _touched(rule: PlainRule, dims: Dims, wish: Wish) -> Iterator[tuple[PlainRule, list[str]]]:
    """The rule, or the rules for some of its arrays alone, with the weights that are adapted."""
    named, stack = rule.target.atoms(dims), rule.stack_atoms(dims)
    found: list[tuple[dict[str, int], list[str]]] = []
    for at in dims.positions(named):
        kernel = rule.target.fill(dims, at)
        names = [rule.source.fill(dims, {**at, **one}) for one in dims.positions(stack)]
        weights = [name for name in names if wish.touches(name, kernel)]
        if weights:
            found.append((at, weights))
    factors = {wish.scales.get(name, 1.0) for _, weights in found for name in weights}
    if found and len(found) == dims.volume(named) and len(factors) == 1:
        yield rule, [name for _, weights in found for name in weights]
        return
    for at, weights in found:
        yield replace(rule, source=rule.source.fixed(dims, at), target=rule.target.fixed(dims, at)), weights


def _scale(weights: Sequence[str], wish: Wish) -> float:
    factors = {wish.scales.get(name, 1.0) for name in weights}
    if len(factors) > 1:
        raise NotAdaptable("one of several layers with scales of their own, stacked in one array")
    return factors.pop()


def _problem(module: str, reason: str) -> Problem:
    expected = "a module of which MaxText's model can hold an adapter: a linear layer with a kernel of its own"
    return Problem(module, expected, reason, "Leave it out of the adapter, or merge with convert --lora.")
