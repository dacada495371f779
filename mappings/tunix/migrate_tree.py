"""From an old step to its plan: a pure function over trees. It collects problems and never raises them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tensorferry.mappings.tunix.classify import (
    ModelLeaf,
    custom_names,
    is_adapter_only,
    is_wrapped,
    mark_custom,
    model_leaves,
)
from tensorferry.mappings.tunix.linen import lay_out
from tensorferry.mappings.tunix.model_check import ModelCheck, ModelTree, Shape, scan_layers, validate, validate_adapter
from tensorferry.mappings.tunix.optimizer import Peeled, is_masked, leaves_of, moments_of, nest, peel, strip_adapter
from tensorferry.mappings.tunix.prng_keys import RngImpl, key_decision
from tensorferry.mappings.tunix.step_plan import MigrateOptions, StepPlan, TargetLeaf
from tensorferry.mappings.tunix.step_tree import (
    MODEL_ITEM,
    OPTIMIZER_ITEM,
    DroppedLeaf,
    Leaf,
    Path,
    StepTree,
    dict_path,
)
from tensorferry.mappings.words.problems import Problem

PARAMS = dict_path("params", "params")
AUX = dict_path("nnx_aux", "model")

_EPHEMERAL = {
    "sown": "a value sown by one forward pass",
    "cache": "a decoding cache",
    "empty": "holds no array",
}


@dataclass(slots=True)
class _Draft:
    leaves: list[TargetLeaf] = field(default_factory=list)
    dropped: list[DroppedLeaf] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def move(self, path: Path, leaf: Leaf, prng_impl: str = "") -> None:
        self.leaves.append(TargetLeaf(path, leaf.kind, leaf.shape, leaf.dtype, leaf, prng_impl=prng_impl))

    def drop(self, leaf: Leaf, reason: str) -> None:
        self.dropped.append(DroppedLeaf(leaf, reason))


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """The optimizer item, taken apart: ``opt_state`` without shells, the step counter, and anything else."""

    peeled: Peeled
    step: Leaf | None
    others: tuple[Leaf, ...]
    stored: bool


def migrate_tree(step: StepTree, options: MigrateOptions, model: ModelTree | None = None) -> StepPlan:
    """Decides what one old step becomes.

    Args:
      step: the stored step.
      options: the user's choices.
      model: the declared model; None converts by structure alone, and the check then has no origin.
    """
    draft = _Draft(warnings=list(step.warnings))
    optimizer = _optimizer(step)
    named = _named(step, optimizer, model)
    adapter_only = is_adapter_only(named)
    weights = {leaf.name: leaf.leaf.shape for leaf in named if leaf.role in ("weight", "custom")}
    _place_model(named, options.rng_impl, draft)
    _place_optimizer(optimizer, weights, options, model, adapter_only, draft)
    _place_step(step, optimizer, draft)
    _drop_other_items(step, optimizer, draft)
    check = _check(weights, named, model, adapter_only)
    draft.problems += [*_nothing(weights), *check.problems(), *_lost(step, draft)]
    metadata = _metadata(step, weights, draft)
    return StepPlan(
        leaves=tuple(draft.leaves),
        dropped=tuple(draft.dropped),
        copied_items=step.copied_items,
        weights=weights,
        check=check,
        custom_metadata=metadata,
        step=_step_value(draft.leaves),
        adapter_only=adapter_only,
        warnings=(*draft.warnings, *check.notes),
        problems=tuple(draft.problems),
    )


def _optimizer(step: StepTree) -> _Optimizer:
    item = step.items.get(OPTIMIZER_ITEM)
    tree = nest(item.leaves) if item else {}
    counter = tree.get("step")
    below_counter = next(leaves_of(counter), None)
    state = tree.get("opt_state")
    bare = state if isinstance(state, dict) else {}
    model = step.items.get(MODEL_ITEM)
    stripped = strip_adapter(bare) if model and is_wrapped(model.leaves) else bare
    others = [leaf for key in tree.keys() - {"step", "opt_state"} for leaf in leaves_of(tree[key])]
    others += [state] if isinstance(state, Leaf) else []
    peeled = peel(stripped) if isinstance(stripped, dict) else Peeled({})
    return _Optimizer(peeled, below_counter, tuple(others), item is not None)


def _named(step: StepTree, optimizer: _Optimizer, model: ModelTree | None) -> list[ModelLeaf]:
    item = step.items.get(MODEL_ITEM)
    leaves = model_leaves(item.leaves if item else ())
    if model and model.custom:
        return mark_custom(leaves, model.custom)
    moments = moments_of(optimizer.peeled.state)
    frozen = is_masked(optimizer.peeled.state) or any(
        leaf.kind != "array" for group in moments.values() for leaf in group
    )
    return mark_custom(leaves, custom_names(leaves, frozenset() if frozen else frozenset(moments)))


def _place_model(named: list[ModelLeaf], rng_impl: RngImpl, draft: _Draft) -> None:
    guesses: Counter[str] = Counter()
    for leaf in named:
        if leaf.role in _EPHEMERAL:
            draft.drop(leaf.leaf, _EPHEMERAL[leaf.role])
        elif leaf.role == "rng_key":
            guesses[_place_key(leaf, rng_impl, draft)] += 1
        else:
            _place_variable(leaf, draft)
    draft.warnings += [f"{told} ({count} keys)" for told, count in guesses.items() if told]


def _place_variable(leaf: ModelLeaf, draft: _Draft) -> None:
    if leaf.role in ("weight", "custom"):
        draft.move((*PARAMS, *leaf.path), leaf.leaf)
    if leaf.role == "custom":
        draft.warnings.append(
            f"{leaf.name} is no parameter: it goes to params, for a load, and to nnx_aux, for a resume"
        )
    if leaf.role in ("custom", "rng_count"):
        draft.move((*AUX, *leaf.path), leaf.leaf)


def _place_key(leaf: ModelLeaf, rng_impl: RngImpl, draft: _Draft) -> str:
    decision = key_decision(leaf.leaf, rng_impl)
    if decision.carried:
        draft.move((*AUX, *leaf.path), leaf.leaf, decision.impl)
    else:
        draft.drop(leaf.leaf, decision.told)
    return decision.told


def _place_optimizer(
    optimizer: _Optimizer,
    weights: Mapping[str, Shape],
    options: MigrateOptions,
    model: ModelTree | None,
    adapter_only: bool,
    draft: _Draft,
) -> None:
    peeled = optimizer.peeled
    draft.dropped += peeled.dropped
    _warn_lost_batches(peeled, draft)
    if options.drop_optimizer or adapter_only:
        reason = "--drop-optimizer" if options.drop_optimizer else "pre-training keeps no optimizer with an adapter"
        for leaf in [*leaves_of(peeled.state), *([peeled.schedule] if peeled.schedule else [])]:
            draft.drop(leaf, reason)
    else:
        _lay_out(peeled, weights, model, draft)
    if not any(leaf.section == "opt_state" for leaf in draft.leaves):
        draft.warnings.append("moments absent: a resume starts with a fresh optimizer")


def _lay_out(peeled: Peeled, weights: Mapping[str, Shape], model: ModelTree | None, draft: _Draft) -> None:
    layout = lay_out(peeled, model.optimizer if model else None)
    for path, leaf in layout.entries:
        if leaf is None:
            draft.leaves.append(TargetLeaf(path, "none"))
        else:
            draft.move(path, leaf)
    draft.dropped += layout.dropped
    draft.warnings += layout.notes
    draft.problems += [*layout.problems, *_strange_moments(peeled, weights)]


def _strange_moments(peeled: Peeled, weights: Mapping[str, Shape]) -> list[Problem]:
    fix = "The optimizer belongs to another model; --drop-optimizer migrates the weights without it."
    pairs = [(name, leaf) for name, leaves in moments_of(peeled.state).items() for leaf in leaves]
    wrong = [(n, leaf) for n, leaf in pairs if leaf.kind == "array" and weights.get(n) != leaf.shape]
    return [
        Problem(str(leaf), f"the shape of its weight, {_shape(weights.get(name))}", _shape(leaf.shape), fix)
        for name, leaf in wrong
    ]


def _shape(shape: Shape | None) -> str:
    return "which the step does not have" if shape is None else str(list(shape))


def _warn_lost_batches(peeled: Peeled, draft: _Draft) -> None:
    mini_step = peeled.mini_step
    if mini_step and mini_step.value != 0:
        lost = "some" if mini_step.value is None else str(mini_step.value)
        draft.warnings.append(f"saved inside a gradient accumulation: {lost} micro-batches are lost")


def _place_step(step: StepTree, optimizer: _Optimizer, draft: _Draft) -> None:
    counter, updates = optimizer.step, optimizer.peeled.gradient_step
    if counter and updates:
        draft.drop(counter, "counts micro-steps; gradient_step counts the updates")
    source = updates or counter
    target = TargetLeaf(dict_path("step"), dtype="int32", source=source)
    draft.leaves.append(target if source else replace(target, constant=step.step))


def _step_value(leaves: list[TargetLeaf]) -> int | None:
    target = next(leaf for leaf in leaves if leaf.section == "step")
    return target.source.value if target.source else target.constant


def _drop_other_items(step: StepTree, optimizer: _Optimizer, draft: _Draft) -> None:
    for leaf in optimizer.others:
        draft.drop(leaf, "no part of an optimizer that pre-training knows" if leaf.kind == "array" else "empty")
    for name, item in step.items.items():
        if name in (MODEL_ITEM, OPTIMIZER_ITEM):
            continue
        draft.warnings.append(f"item {name} has no place in pre-training's layout: not carried over")
        for leaf in item.leaves:
            draft.drop(leaf, f"item {name} has no place in pre-training's layout")


def _check(
    weights: Mapping[str, Shape], named: list[ModelLeaf], model: ModelTree | None, adapter_only: bool
) -> ModelCheck:
    if adapter_only:
        told = ("adapter only: the step has no base weights, and neither alpha nor rank is on record",)
        check = validate_adapter(weights, model) if model else ModelCheck()
        return replace(check, notes=told)
    if model is None:
        return ModelCheck()
    return replace(validate(weights, model), notes=_aux_notes(named, model))


def _aux_notes(named: list[ModelLeaf], model: ModelTree) -> tuple[str, ...]:
    if model.aux is None:
        return ()
    ours = {leaf.name for leaf in named if leaf.role in ("rng_key", "rng_count")}
    absent, added = len(model.aux - ours), len(ours - model.aux)
    told = [f"{absent} random-number leaves of {model.origin} are not in the step: they start fresh"] if absent else []
    return (
        *told,
        *([f"{added} random-number leaves are not in {model.origin}: ignored by it"] if added else []),
    )


def _nothing(weights: Mapping[str, Shape]) -> list[Problem]:
    if weights:
        return []
    return [Problem(MODEL_ITEM, "weights", "none", "The step holds no model; leave it out with --exclude.")]


def _lost(step: StepTree, draft: _Draft) -> list[Problem]:
    """Leaves that are neither out nor dropped: a shape of tree this code does not know."""
    known = {(leaf.source.item, leaf.source.path) for leaf in draft.leaves if leaf.source}
    known |= {(dropped.leaf.item, dropped.leaf.path) for dropped in draft.dropped}
    lost = [leaf for leaf in step.leaves() if (leaf.item, leaf.path) not in known]
    fix = "This tree is not understood; --drop-optimizer may help when the leaf is the optimizer's."
    return [Problem(str(leaf), "a place in the new layout", "none", fix) for leaf in lost]


def _metadata(step: StepTree, weights: Mapping[str, Shape], draft: _Draft) -> dict[str, Any]:
    scanned = scan_layers(weights)
    if scanned is None:
        draft.warnings.append("no layers in the tree: scan_layers is not recorded")
        return dict(step.custom_metadata)
    return {**step.custom_metadata, "scan_layers": scanned}
