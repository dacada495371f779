"""The sink: whole chunks in, planned keys out, in three formats, read back by TensorStore alone."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st
from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.sinks.sink import ChunkError, Sink, open_sink
from tensorferry.pipelines.storage.kvstores import kvstore
from tensorferry.transforms.dtypes import numpy_dtype

FORMATS = ("zarr3", "ocdbt", "zarr2")
WI = ArraySpec(("params", "layers", "wi_0", "kernel"), "bfloat16", (7, 3, 10), (4, 1, 10), (2, 1, 5))
NORM = ArraySpec(("params", "norm", "scale"), "float32", (5,), (5,), (5,))
SCALE = ArraySpec(("params", "head_scale"), "float32", (), (), ())
ARRAYS = (WI, NORM, SCALE)


def values_of(spec: ArraySpec, seed: int = 3) -> np.ndarray:
    """Every bit pattern is as likely as any other."""
    dtype = numpy_dtype(spec.dtype)
    noise = np.random.default_rng(seed).integers(0, 256, int(np.prod(spec.shape, dtype=int)) * dtype.itemsize, np.uint8)
    return noise.view(dtype).reshape(spec.shape)


def chunk_of(values: np.ndarray, spec: ArraySpec, index: tuple[int, ...]) -> np.ndarray:
    region = values[tuple(slice(start, stop) for start, stop in spec.box(index))]
    return np.array(region, order="C").reshape(spec.box_shape(index))


def write_all(sink: Sink, arrays=ARRAYS, suffix: str = "x") -> list[str]:
    """One part for each array; returns the parts' names."""
    for spec in arrays:
        with sink.open_part(f"{spec.path[-1]}-{suffix}") as part:
            for index in spec.indices():
                part.write(spec, index, chunk_of(values_of(spec), spec, index))
    return [f"{spec.path[-1]}-{suffix}" for spec in arrays]


def read_back(root: Path, spec: ArraySpec, store_format: str) -> np.ndarray:
    """What an independent reader finds: no metadata given, no code of ours."""
    base = {"driver": "file", "path": f"{root}/"}
    store = {"driver": "ocdbt", "base": base} if store_format == "ocdbt" else base
    driver = "zarr" if store_format == "zarr2" else "zarr3"
    path = store.get("path", "") + spec.key + "/"
    return ts.open({"driver": driver, "kvstore": {**store, "path": path}}).result().read().result()


def digest_of_tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("compression", ["none", "zstd1"])
@pytest.mark.parametrize("store_format", FORMATS)
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, store_format, compression):
    sink = open_sink(str(tmp_path / "items"), store_format, compression)
    sink.prepare(ARRAYS)
    sink.finalize(ARRAYS, write_all(sink))
    for spec in ARRAYS:
        found = read_back(tmp_path / "items", spec, store_format)
        assert found.dtype == numpy_dtype(spec.dtype)
        assert found.tobytes() == values_of(spec).tobytes()


@pytest.mark.parametrize("store_format", FORMATS)
def test_chunks_of_nothing_but_zeros_are_stored(tmp_path, store_format):
    sink = open_sink(str(tmp_path), store_format)
    sink.prepare([WI])
    with sink.open_part("a") as part:
        for index in WI.indices():
            part.write(WI, index, np.zeros(WI.box_shape(index), ml_dtypes.bfloat16))
    sink.finalize([WI], ["a"])
    assert not read_back(tmp_path, WI, store_format).any()


@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e8m0fnu",
        "float4_e2m1fn",
        "bool",
        "int8",
        "uint8",
        "int64",
        "uint16",
    ],
)
@pytest.mark.parametrize("store_format", ["zarr3", "zarr2"])
def test_dtypes_keep_their_bits(tmp_path, store_format, dtype):
    spec = ArraySpec(("w",), dtype, (3, 5), (2, 5), (1, 5))
    values = values_of(spec) & 1 if dtype == "bool" else values_of(spec)
    if dtype in ("float4_e2m1fn", "bool"):
        values = (np.arange(15, dtype=np.uint8) % (16 if dtype != "bool" else 2)).reshape(3, 5).view(numpy_dtype(dtype))
    sink = open_sink(str(tmp_path), store_format)
    sink.prepare([spec])
    with sink.open_part("a") as part:
        for index in spec.indices():
            part.write(spec, index, chunk_of(values, spec, index))
    sink.finalize([spec], ["a"])
    assert read_back(tmp_path, spec, store_format).tobytes() == values.tobytes()


