"""--overwrite replaces an export and nothing else, and a kill at any moment leaves one that the same command ends."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import llama_config, llama_expected, llama_tensors
from exports import here, read_repository, stock, write_repository
from fp8_samples import KINDS, quantised
from oracle_data import read_safetensors
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.export import export_run
from tensorferry.pipelines.export.export_output import ExportOutput
from tensorferry.pipelines.export.export_planning import ExportOptions
from tensorferry.pipelines.export.export_run import run_export
from tensorferry.pipelines.output import upload as uploading
from tensorferry.pipelines.output.output_dir import STATE_DIR, OutputDir

OUTPUT = "gs://bucket/models/llama"
NAME = "model.layers.1.mlp.up_proj.weight"


class Killed(BaseException):
    """Stands for a process that is no more."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    return write_repository(tmp_path_factory.mktemp("hf"), llama_config(), llama_tensors())


@pytest.fixture(scope="module")
def items(tmp_path_factory) -> tuple[Path, Path]:
    """Two checkpoints of other weights and the same sizes."""
    where = tmp_path_factory.mktemp("orbax")
    return tuple(stock(where / str(n) / "items", llama_expected(llama_tensors(seed=n))) for n in (1, 9))  # pyright: ignore[reportReturnType]


@pytest.fixture
def export(repository, monkeypatch):
    """Exports, in this process."""
    monkeypatch.setattr(export_run, "run_items", here)

    def run(item: Path, output: Path | str, overwrite: bool = False, staging: Path | str = "", shard_bytes: int = 2500):
        options = ExportOptions(str(item), str(repository), shard_bytes=shard_bytes)
        return run_export(options, ExportOutput(str(output), str(staging), overwrite=overwrite), lambda line: None)

    return run


def holds(folder: Path, seed: int) -> bool:
    found, wanted = read_repository(folder), llama_tensors(seed=seed)
    return found.keys() == wanted.keys() and found[NAME].tobytes() == wanted[NAME].tobytes()


