"""Reading from buckets: a real fake-gcs-server process, and faults by the proxy in front of it."""

import pickle

import pytest
import tiny_llama
from tensorferry.mappings.plan.conversion_plan import PlanOptions
from tensorferry.mappings.words.problems import FerryError, PlanError
from tensorferry.pipelines.convert.conversion import OutputOptions, convert
from tensorferry.pipelines.convert.conversion_planning import ConversionOptions, plan_conversion
from tensorferry.pipelines.storage import remote_source, retries
from tensorferry.pipelines.storage.byte_source import MissingFileError, SourceError, open_source
from tensorferry.pipelines.verify.verify_conversion import verify

DATA = bytes(range(251)) * 9


@pytest.fixture
def waits(monkeypatch):
    """Waits that were asked for, in seconds; nobody waits."""
    asked: list[float] = []
    monkeypatch.setattr(retries, "sleep", asked.append)
    return asked


@pytest.fixture
def source(gcs, bucket):
    gcs.put_all(bucket, "models/m", {"w x.bin": DATA, "config.json": b"{}", "deep/v.bin": b"abc"})
    gcs.requests.clear()
    return open_source(f"gs://{bucket}/models/m/")


def test_list_folders_and_sizes(source):
    assert source.list() == {"w x.bin": len(DATA), "config.json": 2}
    assert source.folders() == ("deep",)
    assert source.size("deep/v.bin") == 3


def test_reads_exactly_the_range(gcs, source, monkeypatch):
    assert source.read("w x.bin", 5, 700) == DATA[5:705]
    assert source.read("w x.bin", 5, 0) == b""
    assert len(gcs.requests) == 1
    monkeypatch.setattr(remote_source, "PIECE_BYTES", 100)
    buffer = bytearray(b"\xff" * 1052)
    source.readinto("w x.bin", 3, memoryview(buffer)[1:-1])
    assert bytes(buffer) == b"\xff" + DATA[3:1053] + b"\xff"
    assert len(gcs.requests) == 1 + 11


def test_a_bucket_is_a_folder_too(gcs, bucket):
    gcs.put(bucket, "w.bin", DATA)
    assert open_source(f"gs://{bucket}").list() == {"w.bin": len(DATA)}
    assert open_source(f"gs://{bucket}/").read("w.bin", 3, 9) == DATA[3:12]


def test_pickles_are_names_only(source):
    source.read("config.json", 0, 2)
    assert len(pickle.dumps(source)) < 200
    assert pickle.loads(pickle.dumps(source)).read("w x.bin", 1, 2) == DATA[1:3]


@pytest.mark.parametrize("status", [429, 503, 500, 0])
def test_faults_that_pass(gcs, source, waits, status):
    gcs.fail("GET", status, times=3)
    assert source.read("w x.bin", 3, 500) == DATA[3:503]
    assert len(waits) == 3


def test_refusals_are_one_sentence(gcs, source, waits):
    gcs.fail("GET", 403)
    with pytest.raises(SourceError, match=r"w x\.bin: expected a readable file in gs://.* permission denied .403."):
        source.read("w x.bin", 3, 500)
    with pytest.raises(MissingFileError, match=r"gone\.bin: expected .* found no such file"):
        source.read("gone.bin", 0, 1)
    with pytest.raises(MissingFileError, match=r"found nothing below that name\. Correct"):
        open_source(f"{source.url}/nowhere").list()
    with pytest.raises(SourceError, match="found only 5 of 9 bytes"):
        source.read("w x.bin", len(DATA) - 5, 9)
    with pytest.raises(FerryError, match="expected gs://bucket/path; found no bucket"):
        open_source("gs:///m")
    assert not waits


def test_the_revision_tells_of_a_new_upload(gcs, bucket, source):
    before = source.revision()
    assert source.revision() == before
    gcs.put(bucket, "models/m/w x.bin", DATA[::-1])
    assert source.revision() != before


def test_plan_reads_each_header_once_and_lists_in_the_beginning_only(gcs, bucket):
    files = tiny_llama.files(shards=5)
    gcs.put_all(bucket, "m", files)
    conversion = plan_conversion(ConversionOptions(f"gs://{bucket}/m"))
    conversion.plan.require()
    # Config, index and five headers; the listing's sizes make every other question unnecessary.
    assert len(gcs.seen("GET .*(safetensors|json)")) == 7
    assert len(gcs.seen("list|prefix=")) <= 3


def test_convert_from_a_bucket(gcs, bucket, tmp_path):
    gcs.put_all(bucket, "m", tiny_llama.files())
    folder = tiny_llama.write(tmp_path / "source")
    target = PlanOptions(chunk_bytes=1500)
    for source, output in ((f"gs://{bucket}/m", "remote"), (str(folder), "local")):
        convert(ConversionOptions(source, target=target), OutputOptions(str(tmp_path / output)), print)
    remote, local = (tmp_path / name / "0" / "items" for name in ("remote", "local"))
    chunks = [path.relative_to(local) for path in local.rglob("c/*") if path.is_file()]
    assert chunks
    assert all((remote / chunk).read_bytes() == (local / chunk).read_bytes() for chunk in chunks)
    assert not verify(f"gs://{bucket}/m", str(tmp_path / "remote")).differences


def test_a_source_that_changes_during_the_run_is_refused(gcs, bucket, tmp_path, monkeypatch):
    gcs.put_all(bucket, "m", tiny_llama.files())
    real, shard = remote_source.BucketSource.place, "model-00002-of-00003.safetensors"

    def changing(self, path):
        if path == shard:
            gcs.put(bucket, f"m/{shard}", tiny_llama.files(seed=1)[shard])
        return real(self, path)

    options = ConversionOptions(f"gs://{bucket}/m")
    plan_conversion(options).plan.require()
    monkeypatch.setattr(remote_source.BucketSource, "place", changing)
    with pytest.raises(FerryError, match=r"expected the source as it was planned .*; found other content"):
        convert(options, OutputOptions(str(tmp_path / "o")), print)
    assert not (tmp_path / "o" / "0").exists()


def test_a_folder_without_a_checkpoint(gcs, bucket):
    gcs.put(bucket, "m/readme.txt", b"")
    with pytest.raises(PlanError, match=r"expected a Hugging Face checkpoint .*; found readme\.txt"):
        plan_conversion(ConversionOptions(f"gs://{bucket}/m"))
