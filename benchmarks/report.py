"""Figures of the benchmark as Markdown, and the section of BENCHMARKS.md that holds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.measure import Measured


@dataclass(frozen=True)
class Contender:
    """Every run of one way to move the checkpoint.

    Attributes:
      name: how the table calls it.
      runs: runs on the checkpoint.
      starts: runs on a checkpoint of as many tensors and next to no bytes: start-up.
    """

    name: str
    runs: Sequence[Measured]
    starts: Sequence[Measured]

    @property
    def wall_seconds(self) -> float:
        return median(run.wall_seconds for run in self.runs)

    @property
    def cpu_seconds(self) -> float:
        return median(run.cpu_seconds for run in self.runs)

    @property
    def start_wall_seconds(self) -> float:
        return median(run.wall_seconds for run in self.starts)

    @property
    def start_cpu_seconds(self) -> float:
        return median(run.cpu_seconds for run in self.starts)

    @property
    def peak_gib(self) -> float:
        return max(run.peak_bytes for run in self.runs) / 2**30

    def net_cpu_per_gb(self, gigabytes: float) -> float:
        """CPU seconds per GB of checkpoint, start-up taken off."""
        return (self.cpu_seconds - self.start_cpu_seconds) / gigabytes


HEAD = (
    "| | runs | wall s | CPU s | start-up wall s | start-up CPU s | net CPU s per GB | peak memory GiB |",
    "|---|--:|--:|--:|--:|--:|--:|--:|",
)


def figures(contenders: Sequence[Contender], gigabytes: float) -> str:
    """The table of figures: medians, and the largest peak."""
    return "\n".join([*HEAD, *(_row(contender, gigabytes) for contender in contenders)])


def _row(contender: Contender, gigabytes: float) -> str:
    cells = [
        contender.name,
        str(len(contender.runs)),
        _spread([run.wall_seconds for run in contender.runs]),
        f"{contender.cpu_seconds:.1f}",
        f"{contender.start_wall_seconds:.1f}",
        f"{contender.start_cpu_seconds:.1f}",
        f"{contender.net_cpu_per_gb(gigabytes):.2f}",
        f"{contender.peak_gib:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{median(values):.1f} ({min(values):.1f}–{max(values):.1f})"


RATIO_HEAD = (
    "| {name} against | wall, theirs ÷ ours | wall, ours less start-up ÷ theirs | CPU, theirs ÷ ours "
    "| peak memory, theirs ÷ ours |",
    "|---|--:|--:|--:|--:|",
)


def ratios(ours: Contender, others: Sequence[Contender]) -> str:
    """The table of ratios, one row per other contender."""
    rows = [_ratio_row(ours, other) for other in others]
    return "\n".join([RATIO_HEAD[0].format(name=ours.name), RATIO_HEAD[1], *rows])


def _ratio_row(ours: Contender, other: Contender) -> str:
    pairs = (
        (other.wall_seconds, ours.wall_seconds),
        (ours.wall_seconds - ours.start_wall_seconds, other.wall_seconds),
        (other.cpu_seconds, ours.cpu_seconds),
        (other.peak_gib, ours.peak_gib),
    )
    return f"| {other.name} | {' | '.join(_ratio(*pair) for pair in pairs)} |"


def _ratio(above: float, below: float) -> str:
    return f"{above / below:.2f}" if below else "–"


def write_section(path: Path, name: str, text: str) -> None:
    """Puts ``text`` between the markers of section ``name`` in ``path``, adding them at the end when missing."""
    begin, end = f"<!-- bench {name} -->", f"<!-- end of bench {name} -->"
    page = path.read_text() if path.exists() else "# Benchmarks\n"
    if begin not in page:
        page = f"{page.rstrip()}\n\n{begin}\n{end}\n"
    before, rest = page.split(begin, 1)
    path.write_text(f"{before}{begin}\n{text.strip()}\n{end}{rest.split(end, 1)[1]}")
