"""Killed, interrupted, refused: whatever happens, the same command finishes, and the result is the undisturbed one."""

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import stock_orbax
from checkpoints import Sizes, llama_config, llama_expected, llama_tensors, write_checkpoint
from commands import start
from tensorferry.pipelines.cli.main import main

# A row of the embedding for each chunk and 256 chunks for each work item: slow work, to be killed in the middle of.
SIZES = Sizes(layers=1, vocab=600)
SLOW = ("--chunk-bytes", "20", "--progress-seconds", "0.2")
MANIFEST = "tensorferry.manifest.json"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("hf"), llama_config(SIZES), llama_tensors(SIZES))


@pytest.fixture(scope="module")
def calm(source, tmp_path_factory) -> dict[str, bytes]:
    """The files of an undisturbed run."""
    output = tmp_path_factory.mktemp("calm")
    assert main(convert_args(source, output)) == 0
    return comparable(output)


def convert_args(source: Path, output: Path, *more: str) -> list[str]:
    return ["convert", "--source", str(source), "--output", str(output), *SLOW, *more]


def comparable(output: Path) -> dict[str, bytes]:
    """Every file of the published step, without timestamps and the output's own path."""
    step = output / "0"
    found = {p.relative_to(step).as_posix(): p.read_bytes() for p in step.rglob("*") if p.is_file()}
    manifest = json.loads(found[f"items/{MANIFEST}"])
    for name in ("output", "beam_args", "overwrite"):
        del manifest["options"][name]
    metadata = json.loads(found["_CHECKPOINT_METADATA"])
    times = {"init_timestamp_nsecs": 0, "commit_timestamp_nsecs": 0}
    return found | {
        f"items/{MANIFEST}": json.dumps(manifest).encode(),
        "_CHECKPOINT_METADATA": json.dumps(metadata | times).encode(),
        "commit_success.txt": b"",
        "items/commit_success.txt": b"",
    }


def receipts(output: Path) -> list[Path]:
    return sorted(output.glob(".tensorferry-0/receipts/[!.]*.json"))


def finished_chunks(output: Path) -> dict[str, int]:
    """Chunk files of finished work items with the times they were written at (zarr3)."""
    items = output / ".tensorferry-0" / "step" / "items"
    parts = [part for path in receipts(output) for part in json.loads(path.read_bytes())["parts"]]
    keys = [f"{part['array']}/c/{'/'.join(map(str, part['grid']))}" for part in parts]
    return {key: (items / key).stat().st_mtime_ns for key in keys}


def until(happens: Callable[[], bool], process: "subprocess.Popen[str]", seconds: float = 60) -> bool:
    """Waits for something while a process runs; False when the process ended first."""
    deadline = time.monotonic() + seconds
    while not happens():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.003)
    return True


def receipts_reach(output: Path, count: int) -> Callable[[], bool]:
    return lambda: len(receipts(output)) >= count


