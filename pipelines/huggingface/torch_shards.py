"""PyTorch's ``pytorch_model*.bin``: torch reads the pickle on the launcher; workers read plain byte ranges."""

# torch is an extra: type checking must pass without it.
# pyright: reportMissingImports=false

import hashlib
import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorferry.mappings.lowbit.tensors import StoredTensor
from tensorferry.mappings.words.problems import Problem
from tensorferry.pipelines.huggingface.headers import Header
from tensorferry.pipelines.storage.byte_source import ByteSource, SourceError
from tensorferry.pipelines.storage.strict_json import lfs_problem, shown
from tensorferry.transforms.dtypes import NAME_TO_SAFETENSORS

if TYPE_CHECKING:
    import torch

_ZIP_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30
_BUFFER_BYTES = 64 * 1024
_RESAVE = "Save it again with torch 2: torch.save(torch.load(file, weights_only=True), file)."
_SAFETENSORS = "Use the safetensors form of this checkpoint, or convert it with safetensors.torch.save_file."


@dataclass(frozen=True)
class _Record:
    """A storage's bytes in the archive: absolute offset in the file, size, number in order of saving."""

    offset: int
    nbytes: int
    number: int


def scan_torch_shards(source: ByteSource, sizes: Mapping[str, int]) -> dict[str, tuple[Header | None, list[Problem]]]:
    """Names, dtypes, shapes and byte offsets of the tensors in PyTorch shards, with everything that is wrong.

    Nothing but the archive's directory and pickle is read. Two names of one storage get the same offset.

    Args:
      source: where the shards lie.
      sizes: file to bytes. When torch is not installed the first file carries the problem for all.
    """
    try:
        import torch  # noqa: F401
    except ImportError:
        return {file: (None, [_no_torch(file, len(sizes))] if not place else []) for place, file in enumerate(sizes)}
    return {file: _scan(source, file, file_bytes) for file, file_bytes in sizes.items()}


def _scan(source: ByteSource, file: str, file_bytes: int) -> tuple[Header | None, list[Problem]]:
    try:
        if problem := _frame_problem(source.read(file, 0, min(file_bytes, 1024)), file):
            return None, [problem]
        shard = _Shard(source, file, file_bytes)
        with zipfile.ZipFile(shard.open()) as archive:
            return _parse(archive, shard)
    except SourceError as error:
        return None, [error.problem]
    except zipfile.BadZipFile as error:
        found = f"an archive that cannot be read ({shown(str(error))}) in {file_bytes} bytes"
        return None, [Problem(file, "a whole zip archive of torch.save", found, "It is cut short: fetch it again.")]


def _parse(archive: zipfile.ZipFile, shard: "_Shard") -> tuple[Header | None, list[Problem]]:
    file = shard.file
    if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
        return None, [Problem(file, "an archive whose members are stored", "compressed members", _RESAVE)]
    records = _records(archive, shard)
    if _shuffled(archive, records):
        return None, [Problem(file, "storages in the order torch.save wrote them", "another order", _RESAVE)]
    try:
        state = _load(shard)
    except SourceError:
        raise
    except Exception as error:
        # torch raises almost any kind here, for damaged and for malicious pickles alike.
        return None, [_not_loadable(file, error)]
    if not isinstance(state, dict):
        return None, [Problem(file, "a dict of tensors", f"a {type(state).__name__}", _SAFETENSORS)]
    results = [_stored(name, value, records, file) for name, value in state.items()]
    tensors = sorted((one for one in results if isinstance(one, StoredTensor)), key=lambda one: one.offset)
    problems = [one for one in results if isinstance(one, Problem)]
    return Header(file, tuple(tensors), {}, 0, _digest(archive, tensors)), problems


def _load(shard: "_Shard") -> Any:
    """Unpickles tensors that know their place and have no data."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.load(shard.open(), weights_only=True, map_location="cpu")


def _records(archive: zipfile.ZipFile, shard: "_Shard") -> dict[int, _Record]:
    """The archive's storages by offset, from its own directory: torch computes offsets and can be wrong."""
    members = [info for info in archive.infolist() if _number(info.filename) is not None]
    records = [_record(info, shard) for info in members]
    return {record.offset: record for record in records if record.nbytes}


def _shuffled(archive: zipfile.ZipFile, records: dict[int, _Record]) -> bool:
    """Whether torch would compute wrong offsets: from this format version on it assumes the order of saving."""
    if not any(name.endswith("/.format_version") for name in archive.namelist()):
        return False
    numbers = [records[offset].number for offset in sorted(records)]
    return numbers != sorted(numbers)