def test_sub_byte_dtypes_take_a_byte_for_each_element(tmp_path):
    spec = ArraySpec(("w",), "float4_e2m1fn", (3, 6), (3, 6), (3, 6))
    sink = open_sink(str(tmp_path), "zarr2")
    sink.prepare([spec])
    with sink.open_part("a") as part:
        part.write(spec, (0, 0), np.zeros((3, 6), ml_dtypes.float4_e2m1fn))
    assert (tmp_path / "w" / "0.0").stat().st_size == spec.nbytes == 18


def test_a_dtype_that_zarr_does_not_know_is_refused_before_anything_is_written(tmp_path):
    spec = ArraySpec(("w",), "float6_e2m3fn", (3,), (3,), (3,))
    for store_format in FORMATS:
        with pytest.raises(FerryError, match=r"w: expected a dtype that zarr can hold; found float6_e2m3fn"):
            open_sink(str(tmp_path / "items"), store_format).prepare([spec])
    assert list(tmp_path.iterdir()) == []


def test_two_arrays_of_one_key_are_refused(tmp_path):
    twin = ArraySpec(("params", "norm.scale"), "float32", (5,), (5,), (5,))
    with pytest.raises(FerryError, match="two"):
        open_sink(str(tmp_path)).prepare([NORM, twin])


@pytest.mark.parametrize("store_format", FORMATS)
@pytest.mark.parametrize(
    ("index", "array"),
    [
        ((0, 0, 0), np.zeros((3, 1, 10), ml_dtypes.bfloat16)),  # less than the chunk: a read-modify-write
        ((1, 0, 0), np.zeros((4, 1, 10), ml_dtypes.bfloat16)),  # not clipped at the ragged edge
        ((0, 0, 0), np.zeros((4, 2, 10), ml_dtypes.bfloat16)),  # two chunks
        ((0, 0, 0), np.zeros((4, 1, 10), np.float16)),
        ((0, 0, 0), np.zeros((10, 1, 4), ml_dtypes.bfloat16).T),  # a transposed view costs TensorStore seven times more
        ((0, 3, 0), np.zeros((4, 1, 10), ml_dtypes.bfloat16)),
        ((0, 0), np.zeros((4, 1, 10), ml_dtypes.bfloat16)),
        ((-1, 0, 0), np.zeros((4, 1, 10), ml_dtypes.bfloat16)),
    ],
)
def test_anything_but_one_whole_chunk_is_refused(tmp_path, store_format, index, array):
    sink = open_sink(str(tmp_path), store_format)
    sink.prepare(ARRAYS)
    part = sink.open_part("a")
    with pytest.raises(FerryError, match=r"params\.layers\.wi_0\.kernel.*(one whole chunk|outside the grid)"):
        part.write(WI, index, array)
    part.abort()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("store_format", FORMATS)
def test_a_missing_chunk_is_named(tmp_path, store_format):
    sink = open_sink(str(tmp_path), store_format)
    sink.prepare(ARRAYS)
    with sink.open_part("a") as part:
        for spec in ARRAYS:
            for index in spec.indices():
                if (spec, index) not in ((WI, (1, 2, 0)), (WI, (0, 1, 0))):
                    part.write(spec, index, chunk_of(values_of(spec), spec, index))
    with pytest.raises(ChunkError, match=r"array params\.layers\.wi_0\.kernel, chunk .*no such chunk") as failure:
        sink.finalize(ARRAYS, ["a"])
    assert set(failure.value.missing) == {WI.chunk_key((0, 1, 0), store_format), WI.chunk_key((1, 2, 0), store_format)}
    assert not list(tmp_path.rglob("zarr.json"))


@pytest.mark.parametrize("store_format", FORMATS)
@pytest.mark.parametrize("where", [WI, ArraySpec(("old", "w"), "float32", (2,), (1,), (1,))])
def test_an_unplanned_chunk_is_named(tmp_path, store_format, where):
    bigger = ArraySpec(where.path, where.dtype, where.shape[:-1] + (where.shape[-1] * 2,), where.chunk, where.inner)
    sink = open_sink(str(tmp_path), store_format)
    sink.prepare(ARRAYS)
    winners = write_all(sink)
    with sink.open_part("stray") as part:
        index = tuple(count - 1 for count in bigger.grid)
        part.write(bigger, index, chunk_of(values_of(bigger), bigger, index))
    with pytest.raises(ChunkError, match=rf"array {where.key}, chunk .*nobody planned"):
        sink.finalize(ARRAYS, winners + ["stray"])