def kill_at(moment: Callable[[], bool], source: Path, output: Path, wait_seconds: float = 0) -> None:
    """Starts a conversion and kills it outright when something has happened."""
    process = start(*convert_args(source, output))
    assert until(moment, process), process.communicate()
    time.sleep(wait_seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_killed_again_and_again_it_ends_as_if_undisturbed(source, calm, tmp_path, capfd):
    dice = random.Random(11)
    chunks: dict[str, int] = {}
    for moment in ((tmp_path / ".tensorferry-0").exists, receipts_reach(tmp_path, 1), receipts_reach(tmp_path, 3)):
        kill_at(moment, source, tmp_path, dice.random() / 20)
        assert stock_orbax.steps(tmp_path) == []
        now = finished_chunks(tmp_path)
        assert chunks.items() <= now.items(), "finished work was done again"
        chunks = now
    kept = len(receipts(tmp_path))

    assert main(convert_args(source, tmp_path)) == 0

    told = capfd.readouterr()
    total = int(re.findall(r"of (\d+) work items", told.err)[-1])
    assert 3 <= kept < total
    assert f"resuming: {kept} work items" in told.out
    assert f"{kept} of {total} work items were finished by an earlier run" in told.out
    items = tmp_path / "0" / "items"
    assert {key: (items / key).stat().st_mtime_ns for key in chunks} == chunks
    assert comparable(tmp_path) == calm
    stock_orbax.assert_restores(tmp_path, llama_expected(llama_tensors(SIZES), SIZES))


@pytest.mark.slow
def test_killed_while_it_commits(source, calm, tmp_path, capfd):
    metadata = tmp_path / ".tensorferry-0" / "step" / "items" / "_METADATA"
    kill_at(metadata.exists, source, tmp_path)
    assert stock_orbax.steps(tmp_path) == []
    kept, chunks = len(receipts(tmp_path)), finished_chunks(tmp_path)

    assert main(convert_args(source, tmp_path)) == 0

    assert f"{kept} of {kept} work items were finished by an earlier run" in capfd.readouterr().out
    items = tmp_path / "0" / "items"
    assert {key: (items / key).stat().st_mtime_ns for key in chunks} == chunks
    assert comparable(tmp_path) == calm


def test_a_killed_worker_is_a_sentence_and_the_rerun_finishes(source, calm, tmp_path, capfd):
    args = convert_args(source, tmp_path, "--direct_running_mode=multi_processing", "--direct_num_workers=2")
    process = start(*args)
    assert until(receipts_reach(tmp_path, 1), process), process.communicate()
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) == 2
    workers[0].kill()
    out, err = process.communicate(timeout=60)

    assert process.returncode == 1, (out, err)
    assert "A worker process died (exit code -9: out of memory?). Run the same command again to resume." in err
    assert "Traceback" not in out + err
    assert not (tmp_path / "0").exists()
    assert not psutil.wait_procs(workers, timeout=10)[1], "the other worker goes on"
    assert main(convert_args(source, tmp_path)) == 0
    assert "were finished by an earlier run" in capfd.readouterr().out
    assert comparable(tmp_path) == calm


@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_launcher(source, calm, tmp_path):
    args = convert_args(source, tmp_path, "--direct_running_mode=multi_processing", "--direct_num_workers=2")
    process = start(*args)
    assert until(receipts_reach(tmp_path, 1), process), process.communicate()
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert not psutil.wait_procs(workers, timeout=30)[1], "a worker still writes"
    assert main(convert_args(source, tmp_path)) == 0
    assert comparable(tmp_path) == calm


@pytest.mark.parametrize("mode", ["multi_threading", pytest.param("multi_processing", marks=pytest.mark.slow)])
def test_ctrl_c_ends_within_seconds_and_says_how_to_resume(mode, source, calm, tmp_path):
    process = start(*convert_args(source, tmp_path, f"--direct_running_mode={mode}", "--direct_num_workers=2"))
    assert until(receipts_reach(tmp_path, 1), process), process.communicate()
    process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    out, err = process.communicate(timeout=60)

    assert time.monotonic() - asked < 10
    assert process.returncode == 1, (out, err)
    assert "Interrupted. Run the same command again to resume." in err
    assert "Traceback" not in out + err
    assert stock_orbax.steps(tmp_path) == []
    assert main(convert_args(source, tmp_path)) == 0
    assert comparable(tmp_path) == calm


