"""Converting into a bucket: a real fake-gcs-server process, and a proxy that adds preconditions and faults."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import tiny_llama
from tensorferry.mappings.plan import work_items as items
from tensorferry.mappings.plan.conversion_plan import PlanOptions
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.cli.contents import contents_of
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.convert.conversion import OutputOptions, convert
from tensorferry.pipelines.convert.conversion_planning import ConversionOptions
from tensorferry.pipelines.orbax import stored_tree
from tensorferry.pipelines.output.bucket_receipts import BucketReceipts
from tensorferry.pipelines.output.bucket_run import BucketRun
from tensorferry.pipelines.storage.objects import Objects

FORMATS = ("zarr3", "ocdbt", "zarr2")
SLOW_ZARR2 = ("zarr3", "ocdbt", pytest.param("zarr2", marks=pytest.mark.slow))
SLOW_OCDBT = ("zarr3", pytest.param("ocdbt", marks=pytest.mark.slow))
TARGET = PlanOptions(chunk_bytes=1500)
# What names the place or the time.
_VARY = ("commit_success.txt", "tensorferry.manifest.json", "_CHECKPOINT_METADATA")


@pytest.fixture(autouse=True)
def small_items(monkeypatch):
    """Arrays this small would all go into one work item."""
    monkeypatch.setattr(items, "MAX_GROUPED_PARTS", 4)


@pytest.fixture
def source(tmp_path):
    return str(tiny_llama.write(tmp_path / "source"))


def do(source: str, output: str, store_format: str = "zarr3", **how):
    options = ConversionOptions(source, target=TARGET)
    return convert(options, OutputOptions(output, store_format, **how), lambda line: None)


def fixed(names) -> set[str]:
    return {name for name in names if not name.endswith(_VARY)}


def test_the_objects_are_those_of_a_local_run(gcs, bucket, source, tmp_path):
    """For zarr3, see test_gcs_client.py."""
    outcome = do(source, f"gs://{bucket}/runs/a", "zarr2")
    assert outcome.step == f"gs://{bucket}/runs/a/0"
    do(source, str(tmp_path / "local"), "zarr2")
    there = gcs.tree(bucket, "runs/a/")
    local = tmp_path / "local"
    here = {path.relative_to(local).as_posix(): path.read_bytes() for path in local.rglob("*") if path.is_file()}
    assert there.keys() == here.keys()
    assert {name: there[name] for name in fixed(here)} == {name: here[name] for name in fixed(here)}
    assert there["0/commit_success.txt"].decode().endswith(f"gs://{bucket}/runs/a/0")


@pytest.mark.parametrize("store_format", SLOW_ZARR2)
def test_every_command_with_buckets_at_both_ends(gcs, bucket, store_format, capsys):
    pytest.importorskip("gcsfs", reason="stock Orbax reads buckets with it")
    gcs.put_all(bucket, "m", tiny_llama.files())
    source, output = f"gs://{bucket}/m", f"gs://{bucket}/out"
    arguments = ["--source", source, "--chunk-bytes", "1500"]
    assert main(["plan", *arguments]) == 0
    assert main(["convert", *arguments, "--output", output, "--format", store_format]) == 0
    assert main(["verify", "--source", source, "--output", output]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["inspect", output]) == 0
    assert "params.params.decoder.logits_dense.kernel" in capsys.readouterr().out
    assert contents_of(output).facts[1] == f"format {store_format}"


@pytest.mark.parametrize("store_format", SLOW_ZARR2)
def test_stock_orbax_restores_it(gcs, bucket, source, store_format):
    pytest.importorskip("gcsfs")
    import orbax.checkpoint as ocp

    do(source, f"gs://{bucket}/out", store_format)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore(f"gs://{bucket}/out/0/items")
    assert int(tree["step"]) == 0
    assert tree["opt_state"] == {}
    embedding = tree["params"]["params"]["token_embedder"]["embedding"]
    assert (embedding == tiny_llama.tensors()["model.embed_tokens.weight"]).all()


def test_each_chunk_is_written_once_and_the_mark_last(gcs, bucket, source):
    do(source, f"gs://{bucket}/out")
    writes = [one.split("name=")[1].split("&")[0].replace("%2F", "/") for one in gcs.seen("^POST /upload")]
    chunks = [name for name in writes if "/c/" in name]
    assert len(chunks) == len(set(chunks))
    step = [name for name in writes if name.startswith("out/0/")]
    assert step[-2:] == ["out/0/items/commit_success.txt", "out/0/commit_success.txt"]
    assert not gcs.names(bucket, "out/.tensorferry-0/")


@pytest.mark.parametrize("store_format", FORMATS)
def test_no_object_is_written_sooner_than_the_store_takes_it(gcs, bucket, source, store_format):
    """The emulator takes any number of writes; the proxy refuses a second one within a second, as the store does."""
    gcs.write_seconds = 1.0
    do(source, f"gs://{bucket}/out", store_format)
    assert len(gcs.writes) > 20
    assert set(gcs.writes.values()) == {1}
    assert (f"{bucket}/out/0/items/manifest.ocdbt" in gcs.writes) == (store_format == "ocdbt")


def test_the_limit_of_writes_bites(gcs, bucket):
    gcs.write_seconds = 0.4
    started = time.monotonic()
    for data in (b"one", b"two"):
        Objects(f"gs://{bucket}/x").write("y", data)
    assert gcs.refused_writes
    assert set(gcs.refused_writes) == {f"{bucket}/x/y"}
    assert time.monotonic() - started > 0.4
    assert gcs.get(bucket, "x/y") == b"two"


def test_one_work_item_is_one_file_of_its_database(gcs, bucket, source):
    """With work items of several chunks; several work items in a file are in test_ocdbt_files.py."""
    do(source, f"gs://{bucket}/out", "ocdbt")
    parts = [name.split("/parts/")[1].split("/") for name in gcs.names(bucket, "out/0/items/parts/")]
    files = Counter(attempt for attempt, kind, *_ in parts if kind == "d")
    assert len(files) > 3
    assert set(files.values()) == {1}


def test_listings_do_not_grow_with_the_work_items(gcs, bucket, source):
    counts = []
    for number, chunk_bytes in enumerate((700, 10**6)):
        gcs.requests.clear()
        options = ConversionOptions(source, target=PlanOptions(chunk_bytes=chunk_bytes))
        convert(options, OutputOptions(f"gs://{bucket}/out{number}"), lambda line: None)
        counts.append(len(gcs.seen(r"^GET /storage/v1/b/[^/]+/o\?|^GET /[^/]+\?.*list-type")))
    assert counts[0] == counts[1] < 12


@pytest.mark.parametrize("statuses", [(429, 503), (-1, 0)], ids=["busy", "cut"])
def test_uploads_that_fail_for_a_while(gcs, bucket, source, tmp_path, statuses):
    for number, status in enumerate(statuses):
        gcs.fail("^POST /upload.*0%2Fitems.*%2Fc%2F", status, times=2, after=1 + 2 * number)
    do(source, f"gs://{bucket}/out")
    do(source, str(tmp_path / "local"))
    there = gcs.tree(bucket, "out/")
    assert all(there[name] == (tmp_path / "local" / name).read_bytes() for name in fixed(there))
    assert not any(fault.times for fault in gcs.faults)


def test_bursts_that_hit_whatever_comes(gcs, bucket, capsys):
    """Two requests of every seventy, whatever they ask for, from the first listing to the last removal."""
    pytest.importorskip("gcsfs", reason="stock Orbax reads buckets with it")
    gcs.put_all(bucket, "m", tiny_llama.files())
    places = ["--source", f"gs://{bucket}/m", "--output", f"gs://{bucket}/out"]
    for number in range(20):
        gcs.fail("", (429, 503)[number % 2], times=2, after=10 + 70 * number)
    assert main(["convert", *places, "--chunk-bytes", "1500"]) == 0
    assert len([fault for fault in gcs.faults if not fault.times]) > 1
    gcs.faults.clear()
    assert gcs.names(bucket, "out/.tensorferry-0/") == []
    assert main(["verify", *places]) == 0
    assert "no difference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("^POST /upload.*run.json", "run.json: expected an object that can be written; found permission denied (403)"),
        ("^POST /upload.*%2Fc%2F", "expected the chunk written; found permission denied (403). Give the account"),
        ("^POST /upload.*receipts", "expected an object that can be written; found permission denied (403)"),
        ("^GET .*out", "found permission denied (403). Give the account that runs this the role Storage Object"),
    ],
)
def test_a_missing_permission_is_one_sentence(gcs, bucket, source, capsys, pattern, sentence):
    gcs.fail(pattern, 403, times=10**6)
    assert main(["convert", "--source", source, "--output", f"gs://{bucket}/out", "--chunk-bytes", "1500"]) == 1
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
    gcs.faults.clear()
    assert main(["convert", "--source", source, "--output", f"gs://{bucket}/out", "--chunk-bytes", "1500"]) == 0


def test_a_bucket_that_does_not_exist(gcs, source, capsys):
    gcs.fail("^GET /no.*list-type", 404, times=99)  # where the emulator answers 500
    assert main(["convert", "--source", source, "--output", "gs://no-such-bucket/out"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "gs://no-such-bucket/out" in error
    assert "(404)" in error


_IN_SMALL_ITEMS = "import sys; from tensorferry.mappings.plan import work_items; work_items.MAX_GROUPED_PARTS = 4\n"
_KILL_AFTER_THIRD = """
import os, signal
from tensorferry.pipelines.output.bucket_receipts import BucketReceipts
real, seen = BucketReceipts.add, []
def add(self, item, receipt):
    seen.append(real(self, item, receipt))
    if len(seen) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return seen[-1]
