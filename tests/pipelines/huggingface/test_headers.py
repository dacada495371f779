import json
import struct
import time
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorferry.mappings.words.problems import PlanError, Problem
from tensorferry.pipelines.huggingface import headers
from tensorferry.pipelines.huggingface.headers import parse_header, read_header, scan_header
from tensorferry.pipelines.storage.byte_source import LocalSource

# Bits per element as the format's own description lists them, kept apart from our table of dtypes.
BITS_TO_CODES = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ F8_E8M0",
    16: "U16 I16 F16 BF16",
    32: "U32 I32 F32",
    64: "U64 I64 F64 C64",
}
BITS = {code: bits for bits, codes in BITS_TO_CODES.items() for code in codes.split()}


def shard(entries: object, data: bytes = b"", pad: int = 0) -> bytes:
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode() + b" " * pad
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list, begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def problems_of(raw: bytes) -> list[str]:
    return [str(problem) for problem in parse_header(raw, "m.safetensors", len(raw))[1]]


class CountingSource(LocalSource):
    """Counts ranged reads."""

    reads: ClassVar[list] = []

    def read(self, path, start, length):
        self.reads.append((start, length))
        return super().read(path, start, length)


def test_reads_what_the_safetensors_library_writes(tmp_path):
    rng = np.random.default_rng(3)
    arrays = {
        "norm": rng.normal(size=7).astype(np.float32),
        "embed": rng.normal(size=(5, 6)).astype(ml_dtypes.bfloat16),
        "experts": rng.integers(0, 255, (4, 3, 5)).astype(np.uint8),
        "scale": np.full((), 2.5, np.float32),
        "mask": np.array([True, False, True]),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "m.safetensors", {"format": "pt"})
    raw = (tmp_path / "m.safetensors").read_bytes()
    header = read_header(LocalSource(str(tmp_path)), "m.safetensors")
    assert header.metadata == {"format": "pt"}
    assert {one.name for one in header.tensors} == set(arrays)
    for one in header.tensors:
        array = arrays[one.name]
        assert (one.dtype, one.shape, one.file) == (array.dtype.name, array.shape, "m.safetensors")
        assert raw[one.offset : one.offset + one.nbytes] == array.tobytes()
    assert [one.offset for one in header.tensors] == sorted(one.offset for one in header.tensors)
    assert header.tensors[0].offset == header.header_bytes


@pytest.mark.parametrize("code", BITS)
def test_every_dtype_of_the_format(code):
    nbytes = BITS[code] * 3 * 8 // 8
    raw = shard({"t": entry(code, [3, 8], 0, nbytes)}, bytes(nbytes))
    header, problems = parse_header(raw, "m", len(raw))
    assert not problems
    assert header is not None
    assert header.tensors[0].nbytes == nbytes


def test_mixed_dtypes_in_one_shard():
    raw = shard({"norm": entry("F32", [3], 0, 12), "w": entry("BF16", [5, 2], 12, 32)}, bytes(32))
    header, _ = parse_header(raw, "m", len(raw))
    assert header is not None
    assert [(one.dtype, one.offset - header.header_bytes) for one in header.tensors] == [
        ("float32", 0),
        ("bfloat16", 12),
    ]


def test_digest_is_of_the_header_alone(tmp_path):
    first = shard({"t": entry("U8", [2], 0, 2)}, b"ab")
    other_data = shard({"t": entry("U8", [2], 0, 2)}, b"xy")
    other_name = shard({"u": entry("U8", [2], 0, 2)}, b"ab")
    digests = [parse_header(raw, "m", len(raw))[0].digest for raw in (first, other_data, other_name)]  # type: ignore[union-attr]
    assert digests[0] == digests[1] != digests[2]


def test_a_small_header_takes_one_read_and_a_large_one_two(tmp_path):
    for name, count in (("small", 3), ("large", 3000)):
        entries = {f"layers.{i}.w": entry("F32", [], 4 * i, 4 * i + 4) for i in range(count)}
        (tmp_path / name).write_bytes(shard(entries, bytes(4 * count)))
    source = CountingSource(str(tmp_path))
    for name, reads in (("small", 1), ("large", 2)):
        source.reads.clear()
        header = read_header(source, name)
        assert len(source.reads) == reads
        assert sum(length for _, length in source.reads) <= max(headers.FIRST_READ_BYTES, header.header_bytes)
    assert header.header_bytes > headers.FIRST_READ_BYTES


def test_no_cap_of_100_mb(tmp_path):
    raw = shard({"t": entry("U8", [2], 0, 2)}, b"ab", pad=101_000_000)
    (tmp_path / "m.safetensors").write_bytes(raw)
    assert read_header(LocalSource(str(tmp_path)), "m.safetensors").header_bytes == len(raw) - 2


