import gc
import os
import pickle
import threading

import numpy as np
import pytest
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.storage import byte_source
from tensorferry.pipelines.storage.byte_source import LocalSource, MissingFileError, SourceError, open_source

DATA = bytes(range(251)) * 7


@pytest.fixture
def source(tmp_path):
    (tmp_path / "w.bin").write_bytes(DATA)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "v.bin").write_bytes(b"abc")
    return LocalSource(str(tmp_path))


def test_list_folders_and_sizes(source):
    assert source.list() == {"w.bin": len(DATA)}
    assert source.folders() == ("deep",)
    assert source.size("w.bin") == len(DATA)
    assert source.size("deep/v.bin") == 3


def test_links_count_as_files_and_dead_links_as_nothing(source):
    os.symlink(os.path.join(source.root, "w.bin"), os.path.join(source.root, "link.bin"))
    os.symlink(os.path.join(source.root, "gone"), os.path.join(source.root, "dead.bin"))
    assert source.list() == {"w.bin": len(DATA), "link.bin": len(DATA)}
    assert source.read("link.bin", 5, 3) == DATA[5:8]


@pytest.mark.parametrize(("start", "length"), [(0, 0), (0, 1), (3, 700), (0, len(DATA)), (len(DATA) - 1, 1)])
def test_reads_exactly_the_range(source, start, length):
    assert source.read("w.bin", start, length) == DATA[start : start + length]
    buffer = bytearray(b"\xff" * (length + 2))
    source.readinto("w.bin", start, memoryview(buffer)[1:-1])
    assert bytes(buffer) == b"\xff" + DATA[start : start + length] + b"\xff"


def test_readinto_fills_arrays_of_any_dtype_and_shape(source):
    array = np.zeros((3, 5), "<u2")
    source.readinto("w.bin", 7, array.data)
    assert array.tobytes() == DATA[7:37]
    source.readinto("w.bin", 0, np.zeros((0, 5)).data)


def test_reads_go_on_after_a_short_read(source, monkeypatch):
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda number, length, start: pread(number, min(length, 10), start))
    monkeypatch.setattr(os, "preadv", lambda number, pieces, start: preadv(number, [pieces[0][:10]], start))
    assert source.read("w.bin", 4, 95) == DATA[4:99]
    buffer = bytearray(95)
    source.readinto("w.bin", 4, memoryview(buffer))
    assert buffer == DATA[4:99]


def test_a_range_beyond_the_end_says_how_many_bytes_are_missing(source):
    words = r"w\.bin: expected .* found only 4 of 9 bytes from byte 1753 on: 5 bytes are missing"
    with pytest.raises(FerryError, match=words):
        source.read("w.bin", len(DATA) - 4, 9)
    with pytest.raises(FerryError, match=words):
        source.readinto("w.bin", len(DATA) - 4, memoryview(bytearray(9)))


def test_missing_file(source):
    with pytest.raises(MissingFileError, match=r"x\.bin: expected a file of the source; found no such file"):
        source.read("x.bin", 0, 1)
    with pytest.raises(MissingFileError):
        source.size("x.bin")


@pytest.mark.parametrize("path", ["../w.bin", "/etc/passwd", "deep/../../w", "", "a\0b", "\ud800"])
def test_paths_that_lead_out_are_refused(source, path):
    with pytest.raises(SourceError, match="expected a path inside the checkpoint's folder"):
        source.read(path, 0, 1)


def test_a_folder_in_place_of_a_file(source):
    with pytest.raises(SourceError, match=r"deep: expected a readable file .* found Is a directory"):
        source.read("deep", 0, 1)


def test_permission_denied(source, monkeypatch):
    def refuse(*_args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SourceError, match=r"w\.bin: expected a readable file in .*; found permission denied"):
        source.read("w.bin", 0, 1)
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SourceError, match=r"found permission denied. Give the account"):
        source.list()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_permission_denied_by_the_file_system(source):
    os.chmod(os.path.join(source.root, "w.bin"), 0)
    with pytest.raises(SourceError, match="permission denied"):
        source.read("w.bin", 0, 1)


def test_root_that_is_missing_or_a_file(source):
    with pytest.raises(MissingFileError, match=r"nowhere: expected a checkpoint's folder; found no such path"):
        LocalSource(f"{source.root}/nowhere").list()
    with pytest.raises(SourceError, match=r"found a file. Give the folder"):
        LocalSource(f"{source.root}/w.bin").list()


def test_a_replaced_file_is_read_anew(source):
    assert source.read("w.bin", 0, 1) == DATA[:1]
    fresh = os.path.join(source.root, "fresh")
    with open(fresh, "wb") as file:
        file.write(b"new")
    os.replace(fresh, os.path.join(source.root, "w.bin"))
    assert source.read("w.bin", 0, 3) == b"new"


def test_pickles_without_descriptors(source):
    source.read("w.bin", 0, 1)
    again = pickle.loads(pickle.dumps(source))
    assert again == source
    assert again.read("w.bin", 250, 2) == DATA[250:252]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors by /proc")
def test_open_files_are_bounded(tmp_path):
    byte_source._descriptor.cache_clear()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(byte_source._OPEN_FILES + 40):
        (tmp_path / str(number)).write_bytes(bytes([number % 251]))
    for number in range(byte_source._OPEN_FILES + 40):
        assert LocalSource(str(tmp_path)).read(str(number), 0, 1) == bytes([number % 251])
    assert len(os.listdir("/proc/self/fd")) - before <= byte_source._OPEN_FILES


def test_threads_read_while_the_cache_evicts(tmp_path, monkeypatch):
    monkeypatch.setattr(byte_source, "_descriptor", byte_source.lru_cache(2)(byte_source._descriptor.__wrapped__))
    for number in range(7):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 99)
    wrong: list[int] = []

    def read(thread: int) -> None:
        source = LocalSource(str(tmp_path))
        for turn in range(200):
            number = (thread * 3 + turn) % 7
            if source.read(str(number), 0, 99) != bytes([number]) * 99:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(thread,)) for thread in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_open_source_by_scheme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a b").mkdir()
    wanted = LocalSource(str(tmp_path / "a b"))
    spellings = ["a b", "./a b/", "~/a b", str(tmp_path / "a b"), f"file://{tmp_path}/a%20b"]
    assert [open_source(one) for one in spellings] == [wanted] * len(spellings)
    assert wanted.url == str(tmp_path / "a b")


@pytest.mark.parametrize("scheme", ["s3", "ftp"])
def test_unknown_schemes(scheme):
    with pytest.raises(FerryError, match=f"found {scheme}://, which cannot be read yet"):
        open_source(f"{scheme}://bucket/model")


def test_file_url_of_another_machine():
    with pytest.raises(FerryError, match="found the host 'server'"):
        open_source("file://server/model")
