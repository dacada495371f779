"""One process at a time works on an output in a bucket: an object that only its holder may write.

It is made with ``ifGenerationMatch=0`` and tells host, process and time. Its holder writes it anew every minute; one
whose holder is silent for `STALE_MINUTES`, or has died on this machine, may be taken by the next. Whatever is written
beside it, such as the receipts of workers that go on after their launcher is gone, is a sign of life too.
"""

import json
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.storage.objects import Objects

LOCK_NAME = "lock.json"
HEARTBEAT_SECONDS = 60.0
STALE_MINUTES = 5.0
# A job leaves no receipt before its machines have come.
JOB_STALE_MINUTES = 30.0
_WAIT_SECONDS = 5.0


@dataclass(frozen=True)
class Holder:
    """Who works on an output.

    Attributes:
      token: names this holding.
      host: name of the machine.
      machine: names the machine's present start and its container, so that its process ids mean something.
      pid: the process; 0 where the output is left to a job.
      since: when it began, in UTC.
      job: token of the job that works on it, or empty.
    """

    token: str
    host: str
    machine: str
    pid: int
    since: str
    job: str = ""

    @classmethod
    def this_process(cls) -> "Holder":
        """This process, beginning now."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(uuid.uuid4().hex, socket.gethostname(), _machine(), os.getpid(), since)

    @classmethod
    def parsed(cls, data: bytes) -> "Holder":
        """The holder that an object tells of; one without a name when it is damaged."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return cls("", "an unknown host", "", 0, "an unknown time")

    def encoded(self) -> bytes:
        """As the object's content."""
        return json.dumps(asdict(self), indent=2).encode()

    @property
    def stale_minutes(self) -> float:
        """How long it may be silent."""
        return STALE_MINUTES if self.pid else JOB_STALE_MINUTES

    @property
    def has_died(self) -> bool:
        """Whether it is known to be gone: it was a process of this machine, and is none any more."""
        if not self.pid or self.machine != _machine():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False


class BucketLock:
    """The lock of one output. Not picklable: it belongs to a process.

    Attributes:
      holder: who this lock says that it is.
    """

    def __init__(self, folder: str, output: str) -> None:
        """Takes nothing yet.

        Args:
          folder: url of the folder that holds the lock's object, and those that are signs of life.
          output: what is locked, for the sentence.
        """
        self.holder = Holder.this_process()
        self._objects, self._output = Objects(folder), output
        self._generation: bytes | None = None
        self._turn = threading.Lock()
        self._ended = threading.Event()

    @property
    def held(self) -> bool:
        """Whether this object has the lock, as far as it knows."""
        return self._generation is not None

    def acquire(self, take_over: bool = False) -> None:
        """Takes the lock.

        Args:
          take_over: take it from whoever has it.

        Raises:
          FerryError: another process has it and shows signs of life; or the bucket refuses.
        """
        while not self.held:
            data, generation = self._objects.read_generation(LOCK_NAME)
            if data is not None and not take_over:
                self._refuse_if_alive(Holder.parsed(data))
            self._take(generation)
        self._begin()

    def acquire_left(self, job: str) -> None:
        """Takes the lock that was left to a job; waits while another worker of that job has it.

        Raises:
          FerryError: somebody else has it; or the bucket refuses.
        """
        self.holder = replace(self.holder, job=job)
        while not self.held:
            data, generation = self._objects.read_generation(LOCK_NAME)
            found = Holder.parsed(data) if data is not None else None
            if found and found.job != job:
                self._refuse_if_alive(found)
            elif found and found.pid and not self._may_be_taken(found):
                time.sleep(_WAIT_SECONDS)
                continue
            self._take(generation)
        self._begin()

    def leave(self, job: str) -> None:
        """Leaves the output to a job: the lock stays, and nobody of this process writes it any more."""
        left = replace(self.holder, job=job, pid=0)
        with self._turn:
            self._ended.set()
            self._write(left)

    def forget(self) -> None:
        """Lets the lock stand when this one ends: what it was left to gives it back."""
        with self._turn:
            self._generation = None

    def refuse_if_lost(self) -> None:
        """Looks whether the lock is still this one's.

        Raises:
          FerryError: somebody took it over.
        """
        data, _ = self._objects.read_generation(LOCK_NAME)
        if data is not None and Holder.parsed(data).token == self.holder.token:
            return
        found = _who(Holder.parsed(data)) if data is not None else "no lock any more"
        fix = "Nothing was committed by this one; let the other finish."
        raise FerryError(str(Problem(self._output, "an output that this process alone writes", found, fix)))

    def release(self) -> None:
        """Gives the lock back, if it is still this one's; never raises, as the lock goes stale by itself."""
        with self._turn:
            self._ended.set()
            generation, self._generation = self._generation, None
        if generation is not None:
            try:
                self._objects.replace(LOCK_NAME, None, generation)
            except FerryError:
                return

    def _take(self, generation: bytes) -> None:
        self._generation = self._objects.replace(LOCK_NAME, self.holder.encoded(), generation)
        if self._generation is None:
            self._adopt()

    def _adopt(self) -> None:
        """A write whose answer was lost counts: its repetition is refused by what itself has written."""
        data, generation = self._objects.read_generation(LOCK_NAME)
        if data is not None and Holder.parsed(data) == self.holder:
            self._generation = generation

    def _write(self, holder: Holder) -> None:
        self.holder = holder
        if self._generation is not None:
            self._take(self._generation)

    def _begin(self) -> None:
        self._ended.clear()
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            with self._turn:
                if self._ended.is_set() or self._generation is None:
                    return
                try:
                    self._write(self.holder)
                except FerryError:
                    continue  # a store that is busy for a moment; the next beat comes in time

    def _refuse_if_alive(self, found: Holder) -> None:
        if self._may_be_taken(found):
            return
        fix = (f"Wait for it to end, or stop it: the same command goes on {found.stale_minutes:.0f} minutes after its "
               "last sign of life, or at once with --take-over.")  # fmt: skip
        raise FerryError(str(Problem(self._output, "an output that no other process writes", _who(found), fix)))

    def _may_be_taken(self, found: Holder) -> bool:
        latest = self._objects.newest()
        silent_seconds = (datetime.now(UTC) - latest).total_seconds() if latest else 0.0
        return found.has_died or silent_seconds > 60 * found.stale_minutes


def _who(holder: Holder) -> str:
    if not holder.pid and holder.job:
        return f"a job at work on it, started from {holder.host} at {holder.since}"
    return f"process {holder.pid} of {holder.host} at work on it since {holder.since}"


def _machine() -> str:
    """Names this machine's present start and the namespace of its process ids; or its host name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
