"""The optimizer's state: shells peeled off, then the layout that pre-training's own optimizer has."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tensorferry.mappings.tunix.classify import ADAPTER_LEVEL, unwrap_value
from tensorferry.mappings.tunix.step_tree import DroppedLeaf, Key, Leaf, Path

Node = dict[str, "Node | Leaf"]

# AdamW as pre-training builds it is a chain of three: Adam's state, weight decay (stateless), the schedule.
ADAM_INDEX, SCHEDULE_INDEX = "0", "2"
SGD_SCHEDULE_INDEX = "1"

_SKIP_STEP = {"inner_state", "losses", "grad_norms", "count", "is_skipped"}
_MULTI_STEPS = {"mini_step", "gradient_step", "inner_opt_state"}
_HYPERPARAMS = {"hyperparams", "hyperparams_states"}


@dataclass(slots=True)
class Peeled:
    """What is left of an optimizer's state when its shells are off.

    Attributes:
      state: the inner optimizer's state, digit keys for positions of a chain.
      schedule: the count of ``inject_hyperparams``, which counts schedule steps; not yet placed.
      gradient_step: the real update count, where gradients were accumulated.
      mini_step: how many micro-batches of an unfinished accumulation are lost.
      dropped: leaves of the shells, each with a reason.
      notes: what was done, as sentences.
    """

    state: Node
    schedule: Leaf | None = None
    gradient_step: Leaf | None = None
    mini_step: Leaf | None = None
    dropped: list[DroppedLeaf] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def drop(self, node: "Node | Leaf | None", reason: str) -> None:
        self.dropped.extend(DroppedLeaf(leaf, reason) for leaf in leaves_of(node))


def nest(leaves: Iterable[Leaf]) -> Node:
    """The leaves as nested dicts, without each final ``value``; positions become digit keys."""
    root: Node = {}
    for leaf in leaves:
        node = root
        *parents, last = unwrap_value(leaf.path)
        for key in parents:
            child = node.setdefault(key.name, {})
            if isinstance(child, Leaf):
                raise ValueError(f"{leaf} lies below the leaf {child}")
            node = child
        node[last.name] = leaf
    return root


def leaves_of(node: "Node | Leaf | None") -> Iterator[Leaf]:
    """All leaves below a node."""
    if isinstance(node, Leaf):
        yield node
    elif node:
        for child in node.values():
            yield from leaves_of(child)


def is_chain(node: object) -> bool:
    """Whether a node is the tuple of an ``optax.chain``: all keys are positions."""
    return isinstance(node, dict) and bool(node) and all(key.isdigit() for key in node)


def is_adam(node: object) -> bool:
    """Whether a node is Adam's own state: moments and a count, nothing else."""
    return isinstance(node, dict) and {"mu", "nu"} <= node.keys() <= {"count", "mu", "nu"}


def is_count(node: object) -> bool:
    """Whether a node is the state of a schedule: a count, nothing else."""
    return isinstance(node, dict) and node.keys() == {"count"}


def is_skip_step(node: object) -> bool:
    """Whether a node is the state of ``skip_step_on_spikes``."""
    return isinstance(node, dict) and node.keys() >= _SKIP_STEP


def is_masked(node: object) -> bool:
    """Whether a node is the state of a ``multi_transform``: one state for each label of the parameters."""
    return isinstance(node, dict) and node.keys() == {"inner_states"}


def is_injected(node: object) -> bool:
    """Whether a node is the state of ``inject_hyperparams``."""
    return isinstance(node, dict) and "hyperparams" in node


def is_multi_steps(node: object) -> bool:
    """Whether a node is the state of ``optax.MultiSteps``."""
    return isinstance(node, dict) and {"mini_step", "gradient_step"} <= node.keys()


def _is_optimizer(node: object) -> bool:
    tests = (is_chain, is_adam, is_skip_step, is_masked, is_injected, is_multi_steps)
    return any(test(node) for test in tests)


def _clipped(node: Node) -> Node | None:
    """The one stateful element of an outer chain, when that element is a whole optimizer by itself."""
    if len(node) != 1 or not is_chain(node):
        return None
    position, element = next(iter(node.items()))
    if isinstance(element, Leaf) or not _is_optimizer(element):
        return None
    # Adam's state alone at position 0 is AdamW with a constant learning rate, not a shell.
    return None if position == ADAM_INDEX and is_adam(element) else element


