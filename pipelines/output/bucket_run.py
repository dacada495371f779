"""A run's output in a bucket, where nothing can be renamed: data goes to its final place, and a mark makes it count.

    OUTPUT/.tensorferry-0/lock.json    who works on it
    OUTPUT/.tensorferry-0/run.json     which plan this is
    OUTPUT/.tensorferry-0/receipts/    what is finished
    OUTPUT/.tensorferry-0/queue/       the work items, for workers elsewhere
    OUTPUT/0/items/                    the checkpoint that is being built
    OUTPUT/0/items/commit_success.txt  the item is whole
    OUTPUT/0/commit_success.txt        the step is whole: Orbax takes no step of a bucket without it

Without the lock, which a migration does not take for each step, two runs of one plan write the same bytes, and a run of
another plan is refused.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.output.bucket_lock import LOCK_NAME, BucketLock
from tensorferry.pipelines.output.bucket_receipts import BucketReceipts
from tensorferry.pipelines.output.run_dir import RUN_FORMAT, RunState
from tensorferry.pipelines.sinks.listing import MANIFEST_NAME
from tensorferry.pipelines.sinks.ocdbt import copy_values
from tensorferry.pipelines.storage.objects import Objects

_MARK = "commit_success.txt"
_RUN = "run.json"


@dataclass
class BucketRun:
    """One conversion into one step of an output in a bucket. The interface is that of `RunDir`.

    Attributes:
      output: ``gs://bucket/path`` that holds (or will hold) the steps.
      plan_digest: what the run will write; only a run of the same digest may continue it.
      options: told in ``run.json`` for people; not compared.
      step: the step number.
      item: name of the checkpoint item.
      overwrite: whether a complete Tensorferry checkpoint may be replaced. It is deleted first: a bucket has no
        second place to build the new one.
      locked: whether no other process may work on the same step.
      take_over: whether to take the lock from whoever has it.
      job: token of the job that this commit is a part of; empty for a launcher.
      at_step_of_commit: called with the name of each step of the commit before it is done (tests kill there).
    """

    output: str
    plan_digest: str
    options: Mapping[str, Any] = field(default_factory=dict)
    step: int | str = 0
    item: str = "items"
    overwrite: bool = False
    locked: bool = False
    take_over: bool = False
    job: str = ""
    at_step_of_commit: Callable[[str], None] = lambda name: None

    def __post_init__(self) -> None:
        self.output = self.output.rstrip("/")

    @property
    def state(self) -> Objects:
        return Objects(f"{self.output}/.tensorferry-{self.step}")

    @property
    def state_dir(self) -> str:
        return self.state.url

    @property
    def published(self) -> str:
        """The step's place, before and after the commit."""
        return f"{self.output}/{self.step}"

    @property
    def item_root(self) -> str:
        """Where the sink writes."""
        return f"{self.published}/{self.item}"

    @property
    def receipts(self) -> BucketReceipts:
        return BucketReceipts(f"{self.state.url}/receipts")

    @cached_property
    def work_dir(self) -> Path:
        """A scratch directory of this machine."""
        return Path(tempfile.mkdtemp(prefix="tensorferry-"))

    @cached_property
    def _lock(self) -> BucketLock:
        return BucketLock(self.state.url, self.published)

    def open(self) -> RunState:
        """Takes the output for this run; changes nothing when it refuses.

        Raises:
          FerryError: another process is at work on it; it holds an unfinished run of another plan; the step is
            complete already; there is something that is not ours; the bucket refuses.
        """
        try:
            if self.job:
                self._lock.acquire_left(self.job)
            elif self.locked:
                self._lock.acquire(self.take_over)
            return self._open_locked()
        except BaseException:
            self.close()
            raise

    def leave_to(self, job: str) -> None:
        """Leaves the output to a job, whose last step commits."""
        self._lock.leave(job)

    def keep_left(self) -> None:
        """Lets the job have the output although this process ends."""
        self._lock.forget()

    def _open_locked(self) -> RunState:
        earlier, names = self._earlier(), set(Objects(self.published).sizes())
        if earlier is not None:
            self._refuse_other_run(earlier)
            if _MARK in names and not earlier.get("replacing"):
                self._remove_state()
                return RunState.PUBLISHED
        elif self.job and self._is_ours(names):
            self._remove_state()  # what an engine's second attempt has written since
            return RunState.PUBLISHED
        else:
            self._refuse_step(names)
        if earlier is None or earlier.get("replacing"):
            self._begin(names)
            return RunState.FRESH
        return RunState.RESUMED

    def close(self) -> None:
        """Lets others have the output; removes the scratch directory when nothing in it explains a failure."""
        self._lock.release()
        if "work_dir" in self.__dict__ and not (self.work_dir / "beam.log").exists():
            shutil.rmtree(self.work_dir, ignore_errors=True)

    def refuse_full(self, _needed_bytes: int) -> None:
        """A bucket is never full."""

    def reachable(self, path: str, by_all: bool) -> str:
        """A file of the scratch directory at a place that every worker can read.

        Args:
          path: the local file.
          by_all: whether workers run on other machines.
        """
        if not by_all:
            return path
        name = f"queue/{Path(path).name}"
        self.state.write(name, Path(path).read_bytes())
        return f"{self.state.url}/{name}"

    def write_metadata(self, write: Callable[[Path], None], store_format: str) -> None:
        """Puts beside the arrays what is written into a step's directory.

        Orbax's own code writes it on this machine, and the files are copied: that needs no file layer for buckets.

        Args:
          write: writes into the given local directory of the step.
          store_format: ``zarr3``, ``ocdbt`` or ``zarr2``.
        """
        with tempfile.TemporaryDirectory(prefix="tensorferry-") as scratch:
            step = Path(scratch, str(self.step))
            (step / self.item).mkdir(parents=True)
            write(step)
            if store_format == "ocdbt":
                copy_values(str(step / self.item), self.item_root)
                _drop_database(step / self.item)
            for path in sorted(step.rglob("*")):
                if path.is_file():
                    Objects(self.published).write(path.relative_to(step).as_posix(), path.read_bytes())

    def write_beside(self, name: str, write: Callable[[Path], None]) -> str:
        """Puts a file beside the steps; returns its url."""
        with tempfile.TemporaryDirectory(prefix="tensorferry-") as scratch:
            write(Path(scratch, name))
            Objects(self.output).write(name, Path(scratch, name).read_bytes())
        return f"{self.output}/{name}"

    def commit(self) -> None:
        """Marks the finished step. Everything inside it must have been written before.

        Raises:
          FerryError: the bucket refuses; running the same command again finishes the commit.
        """
        if self._lock.held:
            self._lock.refuse_if_lost()
        for url in (self.item_root, self.published):
            self.at_step_of_commit(f"mark {url.rsplit('/', 1)[-1]} successful")
            Objects(url).write(_MARK, f"Checkpoint commit was successful to {url}".encode())
        self._remove_state()
        shutil.rmtree(self.work_dir, ignore_errors=True)

    def _earlier(self) -> dict[str, Any] | None:
        data = self.state.read(_RUN)
        if data is None:
            return None
        try:
            record = json.loads(data)
        except ValueError:
            record = None
        return record if isinstance(record, dict) else {}

    def _refuse_other_run(self, earlier: Mapping[str, Any]) -> None:
        wanted = (RUN_FORMAT, self.plan_digest)
        found = (earlier.get("format"), earlier.get("plan_digest"))
        if found == wanted:
            return
        fix = f"Finish that run with its own command, remove {self.state.url}, or choose another output."
        expected = f"an unfinished run of this plan (digest {self.plan_digest})"
        raise FerryError(str(Problem(self.output, expected, f"one of another plan (digest {found[1]})", fix)))

    def _is_ours(self, names: set[str]) -> bool:
        """Whether the step is complete and of this plan: another worker of the job has committed it."""
        if _MARK not in names:
            return False
        manifest = json.loads(Objects(self.item_root).read(MANIFEST_NAME) or b"{}")
        return self.plan_digest.startswith(f"{manifest.get('plan_digest')}-")

    def _refuse_step(self, names: set[str]) -> None:
        if not names:
            return
        if f"{self.item}/{MANIFEST_NAME}" not in names or _MARK not in names:
            found = "something that is not a complete Tensorferry checkpoint"
            fix = "It is never overwritten; choose another output or move it away yourself."
            raise FerryError(str(Problem(self.published, "nothing there", found, fix)))
        if not self.overwrite:
            fix = "Choose another output, or pass --overwrite: in a bucket the old one is deleted first."
            raise FerryError(str(Problem(self.published, "no checkpoint yet", "a complete checkpoint", fix)))

    def _begin(self, names: set[str]) -> None:
        """Notes the run, then clears the place; killed in between, the same run clears it again."""
        record = {"format": RUN_FORMAT, "plan_digest": self.plan_digest, "options": dict(self.options)}
        if names:
            self.state.write(_RUN, json.dumps({**record, "replacing": True}).encode())
            marks = [name for name in names if name.endswith(_MARK)]
            Objects(self.published).delete_all(marks)
            Objects(self.published).delete_all(names - set(marks))
        self.state.delete_all(self._leavings())
        self.state.write(_RUN, json.dumps(record, indent=2, sort_keys=True).encode())

    def _remove_state(self) -> None:
        """The run's record goes last: while it is there, a rerun knows that the rest is rubbish."""
        self.at_step_of_commit("remove receipts")
        self.state.delete_all(self._leavings())
        self.at_step_of_commit("remove run.json")
        self.state.delete_all([_RUN])

    def _leavings(self) -> list[str]:
        return [name for name in self.state.sizes() if name not in (_RUN, LOCK_NAME)]


def _drop_database(item: Path) -> None:
    """Leaves only Orbax's metadata: the values of its database are in that of the item by now."""
    (item / "manifest.ocdbt").unlink(missing_ok=True)
    for folder in (item / "d", *item.glob("ocdbt.process_*")):
        shutil.rmtree(folder, ignore_errors=True)
