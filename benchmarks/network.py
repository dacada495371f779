"""How busy one worker process keeps a link with 50 ms of latency and 100 MB/s, for several numbers of threads.

``python -m benchmarks.network --gigabytes 1``
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.make_checkpoint import make_checkpoint
from benchmarks.report import write_section
from benchmarks.shapes import LlamaShapes

_ABOUT = """\
One worker process converts a synthetic checkpoint from a web server that waits 50 ms before each answer and sends
100 MB/s, each stream and all of them together; the output is a local disk. Busy is the share of the time from the first
byte of weights to the last in which the link carried one. Items are admitted by the memory bound of 1 GiB; threads
beyond the cores only wait. Convert takes 8 threads where source or output is a network away (`--direct_num_workers`).
Client and server shared {cores} cores; load average {load}. `python -m benchmarks.network --write` measures again."""
HEAD = ("| threads | GB read | seconds from first to last weight | link busy |", "|--:|--:|--:|--:|")


def measure(folder: Path, output: Path, threads: int) -> dict[str, float]:
    """Converts over the slow wire with a number of threads (0: its own choice); what the server says."""
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.slow_server", str(folder)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin
    assert server.stdout
    port = int(server.stdout.readline())
    convert = [sys.executable, "-m", "pipelines.cli", "convert", "--source", f"http://127.0.0.1:{port}/",
               "--output", str(output), *(("--direct_num_workers", str(threads)) if threads else ())]  # fmt: skip
    try:
        subprocess.run(convert, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    finally:
        server.stdin.close()
    stats = json.loads(server.stdout.readline())
    server.wait()
    server.stdout.close()
    return stats


def row(threads: int, stats: dict[str, float]) -> str:
    """One line of the table."""
    cells = (str(threads), f"{stats['bytes'] / 1e9:.2f}", f"{stats['seconds']:.1f}", f"{100 * stats['busy']:.0f} %")
    return f"| {' | '.join(cells)} |"


def report(rows: Sequence[str]) -> str:
    """The section of BENCHMARKS.md."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return "\n".join(["## A slow link", "", _ABOUT.format(cores=os.cpu_count(), load=load), "", *HEAD, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--write", action="store_true", help="put the report into BENCHMARKS.md")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="tensorferry-network-") as scratch:
        source = Path(scratch, "source")
        make_checkpoint(source, LlamaShapes.of_size(args.gigabytes))
        for threads in args.threads:
            rows.append(row(threads, measure(source, Path(scratch, "output"), threads)))
            print(rows[-1], flush=True)
    if args.write:
        write_section(Path(__file__).parents[1] / "BENCHMARKS.md", "network", report(rows))


if __name__ == "__main__":
    main()
