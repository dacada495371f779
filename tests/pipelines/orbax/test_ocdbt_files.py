"""OCDBT's data files: many work items in each, whole or not there, written once, read by stock Orbax."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import tiny_llama
from tensorferry.mappings.plan import work_items as items
from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.plan.conversion_plan import PlanOptions
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.convert.conversion import OutputOptions, convert
from tensorferry.pipelines.convert.conversion_planning import ConversionOptions, plan_conversion
from tensorferry.pipelines.convert.units import Units
from tensorferry.pipelines.sinks import ocdbt
from tensorferry.pipelines.sinks.ocdbt import OcdbtSink, OcdbtWriter
from tensorferry.pipelines.sinks.sink import open_sink
from tensorferry.pipelines.storage import local_chunk, retries
from tensorferry.pipelines.storage.streams import PIECE_BYTES

TARGET = PlanOptions(chunk_bytes=700)
FILES = 17
WI = ArraySpec(("params", "wi"), "bfloat16", (10, 9), (8, 9), (4, 3))


@pytest.fixture(autouse=True)
def small_items(monkeypatch):
    """Arrays this small would all go into one work item."""
    monkeypatch.setattr(items, "MAX_GROUPED_PARTS", 1)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    return str(tiny_llama.write(tmp_path_factory.mktemp("ocdbt") / "source"))


@pytest.fixture(scope="module")
def wanted(source, tmp_path_factory) -> dict[bytes, bytes]:
    """Every chunk, as written by way of zarr3."""
    folder = tmp_path_factory.mktemp("zarr3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items, "MAX_GROUPED_PARTS", 1)
        convert(ConversionOptions(source, target=TARGET), OutputOptions(str(folder)), lambda line: None)
    item = folder / "0/items"
    return {file.relative_to(item).as_posix().encode(): file.read_bytes() for file in item.glob("params.*/c/**/*")
            if file.is_file()}  # fmt: skip


def do(source: str, output: str):
    return convert(ConversionOptions(source, target=TARGET), OutputOptions(output, "ocdbt"), lambda line: None)


def units(source: str) -> list:
    return list(Units(plan_conversion(ConversionOptions(source, target=TARGET)).plan, "ocdbt"))


def parts(names) -> dict[str, list[str]]:
    """The files of each attempt, by the names of all files of an item."""
    found: dict[str, list[str]] = {}
    for name in names:
        if "/parts/" in name:
            attempt, _, file = name.split("/parts/")[1].partition("/")
            found.setdefault(attempt, []).append(file)
    return found


def files(folder: Path) -> list[str]:
    return [path.as_posix() for path in folder.rglob("*") if path.is_file()]


def is_right(item: str) -> bool:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore(item)
    embedding = tree["params"]["params"]["token_embedder"]["embedding"]
    return bool((embedding == tiny_llama.tensors()["model.embed_tokens.weight"]).all()) and int(tree["step"]) == 0


def test_a_data_file_holds_several_work_items_and_nothing_lies_beside_it(source, tmp_path):
    outcome = do(source, str(tmp_path))
    planned = units(source)
    assert outcome.redone_items == len(planned) == FILES
    assert sorted(len(unit.items) for unit in planned)[1] > 1
    found = parts(files(tmp_path))
    assert sorted(attempt.rsplit("-", 1)[0] for attempt in found) == [unit.id for unit in planned]
    for names in found.values():
        manifest, data = sorted(names, key=lambda name: name.startswith("d/"))
        assert manifest == "manifest.ocdbt"
        assert len(data) == len("d/") + 32
    assert is_right(f"{tmp_path}/0/items")
    assert main(["verify", "--source", source, "--output", str(tmp_path)]) == 0


_KILL = """
import os, signal, sys
from tensorferry.mappings.plan import work_items as items
from tensorferry.pipelines.convert.conversion import OutputOptions, convert
from tensorferry.pipelines.convert.conversion_planning import ConversionOptions
from tensorferry.mappings.plan.conversion_plan import PlanOptions
from tensorferry.pipelines.sinks.ocdbt import OcdbtWriter
items.MAX_GROUPED_PARTS = 1
real, seen = OcdbtWriter.write, []
def write(self, *chunk):
    real(self, *chunk)
    seen.append(self)
    if len(set(map(id, seen))) == 3 and seen.count(self) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
