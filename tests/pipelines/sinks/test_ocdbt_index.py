"""Our index of an OCDBT database, judged by TensorStore: its dump, its reads, its merge, and what it writes itself."""

import os
import uuid
from pathlib import Path

import pytest
import tensorstore as ts
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensorferry.pipelines.orbax.ocdbt_files import referenced_files
from tensorferry.pipelines.sinks.ocdbt_index import CONFIG, Entry, encode_leaf, encode_manifest

Values = dict[str, bytes]


def write(folder: Path, values: Values, gap: bytes = b"") -> list[Entry]:
    """A database of one data file, as a writer puts it down."""
    file, data, entries = f"d/{uuid.uuid4().hex}", b"", []
    for key, value in values.items():
        data += gap
        entries.append(Entry(key, len(data), len(value)))
        data += value
    leaf = encode_leaf(file, entries)
    (folder / "d").mkdir(parents=True)
    (folder / file).write_bytes(data + leaf)
    (folder / "manifest.ocdbt").write_bytes(encode_manifest(file, len(data), len(leaf), entries))
    return entries


def base(folder: Path) -> ts.KvStore:
    return ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()


def database(folder: Path, context: ts.Context | None = None) -> ts.KvStore:
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}, "config": CONFIG}
    return ts.KvStore.open(spec, context=context or ts.Context()).result()


def read_all(store: ts.KvStore) -> Values:
    return {key.decode(): bytes(store.read(key).result().value) for key in store.list().result()}


def leaf_of(folder: Path) -> dict:
    return ts.ocdbt.dump(
        base(folder), ts.ocdbt.dump(base(folder)).result()["versions"][-1]["root"]["location"]
    ).result()


NAMES = st.text(st.sampled_from("ab/.0é"), max_size=12)
SOME = st.dictionaries(NAMES, st.binary(max_size=40), min_size=1, max_size=200)


@given(values=SOME, gap=st.binary(max_size=3))
@example(values={"": b""}, gap=b"")
@example(values={f"w/c/{n}/{m}": b"x" * n for n in range(20) for m in range(10)}, gap=b"-")
@example(values={"k" * 300: b"1", "k" * 300 + "/c": b"2" * 5000}, gap=b"")
@settings(max_examples=60, deadline=None)
def test_tensorstore_reads_every_value(tmp_path_factory, values, gap):
    folder = tmp_path_factory.mktemp("db")
    write(folder, values, gap)
    assert read_all(database(folder)) == values
    (version,) = ts.ocdbt.dump(base(folder)).result()["versions"]
    statistics = version["root"]["statistics"]
    assert statistics["num_keys"] == len(values)
    assert statistics["num_indirect_value_bytes"] == sum(map(len, values.values()))


@given(parts=st.lists(SOME, min_size=2, max_size=4))
@settings(max_examples=20, deadline=None)
def test_tensorstore_merges_them_by_reference(tmp_path_factory, parts):
    folder, context, wanted = tmp_path_factory.mktemp("db"), ts.Context(), {}
    target = database(folder, context)
    for number, values in enumerate(parts):
        named = {f"{number}/{key}": value for key, value in values.items()}
        write(folder / "parts" / str(number), named)
        database(folder / "parts" / str(number), context).experimental_copy_range_to(target).result()
        wanted |= named
    assert read_all(database(folder)) == wanted
    pointed_at = {file.rsplit("/d/", 1)[0] for file in referenced_files(base(folder)) if "/" in file.removeprefix("d/")}
    assert pointed_at == {f"parts/{number}" for number in range(len(parts))}


def test_the_database_is_configured_as_tensorstore_configures_its_own(tmp_path):
    values = {"params.w/c/0": os.urandom(3000), "params.w/c/1": os.urandom(2000), "params.b/c": os.urandom(1100)}
    entries = write(tmp_path / "ours", values)
    transaction, store = ts.Transaction(), database(tmp_path / "theirs")
    for key, value in values.items():
        store.with_transaction(transaction).write(key, value).result()
    transaction.commit_async().result()
    ours, theirs = (ts.ocdbt.dump(base(tmp_path / name)).result() for name in ("ours", "theirs"))
    assert {**ours["config"], "uuid": ""} == {**theirs["config"], "uuid": ""}
    assert ours["config"]["uuid"] != theirs["config"]["uuid"]
    (mine,), *_, other = ours["versions"], theirs["versions"][-1]
    assert abs(mine["commit_time"] - other["commit_time"]) < 60e9
    ours, theirs = leaf_of(tmp_path / "ours"), leaf_of(tmp_path / "theirs")
    assert ours["height"] == theirs["height"] == 0
    lengths = [
        [(one["key"], int(one["indirect_value"].rsplit(":", 1)[1])) for one in leaf["entries"]]
        for leaf in (ours, theirs)
    ]
    assert lengths[0] == lengths[1]
    places = {entry.key: f":{entry.offset}:{entry.nbytes}" for entry in entries}
    assert all(one["indirect_value"].endswith(places[one["key"].decode()]) for one in ours["entries"])


def test_a_value_beyond_four_gigabytes_has_its_place(tmp_path):
    file, far = "d/0123", 5 << 30
    entries = [Entry("a", 0, 3), Entry("b", far, 4)]
    leaf = encode_leaf(file, entries)
    (tmp_path / "d").mkdir()
    with open(tmp_path / file, "wb") as data:
        data.write(b"one")
        data.seek(far)
        data.write(b"last" + leaf)
    (tmp_path / "manifest.ocdbt").write_bytes(encode_manifest(file, far + 4, len(leaf), entries))
    assert read_all(database(tmp_path)) == {"a": b"one", "b": b"last"}


@pytest.mark.parametrize("where", [5, 40, -3])
def test_a_flipped_bit_is_seen(tmp_path, where):
    write(tmp_path, {"a": b"1" * 2000, "b": b"2"})
    (file,) = (tmp_path / "d").iterdir()
    data = bytearray(file.read_bytes())
    at = 2001 + where if where > 0 else len(data) + where
    data[at] ^= 4
    file.write_bytes(data)
    with pytest.raises(ValueError, match="DATA_LOSS"):
        read_all(database(tmp_path))


def test_what_cannot_be_an_index_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="found 0 keys"):
        encode_leaf("d/0", [])
    with pytest.raises(ValueError, match="all different; found 2 keys"):
        encode_leaf("d/0", [Entry("a", 0, 1), Entry("a", 1, 1)])
    monkeypatch.setitem(CONFIG, "max_decoded_node_bytes", 50)
    with pytest.raises(ValueError, match="10 keys are too many"):
        encode_leaf("d/0", [Entry(f"key{n}", n, 1) for n in range(10)])
