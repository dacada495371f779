"""An object streamed into a bucket: google-cloud-storage, a real emulator, and a proxy that adds trouble."""

import gc
import os
import threading

import numpy as np
import pytest
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.storage import bucket_stream, retries
from tensorferry.pipelines.storage.bucket_stream import BucketStream, require_client, whole_again
from tensorferry.pipelines.storage.retries import PassingFault
from tensorferry.pipelines.storage.streams import open_stream

pytest.importorskip("google.cloud.storage", reason="needs google-cloud-storage")
PIECE = 256 << 10
DATA = np.random.default_rng(1).bytes(3 * PIECE + 77)
STARTS, GOES_ON = "^POST /upload.*resumable", "^PUT /upload"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(retries, "sleep", lambda seconds: None)
    monkeypatch.setattr(bucket_stream, "_FIRST_WAIT_SECONDS", 0.02)


def write(bucket: str, data: bytes = DATA, name: str = "a/b c.bin") -> None:
    """Half of it by appending, half by filling places."""
    stream = open_stream(f"gs://{bucket}/{name}", PIECE)
    half = len(data) // 2
    stream.append(data[:half])
    for start in range(half, len(data), 100_000):
        run = data[start : start + 100_000]
        stream.take(len(run))[...] = np.frombuffer(run, np.uint8)
    assert stream.nbytes == len(data)
    stream.close()


@pytest.mark.parametrize("nbytes", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, len(DATA)])
def test_whole_and_once(gcs, bucket, nbytes):
    write(bucket, DATA[:nbytes])
    assert gcs.get(bucket, "a/b c.bin") == DATA[:nbytes]
    assert gcs.writes == {f"{bucket}/a/b c.bin": 1}


def test_nothing_shows_before_the_end_or_after_an_abort(gcs, bucket):
    """Nor when Python lets go of it: closing a file is what ends an upload."""
    for end in ("abort", "forget"):
        stream = BucketStream(f"gs://{bucket}/x", PIECE)
        stream.append(DATA)
        assert gcs.names(bucket) == []
        if end == "abort":
            stream.abort()
        del stream
        gc.collect()
        assert gcs.names(bucket) == []
    assert len(gcs.seen("^DELETE /upload")) == 1


@pytest.mark.parametrize("status", [429, 500, 503, -1])
@pytest.mark.parametrize(("pattern", "after"), [(STARTS, 0), (GOES_ON, 1), (GOES_ON, 3)], ids=["start", "piece", "end"])
def test_passing_trouble_costs_only_the_piece(gcs, bucket, pattern, status, after):
    gcs.fail(pattern, status, times=2, after=after)
    write(bucket)
    assert gcs.get(bucket, "a/b c.bin") == DATA
    assert [fault.times for fault in gcs.faults] == [0]
    assert len(gcs.seen(GOES_ON)) == 4 + (2 if pattern == GOES_ON else 0)


@pytest.mark.parametrize("status", [404, 410, -2], ids=["unknown", "gone", "a flipped bit"])
def test_a_lost_upload_is_done_again_from_its_start(gcs, bucket, status):
    gcs.fail(GOES_ON, status, times=1, after=2)
    with pytest.raises(PassingFault):
        write(bucket)
    gcs.fail(GOES_ON, status, times=1, after=2)
    whole_again("group 1", lambda: write(bucket))
    assert gcs.get(bucket, "a/b c.bin") == DATA


def test_an_upload_that_is_lost_each_time_is_a_sentence(gcs, bucket):
    gcs.fail(GOES_ON, 410, times=99, after=1)
    sentence = r"group 1: expected an upload that comes to its end; found status 410, again and again\. .*same command"
    with pytest.raises(FerryError, match=sentence):
        whole_again("group 1", lambda: write(bucket))
    assert len(gcs.seen(STARTS)) == 4


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (403, r"found permission denied \(403\)\. Give the account .* Storage Object User"),
        (401, r"found no valid credentials \(401\)\. Log in"),
        (404, r"found no such bucket or object \(404\)\. Make the bucket"),
        (400, r"found status 400\."),
    ],
)
def test_what_is_refused_for_good_is_a_sentence(gcs, bucket, status, sentence):
    gcs.fail(STARTS, status, times=99)
    with pytest.raises(
        FerryError, match=rf"gs://{bucket}/a/b c.bin: expected an object that can be written; {sentence}"
    ):
        whole_again("group 1", lambda: write(bucket))
    assert len(gcs.seen(STARTS)) == 1


def test_threads_share_a_client(gcs, bucket):
    threads = [threading.Thread(target=write, args=(bucket, DATA[n:], f"o{n}")) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gcs.tree(bucket, "") == {f"o{n}": DATA[n:] for n in range(12)}


def test_without_credentials(monkeypatch):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/no/such/file.json")
    with pytest.raises(FerryError, match=r"found no valid credentials \(401\)\. Log in: gcloud auth"):
        BucketStream("gs://bucket/x", PIECE)
    assert os.environ["GOOGLE_APPLICATION_CREDENTIALS"]


def test_without_the_library(monkeypatch):
    monkeypatch.setattr(bucket_stream, "find_spec", lambda name: None)
    with pytest.raises(FerryError, match=r"gs://b/out: .*needs google-cloud-storage.*pip install 'tensorferry\[gcp\]'"):
        require_client("gs://b/out")
