"""Headers of safetensors shards, read by one or two ranged reads and checked before any weight is."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensorferry.mappings.lowbit.tensors import StoredTensor
from tensorferry.mappings.words.problems import PlanError, Problem
from tensorferry.pipelines.storage.byte_source import ByteSource, SourceError
from tensorferry.pipelines.storage.kvstores import is_local
from tensorferry.pipelines.storage.strict_json import is_text, lfs_problem, parse_object, shown
from tensorferry.transforms.dtypes import SAFETENSORS_TO_NAME, bits_of

# Enough for about a thousand tensors, so that most shards take a single request.
FIRST_READ_BYTES = 128 * 1024
# A second request costs more than these bytes do: enough for about four thousand tensors.
REMOTE_FIRST_READ_BYTES = 512 * 1024
# Ten million tensors; without a bound, a damaged length would make us read a whole shard as its own header.
LARGEST_HEADER_BYTES = 1 << 30
_LENGTH_BYTES = 8
_MOST_AXES = 64  # numpy holds no more
_REFETCH = "The download is incomplete or damaged: fetch this file again."
_REWRITE = "Write the file again with the safetensors library."
_OTHER_FORMATS = {
    b"PK\x03\x04": "a zip archive (a PyTorch file?)",
    b"GGUF": "a GGUF file",
    b"\x80\x02": "a pickle (an old PyTorch file?)",
    b"<!": "a web page",
    b"<h": "a web page",
}


@dataclass(frozen=True)
class Header:
    """What a shard says about itself.

    Attributes:
      file: path relative to the source's root.
      tensors: in the order of their bytes in the file.
      metadata: the free text under ``__metadata__``.
      header_bytes: bytes before the first tensor's first byte.
      digest: SHA-256 (hex) of those bytes.
    """

    file: str
    tensors: tuple[StoredTensor, ...]
    metadata: dict[str, str]
    header_bytes: int
    digest: str


class _Span(NamedTuple):
    begin: int
    end: int
    tensor: StoredTensor


def read_header(source: ByteSource, file: str) -> Header:
    """The header of one shard.

    Raises:
      PlanError: with everything that is wrong with the shard.
      SourceError: the file is missing.
    """
    header, problems = scan_header(source, file, source.size(file))
    if header is None or problems:
        raise PlanError(problems)
    return header


def scan_header(source: ByteSource, file: str, file_bytes: int) -> tuple[Header | None, list[Problem]]:
    """The header of one shard and everything that is wrong with it; raises nothing for a bad shard."""
    try:
        return parse_header(_read_raw(source, file, file_bytes), file, file_bytes)
    except SourceError as error:
        return None, [error.problem]


def parse_header(raw: bytes, file: str, file_bytes: int) -> tuple[Header | None, list[Problem]]:
    """Parses and checks a header against the format and the size of its file.

    Args:
      raw: the first bytes of the file, at least up to the end of the header.
      file: path relative to the source's root, as it shall stand in the tensors.
      file_bytes: size of the whole file.

    Returns:
      The header, or None where its JSON cannot be read, and the problems. A header that comes with problems
      names the tensors that could be read, for comparison with an index; its offsets are not to be trusted.
    """
    if problem := _frame_problem(raw, file, file_bytes):
        return None, [problem]
    end = _header_end(raw)
    if end > len(raw):
        return None, [_beyond(file, end, len(raw))]
    entries, problems = parse_object(raw[_LENGTH_BYTES:end], file, "header")
    if entries is None:
        return None, problems
    metadata, found = _metadata(entries.pop("__metadata__", None), file)
    spans, bad = _spans(entries, file, end)
    problems += found + bad + _layout_problems(spans, file, end, file_bytes, complete=not (bad or problems))
    digest = hashlib.sha256(raw[:end]).hexdigest()
    return Header(file, tuple(span.tensor for span in spans), metadata, end, digest), problems


def _read_raw(source: ByteSource, file: str, file_bytes: int) -> bytes:
    guess = FIRST_READ_BYTES if is_local(source.url) else REMOTE_FIRST_READ_BYTES
    first = source.read(file, 0, min(file_bytes, guess))
    if _frame_problem(first, file, file_bytes) or _header_end(first) <= len(first):
        return first
    return first + source.read(file, len(first), _header_end(first) - len(first))


def _header_end(raw: bytes) -> int:
    return _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")


def _frame_problem(raw: bytes, file: str, file_bytes: int) -> Problem | None:
    """What can be said before the JSON is read: is this a safetensors file at all, is its header in it?"""
    if not file_bytes:
        return Problem(file, "a safetensors file", "an empty file", _REFETCH)
    if problem := lfs_problem(raw, file):
        return problem
    for magic, name in _OTHER_FORMATS.items():
        if raw.startswith(magic) and raw[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
            return Problem(file, "a safetensors file", name, "Give the shard itself, under its own name.")
    if len(raw) < _LENGTH_BYTES:
        return Problem(file, "a safetensors file of 8 bytes or more", f"{file_bytes} bytes", _REFETCH)
    end = _header_end(raw)
    if end > file_bytes:
        return _beyond(file, end, file_bytes)
    if end - _LENGTH_BYTES > LARGEST_HEADER_BYTES:
        found = f"a header of {end - _LENGTH_BYTES} bytes"
        return Problem(file, f"a header of at most {LARGEST_HEADER_BYTES} bytes", found, _REFETCH)
    if raw[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
        found = f"{shown(raw[_LENGTH_BYTES : _LENGTH_BYTES + 12].decode('latin-1'))!r}"
        return Problem(file, "a header that begins with '{'", found, "It is not a safetensors file: fetch it again.")
    return None


def _beyond(file: str, end: int, file_bytes: int) -> Problem:
    expected = f"a file that holds its own header of {end - _LENGTH_BYTES} bytes"
    found = f"a file of {file_bytes} bytes: {end - file_bytes} bytes are missing"
    return Problem(file, expected, found, "It is cut short, or not a safetensors file: fetch it again.")


def _metadata(value: Any, file: str) -> tuple[dict[str, str], list[Problem]]:
    if value is None:
        return {}, []
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return value, []
    problem = Problem("__metadata__", "an object of strings", shown(value), _REWRITE, file)
    return {}, [problem]


def _spans(entries: dict[str, Any], file: str, data_start: int) -> tuple[list[_Span], list[Problem]]:
    parsed = [_span(name, entry, file, data_start) for name, entry in entries.items()]
    spans = sorted((one for one in parsed if isinstance(one, _Span)), key=lambda span: span[:2])
    return spans, [one for one in parsed if isinstance(one, Problem)]


def _span(name: str, entry: Any, file: str, data_start: int) -> _Span | Problem:
    if not is_text(name):
        return Problem(shown(name), "a name in Unicode", "half of a surrogate pair in it", _REWRITE, file)
    if type(entry) is not dict or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        expected = "an object with dtype, shape and data_offsets"
        return Problem(shown(name), expected, shown(entry), _REWRITE, file)
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = SAFETENSORS_TO_NAME.get(code) if type(code) is str else None
    if dtype is None:
        expected = f"a dtype of the format ({', '.join(SAFETENSORS_TO_NAME)})"
        return Problem(shown(name), expected, shown(code), "Write it in one of these dtypes.", file)
    if not _is_counts(shape) or len(shape) > _MOST_AXES:
        expected = f"a shape: a list of at most {_MOST_AXES} whole numbers, none below 0"
        return Problem(shown(name), expected, shown(shape), _REWRITE, file)
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        expected = "data_offsets: a list of two whole numbers, begin and end"
        return Problem(shown(name), expected, shown(offsets), _REWRITE, file)
    begin, end = offsets
    if problem := _size_problem(name, code, shape, end - begin, file):
        return problem
    return _Span(begin, end, StoredTensor(name, dtype, tuple(shape), file, data_start + begin))


def _is_counts(value: Any) -> bool:
    """Whether this is a list of whole numbers from 0 to 2**63; booleans are not numbers here."""
    return type(value) is list and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _size_problem(name: str, code: str, shape: list[int], stored: int, file: str) -> Problem | None:
    bits = bits_of(SAFETENSORS_TO_NAME[code])
    if bits % 8 and bits * (shape[-1] if shape else 1) % 8:
        expected = f"a last axis that fills whole bytes ({bits} bits per element in {code})"
        return Problem(shown(name), expected, f"shape {shown(shape)}", "Pad the last axis.", file)
    needed = bits * math.prod(shape) // 8
    if needed == stored:
        return None
    expected = f"{shown(needed)} bytes for {code} {shown(shape)}"
    return Problem(shown(name), expected, f"{stored} bytes between its data_offsets", _REWRITE, file)


def _layout_problems(spans: list[_Span], file: str, data_start: int, file_bytes: int, complete: bool) -> list[Problem]:
    """Tensors must tile the rest of the file; holes mean nothing when some entries could not be read."""
    end = max((span.end for span in spans), default=0)
    data_bytes = file_bytes - data_start
    problems = list(_seams(spans, file)) if complete else []
    if end > data_bytes:
        found = f"{file_bytes} bytes: {end - data_bytes} bytes are missing"
        problems.append(Problem(file, f"{data_start + end} bytes, as its header says", found, _REFETCH))
    if end < data_bytes and complete:
        found = f"{file_bytes} bytes: {data_bytes - end} bytes follow the last tensor"
        problems.append(Problem(file, f"{data_start + end} bytes, as its header says", found, _REWRITE))
    return problems


def _seams(spans: list[_Span], file: str) -> Iterator[Problem]:
    cursor, before = 0, "the header"
    for begin, end, tensor in spans:
        if begin != cursor:
            hole, overlap = (
                f"a hole of {begin - cursor} bytes after",
                f"an overlap of {cursor - begin} bytes with",
            )
            found = f"{hole if begin > cursor else overlap} {shown(before)}"
            yield Problem(shown(tensor.name), f"its bytes at offset {cursor}", found, _REWRITE, file)
        if end >= cursor:
            cursor, before = end, tensor.name
