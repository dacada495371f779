"""The work that ends a step: compare what was written with the plan, write Orbax's metadata, publish."""

import json
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tensorferry.mappings.tunix.step_plan import SECTIONS
from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.migrate.copy_items import CopyItem, Part, load_items
from tensorferry.pipelines.migrate.orbax_tree import mark_value, nested
from tensorferry.pipelines.migrate.places import Form, Places, Run
from tensorferry.pipelines.migrate.step_reader import ReadFault
from tensorferry.pipelines.migrate.step_record import Counts, StepRecord
from tensorferry.pipelines.orbax.orbax_metadata import write_step_metadata, write_tree_metadata
from tensorferry.pipelines.orbax.step_discovery import STEP_METADATA
from tensorferry.pipelines.output.manifest import versions
from tensorferry.pipelines.output.run_dir import RunState
from tensorferry.pipelines.sinks.listing import MANIFEST_NAME, stored_keys
from tensorferry.pipelines.sinks.sink import ChunkError, Sink, store_error
from tensorferry.pipelines.storage.local_files import write_json
from tensorferry.pipelines.storage.tree_store import TreeStore, open_tree
from tensorferry.transforms.digest import combine
from tensorferry.transforms.statistics import Statistics

MIGRATION_FORMAT = 1

# Orbax keeps an event loop and global registries; the threads of one worker take turns.
_orbax = threading.Lock()

Receipt = Mapping[str, Any]


def is_whole(receipt: Receipt | None, item: CopyItem) -> bool:
    """Whether a receipt tells of exactly the item's parts."""
    told = [(part.get("array"), part.get("grid")) for part in (receipt or {}).get("parts", ())]
    return told == [(part.array.spec.key, list(part.index)) for part in item.parts]


@dataclass(frozen=True)
class Commit:
    """One step whose chunks are all written.

    Attributes:
      source: url of the tree of runs.
      record: the plan.
      items: its work.
      form: how it is stored.
      run: its run directory, open.
    """

    source: str
    record: StepRecord
    items: Sequence[CopyItem]
    form: Form
    run: Run

    def publish(self) -> Counts:
        """Does everything up to the rename; may be run again after a kill.

        Returns:
          Arrays and bytes by section, added up from the receipts.

        Raises:
          ChunkError: a chunk is not there after all; its receipt is forgotten.
          FerryError: the counts are not the plan's, or the store cannot be written.
        """
        receipts = self._receipts()
        chunks = _chunks(receipts)
        counts = self._counts(chunks)
        sink = self.form.sink(self.run, self.record)
        self._check_chunks(sink, receipts, chunks)
        self.run.write_metadata(lambda step: self._write_metadata(step, sink, chunks, counts), sink.store_format)
        self.run.commit()
        return counts

    def _receipts(self) -> dict[str, Receipt]:
        finished = self.run.receipts.finished()
        lost = [item for item in self.items if not is_whole(finished.get(item.id), item)]
        if lost:
            raise FerryError(
                f"{self.record.path}: {len(lost):,} work items left no receipt; run the same command again."
            )
        return {item.id: finished[item.id] for item in self.items}

    def _counts(self, chunks: Mapping[str, list[Receipt]]) -> Counts:
        totals = {section: [0, 0] for section in SECTIONS}
        for array in self.record.arrays:
            totals[array.section][0] += 1
            written = len(chunks.get(array.spec.key, ()))
            totals[array.section][1] += array.spec.nbytes if written == _grid_size(array.spec) else 0
        told: Counts = {section: (count, nbytes) for section, (count, nbytes) in totals.items()}
        told["dropped"] = self.record.counts["dropped"]
        if told != self.record.counts:
            problem = Problem(self.record.path, f"what was planned: {self.record.counts}", str(told), "")
            raise FerryError(str(problem))
        return told

    def _check_chunks(self, sink: Sink, receipts: Mapping[str, Receipt], chunks: Mapping[str, list[Receipt]]) -> None:
        try:
            sink.finalize([array.spec for array in self.record.arrays], [r["attempt"] for r in receipts.values()])
            self._check_moved(sink, chunks)
        except ChunkError as error:
            self._forget(set(error.missing), sink.store_format)
            raise

    def _check_moved(self, sink: Sink, chunks: Mapping[str, list[Receipt]]) -> None:
        """Sizes of moved chunks, which the sink cannot know."""
        if sink.store_format == "ocdbt":
            return
        found = stored_keys(sink.root)
        specs = {array.spec.key: array.spec for array in self.record.arrays}
        for key, parts in chunks.items():
            for part in parts:
                chunk = specs[key].chunk_key(tuple(part["grid"]), sink.store_format)
                if "stored_bytes" in part and found[chunk] not in (None, part["stored_bytes"]):
                    raise ChunkError(f"{chunk}: {found[chunk]} bytes, a torn chunk", [chunk], [])

    def _forget(self, lost: set[str], store_format: str) -> None:
        def key_of(part: Part) -> str:
            return part.array.spec.chunk_key(part.index, store_format)

        for item in self.items:
            if lost & {key_of(part) for part in item.parts}:
                self.run.receipts.discard(item.id)

    def _write_metadata(self, step: Path, sink: Sink, chunks: Mapping[str, list[Receipt]], counts: Counts) -> None:
        record, item = self.record, step / self.run.item
        leaves = [(array.path, array.spec) for array in record.arrays]
        marks = [(path, mark_value(kind)) for path, kind in record.marks]
        impls = {array.spec.key: array.prng_impl for array in record.arrays if array.prng_impl}
        with _orbax:
            write_tree_metadata(item, nested([*leaves, *marks]), sink.store_format, impls)
        store = open_tree(self.source)
        for name in record.copied_items:
            copy_files(store, f"{record.path}/{name}", step / name)
        write_json(item / MANIFEST_NAME, _manifest(self.source, record, self.form, chunks, counts))
        handlers = _handlers(store, record) if record.copied_items else {}
        with _orbax:
            write_step_metadata(step, self.run.item, _custom(self.source, record), None, handlers)


