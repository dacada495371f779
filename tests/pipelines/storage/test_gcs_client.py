"""Buckets seen by google-cloud-storage, the client of everybody else: what our own readers and writers cannot prove."""

import base64
import json

import google_crc32c
import numpy as np
import pytest
import tiny_llama
from tensorferry.mappings.plan import work_items as items
from tensorferry.pipelines.cli.main import main

storage = pytest.importorskip("google.cloud.storage", reason="needs google-cloud-storage")
# What names the place or the time.
_VARY = ("commit_success.txt", "tensorferry.manifest.json", "_CHECKPOINT_METADATA")


@pytest.fixture(scope="module")
def shared(gcs_server):
    """A bucket with a checkpoint in it."""
    gcs_server.make_bucket("shared")
    bucket = storage.Client(project="my-project").bucket("shared")
    upload(bucket, "m", tiny_llama.files())
    return bucket


@pytest.fixture(scope="module")
def places(shared) -> list[str]:
    """A conversion that several tests look at."""
    places = ["--source", "gs://shared/m", "--output", "gs://shared/whole"]
    assert main(["convert", *places, "--format", "zarr2", "--chunk-bytes", "700"]) == 0
    return places


def upload(bucket, folder: str, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        bucket.blob(f"{folder}/{name}").upload_from_string(data, checksum="crc32c")


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()


def test_every_object_of_a_conversion(gcs, shared, tmp_path, monkeypatch):
    monkeypatch.setattr(items, "MAX_GROUPED_PARTS", 4)
    options = ["convert", "--source", "gs://shared/m", "--chunk-bytes", "1500"]
    assert main([*options, "--output", "gs://shared/out"]) == 0
    assert main([*options, "--output", str(tmp_path)]) == 0
    blobs = {blob.name.removeprefix("out/"): blob for blob in shared.list_blobs(prefix="out/")}
    here = {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert blobs.keys() == here.keys()
    for name in here:
        if not name.endswith(_VARY):
            assert (blobs[name].size, blobs[name].crc32c) == (len(here[name]), crc32c(here[name])), name
            assert blobs[name].download_as_bytes(checksum="crc32c") == here[name]
    # The emulator keeps no earlier generations, so the proxy before it counts what each had.
    mine = {name: count for name, count in gcs.writes.items() if name.startswith("shared/out/")}
    counts = {name.removeprefix("shared/out/"): count for name, count in mine.items()}
    assert {name: counts.pop(name) for name in here} == dict.fromkeys(here, 1)
    assert all(name.startswith(".tensorferry-0/") for name in counts)


def test_an_array_by_its_objects_alone(gcs, shared, places):
    """Chunks and metadata downloaded and put together by hand: no reader of ours, no TensorStore."""
    item = "whole/0/items/params.params.token_embedder.embedding"
    metadata = json.loads(shared.blob(f"{item}/.zarray").download_as_bytes())
    shape, chunk = metadata["shape"], metadata["chunks"]
    assert metadata["compressor"] is None
    found = np.zeros([-(-length // size) * size for length, size in zip(shape, chunk, strict=True)], np.uint16)
    for blob in shared.list_blobs(prefix=f"{item}/"):
        name = blob.name.rsplit("/", 1)[-1]
        if name != ".zarray":
            at = [int(number) * size for number, size in zip(name.split("."), chunk, strict=True)]
            box = tuple(slice(start, start + size) for start, size in zip(at, chunk, strict=True))
            found[box] = np.frombuffer(blob.download_as_bytes(), "<u2").reshape(chunk)
    wanted = tiny_llama.tensors()["model.embed_tokens.weight"]
    assert (found[: shape[0], : shape[1]] == wanted.view(np.uint16)).all()


def test_marks_and_records(gcs, shared, places):
    """The commit protocol: `commit_success.txt` of the step is the newest object of the step."""
    step = list(shared.list_blobs(prefix="whole/0/"))
    last = max(step, key=lambda blob: (blob.time_created, blob.name.count("/") == 2))
    assert last.name == "whole/0/commit_success.txt"
    assert last.download_as_text() == "Checkpoint commit was successful to gs://shared/whole/0"
    manifest = json.loads(shared.blob("whole/0/items/tensorferry.manifest.json").download_as_bytes())
    assert manifest["source"] == "gs://shared/m"
    record = json.loads(shared.blob("whole/0/_CHECKPOINT_METADATA").download_as_bytes())
    assert record["custom_metadata"] == {"scan_layers": True}
    assert not list(shared.list_blobs(prefix="whole/.tensorferry"))


def test_verify_sees_what_the_client_changes(gcs, shared, places, capsys):
    pytest.importorskip("gcsfs", reason="stock Orbax reads buckets with it")
    blob = shared.blob("whole/0/items/params.params.decoder.decoder_norm.scale/0")
    whole = blob.download_as_bytes()
    blob.upload_from_string(bytes([*whole[:5], whole[5] ^ 2, *whole[6:]]))
    assert main(["verify", *places]) == 3
    assert "decoder_norm.scale index [2]" in capsys.readouterr().err
    blob.upload_from_string(whole)
