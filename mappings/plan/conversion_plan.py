"""The plan: from headers only, every target array, every work item, every problem."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from tensorferry.mappings.families.family import Family
from tensorferry.mappings.lowbit.tensors import LogicalTensor
from tensorferry.mappings.plan.account import Account, take_account
from tensorferry.mappings.plan.carry import carry_low_bit
from tensorferry.mappings.plan.target_arrays import PathOf, TargetArray, target_arrays, tree_path
from tensorferry.mappings.plan.work import WorkItem
from tensorferry.mappings.plan.work_items import ItemMaker
from tensorferry.mappings.rules.compiled import CompiledRule, compile_rule
from tensorferry.mappings.words.problems import PlanError, Problem

PLAN_FORMAT = 1


@dataclass(frozen=True)
class PlanOptions:
    """What a user decides about the target, besides the mapping itself.

    Attributes:
      scan_layers: layers stacked into one array per block.
      dtype: ``bfloat16``, ``float32`` or ``source`` (each tensor's own).
      chunk_bytes: aim for one outer chunk; what one work item writes in one go.
      worker_memory_bytes: bound on tensor bytes per worker process.
      scale_layout: how ``--dtype source`` lays scales out: ``declared`` or ``broadcast``.
    """

    scan_layers: bool = True
    dtype: str = "bfloat16"
    chunk_bytes: int = 64 << 20
    worker_memory_bytes: int = 1 << 30
    scale_layout: str = "declared"

    @property
    def effective_chunk_bytes(self) -> int:
        """The chunk aim that lets several work items share a worker's memory: at most an eighth of it."""
        return max(1, min(self.chunk_bytes, self.worker_memory_bytes // 8))


@dataclass(frozen=True)
class Totals:
    """Sums over a plan; an object is one outer chunk."""

    arrays: int
    objects: int
    work_items: int
    read_bytes: int
    write_bytes: int
    largest_item_bytes: int


@dataclass(frozen=True)
class Plan:
    """Everything that a run will do, known before it starts.

    Attributes:
      family: the mapping at this size.
      options: the user's choices.
      source_digest: digest of the source's headers and config.
      arrays: every target array.
      account: who uses what, and what is left out with which reason.
      problems: everything that does not add up; a plan with problems cannot run.
      notes: choices that were made, as sentences.
    """

    family: Family
    options: PlanOptions
    source_digest: str
    arrays: tuple[TargetArray, ...]
    account: Account
    tensors: Mapping[str, LogicalTensor] = field(repr=False)
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    def items(self) -> Iterator[WorkItem]:
        """Every work item, made on the fly: a plan of a hundred thousand tensors stays small."""
        options = self.options
        maker = ItemMaker(self.arrays, self.tensors, options.effective_chunk_bytes, options.worker_memory_bytes)
        return maker.items()

    def lines(self) -> Iterator[tuple[str, WorkItem]]:
        """Every work item as one line of JSON, and itself."""
        for item in self.items():
            yield json.dumps(item.to_json(), separators=(",", ":")), item

    @cached_property
    def _summary(self) -> tuple[Totals, str]:
        digest = hashlib.sha256(self._head().encode())
        objects = count = read = write = largest = 0
        for line, item in self.lines():
            digest.update(line.encode())
            count, read, write = count + 1, read + item.read_bytes, write + item.write_bytes
            objects, largest = objects + len(item.parts), max(largest, item.peak_bytes)
        return Totals(len(self.arrays), objects, count, read, write, largest), digest.hexdigest()

    @property
    def totals(self) -> Totals:
        return self._summary[0]

    @property
    def digest(self) -> str:
        """Changes when anything that the run would do changes: source headers, options, arrays, work items."""
        return self._summary[1]

    def _head(self) -> str:
        return json.dumps([PLAN_FORMAT, self.source_digest, [asdict(a.spec) for a in self.arrays]])

    def require(self) -> None:
        """Raises PlanError with every problem when the plan does not add up."""
        if self.problems:
            raise PlanError(self.problems)


def make_plan(
    family: Family, tensors: Mapping[str, LogicalTensor], options: PlanOptions, source_digest: str = ""
) -> Plan:
    """Plans a conversion of logical tensors by a family's rules. Collects problems instead of raising them."""
    rules = [compile_rule(rule, family.dims) for rule in family.plain_rules(options.scan_layers)]
    constants = [compile_rule(rule, family.dims) for rule in family.plain_constants(options.scan_layers)]
    return plan_rules(family, rules, tensors, options, source_digest, constants=constants)


def plan_rules(
    family: Family,
    rules: Sequence[CompiledRule],
    tensors: Mapping[str, LogicalTensor],
    options: PlanOptions,
    source_digest: str = "",
    path_of: PathOf = tree_path,
    constants: Sequence[CompiledRule] = (),
    carry: bool = True,
    bounded: bool = True,
) -> Plan:
    """Plans with rules already compiled; the way for inverse rules as well, whose arrays have Hugging Face names.

    Args:
      carry: whether the dtype ``source`` keeps quantised tensors quantised.
      bounded: whether work items must fit the memory bound; without, no work item is looked at.
    """
    account = take_account(rules, tensors, family)
    problems, notes = list(account.problems), family.notes
    if carry and options.dtype == "source" and not problems:
        carried = carry_low_bit(rules, tensors, options.scale_layout)
        rules, tensors, notes = carried.rules, carried.tensors, (*notes, *carried.notes)
        problems += carried.problems
    every = [*rules, *constants]
    arrays, unfilled = target_arrays(every, tensors, options.dtype, options.effective_chunk_bytes, path_of)
    problems += unfilled
    plan = Plan(family, options, source_digest, arrays, account, tensors, tuple(problems), notes)
    if problems or not bounded or plan.totals.largest_item_bytes <= options.worker_memory_bytes:
        return plan

    def with_bound(nbytes: int) -> Plan:
        wider = replace(options, worker_memory_bytes=nbytes)
        found, _ = target_arrays(every, tensors, options.dtype, wider.effective_chunk_bytes, path_of)
        return replace(plan, options=wider, arrays=found)

    return replace(plan, problems=tuple(_too_big(plan, _enough(plan, with_bound))))


def _enough(plan: Plan, with_bound: Callable[[int], Plan]) -> int:
    """A bound with which the plan adds up: a wider one makes larger chunks, so what it needs is looked at again."""
    bound = plan.options.worker_memory_bytes
    while (needed := with_bound(bound).totals.largest_item_bytes) > bound:
        bound = max(needed, 2 * bound)
    return bound


def _too_big(plan: Plan, enough: int) -> list[Problem]:
    bound = plan.options.worker_memory_bytes
    return [
        Problem(
            item.parts[0].spec.key,
            f"work items of at most {bound:,} bytes (--worker-memory-bytes)",
            f"one that needs {item.peak_bytes:,}: the array cannot be cut finer",
            f"Run with --worker-memory-bytes {enough}.",
        )
        for item in plan.items()
        if item.peak_bytes > bound
    ]


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data, without its work items."""
    totals = plan.totals
    return {
        "format": PLAN_FORMAT,
        "family": plan.family.name,
        "scan_layers": plan.options.scan_layers,
        "dtype": plan.options.dtype,
        "source_digest": plan.source_digest,
        "digest": plan.digest,
        "arrays": [array.to_json() for array in plan.arrays],
        "ignored": dict(plan.account.ignored),
        "notes": list(plan.notes),
        "settings": dict(plan.family.settings),
        "problems": [asdict(problem) for problem in plan.problems],
        "totals": asdict(totals),
    }
