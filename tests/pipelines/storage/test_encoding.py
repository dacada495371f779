"""Chunks encoded piece by piece are TensorStore's, byte for byte; files hold them whatever the disk can do."""

import errno
import os

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.sinks import plain_zarr as plain
from tensorferry.pipelines.sinks.sink import open_sink
from tensorferry.pipelines.sinks.zarr_arrays import array_spec, open_for_writing, write_chunk
from tensorferry.pipelines.storage import encoding, local_chunk
from tensorferry.pipelines.storage.local_chunk import write_local_chunk
from tensorferry.transforms.dtypes import numpy_dtype


class Taken:
    """Room that keeps each stretch apart; every one starts out as rubbish."""

    def __init__(self) -> None:
        self.stretches: list[np.ndarray] = []

    def take(self, nbytes: int) -> np.ndarray:
        self.stretches.append(np.full(nbytes, 0xA5, np.uint8))
        return self.stretches[-1]


def encoded_by(encode) -> list[bytes]:
    room = Taken()
    encode(room)
    return [stretch.tobytes() for stretch in room.stretches]


@st.composite
def specs(draw) -> ArraySpec:
    rank = draw(st.integers(0, 4))
    inner = tuple(draw(st.integers(1, 5)) for _ in range(rank))
    chunk = tuple(length * draw(st.integers(1, 3)) for length in inner)
    shape = tuple(draw(st.integers(1, 2 * length + 1)) for length in chunk)
    dtype = draw(st.sampled_from(["bfloat16", "float32", "float8_e4m3fn", "int32", "float64", "bool"]))
    return ArraySpec(("params", "w"), dtype, shape, chunk, inner)


def values_of(spec: ArraySpec, index: tuple[int, ...]) -> np.ndarray:
    dtype, shape = numpy_dtype(spec.dtype), spec.box_shape(index)
    if dtype.kind == "b":
        return np.arange(np.prod(shape)).reshape(shape) % 3 == 0
    random = np.random.default_rng(7)
    return np.asarray(random.standard_normal(shape) * 50).astype(dtype).reshape(shape)


def as_tensorstore_writes(sink, spec: ArraySpec, index: tuple[int, ...], array: np.ndarray) -> bytes:
    context = ts.Context()
    memory = {"driver": "memory", "path": "x/"}
    store = open_for_writing(array_spec(memory, spec, sink.array_metadata(spec)), context, None)
    write_chunk(store, spec, index, array, by_reference=False)
    return ts.KvStore.open(memory, context=context).result()[spec.chunk_key(index, sink.store_format)]


@pytest.mark.parametrize(("store_format", "crc32c"), [("zarr3", True), ("zarr3", False), ("zarr2", False)])
@given(spec=specs(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_pieces_are_what_tensorstore_writes(store_format, crc32c, spec, data):
    if store_format == "zarr2":
        spec = ArraySpec(spec.path, spec.dtype, spec.shape, spec.chunk, spec.chunk)
    sink = open_sink("/nowhere", store_format, crc32c=crc32c)
    index = data.draw(st.sampled_from(list(spec.indices())))
    array = values_of(spec, index)
    encoded = b"".join(encoded_by(lambda room: sink.encode(spec, array, room)))
    assert encoded == as_tensorstore_writes(sink, spec, index, array)
    assert len(encoded) == sink.chunk_bytes(spec, index)


def test_nothing_of_an_array_beyond_the_edge_is_gathered_twice():
    """A shard of 3 x 2 inner chunks of which the array covers 2 x 1 and a half: four are stored, two are absent."""
    spec = ArraySpec(("w",), "bfloat16", (8, 9), (12, 12), (4, 6))
    array = values_of(spec, (0, 0))
    *inner, index, checksum = encoded_by(lambda room: encoding.encode_shard(spec, array, False, room))
    assert [len(p) for p in inner] == [4 * 6 * 2] * 4
    entries = np.frombuffer(index, "<u8").reshape(3, 2, 2)
    assert entries[:2].tolist() == [[[0, 48], [48, 48]], [[96, 48], [144, 48]]]
    assert (entries[2] == 2**64 - 1).all()
    assert len(checksum) == 4


def put(octets: bytes, piece_bytes: int = 1 << 20):
    """Puts bytes into a stage, some at a time."""

    def encode(room) -> None:
        for start in range(0, len(octets), piece_bytes):
            piece = octets[start : start + piece_bytes]
            room.take(len(piece))[...] = np.frombuffer(piece, np.uint8)

    return encode


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 10_000, 40_960, 41_000])
@pytest.mark.parametrize("piece_bytes", [1, 999, 4096, 50_000])
def test_files_hold_every_byte(tmp_path, monkeypatch, nbytes, piece_bytes):
    """Pieces of any length, larger ones than the stage too; a second file begins with none of the first."""
    monkeypatch.setattr(local_chunk, "_STAGE_BYTES", 8192)
    monkeypatch.setattr(local_chunk, "_own", local_chunk.threading.local())
    octets = np.random.default_rng(3).bytes(nbytes)
    path = tmp_path / "c" / "0" / "1"
    for some in (octets[::-1], octets):
        write_local_chunk(str(path), put(some, piece_bytes))
        assert path.read_bytes() == some
    assert os.listdir(path.parent) == ["1"]


