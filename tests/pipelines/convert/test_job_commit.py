"""Jobs that commit by themselves: the launcher has ended, or keeps its hands off."""

import json
import os
import threading
from dataclasses import fields, replace

import pytest
import tiny_llama
from commands import python
from staged_jobs import SERVICE, dataflow_args
from tensorferry.mappings.plan import work_items as items
from tensorferry.mappings.plan.conversion_plan import PlanOptions
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.convert import conversion as converting
from tensorferry.pipelines.convert.conversion import OutputOptions, convert, run_digest
from tensorferry.pipelines.convert.conversion_commit import JobCommit, commit
from tensorferry.pipelines.convert.conversion_planning import ConversionOptions, plan_conversion
from tensorferry.pipelines.output.bucket_lock import LOCK_NAME, BucketLock
from tensorferry.pipelines.output.bucket_run import BucketRun

_VARY = ("commit_success.txt", "tensorferry.manifest.json", "_CHECKPOINT_METADATA")


@pytest.fixture
def small_items(monkeypatch, tmp_path):
    """Arrays this small would all go into one work item; here and in the processes that commit."""
    monkeypatch.setattr(items, "MAX_GROUPED_PARTS", 4)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "from tensorferry.mappings.plan import work_items\nwork_items.MAX_GROUPED_PARTS = 4\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")


@pytest.fixture
def options(gcs, bucket) -> ConversionOptions:
    gcs.put_all(bucket, "m", tiny_llama.files())
    return ConversionOptions(f"gs://{bucket}/m", target=PlanOptions(chunk_bytes=1500))


def fixed(tree: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in tree.items() if not name.endswith(_VARY)}


def never(*_):
    raise AssertionError("the launcher committed")


@pytest.mark.usefixtures("small_items")
@pytest.mark.parametrize("store_format", ["zarr3", pytest.param("ocdbt", marks=pytest.mark.slow)])
def test_the_last_step_of_the_job_commits(gcs, bucket, options, monkeypatch, store_format):
    convert(options, OutputOptions(f"gs://{bucket}/a", store_format), print)
    wanted = gcs.tree(bucket, "a/")
    monkeypatch.setattr(converting._Conversion, "_write_metadata", never)
    gcs.writes.clear()
    outcome = convert(options, OutputOptions(f"gs://{bucket}/b", store_format, commit_in_job=True), print)
    assert (outcome.step, outcome.settings) == (f"gs://{bucket}/b/0", f"gs://{bucket}/b/maxtext.yml")
    assert outcome.redone_items > 3
    there = gcs.tree(bucket, "b/")
    if store_format == "zarr3":
        assert there.keys() == wanted.keys()
        assert fixed(there) == fixed(wanted)
        often = {name for name, count in gcs.writes.items() if count > 1}
        assert often == {f"{bucket}/b/.tensorferry-0/{LOCK_NAME}"}  # taken, left, taken
    assert json.loads(there["0/items/tensorferry.manifest.json"])["options"]["commit_in_job"] is True
    assert not [name for name in there if name.startswith(".tensorferry")]
    assert main(["inspect", f"gs://{bucket}/b"]) == 0


def test_a_template_alone_yields_a_committed_checkpoint(gcs, bucket, options, tmp_path, monkeypatch, capsys):
    """The staged graph of a flex template's launcher, run without it; workers import neither JAX nor Orbax."""
    pytest.importorskip("google.cloud.dataflow_v1beta3", reason="needs apache-beam[gcp]")
    from apache_beam.internal.gcp import auth

    monkeypatch.setattr(auth._Credentials, "_credentials_init", True)
    places = ["--source", options.source, "--output", f"gs://{bucket}/out"]
    template = [*dataflow_args(bucket), f"--template_location={tmp_path / 'job.json'}"]
    assert main(["convert", *places, *template]) == 0
    assert (
        "built and not run, as --dry_run or --template_location ask. Its last step commits." in capsys.readouterr().err
    )
    (graph,) = (gcs.get(bucket, name) for name in gcs.names(bucket, "tmp/") if name.endswith("pipeline.pb"))
    assert main(["convert", *places, *template]) == 1
    assert "found a job at work on it, started from" in capsys.readouterr().err
    (tmp_path / "graph.pb").write_bytes(graph)
    assert python(SERVICE, tmp_path / "graph.pb").split() == ["DONE", "tensorstore"]
    assert "out/0/commit_success.txt" in gcs.names(bucket)
    assert "out/maxtext.yml" in gcs.names(bucket)
    assert not gcs.names(bucket, "out/.tensorferry-0/")
    assert main(["convert", *places]) == 1
    assert "expected no checkpoint yet; found a complete checkpoint" in capsys.readouterr().err


def test_a_dry_run_leaves_no_lock(gcs, bucket, options):
    pytest.importorskip("google.cloud.dataflow_v1beta3", reason="needs apache-beam[gcp]")
    beam_args = [*dataflow_args(bucket), "--dry_run=True"]
    places = ["--source", options.source, "--output", f"gs://{bucket}/out"]
    assert main(["convert", *places, *beam_args, "--commit-in-job"]) == 0
    assert f"out/.tensorferry-0/{LOCK_NAME}" not in gcs.names(bucket)


class Lost(Exception):
    pass


