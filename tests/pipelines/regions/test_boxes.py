"""Reading boxes of stored tensors: the values that slicing gives, few reads, memory that is used again."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorferry.mappings.lowbit.tensors import StoredTensor
from tensorferry.pipelines.regions.boxes import Scratch, ScratchPool, read_box, runs
from tensorferry.pipelines.storage.byte_source import open_source

DTYPES = {"float32": "<f4", "int16": "<i2", "uint8": "u1", "float64": "<f8"}


class MemorySource:
    """One file in memory that remembers its reads."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads: list[tuple[int, int]] = []

    def readinto(self, path: str, start: int, buffer: memoryview) -> None:
        assert path == "f"
        self.reads.append((start, len(buffer)))
        buffer[:] = self.data[start : start + len(buffer)]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    return shape, tuple((start, draw(st.integers(start + 1, n))) for start, n in zip(starts, shape, strict=True))


def stored_array(dtype: str, shape: tuple[int, ...], offset: int) -> tuple[StoredTensor, np.ndarray, MemorySource]:
    octets = np.random.default_rng(5).integers(0, 256, math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize, np.uint8)
    source = MemorySource(bytes(offset) + octets.tobytes() + b"beyond")
    return StoredTensor("w", dtype, shape, "f", offset), octets.view(DTYPES[dtype]).reshape(shape), source


@given(boxes(), st.sampled_from(sorted(DTYPES)), st.integers(0, 9))
def test_a_box_holds_what_slicing_gives(shape_and_box, dtype, offset):
    shape, box = shape_and_box
    stored, array, source = stored_array(dtype, shape, offset)
    found = read_box(source, stored, box, Scratch())
    wanted = array[tuple(slice(*span) for span in box)]
    assert (found.dtype, found.shape, found.flags.c_contiguous) == (wanted.dtype, wanted.shape, True)
    assert found.tobytes() == wanted.tobytes()


@given(boxes(), st.integers(0, 9))
def test_runs_are_the_stretches_of_a_box_in_order(shape_and_box, offset):
    shape, box = shape_and_box
    stored, array, source = stored_array("int16", shape, offset)
    found = list(runs(stored, box))
    wanted = array[tuple(slice(*span) for span in box)].tobytes()
    assert b"".join(source.data[start : start + nbytes] for start, nbytes in found) == wanted


@pytest.mark.parametrize(("box", "reads"), [
    (((0, 4), (0, 7), (0, 8)), [(100, 4 * 7 * 8 * 2)]),
    (((1, 3), (0, 7), (0, 8)), [(100 + 7 * 8 * 2, 2 * 7 * 8 * 2)]),
    (((2, 3), (3, 5), (0, 8)), [(100 + (2 * 7 + 3) * 8 * 2, 2 * 8 * 2)]),
    # Short rows with gaps of less than three rows: one read with the gaps.
    (((1, 3), (2, 6), (0, 8)), [(100 + 7 * 8 * 2, 2 * 7 * 8 * 2)]),
    # Gaps that are most of the bytes are left out.
    (((1, 3), (2, 3), (0, 8)), [(100 + (7 + 2) * 8 * 2, 16), (100 + (14 + 2) * 8 * 2, 16)]),
])  # fmt: skip
def test_reads_are_few(box, reads):
    stored, _, source = stored_array("int16", (4, 7, 8), 100)
    read_box(source, stored, box, Scratch())
    assert source.reads == reads


def test_long_rows_are_read_without_the_gaps():
    stored, _, source = stored_array("uint8", (3, 40_000), 0)
    read_box(source, stored, ((0, 3), (100, 30_100)), Scratch())
    assert source.reads == [(100, 30_000), (40_100, 30_000), (80_100, 30_000)]


def test_a_packed_dtype_is_refused():
    with pytest.raises(ValueError, match="packed"):
        read_box(MemorySource(b""), StoredTensor("w", "float4_e2m1fn", (2,), "f", 0), ((0, 2),), Scratch())


def test_a_file_cut_short_is_a_sentence(tmp_path):
    (tmp_path / "f").write_bytes(bytes(90))
    stored = StoredTensor("w", "float32", (5, 6), "f", 10)
    with pytest.raises(Exception, match="40 bytes are missing"):
        read_box(open_source(str(tmp_path)), stored, ((0, 5), (0, 6)), Scratch())


def test_scratch_gives_the_same_memory_again_and_grows_when_it_must():
    scratch = Scratch()
    first = scratch.take("a", 100)
    assert np.shares_memory(first, scratch.take("a", 60))
    assert not np.shares_memory(first, scratch.take("b", 60))
    assert len(scratch.take("a", 300)) == 300
    assert scratch.nbytes == 360


def test_a_pool_keeps_no_more_than_its_limit():
    pool = ScratchPool(limit_bytes=100)
    with pool.lend() as one, pool.lend() as two:
        assert one is not two
        one.take("a", 70)
        two.take("a", 70)
    with pool.lend() as again, pool.lend() as fresh:
        assert sorted([again.nbytes, fresh.nbytes]) == [0, 70]
