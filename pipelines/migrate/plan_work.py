"""The work on one step of the plan: read its metadata, decide what it becomes, keep the record."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tensorferry.mappings.tunix.migrate_tree import migrate_tree
from tensorferry.mappings.tunix.model_check import ModelTree, scan_layers
from tensorferry.mappings.tunix.step_plan import StepPlan
from tensorferry.mappings.tunix.step_tree import StepTree
from tensorferry.mappings.words.problems import FerryError, PlanError, Problem
from tensorferry.pipelines.migrate.array_plan import plan_array
from tensorferry.pipelines.migrate.places import Form, Places
from tensorferry.pipelines.migrate.step_record import Check, Dropped, StepRecord
from tensorferry.pipelines.orbax.step_discovery import FoundStep
from tensorferry.pipelines.orbax.step_source import read_step
from tensorferry.pipelines.storage.tree_store import open_tree

# Other models than the one that is declared for the run.
OTHER_MODELS = frozenset({"critic", "reward"})


@dataclass(frozen=True)
class DeclaredModel:
    """The model that weights are checked against.

    Attributes:
      scanned: for steps with stacked layers, and for those without any layers.
      unrolled: for steps with separate layers.
    """

    scanned: ModelTree | None = None
    unrolled: ModelTree | None = None

    def of(self, weights: Any) -> ModelTree | None:
        """The tree for weights by name; the same for both where a checkpoint or a program declares it."""
        return self.unrolled if scan_layers(weights) is False else self.scanned


def plan_step(source: str, found: FoundStep, model: DeclaredModel, form: Form) -> StepRecord:
    """What one old step becomes; every fault is in the record.

    Args:
      source: url of the tree of runs.
      found: a step with status ``old``.
      model: what to check the weights against.
      form: the user's choices.
    """
    try:
        step = read_step(open_tree(source), found)
    except PlanError as error:
        return StepRecord(found, "refused", problems=error.problems)
    return _record(found, step, _plan(found, step, model, form), form)


def _plan(found: FoundStep, step: StepTree, model: DeclaredModel, form: Form) -> StepPlan:
    alone = migrate_tree(step, form.choices)
    declared = None if found.role in OTHER_MODELS else model.of(alone.weights)
    return alone if declared is None else migrate_tree(step, form.choices, declared)


def _record(found: FoundStep, step: StepTree, plan: StepPlan, form: Form) -> StepRecord:
    record = StepRecord(
        found=found,
        status="refused" if plan.problems else "planned",
        fingerprint=step.fingerprint,
        content=step.content,
        marks=tuple((leaf.path, leaf.kind) for leaf in plan.leaves if leaf.kind != "array"),
        dropped=tuple(Dropped(str(gone.leaf), gone.reason, gone.leaf.nbytes) for gone in plan.dropped),
        counts=plan.counts(),
        weights=plan.weights,
        check=Check(plan.check.origin, plan.check.validated, plan.check.notes),
        custom_metadata=plan.custom_metadata,
        copied_items=plan.copied_items,
        new_step=plan.step,
        adapter_only=plan.adapter_only,
        warnings=plan.warnings,
        problems=plan.problems,
    )
    if plan.problems:
        return record
    try:
        leaves = [leaf for leaf in plan.leaves if leaf.kind == "array"]
        arrays = tuple(plan_array(leaf, step.items, form.store_format, form.chunk_bytes) for leaf in leaves)
    except PlanError as error:
        return record.refused(error.problems)
    return replace(record, arrays=arrays).with_digest(form.options())


def skip_or_refuse_published(record: StepRecord, places: Places) -> StepRecord:
    """The record in the light of what is in its place already: the same migration, or something else."""
    folder = places.step_url(record.path)
    earlier = places.manifest(record.path)
    # A run that was killed right after it published a step is still to tidy up: its run directory sees to that.
    if earlier is None or places.is_pending(record.path):
        return record
    if earlier.get("source_fingerprint") == record.fingerprint and _same_content(earlier, record):
        other = "" if earlier.get("plan_digest") == record.digest else " with other options"
        return replace(record, status="skipped", reason=f"already migrated from this source{other}: {folder}")
    fix = "Move it away, or choose another output."
    found = f"one of {earlier.get('source') or 'another source'} as it was then"
    return record.refused([Problem(folder, "no step, or one migrated from this source", found, fix)])


def _same_content(earlier: Mapping[str, Any], record: StepRecord) -> bool:
    """Whether the files are the same, as far as both sources told: one alone may be a copy of the other."""
    told = earlier.get("source_content", "")
    return not (told and record.content) or told == record.content


@dataclass(frozen=True)
class PlanStepWork:
    """`plan_step` as Beam carries it.

    Attributes:
      source: url of the tree of runs.
      places: where the record goes, and where the step would.
      model: what to check the weights against.
      form: the user's choices.
    """

    source: str
    places: Places
    model: DeclaredModel
    form: Form

    def setup(self) -> None:
        """Nothing to prepare."""

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        found = FoundStep(**item["found"])
        try:
            record = plan_step(self.source, found, self.model, self.form)
            if record.fingerprint:
                record = skip_or_refuse_published(record, self.places)
        except FerryError as error:
            record = _not_understood(found, str(error))
        except Exception as error:
            # A tree that this code never met must not stop the other steps.
            record = _not_understood(found, f"{type(error).__name__}: {error}")
        record.save(self.places.records, item["step"])
        return {"bytes": 1}


def _not_understood(found: FoundStep, words: str) -> StepRecord:
    fix = "Leave it out with --exclude, and report it."
    return StepRecord(found, "refused", problems=(Problem(found.path, "a step that can be understood", words, fix),))