@pytest.fixture(scope="module")
def job_and_objects(gcs_server, tmp_path_factory) -> tuple[JobCommit, dict[str, bytes]]:
    """A job whose every item is done, and which is left before its commit."""
    gcs_server.make_bucket("jobs")
    gcs_server.put_all("jobs", "m", tiny_llama.files())
    options = ConversionOptions("gs://jobs/m", target=PlanOptions(chunk_bytes=1500))
    found = []

    def lose(self):
        found.append(self)
        raise Lost

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items, "MAX_GROUPED_PARTS", 4)
        patch.setattr(JobCommit, "__call__", lose)
        patch.setattr(BucketRun, "close", lambda self: None)
        with pytest.raises(FerryError):
            convert(options, OutputOptions("gs://jobs/out", commit_in_job=True), print)
    return found[0], gcs_server.tree("jobs", "")


@pytest.fixture
def finished(gcs, job_and_objects, small_items) -> JobCommit:
    """The job, with all its objects as they were left."""
    job, objects = job_and_objects
    for name in gcs.names("jobs"):
        gcs.delete("jobs", name)
    for name, data in objects.items():
        gcs.put("jobs", name, data)
    gcs.writes.clear()
    return job


def test_its_options_survive_the_way(finished):
    assert JobCommit.parsed(finished.encoded()) == finished
    texts = {field.name: f"a {field.name}" for field in fields(ConversionOptions) if field.type in (str, "str")}
    other = replace(finished, options=ConversionOptions(**texts, target=PlanOptions(False, "source", 7, 9)))
    assert JobCommit.parsed(other.encoded()) == other
    assert finished.run_digest == run_digest(plan_conversion(finished.options), finished.output)


def test_twice_and_at_once_it_commits_once(gcs, finished, monkeypatch):
    monkeypatch.setattr("tensorferry.pipelines.output.bucket_lock._WAIT_SECONDS", 0.1)
    gcs.writes.clear()
    errors = []

    def run() -> None:
        try:
            commit(finished)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    settings, lock = "jobs/out/maxtext.yml", f"jobs/out/.tensorferry-0/{LOCK_NAME}"
    assert {name for name, count in gcs.writes.items() if count > 1} <= {settings, lock}
    before = gcs.tree("jobs", "out/")
    gcs.writes.clear()
    gcs.put("jobs", "out/.tensorferry-0/queue/items.jsonl.tally", b"of a second attempt")
    commit(finished)
    assert gcs.tree("jobs", "out/") == before
    assert gcs.writes.keys() == {settings, lock}


def test_one_that_died_is_followed_by_the_next(gcs, finished, monkeypatch):
    """A worker dies in the middle of its commit; the engine gives the element to another one."""
    with monkeypatch.context() as patch:
        patch.setattr(BucketRun, "write_metadata", lambda *_: (_ for _ in ()).throw(Lost()))
        with pytest.raises(Lost):
            commit(finished)
    assert "out/0/commit_success.txt" not in gcs.names("jobs")
    finished()
    assert "out/0/commit_success.txt" in gcs.names("jobs")
    assert not gcs.names("jobs", "out/.tensorferry-0/")


def test_what_is_missing_is_a_sentence(gcs, finished):
    receipts = BucketRun(finished.output.output, "").receipts
    receipts.discard(sorted(receipts.ids())[0])
    with pytest.raises(FerryError, match=r"^The work items are done, and the commit failed: 1 work items left no rec"):
        finished()
    assert "out/0/commit_success.txt" not in gcs.names("jobs")


def test_a_source_that_changed_is_not_committed(gcs, finished):
    gcs.put_all("jobs", "m", tiny_llama.files(seed=7))
    with pytest.raises(FerryError, match=r"expected the source as planned \(.*\); found .*Start again from a source"):
        commit(finished)


def test_an_output_that_was_taken_over_is_left_alone(finished):
    somebody = BucketLock(BucketRun(finished.output.output, "").state_dir, finished.output.output)
    somebody.acquire(take_over=True)
    with pytest.raises(FerryError, match=f"found process {os.getpid()} of"):
        commit(finished)
    somebody.release()


def test_failed_items_fail_a_job_that_nobody_watches(tmp_path):
    """Nobody reads the tally of a job whose launcher has ended."""
    from tensorferry.pipelines.engine import beam_job
    from tensorferry.pipelines.engine.tally import Failure, Tally

    committed = tmp_path / "committed"
    bad = Tally(done=3, failed=1, failures=(Failure("7", "FerryError", "the disk is gone"),))
    for is_watched in (True, False):
        do_fn = beam_job.Commit(committed.touch, is_watched)
        if is_watched:
            assert list(do_fn.process(bad)) == [3]
        else:
            with pytest.raises(FerryError, match=r"7: the disk is gone\n1 of 4 work items failed"):
                list(do_fn.process(bad))
    assert not committed.exists()
    assert list(beam_job.Commit(committed.touch, is_watched=False).process(Tally(done=4))) == [4]
    assert committed.exists()


def test_a_job_commits_into_buckets_only(tmp_path, capsys):
    source = str(tiny_llama.write(tmp_path / "m"))
    assert main(["convert", "--source", source, "--output", str(tmp_path / "o"), "--commit-in-job"]) == 1
    assert "expected gs://bucket/path, since the job's last step commits" in capsys.readouterr().err
