"""Export and its verification with buckets at both ends: a real fake-gcs-server process, behind a proxy that serves
the XML API's uploads, which the emulator lacks."""

from pathlib import Path

import pytest
from checkpoints import llama_config, llama_expected, llama_tensors
from exports import stock, write_repository
from oracle_data import read_safetensors
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.output import upload
from tensorferry.pipelines.storage import retries

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def item(tmp_path_factory) -> dict[str, bytes]:
    """Files of an item that stock Orbax saved."""
    folder = stock(tmp_path_factory.mktemp("orbax") / "5" / "items", llama_expected(llama_tensors()))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def places(gcs, bucket, item, tmp_path, monkeypatch) -> list[str]:
    """Source, config and output of an export, the first two filled; uploads in parts, waits without waiting."""
    monkeypatch.setattr(upload, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(retries, "sleep", lambda seconds: None)
    gcs.put_all(bucket, "run/5/items", item)
    folder = write_repository(tmp_path / "hf", llama_config(), llama_tensors())
    gcs.put_all(bucket, "hf", {path.name: path.read_bytes() for path in folder.iterdir()})
    gcs.reset()
    return ["--source", f"gs://{bucket}/run/5", "--config", f"gs://{bucket}/hf", "--output", f"gs://{bucket}/out"]


def export(places: list[str], staging: Path) -> int:
    return main(["export", *places, "--staging", str(staging), "--shard-bytes", "2500"])


def verify(places: list[str]) -> int:
    return main(["verify", *places[:2], *places[4:]])


def tensors(gcs, bucket: str) -> dict[str, bytes]:
    found = {}
    for name, data in gcs.tree(bucket, "out/").items():
        if name.endswith(".safetensors"):
            found |= {key: array.tobytes() for key, array in read_safetensors(data).items() if "q_proj" not in key}
    return found


WANTED = {name: array.tobytes() for name, array in llama_tensors().items() if "q_proj" not in name}


def test_whole_objects_the_index_last_and_nothing_left(gcs, bucket, places, tmp_path, capsys):
    assert export(places, tmp_path / "staging") == 0
    assert tensors(gcs, bucket) == WANTED
    assert gcs.seen(r"^POST .*00001-of-.*safetensors\?uploads"), "no shard went up in parts"
    assert INDEX in gcs.seen(r"^(PUT|POST) /[^/]+/out/")[-1]
    assert list((tmp_path / "staging").iterdir()) == []
    before = gcs.names(bucket)
    assert verify(places) == 0
    assert "no difference" in capsys.readouterr().out
    assert gcs.names(bucket) == before


def test_verify_finds_a_changed_byte(gcs, bucket, places, tmp_path, capsys):
    assert export(places, tmp_path / "staging") == 0
    name = next(one for one in gcs.names(bucket, "out/") if one.endswith(".safetensors"))
    damaged = bytearray(gcs.get(bucket, name))
    damaged[-1] ^= 1
    gcs.put(bucket, name, bytes(damaged))
    capsys.readouterr()
    assert verify(places) == 3
    assert "1 difference;" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pattern", "status"),
    [("^PUT .*partNumber=2", 429), ("^POST .*uploads", 503), ("^POST .*uploadId", -1), (r"^PUT .*config\.json", 503)],
)
def test_uploads_that_fail_for_a_while(gcs, bucket, places, tmp_path, pattern, status):
    gcs.fail(pattern, status, times=2)
    assert export(places, tmp_path / "staging") == 0
    assert [fault.times for fault in gcs.faults] == [0]
    assert tensors(gcs, bucket) == WANTED


def test_a_refused_upload_is_one_sentence_and_the_same_command_goes_on(gcs, bucket, places, tmp_path, capsys):
    gcs.fail("^(POST|PUT) .*00002-of", 403, times=99)
    assert export(places, tmp_path / "staging") == 1
    error = capsys.readouterr().err
    assert "expected a bucket that can be listed and written" in error
    assert "Traceback" not in error
    assert f"out/{INDEX}" not in gcs.names(bucket)
    gcs.reset()
    assert export(places, tmp_path / "staging") == 0
    assert not gcs.seen("^(POST|PUT) .*00001-of")
    assert tensors(gcs, bucket) == WANTED
