"""Many steps, killed runs, wrong models: runs that the tests write themselves with plain Orbax."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_migrate import migrate, outcomes, sections
from tunix_runs import LAYERS, MLP, model_tree, repeat_step, save_step
from tunix_samples import open_stored, snapshot, stored_tree

KERNEL = "params.params.decoder.layers.mlp.wi_0.kernel"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step, to be copied."""
    return save_step(tmp_path_factory.mktemp("small") / "run" / "checkpoints", 1, seed=1)


def run_of(small: Path, root: Path, *steps: int) -> Path:
    """A run that holds copies of the step."""
    for step in steps:
        shutil.copytree(small, root / "run" / "checkpoints" / str(step))
    return root


@pytest.mark.parametrize("last", [18, pytest.param(40, marks=pytest.mark.slow)])
def test_steps_of_five_runs_with_a_bad_one(tmp_path: Path, last: int) -> None:
    """Two hundred of them when there is time."""
    source, output = tmp_path / "runs", tmp_path / "converted"
    for run in range(5):
        repeat_step(save_step(source / f"run-{run}" / "checkpoints", 1, seed=10 * run), range(2, last + 1))
    for file in (source / "run-3/checkpoints/17/model_params/d").iterdir():
        file.unlink()
    code, report = migrate(source, output, "--structural")
    assert code == 4
    told = outcomes(report)
    assert len(told) == 5 * last
    assert [path for path, outcome in told.items() if outcome != "migrated"] == ["run-3/checkpoints/17"]
    assert told["run-3/checkpoints/17"] == "refused"
    for run in range(5):
        items = output / f"run-{run}" / "checkpoints" / str(last) / "items"
        wanted = model_tree(10 * run)["decoder"]["layers"]["mlp"]["wi_0"]["kernel"]["value"]
        np.testing.assert_array_equal(open_stored(items, KERNEL).read().result(), wanted)
    code, report = migrate(source, output, "--structural")
    assert code == 4
    assert sorted(set(outcomes(report).values())) == ["refused", "skipped"]


def test_fill_equal_arrays_are_stored(small: Path, tmp_path: Path) -> None:
    source = run_of(small, tmp_path / "s", 1)
    assert migrate(source, tmp_path / "o", "--structural")[0] == 0
    items = tmp_path / "o/run/checkpoints/1/items"
    for name in ("params.params.decoder.decoder_norm.scale", "opt_state.0.mu.params.decoder.decoder_norm.scale"):
        assert (items / name / "c/0").is_file()
        assert not open_stored(items, name).read().result().any()


# The model check.