def test_empty_header_is_legal():
    header, problems = parse_header(shard({}), "m", 10)
    assert not problems
    assert header is not None
    assert header.tensors == ()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 4976698672\n"
WEIGHT = {"w": entry("F32", [3], 0, 12)}
TWICE = json.dumps(WEIGHT)[:-1] + ", " + json.dumps(WEIGHT)[1:]
W = "w (in m.safetensors): expected"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "m.safetensors: expected a safetensors file; found an empty file. The download is incomplete"),
        (b"\x05\0\0", "expected a safetensors file of 8 bytes or more; found 3 bytes"),
        (LFS, "found a Git-LFS pointer for 4976698672 bytes that were not fetched. Run `git lfs pull`"),
        (b"PK\x03\x04" + bytes(90), "found a zip archive (a PyTorch file?)"),
        (b"<!DOCTYPE html><html>", "found a web page"),
        (struct.pack("<Q", 500) + b"{}", "its own header of 500 bytes; found a file of 10 bytes: 498 bytes are"),
        (struct.pack("<Q", 4) + b"[{}]", "a header that begins with '{'; found '[{}]'"),
        (shard('{"w": '), "expected the header as JSON; found text that is not JSON (Expecting value"),
        (shard('{"w": "\udcff"}'.encode("utf-8", "surrogateescape").decode("latin-1")), "expected an object with"),
        (struct.pack("<Q", 4) + b'{"\xff"', "not UTF-8 at byte 2"),
        (shard('{"a":' * 100_000), "nested too deeply"),
        (shard({"w": [1, 2]}), f"{W} an object with dtype, shape and data_offsets; found [1, 2]"),
        (shard({"w": {"dtype": "F32"}}), "expected an object with dtype, shape and data_offsets"),
        (shard({"w": entry("F9", [3], 0, 12)}, bytes(12)), f"{W} a dtype of the format (BOOL,"),
        (shard({"w": {**WEIGHT["w"], "dtype": ["F32"]}}), 'found ["F32"]'),
        (shard({"w": entry("F32", [-3], 0, 12)}, bytes(12)), "whole numbers, none below 0; found [-3]"),
        (shard({"w": entry("F32", [True, 3], 0, 12)}, bytes(12)), "found [true, 3]"),
        (shard({"w": entry("F32", [3.0], 0, 12)}, bytes(12)), "found [3.0]"),
        (shard({"w": entry("F32", [3], 12, 0)}, bytes(12)), "two whole numbers, begin and end; found [12, 0]"),
        (shard({"w": entry("F32", [4], 0, 12)}, bytes(12)), "expected 16 bytes for F32 [4]; found 12 bytes between"),
        (shard({"w": entry("F4", [2, 3], 0, 3)}, bytes(3)), "(4 bits per element in F4); found shape [2, 3]"),
        (shard({"w": entry("F6_E2M3", [4, 2], 0, 6)}, bytes(6)), "fills whole bytes (6 bits per element"),
        (shard({"w": entry("F4", [], 0, 1)}, bytes(1)), "fills whole bytes"),
        (shard({"__metadata__": {"a": 1}}), "__metadata__ (in m.safetensors): expected an object of strings"),
        (shard(WEIGHT, bytes(11)), "found 81 bytes: 1 bytes are missing. The download is incomplete"),
        (shard(WEIGHT, bytes(6)), "6 bytes are missing"),
        (shard(WEIGHT, bytes(15)), "found 85 bytes: 3 bytes follow the last tensor"),
        (shard({**WEIGHT, "v": entry("U8", [5], 14, 19)}, bytes(19)), "at offset 12; found a hole of 2 bytes after w"),
        (shard({**WEIGHT, "v": entry("U8", [5], 7, 12)}, bytes(12)), "found an overlap of 5 bytes with w"),
        (shard({**WEIGHT, "tied": entry("F32", [3], 0, 12)}, bytes(12)), "found an overlap of 12 bytes with"),
        (shard(TWICE, bytes(12)), f"{W} one entry in the header; found the same key more than once"),
        (shard({"\ud800": WEIGHT["w"]}, bytes(12)), "expected a name in Unicode"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_each_fault_has_its_sentence(raw, words):
    found = problems_of(raw)
    assert len(found) == 1
    assert words in found[0]


def test_all_faults_are_told_at_once():
    entries = {"a": entry("F9", [1], 0, 1), "b": entry("U8", [3], 1, 3), "c": None, "d": entry("U8", [9], 3, 12)}
    found = problems_of(shard(entries, bytes(7)))
    assert len(found) == 4
    assert "5 bytes are missing" in found[-1]


def test_names_survive_beside_faults_for_comparison_with_an_index():
    raw = shard(WEIGHT, bytes(5))
    header, problems = parse_header(raw, "m", len(raw))
    assert problems
    assert header is not None
    assert [one.name for one in header.tensors] == ["w"]


def test_read_header_raises_all_problems(tmp_path):
    (tmp_path / "m").write_bytes(shard({"a": None, "b": None}))
    with pytest.raises(PlanError) as caught:
        read_header(LocalSource(str(tmp_path)), "m")
    assert len(caught.value.problems) == 2


def test_a_damaged_length_is_not_read_as_a_header(tmp_path):
    with open(tmp_path / "m", "wb") as file:
        file.write(struct.pack("<Q", 1 << 31) + b"{}")
        file.truncate(1 << 32)
    source = CountingSource(str(tmp_path))
    source.reads.clear()
    header, problems = scan_header(source, "m", 1 << 32)
    assert header is None
    assert "expected a header of at most 1073741824 bytes; found a header of 2147483648" in str(problems[0])
    assert len(source.reads) == 1


def test_missing_file_is_a_problem(tmp_path):
    header, problems = scan_header(LocalSource(str(tmp_path)), "gone", 100)
    assert header is None
    assert "gone: expected a file of the source" in str(problems[0])


VALID = shard(
    {
        "__metadata__": {"format": "pt"},
        "norm": entry("F32", [7], 0, 28),
        "embed": entry("BF16", [5, 6], 28, 88),
        "codes": entry("F4", [3, 4], 88, 94),
    },
    bytes(94),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([*BITS]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "w"]), inner, max_size=4)
    ),
    max_leaves=12,
)
NUMBERS = st.integers(-2, 30) | st.integers(0, 1 << 70) | st.booleans() | st.floats()
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*BITS, "F9"]) | JSON,
        "shape": st.lists(NUMBERS, max_size=70) | JSON,
        "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2) | JSON,
    }
)


