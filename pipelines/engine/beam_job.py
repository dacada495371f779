"""The pipeline: references to work items go in, one tally comes out.

Every step has a single output, for tagged outputs come out wrong on some engines. The tally follows the
work, for the local engine would not notice a worker that dies in a last step.
"""

import json
import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import apache_beam as beam
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.engine.progress import Slot
from tensorferry.pipelines.engine.stop_flag import StopFlag
from tensorferry.pipelines.engine.stretches import Stretch, open_plan
from tensorferry.pipelines.engine.tally import Failure, Tally
from tensorferry.pipelines.storage.kvstores import worker_environment

if TYPE_CHECKING:
    from tensorferry.pipelines.engine.runner import Work


class ReadItems(beam.DoFn):
    """Yields the lines of a stretch, one work item each."""

    def process(self, stretch: Stretch) -> Iterator[bytes]:
        path, offset, length = stretch
        with open_plan(path) as file:
            file.seek(offset)
            while length > 0:
                line = file.readline()
                if not line:
                    raise FerryError(f"{path} ends {length} bytes too early; was it changed during the run?")
                length -= len(line)
                yield line


class Ferry(beam.DoFn):
    """Does one work item and says how it went: `{"ok": True, …}`, `{"ok": False, …}` or `{"skipped": True}`.

    The first failure raises the run's stop flag, so that a full disk is not found out a thousand times.
    """

    def __init__(self, work: "Work", stop: StopFlag, engine_retries: bool) -> None:
        """Takes what every worker needs.

        Args:
          work: what to do with an item.
          stop: tells that no item should be started any more.
          engine_retries: whether the engine retries what raises; then only foreseeable faults are records.
        """
        self._work = work
        self._stop = stop
        self._engine_retries = engine_retries
        self._environment = worker_environment()
        self._broken: Exception | None = None
        self._slot: Slot | None = None

    def setup(self) -> None:
        os.environ.update(self._environment)
        self._slot = Slot(self._stop.directory)
        try:
            self._work.setup()
        except Exception as error:
            self._broken = error

    def teardown(self) -> None:
        if self._slot:
            self._slot.close()

    def process(self, line: bytes) -> Iterator[dict[str, Any]]:
        if self._stop.is_set():
            yield {"skipped": True}
            return
        item = json.loads(line)
        try:
            yield self._ferry(item)
        except Exception as error:
            if self._engine_retries and not isinstance(error, FerryError):
                raise
            self._stop.set()
            yield {"ok": False, "failure": _failure(item, error)}

    def _ferry(self, item: dict[str, Any]) -> dict[str, Any]:
        if self._broken:
            raise self._broken
        with self._slot.counting() if self._slot else nullcontext():
            receipt = self._work(item)
        nbytes = int(receipt.get("bytes", 0))
        if self._slot:
            self._slot.finish(nbytes)
        return {"ok": True, "bytes": nbytes, "peak_rss_bytes": peak_rss_bytes()}


def peak_rss_bytes() -> int:
    """The largest resident set this process has had, mapped file pages included."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def _failure(item: dict[str, Any], error: Exception) -> Failure:
    trace = "" if isinstance(error, FerryError) else "".join(traceback.format_exception(error))
    return Failure(str(item.get("id", "?")), type(error).__name__, _sentence(error), trace)


def _sentence(error: Exception) -> str:
    if isinstance(error, FerryError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, MemoryError):
        return "out of memory; a smaller --worker-memory-bytes or fewer workers need less"
    return f"{type(error).__name__}: {error}"


def _tally_of(record: dict[str, Any]) -> Tally:
    if "skipped" in record:
        return Tally(skipped=1)
    if not record["ok"]:
        return Tally(failed=1, failures=(record["failure"],))
    return Tally(done=1, done_bytes=record["bytes"], peak_rss_bytes=record["peak_rss_bytes"])


class AddUp(beam.CombineFn):
    """Adds records up to one tally."""

    def create_accumulator(self) -> Tally:
        return Tally()

    def add_input(self, accumulator: Tally, record: dict[str, Any]) -> Tally:
        return accumulator.plus(_tally_of(record))

    def merge_accumulators(self, accumulators: Iterable[Tally]) -> Tally:
        total = Tally()
        for accumulator in accumulators:
            total = total.plus(accumulator)
        return total

    def extract_output(self, accumulator: Tally) -> Tally:
        return accumulator


class KeepTally(beam.DoFn):
    """Writes the tally where the launcher will look for it: no engine gives values back the same way. Passes it on."""

    def __init__(self, path: str) -> None:
        self._path = path

    def process(self, tally: Tally) -> Iterator[Tally]:
        data = json.dumps(tally.as_dict()).encode()
        if "://" in self._path:
            _write_object(self._path, data)
        else:
            _write_file(self._path, data)
        yield tally


class Commit(beam.DoFn):
    """The job's last step, for one element: commits when every item is done."""

    def __init__(self, commit: Callable[[], None], is_watched: bool) -> None:
        """Takes what every worker needs.

        Args:
          commit: may be called again, and by two workers at once.
          is_watched: whether a launcher waits, which tells of failures better than the engine.
        """
        self._commit = commit
        self._is_watched = is_watched
        self._environment = worker_environment()

    def setup(self) -> None:
        os.environ.update(self._environment)

    def process(self, tally: Tally) -> Iterator[int]:
        if not tally.failed and not tally.skipped:
            self._commit()
        elif not self._is_watched:
            raise FerryError(tally.failures_text(tally.seen))
        yield tally.done


def _write_file(path: str, data: bytes) -> None:
    unfinished = f"{path}.{os.getpid()}.tmp"
    with open(unfinished, "wb") as file:
        file.write(data)
    os.replace(unfinished, path)


def _write_object(path: str, data: bytes) -> None:
    from tensorferry.pipelines.storage.objects import Objects

    folder, _, name = path.rpartition("/")
    Objects(folder).write(name, data)


def build(
    stretches: Iterable[Stretch], ferry: Ferry, tally_path: str, reshuffle: bool, commit: Commit | None = None
) -> Callable[[beam.Pipeline], None]:
    """The pipeline's graph.

    Args:
      stretches: the work items; without `reshuffle` each stretch is the share of one worker.
      ferry: does the work.
      tally_path: where the tally goes.
      reshuffle: whether the engine deals single work items to its workers.
      commit: the last step, of a job that commits by itself.
    """

    def apply(pipeline: beam.Pipeline) -> None:
        items = (
            pipeline
            | "Work items" >> beam.Create(list(stretches), reshuffle=not reshuffle)
            | "Read items" >> beam.ParDo(ReadItems())
        )
        if reshuffle:
            items |= "Deal items" >> beam.Reshuffle()
        tally = (
            items
            | "Ferry" >> beam.ParDo(ferry)
            | "Add up" >> beam.CombineGlobally(AddUp()).without_defaults()
            | "Keep tally" >> beam.ParDo(KeepTally(tally_path))
        )
        if commit:
            _ = tally | "Commit" >> beam.ParDo(commit)

    return apply


def read_tally(path: str) -> Tally:
    """Reads what `KeepTally` wrote."""
    with open_plan(path) as file:
        return Tally.from_dict(json.loads(file.read()))
