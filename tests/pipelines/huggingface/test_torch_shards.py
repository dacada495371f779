import json
import os
import subprocess
import sys
import zipfile

import pytest
from tensorferry.mappings.words.problems import PlanError
from tensorferry.pipelines.huggingface.checkpoint import open_checkpoint
from tensorferry.pipelines.huggingface.torch_shards import scan_torch_shards
from tensorferry.pipelines.storage.byte_source import LocalSource

FILE = "pytorch_model.bin"


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def state(torch):
    torch.manual_seed(5)
    base = torch.randn(6, 10)
    plain = {f"layers.{number}.w": torch.randn(number + 1, 7).bfloat16() for number in range(13)}
    return plain | {
        "embed": base,
        "lm_head": base,
        "rows": base[2:4],
        "f8": torch.randn(4, 7).to(torch.float8_e4m3fn),
        "e8": torch.ones(3).to(torch.float8_e8m0fnu),
        "u16": torch.arange(3).to(torch.uint16),
        "half": torch.randn(5).half(),
        "mask": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.ones(2, 3)),
        "scalar": torch.tensor(3.5),
    }


def scan(folder, file=FILE):
    return scan_torch_shards(LocalSource(str(folder)), {file: os.path.getsize(folder / file)})[file]


def problem_of(folder, file=FILE) -> str:
    _, problems = scan(folder, file)
    assert len(problems) == 1
    return str(problems[0])


def octets(tensor) -> bytes:
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_tensor_lies_where_we_say(tmp_path, torch, state):
    torch.save(state, tmp_path / FILE)
    header, problems = scan(tmp_path)
    assert not problems
    stored = {one.name: one for one in header.tensors}
    assert stored.keys() == state.keys()
    raw = (tmp_path / FILE).read_bytes()
    for name, tensor in state.items():
        one = stored[name]
        assert one.dtype == str(tensor.dtype).removeprefix("torch.")
        assert one.shape == tuple(tensor.shape)
        assert raw[one.offset : one.offset + one.nbytes] == octets(tensor), name
    assert stored["embed"].offset == stored["lm_head"].offset
    assert stored["rows"].offset == stored["embed"].offset + 2 * 10 * 4


def test_only_directory_and_pickle_are_read(tmp_path, torch):
    torch.save({f"w{number}": torch.ones(1 << 20) for number in range(3)}, tmp_path / FILE)

    class Counting(LocalSource):
        total = 0

        def read(self, path, start, length):
            Counting.total += length
            return super().read(path, start, length)

        def readinto(self, path, start, buffer):
            Counting.total += buffer.nbytes
            super().readinto(path, start, buffer)

    size = os.path.getsize(tmp_path / FILE)
    scan_torch_shards(Counting(str(tmp_path)), {FILE: size})
    assert Counting.total < size / 10


def test_archives_without_torchs_own_offsets(tmp_path, torch, state):
    """Files of torch before 2.6 name no format version; their storages are sorted as text: 0, 1, 10, 11, 2."""
    torch.save(state, tmp_path / "new.bin")
    with zipfile.ZipFile(tmp_path / "new.bin") as new, zipfile.ZipFile(tmp_path / FILE, "w") as old:
        kept = [name for name in new.namelist() if not name.split("/")[1].startswith(".")]
        for name in sorted(kept):
            old.writestr(name, new.read(name))
    header, problems = scan(tmp_path)
    assert not problems
    raw = (tmp_path / FILE).read_bytes()
    for one in header.tensors:
        assert raw[one.offset : one.offset + one.nbytes] == octets(state[one.name]), one.name


def test_an_archive_packed_in_another_order_is_refused(tmp_path, torch, state):
    torch.save(state, tmp_path / "new.bin")
    with zipfile.ZipFile(tmp_path / "new.bin") as new, zipfile.ZipFile(tmp_path / FILE, "w") as other:
        for name in sorted(new.namelist(), reverse=True):
            other.writestr(name, new.read(name))
    assert "expected storages in the order torch.save wrote them; found another order" in problem_of(tmp_path)


def test_an_archive_packed_again_in_the_same_order_is_refused_or_right(tmp_path, torch, state):
    torch.save(state, tmp_path / "new.bin")
    with zipfile.ZipFile(tmp_path / "new.bin") as new, zipfile.ZipFile(tmp_path / FILE, "w") as other:
        for name in new.namelist():
            other.writestr(name, new.read(name))
    header, problems = scan(tmp_path)
    raw = (tmp_path / FILE).read_bytes()
    assert all("Save it again with torch 2" in str(problem) for problem in problems)
    for one in header.tensors if header else ():
        assert raw[one.offset : one.offset + one.nbytes] == octets(state[one.name])


def test_compressed_members(tmp_path, torch, state):
    torch.save(state, tmp_path / "new.bin")
    with zipfile.ZipFile(tmp_path / "new.bin") as new:
        with zipfile.ZipFile(tmp_path / FILE, "w", zipfile.ZIP_DEFLATED) as other:
            for name in new.namelist():
                other.writestr(name, new.read(name))
    words = f"{FILE}: expected an archive whose members are stored; found compressed members. Save it again"
    assert problem_of(tmp_path).startswith(words)


