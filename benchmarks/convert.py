"""``convert`` against ``cp`` of the same bytes and, when it is there, MaxText's own converter: ``make bench``.

Every contender moves the same synthetic checkpoint, turn by turn in the same run, with the source in the page cache
and the disk's queue empty at the start of a turn. TENSORFERRY_MAXTEXT_PYTHON names an interpreter with MaxText.
"""

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from benchmarks.make_checkpoint import make_checkpoint
from benchmarks.measure import CommandFailed, Measured, measure
from benchmarks.report import Contender, figures, ratios, write_section
from benchmarks.shapes import LlamaShapes

ROOT = Path(__file__).parents[1]
OURS = f"{Path(sys.executable).parent}/tensorferry convert --source {{source}} --output {{output}}"
MAXTEXT = Path(__file__).with_name("run_maxtext.py")


@dataclass
class Entrant:
    """A command template with ``{source}`` and ``{output}``, and the runs measured so far."""

    name: str
    template: str
    rounds: int
    runs: list[Measured] = field(default_factory=list)
    starts: list[Measured] = field(default_factory=list)

    def command(self, source: Path, output: Path) -> list[str]:
        return [part.format(source=source, output=output) for part in shlex.split(self.template)]

    def figures(self) -> Contender:
        return Contender(self.name, self.runs, self.starts)


def entrants(options: argparse.Namespace) -> list[Entrant]:
    """Who takes part: ours first."""
    found = [
        Entrant("tensorferry convert", options.command, options.rounds),
        Entrant("cp -r", "cp -r {source} {output}", options.rounds),
        Entrant("cp -r and sync", "sh -c 'cp -r {source} {output} && sync -f {output}'", options.rounds),
    ]
    python = os.environ.get("TENSORFERRY_MAXTEXT_PYTHON")
    if python and not options.fp8_block:
        template = f"{python} {MAXTEXT} {{source}} {{output}}"
        found.append(Entrant("MaxText to_maxtext", template, options.maxtext_rounds))
    return found


def take_turns(everyone: Sequence[Entrant], source: Path, tiny: Path, rounds: int) -> None:
    """Runs everyone on ``tiny`` and on ``source``, round by round; the results are kept in the entrants."""
    for number in range(rounds):
        # Another one begins each round: whoever comes first finds memory that nobody has touched lately.
        first = number % len(everyone)
        for entrant in [*everyone[first:], *everyone[:first]]:
            if number < entrant.rounds:
                entrant.starts.append(turn(entrant, tiny))
                entrant.runs.append(turn(entrant, source))
                print(f"round {number + 1}: {entrant.name}: {entrant.runs[-1].wall_seconds:.1f} s", flush=True)


def turn(entrant: Entrant, source: Path) -> Measured:
    """One measured run into an output that does not exist, removed afterwards."""
    output = source.with_name("output")
    shutil.rmtree(output, ignore_errors=True)
    warm(source)
    os.sync()
    try:
        return measure(entrant.command(source, output), source.with_name("log.txt"), environment(os.environ))
    finally:
        shutil.rmtree(output, ignore_errors=True)


def environment(current: Mapping[str, str]) -> dict[str, str]:
    """The environment without our path, so that another interpreter does not import our packages."""
    return {name: value for name, value in current.items() if name != "PYTHONPATH"}


def warm(source: Path) -> None:
    """Reads every file once, so that each turn finds the source in the page cache."""
    for path in sorted(source.iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def prepare(folder: Path, shapes: LlamaShapes) -> tuple[Path, Path]:
    """Writes the checkpoint and its tiny likeness into a fresh ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    source, tiny = folder / "source", folder / "tiny"
    make_checkpoint(source, shapes)
    make_checkpoint(tiny, shapes.tiny())
    return source, tiny


def conditions(shapes: LlamaShapes, load: float) -> str:
    """One line: what was converted, where and when."""
    kind = f"FP8 in blocks of {shapes.fp8_block}" if shapes.fp8_block else "bfloat16"
    return (
        f"{shapes.nbytes / 1e9:.2f} GB of {kind}, {shapes.layers} layers of Llama-3.1-8B shape. "
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {load:.1f} at the start, "
        f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}, "
        f"tensorferry {version('tensorferry')}, Beam {version('apache-beam')}, TensorStore {version('tensorstore')}."
    )


def bench(options: argparse.Namespace) -> str:
    """Makes the checkpoints, takes turns and returns the report as Markdown."""
    folder = options.directory.absolute() / "convert"
    load, shapes = os.getloadavg()[0], LlamaShapes.of_size(options.gigabytes, options.fp8_block)
    try:
        source, tiny = prepare(folder, shapes)
        everyone = entrants(options)
        take_turns(everyone, source, tiny, options.rounds)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    ours, *others = (entrant.figures() for entrant in everyone)
    table = figures([ours, *others], shapes.nbytes / 1e9)
    return f"{conditions(shapes, load)}\n\n{table}\n\n{ratios(ours, others)}\n"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure convert against cp and MaxText's converter.")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--fp8-block", type=int, metavar="SIDE", help="an FP8 checkpoint instead of bfloat16")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (default 3)")
    parser.add_argument("--maxtext-rounds", type=int, default=1, help="turns of MaxText, which takes minutes")
    parser.add_argument(
        "--directory", type=Path, default=ROOT / ".bench", help="works in its folder `convert`, removed afterwards"
    )
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint and the last log in place")
    parser.add_argument("--write", action="store_true", help="put the report into BENCHMARKS.md")
    parser.add_argument("--command", default=OURS, help="what to measure, with {source} and {output}")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    try:
        report = bench(options)
    except (CommandFailed, subprocess.SubprocessError) as failure:
        print(failure, file=sys.stderr)
        return 1
    print(f"\n{report}")
    if options.write:
        kind = "fp8" if options.fp8_block else "bf16"
        write_section(ROOT / "BENCHMARKS.md", f"convert {kind} {options.gigabytes:g} GB", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
