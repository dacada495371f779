"""The output directory of a run: hidden until complete, published by one rename, safe to kill at any moment.

    OUTPUT/.tensorferry-0/run.json     which plan this is
    OUTPUT/.tensorferry-0/lock         who is at work
    OUTPUT/.tensorferry-0/receipts/    what is finished
    OUTPUT/.tensorferry-0/step/items/  the checkpoint that is being built
    OUTPUT/.tensorferry-0/commit.json  the checkpoint is whole: only renames are left
    OUTPUT/.tensorferry-0/old/         what --overwrite replaces, until the new one is in place
    OUTPUT/0/                          the published step

The name of the state directory is no step and no temporary step to Orbax, so a trainer on the same directory neither
finds it nor cleans it up.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.output.published import is_whole_step, refuse_to_replace
from tensorferry.pipelines.output.receipts import Receipts
from tensorferry.pipelines.output.run_lock import RunLock
from tensorferry.pipelines.sinks.sink import store_error
from tensorferry.pipelines.storage.kvstores import is_local
from tensorferry.pipelines.storage.local_files import read_json, remove_tree, sync_directory, sync_tree, write_json

RUN_FORMAT = 1


class RunState(Enum):
    """How a run directory was found."""

    FRESH = "fresh"
    RESUMED = "resumed"
    PUBLISHED = "published"  # the same run was killed while it published; that is now finished, nothing is left to do


@dataclass
class RunDir:
    """One conversion into one step of a local output directory.

    Attributes:
      output: the directory that holds (or will hold) the steps.
      plan_digest: what the run will write; only a run of the same digest may continue it.
      options: told in ``run.json`` for people; not compared.
      step: the step number, or the name of its directory where that is more than the number (``0012``).
      item: name of the checkpoint item.
      overwrite: whether a complete Tensorferry checkpoint may be replaced, at the very end.
      at_step_of_commit: called with the name of each step of the commit before it is done (tests kill there).
    """

    output: Path
    plan_digest: str
    options: Mapping[str, Any] = field(default_factory=dict)
    step: int | str = 0
    item: str = "items"
    overwrite: bool = False
    at_step_of_commit: Callable[[str], None] = lambda name: None

    def __post_init__(self) -> None:
        if not is_local(str(self.output)):
            problem = Problem(str(self.output), "a local directory", "a url", "Other stores are not supported yet.")
            raise FerryError(str(problem))
        self.output = Path(os.path.abspath(self.output))
        self._lock = RunLock(self.state_dir / "lock")

    @property
    def state_dir(self) -> Path:
        return self.output / f".tensorferry-{self.step}"

    @property
    def building(self) -> Path:
        """The step's directory while it is being built."""
        return self.state_dir / "step"

    @property
    def item_dir(self) -> Path:
        """Where the sink writes: the item's directory while it is being built."""
        return self.building / self.item

    @property
    def item_root(self) -> str:
        """``item_dir`` as the sink takes it."""
        return str(self.item_dir)

    @property
    def work_dir(self) -> Path:
        """A scratch directory of this machine, there while the run is."""
        return self.state_dir / "queue"

    @property
    def published(self) -> Path:
        """The step's final place."""
        return self.output / str(self.step)

    @property
    def receipts(self) -> Receipts:
        return Receipts(str(self.state_dir / "receipts"))

    @property
    def _old(self) -> Path:
        return self.state_dir / "old"

    @property
    def _commit_mark(self) -> Path:
        return self.state_dir / "commit.json"

    def open(self) -> RunState:
        """Takes the output for this run, finding out what an earlier one left; changes nothing when it refuses.

        Raises:
          FerryError: the output is a file or cannot be written; another live process has it; it holds an unfinished
            run of another plan; the step is complete already; ``overwrite`` would delete what is not ours.
        """
        self._refuse_file()
        self._refuse_complete_unless_committing()
        try:
            self._lock.acquire()
            return self._open_locked()
        except OSError as error:
            self.close()
            raise store_error(str(self.output), "a directory that can be written", error) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets others have the output; what is finished stays for the next run."""
        if self._lock.held:
            self._remove_empty_state()
        self._lock.release()

    def reachable(self, path: str, by_all: bool) -> str:
        """A file of the scratch directory at a place that every worker can read: here they share the file system."""
        return path

    def write_metadata(self, write: Callable[[Path], None], store_format: str) -> None:
        """Puts beside the arrays what is written into a step's directory: straight into it."""
        write(self.building)

    def write_beside(self, name: str, write: Callable[[Path], None]) -> str:
        """Puts a file beside the steps; returns its path."""
        write(self.output / name)
        return str(self.output / name)

    def commit(self) -> None:
        """Publishes the finished step. Everything inside it must have been written before.

        Raises:
          FerryError: the file system refuses; running the same command again finishes the commit.
        """
        try:
            self._mark_success()
            self._step("sync")
            sync_tree(self.building)
            self._step("mark commit")
            write_json(self._commit_mark, {"plan_digest": self.plan_digest})
            self._publish()
        except OSError as error:
            raise store_error(str(self.published), "the checkpoint published", error) from error

    # Opening.

    def _refuse_file(self) -> None:
        for path in (self.output, self.state_dir):
            if path.exists() and not path.is_dir():
                fix = "Give a directory, or a path that does not exist yet."
                raise FerryError(str(Problem(str(path), "a directory", "a file", fix)))

    def _refuse_complete_unless_committing(self) -> None:
        if not self._commit_mark.exists() and os.path.lexists(self.published):
            refuse_to_replace(self.published, self.item, self.overwrite)

    def _open_locked(self) -> RunState:
        committing = read_json(self._commit_mark)
        if committing is not None and not self.building.exists():
            self._remove_state()
            return RunState.PUBLISHED if committing["plan_digest"] == self.plan_digest else self.open()
        earlier = read_json(self.state_dir / "run.json")
        if earlier is not None:
            self._refuse_other_run(earlier)
        if committing is not None:
            self._publish()
            return RunState.PUBLISHED
        self._refuse_complete_unless_committing()
        if earlier is not None:
            return RunState.RESUMED
        self._begin()
        return RunState.FRESH

    def _refuse_other_run(self, earlier: Mapping[str, Any]) -> None:
        if earlier.get("format") != RUN_FORMAT:
            found = f"one of run format {earlier.get('format')}"
            expected = f"an unfinished run of run format {RUN_FORMAT}"
            raise FerryError(str(Problem(str(self.state_dir), expected, found, self._advice())))
        if earlier.get("plan_digest") != self.plan_digest:
            expected = f"an unfinished run of this plan (digest {self.plan_digest})"
            found = f"one of another plan (digest {earlier.get('plan_digest')})"
            raise FerryError(str(Problem(str(self.output), expected, found, self._advice())))

    def _advice(self) -> str:
        return f"Finish that run with its own command, remove {self.state_dir}, or choose another output."

    def _begin(self) -> None:
        # Without run.json this is what a killed worker of a finished run wrote after its end, or a run that was
        # killed before it began: nothing that anybody needs.
        for leaving in (self.building, Path(self.receipts.folder)):
            remove_tree(leaving)
        self.item_dir.mkdir(parents=True)
        Path(self.receipts.folder).mkdir()
        record = {"format": RUN_FORMAT, "plan_digest": self.plan_digest, "options": dict(self.options)}
        write_json(self.state_dir / "run.json", record)

    def _remove_empty_state(self) -> None:
        """A refused or published run leaves no state directory behind; one with anything in it stays."""
        try:
            names = {entry.name for entry in self.state_dir.iterdir()}
            drafts = {name for name in names if name.startswith(".")}  # of a small file, when a kill came between
            if names - drafts <= {"lock"}:
                for name in names:
                    (self.state_dir / name).unlink(missing_ok=True)
                self.state_dir.rmdir()
        except OSError:
            return

    # Committing. Every step may be the last one of a killed process; ``_publish`` starts over from any of them.

    def _step(self, name: str) -> None:
        self.at_step_of_commit(name)

    def _mark_success(self) -> None:
        """The empty-handed reader's sign that a step is final: the same files that Orbax writes."""
        for folder, final in ((self.item_dir, self.published / self.item), (self.building, self.published)):
            self._step(f"mark {folder.name} successful")
            (folder / "commit_success.txt").write_text(f"Checkpoint commit was successful to {final}")

    def _publish(self) -> None:
        if self.building.exists():
            self._move_old_aside()
            self._step("publish")
            os.rename(self.building, self.published)
            sync_directory(self.output)
        self._remove_state()

    def _move_old_aside(self) -> None:
        if not os.path.lexists(self.published):
            return
        refuse_to_replace(self.published, self.item, self.overwrite)
        self._step("move old aside")
        remove_tree(self._old)
        os.rename(self.published, self._old)

    def _remove_state(self) -> None:
        """The commit mark goes last: while it is there, a rerun knows that the rest is rubbish."""
        if not is_whole_step(self.published, self.item):
            fix = f"Remove {self.state_dir} and run the same command again."
            if self._old.exists():
                fix = f"Rename {self._old} to {self.published} to have the earlier one back. {fix}"
            raise FerryError(str(Problem(str(self.published), "the checkpoint in place", "none", fix)))
        for name in ("old", "receipts", "run.json"):
            self._step(f"remove {name}")
            remove_tree(self.state_dir / name)
        self._step("remove commit mark")
        self._commit_mark.unlink(missing_ok=True)
        self._step("remove state")
        self.close()
