"""OCDBT: each attempt writes a database of its own, and the commit merges the indexes of those that won.

ROOT/parts/ATTEMPT/d/…              values of a group of work items, and the index of them
ROOT/parts/ATTEMPT/manifest.ocdbt   makes that a database
ROOT/manifest.ocdbt, ROOT/d/…       index of all, pointing into the parts; the arrays' metadata
"""

import shutil
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.rules.chunking import INNER_CHUNK_BYTES
from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.sinks.listing import clear_stale_locks, compare
from tensorferry.pipelines.sinks.ocdbt_index import CONFIG, Entry, encode_leaf, encode_manifest
from tensorferry.pipelines.sinks.sink import (
    PartWriter,
    Sink,
    refuse_not_kept,
    refuse_unaligned,
    store_error,
    valid_attempt_id,
)
from tensorferry.pipelines.sinks.zarr_arrays import (
    array_spec,
    finish_stored_chunk,
    open_for_writing,
    start_stored_chunk,
    take_stored_chunk,
    write_chunk,
    write_metadata,
)
from tensorferry.pipelines.sinks.zarr_metadata import zarr3_metadata
from tensorferry.pipelines.storage.encoding import checksum_is_fast, encode_shard
from tensorferry.pipelines.storage.kvstores import below, is_local, kvstore, new_context, worker_context
from tensorferry.pipelines.storage.streams import PIECE_BYTES, Stream, open_stream, piece_within, stream_bytes

if TYPE_CHECKING:
    import numpy as np
    import tensorstore as ts

# Not ``ocdbt.process_*``: Orbax merges whatever carries that name, the losers' leavings included.
_PARTS = "parts"
_MANIFEST = "manifest.ocdbt"
# How TensorStore begins to tell of an index that is not there, cut off or damaged.
_LOST = ("NOT_FOUND", "OUT_OF_RANGE", "DATA_LOSS")
_MERGED_AT_ONCE = 32


def _database(base: dict[str, Any]) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": base, "path": "", "config": CONFIG}


def _new_database(base: dict[str, Any]) -> dict[str, Any]:
    """A database that is not there yet: its manifest is written once, with the first commit.

    TensorStore would put an empty manifest down first, and an object store takes about one write a second of an object.
    """
    return _database(base) | {"assume_config": True}


def _everything_below(prefix: str) -> "ts.KvStore.KeyRange":
    import tensorstore as ts

    return ts.KvStore.KeyRange(f"{prefix}/", f"{prefix}0")  # '0' follows '/' in ASCII


def _new_transaction() -> "ts.Transaction":
    import tensorstore as ts

    return ts.Transaction()


