"""Migrating from a bucket into a bucket: a real fake-gcs-server process behind our proxy."""

import json
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.migrate import copy_work
from tensorferry.pipelines.output.bucket_lock import BucketLock
from test_migrate import migrate, outcomes
from tunix_samples import stored_tree, unpack

RUN, STEP = "sft_llama_scan_clip", "sft_llama_scan_clip/checkpoints/3"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("bucket"))


def files(folder: Path, *runs: str) -> dict[str, bytes]:
    found = [path for run in runs for path in sorted((folder / run).rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def run(source: str, output: str, told: Path, *args: str) -> tuple[int, dict[str, Any]]:
    code = main(["migrate", "--source", source, "--output", output, "--structural", "--json", str(told), *args])
    return code, json.loads(told.read_text())


def verify(source: str, output: str, *args: str) -> int:
    return main(["verify", "--source", source, "--output", output, *args])


def test_the_objects_are_those_of_a_local_run(
    gcs: Any, bucket: str, samples: Path, tmp_path: Path, capsys: Any
) -> None:
    runs = ("pathways_no_ocdbt", "distill_grain_iter")
    gcs.put_all(bucket, "runs", files(samples, *runs))
    source = gcs.tree(bucket, "runs/")
    includes = [arg for name in runs for arg in ("--include", name)]
    code, report = run(f"gs://{bucket}/runs", f"gs://{bucket}/new", tmp_path / "t.json", "--rng-impl", "keep")
    assert code == 0
    local = tmp_path / "local"
    assert migrate(samples, local, "--structural", "--rng-impl", "keep", *includes)[0] == 0
    assert set(outcomes(report).values()) == {"migrated"}
    here = {path.relative_to(local).as_posix(): path.read_bytes() for path in local.rglob("*") if path.is_file()}
    there = gcs.tree(bucket, "new/")
    assert there.keys() == here.keys()
    vary = ("commit_success.txt", "tensorferry.manifest.json", "_CHECKPOINT_METADATA")
    assert {n: there[n] for n in there if not n.endswith(vary)} == {n: here[n] for n in here if not n.endswith(vary)}
    assert gcs.tree(bucket, "runs/") == source
    code, report = run(f"gs://{bucket}/runs", f"gs://{bucket}/new", tmp_path / "t.json", "--rng-impl", "keep")
    assert (code, set(outcomes(report).values())) == (0, {"skipped"})
    assert verify(f"gs://{bucket}/runs", f"gs://{bucket}/new") == 0
    assert verify(str(samples), f"gs://{bucket}/new", *includes) == 0
    gone = sorted(name for name in there if name.endswith("commit_success.txt"))[0]
    gcs.delete(bucket, f"new/{gone}")
    assert verify(f"gs://{bucket}/runs", f"gs://{bucket}/new") == 3
    assert f"{gone.removesuffix('/commit_success.txt')}: expected a migrated step; found one" in capsys.readouterr().err


@pytest.mark.slow
def test_ocdbt_in_a_bucket_holds_the_tree(gcs: Any, bucket: str, samples: Path, tmp_path: Path) -> None:
    gcs.put_all(bucket, "runs", files(samples, RUN))
    code, _ = run(f"gs://{bucket}/runs", f"gs://{bucket}/new", tmp_path / "t.json", "--format", "ocdbt")
    assert code == 0
    assert migrate(samples, tmp_path / "local", "--structural", "--include", RUN)[0] == 0
    wanted = stored_tree(tmp_path / "local" / STEP / "items")
    base = f"gs://{bucket}/new/{STEP}/items/"
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    names = {key.decode().split("/")[0] for key in store.list().result()}
    assert names == {name.replace("/", ".") for name, leaf in wanted.items() if "sha256" in leaf}


def test_steps_without_their_commit_file_are_unfinished_there(
    gcs: Any, bucket: str, samples: Path, tmp_path: Path
) -> None:
    found = files(samples, RUN)
    gcs.put_all(bucket, "runs", {name: data for name, data in found.items() if name != f"{STEP}/commit_success.txt"})
    code, report = run(f"gs://{bucket}/runs", str(tmp_path / "o"), tmp_path / "t.json")
    assert (code, outcomes(report)) == (0, {STEP: "left alone"})


def test_interrupted_it_goes_on(
    gcs: Any, bucket: str, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    gcs.put_all(bucket, "runs", files(samples, RUN, "sft_sgd"))
    real = copy_work.copy_item

    def failing(item: Any, reader: Any, *rest: Any) -> Any:
        if reader.step_path == STEP:
            raise RuntimeError("pulled the plug")
        return real(item, reader, *rest)

    monkeypatch.setattr(copy_work, "copy_item", failing)
    args = ("--source", f"gs://{bucket}/runs", "--output", f"gs://{bucket}/new", "--structural")
    assert main(["migrate", *args, "--direct_num_workers", "1"]) == 1
    assert "pulled the plug" in capsys.readouterr().err
    assert not [name for name in gcs.tree(bucket, "new/") if name.endswith("commit_success.txt")]
    monkeypatch.setattr(copy_work, "copy_item", real)
    code, report = run(f"gs://{bucket}/runs", f"gs://{bucket}/new", tmp_path / "t.json")
    assert (code, set(outcomes(report).values())) == (0, {"migrated"})
    assert not [name for name in gcs.tree(bucket, "new/") if "/." in name or name.startswith(".")]


def test_in_place_in_a_bucket_is_refused(gcs: Any, bucket: str, capsys: Any) -> None:
    source = f"gs://{bucket}/runs"
    assert main(["migrate", "--source", source, "--output", f"{source}/new/", "--structural"]) == 2
    assert "The source is never touched" in capsys.readouterr().err


def test_another_migration_into_the_same_place_is_refused(
    gcs: Any, bucket: str, samples: Path, tmp_path: Path, capsys: Any
) -> None:
    gcs.put_all(bucket, "runs", files(samples, RUN))
    lock = BucketLock(f"gs://{bucket}/new/.tensorferry-migrate", "the output")
    lock.acquire()
    gcs.put(bucket, "new/.tensorferry-migrate/run-dead/records/1.json", b"{}")
    args = ("migrate", "--source", f"gs://{bucket}/runs", "--output", f"gs://{bucket}/new", "--structural")
    assert main([*args]) == 1
    assert f"gs://{bucket}/new: expected an output that no other process writes" in capsys.readouterr().err
    assert main([*args, "--dry-run"]) == 0
    assert main([*args, "--take-over"]) == 0
    assert not gcs.names(bucket, "new/.tensorferry-migrate")
