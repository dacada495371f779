"""The record of one step: what it becomes, or why it does not. A worker makes it, a file keeps it for every stage."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from tensorferry.mappings.tunix.step_tree import Key, LeafKind, Path
from tensorferry.mappings.words.problems import Problem
from tensorferry.pipelines.migrate.array_plan import ArrayPlan
from tensorferry.pipelines.orbax.step_discovery import FoundStep
from tensorferry.pipelines.output.small_files import read_small, write_small

Status = Literal["planned", "skipped", "refused"]
Counts = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A leaf of the old step that has no place in the new one."""

    name: str
    reason: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Check:
    """What the model check said.

    Attributes:
      origin: where the model came from; empty when there was none.
      validated: the weights are exactly the model's.
      notes: differences that refuse nothing.
    """

    origin: str = ""
    validated: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepRecord:
    """What one step becomes.

    Attributes:
      found: where the step is.
      status: ``planned`` can be copied; ``skipped`` needs no work; ``refused`` cannot.
      reason: why it is skipped; for a refused step the problems say why.
      fingerprint: digest of the source's metadata and of its files' names and sizes.
      content: digest of what names the content of the source's files, where the source tells; else empty.
      digest: names what will be written: the source, the user's choices, and every array.
      arrays: every array of the new step.
      marks: leaves of the new tree that hold no array, by what they are.
      dropped: leaves of the old step without a place.
      counts: arrays and bytes by section.
      weights: name in the model to true shape.
      check: the model check.
      custom_metadata: what goes into the step's metadata.
      copied_items: items copied as files.
      new_step: value of the new ``step``, where it is known without reading.
      adapter_only: the step holds low-rank factors alone.
      warnings: what a user should know.
      problems: why it is refused.
    """

    found: FoundStep
    status: Status
    reason: str = ""
    fingerprint: str = ""
    content: str = ""
    digest: str = ""
    arrays: tuple[ArrayPlan, ...] = ()
    marks: tuple[tuple[Path, LeafKind], ...] = ()
    dropped: tuple[Dropped, ...] = ()
    counts: Counts = field(default_factory=dict)
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    check: Check = field(default_factory=Check)
    custom_metadata: Mapping[str, Any] = field(default_factory=dict)
    copied_items: tuple[str, ...] = ()
    new_step: int | None = None
    adapter_only: bool = False
    warnings: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def path(self) -> str:
        """Of the step's folder, below the source and below the output."""
        return self.found.path

    def with_digest(self, options: Mapping[str, Any]) -> "StepRecord":
        """The same with its digest."""
        arrays = [array.to_json() for array in self.arrays]
        parts = [self.fingerprint, dict(options), arrays, self.copied_items, *filter(None, [self.content])]
        return replace(self, digest=hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest())

    def refused(self, problems: Iterable[Problem]) -> "StepRecord":
        """The same step, refused."""
        return replace(self, status="refused", problems=(*self.problems, *problems))

    def without_arrays(self) -> "StepRecord":
        """The same without what is only needed to write it: thousands of records then fit in memory."""
        return replace(self, arrays=(), marks=(), weights={})

    def save(self, folder: str, number: int) -> None:
        """Writes the record into a folder of records."""
        data = asdict(replace(self, arrays=(), marks=()))
        data["arrays"] = [array.to_json() for array in self.arrays]
        data["marks"] = [[[[key.name, key.kind] for key in path], kind] for path, kind in self.marks]
        write_small(folder, _record_name(number), json.dumps(data).encode())

    @classmethod
    def load(cls, folder: str, number: int) -> "StepRecord":
        """Reads a record that ``save`` wrote."""
        data = json.loads(read_small(folder, _record_name(number)) or b"")
        return cls(
            **{
                **data,
                "found": FoundStep(**data["found"]),
                "arrays": tuple(map(ArrayPlan.from_json, data["arrays"])),
                "marks": tuple((tuple(Key(*key) for key in path), kind) for path, kind in data["marks"]),
                "dropped": tuple(Dropped(**each) for each in data["dropped"]),
                "counts": {section: tuple(pair) for section, pair in data["counts"].items()},
                "weights": {name: tuple(shape) for name, shape in data["weights"].items()},
                "check": Check(**{**data["check"], "notes": tuple(data["check"]["notes"])}),
                "copied_items": tuple(data["copied_items"]),
                "warnings": tuple(data["warnings"]),
                "problems": tuple(Problem(**each) for each in data["problems"]),
            }
        )


def _record_name(number: int) -> str:
    return f"{number:06d}.json"
