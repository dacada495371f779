"""Running work through Beam: every item's side effect on disk, counted, in every mode of the local engine."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.engine.beam_args import choose_engine, pipeline_options
from tensorferry.pipelines.engine.progress import Done
from tensorferry.pipelines.engine.runner import RunOptions, run_items
from tensorferry.pipelines.engine.stop_flag import StopFlag
from tensorferry.pipelines.engine.tally import KEPT_FAILURES, Failure, Tally

DASK = "apache_beam.runners.dask.dask_runner.DaskRunner"
SIZES = [7, 300, 11, 5, 120, 64, 3, 250, 90, 17, 41]


@dataclass(frozen=True)
class Append:
    """Appends a line to the item's file, and does to one item what `trouble` says."""

    directory: str
    trouble: str = ""
    at: str = "item 4"
    seconds: float = 0.0

    def setup(self) -> None:
        if self.trouble == "setup":
            raise FerryError("the bucket is not there")

    def __call__(self, item: dict) -> dict:
        time.sleep(self.seconds)
        if item["id"] == self.at:
            self._make_trouble()
        with open(os.path.join(self.directory, item["id"]), "a") as file:
            file.write(f"{os.getpid()} {threading.get_ident()}\n")
        return {"bytes": item["size"], "left out of the tally": "x" * 500}

    def _make_trouble(self) -> None:
        if self.trouble == "sentence":
            raise FerryError("model.safetensors is 12 bytes short")
        if self.trouble == "disk":
            raise OSError(errno.ENOSPC, "No space left on device", "/out/c/0")
        if self.trouble == "bug":
            raise ZeroDivisionError("by design")
        if self.trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "items.jsonl"
    items = [{"id": f"item {index}", "size": size} for index, size in enumerate(SIZES)]
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(path)


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def _runs(out: Path) -> dict[str, list[str]]:
    return {path.name: path.read_text().splitlines() for path in out.iterdir()}


def _options(tmp_path, *beam_args, **kwargs) -> RunOptions:
    return RunOptions(beam_args, state_dir=str(tmp_path / "state"), show_progress=False, **kwargs)


@pytest.mark.parametrize("mode", ["in_memory", "multi_threading", "multi_processing"])
def test_every_item_is_done_as_often_as_its_bundle_is_repeated(mode, plan, out, tmp_path, capfd):
    args = (f"--direct_running_mode={mode}", "--direct_num_workers=2", "--direct_runner_bundle_repeat=2")
    tally = run_items(plan, SIZES, Append(str(out)), _options(tmp_path, *args))

    assert (tally.done, tally.done_bytes, tally.seen) == (len(SIZES), sum(SIZES), len(SIZES))
    assert tally.peak_rss_bytes > 30e6
    runs = _runs(out)
    assert {name: len(lines) for name, lines in runs.items()} == {f"item {i}": 3 for i in range(len(SIZES))}
    pids, threads = zip(*(line.split() for lines in runs.values() for line in lines), strict=True)
    assert len(set(pids)) == (2 if mode == "multi_processing" else 1)
    assert (str(os.getpid()) in pids) == (mode != "multi_processing")
    assert len(set(threads)) >= (2 if mode == "multi_threading" else 1)
    assert capfd.readouterr() == ("", ""), "Beam must not write on the user's terminal"


def test_by_default_there_is_a_thread_per_core_and_progress_on_standard_error(plan, out, tmp_path, capfd):
    options = RunOptions(state_dir=str(tmp_path / "state"), before=Done(1000, 5))
    tally = run_items(plan, SIZES, Append(str(out)), options)

    assert tally.done == len(SIZES)
    assert {len(lines) for lines in _runs(out).values()} == {1}
    told = capfd.readouterr()
    assert told.out == ""
    first, last = told.err.splitlines()
    assert first == "already finished by an earlier attempt: 1.0 kB in 5 work items"
    assert last.startswith("1.9 kB of 1.9 kB (100 %), 16 of 16 work items")
    assert not [path for path in (tmp_path / "state").iterdir() if path.name.startswith("run-")]