def test_the_form_before_torch_1_6(tmp_path, torch, state):
    torch.save({"w": torch.ones(3)}, tmp_path / FILE, _use_new_zipfile_serialization=False)
    assert "found the older form, a bare pickle. Save it again with torch 2" in problem_of(tmp_path)


def test_transposed_tensor(tmp_path, torch):
    torch.save({"w": torch.ones(3, 5).t(), "v": torch.ones(7)}, tmp_path / FILE)
    words = f"w (in {FILE}): expected elements in C order without gaps; found strides [1, 5] for shape [5, 3]"
    assert problem_of(tmp_path).startswith(words)


def test_nested_training_state(tmp_path, torch):
    torch.save({"epoch": 3, "model": {"w": torch.ones(3)}}, tmp_path / FILE)
    _, problems = scan(tmp_path)
    assert [problem.found for problem in problems] == ["a int", "a dict"]
    assert "not a plain state dict" in problems[0].fix


def test_a_list_in_place_of_names(tmp_path, torch):
    torch.save([torch.ones(3)], tmp_path / FILE)
    assert "expected a dict of tensors; found a list" in problem_of(tmp_path)


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harmed",)


def test_code_in_the_pickle_is_not_run(tmp_path, torch, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": Harmful()}, tmp_path / FILE)
    assert "expected tensors and nothing else (torch.load with weights_only=True)" in problem_of(tmp_path)
    assert not os.path.exists(tmp_path / "harmed")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "expected a file of torch.save; found an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\nsize 99\n", "found a Git-LFS pointer for 99 bytes"),
        (b"hello world", "found a file that begins with 'hello wo'"),
        (b"PK\x03\x04" + bytes(99), "expected a whole zip archive of torch.save; found an archive that cannot be read"),
    ],
)  # fmt: skip
def test_files_that_are_no_archives(tmp_path, torch, raw, words):
    (tmp_path / FILE).write_bytes(raw)
    assert words in problem_of(tmp_path)


def test_a_cut_archive(tmp_path, torch, state):
    torch.save(state, tmp_path / "whole.bin")
    raw = (tmp_path / "whole.bin").read_bytes()
    for length in (len(raw) - 1, len(raw) // 2, 100):
        (tmp_path / FILE).write_bytes(raw[:length])
        assert "It is cut short: fetch it again." in problem_of(tmp_path)


def test_damaged_archives_never_raise(tmp_path, torch, state):
    torch.save(state, tmp_path / "whole.bin")
    raw = (tmp_path / "whole.bin").read_bytes()
    for place in range(0, len(raw), 97):
        (tmp_path / FILE).write_bytes(raw[:place] + bytes([raw[place] ^ 0x55]) + raw[place + 1 :])
        header, problems = scan(tmp_path)
        assert header is not None or problems
        assert all(one.offset + one.nbytes <= len(raw) for one in header.tensors) if header else True


@pytest.fixture
def sharded(tmp_path, torch, state):
    (tmp_path / "config.json").write_text("{}")
    names = sorted(state)
    halves = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
    for file, part in halves.items():
        torch.save({name: state[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_a_sharded_checkpoint_with_and_without_index(sharded, state):
    with_index = open_checkpoint(str(sharded))
    assert with_index.tensors.keys() == state.keys()
    for name, one in with_index.tensors.items():
        assert with_index.source.read(one.file, one.offset, one.nbytes) == octets(state[name])
    os.remove(sharded / "pytorch_model.bin.index.json")
    without = open_checkpoint(str(sharded))
    assert without.tensors == with_index.tensors
    assert without.digest == with_index.digest


def test_a_missing_torch_shard(sharded):
    os.remove(sharded / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(PlanError, match=r"as pytorch_model\.bin\.index\.json says"):
        open_checkpoint(str(sharded))


def test_values_alone_change_the_digest(tmp_path, torch):
    """The archive's directory carries checksums, so that unlike safetensors a change of values shows."""
    digests = []
    for value in (1.0, 2.0):
        torch.save({"w": torch.full((3, 5), value)}, tmp_path / FILE)
        digests.append(scan(tmp_path)[0].digest)
    assert digests[0] != digests[1]


def test_safetensors_win_over_pickles(tmp_path, torch):
    import safetensors.torch

    (tmp_path / "config.json").write_text("{}")
    torch.save({"w": torch.ones(3)}, tmp_path / FILE)
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    assert open_checkpoint(str(tmp_path)).tensors["w"].file == "model.safetensors"


def test_without_torch_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "config.json").write_text("{}")
    for number in (1, 2):
        (tmp_path / f"pytorch_model-0000{number}-of-00002.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(PlanError) as caught:
        open_checkpoint(str(tmp_path))
    assert len(caught.value.problems) == 1
    words = "expected torch, to read the pickles of 2 PyTorch shards; found no torch in this Python. pip install"
    assert words in str(caught.value)
    assert "'tensorferry[torch]'" in str(caught.value)


def test_safetensors_need_no_heavy_imports():
    code = (
        "import tensorferry.pipelines.huggingface.checkpoint, sys;"
        "assert not {'torch', 'jax', 'apache_beam', 'tensorstore', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