BucketReceipts.add = add
"""
_MAIN = "from tensorferry.pipelines.cli.main import main\nsys.exit(main(sys.argv[1:]))"


def run_process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", _IN_SMALL_ITEMS + code + _MAIN, "convert", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


@pytest.mark.parametrize("store_format", SLOW_OCDBT)
def test_killed_and_resumed(gcs, bucket, source, store_format, capsys):
    """The process dies by SIGKILL after its third receipt; the same command does only the rest."""
    pytest.importorskip("gcsfs", reason="stock Orbax reads buckets with it")
    output = f"gs://{bucket}/out"
    arguments = ("--source", source, "--output", output, "--chunk-bytes", "700", "--format", store_format,
                 "--direct_num_workers", "1")  # fmt: skip
    assert run_process(_KILL_AFTER_THIRD, *arguments).returncode == -9
    assert "out/0/commit_success.txt" not in gcs.names(bucket)
    assert len(BucketReceipts(f"{output}/.tensorferry-0/receipts").ids()) == 3
    assert main(["convert", *arguments]) == 0
    assert "resuming: 3 work items" in capsys.readouterr().out
    assert main(["verify", "--source", source, "--output", output]) == 0


def prepared(bucket: str, digest: str = "d1", **how) -> BucketRun:
    """A run with a receipt and everything but its commit."""
    run = BucketRun(f"gs://{bucket}/out", digest, **how)
    run.open()
    run.receipts.add("0", {"item": "0"})
    Objects(run.item_root).write("tensorferry.manifest.json", b"{}")
    Objects(run.item_root).write("a/c/0", b"data of " + digest.encode())
    return run


class Killed(Exception):
    pass


STEPS = ("mark items successful", "mark 0 successful", "remove receipts", "remove run.json")


@pytest.mark.parametrize("step", STEPS)
def test_a_commit_killed_before_any_step_is_finished_by_the_next_run(gcs, bucket, step):
    run = prepared(bucket)

    def kill(name: str) -> None:
        if name == step:
            raise Killed

    run.at_step_of_commit = kill
    with pytest.raises(Killed):
        run.commit()
    again = BucketRun(f"gs://{bucket}/out", "d1")
    state = again.open().value
    assert state == ("published" if step.startswith("remove") else "resumed")
    if state == "resumed":
        assert again.receipts.ids() == {"0"}
        again.commit()
    assert not gcs.names(bucket, "out/.tensorferry-0")
    assert gcs.get(bucket, "out/0/items/a/c/0") == b"data of d1"
    with pytest.raises(FerryError, match=r"expected no checkpoint yet; found a complete checkpoint\. Choose another"):
        BucketRun(f"gs://{bucket}/out", "d1").open()


def test_another_plan_is_refused_with_both_digests(gcs, bucket):
    prepared(bucket)
    with pytest.raises(FerryError, match=r"unfinished run of this plan \(digest d2\); found .* \(digest d1\)"):
        BucketRun(f"gs://{bucket}/out", "d2").open()


def test_what_is_not_ours_is_never_overwritten(gcs, bucket):
    gcs.put(bucket, "out/0/thesis.tex", b"")
    for overwrite in (False, True):
        with pytest.raises(FerryError, match="found something that is not a complete Tensorferry checkpoint"):
            BucketRun(f"gs://{bucket}/out", "d1", overwrite=overwrite).open()
    assert gcs.names(bucket) == ["out/0/thesis.tex"]


def test_overwrite_deletes_the_old_one_first_and_survives_a_kill(gcs, bucket, monkeypatch):
    prepared(bucket).commit()
    gcs.put(bucket, "out/0/items/old/c/0", b"old")
    real = Objects.delete_all

    def killed(self, names):
        real(self, list(names)[:1])
        raise Killed

    monkeypatch.setattr(Objects, "delete_all", killed)
    with pytest.raises(Killed):
        BucketRun(f"gs://{bucket}/out", "d2", overwrite=True).open()
    monkeypatch.undo()
    assert json.loads(gcs.get(bucket, "out/.tensorferry-0/run.json"))["replacing"]
    run = prepared(bucket, "d2", overwrite=True)
    run.commit()
    assert sorted(gcs.names(bucket, "out/")) == [
        "out/0/commit_success.txt", "out/0/items/a/c/0", "out/0/items/commit_success.txt",
        "out/0/items/tensorferry.manifest.json",
    ]  # fmt: skip


def test_the_first_receipt_wins(gcs, bucket):
    """The emulator ignores generation preconditions; the proxy in front of it enforces them, as the real store does."""
    receipts = BucketReceipts(f"gs://{bucket}/r")
    assert receipts.add("a/b.c", {"n": 1}) == {"n": 1}
    assert receipts.add("a/b.c", {"n": 2}) == {"n": 1}
    gcs.put(bucket, "r/torn.json", b"{")
    assert receipts.add("torn", {"n": 3}) == {"n": 3}
    assert receipts.finished() == {"a/b.c": {"n": 1}, "torn": {"n": 3}}
    receipts.discard("torn")
    assert receipts.ids() == {"a/b.c"}
    assert receipts.get("torn") is None


def test_what_verify_needs_for_buckets_is_named(monkeypatch):
    monkeypatch.setattr(stored_tree.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FerryError, match=r"needs gcsfs .*: pip install 'tensorferry\[gcp\]'"):
        stored_tree.stored_tree("gs://bucket/out/0/items")
