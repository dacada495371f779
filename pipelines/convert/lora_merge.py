"""An adapter on its way into a conversion: opened, put into the base's tensors, checked, and put on record."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tensorferry.mappings.lora.merged_weights import Merged, merge_adapter
from tensorferry.mappings.lowbit.tensors import LogicalTensor
from tensorferry.mappings.plan.conversion_plan import Plan
from tensorferry.mappings.words.problems import FerryError, PlanError, Problem
from tensorferry.pipelines.huggingface.lora_adapter import OpenAdapter, open_adapter


@dataclass(frozen=True)
class LoraMerge:
    """An adapter and what it does to its base.

    Attributes:
      opened: the adapter.
      merged: the base's tensors with it.
    """

    opened: OpenAdapter
    merged: Merged

    @property
    def url(self) -> str:
        return self.opened.source.url

    @property
    def digest(self) -> str:
        return self.opened.digest

    def checked(self, plan: Plan) -> Plan:
        """The plan with what it says of the adapter: where it goes, what of it is left out, what does not add up."""
        tied = {tie.to: tie.name for tie in plan.family.ties if tie.name not in plan.account.claims}
        problems = [_tied(name, tied[name], self.merged) for name in self.merged.sources if name in tied]
        left = {name: why for name, why in plan.account.ignored.items() if name in self.merged.sources}
        ignored = {one: f"part of an adapter: {why}" for name, why in left.items() for one in self.merged.sources[name]}
        account = replace(plan.account, ignored={**plan.account.ignored, **ignored})
        notes = (*plan.notes, *self.notes())
        return replace(plan, account=account, problems=(*plan.problems, *problems), notes=notes)

    def notes(self) -> tuple[str, ...]:
        """Sentences for the plan."""
        merged = self.merged
        ranks = sorted({rank for rank, _ in merged.scales.values()})
        scales = sorted({scale for _, scale in merged.scales.values()})
        text = f"{len(merged.scales):,} weights get an adapter of rank {_span(ranks)} x {_span(scales)}"
        whole = len(merged.sources) - len(merged.scales)
        also = f", {whole:,} tensors are replaced" if whole else ""
        return (f"{self.url}: {text}{also}", *merged.notes)

    def record(self) -> dict[str, Any]:
        """What the manifest tells of it."""
        modules = {name: {"rank": rank, "scale": scale} for name, (rank, scale) in self.merged.scales.items()}
        return {
            "path": self.url,
            "revision": self.opened.revision,
            "digest": self.digest,
            "config": self.opened.config,
            "modules": modules,
            "replaced": sorted(self.merged.sources.keys() - modules.keys()),
        }

    def refuse_changed(self) -> None:
        """Refuses an adapter that is not what it was any more.

        Raises:
          FerryError: it changed since it was opened.
        """
        now = open_adapter(self.url).digest
        if now != self.digest:
            fix = "Something rewrites it: convert again from an adapter at rest."
            problem = Problem(self.url, f"the adapter as it was planned ({self.digest[:16]})", now[:16], fix)
            raise FerryError(str(problem))


def open_merge(url: str, tensors: Mapping[str, LogicalTensor]) -> LoraMerge:
    """Opens an adapter and merges it into the tensors of its base.

    Raises:
      PlanError: with everything that is wrong with the adapter, or does not fit the base.
      FerryError: its URL cannot be read.
    """
    opened = open_adapter(url)
    merged = merge_adapter(opened.adapter, tensors)
    if merged.problems:
        raise PlanError(merged.problems)
    return LoraMerge(opened, merged)


def _tied(name: str, other: str, merged: Merged) -> Problem:
    return Problem(
        merged.sources[name][0], f"{name} without a tie, so that the adapter changes it alone",
        f"one that is {other} too", "Merge with PEFT, which asks what is meant, or leave it out of the adapter.",
    )  # fmt: skip


def _span(numbers: list) -> str:
    first, last = f"{numbers[0]:.6g}" if numbers else "0", f"{numbers[-1]:.6g}" if numbers else "0"
    return first if first == last else f"{first} to {last}"
