"""Beam's worker pools as if they were hosts: real pool processes, whose workers write one checkpoint together."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_llama
from tensorferry.mappings.plan import work_items as items
from tensorferry.mappings.plan.conversion_plan import PlanOptions
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.convert import conversion as converting
from tensorferry.pipelines.convert.conversion import OutputOptions, convert
from tensorferry.pipelines.convert.conversion_planning import ConversionOptions
from tensorferry.pipelines.engine.beam_args import choose_engine

_VARY = ("commit_success.txt", "tensorferry.manifest.json", "_CHECKPOINT_METADATA")


def tree(folder: Path) -> dict[str, bytes]:
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.endswith(_VARY)}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def pool(log: Path, python_first: Path = Path(sys.executable).parent) -> Iterator[str]:
    """A worker pool; yields its address, and ends it with every worker that it started."""
    port = free_port()
    env = {**os.environ, "PATH": f"{python_first}{os.pathsep}{os.environ['PATH']}",
           "PYTHONPATH": str(Path(__file__).parents[3])}  # fmt: skip
    command = [sys.executable, "-m", "apache_beam.runners.worker.worker_pool_main", "--service_port", str(port)]
    with open(log, "wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file, start_new_session=True)
    try:
        for _ in range(300):
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield f"localhost:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def workers_of(log: Path) -> int:
    return log.read_text().count("Starting worker with command")


@pytest.fixture
def source(tmp_path, monkeypatch) -> ConversionOptions:
    monkeypatch.setattr(items, "MAX_GROUPED_PARTS", 2)
    folder = str(tiny_llama.write(tmp_path / "source"))
    return ConversionOptions(folder, target=PlanOptions(chunk_bytes=400))


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_two_pools_write_what_one_process_writes(source, tmp_path, capsys, workers):
    convert(source, OutputOptions(str(tmp_path / "here")), print)
    logs = [tmp_path / "pool-1.log", tmp_path / "pool-2.log"]
    with pool(logs[0]) as one, pool(logs[1]) as other:
        args = ("--environment_type=EXTERNAL", f"--environment_config={one},{other}", f"--direct_num_workers={workers}")
        outcome = convert(source, OutputOptions(str(tmp_path / "there"), beam_args=args), print)
        assert [workers_of(log) for log in logs] == [workers - 1, 1]
        assert outcome.redone_items > 10
        assert tree(tmp_path / "there") == tree(tmp_path / "here")
        assert main(["verify", "--source", source.source, "--output", str(tmp_path / "there"), *args]) == 0
        assert "no difference" in capsys.readouterr().out


_DEATH = """
import os, signal
from tensorferry.pipelines.convert.ferry import FerryWork
def call(self, item):
    os.kill(os.getpid(), signal.SIGKILL)
FerryWork.__call__ = call
"""


def test_a_worker_of_a_pool_that_dies_is_told_and_the_next_run_goes_on(source, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_DEATH)
    output = str(tmp_path / "out")
    with pool(tmp_path / "pool.log", site_python(tmp_path, site)) as address:
        args = ("--environment_type=EXTERNAL", f"--environment_config={address}")
        with pytest.raises(FerryError, match=r"^A worker of a pool died \(out of memory\?\)\. Run the same"):
            convert(source, OutputOptions(output, beam_args=args), print)
    convert(source, OutputOptions(output), print)


def site_python(tmp_path: Path, site: Path) -> Path:
    """A folder whose ``python`` loads ``sitecustomize.py`` first."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{site}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return folder


def test_a_worker_of_a_pool_commits(gcs, bucket, tmp_path, monkeypatch):
    """The launcher keeps its hands off, as if it had gone."""
    gcs.put_all(bucket, "m", tiny_llama.files())
    monkeypatch.setattr(converting._Conversion, "_write_metadata", None)
    with pool(tmp_path / "pool.log") as address:
        args = ["--environment_type=EXTERNAL", f"--environment_config={address}", "--commit-in-job"]
        places = ["--source", f"gs://{bucket}/m", "--output", f"gs://{bucket}/out"]
        assert main(["convert", *places, *args]) == 0
    assert "out/0/commit_success.txt" in gcs.names(bucket)
    assert not gcs.names(bucket, "out/.tensorferry-0/")


def test_a_pool_that_is_not_there_is_a_sentence(source, tmp_path):
    port = free_port()
    args = ("--environment_type=EXTERNAL", f"--environment_config=localhost:{port}")
    with pytest.raises(FerryError, match=rf"localhost:{port}: expected a worker pool; found no answer\. Start it"):
        convert(source, OutputOptions(str(tmp_path / "out"), beam_args=args), print)


def test_workers_that_never_come_are_a_sentence(source, tmp_path, monkeypatch):
    monkeypatch.setattr("tensorferry.pipelines.engine.worker_pools._START_SECONDS", 2.0)
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").write_text("#!/bin/sh\nexit 3\n")
    (folder / "python").chmod(0o755)
    with pool(tmp_path / "pool.log", folder) as address:
        args = ("--environment_type=EXTERNAL", f"--environment_config={address}")
        with pytest.raises(FerryError, match=r"expected a worker of that pool; found none within 2 s\. Put the"):
            convert(source, OutputOptions(str(tmp_path / "out"), beam_args=args), print)


def test_addresses_are_needed():
    assert choose_engine(["--environment_type=EXTERNAL", "--environment_config=a:1, b:2"]).pools == ("a:1", "b:2")
    with pytest.raises(FerryError, match="needs the addresses of worker pools"):
        choose_engine(["--environment_type", "EXTERNAL"])