def judge(raw: bytes) -> None:
    header, problems = parse_header(raw, "m", len(raw))
    assert header is not None or problems
    assert all(isinstance(problem, Problem) and str(problem).encode() for problem in problems)
    if not problems:
        assert header is not None
        assert sum(one.nbytes for one in header.tensors) == len(raw) - header.header_bytes


@given(st.binary(max_size=200))
def test_random_bytes_never_raise(raw):
    judge(raw)


@given(st.binary(max_size=60))
def test_random_header_text_never_raises(text):
    judge(struct.pack("<Q", len(text) + 1) + b"{" + text)


@given(st.dictionaries(st.text(max_size=4), ENTRY | JSON, max_size=5), st.integers(0, 40))
@settings(deadline=None)
def test_random_entries_never_raise(entries, data_bytes):
    judge(shard(entries, bytes(data_bytes)))


@given(st.data())
def test_mutated_headers_never_raise(data):
    raw = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    judge(bytes(raw))


@given(st.integers(0, len(VALID) - 1))
def test_every_cut_is_noticed(length):
    assert problems_of(VALID[:length])


def test_the_valid_header_of_the_mutations_is_valid():
    assert not problems_of(VALID)


@given(st.lists(st.tuples(st.sampled_from([*BITS]), st.integers(0, 5), st.integers(0, 3)), max_size=6), st.randoms())
def test_agrees_with_the_library_on_what_is_valid(tensors, random):
    """Random tilings, one of them disturbed: we accept only what the safetensors library accepts too."""
    entries, cursor = {}, 0
    for number, (code, rows, groups) in enumerate(tensors):
        nbytes = BITS[code] * rows * groups * 4 // 8
        entries[f"t{number}"] = entry(code, [rows, groups * 4], cursor, cursor + nbytes)
        cursor += nbytes
    names = list(entries)
    random.shuffle(names)
    if random.random() < 0.5 and names:
        entries[names[0]]["data_offsets"][random.randrange(2)] += random.choice([-1, 1])
    raw = shard({name: entries[name] for name in names}, bytes(cursor))
    try:
        safetensors.deserialize(raw)
        valid = True
    except (safetensors.SafetensorError, OverflowError):
        valid = False
    assert (not problems_of(raw)) == valid


def test_100_000_tensors_in_160_shards_in_seconds(tmp_path):
    count = 625
    for number in range(160):
        names = [f"model.layers.{number}.mlp.experts.{i}.down_proj.weight" for i in range(count)]
        entries = {name: entry("BF16", [3, 5], 30 * i, 30 * i + 30) for i, name in enumerate(names)}
        (tmp_path / f"{number}.safetensors").write_bytes(shard(entries, bytes(30 * count)))
    source = LocalSource(str(tmp_path))
    start = time.process_time()
    total = sum(len(read_header(source, f"{number}.safetensors").tensors) for number in range(160))
    assert total == 100_000
    assert time.process_time() - start < 4  # 0.6 s when measured
