"""Finds a model's parameters in an Orbax tree, whoever wrote it, and says what else is there."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mappings.problems import Problem
from mappings.tunix.classify import role_of, unwrap_value
from mappings.tunix.model import scan_layers
from mappings.tunix.tree import Leaf, Path, spell

# Levels above a model's own: train states, bare parameters, Tunix's adapter, a model saved as a whole.
_PREFIXES = ("params/params", "params", "", "base", "model", "model/base", "params/base", "state/params")
_TOP = frozenset({"decoder", "token_embedder", "shared_embedding"})
# A collection that MaxText's tree declares beside the parameters; its loaders look for it among them.
_BESIDE = "params/MoEBiasVar"


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model.

    Attributes:
      arrays: MaxText's name, ``params-decoder-layers-mlp-wi_0-kernel``, to the stored leaf.
      where: the levels above them, such as ``params/params``; empty for the root.
      left_out: what else the tree holds, as sentences.
      problems: why there are none.
    """

    arrays: Mapping[str, Leaf]
    where: str = ""
    left_out: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def scan_layers(self) -> bool | None:
        """Whether the layers are stacked; None when the names do not tell."""
        return scan_layers(name.removeprefix("params-").replace("-", "/") for name in self.arrays)


def find_parameters(leaves: Iterable[Leaf], item: str) -> Parameters:
    """The parameters among the leaves of an item.

    Args:
      leaves: all of them.
      item: what the item is called, for messages.
    """
    stored = list(leaves)
    where = next((prefix for prefix in _PREFIXES if any(_is_model(leaf.path, prefix) for leaf in stored)), None)
    if where is None:
        return Parameters({}, problems=(_no_model(stored, item),))
    inside = {leaf: rest for leaf in stored if (rest := _below(leaf.path, where)) is not None}
    if where == "params/params":
        inside |= {leaf: rest for leaf in stored if (rest := _below(leaf.path, _BESIDE)) is not None}
    weights = {
        leaf: unwrap_value(rest) for leaf, rest in inside.items() if role_of(leaf, unwrap_value(rest)) == "weight"
    }
    arrays = {"-".join(("params", *(key.name for key in path))): leaf for leaf, path in weights.items()}
    left = tuple(_left_out([leaf for leaf in stored if leaf not in weights]))
    return Parameters(arrays, where, left, tuple(_adapters(arrays)))


def _below(path: Path, prefix: str) -> Path | None:
    """The path below a prefix; None when it is not below it."""
    levels = tuple(prefix.split("/")) if prefix else ()
    names = tuple(key.name for key in path[: len(levels)])
    return path[len(levels) :] if names == levels and len(path) > len(levels) else None


def _is_model(path: Path, prefix: str) -> bool:
    rest = _below(path, prefix)
    return rest is not None and rest[0].name in _TOP


def _left_out(leaves: Iterable[Leaf]) -> Iterable[str]:
    counts: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for leaf in leaves:
        top = leaf.path[0].name if leaf.path else leaf.item
        counts[top] += 1
        nbytes[top] += leaf.nbytes
    for top, count in sorted(counts.items()):
        yield f"{top}: {count:,} leaves, {nbytes[top]:,} bytes: {_why(top)}"


def _why(top: str) -> str:
    if top in ("opt_state", "optimizer_state", "optimizer"):
        return "the optimizer's state, which Hugging Face checkpoints do not hold"
    if top == "step":
        return "the step counter"
    return "no parameters of the model"


def _adapters(arrays: Mapping[str, Leaf]) -> Iterable[Problem]:
    found = [name for name in arrays if name.endswith(("_lora_a", "_lora_b"))]
    if found:
        yield Problem(
            found[0],
            "a model without LoRA factors",
            f"{len(found):,} of them",
            "Merge them into the weights before the export: neither their scale nor their rank is on record.",
        )


def _no_model(leaves: Iterable[Leaf], item: str) -> Problem:
    expected = "MaxText's parameters at params/params, params, the root, or base"
    tops = sorted({spell(leaf.path[:2]) for leaf in leaves})
    found = ", ".join(tops[:6]) + (" …" if len(tops) > 6 else "") if tops else "an empty tree"
    return Problem(item, expected, found, "Name the item that holds the model: items, or model_params.")
