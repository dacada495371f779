"""Plain zarr: chunks go straight to their final names, so a repeated attempt rewrites the same bytes."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.pipelines.sinks.listing import clear_stale_locks, compare, remove_torn, stored_keys
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
    write_chunk,
    write_metadata,
)
from tensorferry.pipelines.sinks.zarr_metadata import zarr2_metadata, zarr3_chunk_bytes, zarr3_metadata
from tensorferry.pipelines.storage.encoding import Room, checksum_is_fast, encode_block, encode_shard
from tensorferry.pipelines.storage.kvstores import is_local, kvstore, new_context, worker_context
from tensorferry.pipelines.storage.local_chunk import write_local_chunk

if TYPE_CHECKING:
    import numpy as np


@dataclass
class PlainWriter(PartWriter):
    """Writes chunks in place; nothing is left to commit."""

    sink: "PlainSink"
    _stores: dict[ArraySpec, Any] = field(default_factory=dict)
    _writing: dict[str, Any] = field(default_factory=dict)

    def write(self, spec: ArraySpec, index: tuple[int, ...], array: "np.ndarray") -> None:
        sink = self.sink
        if is_local(sink.root) and sink.compression == "none" and checksum_is_fast():
            refuse_unaligned(spec, index, array)
            _write_local(sink, spec, index, array)
            return
        if spec not in self._stores:
            self._stores[spec] = open_for_writing(self.sink.spec(spec), worker_context(), None)
        write_chunk(self._stores[spec], spec, index, array, by_reference=True)

    def write_stored(self, spec: ArraySpec, index: tuple[int, ...], stored: bytes) -> None:
        refuse_not_kept(self.sink, spec, index, stored)
        key = spec.chunk_key(index, self.sink.store_format)
        self._writing[key] = start_stored_chunk(kvstore(self.sink.root), key, stored, worker_context(), None)

    def close(self) -> None:
        self._stores.clear()
        while self._writing:
            finish_stored_chunk(*self._writing.popitem())

    def abort(self) -> None:
        self._stores.clear()
        self._writing.clear()


def _write_local(sink: "PlainSink", spec: ArraySpec, index: tuple[int, ...], array: "np.ndarray") -> None:
    path = os.path.join(sink.root, spec.chunk_key(index, sink.store_format))
    try:
        write_local_chunk(path, lambda room: sink.encode(spec, array, room))
    except OSError as error:
        raise store_error(f"{spec.key} chunk {list(index)}", "the chunk written", error) from error


class PlainSink(Sink):
    """What zarr3 and zarr2 share."""

    def spec(self, spec: ArraySpec) -> dict[str, Any]:
        """The array's TensorStore spec below the item."""
        return array_spec(kvstore(self.root), spec, self.array_metadata(spec))

    def prepare(self, arrays: Sequence[ArraySpec]) -> None:
        super().prepare(arrays)
        # TensorStore reads a chunk at the ragged edge before it writes it, and gives up on one that a power cut tore.
        remove_torn(self.root, self.chunk_sizes(arrays))

    def open_part(self, attempt_id: str) -> PlainWriter:
        valid_attempt_id(attempt_id)
        return PlainWriter(self)

    def finalize(self, arrays: Sequence[ArraySpec], winners: Sequence[str], scalars: Collection[str] = ()) -> None:
        clear_stale_locks(self.root)
        sizes = self.chunk_sizes(arrays)
        compare(arrays, stored_keys(self.root), self.store_format, scalars, sizes)
        write_metadata(arrays, [self.spec(array) for array in arrays], new_context())

    def chunk_sizes(self, arrays: Sequence[ArraySpec]) -> dict[str, int] | None:
        """Exact size of every chunk object, or None when compression makes it unknown."""
        if self.compression != "none":
            return None
        return {
            array.chunk_key(index, self.store_format): self.chunk_bytes(array, index)
            for array in arrays
            if array.key not in self.kept
            for index in array.indices()
        }

    def chunk_bytes(self, spec: ArraySpec, index: tuple[int, ...]) -> int:
        """Size of one uncompressed chunk object, in bytes."""
        raise NotImplementedError

    def encode(self, spec: ArraySpec, array: "np.ndarray", room: Room) -> None:
        """Puts the bytes of one uncompressed chunk object into the room."""
        raise NotImplementedError


@dataclass(frozen=True)
class Zarr3Sink(PlainSink):
    """The default: sharded zarr3, one object for each chunk, one PUT each and no GET."""

    store_format: ClassVar[str] = "zarr3"

    def array_metadata(self, spec: ArraySpec) -> dict[str, Any]:
        return zarr3_metadata(spec, self.compression, self.crc32c, self.kept.get(spec.key, ""))

    def chunk_bytes(self, spec: ArraySpec, index: tuple[int, ...]) -> int:
        return zarr3_chunk_bytes(spec, index, self.crc32c)

    def encode(self, spec: ArraySpec, array: "np.ndarray", room: Room) -> None:
        encode_shard(spec, array, self.crc32c, room)


@dataclass(frozen=True)
class Zarr2Sink(PlainSink):
    """For Pathways. No inner chunks and no checksum: the format has neither."""

    store_format: ClassVar[str] = "zarr2"

    def array_metadata(self, spec: ArraySpec) -> dict[str, Any]:
        return zarr2_metadata(spec, self.compression)

    def chunk_bytes(self, spec: ArraySpec, index: tuple[int, ...]) -> int:
        return spec.chunk_bytes

    def encode(self, spec: ArraySpec, array: "np.ndarray", room: Room) -> None:
        encode_block(spec, array, room)
