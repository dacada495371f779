"""Jobs of exports that commit by themselves: the launcher has ended, or keeps its hands off."""

import json
from dataclasses import replace

import pytest
from checkpoints import llama_config, llama_expected, llama_tensors
from commands import python
from exports import stock, write_repository
from staged_jobs import SERVICE, dataflow_args
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.export import streamed_run
from tensorferry.pipelines.export.export_commit import ExportCommit, commit
from tensorferry.pipelines.export.export_output import ExportOutput
from tensorferry.pipelines.export.export_planning import ExportOptions
from tensorferry.pipelines.export.export_run import run_export
from tensorferry.pipelines.output.bucket_lock import LOCK_NAME
from tensorferry.pipelines.output.output_bucket import STATE, OutputBucket

INDEX = "model.safetensors.index.json"
_VARY = ("tensorferry.manifest.json",)
BUCKET = "exports"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    """A step and a repository, as they lie in a bucket."""
    where = tmp_path_factory.mktemp("made")
    stock(where / "run" / "5" / "items", llama_expected(llama_tensors()))
    write_repository(where / "hf", llama_config(), llama_tensors())
    return {path.relative_to(where).as_posix(): path.read_bytes() for path in where.rglob("*") if path.is_file()}


@pytest.fixture
def options(gcs, bucket, files) -> ExportOptions:
    return options_in(gcs, bucket, files)


def options_in(gcs, bucket: str, files: dict[str, bytes]) -> ExportOptions:
    for name, data in {**files, "run/5/commit_success.txt": b"done"}.items():
        gcs.put(bucket, name, data)
    return ExportOptions(f"gs://{bucket}/run", f"gs://{bucket}/hf", shard_bytes=2500)


def export(options: ExportOptions, output: str, **more):
    return run_export(options, ExportOutput(output, commit_in_job=True, **more), lambda line: None)


def assert_published(gcs, bucket: str, name: str) -> None:
    names = gcs.names(bucket, f"{name}/")
    assert f"{name}/{INDEX}" in names
    assert not [one for one in names if STATE in one]


def never(*_):
    raise AssertionError("the launcher committed")


@pytest.mark.slow  # the same of a conversion is in every run: test_job_commit.py
def test_the_last_step_of_the_job_commits(gcs, bucket, options, monkeypatch):
    run_export(options, ExportOutput(f"gs://{bucket}/a"), lambda line: None)
    monkeypatch.setattr(OutputBucket, "commit", never)
    outcome = export(options, f"gs://{bucket}/b")
    assert outcome.done_items == len(outcome.export.plan.shards) > 3
    assert_published(gcs, bucket, "b")
    there, wanted = gcs.tree(bucket, "b/"), gcs.tree(bucket, "a/")
    assert there.keys() == wanted.keys()
    assert all(there[name] == wanted[name] for name in wanted if name not in _VARY)
    assert json.loads(there["tensorferry.manifest.json"])["options"]["step"] == 5


def test_a_template_alone_yields_an_export(gcs, bucket, options, tmp_path, monkeypatch, capsys):
    """The staged graph of a launcher that is gone, run without it; it replaces an earlier export."""
    pytest.importorskip("google.cloud.dataflow_v1beta3", reason="needs apache-beam[gcp]")
    from apache_beam.internal.gcp import auth

    monkeypatch.setattr(auth._Credentials, "_credentials_init", True)
    places = ["--source", options.source, "--config", options.config, "--output", f"gs://{bucket}/out"]
    earlier = {"kind": "export", "files": {"model.safetensors": 5}, "copied": []}
    gcs.put_all(
        bucket, "out", {"model.safetensors": b"older", "tensorferry.manifest.json": json.dumps(earlier).encode()}
    )
    template = [*dataflow_args(bucket), f"--template_location={tmp_path / 'job.json'}", "--shard-bytes=2500"]
    assert main(["export", *places, *template, "--overwrite"]) == 0
    assert "Its last step commits." in capsys.readouterr().err
    assert main(["export", *places, *template]) == 1
    assert "found a job at work on it, started from" in capsys.readouterr().err
    (graph,) = (gcs.get(bucket, name) for name in gcs.names(bucket, "tmp/") if name.endswith("pipeline.pb"))
    (tmp_path / "graph.pb").write_bytes(graph)
    assert python(SERVICE, tmp_path / "graph.pb").split() == ["DONE", "tensorstore"]
    assert_published(gcs, bucket, "out")
    assert "out/model.safetensors" not in gcs.names(bucket)
    assert main(["verify", "--source", options.source, "--output", f"gs://{bucket}/out"]) == 0


