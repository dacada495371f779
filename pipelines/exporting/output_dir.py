"""The output of an export: everything is built in a hidden folder, then moved into place, the index last.

OUTPUT/.tensorferry-export/run.json     which plan this is
OUTPUT/.tensorferry-export/lock         who is at work
OUTPUT/.tensorferry-export/receipts/    what is finished
OUTPUT/.tensorferry-export/files/       the repository that is being built
OUTPUT/.tensorferry-export/commit.json  it is whole: only renames are left
OUTPUT/*.safetensors, config.json, …    the published repository
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mappings.problems import FerryError, Problem
from pipelines.kvstores import is_local
from pipelines.receipts import Receipts
from pipelines.run_dir import RunState
from pipelines.run_files import read_json, remove_tree, sync_directory, sync_tree, write_json
from pipelines.run_lock import RunLock
from pipelines.sink import store_error

STATE_DIR = ".tensorferry-export"
_SHOWN = 5


@dataclass
class OutputDir:
    """One export into one local directory.

    Attributes:
      output: the directory that becomes the repository.
      plan_digest: what the run will write; only a run of the same digest may continue it.
      options: told in ``run.json`` for people; not compared.
      at_step_of_commit: called with the name of each step of the commit before it is done (tests kill there).
    """

    output: Path
    plan_digest: str
    options: Mapping[str, Any] = field(default_factory=dict)
    at_step_of_commit: Callable[[str], None] = lambda name: None
    rebooted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not is_local(str(self.output)):
            fix = "Export to a local or mounted folder, then copy it."
            raise FerryError(str(Problem(str(self.output), "a local directory (--output)", "a URL", fix)))
        self.output = Path(os.path.abspath(self.output))
        self._lock = RunLock(self.state_dir / "lock")

    @property
    def state_dir(self) -> Path:
        return self.output / STATE_DIR

    @property
    def files_dir(self) -> Path:
        """Where the repository is built."""
        return self.state_dir / "files"

    @property
    def receipts(self) -> Receipts:
        return Receipts(str(self.state_dir / "receipts"))

    @property
    def _commit_mark(self) -> Path:
        return self.state_dir / "commit.json"

    def open(self) -> RunState:
        """Takes the output for this run; changes nothing when it refuses.

        Raises:
          FerryError: the output holds anything but an unfinished run of this plan, or another process has it.
        """
        try:
            self._refuse_strangers()
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
        if self._lock.held and self.state_dir.is_dir() and {p.name for p in self.state_dir.iterdir()} <= {"lock"}:
            remove_tree(self.state_dir)
        self._lock.release()

    def commit(self, last: str) -> None:
        """Publishes what was built.

        Args:
          last: the file that makes it a checkpoint to readers: the index, or the only shard.

        Raises:
          FerryError: the file system refuses; the same command finishes the commit.
        """
        try:
            self._step("sync")
            sync_tree(self.files_dir)
            names = sorted((path.name for path in self.files_dir.iterdir()), key=lambda name: (name == last, name))
            self._step("mark commit")
            write_json(self._commit_mark, {"plan_digest": self.plan_digest, "files": names})
            self._publish(names)
        except OSError as error:
            raise store_error(str(self.output), "the repository published", error) from error

    def _refuse_strangers(self) -> None:
        if self.output.exists() and not self.output.is_dir():
            fix = "Give a directory, or a path that does not exist yet."
            raise FerryError(str(Problem(str(self.output), "a directory", "a file", fix)))
        if self._commit_mark.exists():
            return
        found = sorted(p.name for p in self.output.iterdir()) if self.output.is_dir() else []
        others = [name for name in found if name != STATE_DIR]
        if others:
            shown = ", ".join(others[:_SHOWN]) + (" …" if len(others) > _SHOWN else "")
            fix = "Nothing is ever overwritten; choose another output."
            expected = "an empty or new directory, or an unfinished export"
            raise FerryError(str(Problem(str(self.output), expected, shown, fix)))

    def _open_locked(self) -> RunState:
        committing = read_json(self._commit_mark)
        earlier = read_json(self.state_dir / "run.json")
        known = committing or earlier
        if known is not None and known.get("plan_digest") != self.plan_digest:
            expected = f"an unfinished export of this plan (digest {self.plan_digest[:16]})"
            fix = f"Finish that one with its own command, remove {self.state_dir}, or choose another output."
            found = f"one of another plan (digest {str(known.get('plan_digest'))[:16]})"
            raise FerryError(str(Problem(str(self.output), expected, found, fix)))
        if committing is not None:
            self._publish(committing["files"])
            return RunState.PUBLISHED
        if earlier is not None:
            self.rebooted = earlier.get("boot") != _boot()
            return RunState.RESUMED
        self._begin()
        return RunState.FRESH

    def _begin(self) -> None:
        for leaving in (self.files_dir, Path(self.receipts.folder)):
            remove_tree(leaving)
        self.files_dir.mkdir(parents=True)
        Path(self.receipts.folder).mkdir()
        record = {"plan_digest": self.plan_digest, "options": dict(self.options), "boot": _boot()}
        write_json(self.state_dir / "run.json", record)

    def _step(self, name: str) -> None:
        self.at_step_of_commit(name)

    def _publish(self, names: Sequence[str]) -> None:
        for name in names:
            self._step(f"publish {name}")
            if (self.files_dir / name).exists():
                os.rename(self.files_dir / name, self.output / name)
        sync_directory(self.output)
        # The commit mark goes last: while it is there, a rerun knows that the rest is rubbish.
        for name in ("files", "work", "receipts", "run.json", "commit.json"):
            self._step(f"remove {name}")
            remove_tree(self.state_dir / name)
        self.close()


def _boot() -> str:
    """Names the time since this machine started: what was written before that may not have reached the disk."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
