"""The model check: weights against a declared model, strictly, by name and true shape, in both directions."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tensorferry.mappings.tunix.classify import rng_part
from tensorferry.mappings.tunix.linen import OptimizerTarget, skeleton
from tensorferry.mappings.tunix.step_tree import Leaf, spell
from tensorferry.mappings.words.problems import Problem

Shape = tuple[int, ...]

_UNROLLED_BLOCK = re.compile(r"^((?:[a-z]+_)*layers)_(\d+)$")
_SCANNED_BLOCK = re.compile(r"^(?:(?:[a-z]+_)*layers|scanned_blocks)$")


@dataclass(frozen=True, slots=True)
class ModelTree:
    """What a model holds, by the names it gives its variables (no collection, no ``value``).

    Attributes:
      weights: name to shape of everything a loader asks for: parameters and custom variables.
      custom: names among the weights that are variables of another class than parameters.
      aux: names of the random-number leaves, when the declaration has them; otherwise None.
      optimizer: the optimizer's shape, when the declaration has one.
      origin: where the declaration comes from, for messages.
    """

    weights: Mapping[str, Shape]
    custom: frozenset[str] = frozenset()
    aux: frozenset[str] | None = None
    optimizer: OptimizerTarget | None = None
    origin: str = "the declared model"

    @classmethod
    def from_template(cls, leaves: Iterable[Leaf], origin: str) -> "ModelTree":
        """The model of a checkpoint in the new layout, from the leaves of its ``items``."""
        arrays = [leaf for leaf in leaves if leaf.kind == "array"]
        everything = list(leaves)
        params = [leaf for leaf in arrays if leaf.path[0].name == "params" and len(leaf.path) > 2]
        aux = [leaf for leaf in arrays if spell(leaf.path[:2]) == "nnx_aux/model"]
        variables = [leaf for leaf in aux if not (leaf.prng_impl or rng_part(leaf.path))]
        others = [leaf for leaf in params if leaf.path[1].name != "params"]
        custom = {spell(leaf.path[2:]): leaf.shape for leaf in [*others, *variables]}
        return cls(
            weights={spell(leaf.path[2:]): leaf.shape for leaf in params} | custom,
            custom=frozenset(custom),
            aux=frozenset(spell(leaf.path[2:]) for leaf in aux) - custom.keys() if aux else None,
            optimizer=_optimizer_target([leaf for leaf in everything if leaf.path[0].name == "opt_state"]),
            origin=origin,
        )


def _optimizer_target(leaves: list[Leaf]) -> OptimizerTarget | None:
    below = [leaf for leaf in leaves if len(leaf.path) > 1]
    if not below:
        return None
    is_list = below[0].path[1].kind == "sequence"
    return OptimizerTarget(
        is_list=is_list,
        length=max(int(leaf.path[1].name) for leaf in below) + 1 if is_list else 0,
        arrays=frozenset(skeleton(leaf.path[1:]) for leaf in below if leaf.kind == "array"),
    )


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """Every difference between a step's weights and the declared model.

    Attributes:
      origin: where the declaration comes from; empty when there was none (``--structural``).
      missing: names the model has and the step lacks, with the model's shape.
      extra: names the step has and the model lacks, with the step's shape.
      different: names of both, with the step's shape and the model's.
      explanation: a sentence when the whole difference has one simple cause; otherwise empty.
      notes: differences that refuse nothing.
    """

    origin: str = ""
    missing: Mapping[str, Shape] = field(default_factory=dict)
    extra: Mapping[str, Shape] = field(default_factory=dict)
    different: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    explanation: str = ""
    notes: tuple[str, ...] = ()

    @property
    def validated(self) -> bool:
        """Whether there was a model and the weights are exactly it."""
        return bool(self.origin) and self.ok

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against the weights."""
        return not (self.missing or self.extra or self.different)

    def problems(self) -> list[Problem]:
        """One problem for each difference, the explanation first."""
        fix = "Wrong model for this run? Give its own --template or --config, or choose --structural."
        told = [Problem("model", self.origin, self.explanation, fix)] if self.explanation else []
        told += [
            Problem(name, f"{list(shape)} ({self.origin})", "nothing", fix) for name, shape in self.missing.items()
        ]
        told += [Problem(name, f"nothing ({self.origin})", f"{list(shape)}", fix) for name, shape in self.extra.items()]
        told += [
            Problem(name, f"{list(model)} ({self.origin})", f"{list(step)}", fix)
            for name, (step, model) in self.different.items()
        ]
        return told


