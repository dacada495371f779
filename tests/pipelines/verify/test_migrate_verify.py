"""Verifying a migration: a byte, a step, or a place that is wrong is found. (All samples: see `test_migrate`.)"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.verify.compare_arrays import blocks
from test_migrate import migrate
from tunix_samples import unpack

RUN = "rl_ppo"
STEPS = f"{RUN}/checkpoints/actor"


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("verified"))


@pytest.fixture(scope="module")
def migrated(bucket: Path) -> Path:
    output = bucket.parent / "new"
    assert migrate(bucket, output, "--structural", "--include", RUN)[0] == 0
    return output


@pytest.fixture
def new(migrated: Path, tmp_path: Path) -> Path:
    """A migrated run, to be damaged."""
    shutil.copytree(migrated / RUN, tmp_path / "new" / RUN)
    return tmp_path / "new"


def verify(source: Any, output: Any, *args: str) -> int:
    return main(["verify", "--source", str(source), "--output", str(output), *args])


def differs(bucket: Path, new: Path, capsys: pytest.CaptureFixture, *args: str) -> str:
    assert verify(bucket, new, "--include", RUN, *args) == 3
    return capsys.readouterr().err


def numbers(new: Path) -> list[str]:
    return sorted(path.name for path in (new / STEPS).iterdir() if path.is_dir())


def chunk_file(new: Path, key: str) -> Path:
    """The largest file of an array's chunks."""
    files = (path for path in (new / STEPS / numbers(new)[0] / "items" / key).rglob("*") if path.is_file())
    return max((path for path in files if path.name != "zarr.json"), key=lambda path: path.stat().st_size)


def test_a_sample_is_told_as_one(bucket: Path, new: Path, capsys: pytest.CaptureFixture) -> None:
    assert verify(bucket, new, "--include", RUN, "--sample", "0.1") == 0
    assert "(a sample of 0.1), no difference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "found"),
    [("params.params.token_embedder.embedding", "index ["), ("step", "index []: expected readable values; found")],
    ids=["moved", "with_crc32c"],
)
def test_a_flipped_byte(key: str, found: str, bucket: Path, new: Path, capsys: pytest.CaptureFixture) -> None:
    file = chunk_file(new, key)
    octets = bytearray(file.read_bytes())
    octets[len(octets) // 2] ^= 1
    file.write_bytes(octets)
    _, *lines = differs(bucket, new, capsys).splitlines()
    assert lines
    for line in lines:
        assert line.startswith(f"  {STEPS}/{numbers(new)[0]} {key} {found}")


def test_a_value_written_anew(bucket: Path, new: Path, capsys: pytest.CaptureFixture) -> None:
    key, step = "params.params.token_embedder.embedding", numbers(new)[0]
    url = f"file://{new}/{STEPS}/{step}/items/{key}/"
    array: Any = ts.open({"driver": "zarr3", "kvstore": url}).result()
    array[3, 5].write(7).result()
    told = differs(bucket, new, capsys)
    assert f"{STEPS}/{step} {key} index [3, 5]: expected " in told
    assert "found 7" in told


def test_steps_that_are_swapped(bucket: Path, new: Path, capsys: pytest.CaptureFixture) -> None:
    one, other = (new / STEPS / name for name in numbers(new)[:2])
    one.rename(new / "aside")
    other.rename(one)
    (new / "aside").rename(other)
    told = differs(bucket, new, capsys)
    for step in (one.name, other.name):
        assert f"{STEPS}/{step} source: expected files" in told
    assert " index [" in told


def test_a_step_that_is_gone(bucket: Path, new: Path, capsys: pytest.CaptureFixture) -> None:
    gone = numbers(new)[0]
    shutil.rmtree(new / STEPS / gone)
    assert f"{STEPS}/{gone}: expected a migrated step; found none" in differs(bucket, new, capsys)


def test_every_step_is_gone(bucket: Path, new: Path, capsys: pytest.CaptureFixture) -> None:
    shutil.rmtree(new / RUN)
    assert "expected a migrated step; found none" in differs(bucket, new, capsys)


def test_a_step_that_is_not_published(bucket: Path, new: Path, capsys: pytest.CaptureFixture) -> None:
    step = numbers(new)[0]
    (new / STEPS / step / "commit_success.txt").unlink()
    told = differs(bucket, new, capsys)
    assert f"{STEPS}/{step}: expected a migrated step; found one that is not published" in told


def test_an_array_that_the_record_lost(bucket: Path, new: Path, capsys: pytest.CaptureFixture) -> None:
    file = new / STEPS / numbers(new)[0] / "items" / "tensorferry.manifest.json"
    manifest = json.loads(file.read_bytes())
    key = "params.params.token_embedder.embedding"
    del manifest["arrays"][key]
    file.write_text(json.dumps(manifest))
    told = differs(bucket, new, capsys)
    assert f"{key}: expected no such array; found one in Orbax's metadata" in told
    assert "expected an array of the new step, or a reason against it; found neither" in told


def test_one_step_alone_is_refused(bucket: Path, new: Path, capsys: pytest.CaptureFixture) -> None:
    assert verify(bucket, new / STEPS / numbers(new)[0]) == 1
    assert "is one migrated step. Give the folder above" in capsys.readouterr().err


def test_options_of_other_outputs_are_refused(bucket: Path, new: Path, capsys: pytest.CaptureFixture) -> None:
    assert verify(bucket, new, "--lora", "adapter") == 1
    assert "they have no meaning for a migration" in capsys.readouterr().err


def test_blocks_tile_an_array() -> None:
    import numpy as np

    seen = np.zeros((5, 7, 3), np.int32)
    for box in blocks(seen.shape, (2, 3, 3), 4, 100):
        part = seen[tuple(slice(*span) for span in box)]
        assert part.nbytes <= 100
        part += 1
    assert (seen == 1).all()