@dataclass
class OcdbtWriter(PartWriter):
    """Puts encoded chunks into one data file as they come, its index at the end, and the manifest beside it last."""

    sink: "OcdbtSink"
    attempt_id: str
    _file: str = field(default_factory=lambda: f"d/{uuid.uuid4().hex}")
    _entries: list[Entry] = field(default_factory=list)
    _stream: Stream | None = None

    def write(self, spec: ArraySpec, index: tuple[int, ...], array: "np.ndarray") -> None:
        refuse_unaligned(spec, index, array)
        if self.sink.encodes_here:
            self._put(spec, index, lambda stream: encode_shard(spec, array, self.sink.crc32c, stream))
        else:
            encoded = self._encoded(spec, index, array)
            self._put(spec, index, lambda stream: stream.append(encoded))

    def write_stored(self, spec: ArraySpec, index: tuple[int, ...], stored: bytes) -> None:
        refuse_not_kept(self.sink, spec, index, stored)
        self._put(spec, index, lambda stream: stream.append(stored))

    def close(self) -> None:
        if not self._stream:
            return
        stream, leaf = self._stream, encode_leaf(self._file, self._entries)
        manifest = encode_manifest(self._file, stream.nbytes, len(leaf), self._entries)
        try:
            stream.append(leaf)
            stream.close()
        except OSError as error:
            raise store_error(f"part {self.attempt_id}", "its data file written", error) from error
        finish_stored_chunk(_MANIFEST, start_stored_chunk(self._part(), _MANIFEST, manifest, worker_context(), None))

    def abort(self) -> None:
        if self._stream:
            self._stream.abort()

    def _put(self, spec: ArraySpec, index: tuple[int, ...], encode: Callable[[Stream], None]) -> None:
        try:
            stream = self._opened()
            start = stream.nbytes
            encode(stream)
        except OSError as error:
            raise store_error(f"{spec.key} chunk {list(index)}", "the chunk written", error) from error
        key = spec.chunk_key(index, self.sink.store_format)
        self._entries.append(Entry(key, start, stream.nbytes - start))

    def _opened(self) -> Stream:
        if not self._stream:
            url = "/".join((self.sink.root.rstrip("/"), _PARTS, self.attempt_id, self._file))
            self._stream = open_stream(url, self.sink.piece_bytes)
        return self._stream

    def _encoded(self, spec: ArraySpec, index: tuple[int, ...], array: "np.ndarray") -> bytes:
        """The chunk as TensorStore encodes it, by way of its memory."""
        memory = {"driver": "memory", "path": f"{self.attempt_id}/"}
        key = spec.chunk_key(index, self.sink.store_format)
        store = open_for_writing(array_spec(memory, spec, self.sink.array_metadata(spec)), worker_context(), None)
        write_chunk(store, spec, index, array, by_reference=True)
        return take_stored_chunk(memory, key, worker_context())

    def _part(self) -> dict[str, Any]:
        return below(kvstore(self.sink.root), _PARTS, self.attempt_id)