def _grid_size(spec: Any) -> int:
    size = 1
    for count in spec.grid:
        size *= count
    return size


def _chunks(receipts: Mapping[str, Receipt]) -> dict[str, list[Receipt]]:
    """What was written, by array key, in the order of the grid."""
    chunks: dict[str, list[Receipt]] = defaultdict(list)
    for _, receipt in sorted(receipts.items()):
        for part in receipt["parts"]:
            chunks[part["array"]].append(part)
    return chunks


def copy_files(store: TreeStore, folder: str, target: Path) -> None:
    """Copies every file below a folder as it is.

    Raises:
      ReadFault: one cannot be read.
      FerryError: one cannot be written.
    """
    shutil.rmtree(target, ignore_errors=True)
    try:
        files = {name: store.read(f"{folder}/{name}") for name in store.sizes(folder)}
    except OSError as error:
        raise ReadFault(f"{folder}: expected its files to copy; found {error}.") from error
    try:
        for name, content in files.items():
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        raise store_error(str(target), "its files written", error) from error


def _handlers(store: TreeStore, record: StepRecord) -> dict[str, str]:
    """The names of the handlers that the source gives for the items which are copied as files."""
    try:
        handlers = json.loads(store.read(f"{record.path}/{STEP_METADATA}"))["item_handlers"]
        return {name: handlers[name] for name in record.copied_items if isinstance(handlers.get(name), str)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _custom(source: str, record: StepRecord) -> dict[str, Any]:
    origin = {
        "migrated_from": f"{source.rstrip('/')}/{record.path}",
        "source_fingerprint": record.fingerprint,
        "validated": record.check.validated,
        "version": versions().get("tensorferry", ""),
    }
    return {**record.custom_metadata, "tensorferry": origin}


def _manifest(
    source: str, record: StepRecord, form: Form, chunks: Mapping[str, list[Receipt]], counts: Counts
) -> dict[str, Any]:
    return {
        "format": MIGRATION_FORMAT,
        "kind": "migration",
        "plan_digest": record.digest,
        "source": f"{source.rstrip('/')}/{record.path}",
        "source_fingerprint": record.fingerprint,
        **({"source_content": record.content} if record.content else {}),
        "options": dict(form.options()),
        "model": asdict(record.check),
        "counts": {section: {"arrays": count, "bytes": nbytes} for section, (count, nbytes) in counts.items()},
        "arrays": {array.spec.key: _array(array, chunks.get(array.spec.key, [])) for array in record.arrays},
        "without_array": {"/".join(key.name for key in path): kind for path, kind in record.marks},
        "dropped": [asdict(gone) for gone in record.dropped],
        "copied_items": list(record.copied_items),
        "warnings": list(record.warnings),
        "versions": versions(),
    }


def _array(array: Any, parts: Sequence[Receipt]) -> dict[str, Any]:
    spec = array.spec
    told: dict[str, Any] = {
        "source": f"{array.source.item}/{array.source.name}" if array.source else array.constant,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "chunk": list(spec.chunk),
        "moved_as_stored": bool(parts) and all("stored_bytes" in part for part in parts),
    }
    if array.prng_impl:
        told["prng_impl"] = array.prng_impl
    if parts and all("digest" in part for part in parts):
        told["digest"] = combine(part["digest"] for part in parts)
        told["chunk_digests"] = [part["digest"] for part in parts]
    else:
        told["stored_digests"] = [part.get("stored_digest", "") for part in parts]
    if all("statistics" in part for part in parts):
        total = Statistics()
        for part in parts:
            total = total.merge(Statistics.from_json(part["statistics"]))
        told["statistics"] = total.to_json()
    return told


@dataclass(frozen=True)
class CommitWork:
    """`Commit` as Beam carries it; leaves a result for every step, whatever becomes of it.

    Attributes:
      source: url of the tree of runs.
      places: where records, receipts and steps are.
      form: how the new steps are stored.
    """

    source: str
    places: Places
    form: Form

    def setup(self) -> None:
        """Nothing to prepare: Orbax is imported by the first step."""

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        number = item["step"]
        if not self.places.faults.get(str(number)):
            self.places.results.add(str(number), self._result(number))
        return {"bytes": 1}

    def _result(self, number: int) -> dict[str, Any]:
        record, items = load_items(self.places.records, number, self.form.store_format)
        run = self.places.run_dir(record, self.form)
        try:
            if self._is_published(record) or run.open() is RunState.PUBLISHED:
                return {"counts": record.counts}
            try:
                return {"counts": Commit(self.source, record, items, self.form, run).publish()}
            finally:
                run.close()
        except ReadFault as error:
            return {"refused": str(error)}
        except ChunkError as error:
            return {"lost": str(error)}
        except FerryError as error:
            return {"failed": str(error)}
        except OSError as error:
            return {"failed": f"{record.path}: {os.strerror(error.errno or 0)}: {error.filename}"}

    def _is_published(self, record: StepRecord) -> bool:
        """Whether an earlier attempt at this very step got to its end, and only its answer was lost."""
        manifest = self.places.manifest(record.path)
        is_this = manifest is not None and manifest.get("plan_digest") == record.digest
        return is_this and not self.places.is_pending(record.path)
