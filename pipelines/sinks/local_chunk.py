"""A chunk on a local disk: TensorStore encodes it, and its bytes go to the file in small pieces.

TensorStore itself hands a whole chunk to the kernel in one call, which then fills large page-cache folios. Where free
memory has gone back to a hypervisor, those cost several times a copy (measured: 1.9 seconds of system time per GB in
one call of 64 MiB, 0.25 in calls of 128 KiB); elsewhere small calls cost the same as large ones.
"""

import ctypes
import os
import uuid
from functools import cache
from typing import TYPE_CHECKING, Any

from mappings.array_spec import ArraySpec
from pipelines.kvstores import worker_context
from pipelines.sink import store_error
from pipelines.sinks.arrays import array_spec, open_for_writing, write_chunk

if TYPE_CHECKING:
    import numpy as np

    from pipelines.sinks.plain import PlainSink

_ENCODED_BYTES = 1 << 20
_WRITE_BYTES = 128 << 10
# The suffix of TensorStore's own half-written files: the commit removes what a killed worker left.
_DRAFT_SUFFIX = ".__lock"
_SYNC_FILE_RANGE_WRITE = 2


def write_local_chunk(sink: "PlainSink", spec: ArraySpec, index: tuple[int, ...], array: "np.ndarray") -> None:
    """Writes one whole chunk; its file appears under its name when it is complete.

    Args:
      sink: a sink on a local disk, without compression, so that the encoded size is known.
      spec: the target array.
      index: the chunk's index in the array's grid.
      array: C-contiguous values of the chunk's box.

    Raises:
      FerryError: the array is not exactly the chunk, or the disk cannot be written.
    """
    import tensorstore as ts

    memory = {"driver": "memory", "path": f"{uuid.uuid4().hex}/"}
    context = worker_context()
    store = open_for_writing(array_spec(memory, spec, sink.array_metadata(spec)), context, None)
    write_chunk(store, spec, index, array, by_reference=True)
    encoded = ts.KvStore.open(memory, context=context).result()
    key = spec.chunk_key(index, sink.store_format)
    try:
        _put(os.path.join(sink.root, key), encoded, key, sink.chunk_bytes(spec, index))
    except OSError as error:
        raise store_error(f"{spec.key} chunk {list(index)}", "the chunk written", error) from error
    finally:
        encoded.delete_range(ts.KvStore.KeyRange()).result()


def _put(path: str, encoded: Any, key: str, nbytes: int) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    draft = f"{path}.{uuid.uuid4().hex[:8]}{_DRAFT_SUFFIX}"
    try:
        with open(draft, "wb", buffering=0) as file:
            for start in range(0, nbytes, _ENCODED_BYTES):
                reading = encoded.read(key, byte_range=slice(start, min(start + _ENCODED_BYTES, nbytes)))
                _write_all(file, memoryview(reading.result().value))
            _begin_writeback(file.fileno())
        os.replace(draft, path)
    except BaseException:
        if os.path.exists(draft):
            os.unlink(draft)
        raise


def _write_all(file: Any, octets: memoryview) -> None:
    while octets:
        octets = octets[file.write(octets[:_WRITE_BYTES]) :]


def _begin_writeback(descriptor: int) -> None:
    """Lets the disk start while workers go on, so that the commit's sync finds little left. Only a hint."""
    start = _sync_file_range()
    if start is not None:
        start(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


@cache
def _sync_file_range() -> Any:
    """Linux's sync_file_range, which begins to write and does not wait; None elsewhere. Python does not offer it."""
    return getattr(ctypes.CDLL(None), "sync_file_range", None)
