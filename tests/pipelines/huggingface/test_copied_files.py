"""What of --config is copied: small files, those of tokenizer and processor folders too, and never weights."""

from pathlib import Path

import pytest
from checkpoints import llama_config, llama_expected, llama_tensors
from exports import export_here, here, stock, write_repository
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.export import streamed_run
from tensorferry.pipelines.huggingface.repository import open_repository

NESTED = {
    "processor/preprocessor_config.json": b'{"size":  3}',
    "processor/README.md": b"of the repository",
    "processor/sample.png": b"a picture",
    "tokenizer/tokenizer.json": b"{}\n",
    "tokenizer/deep/vocab.json": b"deeper than anybody looks",
    "original/params.json": b"of another format, whose weights were not downloaded",
    "text_encoder/config.json": b"{}",
    "text_encoder/model.safetensors": b"weights",
    ".cache/state.json": b"hidden",
}
COPIED = {"processor/preprocessor_config.json", "tokenizer/tokenizer.json"}
TOLD = {
    "not copied from --config: original/: the model in another format",
    "not copied from --config: text_encoder/: weights of its own",
}


@pytest.fixture
def repository(tmp_path) -> Path:
    folder = write_repository(tmp_path / "hf", llama_config(), llama_tensors())
    for name, content in NESTED.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def item(tmp_path_factory) -> Path:
    return stock(tmp_path_factory.mktemp("orbax") / "5" / "items", llama_expected(llama_tensors()))


def nested_files(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent != folder]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_folders_of_a_directory(repository, item, tmp_path, monkeypatch, capsys):
    outcome = export_here(monkeypatch, item, repository, tmp_path / "out")
    assert nested_files(tmp_path / "out") == {name: NESTED[name] for name in COPIED}
    assert set(outcome.export.notes) >= TOLD
    words = ["verify", "--source", str(item), "--output", str(tmp_path / "out")]
    assert main(words) == 0
    (tmp_path / "out" / "tokenizer" / "tokenizer.json").write_bytes(b"other")
    assert main(words) == 3
    assert "tokenizer/tokenizer.json" in capsys.readouterr().err


def test_folders_in_and_into_a_bucket(gcs, bucket, repository, item, tmp_path, monkeypatch):
    files = {path.relative_to(repository).as_posix(): path for path in repository.rglob("*") if path.is_file()}
    gcs.put_all(bucket, "hf", {name: path.read_bytes() for name, path in files.items()})
    monkeypatch.setattr(streamed_run, "run_items", here)
    config, wanted = f"gs://{bucket}/hf", {name: NESTED[name] for name in COPIED}
    for number, staging in enumerate(("", tmp_path / "staging")):
        outcome = export_here(monkeypatch, item, config, f"gs://{bucket}/{number}", staging)  # type: ignore[arg-type]
        found = {name: data for name, data in gcs.tree(bucket, f"{number}/").items() if "/" in name}
        assert found == wanted
        assert set(outcome.export.notes) >= TOLD
    assert list((tmp_path / "staging").iterdir()) == []


def test_a_large_file_is_told(repository, monkeypatch):
    monkeypatch.setattr("tensorferry.pipelines.huggingface.copied_files._LARGEST_COPY_BYTES", 10)
    assert "tokenizer.json: more than 0 MiB" in open_repository(str(repository)).left_out
    assert "model.safetensors" not in " ".join(open_repository(str(repository)).left_out)
