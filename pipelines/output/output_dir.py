"""The output of an export: everything is built in a hidden folder, then moved into place, the index last.

OUTPUT/.tensorferry-export/run.json     which plan this is
OUTPUT/.tensorferry-export/lock         who is at work
OUTPUT/.tensorferry-export/receipts/    what is finished
OUTPUT/.tensorferry-export/files/       the repository that is being built
OUTPUT/.tensorferry-export/commit.json  it is whole: only renames are left
OUTPUT/.tensorferry-export/old/         what --overwrite replaces, until the new one is in place
OUTPUT/*.safetensors, config.json, …    the published repository
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorferry.mappings.export.shards import INDEX_FILE
from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.output.receipts import Receipts
from tensorferry.pipelines.output.replacing import local_files, refuse_to_replace
from tensorferry.pipelines.output.run_dir import RunState
from tensorferry.pipelines.output.run_lock import RunLock
from tensorferry.pipelines.sinks.listing import MANIFEST_NAME
from tensorferry.pipelines.sinks.sink import store_error
from tensorferry.pipelines.storage.kvstores import is_local
from tensorferry.pipelines.storage.local_files import read_json, remove_tree, sync_directory, sync_tree, write_json

STATE_DIR = ".tensorferry-export"


@dataclass
class OutputDir:
    """One export into one local directory.

    Attributes:
      output: the directory that becomes the repository.
      plan_digest: what the run will write; only a run of the same digest may continue it.
      options: told in ``run.json`` for people; not compared.
      overwrite: whether an export that is there may be replaced, at the very end.
      at_step_of_commit: called with the name of each step of the commit before it is done (tests kill there).
    """

    output: Path
    plan_digest: str
    options: Mapping[str, Any] = field(default_factory=dict)
    overwrite: bool = False
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
            old = self._old()
            write_json(self._commit_mark, {"plan_digest": self.plan_digest, "files": names, "old": old})
            self._publish(names, old)
        except OSError as error:
            raise store_error(str(self.output), "the repository published", error) from error

    def _refuse_strangers(self) -> None:
        if self.output.exists() and not self.output.is_dir():
            fix = "Give a directory, or a path that does not exist yet."
            raise FerryError(str(Problem(str(self.output), "a directory", "a file", fix)))
        if self._commit_mark.exists():
            return
        found = local_files(self.output, STATE_DIR)
        if found:
            expected = "an empty or new directory, or an unfinished export"
            refuse_to_replace(str(self.output), found, self._manifest(), self.overwrite, expected)

    def _old(self) -> list[str]:
        """What is replaced, the files that make it a checkpoint first."""
        if not self.overwrite:
            return []
        self._refuse_strangers()  # what came since the start would be moved away with it
        tops = {name.partition("/")[0] for name in local_files(self.output, STATE_DIR)}
        return sorted(tops, key=lambda name: (name not in (INDEX_FILE, MANIFEST_NAME), name))

    def _manifest(self) -> bytes | None:
        path = self.output / MANIFEST_NAME
        return path.read_bytes() if path.is_file() and not path.is_symlink() else None

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
            self._publish(committing["files"], committing.get("old", ()))
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

    def _move_old_aside(self, names: Sequence[str], old: Sequence[str]) -> None:
        """Takes the earlier export away, the files that make it one first; what is published already is not old."""
        for name in old:
            waiting = name not in names or os.path.lexists(self.files_dir / name)
            if waiting and os.path.lexists(self.output / name):
                self._step(f"move old {name} aside")
                (self.state_dir / "old").mkdir(exist_ok=True)
                os.rename(self.output / name, self.state_dir / "old" / name)

    def _publish(self, names: Sequence[str], old: Sequence[str]) -> None:
        self._move_old_aside(names, old)
        for name in names:
            self._step(f"publish {name}")
            if (self.files_dir / name).exists():
                os.rename(self.files_dir / name, self.output / name)
        sync_directory(self.output)
        # The commit mark goes last: while it is there, a rerun knows that the rest is rubbish.
        replaced = ("old",) if (self.state_dir / "old").exists() else ()
        for name in (*replaced, "files", "queue", "receipts", "run.json", "commit.json"):
            self._step(f"remove {name}")
            remove_tree(self.state_dir / name)
        self.close()


def _boot() -> str:
    """Names the time since this machine started: what was written before that may not have reached the disk."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
