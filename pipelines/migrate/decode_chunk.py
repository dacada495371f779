"""The values of one stored chunk, for a look at what moves."""

import json
import math
from typing import TYPE_CHECKING, Any

from tensorferry.pipelines.migrate.step_reader import ReadFault
from tensorferry.pipelines.regions.boxes import Scratch
from tensorferry.transforms.dtypes import numpy_dtype

if TYPE_CHECKING:
    import numpy as np


def decode_chunk(codecs: str, dtype: str, shape: tuple[int, ...], stored: bytes, scratch: Scratch) -> "np.ndarray":
    """The values of one encoded chunk.

    Args:
      codecs: the JSON of its zarr v3 codecs.
      dtype: name of its dtype.
      shape: of the whole chunk, beyond the array's edge too.
      stored: its bytes.
      scratch: may own the result, which the next chunk overwrites.

    Raises:
      ReadFault: the bytes are no such chunk.
    """
    chain = json.loads(codecs)
    names = [codec["name"] for codec in chain]
    try:
        if names == ["bytes"]:
            return _values(stored, dtype, shape)
        if names == ["bytes", "zstd"]:
            return _unpacked(stored, dtype, shape, scratch)
        return _by_tensorstore(chain, dtype, shape, stored)
    except Exception as error:
        told = " ".join(str(error).split())[:300]
        raise ReadFault(f"a stored chunk of {dtype} {list(shape)} cannot be decoded: {told}") from error


def _values(octets: Any, dtype: str, shape: tuple[int, ...]) -> "np.ndarray":
    import numpy as np

    return np.frombuffer(octets, numpy_dtype(dtype)).reshape(shape)


def _unpacked(stored: bytes, dtype: str, shape: tuple[int, ...], scratch: Scratch) -> "np.ndarray":
    """Into memory that is used again: TensorStore would take fresh pages, which cost more than the unpacking."""
    import zstandard

    nbytes = math.prod(shape) * numpy_dtype(dtype).itemsize
    octets = scratch.take("chunk", nbytes)
    with zstandard.ZstdDecompressor().stream_reader(stored) as reader:
        filled = 0
        while filled < nbytes and (read := reader.readinto(octets[filled:])):  # pyright: ignore[reportArgumentType]
            filled += read
        if filled < nbytes or reader.read(1):
            raise ValueError(f"expected {nbytes} bytes of values, found {'more' if filled == nbytes else filled}")
    return _values(octets, dtype, shape)


def _by_tensorstore(chain: list[Any], dtype: str, shape: tuple[int, ...], stored: bytes) -> "np.ndarray":
    import tensorstore as ts

    metadata = {
        "zarr_format": 3, "node_type": "array", "shape": list(shape), "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shape)}},
        "chunk_key_encoding": {"name": "default"}, "codecs": chain,
    }  # fmt: skip
    context = ts.Context({"data_copy_concurrency": {"limit": 1}})
    memory = ts.KvStore.open("memory://", context=context).result()
    memory.write("/".join(("c", *("0" for _ in shape))), stored).result()
    spec = {"driver": "zarr3", "kvstore": "memory://", "metadata": metadata}
    return ts.open(spec, open=True, assume_metadata=True, context=context).result().read().result()