@pytest.mark.parametrize("store_format", ["zarr3", "zarr2"])
@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_torn_chunk_is_found_by_its_size(tmp_path, store_format, cut):
    sink = open_sink(str(tmp_path), store_format)
    sink.prepare(ARRAYS)
    write_all(sink)
    chunk = tmp_path / WI.chunk_key((1, 0, 0), store_format)
    os.truncate(chunk, min(cut, chunk.stat().st_size - 1))
    with pytest.raises(ChunkError, match=r"a torn chunk"):
        sink.finalize(ARRAYS, [])


@given(st.data())
def test_the_size_of_a_shard_follows_from_the_plan(data):
    import tempfile

    inner = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 4)))
    outer = tuple(length * data.draw(st.integers(1, 3)) for length in inner)
    shape = data.draw(st.tuples(st.integers(1, 11), st.integers(1, 13)))
    spec = ArraySpec(("w",), data.draw(st.sampled_from(["uint8", "bfloat16", "float32"])), shape, outer, inner)
    with tempfile.TemporaryDirectory() as root:
        sink = open_sink(root, crc32c=data.draw(st.booleans()))
        sink.prepare([spec])
        write_all(sink, [spec])
        sink.finalize([spec], [])  # compares every size, ragged edges included
        assert read_back(Path(root), spec, "zarr3").tobytes() == values_of(spec).tobytes()


def test_the_default_form_is_sharded_with_checksums_and_no_compression(tmp_path):
    sink = open_sink(str(tmp_path))
    sink.prepare([WI])
    sink.finalize([WI], write_all(sink, [WI]))
    metadata = json.loads((tmp_path / WI.key / "zarr.json").read_text())
    assert metadata["chunk_grid"]["configuration"]["chunk_shape"] == [4, 1, 10]
    (sharding,) = metadata["codecs"]
    assert sharding["name"] == "sharding_indexed"
    assert sharding["configuration"]["chunk_shape"] == [2, 1, 5]
    assert [codec["name"] for codec in sharding["configuration"]["codecs"]] == ["bytes", "crc32c"]
    assert [codec["name"] for codec in sharding["configuration"]["index_codecs"]] == ["bytes", "crc32c"]


def test_zarr2_is_what_orbax_writes(tmp_path):
    sink = open_sink(str(tmp_path), "zarr2", "zstd1")
    sink.prepare([WI])
    sink.finalize([WI], write_all(sink, [WI]))
    assert json.loads((tmp_path / WI.key / ".zarray").read_text()) == {
        "chunks": [4, 1, 10], "compressor": {"id": "zstd", "level": 1}, "dimension_separator": ".", "dtype": "bfloat16",
        "fill_value": None, "filters": None, "order": "C", "shape": [7, 3, 10], "zarr_format": 2,
    }  # fmt: skip


def test_damaged_weights_are_an_error_to_every_reader(tmp_path):
    sink = open_sink(str(tmp_path))
    sink.prepare([WI])
    sink.finalize([WI], write_all(sink, [WI]))
    chunk = tmp_path / WI.chunk_key((0, 1, 0), "zarr3")
    damaged = bytearray(chunk.read_bytes())
    damaged[3] ^= 1
    chunk.write_bytes(damaged)
    with pytest.raises(Exception, match="Digest mismatch"):
        read_back(tmp_path, WI, "zarr3")


def test_a_reader_of_one_inner_chunk_reads_that_and_the_index_only(tmp_path):
    spec = ArraySpec(("w",), "float32", (64, 64), (64, 64), (8, 64))
    sink = open_sink(str(tmp_path))
    sink.prepare([spec])
    sink.finalize([spec], write_all(sink, [spec]))
    before = _bytes_read()
    store = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/w/"}}).result()
    store[8:16].read().result()
    assert 8 * 64 * 4 <= _bytes_read() - before < 2 * 8 * 64 * 4


def _bytes_read() -> int:
    return sum(
        metric["values"][0]["value"]
        for metric in ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    )


