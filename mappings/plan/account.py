"""The account: every source tensor used exactly once or listed with a reason, every target element written once."""

import fnmatch
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tensorferry.mappings.families.family import Family
from tensorferry.mappings.lowbit.tensors import LogicalTensor
from tensorferry.mappings.rules.compiled import CompiledRule, source_shape
from tensorferry.mappings.rules.geometry import Factor, Geometry
from tensorferry.mappings.words.problems import Problem

Tensors = Mapping[str, LogicalTensor]


@dataclass(frozen=True)
class Account:
    """Who uses what.

    Attributes:
      claims: source name to the rules that use it.
      ignored: source name to the reason it is left out.
      ties: pairs (name, to) that are both stored although only the second is used: their bytes must agree.
      problems: everything that does not add up on the source side.
    """

    claims: Mapping[str, Sequence[CompiledRule]]
    ignored: Mapping[str, str]
    ties: tuple[tuple[str, str], ...]
    problems: tuple[Problem, ...]


def take_account(rules: Sequence[CompiledRule], tensors: Tensors, family: Family) -> Account:
    """Matches rules with tensors: missing and misshapen tensors, those used twice or in part, and those unused."""
    problems: list[Problem] = []
    claims: dict[str, list[CompiledRule]] = defaultdict(list)
    for compiled in rules:
        expected = source_shape(compiled)
        for name in compiled.sources():
            tensor = tensors.get(name)
            if tensor is None:
                problems += [] if compiled.rule.optional else [_missing(name, compiled, family)]
                continue
            claims[name].append(compiled)
            if tensor.shape != expected:
                problems.append(_misshapen(tensor, compiled, family))
    problems += _partly_used(claims, tensors)
    ignored, ties = _left_out(tensors.keys() - claims.keys(), tensors, family)
    unclaimed = sorted(tensors.keys() - claims.keys() - ignored.keys())
    problems += [_unclaimed(tensors[name], family) for name in unclaimed]
    return Account(claims, ignored, ties, tuple(problems))


def covers(claims: Sequence[Geometry]) -> str:
    """Whether claims on one array tile it: empty when they do, else what is wrong.

    A single claim must be whole. Several must be different parts of one concatenation, alike on all other axes.

    >>> covers([])
    'nothing uses it'
    """
    if not claims:
        return "nothing uses it"
    parts = [_parts(claim) for claim in claims]
    if len(claims) == 1 and not parts[0]:
        return ""
    if any(len(found) != 1 for found in parts):
        return f"{len(claims)} rules use it whole, or in parts of several axes"
    if len({(axis, factor) for ((axis, factor, _),) in parts}) > 1 or len({_extents(c) for c in claims}) > 1:
        return "its parts lie on different axes"
    return _tile([part for ((_, _, part),) in parts])


def _tile(parts: Iterable[Factor]) -> str:
    """Whether parts of one concatenation cover it without overlap."""
    at = 0
    ordered = sorted(parts, key=lambda part: part.offset)
    for part in ordered:
        if part.offset < at:
            return f"elements {part.offset} to {at} are used twice"
        if part.offset > at:
            return f"elements {at} to {part.offset} are used by no rule"
        at += math.prod(part.sizes)
    extent = ordered[-1].extent
    return "" if at == extent else f"elements {at} to {extent} are used by no rule"


def _parts(geometry: Geometry) -> tuple[tuple[int, int, Factor], ...]:
    """(axis, factor position, factor) of every factor of which only a part is meant."""
    return tuple(
        (a, f, factor)
        for a, axis in enumerate(geometry)
        for f, factor in enumerate(axis.factors)
        if factor.part and math.prod(factor.sizes) < factor.extent
    )


def _extents(geometry: Geometry) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(factor.extent for factor in axis.factors) for axis in geometry)


def _partly_used(claims: Mapping[str, Sequence[CompiledRule]], tensors: Tensors) -> list[Problem]:
    problems = []
    for name, users in claims.items():
        if len(users) == 1 and not users[0].has_parts:
            continue
        wrong = covers([user.source for user in users])
        if wrong:
            problems.append(Problem(
                name, "every element used exactly once", wrong,
                f"Mend the family's rules: {'; '.join(user.rule.target.text for user in users)}.",
                file=_file(tensors[name]),
            ))  # fmt: skip
    return problems


def _left_out(
    unused: Iterable[str], tensors: Tensors, family: Family
) -> tuple[dict[str, str], tuple[tuple[str, str], ...]]:
    ties = {tie.name: tie.to for tie in family.ties}
    ignored: dict[str, str] = {}
    for name in sorted(unused):
        if name in ties and ties[name] in tensors:
            ignored[name] = f"tied to {ties[name]}: the model has one array for both"
            continue
        if name in family.constant_names:
            ignored[name] = "a constant of MaxText's model, which a Hugging Face checkpoint has no tensor for"
            continue
        for rule in family.ignores:
            if fnmatch.fnmatchcase(name, rule.pattern):
                ignored[name] = rule.why
                break
    return ignored, tuple((name, to) for name, to in ties.items() if name in ignored)


def _file(tensor: LogicalTensor) -> str:
    return next(iter(tensor.stored.values())).file


def _sizes(compiled: CompiledRule, family: Family) -> str:
    atoms = [atom for axis in compiled.source for atom in axis.atoms]
    keys = dict.fromkeys(family.sizes_from[atom] for atom in atoms if atom in family.sizes_from)
    return f"{compiled.source_text} from {', '.join(keys)} in config.json" if keys else compiled.source_text


def _missing(name: str, compiled: CompiledRule, family: Family) -> Problem:
    return Problem(
        name,
        f"a tensor {_sizes(compiled, family)}",
        "no tensor of this name",
        f"Is the checkpoint complete, and is it a {family.name} model?",
        rule=str(compiled.rule.layout),
    )


def _misshapen(tensor: LogicalTensor, compiled: CompiledRule, family: Family) -> Problem:
    return Problem(
        tensor.name,
        _sizes(compiled, family),
        str(list(tensor.shape)),
        "Wrong config.json for this checkpoint?",
        file=_file(tensor),
        rule=str(compiled.rule.layout),
    )


def _unclaimed(tensor: LogicalTensor, family: Family) -> Problem:
    return Problem(
        tensor.name,
        f"a tensor that the family {family.name} knows",
        f"{tensor.dtype} {list(tensor.shape)} that no rule uses",
        "Is the family right (--family), and does config.json belong to this checkpoint?",
        file=_file(tensor),
    )
