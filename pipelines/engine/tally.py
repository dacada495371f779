"""What a run has to say at its end: counts, bytes and the first failures."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

KEPT_FAILURES = 20
_TOLD_FAILURES = 3


@dataclass(frozen=True)
class Failure:
    """One work item that did not succeed.

    Attributes:
      item: the item's `id`.
      error: the exception's type name.
      sentence: what went wrong, for the user.
      trace: the traceback, for the log; empty for a foreseeable fault.
    """

    item: str
    error: str
    sentence: str
    trace: str = ""


@dataclass(frozen=True)
class Tally:
    """The sum over work items; the order of summing decides only which failures are kept.

    Attributes:
      done: items that gave a receipt.
      failed: items that raised.
      skipped: items not started because the run was stopping.
      done_bytes: what the receipts call `bytes`, added up.
      peak_rss_bytes: the largest resident set that any worker process has had.
      failures: the first failures, `KEPT_FAILURES` at most.
    """

    done: int = 0
    failed: int = 0
    skipped: int = 0
    done_bytes: int = 0
    peak_rss_bytes: int = 0
    failures: tuple[Failure, ...] = ()

    @property
    def seen(self) -> int:
        """Items accounted for in one way or another."""
        return self.done + self.failed + self.skipped

    def plus(self, other: "Tally") -> "Tally":
        """The tally of both."""
        return Tally(
            self.done + other.done,
            self.failed + other.failed,
            self.skipped + other.skipped,
            self.done_bytes + other.done_bytes,
            max(self.peak_rss_bytes, other.peak_rss_bytes),
            (self.failures + other.failures)[:KEPT_FAILURES],
        )

    def failures_text(self, items: int) -> str:
        """The first failures and the counts, as sentences.

        Args:
          items: how many there were to do.
        """
        sentences = [f"{each.item}: {each.sentence}" for each in self.failures[:_TOLD_FAILURES]]
        counts = f"{self.failed:,} of {items:,} work items failed, {self.skipped:,} were not started"
        return "\n".join([*sentences, f"{counts}; what is done stays done."])

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Tally":
        """The tally that `as_dict` told."""
        return cls(**{**data, "failures": tuple(Failure(**failure) for failure in data["failures"])})
