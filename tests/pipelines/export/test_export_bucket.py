"""Exports from and to a bucket: whole objects, the index last, interrupted uploads go on."""

from pathlib import Path

import pytest
from checkpoints import llama_config, llama_expected, llama_tensors
from exports import export_here, read_repository, stock, write_repository
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.output import upload as uploading

OUTPUT = "gs://bucket/models/llama"
SHARDS = {"shard_bytes": 2500}


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    return write_repository(tmp_path_factory.mktemp("hf"), llama_config(), llama_tensors())


@pytest.fixture(scope="module")
def item(tmp_path_factory) -> Path:
    return stock(tmp_path_factory.mktemp("orbax") / "5" / "items", llama_expected(llama_tensors()))


@pytest.fixture
def models(tmp_path, monkeypatch) -> Path:
    """What stands for the bucket when something is written: the emulator lacks the protocol of big uploads."""
    from obstore.store import LocalStore

    folder = tmp_path / "bucket"
    store = LocalStore(folder, mkdir=True)
    monkeypatch.setattr(uploading, "bucket_store", lambda bucket: store)
    return folder / "models" / "llama"


def assert_whole(folder: Path) -> None:
    found = read_repository(folder)
    wanted = llama_tensors()
    assert found.keys() == wanted.keys()
    assert [n for n in found if "q_proj" not in n and found[n].tobytes() != wanted[n].tobytes()] == []


def test_from_a_bucket(gcs, bucket, item, repository, tmp_path, monkeypatch):
    files = {str(path.relative_to(item)): path.read_bytes() for path in item.rglob("*") if path.is_file()}
    gcs.put_all(bucket, "run/5/items", files)
    export_here(monkeypatch, f"gs://{bucket}/run/5", repository, tmp_path / "out", **SHARDS)
    assert_whole(tmp_path / "out")


def test_to_a_bucket(models, item, repository, tmp_path, monkeypatch):
    keys, act = [], uploading._put
    monkeypatch.setattr(uploading, "_put", lambda store, key, *more: (keys.append(key), act(store, key, *more)))
    outcome = export_here(monkeypatch, item, repository, OUTPUT, tmp_path / "staging", **SHARDS)
    assert outcome.output == OUTPUT
    assert_whole(models)
    assert (models / "tokenizer.json").read_bytes() == (repository / "tokenizer.json").read_bytes()
    assert keys[0] == "models/llama/tensorferry.manifest.json"
    assert keys[-1] == "models/llama/model.safetensors.index.json"
    assert list((tmp_path / "staging").iterdir()) == []
    with pytest.raises(FerryError, match=r"found a Tensorferry export\. Choose another output, or pass --overwrite"):
        export_here(monkeypatch, item, repository, OUTPUT, tmp_path / "staging", **SHARDS)


def test_an_interrupted_upload_goes_on(models, item, repository, tmp_path, monkeypatch):
    act, done = uploading._put, []

    def put(store, key, file, url):
        if len(done) == 5:
            raise FerryError("the wire broke")
        done.append(key)
        act(store, key, file, url)

    monkeypatch.setattr(uploading, "_put", put)
    with pytest.raises(FerryError, match="the wire broke"):
        export_here(monkeypatch, item, repository, OUTPUT, tmp_path / "staging", **SHARDS)
    assert not (models / "model.safetensors.index.json").exists()
    monkeypatch.setattr(uploading, "_put", act)
    outcome = export_here(monkeypatch, item, repository, OUTPUT, tmp_path / "staging", **SHARDS)
    assert outcome.done_items == 0
    assert_whole(models)


def test_names_like_ours_do_not_make_it_our_upload(models, item, repository, tmp_path, monkeypatch):
    models.mkdir(parents=True)
    (models / "config.json").write_bytes(b"somebody's own")
    with pytest.raises(FerryError, match=r"found config\.json\. Nothing is ever overwritten"):
        export_here(monkeypatch, item, repository, OUTPUT, tmp_path / "staging")
    assert (models / "config.json").read_bytes() == b"somebody's own"


def test_words(models, item, repository, tmp_path, monkeypatch):
    models.mkdir(parents=True)
    (models / "precious.bin").write_bytes(b"1")
    with pytest.raises(FerryError, match=r"found precious\.bin\. Nothing is ever overwritten"):
        export_here(monkeypatch, item, repository, OUTPUT, tmp_path / "staging")


def test_a_bucket_that_may_not_be_listed(gcs, bucket, item, repository, tmp_path, monkeypatch):
    gcs.fail("GET", 403, times=9)
    with pytest.raises(FerryError, match="a bucket that can be listed and written"):
        export_here(monkeypatch, item, repository, f"gs://{bucket}/x", tmp_path / "staging")
