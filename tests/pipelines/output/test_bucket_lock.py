"""Two launchers, one output in a bucket. The emulator ignores preconditions; the proxy before it enforces them."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
import tiny_llama
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.output import bucket_lock
from tensorferry.pipelines.output.bucket_lock import LOCK_NAME, BucketLock, Holder
from tensorferry.pipelines.storage.objects import NOTHING, Objects


@pytest.fixture
def folder(bucket) -> str:
    return f"gs://{bucket}/out/.tensorferry-0"


def lock_of(folder: str) -> BucketLock:
    return BucketLock(folder, "gs://the/output")


def at_another_host(folder: str, **changes) -> Holder:
    """Puts down the lock of somebody else."""
    holder = replace(Holder.this_process(), **{"host": "far", "machine": "other boot/pid:[7]", "pid": 71, **changes})
    Objects(folder).write(LOCK_NAME, holder.encoded())
    return holder


def pass_time(monkeypatch, minutes: float) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(minutes=minutes)

    monkeypatch.setattr(bucket_lock, "datetime", Later)


def test_objects_change_only_at_their_generation(bucket):
    objects = Objects(f"gs://{bucket}/x")
    assert objects.read_generation("a") == (None, NOTHING)
    first = objects.replace("a", b"1", NOTHING)
    assert objects.replace("a", b"2", NOTHING) is None
    assert first
    second = objects.replace("a", b"3", first)
    assert objects.read_generation("a") == (b"3", second)
    assert objects.replace("a", None, first) is None
    assert objects.replace("a", None, second)
    assert objects.read("a") is None


def test_the_second_is_refused_until_the_first_lets_go(folder, gcs, bucket):
    first, second = lock_of(folder), lock_of(folder)
    first.acquire()
    told = json.loads(gcs.get(bucket, f"out/.tensorferry-0/{LOCK_NAME}"))
    assert (told["pid"], told["host"]) == (os.getpid(), os.uname().nodename)
    with pytest.raises(FerryError) as refused:
        second.acquire()
    assert str(refused.value) == (
        f"gs://the/output: expected an output that no other process writes; found process {os.getpid()} of "
        f"{os.uname().nodename} at work on it since {told['since']}. Wait for it to end, or stop it: the same command "
        "goes on 5 minutes after its last sign of life, or at once with --take-over."
    )
    first.release()
    second.acquire()
    second.release()
    assert gcs.names(bucket) == []


def test_of_many_at_once_one_has_it(folder):
    locks, got = [lock_of(folder) for _ in range(6)], []
    ready = threading.Barrier(len(locks))

    def take(lock: BucketLock) -> None:
        ready.wait()
        try:
            lock.acquire()
            got.append(lock)
        except FerryError:
            pass

    threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    got[0].release()


def test_a_silent_holder_loses_it_after_the_stated_minutes(folder, monkeypatch):
    at_another_host(folder)
    pass_time(monkeypatch, 4.5)
    with pytest.raises(FerryError, match="found process 71 of far"):
        lock_of(folder).acquire()
    pass_time(monkeypatch, 5.5)
    lock_of(folder).acquire()


def test_receipts_of_workers_are_signs_of_life(folder, monkeypatch):
    """The launcher is gone, its job goes on."""
    at_another_host(folder, pid=0, job="j")
    real = Objects.newest
    monkeypatch.setattr(Objects, "newest", lambda self: real(self) - timedelta(minutes=31))
    lock_of(folder).acquire()
    at_another_host(folder, pid=0, job="j")
    Objects(folder).write("receipts/7.json", b"{}")
    monkeypatch.setattr(Objects, "newest", lambda self: real(self) - timedelta(minutes=29))
    with pytest.raises(FerryError, match=r"found a job at work on it, started from far .* 30 minutes after its last"):
        lock_of(folder).acquire()


def test_one_killed_on_this_machine_blocks_nobody(folder):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    at_another_host(folder, machine=Holder.this_process().machine, pid=dead.pid)
    lock_of(folder).acquire()
    at_another_host(folder, pid=dead.pid)  # the same number elsewhere says nothing
    with pytest.raises(FerryError):
        lock_of(folder).acquire()


def test_taken_over_the_first_does_not_commit(folder, gcs, bucket):
    first, second = lock_of(folder), lock_of(folder)
    first.acquire()
    first.refuse_if_lost()
    second.acquire(take_over=True)
    with pytest.raises(FerryError, match=r"expected an output that this process alone writes; found process"):
        first.refuse_if_lost()
    first.release()
    assert gcs.names(bucket), "the first one gave away what is the second one's"
    second.refuse_if_lost()
    second.release()


def test_it_is_kept_alive(folder, monkeypatch, gcs, bucket):
    monkeypatch.setattr(bucket_lock, "HEARTBEAT_SECONDS", 0.05)
    lock = lock_of(folder)
    lock.acquire()
    beats = threading.Event()
    while gcs.writes[f"{bucket}/out/.tensorferry-0/{LOCK_NAME}"] < 4:
        beats.wait(0.05)
    lock.refuse_if_lost()
    lock.release()
    assert gcs.names(bucket) == []


def test_a_lost_answer_is_not_a_lost_lock(folder, gcs):
    """The write counts, its answer breaks off, and the client's repetition meets its own first try."""
    gcs.fail(f"^POST /upload.*{LOCK_NAME}", 0)
    lock = lock_of(folder)
    lock.acquire()
    lock.refuse_if_lost()
    lock.release()


