"""The output of an export in a bucket, where nothing can be renamed: whole objects, the one that counts last.

OUTPUT/.tensorferry-export/lock.json   who works on it
OUTPUT/.tensorferry-export/run.json    which plan this is
OUTPUT/.tensorferry-export/receipts/   which files are finished
OUTPUT/.tensorferry-export/queue/      the work, for workers elsewhere
OUTPUT/*.safetensors                   files, each whole or not there
OUTPUT/config.json, …                  written when all of them are there, the index last
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tensorferry.mappings.export.shards import INDEX_FILE
from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.output.bucket_lock import LOCK_NAME, BucketLock
from tensorferry.pipelines.output.bucket_receipts import BucketReceipts
from tensorferry.pipelines.output.replacing import refuse_to_replace
from tensorferry.pipelines.output.run_dir import RunState
from tensorferry.pipelines.sinks.listing import MANIFEST_NAME
from tensorferry.pipelines.storage.objects import Objects

STATE = ".tensorferry-export"
_RUN = "run.json"


@dataclass
class OutputBucket:
    """One export into one place of a bucket.

    Attributes:
      output: ``gs://bucket/path`` that becomes the repository.
      plan_digest: what the run will write; only a run of the same digest may continue it.
      options: told in ``run.json`` for people; not compared.
      take_over: whether to take the lock from whoever has it.
      job: token of the job that this commit is a part of; empty for a launcher.
      overwrite: whether an export that is there may be replaced; it is deleted before the new one is written.
      at_step_of_commit: called with the name of each step of the commit before it is done (tests kill there).
    """

    output: str
    plan_digest: str
    options: Mapping[str, Any] = field(default_factory=dict)
    take_over: bool = False
    overwrite: bool = False
    job: str = ""
    at_step_of_commit: Callable[[str], None] = lambda name: None

    @property
    def files(self) -> Objects:
        return Objects(self.output.rstrip("/"))

    @property
    def state(self) -> Objects:
        return Objects(f"{self.files.url}/{STATE}")

    @property
    def receipts(self) -> BucketReceipts:
        return BucketReceipts(f"{self.state.url}/receipts")

    @cached_property
    def _lock(self) -> BucketLock:
        return BucketLock(self.state.url, self.output)

    def open(self) -> RunState:
        """Takes the output for this run; changes nothing when it refuses.

        Raises:
          FerryError: another process is at work on it; it holds anything but an unfinished run of this plan; the
            bucket refuses.
        """
        try:
            if self.job:
                self._lock.acquire_left(self.job)
            else:
                self._lock.acquire(self.take_over)
            return self._open_locked()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets others have the output; what is finished stays for the next run."""
        self._lock.release()

    def leave_to(self, job: str) -> None:
        """Leaves the output to a job, whose last step commits."""
        self._lock.leave(job)

    def keep_left(self) -> None:
        """Lets the job have the output although this process ends."""
        self._lock.forget()

    def sizes(self) -> dict[str, int]:
        """The files that are there, whole."""
        return {name: size for name, size in self.files.sizes().items() if not name.startswith(f"{STATE}/")}

    def reachable(self, lines: str) -> str:
        """Puts the work where every worker can read it; its URL."""
        self.state.write("queue/items.jsonl", lines.encode())
        return f"{self.state.url}/queue/items.jsonl"

    def commit(self, small: Mapping[str, bytes], last: str) -> None:
        """Publishes the finished files.

        Args:
          small: everything that is no shard.
          last: the one that makes it a checkpoint to readers.

        Raises:
          FerryError: the bucket refuses, or somebody took the output over; the same command finishes the commit.
        """
        self._lock.refuse_if_lost()
        for name in sorted(small, key=lambda name: (name == last, name)):
            self.at_step_of_commit(f"write {name}")
            self.files.write(name, small[name])
        self._remove_state()

    def _remove_state(self) -> None:
        """The run's record goes last: while it is there, a rerun knows that the files are its own."""
        self.at_step_of_commit("remove receipts")
        self.state.delete_all([name for name in self.state.sizes() if name not in (_RUN, LOCK_NAME)])
        self.at_step_of_commit("remove run.json")
        self.state.delete(_RUN)

    def _open_locked(self) -> RunState:
        earlier = self._earlier()
        if earlier is None and self.job and self._is_ours():
            self._remove_state()  # what an engine's second attempt has written since
            return RunState.PUBLISHED
        if earlier is None:
            self._refuse_strangers()
            record = {"plan_digest": self.plan_digest, "options": dict(self.options)}
            self.state.delete_all([name for name in self.state.sizes() if name != LOCK_NAME])
            self.state.write(_RUN, json.dumps(record, indent=2, sort_keys=True).encode())
            return RunState.FRESH
        if earlier != self.plan_digest:
            fix = f"Finish that one with its own command, remove {self.state.url}, or choose another output."
            expected = f"an unfinished export of this plan (digest {self.plan_digest[:16]})"
            found = f"one of another plan (digest {earlier[:16]})"
            raise FerryError(str(Problem(self.output, expected, found, fix)))
        return RunState.RESUMED

    def _is_ours(self) -> bool:
        """Whether an export of this plan is in place: another worker of the job has committed it."""
        try:
            told = json.loads(self.files.read(MANIFEST_NAME) or b"{}")
            return told["plan_digest"] == self.plan_digest
        except (ValueError, KeyError, TypeError):
            return False

    def _earlier(self) -> str | None:
        """The digest of the run that has begun here."""
        data = self.state.read(_RUN)
        if data is None:
            return None
        try:
            return str(json.loads(data)["plan_digest"])
        except (ValueError, KeyError, TypeError):
            return ""

    def _refuse_strangers(self) -> None:
        """Refuses what is there; with ``overwrite`` an earlier export goes, its manifest last."""
        found = self.sizes()
        if found:
            expected = "an empty place, or an unfinished export of this plan"
            refuse_to_replace(self.output, found, self.files.read(MANIFEST_NAME), self.overwrite, expected)
            self.files.delete_all([name for name in found if name == INDEX_FILE])
            self.files.delete_all([name for name in found if name not in (INDEX_FILE, MANIFEST_NAME)])
            self.files.delete(MANIFEST_NAME)
