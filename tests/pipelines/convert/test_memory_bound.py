"""The bound on a worker's memory: an array six times as large passes under a limit that it would break."""

import json
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import Sizes, llama_config, llama_tensors, write_checkpoint
from commands import ROOT, environment
from tensorferry.pipelines.cli.main import main

MIB = 1 << 20
BOUND = 16 * MIB
SIZES = Sizes(layers=1, vocab=49_152, embed=1024, heads=6, kv_heads=2, head_dim=8, mlp=14)
LARGEST = SIZES.vocab * SIZES.embed * 2
# What is needed beside tensors: stacks of new threads, heaps of Beam and TensorStore. Measured: 14 to 37 MiB.
SLACK = 48 * MIB
STACK = MIB
assert LARGEST > BOUND + SLACK

# Converts something small first, so that imports and pools are there; then the kernel allows what the bound allows.
LIMITED = """
import json, resource, sys, threading, time
from tensorferry.pipelines.cli.main import main

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name + ":"))

def watch(name, peak, done):
    while not done.wait(0.002):
        peak[0] = max(peak[0], status(name))

warm_up, command, allowed_bytes, first = json.loads(sys.argv[1])
exec(first)
for args in warm_up:
    assert main(args) == 0
limit = status("VmData") + allowed_bytes
if allowed_bytes:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
baseline, peak, done = status("RssAnon"), [0], threading.Event()
thread = threading.Thread(target=watch, args=("RssAnon", peak, done))
thread.start()
code = main(command)
done.set()
thread.join()
print(json.dumps({"code": code, "grown": peak[0] - baseline}))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    tensors = llama_tensors(SIZES)
    for n, name in enumerate(("model.embed_tokens.weight", "lm_head.weight")):
        octets = np.random.default_rng(n).integers(0, 256, LARGEST, np.uint8)
        tensors[name] = octets.view(ml_dtypes.bfloat16).reshape(SIZES.vocab, SIZES.embed)
    return write_checkpoint(tmp_path_factory.mktemp("big"), llama_config(SIZES), tensors, shards=2)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("small"), llama_config(), llama_tensors())


def limited(warm_up: list[list[str]], command: list[str], allowed_bytes: int, first: str = "") -> tuple[dict, str]:
    """The report of a process, empty when it did not live to give one, and what it said."""
    argument = json.dumps([warm_up, command, allowed_bytes, first])
    # The limit counts whole stacks, used or not: by default 8 MiB for each new thread.
    words = ["sh", "-c", f'ulimit -s {STACK >> 10}; exec "$@"', "sh", sys.executable, "-c", LIMITED, argument]
    surroundings = environment(MALLOC_ARENA_MAX="1")
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=ROOT, env=surroundings)
    last = done.stdout.splitlines()[-1:] or [""]
    return json.loads(last[0]) if last[0].startswith("{") else {}, done.stdout + done.stderr


def convert(source: Path, output: Path, bound: int, *more: str) -> list[str]:
    # Chunks as large as the bound allows.
    return ["convert", "--source", str(source), "--output", str(output), "--chunk-bytes", "512MiB",
            "--worker-memory-bytes", str(bound), *more]  # fmt: skip


@pytest.fixture(scope="module")
def converted(source, small, tmp_path_factory) -> tuple[Path, dict, str]:
    folder = tmp_path_factory.mktemp("out")
    warm_up = [convert(small, folder / "small", BOUND)]
    return folder / "big", *limited(warm_up, convert(source, folder / "big", BOUND), BOUND + SLACK)


def test_an_array_larger_than_the_bound_passes_under_a_limit_of_the_kernel(converted):
    _, report, said = converted
    assert report.get("code") == 0, said
    assert report["grown"] < BOUND + SLACK


# So little data would go into sixteen files.
_ONE_FILE = (
    "from tensorferry.pipelines.convert import units;"
    "units.grouped = lambda items, total_bytes: iter([units.Group(tuple(items))])"
)


def test_a_data_file_of_ocdbt_far_larger_than_the_bound_passes_as_well(source, small, tmp_path):
    """One file of both large arrays, three times what the kernel allows: it is nowhere in memory as a whole."""
    warm_up = [convert(small, tmp_path / "small", BOUND, "--format", "ocdbt")]
    command = convert(source, tmp_path / "big", BOUND, "--format", "ocdbt")
    report, said = limited(warm_up, command, BOUND + SLACK, _ONE_FILE)
    assert report.get("code") == 0, said
    assert report["grown"] < BOUND + SLACK
    (file,) = (tmp_path / "big" / "0/items/parts").glob("*/d/*")
    assert file.stat().st_size > 2 * LARGEST > 2.9 * (BOUND + SLACK)


def test_the_limit_stops_a_run_with_too_wide_a_bound(source, small, tmp_path):
    warm_up = [convert(small, tmp_path / "small", BOUND)]
    report, said = limited(warm_up, convert(source, tmp_path / "big", 1 << 30), BOUND + SLACK)
    assert report.get("code") == 1, said
    assert "out of memory; a smaller --worker-memory-bytes or fewer workers need less" in said
    assert not (tmp_path / "big" / "0").exists()


def test_verify_stays_below_the_bound_as_well(converted, source, small):
    output = converted[0]
    warm_up = [["verify", "--source", str(small), "--output", str(output.parent / "small")]]
    command = ["verify", "--source", str(source), "--output", str(output)]
    report, said = limited(warm_up, command, BOUND + SLACK)
    assert report.get("code") == 0, said
    assert report["grown"] < BOUND + SLACK


@pytest.mark.parametrize("bound", [10, 70])
def test_a_bound_too_small_for_a_row_is_a_problem_of_the_plan_that_says_what_would_do(bound, tmp_path, capfd):
    source = write_checkpoint(tmp_path / "hf", llama_config(Sizes(layers=1)), llama_tensors(Sizes(layers=1)))
    assert main(convert(source, tmp_path / "out", bound)) == 2
    told = capfd.readouterr().err
    assert f"expected work items of at most {bound:,} bytes (--worker-memory-bytes)" in told
    assert "the array cannot be cut finer" in told
    assert "Nothing was written." in told
    assert not (tmp_path / "out").exists()
    (enough,) = set(re.findall(r"Run with --worker-memory-bytes (\d+)\.", told))
    assert bound < int(enough) < 5_000
    assert main(convert(source, tmp_path / "out", int(enough))) == 0
