"""The array metadata of each format, complete, so that workers need not read any."""

import json
from typing import Any

import numpy as np
from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.transforms.dtypes import numpy_dtype

_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C = {"name": "crc32c"}
_ZSTD1 = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
_INDEX_ENTRY_BYTES = 16
_CRC_BYTES = 4


def zarr3_metadata(spec: ArraySpec, compression: str, crc32c: bool, kept: str = "") -> dict[str, Any]:
    """Sharded zarr3: one object for each chunk, with inner chunks that 64 hosts can fetch one by one.

    Args:
      kept: the JSON of the codecs of chunks that arrive encoded; empty for chunks that are encoded here.
    """
    codecs = [_BYTES] + [_ZSTD1] * (compression == "zstd1") + [_CRC32C] * crc32c
    sharding = {"chunk_shape": list(spec.inner), "codecs": codecs, "index_codecs": [_BYTES, _CRC32C]}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.shape),
        "data_type": spec.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(spec.chunk)}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": json.loads(kept) if kept else [{"name": "sharding_indexed", "configuration": sharding}],
    }


def zarr2_metadata(spec: ArraySpec, compression: str) -> dict[str, Any]:
    """Plain zarr2 as Orbax writes it: chunk keys with dots, no fill value, no checksum in the format."""
    return {
        "zarr_format": 2,
        "shape": list(spec.shape),
        "chunks": list(spec.chunk),
        "dtype": _zarr2_dtype(spec.dtype),
        "compressor": {"id": "zstd", "level": 1} if compression == "zstd1" else None,
        "dimension_separator": ".",
        "fill_value": None,
        "filters": None,
        "order": "C",
    }


def _zarr2_dtype(name: str) -> str:
    """numpy's own dtypes as ``<f4``; the others by name, which is TensorStore's extension of zarr2."""
    return np.dtype(name).str if hasattr(np, name) else name


def zarr3_chunk_bytes(spec: ArraySpec, index: tuple[int, ...], crc32c: bool) -> int:
    """Exact size of an uncompressed shard's object, in bytes.

    Inner chunks are stored whole where they touch the box and not at all elsewhere; the index lists all.
    """
    inner_bytes = int(np.prod(spec.inner, dtype=np.int64)) * numpy_dtype(spec.dtype).itemsize
    touched = _product(-(-length // inner) for length, inner in zip(spec.box_shape(index), spec.inner, strict=True))
    listed = _product(outer // inner for outer, inner in zip(spec.chunk, spec.inner, strict=True))
    return touched * (inner_bytes + _CRC_BYTES * crc32c) + listed * _INDEX_ENTRY_BYTES + _CRC_BYTES


def _product(lengths: Any) -> int:
    return int(np.prod(list(lengths), dtype=np.int64))