def validate(weights: Mapping[str, Shape], model: ModelTree) -> ModelCheck:
    """Compares a step's weights with a declared model, both directions.

    Args:
      weights: name to true shape, as in ``StepPlan.weights``.
      model: the declaration.
    """
    missing = {name: shape for name, shape in model.weights.items() if name not in weights}
    extra = {name: shape for name, shape in weights.items() if name not in model.weights}
    both = [(name, tuple(shape), tuple(model.weights[name])) for name, shape in weights.items() if name not in extra]
    different = {name: (step, wanted) for name, step, wanted in both if step != wanted}
    explanation = ""
    if missing or extra:
        explanation = _scan_difference(weights, model.weights)
    elif different:
        explanation = _vocabulary_difference(different)
    return ModelCheck(model.origin, missing, extra, different, explanation)


def validate_adapter(weights: Mapping[str, Shape], model: ModelTree) -> ModelCheck:
    """Compares an adapter with its base model: each low-rank pair must sit beside a weight of the model."""
    extra = {name: shape for name, shape in weights.items() if _base_name(name) not in model.weights}
    return ModelCheck(model.origin, extra=extra, notes=("adapter only: the base weights are not in the step",))


def _base_name(name: str) -> str:
    return name.removesuffix("_lora_a").removesuffix("_lora_b")


def scan_layers(names: Iterable[str]) -> bool | None:
    """Whether the layers are stacked (``layers``) or separate (``layers_0``); None when there are no layers.

    A scanned model may keep a remainder unrolled, so one stacked block decides.
    """
    every = list(names)
    decoder = [name for name in every if name.startswith("decoder/")]
    found = {_first_block(name.split("/")) for name in decoder or every} - {None}
    return any(found) if found else None


def _first_block(parts: list[str]) -> bool | None:
    for part in parts:
        if _SCANNED_BLOCK.match(part):
            return True
        if _UNROLLED_BLOCK.match(part):
            return False
    return None


def _scan_difference(weights: Mapping[str, Shape], model: Mapping[str, Shape]) -> str:
    ours, theirs = scan_layers(weights), scan_layers(model)
    if ours is None or theirs is None or ours == theirs:
        return ""
    unrolled, scanned = (model, weights) if ours else (weights, model)
    words = {True: "scanned layers", False: "unrolled layers"}
    sides = f"the step has {words[ours]}, the model {words[theirs]}"
    return f"{sides}; otherwise they agree exactly" if _stacks_to(unrolled, scanned) else sides


def _stacks_to(unrolled: Mapping[str, Shape], scanned: Mapping[str, Shape]) -> bool:
    """Whether stacking each block's layers gives exactly the scanned tree.

    Parameters stack on axis 1 and other variables on axis 0, so either place is accepted.
    """
    groups: dict[str, list[Shape]] = {}
    for name, shape in unrolled.items():
        stem = "/".join(_UNROLLED_BLOCK.sub(r"\1", part) for part in name.split("/"))
        groups.setdefault(stem, []).append(tuple(shape))
    return groups.keys() == scanned.keys() and all(
        _is_stack(shapes, tuple(scanned[stem]), stacked=stem not in unrolled) for stem, shapes in groups.items()
    )


def _is_stack(shapes: list[Shape], whole: Shape, stacked: bool) -> bool:
    if len(set(shapes)) != 1:
        return False
    one, layers = shapes[0], len(shapes)
    if not stacked:
        return one == whole
    return whole in {(*one[:1], layers, *one[1:]), (layers, *one)}


def _vocabulary_difference(different: Mapping[str, tuple[Shape, Shape]]) -> str:
    sizes = Counter(_one_axis(step, model) for step, model in different.values())
    (pair, _), *rest = sizes.most_common()
    vocabulary = all("embedding" in name or "logits_dense" in name for name in different)
    if rest or pair is None or not vocabulary:
        return ""
    return f"only the vocabulary differs: {pair[0]} in the step, {pair[1]} in the model"


def _one_axis(step: Shape, model: Shape) -> tuple[int, int] | None:
    pairs = [pair for pair in zip(step, model, strict=False) if pair[0] != pair[1]]
    return pairs[0] if len(step) == len(model) and len(pairs) == 1 else None


def check_run(weights: Mapping[str, Mapping[str, Shape]]) -> dict[str, list[Problem]]:
    """Compares the steps of one run and role with each other: the check that needs no model.

    Args:
      weights: for each step (by its path) name to true shape.

    Returns:
      For each step that differs from the majority (the first of them on a tie), its problems.
    """
    signatures = {step: tuple(sorted(tree.items())) for step, tree in weights.items()}
    if not signatures:
        return {}
    usual = Counter(signatures.values()).most_common(1)[0][0]
    like = next(step for step, signature in signatures.items() if signature == usual)
    model = ModelTree(weights[like], origin=f"as in step {like} of the same run")
    odd = [step for step, signature in signatures.items() if signature != usual]
    return {step: validate(weights[step], model).problems() for step in odd}
