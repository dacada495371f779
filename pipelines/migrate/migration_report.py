"""What became of every step, as lines for people and as data."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tensorferry.mappings.words.problems import Problem
from tensorferry.mappings.words.text import bytes_text, table_lines
from tensorferry.pipelines.migrate.step_record import Counts, StepRecord
from tensorferry.pipelines.orbax.step_discovery import Discovery, FoundStep

Outcome = Literal["planned", "migrated", "skipped", "left alone", "refused", "failed"]

_NAMES = {"params": "weights", "nnx_aux": "nnx_aux", "opt_state": "opt_state", "step": "step", "dropped": "dropped"}
_MOST_PROBLEMS = 20
_MOST_ROWS = 500
_REFUSED_STATUS: dict[str, Outcome] = {"unfinished": "left alone", "new": "skipped"}


@dataclass(frozen=True)
class StepReport:
    """One step's line.

    Attributes:
      found: where it is.
      outcome: what became of it.
      reason: why, for all but migrated steps.
      record: the plan without its arrays, where the step was planned.
      counts: arrays and bytes by section: planned in a dry run, written otherwise.
    """

    found: FoundStep
    outcome: Outcome
    reason: str = ""
    record: StepRecord | None = None
    counts: Counts | None = None

    def ended(self, result: Mapping[str, Any] | None) -> "StepReport":
        """The same step after its commit said something."""
        if result is None:
            return replace(self, outcome="failed", reason="not finished; run the same command again", counts=None)
        if "counts" in result:
            counts: Counts = {name: (pair[0], pair[1]) for name, pair in result["counts"].items()}
            return replace(self, outcome="migrated", counts=counts)
        outcome: Outcome = "refused" if "refused" in result else "failed"
        return replace(self, outcome=outcome, reason=next(iter(result.values())), counts=None)


@dataclass(frozen=True)
class Report:
    """Every step, in the order of run, role and number.

    Attributes:
      steps: the steps.
      discovery: what else lies below the source.
      dry_run: nothing was written.
    """

    steps: tuple[StepReport, ...]
    discovery: Discovery
    dry_run: bool

    @property
    def exit_code(self) -> int:
        """1 when a step failed, 4 when one was refused or a folder could not be read, else 0."""
        outcomes = {step.outcome for step in self.steps}
        if "failed" in outcomes:
            return 1
        return 4 if "refused" in outcomes or self.discovery.unreadable else 0

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {
            "dry_run": self.dry_run,
            "exit_code": self.exit_code,
            "steps": [_step_json(step) for step in self.steps],
            "ignored": [asdict(each) for each in self.discovery.ignored],
            "unreadable": [asdict(each) for each in self.discovery.unreadable],
        }


def of_found(found: FoundStep) -> StepReport:
    """The report of a step that is not migrated, by what its folder is."""
    return StepReport(found, _REFUSED_STATUS.get(found.status, "refused"), found.reason)


def of_record(record: StepRecord) -> StepReport:
    """The report of a planned step."""
    small = record.without_arrays()
    if record.status == "refused":
        return StepReport(record.found, "refused", _why(record.problems), small)
    if record.status == "skipped":
        return StepReport(record.found, "skipped", record.reason, small)
    return StepReport(record.found, "planned", "", small, record.counts)


def _why(problems: Sequence[Problem]) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}" if problems else ""


def plan_lines(step: StepReport) -> Iterator[str]:
    """What one step would hold: sections, dropped leaves, model check, warnings, problems."""
    record = step.record
    yield f"{step.found.path}  ({step.outcome}{', ' + step.reason if step.outcome == 'skipped' else ''})"
    if record is None or step.outcome == "skipped":
        return
    for section, (count, nbytes) in record.counts.items():
        yield f"  {_NAMES[section]:<10}{count:>6,} arrays  {nbytes:>15,} bytes"
    if record.counts:
        yield from (f"    {count} dropped: {reason}" for reason, count in _reasons(record).items())
        yield f"  model     {_check_text(record)}"
    yield from (f"  warning   {warning}" for warning in record.warnings)
    yield from (f"  problem   {problem}" for problem in record.problems[:_MOST_PROBLEMS])
    if len(record.problems) > _MOST_PROBLEMS:
        yield f"  problem   … and {len(record.problems) - _MOST_PROBLEMS} more (--json FILE has all)"


def _reasons(record: StepRecord) -> dict[str, int]:
    return dict(Counter(gone.reason for gone in record.dropped))


def _check_text(record: StepRecord) -> str:
    if not record.check.origin:
        return "not checked against a model"
    return f"{'as in' if record.check.validated else 'differs from'} {record.check.origin}"


def table(report: Report) -> Iterator[str]:
    """Every step with what became of it, the bad ones last, and the totals."""
    order: tuple[Outcome, ...] = ("migrated", "planned", "skipped", "left alone", "refused", "failed")
    rows = [("step", "outcome", "arrays", "bytes", "why")]
    for outcome in order:
        steps = [step for step in report.steps if step.outcome == outcome]
        rows += [_row(step) for step in steps[:_MOST_ROWS]]
        if len(steps) > _MOST_ROWS:
            rows.append((f"… and {len(steps) - _MOST_ROWS:,} more", outcome, "", "", "--json FILE has all"))
    if len(rows) > 1:
        yield from table_lines(rows)
    yield from (f"ignored: {each.path}: {each.reason}" for each in report.discovery.ignored)
    yield from (f"cannot be read: {each.path}: {each.reason}" for each in report.discovery.unreadable)
    yield _totals(report.steps, order)


def _row(step: StepReport) -> tuple[str, str, str, str, str]:
    arrays, nbytes = written(step.counts)
    counted = (f"{arrays:,}", bytes_text(nbytes)) if step.counts else ("", "")
    return step.found.path, step.outcome, counted[0], counted[1], step.reason


def written(counts: Counts | None) -> tuple[int, int]:
    """Arrays and bytes of all sections but the dropped."""
    kept = [pair for section, pair in (counts or {}).items() if section != "dropped"]
    return sum(count for count, _ in kept), sum(nbytes for _, nbytes in kept)


def _totals(steps: Iterable[StepReport], order: Sequence[Outcome]) -> str:
    counted = Counter(step.outcome for step in steps)
    told = [f"{outcome} {counted[outcome]:,}" for outcome in order if counted[outcome]]
    return ", ".join(told) or "no steps found"


def _step_json(step: StepReport) -> dict[str, Any]:
    record, found = step.record, step.found
    told: dict[str, Any] = {
        "path": found.path,
        "run": found.run,
        "role": found.role,
        "step": found.step,
        "outcome": step.outcome,
        "reason": step.reason,
    }
    if record is None:
        return told
    counts = step.counts or record.counts
    return told | {
        "sections": {_NAMES[name]: {"arrays": pair[0], "bytes": pair[1]} for name, pair in counts.items()},
        "dropped": [asdict(gone) for gone in record.dropped],
        "new_step": record.new_step,
        "copied_items": list(record.copied_items),
        "model": asdict(record.check),
        "warnings": list(record.warnings),
        "problems": [str(problem) for problem in record.problems],
        "fingerprint": record.fingerprint,
    }
