"""The optimizer's state as pre-training lays it out: a list with gaps, moments under ``params``."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tensorferry.mappings.tunix.optimizer import (
    ADAM_INDEX,
    SCHEDULE_INDEX,
    SGD_SCHEDULE_INDEX,
    Node,
    Peeled,
    flatten,
    is_adam,
    is_chain,
    is_count,
    is_masked,
    is_skip_step,
    leaves_of,
)
from tensorferry.mappings.tunix.step_tree import DroppedLeaf, Key, Leaf, Path
from tensorferry.mappings.words.problems import Problem

ROOT: Path = (Key("opt_state"),)
_DROP_HINT = "--drop-optimizer migrates the weights without it"


@dataclass(frozen=True, slots=True)
class OptimizerTarget:
    """The optimizer that a template checkpoint holds.

    Attributes:
      is_list: the state is a chain (a list); otherwise one dict.
      length: length of the list, gaps included; 0 for a dict.
      arrays: names below ``opt_state`` that hold arrays, each cut after its ``mu`` or ``nu``.
    """

    is_list: bool
    length: int
    arrays: frozenset[str]


@dataclass(slots=True)
class Layout:
    """Where each leaf of the optimizer goes.

    Attributes:
      entries: target path and leaf; no leaf means a ``None`` in a list.
      dropped: leaves without a place.
      notes: what was done that a user should know, as sentences.
      problems: why the state cannot be written as it is.
    """

    entries: list[tuple[Path, Leaf | None]] = field(default_factory=list)
    dropped: list[DroppedLeaf] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def drop(self, node: "Node | Leaf | None", reason: str) -> None:
        self.dropped.extend(DroppedLeaf(leaf, reason) for leaf in leaves_of(node))


def skeleton(path: Path) -> str:
    """A path below ``opt_state``, cut after its first ``mu`` or ``nu``."""
    names = [key.name for key in path]
    cuts = [names.index(name) + 1 for name in ("mu", "nu") if name in names]
    return "/".join(names[: min(cuts, default=len(names))])


def lay_out(peeled: Peeled, target: OptimizerTarget | None = None) -> Layout:
    """Places the peeled state as pre-training builds it, or as a template has it.

    Args:
      peeled: the state without shells and without the adapter's level.
      target: the template's optimizer; without it, the one that pre-training builds for this kind of state.
    """
    out = Layout()
    state = _fit(peeled.state, peeled.schedule, target, out)
    if not state:
        return out
    out.entries = list(_linen(state, target))
    out.problems += _unknown(state, target, out.entries)
    return out


def _fit(state: Node, schedule: Leaf | None, target: OptimizerTarget | None, out: Layout) -> Node:
    if is_skip_step(state) and isinstance(state["inner_state"], dict):
        return state | {"inner_state": _fit(state["inner_state"], schedule, None, out)}
    if is_adam(state) and not (target and target.is_list):
        out.drop(schedule, "count of inject_hyperparams; this optimizer keeps one count of its own")
        return state
    if is_adam(state):
        out.notes.append("the template's optimizer is a chain: Adam's state becomes its first element")
        return _adam_chain({ADAM_INDEX: state}, schedule, target, out)
    if _holds_adam(state):
        return _fit_chain(state, schedule, target, out)
    if not state and schedule:
        out.notes.append("an optimizer without moments: its count becomes the schedule's")
        return {SGD_SCHEDULE_INDEX: {"count": schedule}}
    out.drop(schedule, "count of inject_hyperparams; this optimizer has no place for it")
    return state


def _holds_adam(state: Node) -> bool:
    """Whether a state is ``[Adam]`` or ``[Adam, …, count]``: AdamW, or Adam without weight decay."""
    if not is_chain(state) or not is_adam(state.get(ADAM_INDEX)):
        return False
    others = [child for position, child in state.items() if position != ADAM_INDEX]
    return len(others) <= 1 and all(is_count(child) for child in others)


def _fit_chain(state: Node, schedule: Leaf | None, target: OptimizerTarget | None, out: Layout) -> Node:
    if target is None or target.is_list:
        return _adam_chain(state, schedule, target, out)
    out.notes.append("the template's optimizer is one state, not a chain: Adam's state is taken alone")
    for position, child in state.items():
        out.drop(child if position != ADAM_INDEX else None, "schedule count; the template's optimizer has none")
    out.drop(schedule, "schedule count; the template's optimizer has none")
    adam = state[ADAM_INDEX]
    return adam if isinstance(adam, dict) else {}


def _adam_chain(state: Node, schedule: Leaf | None, target: OptimizerTarget | None, out: Layout) -> Node:
    """``[Adam, None, count]``, the count from the chain, from inject_hyperparams, or Adam's own."""
    adam = state[ADAM_INDEX]
    own = next((child for position, child in state.items() if position != ADAM_INDEX), None)
    count = next(leaves_of(own), None)
    if count and schedule:
        out.drop(schedule, "count of inject_hyperparams; the chain has a schedule count of its own")
    count = count or schedule
    if count is None and isinstance(adam, dict):
        count = next(leaves_of(adam.get("count")), None)
        out.notes.append("the learning rate was constant: the schedule starts at Adam's count")
    index = _schedule_index(target)
    chain: Node = {ADAM_INDEX: adam}
    if index and count:
        chain[index] = {"count": count}
    return chain