def _child(node: Node, key: str) -> Node:
    child = node.get(key)
    return child if isinstance(child, dict) else {}


def _as_leaf(node: "Node | Leaf | None") -> Leaf | None:
    return node if isinstance(node, Leaf) else None


def _peel_injected(node: Node, out: Peeled) -> Node:
    for key in _HYPERPARAMS & node.keys():
        out.drop(node[key], "hyperparameter of the post-training optimizer; pre-training has its own schedule")
    for key in node.keys() - _HYPERPARAMS - {"count", "inner_state"}:
        out.drop(node[key], "part of inject_hyperparams without a place in pre-training's optimizer")
    out.drop(out.schedule, "count of an outer inject_hyperparams; the inner one is used")
    out.schedule = _as_leaf(node.get("count"))
    return _child(node, "inner_state")


def _peel_multi_steps(node: Node, out: Peeled) -> Node:
    out.drop(out.gradient_step, "update count of an outer MultiSteps; the inner one is used")
    out.gradient_step, out.mini_step = _as_leaf(node["gradient_step"]), _as_leaf(node["mini_step"])
    out.drop(node["mini_step"], "position inside a gradient accumulation; pre-training starts a new one")
    for key in node.keys() - _MULTI_STEPS:
        out.drop(node[key], "accumulated gradients; pre-training has no place for them")
    return _child(node, "inner_opt_state")


def peel(state: Node) -> Peeled:
    """Takes off ``inject_hyperparams``, ``MultiSteps`` and a stateless clip in front, in any order."""
    out = Peeled(state)
    while True:
        if is_injected(out.state):
            out.state = _peel_injected(out.state, out)
        elif is_multi_steps(out.state):
            out.state = _peel_multi_steps(out.state, out)
        elif (inner := _clipped(out.state)) is not None:
            out.state = inner
        else:
            return _peel_inside(out)


def _peel_inside(out: Peeled) -> Peeled:
    """Takes the same shells off inside ``skip_step_on_spikes``: pre-training builds its inner one bare."""
    if not is_skip_step(out.state) or not isinstance(out.state["inner_state"], dict):
        return out
    inner = peel(out.state["inner_state"])
    out.state = out.state | {"inner_state": inner.state}
    out.dropped += inner.dropped
    if inner.schedule:
        out.drop(out.schedule, "count of an outer inject_hyperparams; the inner one is used")
        out.schedule = inner.schedule
    if inner.gradient_step:
        out.drop(out.gradient_step, "update count of an outer MultiSteps; the inner one is used")
        out.gradient_step, out.mini_step = inner.gradient_step, inner.mini_step
    return out


def strip_adapter(node: "Node | Leaf") -> "Node | Leaf":
    """Takes the adapter's level off where it is the only child of a moment tree."""
    if isinstance(node, Leaf):
        return node
    return {key: _below_moment(key, strip_adapter(child)) for key, child in node.items()}


def _below_moment(key: str, child: "Node | Leaf") -> "Node | Leaf":
    wraps = key in ("mu", "nu", "acc_grads") and isinstance(child, dict) and child.keys() == {ADAPTER_LEVEL}
    return child[ADAPTER_LEVEL] if wraps and isinstance(child, dict) else child


def moments_of(node: "Node | Leaf", name: str = "") -> dict[str, list[Leaf]]:
    """Moments (masked ones included) by the name of their weight.

    Args:
      node: a state without the adapter's level.
      name: the key under which the node was found.
    """
    found: dict[str, list[Leaf]] = {}
    if isinstance(node, Leaf):
        return found
    for key, child in node.items():
        pairs = _named(child) if key in ("mu", "nu") else moments_of(child, key).items()
        for weight, leaves in pairs:
            found.setdefault(weight, []).extend(leaves)
    return found


def _named(node: "Node | Leaf", prefix: str = "") -> Iterator[tuple[str, list[Leaf]]]:
    if isinstance(node, Leaf):
        yield prefix, [node]
        return
    for key, child in node.items():
        yield from _named(child, f"{prefix}/{key}" if prefix else key)


def flatten(node: "Node | Leaf | None", path: Path) -> Iterator[tuple[Path, Leaf | None]]:
    """Paths and leaves below a node; a ``None`` node is a gap of a list."""
    if node is None or isinstance(node, Leaf):
        yield path, node
        return
    for key, child in node.items():
        yield from flatten(child, (*path, Key(key)))
