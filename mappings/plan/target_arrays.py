"""Target arrays: which rules fill each, its shape, dtype and chunks."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tensorferry.mappings.lowbit.schemes import is_low_bit, is_merged, scheme_of
from tensorferry.mappings.lowbit.tensors import LogicalTensor
from tensorferry.mappings.plan.account import covers
from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.rules.chunking import Cut, choose_chunk, choose_inner
from tensorferry.mappings.rules.compiled import CompiledRule
from tensorferry.mappings.rules.geometry import shape_of
from tensorferry.mappings.words.problems import Problem
from tensorferry.transforms.dtypes import numpy_dtype

FLOATS = frozenset({
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz",
})  # fmt: skip


PathOf = Callable[[str], tuple[str, ...]]


def tree_path(name: str) -> tuple[str, ...]:
    """Where MaxText keeps an array: below ``params``, level by level."""
    return ("params", *name.split("-"))


def hf_path(name: str) -> tuple[str, ...]:
    """A Hugging Face name is one flat key."""
    return (name,)


@dataclass(frozen=True)
class Use:
    """One rule's part in one target array: the rule, and the positions of the dims in the array's name."""

    compiled: CompiledRule
    at: Mapping[str, int]

    def source_name(self, at: Mapping[str, int]) -> str:
        """The source tensor at positions of the stacked dims."""
        return self.compiled.rule.source.fill(self.compiled.dims, {**self.at, **at})


@dataclass(frozen=True)
class TargetArray:
    """One array of the target and everything that fills it.

    Attributes:
      name: ``params-decoder-layers-mlp-wi_0-kernel``.
      spec: path, shape, dtype, chunks.
      uses: the rules that fill it.
      sources: the source names as a pattern, for people.
      ops: what is done on the way, for people.
      way: for quantised sources, their scheme and whether they are dequantised or carried, for people.
    """

    name: str
    spec: ArraySpec
    uses: tuple[Use, ...]
    sources: str
    ops: str
    way: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.spec), "sources": self.sources, "ops": self.ops, "way": self.way}


def target_arrays(
    rules: Sequence[CompiledRule],
    tensors: Mapping[str, LogicalTensor],
    dtype: str,
    chunk_bytes: int,
    path_of: PathOf = tree_path,
) -> tuple[tuple[TargetArray, ...], list[Problem]]:
    """Every target array that the rules write, in the rules' order, and what does not add up among them."""
    uses: dict[str, list[Use]] = defaultdict(list)
    for compiled in rules:
        for name, at in compiled.targets():
            uses[name].append(Use(compiled, at))
    problems = [problem for name, users in uses.items() for problem in _check(name, users)]
    if problems:
        return (), problems
    makers = {id(compiled): _Texts(compiled) for compiled in rules}
    arrays = [_array(name, path_of(name), users, tensors, dtype, chunk_bytes, makers) for name, users in uses.items()]
    return tuple(arrays), []


class _Texts:
    """What is the same for all arrays of one rule, made once."""

    def __init__(self, compiled: CompiledRule) -> None:
        value = compiled.rule.value
        self.sources = compiled.rule.source.pattern(compiled.dims) if value is None else f"no tensor: all {value:g}"
        ops = [str(compiled.rule.layout)] if compiled.rule.layout.source != compiled.rule.layout.target else []
        self.ops = "; ".join([*ops, *(op.describe() for op in compiled.rule.ops)])


def _check(name: str, users: Sequence[Use]) -> list[Problem]:
    shapes = {shape_of(use.compiled.target) for use in users}
    wrong = "its rules give it different shapes" if len(shapes) > 1 else covers([u.compiled.target for u in users])
    if not wrong:
        return []
    rules = "; ".join(str(use.compiled.rule.layout) for use in users)
    return [Problem(name, "every element written exactly once", wrong, "Mend the family's rules.", rule=rules)]


