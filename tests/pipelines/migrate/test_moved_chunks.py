"""Stored chunks as the target's chunks: which may move, how their values are looked at, what must not pass."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st
from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.tunix.step_plan import TargetLeaf
from tensorferry.mappings.tunix.step_tree import ItemTree, Key, Leaf, dict_path
from tensorferry.mappings.words.problems import FerryError, PlanError
from tensorferry.pipelines.migrate.array_plan import ArrayPlan, plan_array
from tensorferry.pipelines.migrate.copy_items import GROUP_BYTES, LEAST_FILES, copy_items
from tensorferry.pipelines.migrate.decode_chunk import decode_chunk
from tensorferry.pipelines.migrate.orbax_tree import nested
from tensorferry.pipelines.migrate.step_reader import ReadFault, StepReader
from tensorferry.pipelines.migrate.step_record import StepRecord
from tensorferry.pipelines.orbax.chunk_codecs import chunk_codecs
from tensorferry.pipelines.orbax.step_discovery import FoundStep
from tensorferry.pipelines.regions.boxes import Scratch
from tensorferry.pipelines.sinks.sink import open_sink

BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
FOUND = FoundStep("run/7", "run", "", 7, "old")
CODECS = json.dumps([BYTES])


def written(folder: Path, driver: str, metadata: dict, values: np.ndarray) -> dict:
    """Writes an array and returns its stored metadata."""
    spec = {"driver": driver, "kvstore": f"file://{folder}/", "metadata": metadata}
    store = ts.open(spec, create=True, dtype=values.dtype.name, shape=values.shape).result()
    store.write(values).result()
    return json.loads((folder / ("zarr.json" if driver == "zarr3" else ".zarray")).read_bytes())


@pytest.mark.parametrize("compressor", [None, {"id": "zstd", "level": 3}])
def test_a_zarr2_chunk_is_a_zarr3_chunk(tmp_path: Path, compressor: dict | None) -> None:
    values = np.arange(35, dtype=np.float32).reshape(5, 7)
    stored = written(tmp_path, "zarr", {"chunks": [3, 7], "compressor": compressor}, values)
    chunk = (tmp_path / "1.0").read_bytes()
    decoded = decode_chunk(chunk_codecs(stored), "float32", (3, 7), chunk, Scratch())
    np.testing.assert_array_equal(decoded[:2], values[3:])


def test_a_sharded_zarr3_chunk_is_decoded_too(tmp_path: Path) -> None:
    values = np.arange(48, dtype=np.int32).reshape(6, 8)
    inner = {"chunk_shape": [3, 4], "codecs": [BYTES], "index_codecs": [BYTES, {"name": "crc32c"}]}
    grid = {"name": "regular", "configuration": {"chunk_shape": [6, 8]}}
    codecs = [{"name": "sharding_indexed", "configuration": inner}]
    stored = written(tmp_path, "zarr3", {"chunk_grid": grid, "codecs": codecs}, values)
    decoded = decode_chunk(chunk_codecs(stored), "int32", (6, 8), (tmp_path / "c/0/0").read_bytes(), Scratch())
    np.testing.assert_array_equal(decoded, values)


@pytest.mark.parametrize(
    "change",
    [
        {"order": "F"}, {"filters": [{"id": "delta"}]}, {"dtype": ">f4"}, {"dimension_separator": "/"},
        {"compressor": {"id": "blosc"}},
    ],
)  # fmt: skip
def test_what_zarr3_has_no_words_for_does_not_move(change: dict) -> None:
    plain = {"zarr_format": 2, "order": "C", "filters": None, "dtype": "<f4", "compressor": None}
    assert chunk_codecs(plain)
    assert chunk_codecs({**plain, **change}) == ""


def test_zarr3_chunks_under_other_names_do_not_move() -> None:
    plain = {"zarr_format": 3, "codecs": [BYTES], "chunk_key_encoding": {"name": "default"}}
    assert chunk_codecs(plain)
    assert chunk_codecs({**plain, "chunk_key_encoding": {"name": "v2"}}) == ""
    dots = {"name": "default", "configuration": {"separator": "."}}
    assert chunk_codecs({**plain, "chunk_key_encoding": dots}) == ""


@pytest.mark.parametrize("damage", [lambda c: c[:-3], lambda c: c + c, lambda c: b"", lambda c: b"\0" * len(c)])
@pytest.mark.parametrize("compressor", [None, {"id": "zstd", "level": 1}])
def test_a_torn_chunk_is_seen_by_the_look(tmp_path: Path, damage, compressor: dict | None) -> None:
    values = np.random.default_rng(0).integers(0, 99, (5, 7), np.int32)
    codecs = chunk_codecs(written(tmp_path, "zarr", {"chunks": [5, 7], "compressor": compressor}, values))
    chunk = damage((tmp_path / "0.0").read_bytes())
    if compressor is None and len(chunk) == values.nbytes:
        return  # other values, which nothing in the format can tell
    with pytest.raises(ReadFault, match="a stored chunk of int32"):
        decode_chunk(codecs, "int32", (5, 7), chunk, Scratch())


def leaf_of(shape: tuple[int, ...], chunk: tuple[int, ...], dtype: str = "float32", codecs: str = CODECS) -> TargetLeaf:
    source = Leaf("model_params", dict_path("w", "value"), shape=shape, dtype=dtype, chunk_shape=chunk, codecs=codecs)
    return TargetLeaf(dict_path("params", "params", "w"), shape=shape, dtype=dtype, source=source)


ITEMS = {"model_params": ItemTree("model_params", ())}


def test_many_tiny_chunks_are_gathered() -> None:
    few = plan_array(leaf_of((8, 8), (1, 8)), ITEMS, "zarr3", 1 << 20)
    assert (few.codecs, few.spec.chunk) == (CODECS, (1, 8))
    many = plan_array(leaf_of((640, 8), (1, 8)), ITEMS, "zarr3", 1 << 20)
    assert (many.codecs, many.spec.chunk) == ("", (640, 8))


def test_no_chunk_moves_into_zarr2_or_into_another_dtype() -> None:
    assert plan_array(leaf_of((8, 8), (4, 8)), ITEMS, "zarr2", 1 << 20).codecs == ""
    step = TargetLeaf(dict_path("step"), dtype="int32", source=leaf_of((), (), "uint32").source)
    assert plan_array(step, ITEMS, "zarr3", 1 << 20).codecs == ""


def test_an_empty_array_has_metadata_alone() -> None:
    plan = plan_array(leaf_of((0, 5), (1, 5)), ITEMS, "zarr3", 1 << 20)
    assert plan.codecs == ""
    assert list(plan.spec.indices()) == []


def test_a_dtype_nobody_knows_is_a_problem() -> None:
    with pytest.raises(PlanError, match="expected a dtype that zarr holds; found int3"):
        plan_array(leaf_of((4,), (4,), "int3"), ITEMS, "zarr3", 1 << 20)


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=3)


@given(LENGTHS, st.data(), st.integers(4, 4096))
def test_a_chunk_written_anew_is_made_of_whole_stored_chunks(shape: list[int], data: st.DataObject, limit: int) -> None:
    grid = tuple(data.draw(st.integers(1, 45)) for _ in shape)
    spec = plan_array(leaf_of(tuple(shape), grid, codecs=""), ITEMS, "zarr3", limit).spec
    for length, unit, chunk in zip(shape, grid, spec.chunk, strict=True):
        assert chunk >= length or chunk % unit == 0
    smallest = [min(unit, length) for unit, length in zip(grid, shape, strict=True)]
    assert spec.chunk_bytes <= max(limit, 4 * int(np.prod(smallest)))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5 << 20)), min_size=1, max_size=8))
def test_every_chunk_is_in_exactly_one_item(sizes: list[tuple[int, int]]) -> None:
    arrays = []
    for number, (chunks, length) in enumerate(sizes):
        path = dict_path("params", f"a{number}")
        names = tuple(key.name for key in path)
        arrays.append(ArrayPlan(path, ArraySpec(names, "float32", (chunks, length), (1, length), (1, length))))
    record = StepRecord(FOUND, "planned", arrays=tuple(arrays))
    items, files = copy_items(record, "zarr3"), copy_items(record, "ocdbt")
    assert [batch for file in files for batch in file.batches] == [item.batches[0] for item in items]
    assert [file.first for file in files] == list(
        itertools.accumulate((len(file.batches) for file in files[:-1]), initial=0)
    )
    assert len({file.id for file in files}) == len(files) <= 2 * LEAST_FILES
    found = [(part.array.spec.key, part.index) for item in items for part in item.parts]
    assert found == [(array.spec.key, index) for array in arrays for index in array.spec.indices()]
    assert all(item.nbytes <= GROUP_BYTES or len(item.parts) == 1 for item in items)
    assert [item.number for item in items] == list(range(len(items)))
    for one, other in itertools.pairwise(items):
        assert one.nbytes + other.parts[0].nbytes > GROUP_BYTES


def test_an_index_entry_without_its_data_file_is_no_chunk(tmp_path: Path) -> None:
    item = tmp_path / "run/7/model_params"
    base = {"driver": "ocdbt", "base": f"file://{item}/", "config": {"max_inline_value_bytes": 4}}
    metadata = {"chunks": [64], "compressor": None, "dtype": "<f4", "shape": [64]}
    spec = {"driver": "zarr", "kvstore": {**base, "path": "w.value/"}, "metadata": metadata}
    ts.open(spec, create=True).result().write(np.arange(64, dtype=np.float32)).result()
    plan = plan_array(leaf_of((64,), (64,)), ITEMS, "zarr3", 1 << 20)
    assert plan.source is not None
    stored = StepReader(str(tmp_path), "run/7", "whole").stored(plan.source, (0,))
    assert stored is not None
    assert len(stored) == 256
    for file in (item / "d").iterdir():
        file.write_bytes(b"")
    with pytest.raises(ReadFault, match=r"w\.value \(in run/7/model_params\)"):
        StepReader(str(tmp_path), "run/7", "gone").stored(plan.source, (0,))
    with pytest.raises(ReadFault, match="its array readable"):
        StepReader(str(tmp_path), "run/7", "gone").values(plan.source, ((0, 64),))


@pytest.mark.parametrize("store_format", ["zarr3", "ocdbt"])
def test_the_sink_takes_encoded_bytes_for_kept_arrays_alone(tmp_path: Path, store_format: str) -> None:
    kept = ArraySpec(("kept",), "int32", (6,), (4,), (4,))
    other = ArraySpec(("other",), "int32", (2,), (2,), (2,))
    sink = open_sink(str(tmp_path / "items"), store_format, kept={"kept": CODECS})
    sink.prepare([kept, other])
    values = np.array([5, 7, 11, 13, 17, 19], np.int32)
    edge = np.array([17, 19, 0, 0], np.int32)
    with sink.open_part("a") as writer:
        writer.write_stored(kept, (0,), values[:4].tobytes())
        writer.write_stored(kept, (1,), edge.tobytes())
        writer.write(other, (0,), np.array([1, 2], np.int32))
        with pytest.raises(FerryError, match="an array that is encoded here"):
            writer.write_stored(other, (0,), b"12345678")
        with pytest.raises(FerryError, match="no bytes"):
            writer.write_stored(kept, (0,), b"")
    sink.finalize([kept, other], ["a"])
    base = f"file://{tmp_path}/items/"
    where = {"driver": "ocdbt", "base": base, "path": "kept/"} if store_format == "ocdbt" else f"{base}kept/"
    store = ts.open({"driver": "zarr3", "kvstore": where}).result()
    np.testing.assert_array_equal(store.read().result(), values)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = (Key("opt_state"), Key("0", "sequence"), Key("count"))
    array = plan_array(leaf_of((6, 4), (3, 4)), ITEMS, "zarr3", 1 << 20)
    constant = ArrayPlan(dict_path("step"), ArraySpec(("step",), "int32", (), (), ()), constant=7, prng_impl="x")
    record = StepRecord(
        FOUND, "planned", arrays=(array, constant), marks=((path, "none"),), counts={"params": (1, 96)},
        weights={"w": (6, 4)}, custom_metadata={"global_step": 3}, copied_items=("iter",), warnings=("odd",),
    ).with_digest({"rng": "keep"})  # fmt: skip
    record.save(str(tmp_path), 12)
    assert StepRecord.load(str(tmp_path), 12) == record
    assert record.with_digest({"rng": "other"}).digest != record.digest


def test_lists_have_their_gaps() -> None:
    def at(place: str, *below: str) -> tuple[Key, ...]:
        return Key("opt_state"), Key(place, "sequence"), *map(Key, below)

    tree = nested([(at("2", "count"), 5), (at("0", "mu", "w"), 3), (at("0", "nu", "w"), None), (at("1"), {})])
    assert tree == {"opt_state": [{"mu": {"w": 3}, "nu": {"w": None}}, {}, {"count": 5}]}
    assert nested([(at("1"), 5), (at("3"), 6)]) == {"opt_state": [None, 5, None, 6]}
