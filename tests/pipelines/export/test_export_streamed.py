"""Exports written straight into a bucket: whole files by any number of workers, nothing on any disk."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import Sizes, llama_config, llama_expected, llama_tensors
from commands import ROOT, environment
from exports import export_here, here, stock, write_repository
from oracle_data import read_safetensors
from staged_jobs import dataflow_args
from tensorferry.mappings.export.streamed import UPLOAD_BYTES
from tensorferry.mappings.words.problems import FerryError, PlanError
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.export import shard_stream as streaming
from tensorferry.pipelines.export import streamed_run
from tensorferry.pipelines.output.output_bucket import OutputBucket
from tensorferry.pipelines.storage import bucket_stream, retries
from tensorferry.pipelines.storage.streams import PIECE_BYTES, stream_bytes

INDEX = "model.safetensors.index.json"
WANTED = {name: array.tobytes() for name, array in llama_tensors().items() if "q_proj" not in name}


@pytest.fixture(scope="module")
def item(tmp_path_factory) -> Path:
    return stock(tmp_path_factory.mktemp("orbax") / "5" / "items", llama_expected(llama_tensors()))


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    return write_repository(tmp_path_factory.mktemp("hf"), llama_config(), llama_tensors())


@pytest.fixture
def output(bucket, monkeypatch) -> str:
    """Waits without waiting; work in this thread."""
    pytest.importorskip("google.cloud.storage", reason="needs google-cloud-storage")
    monkeypatch.setattr(bucket_stream, "_FIRST_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(retries, "sleep", lambda seconds: None)
    monkeypatch.setattr(streamed_run, "run_items", here)
    return f"gs://{bucket}/out"


def tensors(gcs, bucket: str) -> dict[str, bytes]:
    found = {}
    for name, data in gcs.tree(bucket, "out/").items():
        if name.endswith(".safetensors"):
            found |= {key: array.tobytes() for key, array in read_safetensors(data).items() if "q_proj" not in key}
    return found


def test_whole_files_the_index_last_and_nothing_left(gcs, bucket, output, item, repository, monkeypatch, capsys):
    outcome = export_here(monkeypatch, item, repository, output, shard_bytes=2500, chunk_bytes=200)
    assert outcome.done_items == len(outcome.export.plan.shards) > 3
    assert tensors(gcs, bucket) == WANTED
    files = [name for name in gcs.names(bucket, "out/") if name.endswith(".safetensors")]
    assert len(gcs.seen("^POST /upload.*resumable")) == len(files)
    assert {gcs.writes[f"{bucket}/{name}"] for name in files} == {1}
    assert gcs.get(bucket, "out/tokenizer.json") == (repository / "tokenizer.json").read_bytes()
    assert not [name for name in gcs.names(bucket, "out/") if ".tensorferry" in name]
    writes = [one for one in gcs.requests if one.startswith(("POST /upload", "PUT /", "POST /" + bucket))]
    order = [number for number, one in enumerate(writes) if "resumable" in one or INDEX in one]
    assert INDEX in writes[order[-1]]
    assert main(["verify", "--source", str(item), "--output", output]) == 0
    assert "no difference" in capsys.readouterr().out


def test_the_same_bytes_as_into_a_directory(gcs, bucket, output, item, repository, tmp_path, monkeypatch):
    export_here(monkeypatch, item, repository, output, shard_bytes=2500)
    export_here(monkeypatch, item, repository, tmp_path / "out", shard_bytes=2500)
    there = {name: data for name, data in gcs.tree(bucket, "out/").items() if "manifest" not in name}
    local = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if "manifest" not in path.name}
    assert there == local


def test_one_file_counts_when_config_is_there(gcs, bucket, output, item, repository, monkeypatch):
    export_here(monkeypatch, item, repository, output)
    assert tensors(gcs, bucket) == WANTED
    assert f"out/{INDEX}" not in gcs.names(bucket)


class Killed(BaseException):
    """Stands for a process that is no more."""


def test_killed_within_a_file_and_between(gcs, bucket, output, item, repository, monkeypatch):
    """No part of a file shows; the next run does what has no receipt, and what has one but is not there."""
    act, done = streaming.export_item, []

    def dies(*args):
        if len(done) == 20:
            raise Killed
        done.append(args)
        return act(*args)

    monkeypatch.setattr(streaming, "export_item", dies)
    with pytest.raises(Killed):
        export_here(monkeypatch, item, repository, output, shard_bytes=2500)
    files = gcs.names(bucket, "out/model")
    assert 1 < len(files) < 5
    gcs.put(bucket, files[0], b"cut off")
    monkeypatch.setattr(streaming, "export_item", act)
    outcome = export_here(monkeypatch, item, repository, output, shard_bytes=2500)
    assert outcome.kept_items == len(files) - 1
    assert tensors(gcs, bucket) == WANTED


def test_killed_at_every_step_of_the_commit(gcs, bucket, output, item, repository, monkeypatch):
    for number, name in enumerate(("write config.json", f"write {INDEX}", "remove receipts", "remove run.json")):

        def at(step, name=name):
            if step == name:
                raise Killed

        def opened(*args, at=at):
            run = OutputBucket(*args)
            run.at_step_of_commit = at
            return run

        monkeypatch.setattr(streamed_run, "OutputBucket", opened)
        place = f"{output}/{number}"
        with pytest.raises(Killed):
            export_here(monkeypatch, item, repository, place, shard_bytes=2500)
        monkeypatch.setattr(streamed_run, "OutputBucket", OutputBucket)
        outcome = export_here(monkeypatch, item, repository, place, shard_bytes=2500)
        # Receipts go last but one: what has none is written again, the same.
        assert outcome.done_items == (0 if number < 3 else 5)
        found = gcs.names(bucket, f"out/{number}/")
        assert f"out/{number}/{INDEX}" in found
        assert not [one for one in found if ".tensorferry-export" in one]


@pytest.mark.parametrize(
    ("pattern", "status"), [("^PUT /upload", 429), ("^POST /upload.*resumable", 503), ("^PUT /upload", 410)]
)
def test_uploads_that_fail_for_a_while(gcs, bucket, output, item, repository, monkeypatch, pattern, status):
    gcs.fail(pattern, status, times=2)
    export_here(monkeypatch, item, repository, output, shard_bytes=2500)
    assert [fault.times for fault in gcs.faults] == [0]
    assert tensors(gcs, bucket) == WANTED


def test_words(gcs, bucket, output, item, repository, monkeypatch):
    gcs.put(bucket, "out/precious.bin", b"1")
    with pytest.raises(FerryError, match=r"found precious\.bin\. Nothing is ever overwritten"):
        export_here(monkeypatch, item, repository, output)
    gcs.fail("^POST /upload.*resumable", 403, times=99)
    with pytest.raises(FerryError, match=r"other/model.*that can be written; found permission denied \(403\)"):
        export_here(monkeypatch, item, repository, f"gs://{bucket}/other")
    gcs.reset()
    with pytest.raises(FerryError, match=r"an unfinished export of this plan .* found one of another plan"):
        export_here(monkeypatch, item, repository, f"gs://{bucket}/other", dtype="float32")
    assert gcs.get(bucket, "out/precious.bin") == b"1"


def test_the_plan_counts_what_a_stream_takes() -> None:
    assert stream_bytes("gs://bucket/x", PIECE_BYTES) == UPLOAD_BYTES


def test_a_file_of_another_size_than_planned_never_shows(gcs, bucket):
    pytest.importorskip("google.cloud.storage", reason="needs google-cloud-storage")
    stream = streaming.UploadStream(f"gs://{bucket}/out", "model.safetensors", 10)
    stream.append(b"eleven byte")
    with pytest.raises(FerryError, match=r"model\.safetensors: expected 10 bytes as planned; found 11"):
        stream.close()
    assert gcs.names(bucket) == []


def test_dataflow_gets_a_job_of_files(gcs, bucket, item, repository, tmp_path, capsys):
    """Each line of the work is a file; the job is built and not run."""
    pytest.importorskip("google.cloud.dataflow_v1beta3", reason="needs apache-beam[gcp]")
    files = {path.relative_to(item).as_posix(): path.read_bytes() for path in item.rglob("*") if path.is_file()}
    gcs.put_all(bucket, "run/5/items", files)
    from apache_beam.internal.gcp import auth

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auth._Credentials, "_credentials_init", True)
        arguments = ["export", "--source", f"gs://{bucket}/run/5", "--config", str(repository), "--shard-bytes", "2500",
                     "--output", f"gs://{bucket}/out", *dataflow_args(bucket), "--dry_run=True"]  # fmt: skip
        assert main(arguments) == 0
        assert "The job was built and not run" in capsys.readouterr().err
        assert main([*arguments, "--staging", str(tmp_path / "staging")]) == 1
        assert "Dataflow's workers cannot write here" in capsys.readouterr().err
    lines = gcs.get(bucket, "out/.tensorferry-export/queue/items.jsonl").decode().splitlines()
    assert [json.loads(line)["id"][:10] for line in lines[:2]] == ["model-0000", "model-0000"]
    # Nothing was run; a real run of the same plan takes the same place.
    assert main(arguments[:9]) == 0
    assert tensors(gcs, bucket) == WANTED


def test_fp8_needs_staging(gcs, bucket, output, item, repository, monkeypatch):
    """Codes and scales lie apart in a file."""
    monkeypatch.setattr(streamed_run, "not_streamable", lambda plan: streamed_problem())
    with pytest.raises(PlanError, match=r"Give --staging DIR"):
        export_here(monkeypatch, item, repository, output)


def streamed_problem():
    from types import SimpleNamespace

    from tensorferry.mappings.export.streamed import not_streamable

    return not_streamable(SimpleNamespace(low_bit={"a": 1}, copied=(), finishes={}))  # pyright: ignore[reportArgumentType]


_KILL = """
import os, signal, sys
from tensorferry.pipelines.cli import main as cli
from tensorferry.pipelines.export import shard_stream as streaming
done, act = [], streaming.export_item
def call(*args):
    if len(done) == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(args)
    return act(*args)
