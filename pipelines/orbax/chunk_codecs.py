"""How the chunks of a stored array are encoded, in zarr v3's words, so that they may move as they are."""

import json
from typing import Any

_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
_DEFAULT_KEYS = ({"name": "default"}, {"name": "default", "configuration": {"separator": "/"}})


def chunk_codecs(stored: dict[str, Any]) -> str:
    """The JSON of the zarr v3 codecs that decode an array's chunks; empty where there are none.

    A zarr v2 chunk of little-endian values in C order, bare or under zstd, is byte for byte a v3 chunk.

    Args:
      stored: the array's ``.zarray`` or ``zarr.json``.
    """
    codecs = _of_v3(stored) if stored.get("zarr_format") == 3 else _of_v2(stored)
    return json.dumps(codecs, sort_keys=True, separators=(",", ":")) if codecs else ""


def _of_v3(stored: dict[str, Any]) -> list[Any]:
    if stored.get("chunk_key_encoding", _DEFAULT_KEYS[0]) not in _DEFAULT_KEYS:
        return []
    return stored.get("codecs") or []


def _of_v2(stored: dict[str, Any]) -> list[Any]:
    plain = stored.get("order", "C") == "C" and not stored.get("filters")
    big_endian = str(stored.get("dtype", "")).startswith(">")
    if not plain or big_endian or stored.get("dimension_separator", ".") != ".":
        return []
    compressor = stored.get("compressor")
    if compressor is None:
        return [_LITTLE]
    if compressor.get("id") != "zstd":
        return []
    level = {"level": compressor.get("level", 1), "checksum": False}
    return [_LITTLE, {"name": "zstd", "configuration": level}]


def stored_chunk_key(array_name: str, use_zarr3: bool, index: tuple[int, ...]) -> str:
    """The key of a chunk in the source's store.

    >>> stored_chunk_key("a.b", False, (0, 2)), stored_chunk_key("a.b", True, (0, 2)), stored_chunk_key("s", False, ())
    ('a.b/0.2', 'a.b/c/0/2', 's/0')
    """
    if use_zarr3:
        return "/".join((array_name, "c", *map(str, index)))
    return f"{array_name}/{'.'.join(map(str, index)) or '0'}"
