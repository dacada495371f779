"""A family of adapters: the rules of a base model's family that an adapter touches, each become a pair of rules."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mappings.dims import Dims
from mappings.family import Family
from mappings.lora.factors import KERNEL, RANK, WEIGHT, NotAdaptable, factor_rules
from mappings.problems import Problem
from mappings.rule import PlainRule

PREFIX = "base_model.model."
_INDEX = re.compile(r"\{[\w.]+\}")


@dataclass(frozen=True)
class AdapterFamily(Family):
    """A family whose rules are those of one adapter in one mode.

    Attributes:
      plain: its rules, with their mode resolved.
      kernels: names of the kernels that it adapts, such as ``params-decoder-layers_{layer}-mlp-wo-kernel``.
      modules: the Hugging Face modules that it adapts, such as ``model.layers.0.mlp.down_proj``.
    """

    plain: tuple[PlainRule, ...] = ()
    kernels: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def plain_rules(self, scan_layers: bool) -> tuple[PlainRule, ...]:
        return self.plain

    @property
    def module_path(self) -> str:
        """MaxText's ``lora_module_path``: a regular expression for the modules whose kernels are adapted.

        >>> AdapterFamily("", Dims({}), {}, (), kernels=("params-decoder-layers_{layer}-mlp-wo-kernel",)).module_path
        'decoder/layers_[0-9]+/mlp/wo'
        """
        groups: dict[str, list[str]] = {}
        for kernel in self.kernels:
            path = kernel.removeprefix("params-").removesuffix(KERNEL).replace("-", "/")
            block, _, module = _INDEX.sub("[0-9]+", path).rpartition("/")
            groups.setdefault(block, []).append(module)
        return "|".join(f"{block}/{_either(modules)}" for block, modules in groups.items())


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
    plain, kernels, modules, problems = [], [], [], []
    for rule in base.plain_rules(scan_layers):
        for own, weights in _touched(rule, dims, wish):
            found = [name.removesuffix(WEIGHT) for name in weights]
            modules += found
            try:
                plain += factor_rules(own, dims, PREFIX, _scale(weights, wish))
            except NotAdaptable as reason:
                problems += [_problem(name, str(reason)) for name in found]
            kernels.append(own.target.text)
    told = {RANK: "r of the adapter", **base.sizes_from}
    family = AdapterFamily(
        base.name, dims, base.blocks, (), settings=base.settings, sizes_from=told, notes=base.notes,
        plain=tuple(plain), kernels=tuple(dict.fromkeys(kernels)), modules=tuple(dict.fromkeys(modules)),
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
