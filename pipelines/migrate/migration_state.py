"""The folder of one run of a migration: records, faults and results; gone when the run has ended well."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tensorferry.mappings.words.problems import PlanError, Problem
from tensorferry.pipelines.engine.beam_args import choose_engine
from tensorferry.pipelines.migrate.migration_options import MigrationOptions
from tensorferry.pipelines.migrate.places import Places
from tensorferry.pipelines.output.bucket_lock import LOCK_NAME, BucketLock
from tensorferry.pipelines.output.run_lock import RunLock
from tensorferry.pipelines.storage.kvstores import is_local
from tensorferry.pipelines.storage.objects import Objects

STATE_NAME = ".tensorferry-migrate"


@dataclass(frozen=True)
class State:
    """Where this run keeps things.

    Attributes:
      places: what workers need to know.
      work: a folder of this machine, for Beam's log and progress.
    """

    places: Places
    work: Path


@contextmanager
def run_state(options: MigrationOptions) -> Iterator[State]:
    """The state of a run: in the output where workers share it, else in a temporary folder.

    A run that was killed needs nothing of it: its receipts are with the steps.

    Raises:
      PlanError: the output cannot be written.
      FerryError: another process is at work on it.
    """
    if options.dry_run:
        with _temporary_state(options) as state:
            yield state
    elif not is_local(options.output):
        with _locked(options), _temporary_state(options) as state:
            yield state
    else:
        with _state_in(Path(options.output, STATE_NAME), options) as state:
            yield state


@contextmanager
def _locked(options: MigrationOptions) -> Iterator[None]:
    """Keeps other processes from an output in a bucket; removes what a killed one left."""
    home = f"{options.output.rstrip('/')}/{STATE_NAME}"
    lock = BucketLock(home, options.output)
    lock.acquire(options.take_over)
    try:
        leavings = Objects(home)
        leavings.delete_all(name for name in leavings.sizes() if name != LOCK_NAME)
        yield
    finally:
        lock.release()


@contextmanager
def _temporary_state(options: MigrationOptions) -> Iterator[State]:
    work = Path(tempfile.mkdtemp(prefix="tensorferry-"))
    is_shared = not (options.dry_run or choose_engine(options.beam_args).is_local)
    home = f"{options.output}/{STATE_NAME}" if is_shared else str(work)
    places = _fresh(options, home)
    yield State(places, work)  # when this raises, the log in it is what the message points at
    if is_shared:
        objects = Objects(places.state)
        objects.delete_all(objects.sizes())
    shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _state_in(home: Path, options: MigrationOptions) -> Iterator[State]:
    lock = RunLock(home / "lock")
    try:
        lock.acquire()
    except OSError as error:
        fix = "Give a directory that can be written."
        problem = Problem(options.output, "a directory for the converted runs", str(error.strerror or error), fix)
        raise PlanError([problem]) from error
    try:
        _remove_earlier(home)
        places = _fresh(options, str(home))
        yield State(places, Path(places.state))
        shutil.rmtree(home, ignore_errors=True)
    finally:
        lock.release()


def _fresh(options: MigrationOptions, home: str) -> Places:
    # A name of its own: what worker processes keep in memory is known by its path.
    places = Places(options.output, f"{home}/run-{uuid.uuid4().hex[:12]}")
    if is_local(home):
        for folder in (places.records, places.faults.folder, places.results.folder):
            os.makedirs(folder)
    return places


def _remove_earlier(home: Path) -> None:
    for entry in home.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