OcdbtWriter.__eq__ = object.__eq__
OcdbtWriter.write = write
options = OutputOptions(sys.argv[2], "ocdbt", beam_args=("--direct_num_workers", "1"))
convert(ConversionOptions(sys.argv[1], target=PlanOptions(chunk_bytes=700)), options, print)
"""


def kill_within_the_third_file(source: str, output: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", _KILL, source, output]
    done = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr


def test_killed_within_a_file_and_resumed(source, tmp_path):
    kill_within_the_third_file(source, str(tmp_path))
    left = parts(files(tmp_path))
    assert len(left) == 3
    assert sum("manifest.ocdbt" in names for names in left.values()) == 2, "half a file counts for nothing"
    assert sum(name.endswith(".__lock") for names in left.values() for name in names) == 1
    outcome = do(source, str(tmp_path))
    assert (outcome.kept_items, outcome.redone_items) == (2, FILES - 2)
    assert len(parts(files(tmp_path))) == len(list((tmp_path / "0/items/parts").iterdir())) == FILES
    assert is_right(f"{tmp_path}/0/items")


def test_killed_and_resumed_in_a_bucket_where_every_object_is_written_once(gcs, bucket, source, wanted):
    pytest.importorskip("google.cloud.storage", reason="needs google-cloud-storage")
    kill_within_the_third_file(source, f"gs://{bucket}/out")
    assert len(parts(gcs.names(bucket, "out/0/"))) == 2
    outcome = do(source, f"gs://{bucket}/out")
    assert (outcome.kept_items, outcome.redone_items) == (2, FILES - 2)
    names = gcs.names(bucket, "out/0/")
    assert [sorted(len(file) for file in some) for some in parts(names).values()] == [[14, 34]] * FILES
    assert {gcs.writes[f"{bucket}/{name}"] for name in names} == {1}
    assert values_below(f"gs://{bucket}/out/0/items/") == wanted


def test_an_upload_lost_within_a_file_costs_that_file(gcs, bucket, source, wanted, monkeypatch):
    pytest.importorskip("google.cloud.storage", reason="needs google-cloud-storage")
    monkeypatch.setattr(retries, "sleep", lambda seconds: None)
    gcs.fail("^PUT /upload.*resumable", 410, times=1, after=1)
    outcome = do(source, f"gs://{bucket}/out")
    assert outcome.redone_items == FILES
    assert len(gcs.seen("^POST /upload.*resumable")) == FILES + 1
    assert len(parts(gcs.names(bucket, "out/0/"))) == FILES
    assert values_below(f"gs://{bucket}/out/0/items/") == wanted


def values_below(base: str) -> dict[bytes, bytes]:
    """The chunks of a database's arrays, but for that of the step, which Orbax writes."""
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    keys = [key for key in store.list().result() if b"/c" in key and not key.startswith(b"step/")]
    return {key: bytes(store[key]) for key in keys}


def test_a_missing_permission_is_one_sentence(gcs, bucket, source, capsys):
    pytest.importorskip("google.cloud.storage", reason="needs google-cloud-storage")
    gcs.fail("^POST /upload.*resumable", 403, times=99)
    command = ["convert", "--source", source, "--output", f"gs://{bucket}/out", "--format", "ocdbt"]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "expected an object that can be written; found permission denied (403). Give the account" in error
    assert "Traceback" not in error
    gcs.faults.clear()
    assert main(command) == 0


