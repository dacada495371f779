"""A problem is a small report: what, expected, found, what to do. A plan collects them all before it stops."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that does not add up, told in one sentence.

    Attributes:
      name: the tensor, file or option that is wrong.
      expected: what it should have been, with where that comes from.
      found: what was there instead.
      fix: what the user can do.
      file: the file that holds the tensor, when there is one.
      rule: the mapping rule or check that was applied, when there is one.
    """

    name: str
    expected: str
    found: str
    fix: str
    file: str = ""
    rule: str = ""

    def __str__(self) -> str:
        where = f" (in {self.file})" if self.file else ""
        rule = f' by rule "{self.rule}"' if self.rule else ""
        return f"{self.name}{where}: expected {self.expected}{rule}; found {self.found}. {self.fix}"


class FerryError(Exception):
    """A foreseeable fault: shown to the user as sentences, without a traceback.

    Attributes:
      exit_code: what the command line exits with.
    """

    exit_code = 1


class PlanError(FerryError):
    """The plan does not add up; carries every problem found, not the first only. Nothing was written."""

    exit_code = 2

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type["PlanError"], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)
