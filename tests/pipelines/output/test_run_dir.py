"""The output directory: hidden until complete, resumable, and careful with what is not ours."""

import json
import os
import pickle
import threading
from pathlib import Path

import pytest
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.output.receipts import Receipts
from tensorferry.pipelines.output.run_dir import RunDir, RunState
from tensorferry.pipelines.sinks.listing import MANIFEST_NAME

DIGEST = "a1" * 16
OTHER_DIGEST = "b2" * 16


def build(run: RunDir, content: str = "new") -> None:
    """What sink, Orbax and manifest leave in a finished step."""
    (run.item_dir / "layers.kernel" / "c").mkdir(parents=True)
    (run.item_dir / "layers.kernel" / "c" / "0").write_text(content)
    tree = {"tree_metadata": {"x": {"key_metadata": [{"key": "layers"}, {"key": "kernel"}]}}}
    (run.item_dir / "_METADATA").write_text(json.dumps(tree))
    (run.item_dir / MANIFEST_NAME).write_text("{}")
    (run.building / "_CHECKPOINT_METADATA").write_text("{}")


def publish(output: Path, content: str = "new", overwrite: bool = False, digest: str = DIGEST) -> RunDir:
    run = RunDir(output, digest, overwrite=overwrite)
    run.open()
    build(run, content)
    run.commit()
    return run


def chunk_text(output: Path) -> str:
    return (output / "0" / "items" / "layers.kernel" / "c" / "0").read_text()


