"""The plan as text: a table for people, and for golden files that are reviewed as a diff."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tensorferry.mappings.plan.conversion_plan import Plan
from tensorferry.mappings.plan.target_arrays import TargetArray
from tensorferry.mappings.words.problems import Problem
from tensorferry.mappings.words.text import bytes_text, group_names, list_text, table_lines

_SHOWN_IGNORED = 12
_LISTED_ONE_BY_ONE = 20


@dataclass(frozen=True)
class Row:
    """Target arrays that differ only in an index of their name, as one line of the table."""

    name: str
    count: int
    first: TargetArray


def rows(arrays: Iterable[TargetArray]) -> list[Row]:
    """Arrays grouped by name pattern and shape, in the plan's order."""
    groups: dict[tuple, list[TargetArray]] = {}
    for array in arrays:
        use = array.uses[0].compiled
        pattern = use.rule.target.pattern(use.dims)
        groups.setdefault((pattern, array.spec.shape, array.spec.dtype, array.spec.chunk), []).append(array)
    return [Row(key[0], len(group), group[0]) for key, group in groups.items()]


def plan_text(plan: Plan) -> str:
    """The whole plan: notes, target arrays with their sources and ops, what is left out, problems, totals."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    mode = "scanned" if plan.options.scan_layers else "unrolled"
    yield f"{plan.family.name}, {mode} layers, dtype {plan.options.dtype}, {len(plan.tensors):,} source tensors"
    yield from (f"  {note}" for note in plan.notes)
    if plan.arrays:
        yield ""
        yield from _table(rows(plan.arrays))
    yield from _ignored(plan)
    yield ""
    yield from (_totals(plan) if not plan.problems else problem_lines(plan.problems))


def _table(table: Sequence[Row]) -> Iterator[str]:
    cells = [("target array", "dtype", "shape", "chunk"), *(_cells(row) for row in table)]
    header, *lines = table_lines(cells)
    yield header
    for row, line in zip(table, lines, strict=True):
        yield line
        yield f"    from {row.first.sources}" + (f"  by  {row.first.ops}" if row.first.ops else "")
        if row.first.way:
            yield f"    {row.first.way}"


def _cells(row: Row) -> tuple[str, ...]:
    spec = row.first.spec
    name = f"{row.name}  x{row.count}" if row.count > 1 else row.name
    return name, spec.dtype, list_text(spec.shape), list_text(spec.chunk)


def _ignored(plan: Plan) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for name, why in plan.account.ignored.items():
        reasons.setdefault(why, []).append(name)
    if reasons:
        yield ""
        yield f"left out: {len(plan.account.ignored):,} source tensors"
    for why, names in reasons.items():
        shown = ", ".join(names[:_SHOWN_IGNORED])
        more = f" and {len(names) - _SHOWN_IGNORED:,} more" if len(names) > _SHOWN_IGNORED else ""
        yield f"  {shown}{more}: {why}"


def problem_lines(problems: Sequence[Problem]) -> Iterator[str]:
    """Every problem and their count; many of a kind that differ only in numbers are one line with their ranges."""
    yield f"The plan does not add up: {len(problems):,} problem{'s' if len(problems) > 1 else ''}."
    if len(problems) <= _LISTED_ONE_BY_ONE:
        yield from (f"  {problem}" for problem in problems)
        return
    kinds: dict[tuple[str, str, str, str], list[Problem]] = {}
    for problem in problems:
        kinds.setdefault((problem.expected, problem.found, problem.fix, problem.rule), []).append(problem)
    for alike in kinds.values():
        for pattern, _, count in group_names((problem.name, 0) for problem in alike):
            name = f"{pattern} ({count:,} of them)" if count > 1 else pattern
            yield f"  {replace(alike[0], name=name, file=alike[0].file if count == 1 else '')}"


def _totals(plan: Plan) -> Iterator[str]:
    totals = plan.totals
    yield f"bytes read     {totals.read_bytes:>20,}  {bytes_text(totals.read_bytes)}"
    yield f"bytes written  {totals.write_bytes:>20,}  {bytes_text(totals.write_bytes)}  (disk needed)"
    yield f"target arrays  {totals.arrays:>20,}"
    yield f"objects        {totals.objects:>20,}"
    yield f"work items     {totals.work_items:>20,}"
    yield f"largest item   {totals.largest_item_bytes:>20,}  {bytes_text(totals.largest_item_bytes)} of tensors at once"
    bound = plan.options.worker_memory_bytes
    yield f"worker memory  {bound:>20,}  {bytes_text(bound)} of tensors at most, all threads of a worker together"
    yield f"plan digest    {plan.digest}"