@dataclass(frozen=True)
class OcdbtSink(Sink):
    """Orbax's default form: few objects. Data stays where the parts wrote it; only indexes are merged.

    Attributes:
      beside: values of leaves that are no arrays of the plan, by key: ``finalize`` writes them in the same commit.
      piece_bytes: what is sent to a bucket at once.
    """

    beside: Mapping[str, bytes] = field(default_factory=dict)
    piece_bytes: int = PIECE_BYTES
    store_format: ClassVar[str] = "ocdbt"

    def prepare(self, arrays: Sequence[ArraySpec]) -> None:
        super().prepare(arrays)
        if not is_local(self.root):
            from tensorferry.pipelines.storage.bucket_stream import require_client

            require_client(self.root)

    @property
    def encodes_here(self) -> bool:
        """Whether chunks are encoded piece by piece, and not by TensorStore."""
        return self.compression == "none" and checksum_is_fast()

    @property
    def buffer_bytes(self) -> int:
        return stream_bytes(self.root, self.piece_bytes)

    def within(self, worker_memory_bytes: int) -> "OcdbtSink":
        return replace(self, piece_bytes=piece_within(worker_memory_bytes))

    def encoding_bytes(self, part_bytes: Sequence[int]) -> int:
        """Here an inner chunk is encoded at a time; what TensorStore encodes is whole in its memory, and once more on
        its way to the file. The open file has buffers besides."""
        largest = max(part_bytes, default=0)
        if self.encodes_here:
            return max(largest, min(largest, INNER_CHUNK_BYTES) + self.buffer_bytes)
        return 2 * largest + self.buffer_bytes

    def array_metadata(self, spec: ArraySpec) -> dict[str, Any]:
        return zarr3_metadata(spec, self.compression, self.crc32c, self.kept.get(spec.key, ""))

    def open_part(self, attempt_id: str) -> OcdbtWriter:
        return OcdbtWriter(self, valid_attempt_id(attempt_id))

    def finalize(self, arrays: Sequence[ArraySpec], winners: Sequence[str], scalars: Collection[str] = ()) -> None:
        # Parts must lie below the item and share one context with it, or there is no copy by reference.
        context = new_context()
        clear_stale_locks(self.root)
        self._start_over(context)
        self._refuse_duplicates(winners)
        try:
            self._merge(arrays, winners, context)
        except FerryError:
            raise
        except Exception as error:
            raise store_error(self.root, "the parts' indexes merged", error) from error
        compare(arrays, dict.fromkeys(self._keys(new_context())), self.store_format, scalars)
        self._delete_losers(winners, context)

    def _start_over(self, context: "ts.Context") -> None:
        """Drops the item's own index, which an interrupted commit may have left; the parts are untouched."""
        base = _open_store(kvstore(self.root), context)
        base.write(_MANIFEST, None).result()
        base.delete_range(_everything_below("d")).result()

    def _refuse_duplicates(self, winners: Sequence[str]) -> None:
        # Conflicting keys would merge without a word, so the winners are an explicit list with no two alike.
        if len(set(winners)) != len(winners):
            raise FerryError(str(Problem(self.root, "one winner for each work item", "a part listed twice", "")))

    def _merge(self, arrays: Sequence[ArraySpec], winners: Sequence[str], context: "ts.Context") -> None:
        root = _new_database(kvstore(self.root))
        transaction = _new_transaction()
        target = _open_store(root, context).with_transaction(transaction)
        for start in range(0, len(winners), _MERGED_AT_ONCE):
            window = winners[start : start + _MERGED_AT_ONCE]
            copies = [self._part(winner, context).experimental_copy_range_to(target) for winner in window]
            for copy in copies:
                _finish_copy(copy)
        specs = [array_spec(root, array, self.array_metadata(array)) for array in arrays]
        write_metadata(arrays, specs, context, transaction)
        for key, value in self.beside.items():
            target.write(key, value).result()
        transaction.commit_async().result()

    def _part(self, winner: str, context: "ts.Context") -> "ts.KvStore":
        return _open_store(_database(below(kvstore(self.root), _PARTS, valid_attempt_id(winner))), context)

    def _keys(self, context: "ts.Context") -> list[str]:
        keys = _open_store(_database(kvstore(self.root)), context).list().result()
        return [key.decode() for key in keys]

    def _delete_losers(self, winners: Sequence[str], context: "ts.Context") -> None:
        base = _open_store(kvstore(self.root), context)
        if is_local(self.root):
            stored = {path.name for path in Path(self.root, _PARTS).glob("*")}
        else:
            stored = {key.decode().split("/")[1] for key in base.list(_everything_below(_PARTS)).result()}
        for loser in sorted(stored - set(winners)):
            base.delete_range(_everything_below(f"{_PARTS}/{loser}")).result()
            if is_local(self.root):
                shutil.rmtree(Path(self.root, _PARTS, loser), ignore_errors=True)


def _finish_copy(copy: "ts.Future") -> None:
    """Waits for the copy of a part's index; one that is lost or torn shows as missing chunks."""
    try:
        copy.result()
    except Exception as error:
        if not str(error).startswith(_LOST):
            raise


def read_values(root: str) -> dict[str, bytes]:
    """Every value of an item's database, by key; for databases of few small ones.

    Raises:
      FerryError: the store refuses.
    """
    try:
        source = _open_store(_database(kvstore(root)), new_context())
        return {key.decode(): bytes(source.read(key).result().value) for key in source.list().result()}
    except Exception as error:
        raise store_error(root, "the leaves beside the arrays read", error) from error


def copy_values(source_root: str, target_root: str) -> None:
    """Copies every value of one item's database into another's: the few small ones that Orbax wrote elsewhere.

    Where the target has them already its index is not written again.

    Raises:
      FerryError: the store refuses.
    """
    transaction = _new_transaction()
    try:
        store = _open_store(_database(kvstore(target_root)), new_context())
        wanted = read_values(source_root).items()
        new = {key: value for key, value in wanted if store.read(key).result().value != value}
        for key, value in new.items():
            store.with_transaction(transaction).write(key, value).result()
        if new:
            transaction.commit_async().result()
    except FerryError:
        raise
    except Exception as error:
        raise store_error(target_root, "the leaves beside the arrays written", error) from error


def _open_store(spec: dict[str, Any], context: "ts.Context") -> "ts.KvStore":
    import tensorstore as ts

    return ts.KvStore.open(spec, context=context).result()
