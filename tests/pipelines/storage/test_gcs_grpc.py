"""Buckets by gRPC: a small server of Cloud Storage's own gRPC API, over the objects of the emulator.

Sources are read, and folders listed, by HTTP all the same; the server shows what went which way."""

import json

import pytest
import tiny_llama
from tensorferry.mappings.plan import work_items as items
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.output import bucket_lock
from tensorferry.pipelines.output.bucket_receipts import BucketReceipts
from tensorferry.pipelines.sinks.sink import store_error
from tensorferry.pipelines.storage.kvstores import GCS_DRIVER, GCS_GRPC_ENDPOINT, kvstore
from tensorferry.pipelines.storage.objects import NOTHING, Objects

pytest.importorskip("google.cloud._storage_v2", reason="needs google-cloud-storage")
_VARY = ("commit_success.txt", "tensorferry.manifest.json", "_CHECKPOINT_METADATA")


@pytest.fixture
def grpc_gcs(gcs, monkeypatch):
    from gcs_grpc_server import serve_grpc

    with serve_grpc(gcs) as served:
        monkeypatch.setenv(GCS_GRPC_ENDPOINT, served.endpoint)
        yield served


@pytest.fixture
def by_grpc(grpc_gcs, monkeypatch):
    monkeypatch.setenv(GCS_DRIVER, "gcs_grpc")
    return grpc_gcs


def test_small_objects_and_their_generations(by_grpc, bucket):
    objects = Objects(f"gs://{bucket}/x")
    assert objects.read("a") is None
    objects.write("a", b"one")
    assert objects.read_all(["a", "b"]) == {"a": b"one"}
    assert not objects.create("a", b"two")
    _, first = objects.read_generation("a")
    second = objects.replace("a", b"three", first)
    assert second
    assert objects.replace("a", b"four", first) is None
    assert objects.replace("b", b"five", NOTHING)
    objects.delete_all(["a", "b"])
    assert objects.sizes() == {}
    assert by_grpc.calls["write"] == 5
    assert BucketReceipts(f"gs://{bucket}/r").add("1", {"n": 1}) == {"n": 1}
    assert BucketReceipts(f"gs://{bucket}/r").add("1", {"n": 2}) == {"n": 1}


def test_the_lock_holds(by_grpc, bucket):
    one, other = (bucket_lock.BucketLock(f"gs://{bucket}/out/.tensorferry-0", "out") for _ in range(2))
    one.acquire()
    with pytest.raises(FerryError, match="expected an output that no other process writes"):
        other.acquire()
    one.release()
    other.acquire()
    other.release()


@pytest.mark.parametrize("store_format", ["zarr3", pytest.param("ocdbt", marks=pytest.mark.slow)])
def test_convert_and_verify(gcs, grpc_gcs, bucket, monkeypatch, capsys, store_format):
    """By the option, and the objects are those that HTTP writes."""
    pytest.importorskip("gcsfs", reason="stock Orbax reads buckets with it")
    monkeypatch.setattr(items, "MAX_GROUPED_PARTS", 4)
    gcs.put_all(bucket, "m", tiny_llama.files())
    arguments = ["convert", "--source", f"gs://{bucket}/m", "--chunk-bytes", "1500", "--format", store_format]
    assert main([*arguments, "--output", f"gs://{bucket}/http"]) == 0
    assert not grpc_gcs.calls
    gcs.requests.clear()
    grpc_gcs.busy["write"], grpc_gcs.busy["read"] = 2, 1
    assert main([*arguments, "--output", f"gs://{bucket}/grpc", "--gcs-grpc"]) == 0
    by_http = gcs.seen("^POST /upload")
    # TensorStore cannot stream an object: data files go by google-cloud-storage.
    assert len(by_http) == len(gcs.seen("^POST /upload.*uploadType=resumable")) == (9 if store_format == "ocdbt" else 0)
    assert grpc_gcs.calls["write"] > 20
    chunks = {name: count for name, count in grpc_gcs.written.items() if "/c/" in name or name.endswith("ocdbt")}
    assert len(chunks) > 8
    assert set(chunks.values()) == {1}
    there, here = gcs.tree(bucket, "grpc/"), gcs.tree(bucket, "http/")
    if store_format == "zarr3":
        assert there.keys() == here.keys()
        assert all(there[name] == here[name] for name in here if not name.endswith(_VARY))
    reads = grpc_gcs.calls["read"]
    assert main(["verify", "--source", f"gs://{bucket}/m", "--output", f"gs://{bucket}/grpc", "--gcs-grpc"]) == 0
    assert grpc_gcs.calls["read"] > reads + 5
    assert main(["inspect", f"gs://{bucket}/grpc", "--gcs-grpc"]) == 0
    assert "params.params.decoder.logits_dense.kernel" in capsys.readouterr().out


def test_a_job_takes_it_to_its_workers_and_to_its_commit(gcs, grpc_gcs, bucket):
    """Processes of their own, which know it from the job."""
    gcs.put_all(bucket, "m", tiny_llama.files())
    arguments = ["convert", "--source", f"gs://{bucket}/m", "--output", f"gs://{bucket}/out", "--gcs-grpc"]
    processes = ["--direct_running_mode=multi_processing", "--direct_num_workers=1"]
    gcs.requests.clear()
    assert main([*arguments, *processes, "--commit-in-job"]) == 0
    assert not gcs.seen("^POST /upload")
    assert grpc_gcs.written[f"{bucket}/out/0/commit_success.txt"] == 1
    assert json.loads(gcs.get(bucket, "out/0/items/tensorferry.manifest.json"))["options"]["commit_in_job"]


@pytest.mark.parametrize(
    ("code", "part", "sentence"),
    [
        ("PERMISSION_DENIED", "/c/", "expected the chunk written; found permission denied (403). Give the account"),
        ("UNAUTHENTICATED", "receipts", "an object that can be written; found no valid credentials (401). Log in"),
        ("NOT_FOUND", "lock.json", "can be written; found no such bucket or object (404). Make the bucket"),
    ],
)
def test_what_a_bucket_refuses_is_one_sentence(gcs, grpc_gcs, bucket, capsys, code, part, sentence):
    import grpc

    gcs.put_all(bucket, "m", tiny_llama.files())
    grpc_gcs.refused["write"] = (grpc.StatusCode[code], part)
    words = ["convert", "--source", f"gs://{bucket}/m", "--output", f"gs://{bucket}/out", "--gcs-grpc"]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
    grpc_gcs.refused.clear()
    assert main(words) == 0


def test_local_files_keep_their_words(by_grpc):
    """The code is that of a bucket, and the cause is another one."""
    text = "PERMISSION_DENIED: Failed to open: /x/c/0: Permission denied [os_error_code='13' EACCES]"
    told = str(store_error("/x/c/0", "the chunk written", ValueError(text)))
    assert "found PERMISSION_DENIED: Failed to open: /x/c/0: Permission denied" in told
    assert "Free space or repair access" in told
    assert "Storage Object User" not in str(store_error("/x", "a directory", OSError(13, "Permission denied")))


def test_the_option_ends_with_its_command(gcs, bucket, monkeypatch):
    monkeypatch.delenv(GCS_DRIVER, raising=False)
    assert main(["inspect", f"gs://{bucket}/nothing", "--gcs-grpc"]) == 1
    assert kvstore(f"gs://{bucket}/x")["driver"] == "gcs"