def test_another_runner_gets_beam_s_own_and_a_reshuffle(plan, out, tmp_path):
    tally = run_items(plan, SIZES, Append(str(out)), _options(tmp_path, "--runner=BundleBasedDirectRunner"))

    assert tally.done == len(SIZES)
    assert len(_runs(out)) == len(SIZES)
    assert Tally.from_dict(json.loads(Path(plan + ".tally").read_text())) == tally


@pytest.mark.parametrize(
    ("trouble", "sentence"),
    [
        ("sentence", "item 4: model.safetensors is 12 bytes short"),
        ("disk", "item 4: No space left on device: /out/c/0"),
        ("bug", "item 4: ZeroDivisionError: by design"),
    ],
)
def test_a_failure_stops_the_run_and_is_a_sentence(trouble, sentence, plan, out, tmp_path, capfd):
    work = Append(str(out), trouble)
    with pytest.raises(FerryError) as caught:
        run_items(plan, SIZES, work, _options(tmp_path, "--direct_running_mode=in_memory"))

    # Longest first: items 1 and 7 came before item 4.
    assert set(_runs(out)) == {"item 1", "item 7"}
    first, rest = str(caught.value).splitlines()
    assert first == sentence
    assert rest.startswith("1 of 11 work items failed, 8 were not started; what is done stays done. Run the same")
    log = tmp_path / "state" / "beam.log"
    assert ("Traceback" in log.read_text()) == (trouble != "sentence")
    assert (f"Details: {log}" in rest) == (trouble != "sentence")
    assert capfd.readouterr().err == ""


def test_a_worker_that_cannot_be_set_up_is_a_sentence_too(plan, out, tmp_path):
    with pytest.raises(FerryError, match="the bucket is not there"):
        run_items(plan, SIZES, Append(str(out), "setup"), _options(tmp_path))
    assert _runs(out) == {}


def test_a_killed_worker_process_is_a_sentence_and_not_a_hang(plan, out, tmp_path, capfd):
    args = ("--direct_running_mode=multi_processing", "--direct_num_workers=2")
    started = time.monotonic()
    with pytest.raises(FerryError) as caught:
        run_items(plan, SIZES, Append(str(out), "kill"), _options(tmp_path, *args))

    assert time.monotonic() - started < 40
    words = "A worker process died (exit code -9: out of memory?). Run the same command again to resume."
    assert str(caught.value).startswith(words)
    assert capfd.readouterr().err == ""


def test_workers_that_cannot_even_start_are_a_sentence(plan, out, tmp_path, monkeypatch):
    command = (sys.executable, "-c", "raise SystemExit(3)")
    monkeypatch.setattr("tensorferry.pipelines.engine.local_engine._WORKER_COMMAND", command)
    args = ("--direct_running_mode=multi_processing", "--direct_num_workers=2")
    with pytest.raises(FerryError, match=r"^A worker process died \(exit code 3\)\. Run the same command"):
        run_items(plan, SIZES, Append(str(out)), _options(tmp_path, *args))


_INTERRUPTED = """
import sys
from tensorferry.pipelines.engine.runner import Interrupted, RunOptions, run_items
from tensorferry.pipelines.engine.supervisor import leave
from test_runner import SIZES, Append
plan, out, state, seconds = sys.argv[1:]
try:
    options = RunOptions(("--direct_num_workers=2",), state, show_progress=False, grace_seconds=2.0)
    run_items(plan, SIZES, Append(out, seconds=float(seconds)), options)
except Interrupted as error:
    print(error, error.still_running)
    leave(1)
"""


@pytest.mark.parametrize(("item_seconds", "still_running"), [(0.5, False), (60, True)])
def test_ctrl_c_lets_items_in_flight_finish_or_leaves_them(item_seconds, still_running, plan, out, tmp_path):
    state = tmp_path / "state"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, plan, str(out), str(state), str(item_seconds)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _wait_for(lambda: len(list(state.glob("run-*/slot-*"))) == 2)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    interrupted_at = time.monotonic()
    told, complaints = process.communicate(timeout=20)

    assert time.monotonic() - interrupted_at < 5
    assert told == f"Interrupted. Run the same command again to resume. {still_running}\n"
    assert (process.returncode, complaints) == (1, "")
    assert len(_runs(out)) == (0 if still_running else 2)