def _file_operations() -> dict[str, int]:
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/")
    counts = {metric["name"].rsplit("/", 1)[1]: metric["values"][0].get("value", 0) for metric in metrics}
    return {name: counts.get(name, 0) for name in ("write", "read", "batch_read")}


@pytest.mark.parametrize("store_format", ["zarr3", "zarr2"])
@pytest.mark.parametrize(("axis", "reads"), [(8, 0), (7, 3)])
def test_a_chunk_is_one_write_and_a_read_only_at_the_ragged_edge(tmp_path, store_format, axis, reads):
    spec = ArraySpec(("w",), "bfloat16", (axis, 3, 10), (4, 1, 10), (2, 1, 5))
    sink = open_sink(str(tmp_path), store_format, compression="zstd1")
    sink.prepare([spec])
    before = _file_operations()
    write_all(sink, [spec])
    after = _file_operations()
    assert {name: after[name] - before[name] for name in after} == {"write": 6, "read": reads, "batch_read": 0}


@pytest.mark.parametrize("store_format", ["zarr3", "zarr2"])
def test_a_plain_chunk_is_written_without_reading_even_at_the_ragged_edge(tmp_path, store_format):
    """Its bytes go to the file piece by piece, past TensorStore's file driver; it appears whole."""
    spec = ArraySpec(("w",), "bfloat16", (7, 3, 10), (4, 1, 10), (2, 1, 5))
    sink = open_sink(str(tmp_path), store_format)
    sink.prepare([spec])
    before = _file_operations()
    write_all(sink, [spec])
    assert _file_operations() == before
    sizes = sink.chunk_sizes([spec])
    assert len(sizes) == 6
    assert {key: (tmp_path / key).stat().st_size for key in sizes} == sizes
    assert not list(tmp_path.rglob("*.__lock"))


@pytest.mark.parametrize("store_format", ["zarr3", "zarr2"])
def test_a_chunk_torn_by_a_power_cut_is_written_again(tmp_path, store_format):
    sink = open_sink(str(tmp_path), store_format)
    sink.prepare(ARRAYS)
    write_all(sink)
    ragged = tmp_path / WI.chunk_key((1, 0, 0), store_format)
    os.truncate(ragged, 11)
    sink.prepare(ARRAYS)
    write_all(sink)
    sink.finalize(ARRAYS, [])
    assert read_back(tmp_path, WI, store_format).tobytes() == values_of(WI).tobytes()


def test_a_repeated_attempt_rewrites_the_same_bytes(tmp_path):
    sink = open_sink(str(tmp_path))
    sink.prepare(ARRAYS)
    write_all(sink, suffix="first")
    once = digest_of_tree(tmp_path)
    write_all(sink, suffix="second")
    assert digest_of_tree(tmp_path) == once


@pytest.mark.parametrize("store_format", FORMATS)
def test_the_array_may_be_reused_when_write_returns(tmp_path, store_format):
    sink = open_sink(str(tmp_path), store_format)
    sink.prepare([WI])
    scratch = np.empty((4, 1, 10), ml_dtypes.bfloat16)
    with sink.open_part("a") as part:
        for index in WI.indices():
            chunk = scratch.reshape(-1)[: np.prod(WI.box_shape(index))].reshape(WI.box_shape(index))
            chunk[...] = chunk_of(values_of(WI), WI, index)
            part.write(WI, index, chunk)
            scratch[...] = 0
    sink.finalize([WI], ["a"])
    assert read_back(tmp_path, WI, store_format).tobytes() == values_of(WI).tobytes()


@pytest.mark.parametrize("store_format", FORMATS)
def test_finalize_may_be_run_again(tmp_path, store_format):
    sink = open_sink(str(tmp_path), store_format)
    sink.prepare(ARRAYS)
    winners = write_all(sink)
    sink.finalize(ARRAYS, winners)
    sink.finalize(ARRAYS, winners)
    assert read_back(tmp_path, WI, store_format).tobytes() == values_of(WI).tobytes()


def test_losing_parts_are_deleted_and_do_not_count(tmp_path):
    sink = open_sink(str(tmp_path), "ocdbt")
    sink.prepare(ARRAYS)
    with sink.open_part("kernel-loser") as part:
        part.write(WI, (0, 0, 0), np.ones((4, 1, 10), ml_dtypes.bfloat16))
    winners = write_all(sink)
    torn = tmp_path / "parts" / "torn" / "d" / "0123"
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b"half")
    sink.finalize(ARRAYS, winners)
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == sorted(winners)
    assert read_back(tmp_path, WI, "ocdbt").tobytes() == values_of(WI).tobytes()


