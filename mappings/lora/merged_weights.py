"""Merging an adapter: each weight that it touches becomes a weight with a product in it, before any rule sees it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from tensorferry.mappings.families.spelling import PREFIXES, spelling
from tensorferry.mappings.lora.expert_factors import place_parameters
from tensorferry.mappings.lora.peft_adapter import CONFIG_FILE, Adapter, Pair
from tensorferry.mappings.lowbit.schemes import is_merged
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.target_arrays import FLOATS
from tensorferry.mappings.words.problems import Problem

# Where a stored tensor lies in the adapter's folder and not in the checkpoint's.
ADAPTER_MARK = "adapter:"
_WEIGHT = ".weight"

Tensors = Mapping[str, LogicalTensor]


@dataclass(frozen=True)
class Merged:
    """A checkpoint with an adapter in it.

    Attributes:
      tensors: every tensor of the checkpoint by name, those that the adapter touches changed.
      sources: base tensor's name to the adapter's tensors that change it.
      scales: base tensor's name to rank and scale of its product.
      problems: what of the adapter does not fit.
      notes: sentences for the plan.
    """

    tensors: Tensors
    sources: Mapping[str, tuple[str, ...]]
    scales: Mapping[str, tuple[int, float]]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


def merge_adapter(adapter: Adapter, tensors: Tensors) -> Merged:
    """Puts an adapter into the tensors of its base model. Collects problems instead of raising them."""
    merger = _Merger(adapter, tensors)
    for name, stored in adapter.whole.items():
        merger.replace(name, stored)
    for pair in adapter.pairs:
        merger.add(pair)
    merger.add_parameters(adapter.parameters)
    merger.problems += _untouched(adapter, tensors)
    return merger.merged()


class _Merger:
    def __init__(self, adapter: Adapter, tensors: Tensors) -> None:
        self.config, self.tensors, self.names = adapter.config, dict(tensors), Names(tensors)
        self.sources: dict[str, tuple[str, ...]] = {}
        self.scales: dict[str, tuple[int, float]] = {}
        self.problems: list[Problem] = []

    def merged(self) -> Merged:
        notes = (*self.names.notes(), *self._left_alone())
        return Merged(self.tensors, self.sources, self.scales, tuple(self.problems), notes)

    def _left_alone(self) -> Iterator[str]:
        """Says which weights stay as they are although target_modules names them."""
        left = [
            name
            for name, tensor in self.tensors.items()
            if len(tensor.shape) == 2 and name.endswith(_WEIGHT) and name not in self.sources
            and any(_ends(name.removesuffix(_WEIGHT), target) for target in self.config.targets)
        ]  # fmt: skip
        if left:
            yield f"without factors, though target_modules names them: {len(left):,} weights, such as {left[0]}"

    def replace(self, name: str, stored: StoredTensor) -> None:
        """A tensor that the adapter holds whole takes the base's place."""
        found = self.names.find(name)
        if found is None:
            self.problems.append(_no_base(stored, name))
        elif self.tensors[found].shape != stored.shape:
            self.problems.append(_misshapen_whole(stored, self.tensors[found]))
        else:
            self.tensors[found] = replace(LogicalTensor.plain(marked(stored)), name=found)
            self.sources[found] = (*self.sources.get(found, ()), stored.name)

    def add(self, pair: Pair) -> None:
        """A pair of factors goes into the weight of its module."""
        found = self.names.find(pair.module + _WEIGHT)
        if found is None:
            self.problems.append(_no_base(pair.a, pair.module + _WEIGHT))
            return
        base = self.tensors[found]
        problem = _unfit(pair, base)
        if problem is not None:
            self.problems.append(problem)
            return
        self._put(base, Product(*self._of(pair.module), pair.is_embedding), pair)

    def add_parameters(self, pairs: Sequence[Pair]) -> None:
        """Pairs of parameters without a module go into what the base holds of these."""
        places, problems = place_parameters(pairs, self.config, self.tensors, self.names.find)
        self.problems += problems
        for place in places:
            parameter = place.parameter
            for share in parameter.shares:
                rank, scale = self._of(parameter.name)
                product = Product(rank, scale, place.transposed, parameter.experts, share.expert, share.row)
                self._put(self.tensors[share.name], product, place.pair)

    def _of(self, name: str) -> tuple[int, float]:
        return self.config.rank_of(name), self.config.scale_of(name)

    def _put(self, base: LogicalTensor, product: "Product", pair: Pair) -> None:
        if is_merged(base):
            self.problems.append(_twice(pair, base))
            return
        self.tensors[base.name] = product.into(base, pair)
        self.sources[base.name] = (*self.sources.get(base.name, ()), pair.a.name, pair.b.name)
        self.scales[base.name] = (product.rank, product.scale)