def in_a_process_that_dies(work) -> int:
    """Runs in a fork whose end runs no cleanup, like a kill; the exit status says whether it got there."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_nothing_is_published_before_the_commit_and_nothing_else_left_after(tmp_path):
    run = RunDir(tmp_path / "out", DIGEST, {"dtype": "bfloat16"})
    assert run.open() is RunState.FRESH
    assert run.item_dir.is_dir()
    build(run)
    assert not (tmp_path / "out" / "0").exists()
    run.commit()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["0"]
    assert chunk_text(tmp_path / "out") == "new"


def test_commit_marks_say_what_orbax_says(tmp_path):
    publish(tmp_path)
    step = tmp_path / "0"
    assert (step / "commit_success.txt").read_text() == f"Checkpoint commit was successful to {step}"
    assert (step / "items" / "commit_success.txt").exists()


def test_a_run_of_the_same_plan_is_resumed_with_its_receipts(tmp_path):
    run = RunDir(tmp_path, DIGEST)
    run.open()
    run.receipts.add("layers/0..2", {"bytes": 7})
    (run.item_dir / "half").write_text("x")
    run.close()
    again = RunDir(tmp_path, DIGEST)
    assert again.open() is RunState.RESUMED
    assert again.receipts.finished() == {"layers/0..2": {"bytes": 7}}
    assert (again.item_dir / "half").exists()
    again.close()


def test_a_run_of_another_plan_is_refused_with_both_digests(tmp_path):
    run = RunDir(tmp_path, DIGEST)
    run.open()
    run.close()
    for overwrite in (False, True):
        with pytest.raises(FerryError) as refusal:
            RunDir(tmp_path, OTHER_DIGEST, overwrite=overwrite).open()
        assert DIGEST in str(refusal.value)
        assert OTHER_DIGEST in str(refusal.value)
        assert "choose another output" in str(refusal.value)
    assert RunDir(tmp_path, DIGEST).open() is RunState.RESUMED


def test_a_run_of_another_format_is_refused(tmp_path):
    run = RunDir(tmp_path, DIGEST)
    run.open()
    run.close()
    record = json.loads((run.state_dir / "run.json").read_text())
    (run.state_dir / "run.json").write_text(json.dumps({**record, "format": 99}))
    with pytest.raises(FerryError, match="run format 99"):
        RunDir(tmp_path, DIGEST).open()


def test_a_complete_output_is_refused_and_untouched(tmp_path):
    publish(tmp_path)
    with pytest.raises(FerryError, match=r"a complete checkpoint.*--overwrite"):
        RunDir(tmp_path, DIGEST).open()
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_overwrite_replaces_only_at_the_commit(tmp_path):
    publish(tmp_path, "old")
    run = RunDir(tmp_path, OTHER_DIGEST, overwrite=True)
    assert run.open() is RunState.FRESH
    build(run, "new")
    assert chunk_text(tmp_path) == "old"
    run.commit()
    assert chunk_text(tmp_path) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_step_that_is_not_ours_is_never_replaced(tmp_path, overwrite):
    (tmp_path / "0" / "items").mkdir(parents=True)
    (tmp_path / "0" / "items" / "_METADATA").write_text("{}")
    with pytest.raises(FerryError, match=r"not a Tensorferry checkpoint.*never overwritten"):
        RunDir(tmp_path, DIGEST, overwrite=overwrite).open()
    assert (tmp_path / "0" / "items" / "_METADATA").read_text() == "{}"
    assert not (tmp_path / ".tensorferry-0").exists()


@pytest.mark.parametrize("stranger", ["0/train_state/notes", "0/items/my_notes.txt"])
def test_overwrite_refuses_a_step_that_holds_other_files(tmp_path, stranger):
    publish(tmp_path)
    path = tmp_path / stranger
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    with pytest.raises(FerryError, match=r"would delete it"):
        RunDir(tmp_path, DIGEST, overwrite=True).open()
    assert path.read_text() == "mine"


def test_overwrite_does_not_follow_a_link_out_of_the_output(tmp_path):
    publish(tmp_path / "elsewhere")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "0").symlink_to(tmp_path / "elsewhere" / "0")
    with pytest.raises(FerryError, match="never overwritten"):
        RunDir(tmp_path / "out", DIGEST, overwrite=True).open()


def test_other_steps_and_files_of_the_output_stay(tmp_path):
    (tmp_path / "1000").mkdir()
    (tmp_path / "maxtext.yml").write_text("x")
    publish(tmp_path)
    publish(tmp_path, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1000", "maxtext.yml"]


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("x")
    with pytest.raises(FerryError, match="expected a directory; found a file"):
        RunDir(tmp_path / "out", DIGEST).open()


def test_an_output_that_cannot_be_written_is_refused():
    with pytest.raises(FerryError, match="a directory that can be written"):
        RunDir(Path("/proc/no-such-output"), DIGEST).open()


def test_a_url_is_refused():
    with pytest.raises(FerryError, match="not supported yet"):
        RunDir("gs://bucket/out", DIGEST)  # pyright: ignore[reportArgumentType]


def test_a_second_process_is_refused_with_the_pid_of_the_first(tmp_path):
    run = RunDir(tmp_path, DIGEST)
    run.open()
    with pytest.raises(FerryError, match=f"process {os.getpid()} at work.*Wait for it to end"):
        RunDir(tmp_path, DIGEST).open()
    run.close()
    assert RunDir(tmp_path, DIGEST).open() is RunState.RESUMED


def test_a_dead_process_holds_no_lock(tmp_path):
    assert in_a_process_that_dies(lambda: RunDir(tmp_path, DIGEST).open()) == 0
    assert RunDir(tmp_path, DIGEST).open() is RunState.RESUMED


def test_a_lock_on_a_removed_file_keeps_nobody_out(tmp_path):
    first = publish(tmp_path, "one")
    first._lock.acquire()
    (first.state_dir / "lock").unlink()
    second = RunDir(tmp_path, DIGEST, overwrite=True)
    assert second.open() is RunState.FRESH
    first.close()
    with pytest.raises(FerryError, match="at work"):
        RunDir(tmp_path, DIGEST, overwrite=True).open()


def test_leavings_of_a_worker_that_outlived_its_run_are_cleared(tmp_path):
    late = tmp_path / ".tensorferry-0" / "step" / "items" / "layers.kernel" / "c" / "9"
    late.parent.mkdir(parents=True)
    late.write_text("late")
    run = RunDir(tmp_path, DIGEST)
    assert run.open() is RunState.FRESH
    assert not late.exists()


def steps_of_commit(tmp_path: Path) -> list[str]:
    names: list[str] = []
    publish(tmp_path / "names", "old")
    run = RunDir(tmp_path / "names", DIGEST, overwrite=True, at_step_of_commit=names.append)
    run.open()
    build(run)
    run.commit()
    return names


def test_a_kill_before_any_step_of_the_commit_is_finished_by_the_same_command(tmp_path):
    names = steps_of_commit(tmp_path)
    assert {"mark commit", "move old aside", "publish", "remove old", "remove state"} <= set(names)
    for name in names:
        output = tmp_path / name.replace(" ", "-")
        publish(output, "old")

        def die_at(step: str, name: str = name) -> None:
            if step == name:
                os._exit(137)

        def convert(output: Path = output, die_at=die_at) -> None:
            run = RunDir(output, OTHER_DIGEST, overwrite=True, at_step_of_commit=die_at)
            run.open()
            build(run, "new")
            run.commit()

        assert in_a_process_that_dies(convert) == 137, name
        finish_after_kill(output, name)


def finish_after_kill(output: Path, killed_at: str) -> None:
    """The same command again, as the launcher would: build what is missing, commit unless that is done."""
    held = list(output.rglob("layers.kernel/c/0"))
    assert held, f"killed at {killed_at}: neither the old checkpoint nor the new one is left"
    run = RunDir(output, OTHER_DIGEST, overwrite=True)
    state = run.open()
    if state is RunState.FRESH:  # killed after its very last step: there is nothing left to say it was this run
        assert killed_at == "remove state"
        assert chunk_text(output) == "new"
        build(run, "new")
    if state is not RunState.PUBLISHED:
        run.commit()
    assert chunk_text(output) == "new", killed_at
    assert [path.name for path in output.iterdir()] == ["0"], killed_at


def test_a_published_run_with_only_rubbish_left_refuses_another_plan_as_complete(tmp_path):
    def die(step: str) -> None:
        if step == "remove receipts":
            os._exit(137)

    def convert() -> None:
        run = RunDir(tmp_path, DIGEST, at_step_of_commit=die)
        run.open()
        build(run)
        run.commit()

    assert in_a_process_that_dies(convert) == 137
    with pytest.raises(FerryError, match="a complete checkpoint"):
        RunDir(tmp_path, OTHER_DIGEST).open()
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_an_unpublished_commit_is_not_finished_by_another_plan(tmp_path):
    def die(step: str) -> None:
        if step == "publish":
            os._exit(137)

    def convert() -> None:
        run = RunDir(tmp_path, DIGEST, at_step_of_commit=die)
        run.open()
        build(run)
        run.commit()

    assert in_a_process_that_dies(convert) == 137
    with pytest.raises(FerryError, match=DIGEST):
        RunDir(tmp_path, OTHER_DIGEST).open()
    assert RunDir(tmp_path, DIGEST).open() is RunState.PUBLISHED
    assert chunk_text(tmp_path) == "new"


def test_the_first_receipt_of_an_item_wins(tmp_path):
    receipts = pickle.loads(pickle.dumps(Receipts(str(tmp_path / "r"))))
    assert receipts.add("a/b.c", {"attempt": "1"}) == {"attempt": "1"}
    assert receipts.add("a/b.c", {"attempt": "2"}) == {"attempt": "1"}
    assert receipts.finished() == {"a/b.c": {"attempt": "1"}}
    assert len(list((tmp_path / "r").iterdir())) == 1


def test_one_of_many_racing_receipts_wins_and_all_hear_which(tmp_path):
    receipts, heard = Receipts(str(tmp_path / "r")), []
    racers = [threading.Thread(target=lambda n=n: heard.append(receipts.add("x", {"attempt": n}))) for n in range(8)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert heard == [receipts.finished()["x"]] * 8


@pytest.mark.parametrize("torn", ["", '{"bytes": 1', "[1]", "\0\0\0"])
def test_a_torn_receipt_counts_for_nothing_and_is_replaced(tmp_path, torn):
    receipts = Receipts(str(tmp_path))
    (tmp_path / "x.json").write_text(torn)
    assert receipts.finished() == {}
    assert receipts.add("x", {"bytes": 3}) == {"bytes": 3}
    assert receipts.finished() == {"x": {"bytes": 3}}
    receipts.discard("x")
    assert receipts.finished() == {}


def test_a_receipt_that_cannot_be_written_is_a_sentence():
    with pytest.raises(FerryError, match="the receipt written"):
        Receipts("/proc/no-such").add("x", {})
