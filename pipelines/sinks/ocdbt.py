"""OCDBT: each attempt writes a database of its own, and the commit merges the indexes of those that won."""

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mappings.array_spec import ArraySpec
from mappings.problems import FerryError, Problem
from pipelines.kvstores import below, is_local, kvstore, new_context, worker_context
from pipelines.sink import PartWriter, Sink, refuse_not_kept, store_error, valid_attempt_id
from pipelines.sinks.arrays import (
    array_spec,
    finish_stored_chunk,
    open_for_writing,
    start_stored_chunk,
    write_chunk,
    write_metadata,
)
from pipelines.sinks.listing import clear_stale_locks, compare
from pipelines.sinks.metadata import zarr3_metadata

if TYPE_CHECKING:
    import numpy as np
    import tensorstore as ts

# Not ``ocdbt.process_*``: Orbax merges whatever carries that name, the losers' leavings included.
_PARTS = "parts"
_MANIFEST = "manifest.ocdbt"
# As Orbax configures its databases: its handler adds the step to ours, and refuses one that is configured otherwise.
_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000}


def _database(base: dict[str, Any]) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": base, "path": "", "config": _CONFIG}


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
    """Holds an encoded work item in memory until ``close`` puts it down in one transaction."""

    sink: "OcdbtSink"
    attempt_id: str
    # One transaction: a commit for each write would rewrite the database's manifest each time, and an object
    # store takes about one write a second of the same object.
    _transaction: Any = field(default_factory=_new_transaction)
    _stores: dict[ArraySpec, Any] = field(default_factory=dict)

    def write(self, spec: ArraySpec, index: tuple[int, ...], array: "np.ndarray") -> None:
        if spec not in self._stores:
            self._stores[spec] = open_for_writing(self._spec(spec), worker_context(), self._transaction)
        # By value: inside a transaction TensorStore reads a referenced array only when it commits (measured).
        write_chunk(self._stores[spec], spec, index, array, by_reference=False)

    def write_stored(self, spec: ArraySpec, index: tuple[int, ...], stored: bytes) -> None:
        refuse_not_kept(self.sink, spec, index, stored)
        key = spec.chunk_key(index, self.sink.store_format)
        finish_stored_chunk(key, start_stored_chunk(self._part(), key, stored, worker_context(), self._transaction))

    def _part(self) -> dict[str, Any]:
        return _new_database(below(kvstore(self.sink.root), _PARTS, self.attempt_id))

    def _spec(self, spec: ArraySpec) -> dict[str, Any]:
        return array_spec(self._part(), spec, self.sink.array_metadata(spec))

    def close(self) -> None:
        self._stores.clear()
        try:
            self._transaction.commit_async().result()
        except Exception as error:
            raise store_error(f"part {self.attempt_id}", "its transaction committed", error) from error

    def abort(self) -> None:
        self._stores.clear()
        self._transaction.abort()


@dataclass(frozen=True)
class OcdbtSink(Sink):
    """Orbax's default form: few objects. Data stays where the parts wrote it; only indexes are merged.

    Attributes:
      beside: values of leaves that are no arrays of the plan, by key: ``finalize`` writes them in the same commit.
    """

    beside: Mapping[str, bytes] = field(default_factory=dict)
    store_format: ClassVar[str] = "ocdbt"

    def encoding_bytes(self, part_bytes: Sequence[int]) -> int:
        """All parts stay encoded until the item's one transaction, which joins them to one value (measured: twice)."""
        return 2 * sum(part_bytes)

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
        for winner in winners:
            part = _database(below(kvstore(self.root), _PARTS, valid_attempt_id(winner)))
            _open_store(part, context).experimental_copy_range_to(target).result()
        specs = [array_spec(root, array, self.array_metadata(array)) for array in arrays]
        write_metadata(arrays, specs, context, transaction)
        for key, value in self.beside.items():
            target.write(key, value).result()
        transaction.commit_async().result()

    def _keys(self, context: "ts.Context") -> list[str]:
        keys = _open_store(_database(kvstore(self.root)), context).list().result()
        return [key.decode() for key in keys]

    def _delete_losers(self, winners: Sequence[str], context: "ts.Context") -> None:
        base = _open_store(kvstore(self.root), context)
        stored = {key.decode().split("/")[1] for key in base.list(_everything_below(_PARTS)).result()}
        for loser in sorted(stored - set(winners)):
            base.delete_range(_everything_below(f"{_PARTS}/{loser}")).result()
            if is_local(self.root):
                shutil.rmtree(Path(self.root, _PARTS, loser), ignore_errors=True)


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
