"""How busy one worker process keeps a link with 50 ms of latency and 100 MB/s each way, reading and writing.

``python -m benchmarks.network --gigabytes 4``
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.make_checkpoint import make_checkpoint
from benchmarks.report import write_section
from benchmarks.shapes import LlamaShapes
from benchmarks.slow_server import FILES

_ABOUT = """\
One worker process converts a synthetic checkpoint from a web server into a bucket. Both lie behind a link that waits
50 ms before each answer and carries 100 MB/s each way, each stream and all streams of a direction together. Busy is the
share of the time from a direction's first byte of weights to its last in which it carried one; FP8 becomes twice its
bytes, so that only writing can fill the link. The memory bound of 1 GiB admits seven items at once; threads beyond the
cores only wait. Convert takes 8 threads where source or output is a network away (`--direct_num_workers`).

The bucket is a stand-in that keeps no more than the size of a large object. It, the web server and convert shared
{cores} cores; load average before: {load}. `python -m benchmarks.network --write` measures again."""
HEAD = (
    "| | threads | GB read | seconds | link busy | GB written | seconds | link busy |",
    "|---|--:|--:|--:|--:|--:|--:|--:|",
)
BUCKET = "gs://bucket/output"
Stats = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Link:
    """A link to a web server with the source and to a bucket.

    Attributes:
      latency_seconds: before each answer.
      bytes_per_second: of each stream, and of all streams of one direction together.
    """

    latency_seconds: float = 0.05
    bytes_per_second: float = 100e6


def measure(folder: Path, output: str, threads: int, link: Link = Link(), extra: Sequence[str] = ()) -> Stats:
    """Converts a folder over a link.

    Args:
      output: `BUCKET`, or a local directory, which is emptied.
      threads: of the worker process; 0: its own choice.
      extra: more options of ``tensorferry convert``.

    Returns:
      What the link carried ``down`` and ``up``; see `benchmarks.wire.Wire.stats`.
    """
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.slow_server", str(folder), "--latency", str(link.latency_seconds)]
    rates = ("--stream", str(link.bytes_per_second), "--link", str(link.bytes_per_second))
    server = subprocess.Popen([*command, *rates], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin
    assert server.stdout
    with server.stdout:
        with server.stdin:
            _convert(f"http://127.0.0.1:{int(server.stdout.readline())}", output, threads, extra)
        stats = json.loads(server.stdout.readline())
        server.wait()
    return stats


def _convert(server: str, output: str, threads: int, extra: Sequence[str]) -> None:
    command = [sys.executable, "-m", "tensorferry", "convert", "--source", server + FILES, "--output", output, *extra]
    if threads:
        command += ["--direct_num_workers", str(threads)]
    bucket = {"STORAGE_EMULATOR_HOST": server, "TENSORSTORE_GCS_HTTP_URL": server, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x"}
    done = subprocess.run(
        command, env=os.environ | bucket, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)


def row(name: str, threads: int, stats: Stats) -> str:
    """One line of the table."""
    return f"| {' | '.join((name, str(threads), *_cells(stats['down']), *_cells(stats['up'])))} |"


def _cells(one: dict[str, float]) -> tuple[str, ...]:
    if not one["bytes"]:
        return "–", "–", "–"
    return f"{one['bytes'] / 1e9:.2f}", f"{one['seconds']:.1f}", f"{100 * one['busy']:.0f} %"


def report(rows: Sequence[str], load: Sequence[float]) -> str:
    """The section of BENCHMARKS.md."""
    about = _ABOUT.format(cores=os.cpu_count(), load=", ".join(f"{value:.1f}" for value in load))
    return "\n".join(["## A slow link", "", about, "", *HEAD, *rows])


def measure_all(scratch: Path, gigabytes: float, threads: Sequence[int]) -> Iterator[str]:
    """Every line of the table, as it is measured."""
    plain, fp8 = scratch / "bf16", scratch / "fp8"
    make_checkpoint(plain, LlamaShapes.of_size(gigabytes))
    for count in threads:
        yield row("bfloat16, into a bucket", count, measure(plain, BUCKET, count))
    yield row("bfloat16, onto a local disk", 8, measure(plain, str(scratch / "output"), 8))
    shutil.rmtree(plain)
    make_checkpoint(fp8, LlamaShapes.of_size(gigabytes / 2, fp8_block=128))
    yield row("FP8 to bfloat16, into a bucket", 8, measure(fp8, BUCKET, 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the bfloat16 checkpoint")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--write", action="store_true", help="put the report into BENCHMARKS.md")
    args = parser.parse_args()
    rows, load = [], os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="tensorferry-network-") as scratch:
        for line in measure_all(Path(scratch), args.gigabytes, args.threads):
            rows.append(line)
            print(line, flush=True)
    if args.write:
        write_section(Path(__file__).parents[1] / "BENCHMARKS.md", "network", report(rows, load))


if __name__ == "__main__":
    main()
