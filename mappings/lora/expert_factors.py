"""Adapters of parameters without a module of their own: experts that transformers keeps in one tensor.

PEFT keeps A ``[(expert rank), in]`` and B ``[out, (rank expert)]`` for a parameter ``[expert, out, in]`` or ``[expert,
in, out]``; which of the two it took depends on the model and on PEFT's version, and is told by the shapes. It wraps the
module once for each of its parameters, and the names do not say which is which: the shapes do that too. A checkpoint
may hold the experts one by one; then each takes its share.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tensorferry.mappings.lora.peft_adapter import Pair
from tensorferry.mappings.lora.peft_config import AdapterConfig
from tensorferry.mappings.lowbit.tensors import LogicalTensor
from tensorferry.mappings.words.problems import Problem

Find = Callable[[str], str | None]

# Names of the expert's matrices that a parameter is made of, one under the other, by release.
_SHARES = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
_HOLDERS = (("", ""), (".mlp.experts", ".block_sparse_moe.experts"))


@dataclass(frozen=True)
class Share:
    """A tensor of the base, and which part of a parameter it is.

    Attributes:
      name: of the tensor.
      expert: which one it is; -1 when it holds them all.
      row: where its rows begin in the parameter.
    """

    name: str
    expert: int = -1
    row: int = 0


@dataclass(frozen=True)
class Parameter:
    """A parameter as the model has it.

    Attributes:
      name: its full name, which patterns of the config match.
      shape: ``[expert, rows, cols]``; without experts ``[rows, cols]``.
      shares: what the checkpoint holds of it.
    """

    name: str
    shape: tuple[int, ...]
    shares: tuple[Share, ...]

    @property
    def experts(self) -> int:
        return self.shape[0] if len(self.shape) == 3 else 1


@dataclass(frozen=True)
class Place:
    """A pair of factors, the parameter that it belongs to, and which way round."""

    pair: Pair
    parameter: Parameter
    transposed: bool


def place_parameters(
    pairs: Sequence[Pair], config: AdapterConfig, tensors: Mapping[str, LogicalTensor], find: Find
) -> tuple[list[Place], list[Problem]]:
    """Finds the parameter of every pair.

    Args:
      pairs: those whose ``module`` is what holds the parameter.
      config: the adapter's.
      tensors: the base's.
      find: the base's name for a name; None when it has no such tensor.
    """
    places: list[Place] = []
    problems: list[Problem] = []
    modules: dict[str, list[Pair]] = {}
    for pair in pairs:
        modules.setdefault(pair.module, []).append(pair)
    for module, own in modules.items():
        named = [name.rpartition(".")[2] for name in config.target_parameters if _holds(module, name)]
        found = [_parameter(module, name, tensors, find) for name in sorted(dict.fromkeys(named))]
        known = [parameter for parameter in found if parameter is not None]
        fitting = list(_fitting(own, known, config))
        if len(fitting) == 1:
            places += fitting[0]
        else:
            problems.append(_unplaced(own, module, known, len(fitting)))
    return places, problems


def _holds(module: str, target: str) -> bool:
    holder = target.rpartition(".")[0]
    return not holder or module == holder or module.endswith(f".{holder}")


def _parameter(module: str, last: str, tensors: Mapping[str, LogicalTensor], find: Find) -> Parameter | None:
    """The parameter ``module.last``, from one tensor of the base or from those of its experts."""
    name = f"{module}.{last}"
    whole = find(name)
    if whole is not None:
        shape = tensors[whole].shape
        return Parameter(name, shape, (Share(whole, -1 if len(shape) == 3 else 0),))
    for own, other in _HOLDERS:
        for shares in _SHARES.get(last, ()):
            holder = module.removesuffix(own) + other if module.endswith(own) else module
            parts = _experts(holder, shares, tensors, find)
            if parts:
                rows = sum(tensors[share.name].shape[0] for share in parts if share.expert == 0)
                shape = parts[-1].expert + 1, rows, tensors[parts[0].name].shape[-1]
                return Parameter(name, shape, tuple(parts))
    return None


def _experts(holder: str, shares: Sequence[str], tensors: Mapping[str, LogicalTensor], find: Find) -> list[Share]:
    found: list[Share] = []
    for expert in itertools.count():
        names = [find(f"{holder}.{expert}.{share}.weight") for share in shares]
        if any(name is None or len(tensors[name].shape) != 2 for name in names):
            return found
        row = 0
        for name in filter(None, names):
            found.append(Share(name, expert, row))
            row += tensors[name].shape[0]
    return found


def _fitting(pairs: Sequence[Pair], parameters: Sequence[Parameter], config: AdapterConfig) -> Iterator[list[Place]]:
    """Every way to give each pair a parameter of its own; all of a module lie the same way round."""
    if len(pairs) != len(parameters):
        return
    for transposed in (False, True):
        for order in itertools.permutations(parameters):
            places = [Place(pair, one, transposed) for pair, one in zip(pairs, order, strict=True)]
            if all(_fits(place, config) for place in places):
                yield places


def _fits(place: Place, config: AdapterConfig) -> bool:
    parameter, pair = place.parameter, place.pair
    if len(parameter.shape) not in (2, 3) or (place.transposed and len(parameter.shape) == 2):
        return False
    rank = config.rank_of(parameter.name) * parameter.experts
    rows, cols = parameter.shape[-2:]
    into, out = (rows, cols) if place.transposed else (cols, rows)
    return pair.a.shape == (rank, into) and pair.b.shape == (out, rank)


def _unplaced(pairs: Sequence[Pair], module: str, known: Sequence[Parameter], ways: int) -> Problem:
    shapes = " and ".join(f"{list(pair.a.shape)}, {list(pair.b.shape)}" for pair in pairs)
    has = ", ".join(f"{one.name} {list(one.shape)}" for one in known) or f"no target parameter of {module}"
    expected = f"factors of ({has}), one pair for each, which their shapes tell apart"
    found = f"{shapes}, which fit in {ways} ways" if ways else f"{shapes}, which do not fit"
    fix = "Merge with PEFT and convert what that saves." if ways else "Is --source the base model of this adapter?"
    return Problem(pairs[0].a.name, expected, found, fix, file=pairs[0].a.file)