def _array(
    name: str,
    path: tuple[str, ...],
    users: Sequence[Use],
    tensors: Mapping[str, LogicalTensor],
    dtype: str,
    chunk_bytes: int,
    makers: Mapping[int, _Texts],
) -> TargetArray:
    shape = shape_of(users[0].compiled.target)
    sources = [tensor for use in users for tensor in _some(use, tensors)]
    target_dtype = _dtype(users, sources, dtype)
    itemsize = numpy_dtype(target_dtype).itemsize
    stacked, cuts = _common_cuts(users, sources)
    chunk = choose_chunk(shape, itemsize, stacked, cuts, chunk_bytes)
    inner = choose_inner(chunk, itemsize, [cut.axis for cut in stacked])
    spec = ArraySpec(path, target_dtype, shape, chunk, inner)
    texts = [makers[id(use.compiled)] for use in users]
    return TargetArray(
        name, spec, tuple(users),
        " + ".join(dict.fromkeys(text.sources for text in texts)),
        " | ".join(dict.fromkeys(text.ops for text in texts)),
        _way(sources),
    )  # fmt: skip


def _common_cuts(users: Sequence[Use], sources: Sequence[LogicalTensor]) -> tuple[list[Cut], list[Cut]]:
    """Stacked axes and cuts that hold for every rule of an array, with units that suit them all."""
    first = users[0].compiled
    order, grain = _storage(sources)
    stacked_axes = set(first.stacked_axes()).intersection(*(u.compiled.stacked_axes() for u in users))
    stacked = [Cut(axis, _unit(users, axis, grain)) for axis in sorted(stacked_axes)]
    cut_axes = set.intersection(*({cut.axis for cut in u.compiled.cuts()} for u in users))
    axes = [cut.axis for cut in first.cuts(order) if cut.axis in cut_axes - stacked_axes]
    cuts = [Cut(axis, _unit(users, axis, grain)) for axis in axes]
    length = shape_of(first.target)
    return stacked, [cut for cut in cuts if cut.unit < length[cut.axis]]


def _storage(sources: Sequence[LogicalTensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How quantised sources lie in their files: order of axes, and the multiples at which reads should start."""
    for tensor in sources:
        scheme = scheme_of(tensor)
        if scheme is not None:
            return scheme.stored_order(tensor), scheme.granularity(tensor)
    return (), ()


def _unit(users: Sequence[Use], axis: int, grain: Sequence[int]) -> int:
    return math.lcm(*(use.compiled.unit(axis, grain) for use in users))


def _dtype(users: Sequence[Use], sources: Sequence[LogicalTensor], wanted: str) -> str:
    """The target dtype: the rule's own, else the option's for floats; ``source`` keeps what the sources have, and
    takes bfloat16 for quantised ones that are not carried."""
    fixed = {use.compiled.rule.dtype for use in users} - {""}
    if fixed:
        return fixed.pop()
    found = {tensor.dtype for tensor in sources}
    if found and not found <= FLOATS:
        return found.pop() if len(found) == 1 else "float32"
    if wanted != "source":
        return wanted
    if any(is_low_bit(tensor) for tensor in sources):
        return "bfloat16"
    return found.pop() if len(found) == 1 else "float32"


def _way(sources: Sequence[LogicalTensor]) -> str:
    """How quantised and merged sources go, by the first of each kind."""
    kinds: dict[tuple, list[LogicalTensor]] = {}
    for tensor in sources:
        if tensor.scheme != "plain" or tensor.dtype.startswith("float8"):
            kinds.setdefault((tensor.scheme, tensor.dtype, *_product(tensor)), []).append(tensor)
    return "; ".join(_way_of(group) for group in kinds.values())


def _product(tensor: LogicalTensor) -> tuple[int, float] | tuple[()]:
    """Rank and scale of what is merged into a tensor."""
    return (tensor.params["rank"], tensor.params["scale"]) if is_merged(tensor) else ()


def _way_of(group: Sequence[LogicalTensor]) -> str:
    first = group[0]
    scheme = scheme_of(first)
    if scheme is None:
        return f"carry {len(group):,} x {first.dtype} codes bit for bit"
    verb = "carry" if first.scheme == "scale" else "merge" if is_merged(first) else "dequantise"
    return f"{verb} {len(group):,} x {scheme.describe(first)}"


def _some(use: Use, tensors: Mapping[str, LogicalTensor]) -> list[LogicalTensor]:
    positions = use.compiled.dims.positions(use.compiled.stack)
    names = (use.source_name(at) for at in positions)
    return [tensors[name] for name in names if name in tensors]