@pytest.mark.by_turns
@pytest.mark.parametrize("damage", ["gone", "cut", "no manifest"])
@pytest.mark.parametrize("place", ["here", "in a bucket"])
def test_a_data_file_lost_before_the_commit_is_written_again(
    source, tmp_path, wanted, monkeypatch, request, damage, place
):
    if place == "here":
        output, remove, cut = str(tmp_path), lambda name: os.unlink(name), lambda name: os.truncate(name, 1000)
    else:
        pytest.importorskip("google.cloud.storage", reason="needs google-cloud-storage")
        name = request.getfixturevalue("bucket")
        output, gcs = f"gs://{name}/out", request.getfixturevalue("gcs")
        remove = lambda one: gcs.delete(name, one)  # noqa: E731
        cut = lambda one: gcs.put(name, one, gcs.get(name, one)[:1000])  # noqa: E731
    finalize, calls = OcdbtSink.finalize, []

    def hurt(self, arrays, winners, scalars=()):
        calls.append(list(winners))
        if len(calls) == 1:
            found = files(Path(self.root)) if place == "here" else gcs.names(name, "out/0/items/")
            (data,) = [one for one in found if f"/{winners[1]}/d/" in one]
            (manifest,) = [one for one in found if one.endswith(f"/{winners[2]}/manifest.ocdbt")]
            {"gone": lambda: remove(data), "cut": lambda: cut(data), "no manifest": lambda: remove(manifest)}[damage]()
        finalize(self, arrays, winners, scalars)

    monkeypatch.setattr(OcdbtSink, "finalize", hurt)
    outcome = do(source, output)
    assert outcome.redone_items == FILES + 1
    first, second = (set(winners) for winners in calls)
    assert len(first - second) == len(second - first) == 1
    base = output if place != "here" else f"file://{output}"
    assert values_below(f"{base}/0/items/") == wanted


def test_receipts_of_another_grouping_do_not_count(source):
    found = Units(plan_conversion(ConversionOptions(source, target=TARGET)).plan, "ocdbt")
    receipts = {unit.id: {"attempt": f"{unit.id}-a"} for unit in found} | {"0000000": {"attempt": "0000000-old"}}
    assert found.attempts(receipts) == [f"{unit.id}-a" for unit in found]
    assert found.count == FILES


# The writer by itself.


def put_down(sink, spec: ArraySpec = WI) -> None:
    values = np.arange(np.prod(spec.shape), dtype=np.float32).astype("bfloat16").reshape(spec.shape)
    with sink.open_part("a") as writer:
        for index in spec.indices():
            box = tuple(slice(*span) for span in spec.box(index))
            writer.write(spec, index, np.ascontiguousarray(values[box]))


def test_tensorstore_encodes_the_same_bytes_where_checksums_are_slow(tmp_path, monkeypatch):
    found = []
    for name, fast in (("fast", True), ("slow", False)):
        monkeypatch.setattr(ocdbt, "checksum_is_fast", lambda fast=fast: fast)
        put_down(open_sink(str(tmp_path / name), "ocdbt"))
        found.append(values_below(f"file://{tmp_path}/{name}/parts/a/"))
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_two_open_parts_of_one_thread_do_not_mix(tmp_path):
    sink = open_sink(str(tmp_path), "ocdbt")
    one, other = sink.open_part("one"), sink.open_part("other")
    for number, writer in enumerate((one, other, one, other)):
        spec = ArraySpec((f"w{number}",), "float32", (3,), (3,), (3,))
        writer.write(spec, (0,), np.full(3, number, np.float32))
    one.close()
    other.close()
    for name, numbers in (("one", (0, 2)), ("other", (1, 3))):
        found = values_below(f"file://{tmp_path}/parts/{name}/")
        assert {key: np.frombuffer(value[:12], "<f4")[0] for key, value in found.items()} == {
            b"w%d/c/0" % number: number for number in numbers
        }


def test_a_full_disk_is_a_sentence_and_leaves_no_draft(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(local_chunk._File, "write_end", full)
    with pytest.raises(FerryError, match=r"part a: expected its data file written; .*No space left on device"):
        put_down(open_sink(str(tmp_path), "ocdbt"))
    assert files(tmp_path) == []


def test_what_a_writer_needs_beside_the_values(monkeypatch):
    mib = 1 << 20
    here, there = (open_sink(root, "ocdbt").within(1 << 30) for root in ("/x", "gs://b/x"))
    assert here.encoding_bytes([3 * mib, 64 * mib, 64 * mib]) == 64 * mib
    assert there.encoding_bytes([3 * mib]) == 3 * mib + 3 * PIECE_BYTES
    assert there.within(64 * mib).encoding_bytes([3 * mib]) == 3 * mib + 3 * mib
    packed = open_sink("gs://b/x", "ocdbt", "zstd1")
    assert packed.encoding_bytes([64 * mib, 64 * mib]) == 2 * 64 * mib + 3 * PIECE_BYTES


def test_a_part_without_chunks_is_no_database(tmp_path):
    with open_sink(str(tmp_path), "ocdbt").open_part("a") as writer:
        assert isinstance(writer, OcdbtWriter)
    assert files(tmp_path) == []