def test_ctrl_c_while_it_starts_is_the_same_sentence(source, tmp_path):
    process = start(*convert_args(source, tmp_path))
    assert until((tmp_path / ".tensorferry-0" / "run.json").exists, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert "Interrupted. Run the same command again to resume." in err
    assert "Traceback" not in err


# What is already there.


def test_another_plan_in_the_same_place_is_refused_with_both_digests(source, calm, tmp_path, capfd, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            "tensorferry.pipelines.output.run_dir.RunDir.commit", lambda self: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        assert main(convert_args(source, tmp_path)) == 1
    digest = json.loads((tmp_path / ".tensorferry-0" / "run.json").read_text())["plan_digest"]
    before = sorted(tmp_path.rglob("*"))

    assert main(convert_args(source, tmp_path, "--dtype", "float32")) == 1

    told = capfd.readouterr().err
    assert stock_orbax.steps(tmp_path) == []
    refused = re.search(r"this plan \(digest (\w+)-zarr3-none\); found one of another plan \(digest (\S+)\)", told)
    assert refused
    assert refused[2] == digest
    assert refused[1] not in digest
    assert sorted(tmp_path.rglob("*")) == before
    assert main(convert_args(source, tmp_path)) == 0
    assert comparable(tmp_path) == calm


def test_two_runs_at_once_are_refused(source, calm, tmp_path, capfd):
    process = start(*convert_args(source, tmp_path))
    assert until(receipts_reach(tmp_path, 1), process)
    assert main(convert_args(source, tmp_path)) == 1
    assert f"{process.pid}" in capfd.readouterr().err
    process.communicate()
    assert process.returncode == 0
    assert comparable(tmp_path) == calm


def quick_args(source: Path, output: Path, *more: str) -> list[str]:
    return ["convert", "--source", str(source), "--output", str(output), *more]


@pytest.fixture
def small(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "hf", llama_config(), llama_tensors())


def test_a_complete_output_is_refused_without_overwrite(small, tmp_path, capfd):
    output = tmp_path / "out"
    assert main(quick_args(small, output)) == 0
    before = comparable(output)
    times = {path: path.stat().st_mtime_ns for path in output.rglob("*")}

    assert main(quick_args(small, output)) == 1
    told = capfd.readouterr().err
    assert "found a complete checkpoint" in told
    assert "--overwrite" in told
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == times

    assert main(quick_args(small, output, "--overwrite", "--dtype", "float32", "--no-scan-layers")) == 0
    assert comparable(output) != before
    stock_orbax.assert_restores(output, llama_expected(llama_tensors(), scan=False, dtype="float32"))
    assert "scan_layers: false" in (output / "maxtext.yml").read_text()
    assert sorted(path.name for path in output.iterdir()) == ["0", "maxtext.yml"]


def test_a_failed_overwrite_leaves_the_old_checkpoint_and_its_settings(small, tmp_path, monkeypatch):
    output = tmp_path / "out"
    assert main(quick_args(small, output)) == 0
    before, settings = comparable(output), (output / "maxtext.yml").read_bytes()
    monkeypatch.setattr(
        "tensorferry.pipelines.output.run_dir.RunDir.commit", lambda self: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert main(quick_args(small, output, "--overwrite", "--no-scan-layers")) == 1
    assert comparable(output) == before
    assert (output / "maxtext.yml").read_bytes() == settings
    monkeypatch.undo()
    assert main(quick_args(small, output, "--overwrite", "--no-scan-layers")) == 0
    assert "scan_layers: false" in (output / "maxtext.yml").read_text()


@pytest.mark.parametrize("what", ["directory", "file", "link", "checkpoint of another"])
def test_overwrite_never_deletes_what_is_not_ours(what, small, tmp_path, capfd):
    output, home = tmp_path / "out", tmp_path / "thesis"
    output.mkdir()
    home.mkdir()
    (home / "thesis.tex").write_text("four years")
    step = output / "0"
    if what == "file":
        step.write_text("four years")
    elif what == "link":
        step.symlink_to(home)
    else:
        (step / "items").mkdir(parents=True)
        (step / "items" / ("_METADATA" if what == "checkpoint of another" else "notes.txt")).write_text("four years")
    before = sorted(output.rglob("*")), sorted(home.rglob("*"))

    assert main(quick_args(small, output, "--overwrite")) == 1

    told = capfd.readouterr().err
    assert "not a Tensorferry checkpoint" in told
    assert "never overwritten" in told
    assert (sorted(output.rglob("*")), sorted(home.rglob("*"))) == before


def test_overwrite_refuses_a_checkpoint_that_holds_something_of_the_user(small, tmp_path, capfd):
    output = tmp_path / "out"
    assert main(quick_args(small, output)) == 0
    notes = output / "0" / "notes.txt"
    notes.write_text("four years")
    assert main(quick_args(small, output, "--overwrite")) == 1
    assert str(notes) in capfd.readouterr().err
    assert notes.read_text() == "four years"
