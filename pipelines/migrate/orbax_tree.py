"""The new tree as Orbax takes it: dicts and lists, array specs at the leaves, None in the gaps."""

from collections.abc import Iterable
from typing import Any

from tensorferry.mappings.tunix.step_tree import Key, LeafKind, Path

_EMPTY: dict[LeafKind, Any] = {"none": None, "empty_dict": {}, "empty_list": [], "empty_tuple": ()}


def mark_value(kind: LeafKind) -> Any:
    """What stands in the tree for a leaf without an array."""
    return _EMPTY[kind]


def nested(leaves: Iterable[tuple[Path, Any]]) -> Any:
    """Nested dicts, and lists where the keys are positions.

    >>> nested([((Key("a"), Key("1", "sequence")), 5), ((Key("b"),), {})])
    {'a': [None, 5], 'b': {}}
    """
    root: dict[Key, Any] = {}
    for path, value in leaves:
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Branch())
        node[path[-1]] = value
    return _plain(root)


class _Branch(dict[Key, Any]):
    """A node on the way to a leaf; an empty dict that is itself a leaf is none."""


def _plain(node: dict[Key, Any]) -> Any:
    values = {key: _plain(child) if isinstance(child, _Branch) else child for key, child in node.items()}
    if any(key.kind == "sequence" for key in values):
        places = {int(key.name): value for key, value in values.items()}
        return [places.get(place) for place in range(max(places) + 1)]
    return {key.name: value for key, value in values.items()}