def test_an_export_is_replaced_whole(export, items, tmp_path):
    out = tmp_path / "out"
    export(items[0], out, shard_bytes=1500)
    many = len(list(out.glob("*.safetensors")))
    with pytest.raises(FerryError, match=r"found a Tensorferry export\. Choose another output, or pass --overwrite"):
        export(items[1], out)
    assert holds(out, 1)
    export(items[1], out, overwrite=True)
    assert holds(out, 9)
    assert 1 < len(list(out.glob("*.safetensors"))) < many
    assert not (out / STATE_DIR).exists()
    export(items[0], out, overwrite=True, shard_bytes=1 << 30)
    assert holds(out, 1)
    assert not (out / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("stranger", ["notes.txt", "logs/events", "model-00009-of-00002.safetensors"])
def test_nothing_else_is_deleted(stranger, export, items, tmp_path):
    out = tmp_path / "out"
    export(items[0], out)
    (out / stranger).parent.mkdir(exist_ok=True)
    (out / stranger).write_text("precious")
    with pytest.raises(FerryError, match=rf"found {stranger}. --overwrite would delete it; move it away first"):
        export(items[1], out, overwrite=True)
    (out / stranger).unlink()
    if "/" in stranger:
        with pytest.raises(FerryError, match=r"found logs\. --overwrite would delete it"):
            export(items[1], out, overwrite=True)
    assert holds(out, 1)


def test_what_came_while_it_ran_stays(export, items, tmp_path, monkeypatch):
    out = tmp_path / "out"
    export(items[0], out)

    monkeypatch.setattr(OutputDir, "_step", lambda self, name: name == "sync" and (out / "notes.txt").write_text("x"))
    with pytest.raises(FerryError, match=r"found notes.txt. --overwrite would delete it"):
        export(items[1], out, overwrite=True)
    assert holds(out, 1)
    (out / "notes.txt").unlink()
    monkeypatch.setattr(OutputDir, "_step", lambda self, name: None)
    assert export(items[1], out, overwrite=True).done_items == 0
    assert holds(out, 9)


def test_what_is_no_export_is_never_replaced(export, items, repository, tmp_path):
    folder = write_repository(tmp_path / "theirs", llama_config(), llama_tensors())
    with pytest.raises(FerryError, match=r"Nothing is ever overwritten but a Tensorferry export"):
        export(items[0], folder, overwrite=True)
    (folder / "tensorferry.manifest.json").write_text('{"kind": "other", "files": {}}')
    with pytest.raises(FerryError, match=r"Nothing is ever overwritten but a Tensorferry export"):
        export(items[0], folder, overwrite=True)
    assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize("option", ["config", "fp8_from"])
def test_an_export_is_not_replaced_by_what_is_made_from_it(option, export, items, repository, tmp_path, monkeypatch):
    """A kill in the middle would leave an export without what it needs to go on."""
    monkeypatch.setattr(export_run, "run_items", here)
    out, link = tmp_path / "out", tmp_path / "link"
    quantised = write_fp8(tmp_path / "fp8")
    run_export(ExportOptions(str(items[0]), str(quantised), fp8_from=str(quantised)), ExportOutput(str(out)), print)
    link.symlink_to(out)
    inputs: dict[str, Any] = {"config": str(repository)} | {option: f"{link}/"}
    if option == "config":
        inputs["fp8_from"] = str(quantised)
    with pytest.raises(FerryError, match=f"expected an output apart from --{option.replace('_', '-')}; found .*/link"):
        run_export(ExportOptions(str(items[1]), **inputs), ExportOutput(str(out), overwrite=True), print)
    assert (out / "config.json").exists()
    assert not (out / STATE_DIR).exists()


def write_fp8(folder: Path) -> Path:
    quantisation, blocks, suffix, dtype = KINDS["block"]
    tensors = llama_tensors()
    name = "model.layers.1.mlp.up_proj"
    codes, scales, _ = quantised(tensors[f"{name}.weight"].astype(np.float32), blocks, dtype)
    return write_repository(
        folder,
        llama_config(quantization_config=quantisation),
        tensors | {f"{name}.weight": codes, f"{name}.{suffix}": scales},
    )


@pytest.mark.parametrize("below", ["", "x/y"])
def test_nothing_is_written_into_the_source(below, export, tmp_path):
    item = stock(tmp_path / "items", llama_expected(llama_tensors()))
    before = sorted(item.rglob("*"))
    with pytest.raises(FerryError, match=r"expected an output apart from --source; found .*items"):
        export(item, item / below)
    assert sorted(item.rglob("*")) == before
    export(item, tmp_path / "items-exported")


def test_killed_at_any_step(export, items, tmp_path, monkeypatch):
    """The old export or the new one or none is there to a reader, never a mixture; and the same command ends it."""
    names: list[str] = []
    monkeypatch.setattr(OutputDir, "_step", lambda self, name: names.append(name))
    export(items[0], tmp_path / "out")
    export(items[1], tmp_path / "out", overwrite=True)
    steps = names[names.index("sync", 1) :]
    assert any(name.startswith("move old") for name in steps)
    for number, stop in enumerate(steps):
        out, left = tmp_path / str(number), [number]
        monkeypatch.setattr(OutputDir, "_step", lambda self, name: None)
        export(items[0], out)

        def at(self, name, left=left):
            if left[0] == 0:
                raise Killed
            left[0] -= 1

        monkeypatch.setattr(OutputDir, "_step", at)
        with pytest.raises(Killed):
            export(items[1], out, overwrite=True)
        if (out / "model.safetensors.index.json").exists():
            assert holds(out, 1) or holds(out, 9), stop
        monkeypatch.setattr(OutputDir, "_step", lambda self, name: None)
        export(items[1], out, overwrite=True)
        assert holds(out, 9), stop
        assert not (out / STATE_DIR).exists()


@pytest.fixture
def models(tmp_path, monkeypatch) -> Path:
    """What stands for the bucket."""
    from obstore.store import LocalStore

    store = LocalStore(tmp_path / "bucket", mkdir=True)
    monkeypatch.setattr(uploading, "bucket_store", lambda bucket: store)
    return tmp_path / "bucket" / "models" / "llama"


def test_in_a_bucket_the_old_one_goes_first(export, items, models, tmp_path):
    """Files of the same size are not taken for uploads of this run."""
    export(items[0], OUTPUT, staging=tmp_path / "staging")
    with pytest.raises(FerryError, match="pass --overwrite to replace it: in a bucket the old one is deleted first"):
        export(items[1], OUTPUT, staging=tmp_path / "staging")
    export(items[1], OUTPUT, overwrite=True, staging=tmp_path / "staging")
    assert holds(models, 9)
    (models / "notes.txt").write_text("precious")
    with pytest.raises(FerryError, match=r"found notes.txt. --overwrite would delete it"):
        export(items[0], OUTPUT, overwrite=True, staging=tmp_path / "other")
    assert holds(models, 9)


@pytest.mark.slow
def test_files_written_straight_into_a_bucket(gcs, bucket, items, repository):
    words = ["export", "--config", str(repository), "--output", f"gs://{bucket}/out"]
    assert main([*words, "--source", str(items[0]), "--shard-bytes", "1500"]) == 0
    assert main([*words, "--source", str(items[1])]) == 1
    gcs.put_all(bucket, "out", {"notes.txt": b"precious"})
    assert main([*words, "--source", str(items[1]), "--overwrite"]) == 1
    gcs.put_all(bucket, "elsewhere", {"notes.txt": b"precious"})
    again = ["export", "--source", str(items[1]), "--config", f"gs://{bucket}/out", "--overwrite"]
    gcs.delete(bucket, "out/notes.txt")
    before = gcs.tree(bucket, "out/")
    assert main([*again, "--output", f"gs://{bucket}/out/"]) == 1
    assert gcs.tree(bucket, "out/") == before
    other = [*words[:-1], f"gs://{bucket}/second"]
    for item, more in ((items[0], []), (items[1], ["--overwrite"])):
        assert main([*other, "--source", str(item), *more]) == 0
    tree = gcs.tree(bucket, "second/")
    found = read_safetensors(next(content for name, content in tree.items() if name.endswith(".safetensors")))
    assert found[NAME].tobytes() == llama_tensors(seed=9)[NAME].tobytes()
    assert gcs.tree(bucket, "elsewhere/")


@pytest.mark.parametrize("deleted", range(8))
def test_a_bucket_killed_while_it_deletes_or_uploads(deleted, export, items, models, tmp_path, monkeypatch):
    export(items[0], OUTPUT, staging=tmp_path / "staging")
    tried, left = uploading.tried, [deleted]

    def counted(url, call):
        if "delete" in call.__code__.co_names or "put" in call.__code__.co_names:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
        return tried(url, call)

    monkeypatch.setattr(uploading, "tried", counted)
    with pytest.raises(Killed):
        export(items[1], OUTPUT, overwrite=True, staging=tmp_path / "staging")
    monkeypatch.setattr(uploading, "tried", tried)
    assert not (models / "model.safetensors.index.json").exists() or holds(models, 1)
    export(items[1], OUTPUT, overwrite=True, staging=tmp_path / "staging")
    assert holds(models, 9)
