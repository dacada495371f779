"""The index of an OCDBT database of one data file: a leaf of its B+tree, and the manifest that names it.

TensorStore writes values and index of a database itself, and holds them all in memory until they are whole. A file
that is written front to back needs the other order: values as they come, then this index of where they lie. Layout, of
TensorStore's storage format, version 0; numbers are unsigned LEB128 unless said otherwise:

    frame     magic uint32be | bytes of the whole frame uint64le | 0 (version) | 0 (not compressed) | body |
              CRC32C of all that uint32le
    leaf      0 (height, one byte) | files | count of keys | per key, each as one column:
              length shared with the key before (not for the first) | length of the rest | the rest |
              length of the value | 1 (the value lies in a file) | file number | offset
    manifest  config | files | 1 (versions), each field of which is a column: 1 (generation) | 0 (height, one byte) |
              file number | offset and length of the leaf | count of keys | bytes of the tree | bytes of the values |
              commit time in nanoseconds uint64le; then 0 (older versions)
    config    UUID 16 bytes | 0 (one manifest) | max_inline_value_bytes | max_decoded_node_bytes |
              log2 of the version tree's arity, one byte | 1 (zstd, where TensorStore writes) | its level int32le
    files     1 (count) | length of the path | 0 (length of its base) | the path
"""

import os
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

# As Orbax configures its databases: its handler adds the step to ours, and refuses one that is configured otherwise.
CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000}
_LEAF_MAGIC = 0x0CDB20DE
_MANIFEST_MAGIC = 0x0CDB3A2A
_MAGIC_AND_LENGTH = struct.Struct("<4sQ")
_CRC = struct.Struct("<I")
_TIME = struct.Struct("<Q")
# TensorStore's defaults.
_ARITY_LOG2 = 4
_ZSTD = b"\x01" + struct.pack("<i", 0)


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a value lies in the data file.

    Attributes:
      key: the value's key.
      offset: of its first byte, in bytes.
      nbytes: its length, in bytes.
    """

    key: str
    offset: int
    nbytes: int


def encode_leaf(path: str, entries: Iterable[Entry]) -> bytes:
    """The leaf that lists every value of a data file.

    Args:
      path: of the data file, relative to the database's root.
      entries: in any order; keys sort as their UTF-8.

    Raises:
      ValueError: there is none, a key comes twice, or the leaf would be larger than readers take.
    """
    ordered = sorted(entries, key=lambda entry: entry.key.encode())
    keys = [entry.key.encode() for entry in ordered]
    if not keys or len(set(keys)) < len(keys):
        raise ValueError(f"an index needs one key or more, all different; found {len(keys)} keys")
    shared = [0, *(_shared(one, other) for one, other in pairwise(keys))]
    rests = [key[length:] for key, length in zip(keys, shared, strict=True)]
    body = b"".join(
        (
            b"\x00",
            _file_table(path),
            _number(len(keys)),
            _numbers(shared[1:]),
            _numbers(len(rest) for rest in rests),
            *rests,
            _numbers(entry.nbytes for entry in ordered),
            b"\x01" * len(keys),
            _numbers(0 for _ in keys),
            _numbers(entry.offset for entry in ordered),
        )
    )
    if len(body) > CONFIG["max_decoded_node_bytes"]:
        raise ValueError(f"{len(keys):,} keys are too many for one data file")
    return _frame(_LEAF_MAGIC, body)


def encode_manifest(path: str, leaf_offset: int, leaf_bytes: int, entries: Sequence[Entry]) -> bytes:
    """The manifest of a database whose only version is one leaf.

    Args:
      path: of the data file, relative to the database's root.
      leaf_offset: of the leaf in it, in bytes.
      leaf_bytes: length of the leaf, in bytes.
      entries: what the leaf lists.
    """
    values = sum(entry.nbytes for entry in entries)
    version = _numbers((1, 0, 0, leaf_offset, leaf_bytes, len(entries), leaf_bytes, values))
    config = os.urandom(16) + _numbers((0, *CONFIG.values())) + bytes([_ARITY_LOG2]) + _ZSTD
    now = _TIME.pack(time.time_ns())
    return _frame(_MANIFEST_MAGIC, config + _file_table(path) + _number(1) + version + now + _number(0))


def _frame(magic: int, body: bytes) -> bytes:
    import google_crc32c

    nbytes = _MAGIC_AND_LENGTH.size + 2 + len(body) + _CRC.size
    framed = _MAGIC_AND_LENGTH.pack(magic.to_bytes(4, "big"), nbytes) + b"\x00\x00" + body
    return framed + _CRC.pack(google_crc32c.value(framed))


def _file_table(path: str) -> bytes:
    name = path.encode()
    return _numbers((1, len(name), 0)) + name


def _shared(one: bytes, other: bytes) -> int:
    """Length of what two keys begin with in common."""
    for length, (octet, another) in enumerate(zip(one, other, strict=False)):
        if octet != another:
            return length
    return min(len(one), len(other))


def _numbers(values: Iterable[int]) -> bytes:
    return b"".join(map(_number, values))


def _number(value: int) -> bytes:
    """Unsigned LEB128.

    >>> _number(5).hex(), _number(300).hex()
    ('05', 'ac02')
    """
    octets = bytearray()
    while value > 0x7F:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)