@pytest.fixture(scope="module")
def template(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("template")
    assert migrate(small.parents[2], where / "out", "--structural")[0] == 0
    return where / "out/run/checkpoints/1"


def test_a_template_validates_its_own_model(small: Path, template: Path, tmp_path: Path) -> None:
    code, report = migrate(run_of(small, tmp_path / "s", 3), tmp_path / "o", "--template", str(template))
    assert code == 0
    manifest = json.loads((tmp_path / "o/run/checkpoints/3/items/tensorferry.manifest.json").read_bytes())
    assert manifest["model"]["validated"] is True
    assert str(template) in manifest["model"]["origin"]
    assert report["steps"][0]["model"]["validated"] is True


def test_a_name_mismatch_lists_both_sides_and_writes_nothing(template: Path, tmp_path: Path) -> None:
    save_step(tmp_path / "s/run/checkpoints", 2, seed=4, mlp_name="wi_9")
    code, report = migrate(tmp_path / "s", tmp_path / "o", "--template", str(template))
    assert code == 4
    problems = report["steps"][0]["problems"]
    assert [problem.split(":")[0] for problem in problems] == [
        "decoder/layers/mlp/wi_0/kernel",
        "decoder/layers/mlp/wi_9/kernel",
    ]
    assert not list((tmp_path / "o").rglob("items"))


def test_a_size_only_mismatch_names_both_shapes(template: Path, tmp_path: Path) -> None:
    save_step(tmp_path / "s/run/checkpoints", 2, seed=4, embed=7)
    code, report = migrate(tmp_path / "s", tmp_path / "o", "--template", str(template))
    assert code == 4
    problems = report["steps"][0]["problems"]
    assert len(problems) == 3
    kernel = next(problem for problem in problems if problem.startswith("decoder/layers/mlp/wi_0/kernel"))
    assert f"expected [6, {LAYERS}, {MLP}]" in kernel
    assert f"found [7, {LAYERS}, {MLP}]" in kernel


def test_the_odd_step_of_a_run_is_refused_without_a_model(small: Path, tmp_path: Path) -> None:
    source = run_of(small, tmp_path / "s", 1, 2)
    save_step(tmp_path / "odd", 3, seed=4, embed=7)
    shutil.move(tmp_path / "odd/3", source / "run/checkpoints/3")
    code, report = migrate(source, tmp_path / "o", "--structural")
    assert code == 4
    assert list(outcomes(report).values()) == ["migrated", "migrated", "refused"]
    assert "as in step run/checkpoints/1 of the same run" in report["steps"][2]["reason"]


def test_a_critic_never_fails_its_actor(small: Path, template: Path, tmp_path: Path) -> None:
    shutil.copytree(small, tmp_path / "s/run/checkpoints/actor/2")
    save_step(tmp_path / "c", 2, seed=4, embed=7)
    shutil.copytree(tmp_path / "c/2", tmp_path / "s/run/checkpoints/critic/2")
    code, report = migrate(tmp_path / "s", tmp_path / "o", "--template", str(template))
    assert code == 0
    assert [(step["role"], step["model"]["validated"]) for step in report["steps"]] == [
        ("actor", True),
        ("critic", False),
    ]


# The same step twice.


def test_two_names_of_one_step_are_both_refused(small: Path, tmp_path: Path) -> None:
    source = run_of(small, tmp_path / "s", 7, 8)
    shutil.copytree(source / "run/checkpoints/7", source / "run/checkpoints/0007")
    code, report = migrate(source, tmp_path / "o", "--structural")
    assert code == 4
    assert outcomes(report) == {
        "run/checkpoints/0007": "refused", "run/checkpoints/7": "refused", "run/checkpoints/8": "migrated",
    }  # fmt: skip


def test_a_step_in_both_layouts_is_left_as_it_is(small: Path, template: Path, tmp_path: Path) -> None:
    source = run_of(small, tmp_path / "s", 7)
    shutil.copytree(template / "items", source / "run/checkpoints/7/items")
    code, report = migrate(source, tmp_path / "o", "--structural")
    assert code == 0
    assert outcomes(report) == {"run/checkpoints/7": "skipped"}
    assert report["steps"][0]["reason"] == "already in the new layout"


def test_padded_and_prefixed_names_are_kept(small: Path, tmp_path: Path) -> None:
    for name in ("0012", "step_13"):
        shutil.copytree(small, tmp_path / "s/run" / name)
    assert migrate(tmp_path / "s", tmp_path / "o", "--structural")[0] == 0
    assert sorted(path.name for path in (tmp_path / "o/run").iterdir()) == ["0012", "step_13"]


def test_something_else_in_a_steps_place_is_never_touched(small: Path, tmp_path: Path) -> None:
    source = run_of(small, tmp_path / "s", 1, 2)
    (tmp_path / "o/run/checkpoints/2").mkdir(parents=True)
    (tmp_path / "o/run/checkpoints/2/mine").write_text("mine")
    code, report = migrate(source, tmp_path / "o", "--structural")
    assert code == 4
    assert list(outcomes(report).values()) == ["migrated", "refused"]
    assert snapshot(tmp_path / "o/run/checkpoints/2").keys() == {"mine"}


# Killed.

SLOWLY = """
import sys, time
from tensorferry.pipelines.cli import main as cli
from tensorferry.pipelines.migrate import copy_work
real = copy_work.copy_item
def slow(*args):
    time.sleep(0.15)
    return real(*args)
copy_work.copy_item = slow
sys.exit(cli.main(sys.argv[1:]))
"""
AT_PUBLISH = """
import os, signal, sys
from tensorferry.pipelines.cli import main as cli
from tensorferry.pipelines.output.run_dir import RunDir
seen = []
def killing(self, name):
    seen.append(name)
    if seen.count("publish") >= 3 and name == KILL_AT:
        os.kill(os.getpid(), signal.SIGKILL)
RunDir._step = killing
sys.exit(cli.main(sys.argv[1:]))
"""


def started(script: str, *args: str) -> subprocess.Popen:
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    return subprocess.Popen([sys.executable, "-c", script, *args], env=environment, stdout=subprocess.DEVNULL)


def all_equal(output: Path, like: Path, steps: int) -> None:
    published = sorted(path.name for path in (output / "run/checkpoints").iterdir())
    assert published == sorted(map(str, range(1, steps + 1)))
    wanted = stored_tree(like / "items")
    for step in range(1, steps + 1):
        assert stored_tree(output / f"run/checkpoints/{step}/items") == wanted


def test_killed_while_copying_it_goes_on(small: Path, template: Path, tmp_path: Path, capsys: Any) -> None:
    source, output = run_of(small, tmp_path / "s", *range(1, 16)), tmp_path / "o"
    process = started(SLOWLY, "migrate", "--source", str(source), "--output", str(output), "--structural")
    deadline = time.monotonic() + 60
    while len(list(output.glob("run/checkpoints/.tensorferry-*/receipts/*.json"))) < 4:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list(output.glob("run/checkpoints/[0-9]*"))
    finished = len(list(output.glob("run/checkpoints/.tensorferry-*/receipts/*.json")))
    assert 4 <= finished < 15
    capsys.readouterr()
    code, report = migrate(source, output, "--structural")
    assert code == 0
    assert f"resuming: {finished} work items" in capsys.readouterr().out
    assert set(outcomes(report).values()) == {"migrated"}
    all_equal(output, template, 15)
    assert not list(output.rglob(".*"))


# At each step of one commit: test_run_dir.py.
@pytest.mark.parametrize(
    "kill_at",
    [
        pytest.param("publish", marks=pytest.mark.slow),
        pytest.param("remove commit mark", marks=pytest.mark.slow),
        "remove receipts",
    ],
)
def test_killed_while_publishing_it_goes_on(small: Path, template: Path, tmp_path: Path, kill_at: str) -> None:
    source, output = run_of(small, tmp_path / "s", *range(1, 6)), tmp_path / "o"
    script = f"KILL_AT = {kill_at!r}\n{AT_PUBLISH}"
    process = started(script, "migrate", "--source", str(source), "--output", str(output), "--structural")
    assert process.wait(60) == -signal.SIGKILL
    code, report = migrate(source, output, "--structural")
    assert code == 0
    told = list(outcomes(report).values())
    assert told.count("skipped") + told.count("migrated") == 5
    assert told.count("skipped") >= 1
    all_equal(output, template, 5)
    assert not list(output.rglob(".*"))


def test_a_chunk_lost_to_a_power_cut_is_copied_again(small: Path, template: Path, tmp_path: Path) -> None:
    source, output = run_of(small, tmp_path / "s", 1, 2), tmp_path / "o"
    script = f"KILL_AT = 'publish'\n{AT_PUBLISH.replace('>= 3', '>= 1')}"
    started(script, "migrate", "--source", str(source), "--output", str(output), "--structural").wait(60)
    chunks = sorted(output.glob(f"run/checkpoints/.tensorferry-*/step/items/{KERNEL}/c/0/0/0"))
    for commit in output.glob("run/checkpoints/.tensorferry-*/commit.json"):
        commit.unlink()
    chunks[0].write_bytes(b"torn")
    if len(chunks) > 1:
        chunks[1].unlink()
    assert migrate(source, output, "--structural")[0] == 0
    all_equal(output, template, 2)


def test_two_at_once_are_refused(small: Path, tmp_path: Path) -> None:
    from tensorferry.pipelines.output.run_lock import RunLock

    source = run_of(small, tmp_path / "s", 1)
    lock = RunLock(tmp_path / "o/.tensorferry-migrate/lock")
    lock.acquire()
    from tensorferry.pipelines.cli.main import main

    assert main(["migrate", "--source", str(source), "--output", str(tmp_path / "o"), "--structural"]) == 1
    lock.release()
    assert migrate(source, tmp_path / "o", "--structural")[0] == 0


def test_sections_are_counted_from_what_was_written(small: Path, tmp_path: Path) -> None:
    source = run_of(small, tmp_path / "s", 1)
    dry = migrate(source, tmp_path / "d", "--structural", "--dry-run")[1]
    wet = migrate(source, tmp_path / "o", "--structural")[1]
    assert sections(dry) == sections(wet)
    tree = stored_tree(tmp_path / "o/run/checkpoints/1/items")
    names = {"params": "weights", "nnx_aux": "nnx_aux", "opt_state": "opt_state", "step": "step"}
    for section, told in names.items():
        stored = [leaf for name, leaf in tree.items() if name.split("/")[0] == section and "sha256" in leaf]
        nbytes = sum(4 * int(np.prod(leaf["shape"])) for leaf in stored)
        assert sections(wet)["run/checkpoints/1"][told] == {"arrays": len(stored), "bytes": nbytes}
