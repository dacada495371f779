"""The plan of one step: every leaf of the new layout and where it comes from; every leaf dropped, and why."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensorferry.mappings.tunix.model_check import ModelCheck, Shape
from tensorferry.mappings.tunix.prng_keys import RngImpl
from tensorferry.mappings.tunix.step_tree import DroppedLeaf, Leaf, LeafKind, Path, spell
from tensorferry.mappings.words.problems import Problem

SECTIONS = ("params", "nnx_aux", "opt_state", "step", "dropped")


@dataclass(frozen=True, slots=True)
class MigrateOptions:
    """What the user chose.

    Attributes:
      rng_impl: implementation that the reader will run; ``keep`` carries every key as it is.
      drop_optimizer: migrate the weights without the optimizer's state.
    """

    rng_impl: RngImpl = "unsafe_rbg"
    drop_optimizer: bool = False


@dataclass(frozen=True, slots=True)
class TargetLeaf:
    """A leaf of the new ``items``.

    Attributes:
      path: keys from the root of ``items``.
      kind: ``array``, or the mark in the metadata for a ``None`` or an empty container.
      shape: shape to store; of the key data for a typed key.
      dtype: dtype to store; differs from the source's for ``step`` alone, which becomes int32.
      source: the leaf whose bytes these are; None for a constant or a gap of a list.
      constant: the value of a 0-d array that has no source.
      prng_impl: implementation to record for a typed PRNG key; empty otherwise.
    """

    path: Path
    kind: LeafKind = "array"
    shape: tuple[int, ...] = ()
    dtype: str = ""
    source: Leaf | None = None
    constant: int | None = None
    prng_impl: str = ""

    @property
    def name(self) -> str:
        return spell(self.path)

    @property
    def array_name(self) -> str:
        """Name of the array in the target's key-value store."""
        return ".".join(key.name for key in self.path)

    @property
    def section(self) -> str:
        return self.path[0].name

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded array."""
        return self.source.nbytes if self.source else 4 * (self.kind == "array")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step becomes.

    Attributes:
      leaves: every leaf of the new ``items``.
      dropped: every source leaf without a place, with the reason.
      copied_items: items copied as files.
      weights: name in the model to true shape; what the model check compares.
      check: the model check; without a model it has no origin.
      custom_metadata: the source's, plus ``scan_layers``.
      step: value of the new ``step`` where it is known without reading.
      adapter_only: the step holds low-rank factors and no base weights.
      warnings: what a user should know, as sentences.
      problems: why the step is refused; empty when it can be written.
    """

    leaves: tuple[TargetLeaf, ...]
    dropped: tuple[DroppedLeaf, ...]
    copied_items: tuple[str, ...]
    weights: Mapping[str, Shape]
    check: ModelCheck
    custom_metadata: Mapping[str, Any]
    step: int | None
    adapter_only: bool
    warnings: tuple[str, ...]
    problems: tuple[Problem, ...]

    def counts(self) -> dict[str, tuple[int, int]]:
        """Arrays and bytes of each section, ``dropped`` last."""
        totals = {section: [0, 0] for section in SECTIONS}
        sized = [(leaf.section, leaf.nbytes) for leaf in self.leaves if leaf.kind == "array"]
        for section, nbytes in [*sized, *(("dropped", dropped.leaf.nbytes) for dropped in self.dropped)]:
            totals[section][0] += 1
            totals[section][1] += nbytes
        return {section: (count, nbytes) for section, (count, nbytes) in totals.items()}