streaming.export_item = call
sys.exit(cli.main(sys.argv[1:]))
"""


def test_killed_for_real_and_resumed_by_the_same_command(gcs, bucket, item, repository):
    words = ["export", "--source", str(item), "--config", str(repository), "--output", f"gs://{bucket}/out",
             "--shard-bytes", "2500", "--direct_num_workers", "1"]  # fmt: skip
    program = [sys.executable, "-c", _KILL, *words]
    done = subprocess.run(program, capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert f"out/{INDEX}" not in gcs.names(bucket)
    # The lock of a process of this machine that is gone does not hold.
    assert main(words) == 0
    assert tensors(gcs, bucket) == WANTED


@pytest.mark.slow
def test_two_pools_write_what_one_process_writes(gcs, bucket, item, repository, tmp_path):
    from test_worker_pools import pool

    files = {path.relative_to(item).as_posix(): path.read_bytes() for path in item.rglob("*") if path.is_file()}
    gcs.put_all(bucket, "run/5/items", files)
    words = ["export", "--source", f"gs://{bucket}/run/5", "--config", str(repository), "--shard-bytes", "1000"]
    logs = [tmp_path / "pool-1.log", tmp_path / "pool-2.log"]
    with pool(logs[0]) as one, pool(logs[1]) as other:
        args = ["--environment_type=EXTERNAL", f"--environment_config={one},{other}", "--direct_num_workers=3"]
        assert main([*words, "--output", f"gs://{bucket}/out", *args]) == 0
    assert all("Starting worker with command" in log.read_text() for log in logs)
    assert main([*words, "--output", f"gs://{bucket}/alone"]) == 0
    there, alone = gcs.tree(bucket, "out/"), gcs.tree(bucket, "alone/")
    shards = [name for name in there if name.endswith(".safetensors")]
    assert len(shards) > 8
    assert {name: there[name] for name in shards} == {name: alone[name] for name in shards}
    assert tensors(gcs, bucket) == WANTED


_LIMITED = """
import resource, sys
limit, *words = sys.argv[1:]
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.engine import beam_job
from tensorferry.pipelines.engine import local_engine
import apache_beam, obstore, tensorstore, tensorferry.pipelines.export.streamed_run
assert main([*words, "--plan-only"]) == 0
size = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (size + int(limit), size + int(limit)))
sys.exit(main([*words, "--direct_num_workers", "2"]))
"""


@pytest.mark.slow
def test_a_file_bigger_than_the_memory_that_is_left(gcs, bucket, tmp_path, monkeypatch):
    """One tensor, one file of it, both larger than what the process may have."""
    from test_export_memory import write_big

    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    sizes = Sizes(layers=2, vocab=150_000, embed=1024, heads=2, kv_heads=2, head_dim=8, mlp=14)
    write_big(tmp_path / "orbax")
    repository = write_repository(tmp_path / "hf", llama_config(sizes, tie_word_embeddings=True))
    bound, beside = 64 << 20, 112 << 20
    assert sizes.vocab * sizes.embed * 2 > bound + beside + (100 << 20)
    words = ["export", "--source", tmp_path / "orbax", "--config", repository, "--output", f"gs://{bucket}/out",
             "--worker-memory-bytes", str(bound)]  # fmt: skip
    program = ["sh", "-c", 'ulimit -s 512; exec "$@"', "sh", sys.executable, "-c", _LIMITED, str(bound + beside)]
    done = subprocess.run([*program, *map(str, words)], capture_output=True, text=True, env=environment(), cwd=ROOT,
                          timeout=200)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = read_safetensors(gcs.get(bucket, "out/model.safetensors"))["model.embed_tokens.weight"]
    assert found.dtype == ml_dtypes.bfloat16
    assert (found.view(np.uint16) == np.arange(sizes.vocab, dtype=np.uint32).astype(np.uint16)[:, None]).all()
