"""The source or the disk changes while a conversion runs: nothing is committed, nothing is lost, all is said."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import stock_orbax
from checkpoints import Sizes, llama_config, llama_expected, llama_tensors, write_checkpoint
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.convert import conversion as module

# Five work items of a megabyte.
SIZES = Sizes(vocab=120_011)
ARGS = ("--chunk-bytes", "200KiB", "--direct_num_workers=1")


@pytest.fixture
def source(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "hf", llama_config(SIZES), llama_tensors(SIZES))


def convert(source: Path, output: Path, *more: str) -> int:
    return main(["convert", "--source", str(source), "--output", str(output), *ARGS, *more])


@pytest.fixture
def meanwhile(monkeypatch) -> Callable[..., None]:
    """Lets something happen after the plan is made, before or after the work items are done; once."""

    def arrange(before: Callable[[], object] = lambda: None, after: Callable[[], object] = lambda: None) -> None:
        run_items = module.run_items

        def run(*args, **kwargs):
            monkeypatch.setattr(module, "run_items", run_items)
            before()
            tally = run_items(*args, **kwargs)
            after()
            return tally

        monkeypatch.setattr(module, "run_items", run)

    return arrange


def receipts(output: Path) -> int:
    return len(list(output.glob(".tensorferry-0/receipts/[!.]*.json")))


def rewrite(source: Path, **metadata: str) -> None:
    """The same checkpoint with another header."""
    write_checkpoint(source, llama_config(SIZES), llama_tensors(SIZES), metadata=metadata)


def test_a_source_whose_headers_changed_during_the_run_is_not_committed(source, meanwhile, tmp_path, capfd):
    output = tmp_path / "out"
    meanwhile(after=lambda: rewrite(source, revision="2"))
    assert convert(source, output) == 1
    told = capfd.readouterr().err
    assert f"{source}: expected the source as it was planned (" in told
    assert "found other content (headers " in told
    assert "Traceback" not in told
    assert stock_orbax.steps(output) == []
    assert not (output / "maxtext.yml").exists()

    assert convert(source, output) == 1, "it is another plan now"
    assert "found one of another plan" in capfd.readouterr().err


def test_a_shard_cut_short_during_the_run_is_a_sentence_and_the_repaired_one_is_resumed(
    source, meanwhile, tmp_path, capfd
):
    output = tmp_path / "out"
    shard = sorted(source.glob("*.safetensors"))[0]
    whole = shard.read_bytes()
    meanwhile(before=lambda: os.truncate(shard, len(whole) // 2))
    assert convert(source, output) == 1
    told = capfd.readouterr().err
    assert re.search(rf"{shard.name}: expected the bytes that its header promised; found only \d+ of \d+ bytes", told)
    assert "bytes are missing" in told
    assert re.search(r"\d of 5 work items failed, \d were? not started; what is done stays done\. "
                     r"Run the same command again to resume\.", told)  # fmt: skip
    assert "Traceback" not in told
    assert stock_orbax.steps(output) == []

    assert convert(source, output) == 2, "the headers do not fit the files: refused before anything starts"
    capfd.readouterr()
    shard.write_bytes(whole)
    assert convert(source, output) == 0
    stock_orbax.assert_restores(output, llama_expected(llama_tensors(SIZES), SIZES))


def test_a_shard_that_vanishes_during_the_run_is_a_sentence(source, meanwhile, tmp_path, capfd):
    shard = sorted(source.glob("*.safetensors"))[0]
    meanwhile(before=shard.unlink)
    assert convert(source, tmp_path / "out") == 1
    told = capfd.readouterr().err
    assert shard.name in told
    assert "no such file" in told
    assert "Traceback" not in told


def test_what_is_lost_after_it_was_written_is_written_again(source, meanwhile, tmp_path):
    """A machine that lost power may lose chunks whose receipts it kept."""
    output = tmp_path / "out"
    items = output / ".tensorferry-0" / "step" / "items"
    meanwhile(after=lambda: next(path for path in items.rglob("*") if path.is_file()).unlink())
    assert convert(source, output) == 0
    stock_orbax.assert_restores(output, llama_expected(llama_tensors(SIZES), SIZES))


def test_a_chunk_that_nobody_planned_stops_the_commit(source, meanwhile, tmp_path, capfd):
    output = tmp_path / "out"
    items = output / ".tensorferry-0" / "step" / "items"

    def stray() -> None:
        (items / "params.stray" / "c").mkdir(parents=True)
        (items / "params.stray" / "c" / "0").write_text("")

    meanwhile(after=stray)
    assert convert(source, output) == 1
    told = capfd.readouterr().err
    assert "params.stray" in told
    assert "a chunk that nobody planned" in told
    assert stock_orbax.steps(output) == []


# The disk.


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk of 12 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"a small disk needs the right to mount: {mount.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_what_cannot_fit_is_refused_before_it_starts(source, small_disk, capfd):
    (small_disk / "ballast").write_bytes(bytes(9 << 20))
    assert convert(source, small_disk / "out") == 1
    told = capfd.readouterr().err
    assert "expected 4.59 MiB free for what is left to write; found" in told
    assert "Free space or choose another output, then run the same command again." in told


def test_a_disk_that_fills_up_is_a_sentence_and_the_rest_is_done_later(source, small_disk, meanwhile, capfd):
    output, ballast = small_disk / "out", small_disk / "ballast"
    meanwhile(before=lambda: fill(ballast, leave_bytes=2_500_000))
    assert convert(source, output) == 1
    told = capfd.readouterr().err
    assert "Traceback" not in told
    assert "No space left on device. Free space or repair access" in told
    assert "Run the same command again to resume." in told
    assert stock_orbax.steps(output) == []
    kept = receipts(output)
    assert 0 < kept < 5

    ballast.unlink()
    assert convert(source, output) == 0
    assert f"{kept} of 5 work items were finished by an earlier run" in capfd.readouterr().out
    stock_orbax.assert_restores(output, llama_expected(llama_tensors(SIZES), SIZES))


def fill(ballast: Path, leave_bytes: int) -> None:
    disk = os.statvfs(ballast.parent)
    ballast.write_bytes(bytes(disk.f_bavail * disk.f_frsize - leave_bytes))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_that_may_not_be_written_is_a_sentence(source, tmp_path, capfd):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert convert(source, tmp_path / "locked" / "out") == 1
    told = capfd.readouterr().err
    assert "a directory that can be written" in told
    assert "Traceback" not in told


def test_an_output_that_is_a_file_is_a_sentence(source, tmp_path, capfd):
    (tmp_path / "file").write_text("mine")
    assert convert(source, tmp_path / "file") == 1
    told = capfd.readouterr().err
    assert f"{tmp_path}/file: expected a directory; found a file." in told
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_record_of_another_version_is_refused(source, meanwhile, tmp_path, capfd):
    output = tmp_path / "out"
    shard = sorted(source.glob("*.safetensors"))[0]
    whole = shard.read_bytes()
    meanwhile(before=lambda: os.truncate(shard, 100))
    assert convert(source, output) == 1
    shard.write_bytes(whole)
    record = output / ".tensorferry-0" / "run.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"format": 99}))
    assert convert(source, output) == 1
    assert "one of run format 99" in capfd.readouterr().err