class Lost(Exception):
    pass


@pytest.fixture(scope="module")
def job_and_objects(gcs_server, files) -> tuple[ExportCommit, dict[str, bytes]]:
    """A job whose every file is written, and which is left before its commit."""
    gcs_server.make_bucket(BUCKET)
    options, found = options_in(gcs_server, BUCKET, files), []

    def lose(self):
        found.append(self)
        raise Lost

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExportCommit, "__call__", lose)
        patch.setattr(OutputBucket, "close", lambda self: None)
        with pytest.raises(FerryError):
            export(options, f"gs://{BUCKET}/out")
    return found[0], gcs_server.tree(BUCKET, "")


@pytest.fixture
def left(gcs, job_and_objects) -> ExportCommit:
    """The job, with all its objects as they were left."""
    job, objects = job_and_objects
    for name in gcs.names(BUCKET):
        gcs.delete(BUCKET, name)
    for name, data in objects.items():
        gcs.put(BUCKET, name, data)
    return job


def test_what_the_job_carries(left):
    assert ExportCommit.parsed(left.encoded()) == left


def test_committed_twice(gcs, left):
    """The second time finds it done, and removes what a second attempt at the work has written."""
    commit(left)
    assert_published(gcs, BUCKET, "out")
    before = gcs.tree(BUCKET, "out/")
    gcs.put(BUCKET, f"out/{STATE}/receipts/model-00001.json", b"{}")
    commit(left)
    assert gcs.tree(BUCKET, "out/") == before


def test_a_file_that_is_missing(gcs, left):
    (name, *_) = (name for name in gcs.names(BUCKET, "out/") if "00002-of" in name and name.endswith(".safetensors"))
    gcs.delete(BUCKET, name)
    with pytest.raises(FerryError, match="1 files left no receipt"):
        commit(left)
    assert f"out/{INDEX}" not in gcs.names(BUCKET)
    assert f"out/{STATE}/{LOCK_NAME}" not in gcs.names(BUCKET)


def test_a_source_that_changed(gcs, left):
    gcs.put(BUCKET, "hf/config.json", gcs.get(BUCKET, "hf/config.json") + b" ")
    with pytest.raises(FerryError, match=r"expected the source as planned \(.*Start again from a source at rest"):
        commit(left)
    assert f"out/{INDEX}" not in gcs.names(BUCKET)


def test_the_sentence_of_the_process(gcs, left):
    gcs.delete(BUCKET, "hf/config.json")
    with pytest.raises(FerryError, match=r"The work items are done, and the commit failed: .*config\.json"):
        left()


def test_words(gcs, bucket, options, tmp_path, monkeypatch):
    for output in (ExportOutput(str(tmp_path / "o"), commit_in_job=True),
                   ExportOutput(f"gs://{bucket}/o", str(tmp_path / "staging"), commit_in_job=True)):  # fmt: skip
        with pytest.raises(FerryError, match="since the job's last step commits; found a local path"):
            run_export(options, output, print)
    monkeypatch.setattr(streamed_run, "run_items", never)
    local = replace(options, config=str(tmp_path))
    with pytest.raises(FerryError, match=r"\(--config\): the job's last step reads it; found a local path"):
        export(local, f"gs://{bucket}/o", beam_args=tuple(dataflow_args(bucket)))
