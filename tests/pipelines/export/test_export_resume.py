"""An export killed at any moment goes on where it was, and ends with the same files."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import llama_config, llama_expected, llama_tensors
from commands import ROOT, environment
from exports import export_here, here, stock, write_repository
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.export import export_run
from tensorferry.pipelines.export.export_output import ExportOutput
from tensorferry.pipelines.export.export_planning import ExportOptions
from tensorferry.pipelines.export.export_run import run_export
from tensorferry.pipelines.output.output_dir import STATE_DIR, OutputDir


class Killed(BaseException):
    """Stands for a process that is no more."""


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> tuple[Path, Path]:
    where = tmp_path_factory.mktemp("resume")
    stock(where / "item", llama_expected(llama_tensors()))
    return where / "item", write_repository(where / "hf", llama_config(), llama_tensors())


OPTIONS = {"chunk_bytes": 120, "shard_bytes": 2500}


@pytest.fixture(scope="module")
def whole(places, tmp_path_factory) -> dict[str, bytes]:
    """The files of an undisturbed export."""
    with pytest.MonkeyPatch.context() as patch:
        out = tmp_path_factory.mktemp("whole") / "out"
        patch.setattr("tensorferry.mappings.export.export_items.SMALL_ARRAY_BYTES", 1)
        export_here(patch, *places, out, **OPTIONS)
    return files(out)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "tensorferry.manifest.json"}


def test_stopped_between_items(places, whole, tmp_path, monkeypatch):
    monkeypatch.setattr("tensorferry.mappings.export.export_items.SMALL_ARRAY_BYTES", 1)
    seen = []

    def half(items_path, item_sizes, work, options):
        for line in Path(items_path).read_text().splitlines()[::2]:
            work(json.loads(line))
            seen.append(line)
        raise Killed

    monkeypatch.setattr(export_run, "run_items", half)
    options = ExportOptions(*map(str, places), **OPTIONS)
    with pytest.raises(Killed):
        run_export(options, ExportOutput(str(tmp_path / "out")), lambda line: None)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [STATE_DIR]
    outcome = export_here(monkeypatch, *places, tmp_path / "out", **OPTIONS)
    assert outcome.kept_items == len(seen) > 5
    assert files(tmp_path / "out") == whole


def test_stopped_at_every_step_of_the_commit(places, whole, tmp_path, monkeypatch):
    monkeypatch.setattr("tensorferry.mappings.export.export_items.SMALL_ARRAY_BYTES", 1)
    steps: list[str] = []
    monkeypatch.setattr(OutputDir, "_step", lambda self, name: steps.append(name))
    export_here(monkeypatch, *places, tmp_path / "count", **OPTIONS)
    every = list(steps)
    assert every[-6].startswith("publish model.safetensors.index.json")
    # The first and last shards stand for all.
    publishing = [name for name in every if name.startswith("publish model-")]
    for number, stop in enumerate(name for name in every if name not in publishing[1:-1]):

        def at(self, name, stop=stop):
            if name == stop:
                raise Killed

        out = tmp_path / str(number)
        monkeypatch.setattr(OutputDir, "_step", at)
        with pytest.raises(Killed):
            export_here(monkeypatch, *places, out, **OPTIONS)
        published = {path.name for path in out.iterdir()}
        if "model.safetensors.index.json" in published:
            assert whole.keys() <= published
        monkeypatch.setattr(OutputDir, "_step", lambda self, name: None)
        export_here(monkeypatch, *places, out, **OPTIONS)
        assert files(out) == whole, stop


def test_another_plan_is_refused(places, tmp_path, monkeypatch):
    def none(items_path, item_sizes, work, options):
        raise Killed

    monkeypatch.setattr(export_run, "run_items", none)
    options = ExportOptions(*map(str, places), **OPTIONS)
    with pytest.raises(Killed):
        run_export(options, ExportOutput(str(tmp_path / "out")), lambda line: None)
    with pytest.raises(FerryError, match=r"an unfinished export of this plan .* found one of another plan"):
        export_here(monkeypatch, *places, tmp_path / "out", dtype="float32")


def test_after_a_power_cut_what_did_not_reach_the_disk_is_done_again(places, whole, tmp_path, monkeypatch):
    monkeypatch.setattr("tensorferry.mappings.export.export_items.SMALL_ARRAY_BYTES", 1)
    out = tmp_path / "out"

    def then_dark(items_path, item_sizes, work, options):
        here(items_path, item_sizes, work, options)
        raise Killed

    monkeypatch.setattr(export_run, "run_items", then_dark)
    with pytest.raises(Killed):
        run_export(ExportOptions(*map(str, places), **OPTIONS), ExportOutput(str(out)), lambda line: None)
    record = json.loads((out / STATE_DIR / "run.json").read_text())
    (out / STATE_DIR / "run.json").write_text(json.dumps(record | {"boot": "another"}))
    shard = sorted((out / STATE_DIR / "files").iterdir())[0]
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.seek(size - 100)
        file.write(bytes(100))
    outcome = export_here(monkeypatch, *places, out, **OPTIONS)
    assert 0 < outcome.done_items < outcome.kept_items
    assert files(out) == whole


_KILL = """
import os, signal, sys
from tensorferry.pipelines.export.export_work import ExportWork
from tensorferry.pipelines.cli import main as cli
done = []
act = ExportWork.__call__
def call(self, item):
    if len(done) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(item)
    return act(self, item)
ExportWork.__call__ = call
import tensorferry.mappings.export.export_items
tensorferry.mappings.export.export_items.SMALL_ARRAY_BYTES = 1
sys.exit(cli.main(sys.argv[1:]))
"""


def test_killed_for_real(places, whole, tmp_path, monkeypatch):
    words = ["export", "--source", places[0], "--config", places[1], "--output", tmp_path / "out",
             "--chunk-bytes", "120", "--shard-bytes", "2500"]  # fmt: skip
    program = [sys.executable, "-c", _KILL, *map(str, words)]
    done = subprocess.run(program, capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    monkeypatch.setattr("tensorferry.mappings.export.export_items.SMALL_ARRAY_BYTES", 1)
    outcome = export_here(monkeypatch, *places, tmp_path / "out", **OPTIONS)
    assert outcome.kept_items >= 3
    assert files(tmp_path / "out") == whole