def test_a_listed_winner_that_is_not_there_shows_as_missing_chunks(tmp_path):
    sink = open_sink(str(tmp_path), "ocdbt")
    sink.prepare(ARRAYS)
    winners = write_all(sink)
    with pytest.raises(ChunkError, match="no such chunk"):
        sink.finalize(ARRAYS, [*winners[1:], "gone"])
    with pytest.raises(FerryError, match="listed twice"):
        sink.finalize(ARRAYS, [*winners, winners[0]])


def test_parts_do_not_carry_the_name_that_orbax_merges_by_itself(tmp_path):
    sink = open_sink(str(tmp_path), "ocdbt")
    write_all(sink)
    assert not list(tmp_path.glob("ocdbt.process_*"))
    with pytest.raises(ValueError):
        sink.open_part("../elsewhere")


def test_an_aborted_part_leaves_nothing(tmp_path):
    sink = open_sink(str(tmp_path), "ocdbt")
    part = sink.open_part("a")
    part.write(NORM, (0,), values_of(NORM))
    part.__exit__(RuntimeError, RuntimeError(), None)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_one_part_is_one_commit(tmp_path):
    sink = open_sink(str(tmp_path), "ocdbt")
    spec = ArraySpec(("w",), "float32", (60, 700), (1, 700), (1, 700))
    before = _file_operations()["write"]
    write_all(sink, [spec])
    assert _file_operations()["write"] - before < 15  # a few, whatever the number of chunks


def test_a_killed_write_leaves_nothing_behind(tmp_path):
    sink = open_sink(str(tmp_path))
    sink.prepare(ARRAYS)
    write_all(sink)
    (tmp_path / (WI.chunk_key((0, 0, 0), "zarr3") + ".__lock")).write_bytes(b"half a chunk")
    sink.finalize(ARRAYS, [])
    assert not list(tmp_path.rglob("*.__lock"))


@pytest.mark.parametrize("store_format", FORMATS)
def test_a_store_that_cannot_be_written_is_a_sentence(store_format):
    sink = open_sink("/proc/no-such-place", store_format)
    with pytest.raises(FerryError, match="run the same command again"):
        sink.prepare(ARRAYS)
    with pytest.raises(FerryError, match="run the same command again"), sink.open_part("a") as part:
        part.write(NORM, (0,), values_of(NORM))


@pytest.mark.parametrize("store_format", FORMATS)
def test_a_sink_can_be_sent_to_a_worker(tmp_path, store_format):
    sink = open_sink(str(tmp_path), store_format, "zstd1", crc32c=False)
    assert pickle.loads(pickle.dumps(sink)) == sink


def test_writing_imports_neither_jax_nor_orbax(tmp_path):
    code = (
        "import sys, numpy as np\n"
        "from tensorferry.mappings.plan.array_spec import ArraySpec\n"
        "from tensorferry.pipelines.sinks.sink import open_sink\n"
        "assert 'tensorstore' not in sys.modules\n"
        "spec = ArraySpec(('w',), 'float32', (2,), (2,), (2,))\n"
        f"with open_sink({str(tmp_path)!r}).open_part('a') as part: part.write(spec, (0,), np.ones(2, np.float32))\n"
        "assert not {'jax', 'orbax', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_formats_and_places_are_refused():
    with pytest.raises(FerryError, match=r"--format: expected zarr3 or ocdbt or zarr2; found zarr4"):
        open_sink("/x", "zarr4")
    with pytest.raises(FerryError, match=r"--compression: expected none or zstd1; found gzip"):
        open_sink("/x", compression="gzip")
    with pytest.raises(FerryError, match=r"a local path or gs://bucket/path; found s3://b/x"):
        kvstore("s3://b/x")


def test_a_bucket_is_a_key_value_store_too():
    assert kvstore("gs://bucket/a/b/") == {"driver": "gcs", "bucket": "bucket", "path": "a/b/"}
    assert kvstore("gs://bucket") == {"driver": "gcs", "bucket": "bucket", "path": ""}