@dataclass(frozen=True)
class Product:
    """What is added to a weight; see :mod:`tensorferry.mappings.lowbit.merged`."""

    rank: int
    scale: float
    transposed: bool = False
    experts: int = 1
    expert: int = 0
    row: int = 0

    def into(self, base: LogicalTensor, pair: Pair) -> LogicalTensor:
        """The weight with the product in it."""
        params = {"base": base.scheme, "base_params": base.params, **asdict(self)}
        stored = {**base.stored, "lora_a": marked(pair.a), "lora_b": marked(pair.b)}
        return LogicalTensor(base.name, base.shape, base.dtype, stored, "lora", params)


class Names:
    """Names of the base for names of the adapter: the language model is spelt differently by different releases."""

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._own = names, spelling(names)
        self._renamed: dict[str, str] = {}

    def find(self, name: str) -> str | None:
        """The base's name for a tensor; None when it has no such tensor."""
        found = next((one for one in self._candidates(name) if one in self._names), None)
        if found not in (None, name):
            self._renamed[name] = found
        return found

    def notes(self) -> Iterator[str]:
        """Says so where names differ."""
        for name, found in self._renamed.items():
            many = f" and {len(self._renamed) - 1:,} more" if len(self._renamed) > 1 else ""
            yield f"the adapter's {name}{many} is {found} in the checkpoint"
            return

    def _candidates(self, name: str) -> Iterator[str]:
        yield name
        if name.rpartition("lm_head")[2] == _WEIGHT:
            yield self._own.head
        for prefix in PREFIXES:
            if name.startswith(prefix):
                yield self._own.prefix + name.removeprefix(prefix)
        yield f"model.{name}"
        yield name.removeprefix("model.")


def marked(stored: StoredTensor) -> StoredTensor:
    """A tensor of the adapter, told from those of the checkpoint."""
    return replace(stored, file=ADAPTER_MARK + stored.file)


def _unfit(pair: Pair, base: LogicalTensor) -> Problem | None:
    into, out = pair.a.shape[1], pair.b.shape[0]
    expected = (into, out) if pair.is_embedding else (out, into)
    if base.shape != expected:
        wanted = f"factors of a weight {list(base.shape)}"
        found = f"A {list(pair.a.shape)} and B {list(pair.b.shape)}, those of one {list(expected)}"
        return Problem(pair.a.name, wanted, found, _OTHER_BASE, file=pair.a.file)
    if base.dtype not in FLOATS:
        return Problem(pair.a.name, "factors of a float weight", f"{base.name} {base.dtype}", _OTHER_BASE)
    return None


_OTHER_BASE = "Is --source the base model of this adapter?"


def _no_base(stored: StoredTensor, name: str) -> Problem:
    if name.endswith("lm_head.weight"):
        fix = "Merge with PEFT, untied, and convert what that saves; or leave the head out of the adapter."
        return Problem(stored.name, "an output head in the checkpoint", "none: it is tied to the embedding", fix,
                       file=stored.file)  # fmt: skip
    return Problem(stored.name, f"{name} in the checkpoint", "no tensor of this name", _OTHER_BASE, file=stored.file)


def _twice(pair: Pair, base: LogicalTensor) -> Problem:
    found = f"another one, {base.stored['lora_a'].name}"
    return Problem(pair.a.name, f"the one pair for {base.name}", found, "Save one adapter alone.", file=pair.a.file)


def _misshapen_whole(stored: StoredTensor, base: LogicalTensor) -> Problem:
    grown = base.shape[1:] == stored.shape[1:]
    fix = "Convert what PEFT saves merged: its config.json has the new vocabulary." if grown else _OTHER_BASE
    return Problem(stored.name, f"{list(base.shape)}, the shape of {base.name}", str(list(stored.shape)), fix,
                   file=stored.file)  # fmt: skip


def _untouched(adapter: Adapter, tensors: Tensors) -> Iterator[Problem]:
    """Targets that the base has and the adapter holds nothing of."""
    modules = {pair.module for pair in (*adapter.pairs, *adapter.parameters)}
    bases = [name.removesuffix(_WEIGHT) for name, tensor in tensors.items() if len(tensor.shape) == 2]
    for target in adapter.config.targets:
        if any(_ends(module, target) for module in bases) and not any(_ends(module, target) for module in modules):
            yield Problem(
                f"target_modules: {target}", "factors of at least one such module", "none",
                "Is the adapter complete?", file=CONFIG_FILE,
            )  # fmt: skip


def _ends(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")