def _schedule_index(target: OptimizerTarget | None) -> str:
    if target is None:
        return SCHEDULE_INDEX
    counts = [name.removesuffix("/count") for name in target.arrays if name.endswith("/count")]
    return next((position for position in sorted(counts) if position != ADAM_INDEX), "")


def _linen(state: Node, target: OptimizerTarget | None) -> Iterator[tuple[Path, Leaf | None]]:
    if not is_chain(state):
        yield from flatten(_moments_under_params(state), ROOT)
        return
    length = max(int(position) for position in state) + 1
    for position in range(max(length, target.length if target else 0)):
        element = state.get(str(position))
        branch = _moments_under_params(element) if isinstance(element, dict) else element
        yield from flatten(branch, (*ROOT, Key(str(position), "sequence")))


def _moments_under_params(state: Node) -> Node:
    """Pre-training keeps the moments of the top level in a collection, as it keeps the weights."""
    return {key: {"params": child} if key in ("mu", "nu") else child for key, child in state.items()}


def _unknown(state: Node, target: OptimizerTarget | None, entries: list[tuple[Path, Leaf | None]]) -> list[Problem]:
    if target:
        return _unlike(target, entries)
    if _recognised(state):
        return []
    found = "a state of " + ", ".join(sorted({skeleton(path[1:]) for path, leaf in entries if leaf}))
    kinds = "AdamW, Adam, SGD, either with skip_step_on_spikes or a mask"
    return [Problem("opt_state", kinds, found, f"Give a --template that has this optimizer; {_DROP_HINT}.")]


def _recognised(state: Node) -> bool:
    if is_skip_step(state):
        inner = state["inner_state"]
        return isinstance(inner, dict) and (not inner or _recognised(inner))
    plain_schedule = state.keys() == {SGD_SCHEDULE_INDEX} and is_count(state[SGD_SCHEDULE_INDEX])
    return is_adam(state) or is_masked(state) or _holds_adam(state) or plain_schedule


def _unlike(target: OptimizerTarget, entries: list[tuple[Path, Leaf | None]]) -> list[Problem]:
    ours = frozenset(skeleton(path[1:]) for path, leaf in entries if leaf and leaf.kind == "array")
    is_list = bool(entries) and entries[0][0][1].kind == "sequence"
    length = len({path[1].name for path, _ in entries}) if is_list else 0
    if (ours, is_list, length) == (target.arrays, target.is_list, target.length):
        return []
    expected = f"the template's optimizer ({', '.join(sorted(target.arrays)) or 'nothing'})"
    found = ", ".join(sorted(ours)) or "nothing"
    return [Problem("opt_state", expected, found, f"A full resume would fail; {_DROP_HINT}.")]