def _wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            ["--direct_num_worker=3"],
            "--direct_num_worker is neither an option of Tensorferry nor of Apache Beam.",
        ),
        (["--direct_num_worker=3"], "Did you mean --direct_num_workers?"),
        (["--direct_num_workers=many"], "argument --direct_num_workers: invalid int value: 'many'"),
        (["--direct_num_workers=-2"], "--direct_num_workers is -2; it must be 0 (one per core) or more"),
        (["--direct_running_mode=fast"], "argument --direct_running_mode: invalid choice: 'fast'"),
        (["--runner"], "argument --runner: expected one argument"),
        (["--num_workers=many"], "argument --num_workers: invalid int value: 'many'"),
        (["--runner=NoSuchRunner"], "--runner NoSuchRunner cannot start: "),
        (["--runner=DataflowRunner"], "--runner DataflowRunner cannot start: "),
    ],
)
def test_wrong_beam_options_are_sentences(args, sentence, plan, out, tmp_path, capfd):
    with pytest.raises(FerryError) as caught:
        run_items(plan, SIZES, Append(str(out)), _options(tmp_path, *args))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""
    assert _runs(out) == {}


@pytest.mark.parametrize(
    ("args", "runner", "mode", "workers"),
    [
        (["--direct_num_workers=3"], "", "multi_threading", 3),
        (["--runner=DirectRunner", "--direct_num_workers", "3"], "", "multi_threading", 3),
        (["--runner", "FnApiRunner", "--direct_running_mode=in_memory", "--direct_num_workers=3"],)
        + ("", "in_memory", 1),
        (["--runner=DaskRunner", "--direct_num_workers=3"], DASK, "multi_threading", 3),
    ],
)
def test_engine_choice(args, runner, mode, workers):
    choice = choose_engine(args)
    assert (choice.runner, choice.running_mode, choice.workers) == (runner, mode, workers)


def test_dask_gets_a_partition_per_stretch_unless_told():
    assert choose_engine(["--runner=DaskRunner"]).cut_for_dask(7).args[1:] == ("--dask_npartitions=7",)
    told = choose_engine(["--runner=DaskRunner", "--dask_npartitions=3"])
    assert told.cut_for_dask(7) == told
    assert choose_engine([]).cut_for_dask(7).args == ()


def test_beam_options_come_from_our_arguments_alone(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tensorferry", "--project=from-sys-argv"])
    options = pipeline_options(choose_engine(["--region=europe-west4"])).get_all_options()
    assert options["project"] is None
    assert options["region"] == "europe-west4"


def test_a_plan_of_no_items_is_done():
    assert run_items("nowhere", [], Append("nowhere"), RunOptions()) == Tally()


def test_tallies_add_up():
    failures = tuple(Failure(f"item {index}", "OSError", "disk full") for index in range(KEPT_FAILURES))
    total = Tally(3, 1, 2, 500, 7, failures[:1]).plus(Tally(1, 30, 0, 50, 9, failures))
    assert (total.done, total.failed, total.skipped, total.done_bytes) == (4, 31, 2, 550)
    assert (total.peak_rss_bytes, total.seen, len(total.failures)) == (9, 37, KEPT_FAILURES)


def test_the_stop_flag_reaches_whoever_sees_the_directory(tmp_path):
    flag = StopFlag("run 1", str(tmp_path))
    elsewhere = StopFlag("run 1 in another process", str(tmp_path))
    assert not elsewhere.is_set()
    flag.set()
    assert flag.is_set()
    assert elsewhere.is_set()
    assert not StopFlag("run 2", str(tmp_path / "other")).is_set()


def test_nothing_heavy_is_imported_before_a_pipeline_runs():
    heavy = ("apache_beam", "numpy", "jax", "rich")
    code = f"import sys, tensorferry.pipelines.engine.runner; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