def test_left_to_a_job_it_is_the_jobs(folder, monkeypatch):
    monkeypatch.setattr(bucket_lock, "_WAIT_SECONDS", 0.05)
    launcher, worker, other = lock_of(folder), lock_of(folder), lock_of(folder)
    launcher.acquire()
    launcher.leave("j")
    worker.acquire_left("j")
    launcher.release()
    worker.refuse_if_lost()
    waiting = threading.Thread(target=other.acquire_left, args=("j",))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "two workers of one job have it"
    worker.release()
    waiting.join(5)
    other.refuse_if_lost()
    other.release()
    somebody = at_another_host(folder)
    with pytest.raises(FerryError, match=f"process {somebody.pid} of far"):
        lock_of(folder).acquire_left("j")


def test_a_damaged_lock_goes_stale_too(folder, monkeypatch):
    Objects(folder).write(LOCK_NAME, b"{")
    with pytest.raises(FerryError, match="an unknown host"):
        lock_of(folder).acquire()
    pass_time(monkeypatch, 31)
    lock_of(folder).acquire()


@pytest.fixture
def command(gcs, bucket) -> list[str]:
    gcs.put_all(bucket, "m", tiny_llama.files())
    return ["convert", "--source", f"gs://{bucket}/m", "--output", f"gs://{bucket}/out"]


def test_convert_is_refused_with_a_sentence_and_takes_over(command, folder, gcs, bucket, capsys):
    at_another_host(folder)
    before = gcs.tree(bucket, "out")
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "gs://" in error
    assert "process 71 of far at work on it" in error
    assert "Traceback" not in error
    assert gcs.tree(bucket, "out") == before
    assert main([*command, "--take-over"]) == 0
    assert not gcs.names(bucket, "out/.tensorferry-0/")


def test_convert_does_not_commit_what_another_has_taken(command, folder, gcs, bucket, capsys, monkeypatch):
    from tensorferry.pipelines.output.bucket_receipts import BucketReceipts

    real = BucketReceipts.add

    def add(self, item_id, receipt):
        at_another_host(folder)
        return real(self, item_id, receipt)

    monkeypatch.setattr(BucketReceipts, "add", add)
    assert main(command) == 1
    assert "expected an output that this process alone writes; found process 71 of far" in capsys.readouterr().err
    assert "out/0/commit_success.txt" not in gcs.names(bucket)
    assert LOCK_NAME in "".join(gcs.names(bucket, "out/.tensorferry-0/"))