def _record(info: zipfile.ZipInfo, shard: "_Shard") -> _Record:
    local = shard.source.read(shard.file, info.header_offset, _LOCAL_HEADER_BYTES)
    names = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    number = _number(info.filename)
    assert number is not None
    return _Record(info.header_offset + _LOCAL_HEADER_BYTES + names, info.file_size, number)


def _number(member: str) -> int | None:
    parts = member.split("/")
    return int(parts[2]) if len(parts) == 3 and parts[1] == "data" and parts[2].isdecimal() else None


def _stored(name: Any, value: Any, records: dict[int, _Record], file: str) -> StoredTensor | Problem:
    import torch

    if not isinstance(name, str) or not isinstance(value, torch.Tensor):
        fix = f"This is not a plain state dict. {_SAFETENSORS}"
        return Problem(shown(name), "a tensor under its name", f"a {type(value).__name__}", fix, file)
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in NAME_TO_SAFETENSORS:
        return Problem(shown(name), "a dtype that safetensors has too", dtype, _SAFETENSORS, file)
    if value.layout != torch.strided or not value.is_contiguous():
        found = f"strides {list(value.stride())} for shape {list(value.shape)}" if _strided(value) else "sparse"
        fix = f"Save it after tensor.contiguous(). {_SAFETENSORS}"
        return Problem(shown(name), "elements in C order without gaps", found, fix, file)
    return _placed(name, dtype, value, records, file)


def _strided(value: "torch.Tensor") -> bool:
    import torch

    return value.layout == torch.strided


def _placed(
    name: str, dtype: str, value: "torch.Tensor", records: dict[int, _Record], file: str
) -> StoredTensor | Problem:
    storage = value.untyped_storage()
    start = getattr(storage, "_checkpoint_offset", None)
    within = value.storage_offset() * value.element_size()
    shape = tuple(int(length) for length in value.shape)
    if not value.numel():  # owns no bytes, so there is no record to find
        return StoredTensor(name, dtype, shape, file, 0)
    record = records.get(start) if isinstance(start, int) else None
    needed = within + value.numel() * value.element_size()
    if record is None or record.nbytes != storage.nbytes() or needed > record.nbytes:
        found = "no such bytes at the place that its pickle means"
        return Problem(shown(name), f"{storage.nbytes()} bytes in the archive", found, _RESAVE, file)
    return StoredTensor(name, dtype, shape, file, record.offset + within)


def _digest(archive: zipfile.ZipFile, tensors: list[StoredTensor]) -> str:
    """Stands for the archive's directory, with the checksums of all members, and for what the pickle says."""
    members = [(info.filename, info.header_offset, info.file_size, info.CRC) for info in archive.infolist()]
    said = [(one.name, one.dtype, one.shape, one.offset) for one in tensors]
    return hashlib.sha256(repr([members, said]).encode("utf-8", "backslashreplace")).hexdigest()


@dataclass(frozen=True)
class _Shard:
    source: ByteSource
    file: str
    file_bytes: int

    def open(self) -> io.BufferedReader:
        return io.BufferedReader(_Stream(self), _BUFFER_BYTES)


class _Stream(io.RawIOBase):
    """A seekable file over ranged reads, as zipfile and torch want it."""

    def __init__(self, shard: _Shard) -> None:
        self._shard, self._place = shard, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._shard.file_bytes}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        octets = memoryview(buffer).cast("B")
        count = max(0, min(len(octets), self._shard.file_bytes - self._place))
        self._shard.source.readinto(self._shard.file, self._place, octets[:count])
        self._place += count
        return count


def _frame_problem(raw: bytes, file: str) -> Problem | None:
    if problem := lfs_problem(raw, file):
        return problem
    if not raw:
        return Problem(file, "a file of torch.save", "an empty file", "Fetch this file again.")
    if raw.startswith(b"\x80"):
        expected = "the zip form that torch.save writes since torch 1.6"
        return Problem(file, expected, "the older form, a bare pickle", _RESAVE)
    if not raw.startswith(_ZIP_MAGIC):
        found = f"a file that begins with {shown(raw[:8].decode('latin-1'))!r}"
        return Problem(file, "a file of torch.save", found, "Fetch this file again.")
    return None


def _no_torch(file: str, count: int) -> Problem:
    expected = f"torch, to read the pickles of {count} PyTorch shard{'s' if count > 1 else ''}"
    fix = "pip install 'tensorferry[torch]' on the machine that plans (workers need none), or use safetensors."
    return Problem(file, expected, "no torch in this Python", fix)


def _not_loadable(file: str, error: Exception) -> Problem:
    found = f"{type(error).__name__}: {shown(str(error).strip().splitlines()[0] if str(error).strip() else '')}"
    return Problem(file, "tensors and nothing else (torch.load with weights_only=True)", found, _SAFETENSORS)
