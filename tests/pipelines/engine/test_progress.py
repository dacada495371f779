"""Progress: the counters add up over threads and processes, the words are right, and nothing fails a run."""

import io
import subprocess
import sys
import threading
import time

import pytest
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.engine import progress
from tensorferry.pipelines.engine.progress import (
    Done,
    ProgressMonitor,
    Slot,
    bytes_text,
    progress_line,
    read_slots,
    seconds_text,
)
from tensorferry.pipelines.engine.receipt_count import ReceiptCount
from tensorferry.pipelines.output.receipts import Receipts


def test_slots_of_threads_and_processes_add_up(tmp_path):
    def count():
        slot = Slot(str(tmp_path))
        for nbytes in (3, 5, 7):
            slot.add(nbytes, items=1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    add = f"Slot({str(tmp_path)!r}).add(1_000_000_000_000, items=6)"
    code = f"from tensorferry.pipelines.engine.progress import Slot; {add}"
    subprocess.run([sys.executable, "-c", code], check=True)
    for thread in threads:
        thread.join()

    assert read_slots(str(tmp_path)) == Done(4 * 15 + 1_000_000_000_000, 4 * 3 + 6)
    assert {path.stat().st_size for path in tmp_path.iterdir()} == {64}


def test_what_is_done_of_an_item_counts_before_it_is_finished_and_once(tmp_path):
    slot, seen = Slot(str(tmp_path)), []
    progress.advance(1000)  # nobody counts
    with slot.counting():
        for attempt in ((30, 30), (30, 50, 20)):
            progress.begin()
            for nbytes in attempt:
                progress.advance(nbytes)
                seen.append(read_slots(str(tmp_path)).nbytes)
        slot.finish(100)
        progress.begin()
        progress.advance(7)
        slot.finish(5)
    progress.advance(1000)
    assert seen == [30, 60, 30, 80, 100]
    assert read_slots(str(tmp_path)) == Done(105, 2)


def test_a_directory_that_is_not_there_counts_nothing_and_is_not_made(tmp_path):
    gone = tmp_path / "gone"
    slot = Slot(str(gone))
    slot.add(5, items=1)
    slot.close()
    assert read_slots(str(gone)) == Done()
    assert not gone.exists()


def test_a_slow_reading_is_not_repeated_at_once_and_the_last_is_never_old():
    counts = iter(range(1, 100))
    shown = io.StringIO()
    monitor = ProgressMonitor(Done(99, 99), lambda: Done(7, next(counts)), line_seconds=0.01, stream=shown,
                              read_seconds=60)  # fmt: skip
    with monitor:
        time.sleep(0.3)
    items = [line.split(", ")[1].split()[0] for line in shown.getvalue().splitlines()]
    assert len(items) > 3
    assert items == ["1"] * (len(items) - 1) + ["2"]


def test_receipts_of_this_run_are_counted_and_a_refusal_keeps_the_count(tmp_path):
    receipts = Receipts(str(tmp_path / "r"))
    count = ReceiptCount(receipts, {"a/1": 5, "a/2": 7, "a/3": 11})
    assert count() == Done()
    for name in ("a/1", "a/3", "of an earlier attempt"):
        receipts.add(name, {})
    assert count() == Done(16, 2)

    class Busy:
        def ids(self) -> set[str]:
            raise FerryError("busy")

    count.receipts = Busy()
    assert count() == Done(16, 2)


def test_half_a_slot_and_other_files_count_nothing(tmp_path):
    (tmp_path / "slot-half").write_bytes(b"\x01" * 10)
    (tmp_path / "stop").write_bytes(b"")
    Slot(str(tmp_path)).add(9, items=2)
    assert read_slots(str(tmp_path)) == Done(9, 2)


def test_a_slot_that_cannot_be_written_gives_up_quietly(tmp_path, monkeypatch):
    slot = Slot(str(tmp_path))

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    slot.add(5)
    slot.add(5)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (1_540_000_000, "1.5 GB")]
    + [(123_400_000_000, "123 GB"), (5_600_000_000_000_000, "5600 TB")],
)
def test_bytes_for_people(nbytes, text):
    assert bytes_text(nbytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0 s"), (59.7, "1 min 00 s"), (7805, "2 h 10 min")])
def test_seconds_for_people(seconds, text):
    assert seconds_text(seconds) == text


def test_rate_and_time_left_come_from_this_attempt_alone():
    line = progress_line(Done(6_000_000, 60), Done(10_000_000, 1000), fresh_bytes=2_000_000, run_seconds=4.0)
    assert line == "6.0 MB of 10.0 MB (60 %), 60 of 1,000 work items, 500 kB/s, 8 s left"


def test_lines_without_a_terminal_start_with_what_was_finished_before():
    stream = io.StringIO()
    fresh = Done(300, 3)
    with ProgressMonitor(Done(1000, 10), lambda: fresh, Done(200, 2), line_seconds=0.05, stream=stream):
        time.sleep(0.13)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "already finished by an earlier attempt: 200 B in 2 work items"
    assert len(lines) >= 3
    assert all(line.startswith("500 B of 1.0 kB (50 %), 5 of 10 work items") for line in lines[1:])


def test_a_repeated_attempt_does_not_pass_the_end():
    stream = io.StringIO()
    with ProgressMonitor(Done(100, 4), lambda: Done(300, 12), stream=stream):
        pass
    assert stream.getvalue().startswith("100 B of 100 B (100 %), 4 of 4 work items")


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar():
    stream = _Terminal()
    with ProgressMonitor(Done(1000, 10), lambda: Done(500, 5), stream=stream):
        time.sleep(0.3)
    assert "50%" in stream.getvalue()
    assert "5 of 10 work items" in stream.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_what_goes_wrong_while_drawing_is_dropped(terminal):
    class Broken(io.StringIO):
        def isatty(self):
            return terminal

        def write(self, _text):
            raise OSError("broken pipe")

    with ProgressMonitor(Done(10, 1), lambda: Done(), Done(5, 1), line_seconds=0.01, stream=Broken()):
        time.sleep(0.05)

    def unreadable():
        raise RuntimeError("no counters")

    with ProgressMonitor(Done(10, 1), unreadable, line_seconds=0.01, stream=io.StringIO()):
        time.sleep(0.05)