def refuse_direct(at_open: bool, monkeypatch) -> list[str]:
    """A file system without direct writes: refuses when the file is opened, or when it is first written."""
    seen: list[str] = []
    really_open, really_write = os.open, os.write

    def open_(path, flags, mode=0o777):
        if at_open and flags & os.O_DIRECT:
            seen.append("open")
            os.close(really_open(path, flags & ~os.O_DIRECT, mode))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return really_open(path, flags, mode)

    def write(descriptor, octets):
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            seen.append("write")
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_write(descriptor, octets)

    monkeypatch.setattr(os, "open", open_)
    if not at_open:
        monkeypatch.setattr(os, "write", write)
    return seen


@pytest.mark.parametrize("at_open", [True, False])
def test_a_disk_without_direct_writes_gets_buffered_ones(tmp_path, monkeypatch, at_open):
    octets = np.random.default_rng(3).bytes(4096 * 3 + 77)
    seen = refuse_direct(at_open, monkeypatch)
    write_local_chunk(str(tmp_path / "c"), put(octets))
    monkeypatch.undo()
    assert (tmp_path / "c").read_bytes() == octets
    assert seen == (["open"] if at_open else ["write"])


def test_short_direct_writes_are_gone_on_with(tmp_path, monkeypatch):
    octets = np.random.default_rng(3).bytes(4096 * 5 + 77)
    really, lengths = os.write, iter([4096, 512])

    def write(descriptor, some):
        return really(descriptor, some[: next(lengths, len(some))])

    monkeypatch.setattr(os, "write", write)
    write_local_chunk(str(tmp_path / "c"), put(octets))
    monkeypatch.undo()
    assert (tmp_path / "c").read_bytes() == octets


def test_a_full_disk_is_a_sentence_and_leaves_no_draft(tmp_path, monkeypatch):
    spec = ArraySpec(("params", "w"), "float32", (64, 64), (64, 64), (32, 64))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(local_chunk._File, "_write", full)
    sink = open_sink(str(tmp_path))
    writer = sink.open_part("a")
    with pytest.raises(FerryError, match=r"No space left on device.*run the same command again"):
        writer.write(spec, (0, 0), np.zeros((64, 64), np.float32))
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_without_compiled_checksums_tensorstore_writes_the_same_bytes(tmp_path, monkeypatch):
    spec = ArraySpec(("params", "w"), "bfloat16", (10, 9), (8, 9), (4, 3))
    for name, fast in (("fast", True), ("slow", False)):
        monkeypatch.setattr(plain, "checksum_is_fast", lambda fast=fast: fast)
        with open_sink(str(tmp_path / name)).open_part("a") as writer:
            for index in spec.indices():
                writer.write(spec, index, values_of(spec, index))
    for index in spec.indices():
        key = spec.chunk_key(index, "zarr3")
        assert (tmp_path / "fast" / key).read_bytes() == (tmp_path / "slow" / key).read_bytes()
