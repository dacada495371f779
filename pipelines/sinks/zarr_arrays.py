"""Opening, writing and describing arrays through TensorStore, the same for every format."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.pipelines.sinks.sink import refuse_unaligned, store_error
from tensorferry.pipelines.storage.kvstores import below

if TYPE_CHECKING:
    import numpy as np
    import tensorstore as ts

_OPEN_AT_ONCE = 256


def array_spec(store: dict[str, Any], spec: ArraySpec, metadata: dict[str, Any]) -> dict[str, Any]:
    """The TensorStore spec of an array inside a key-value store."""
    return {
        "driver": "zarr3" if "chunk_grid" in metadata else "zarr",
        "kvstore": below(store, spec.key),
        "metadata": metadata,
        # Chunks of nothing but zeros would otherwise not be stored at all, and Orbax would raise NOT_FOUND.
        "store_data_equal_to_fill_value": True,
    }


def open_for_writing(spec: dict[str, Any], context: "ts.Context", transaction: "ts.Transaction | None") -> Any:
    """Opens without any request: the metadata is taken as given and written by the launcher at the end."""
    import tensorstore as ts

    return ts.open(spec, open=True, assume_metadata=True, context=context, transaction=transaction).result()


def write_chunk(store: Any, spec: ArraySpec, index: tuple[int, ...], array: "np.ndarray", by_reference: bool) -> None:
    """Writes one whole chunk and waits for it.

    Args:
      by_reference: whether TensorStore may read the array until the write is committed, without a copy. Cheaper,
        but only for contiguous arrays (a transposed view costs more) and outside a transaction.

    Raises:
      FerryError: the array is not exactly the chunk, or the store cannot be written.
    """
    refuse_unaligned(spec, index, array)
    region = store[tuple(slice(start, stop) for start, stop in spec.box(index))]
    try:
        region.write(array, can_reference_source_data_indefinitely=by_reference).result()
    except Exception as error:
        raise store_error(f"{spec.key} chunk {list(index)}", "the chunk written", error) from error


def start_stored_chunk(
    store: dict[str, Any], key: str, stored: bytes, context: "ts.Context", transaction: "ts.Transaction | None"
) -> "ts.Future":
    """Begins to write the bytes of one chunk as they are.

    Raises:
      FerryError: the store cannot be opened.
    """
    import tensorstore as ts

    try:
        opened = ts.KvStore.open(store, context=context).result()
    except Exception as error:
        raise store_error(key, "the chunk written", error) from error
    return (opened.with_transaction(transaction) if transaction else opened).write(key, stored)


def finish_stored_chunk(key: str, writing: "ts.Future") -> None:
    """Waits for what `start_stored_chunk` began.

    Raises:
      FerryError: the store cannot be written.
    """
    try:
        writing.result()
    except Exception as error:
        raise store_error(key, "the chunk written", error) from error


def take_stored_chunk(store: dict[str, Any], key: str, context: "ts.Context") -> bytes:
    """The bytes of one chunk, which is removed."""
    import tensorstore as ts

    opened = ts.KvStore.open(store, context=context).result()
    stored = bytes(opened.read(key).result().value)
    opened.write(key, None).result()
    return stored


def write_metadata(
    arrays: Sequence[ArraySpec],
    specs: Sequence[dict[str, Any]],
    context: "ts.Context",
    transaction: Any = None,
) -> None:
    """Writes the metadata of every array; where it exists already it must be the same.

    Raises:
      FerryError: the store cannot be written, or holds an array of another shape under that name.
    """
    import tensorstore as ts

    for start in range(0, len(specs), _OPEN_AT_ONCE):
        window = slice(start, start + _OPEN_AT_ONCE)
        opening = [
            ts.open(spec, open=True, create=True, context=context, transaction=transaction) for spec in specs[window]
        ]
        for array, opened in zip(arrays[window], opening, strict=True):
            try:
                opened.result()
            except Exception as error:
                raise store_error(array.key, "its array metadata written", error) from error
