"""Finds a model's parameters in an Orbax tree, whoever wrote it, and says what else is there."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from tensorferry.mappings.tunix.classify import role_of, unwrap_value
from tensorferry.mappings.tunix.model_check import scan_layers
from tensorferry.mappings.tunix.step_tree import Leaf, Path, spell
from tensorferry.mappings.words.problems import Problem

# Levels above a model's own: train states, bare parameters, Tunix's adapter, a model saved as a whole.
_PREFIXES = ("params/params", "params", "", "base", "model", "model/base", "params/base", "state/params")
_TOP = frozenset({"decoder", "token_embedder", "shared_embedding"})
_TRAIN_STATE = "params/params"
_NO_WEIGHT = {
    "rng_key": "random-number state",
    "rng_count": "random-number state",
    "sown": "values sown by one forward pass",
    "cache": "a decoding cache",
    "empty": "marks without an array",
}


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model.

    Attributes:
      arrays: MaxText's name, ``params-decoder-layers-mlp-wi_0-kernel``, collection first, to the stored leaf.
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
        return scan_layers(name.partition("-")[2].replace("-", "/") for name in self.arrays)


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
    inside = {leaf: named for leaf in stored if (named := _named(leaf.path, where)) is not None}
    roles = {leaf: role_of(leaf, path) for leaf, (_, path) in inside.items()}
    arrays = {
        "-".join((collection, *(key.name for key in path))): leaf
        for leaf, (collection, path) in inside.items()
        if roles[leaf] == "weight"
    }
    others = [(leaf, _why(leaf, roles.get(leaf, ""))) for leaf in stored if roles.get(leaf) != "weight"]
    return Parameters(arrays, where, tuple(_left_out(others)), tuple(_adapters(arrays)))


def with_collections(arrays: Mapping[str, Leaf], expected: Collection[str]) -> dict[str, Leaf]:
    """The arrays under the collections where a family has them: writers differ in that, and in nothing else.

    >>> list(with_collections({"MoEBiasVar-decoder-gate-bias": "leaf"}, {"params-decoder-gate-bias"}))
    ['params-decoder-gate-bias']
    """
    places = {name.partition("-")[2]: name for name in expected}
    return {
        name if name in expected else places.get(name.partition("-")[2], name): leaf for name, leaf in arrays.items()
    }


def _named(path: Path, where: str) -> tuple[str, Path] | None:
    """The collection that a leaf belongs to, and its path there; None when it is no part of the model.

    A train state keeps collections of variables of other classes beside its parameters.
    """
    if where == _TRAIN_STATE and len(path) > 2 and path[0].name == "params":
        return path[1].name, unwrap_value(path[2:])
    rest = _below(path, where)
    return None if rest is None else ("params", unwrap_value(rest))


def _below(path: Path, prefix: str) -> Path | None:
    """The path below a prefix; None when it is not below it."""
    levels = tuple(prefix.split("/")) if prefix else ()
    names = tuple(key.name for key in path[: len(levels)])
    return path[len(levels) :] if names == levels and len(path) > len(levels) else None


def _is_model(path: Path, prefix: str) -> bool:
    rest = _below(path, prefix)
    return rest is not None and rest[0].name in _TOP


def _left_out(leaves: Iterable[tuple[Leaf, str]]) -> Iterator[str]:
    counts: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    for leaf, why in leaves:
        key = (leaf.path[0].name if leaf.path else leaf.item, why)
        counts[key] += 1
        nbytes[key] += leaf.nbytes
    for (top, why), count in sorted(counts.items()):
        yield f"{top}: {count:,} leaves, {nbytes[top, why]:,} bytes: {why}"


def _why(leaf: Leaf, role: str) -> str:
    top = leaf.path[0].name if leaf.path else ""
    if top in ("opt_state", "optimizer_state", "optimizer"):
        return "the optimizer's state, which Hugging Face checkpoints do not hold"
    return "the step counter" if top == "step" else _NO_WEIGHT.get(role, "no parameters of the model")


def _adapters(arrays: Mapping[str, Leaf]) -> Iterator[Problem]:
    found = [name for name in arrays if name.endswith(("_lora_a", "_lora_b"))]
    if found:
        yield Problem(
            found[0],
            "a model without LoRA factors",
            f"{len(found):,} of them",
            "Merge them into the weights before the export, or export them alone, as an adapter, with --lora.",
        )


def _no_model(leaves: Iterable[Leaf], item: str) -> Problem:
    expected = "MaxText's parameters at params/params, params, the root, or base"
    tops = sorted({spell(leaf.path[:2]) for leaf in leaves})
    found = ", ".join(tops[:6]) + (" …" if len(tops) > 6 else "") if tops else "an empty tree"
    return Problem(item, expected, found, "Name the item that holds the model: items, or model_params.")
