"""The way home of carried FP8: the rules of the conversion, codes and scales apart, turned round."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tensorferry.mappings.export.carried import Tensors, carried_pairs, folded_factors, stacked_sources, target_uses
from tensorferry.mappings.export.scale_finish import Finish
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.carry import SCALE_LAYOUTS, Carried, carry_low_bit
from tensorferry.mappings.rules.compiled import CompiledRule, compile_rule, source_shape
from tensorferry.mappings.rules.geometry import shape_of
from tensorferry.mappings.rules.layout import Layout, term_atoms
from tensorferry.mappings.words.problems import Problem
from tensorferry.transforms.ops import Scale

_FIX = "Export it with --dtype bfloat16, which dequantises."


@dataclass(frozen=True)
class Kept:
    """Rules that lead carried arrays back to the tensors of an FP8 checkpoint.

    Attributes:
      rules: for every array, towards MaxText; codes and scales have rules of their own.
      finishes: name under which a scale arrives to how it is finished.
      codes: names of the tensors that leave as they were carried.
      problems: why that cannot be.
    """

    rules: tuple[CompiledRule, ...]
    finishes: Mapping[str, Finish] = field(default_factory=dict)
    codes: frozenset[str] = frozenset()
    problems: tuple[Problem, ...] = ()

    def inverse(self) -> list[CompiledRule]:
        """Every rule turned round, in order."""
        return [_inverse(rule, self._dtype(rule)) for rule in self.rules]

    def _dtype(self, rule: CompiledRule) -> str:
        """The dtype that a rule's tensors must have: codes stay codes, scales are numbers until they are finished."""
        name = next(rule.sources())
        return rule.rule.dtype if name in self.codes else "float32" if name in self.finishes else ""


def _inverse(rule: CompiledRule, dtype: str) -> CompiledRule:
    """The rule from its targets to its sources, for the same arrays."""
    plain = rule.rule.inverse(rule.dims)
    made = compile_rule(replace(plain, dtype=dtype or plain.dtype), rule.dims)
    if rule.positions is None:
        return made
    both = [i for i, atom in enumerate(rule.named) if atom in made.named]
    wanted = {tuple(position[i] for i in both) for position in rule.positions}
    return made.only(
        tuple(at[atom] for atom in made.named)
        for at in rule.dims.positions(made.named)
        if tuple(at[rule.named[i]] for i in both) in wanted
    )


def keep_carried(rules: Sequence[CompiledRule], tensors: Tensors, low_bit: Tensors, at_hand: bool) -> Kept:
    """Rules under which carried arrays leave as the FP8 checkpoint stores them.

    Args:
      rules: the family's rules, towards MaxText.
      tensors: the arrays.
      low_bit: the FP8 checkpoint's quantised weights by name.
      at_hand: whether its scales can be read.
    """
    pairs = carried_pairs(tensors)
    names = {name for array, use in target_uses(rules, pairs) for name in stacked_sources(use)} & low_bit.keys()
    if not names:
        return Kept(tuple(rules))
    given = {name: _plain(name, rule) for rule in rules for name in rule.sources()}
    given |= {name: low_bit[name] for name in names}
    ways: list[Carried] = []
    chosen: Carried | None = None
    for layout in SCALE_LAYOUTS:
        ways.append(carry_low_bit(rules, given, layout))
        if not _misfits(ways[-1], tensors):
            chosen = ways[-1]
            break
    problems = [*ways[0].problems, *_uncarried(ways[0], names), *_in_parts(ways[0], names)]
    if chosen is None and not problems:
        problems = [_misfit(name, ways, tensors) for name in _misfits(ways[0], tensors)]
    if chosen is None or problems:
        return Kept((), problems=tuple(problems))
    made = [_plain_scale(rule) if _is_scale(rule, chosen) else rule for rule in chosen.rules]
    return Kept(tuple(made), dict(_finishes(chosen, at_hand)), frozenset(names))


def _plain(name: str, rule: CompiledRule) -> LogicalTensor:
    return LogicalTensor.plain(StoredTensor(name, "bfloat16", source_shape(rule), "", 0))


def _is_scale(rule: CompiledRule, carried: Carried) -> bool:
    return carried.tensors[next(rule.sources())].scheme == "scale"


def _plain_scale(rule: CompiledRule) -> CompiledRule:
    """The rule of a scale as one of its own: of a part of a weight it has that part's entries only, and factors that
    it has taken up are undone when it is finished."""
    ops = tuple(op for op in rule.rule.ops if not isinstance(op, Scale))
    plain = rule.rule.layout
    source = tuple(tuple(atom for term in axis for atom in term_atoms(term)) for axis in plain.source)
    made = compile_rule(replace(rule.rule, ops=ops, layout=Layout(source, plain.target)), rule.dims)
    return replace(made, positions=rule.positions)


def _finishes(carried: Carried, at_hand: bool) -> Iterator[tuple[str, Finish]]:
    codes: CompiledRule | None = None
    for rule in carried.rules:
        if not _is_scale(rule, carried):
            codes = rule
            continue
        assert codes is not None  # the rule of a scale follows that of its codes
        factors, (axis, offset) = folded_factors(rule.rule.ops), _part(codes)
        shape = source_shape(_plain_scale(rule))
        for name in rule.sources():
            scale = replace(carried.tensors[name], shape=shape)
            yield name, Finish(scale, factors, scale.stored["scale"] if factors and at_hand else None, axis, offset)


def _part(rule: CompiledRule) -> tuple[int, int]:
    """The source axis of which a rule uses a part, and where that begins; -1 and 0 for a whole tensor."""
    for number, axis in enumerate(rule.source):
        for factor in axis.factors:
            if factor.part:
                return number, factor.offset * axis.row
    return -1, 0


def _misfits(carried: Carried, tensors: Tensors) -> list[str]:
    """Scales whose arrays have other shapes than the conversion gives them, or are not there."""
    return [
        name
        for rule in carried.rules
        if _is_scale(rule, carried)
        for name, _ in rule.targets()
        if name not in tensors or tensors[name].shape != shape_of(rule.target)
    ]


def _misfit(name: str, ways: Sequence[Carried], tensors: Tensors) -> Problem:
    shapes = {shape_of(rule.target): None for way in ways for rule in way.rules if name in dict(rule.targets())}
    expected = " or ".join(str(list(shape)) for shape in shapes)
    found = f"one of shape {list(tensors[name].shape)}" if name in tensors else "none"
    return Problem(name, f"a scale of shape {expected}, for the FP8 checkpoint's scheme", found, _FIX)


def _uncarried(carried: Carried, names: Collection[str]) -> Iterator[Problem]:
    """Weights that are FP8 in the tree, although their rule dequantises them."""
    for name in sorted(names):
        if carried.tensors[name].scheme != "plain":
            yield Problem(name, "a weight that a conversion carries as FP8", "one that it dequantises", _FIX)


def _in_parts(carried: Carried, names: Collection[str]) -> Iterator[Problem]:
    """Weights with parts inside an axis that lie apart."""
    for rule in carried.rules:
        parts = [axis for axis in rule.source for factor in axis.factors if factor.part]
        name = next(rule.sources())
        if name in names and any(len(axis.factors) > 1 or len(parts) > 1 for axis in parts):
            yield Problem(name, "FP8 arrays that hold the weight whole, or rows of it", "parts that interleave", _FIX)
