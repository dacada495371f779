import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tensorferry.mappings.words.problems import FerryError, PlanError
from tensorferry.pipelines.huggingface.checkpoint import open_checkpoint
from tensorferry.pipelines.storage.byte_source import LocalSource

CONFIG = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 5}
INDEX = "model.safetensors.index.json"
SHARDS = {
    "model-00001-of-00003.safetensors": {"embed": (7, 5), "layers.0.w": (6, 5), "norm.0": (5,)},
    "model-00002-of-00003.safetensors": {"layers.1.w": (6, 5), "norm.1": (5,)},
    "model-00003-of-00003.safetensors": {"layers.2.w": (6, 5), "lm_head": (7, 5)},
}
FIRST, SECOND, THIRD = SHARDS


def array(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    dtype = np.float32 if name.startswith("norm") else ml_dtypes.bfloat16
    return np.random.default_rng([seed, *name.encode()]).normal(size=shape).astype(dtype)


def write_shard(path, shapes: dict[str, tuple[int, ...]], seed: int = 0) -> None:
    arrays = {name: array(name, shape, seed) for name, shape in shapes.items()}
    safetensors.numpy.save_file(arrays, path, {"format": "pt"})


def write_index(folder, weight_map: dict, index: str = INDEX) -> None:
    content = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / index).write_text(json.dumps(content))


WEIGHT_MAP = {name: file for file, shapes in SHARDS.items() for name in shapes}


@pytest.fixture
def folder(tmp_path):
    """A sharded checkpoint without an index."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file, shapes in SHARDS.items():
        write_shard(folder / file, shapes)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def indexed(folder):
    write_index(folder, WEIGHT_MAP)
    return folder


def problems_of(folder) -> list[str]:
    with pytest.raises(PlanError) as caught:
        open_checkpoint(str(folder))
    assert caught.value.exit_code == 2
    return [str(problem) for problem in caught.value.problems]


def only_problem(folder) -> str:
    problems = problems_of(folder)
    assert len(problems) == 1, problems
    return problems[0]


@pytest.mark.parametrize("with_index", [True, False])
def test_every_tensor_is_found_with_its_bytes(folder, with_index):
    if with_index:
        write_index(folder, WEIGHT_MAP)
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.root == str(folder)
    assert checkpoint.config == CONFIG
    assert {name: one.file for name, one in checkpoint.tensors.items()} == WEIGHT_MAP
    for name, one in checkpoint.tensors.items():
        expected = array(name, SHARDS[one.file][name])
        assert (one.shape, one.dtype) == (expected.shape, expected.dtype.name)
        assert checkpoint.source.read(one.file, one.offset, one.nbytes) == expected.tobytes()
    assert {file: info.bytes for file, info in checkpoint.files.items()} == {
        file: os.path.getsize(folder / file) for file in SHARDS
    }
    assert checkpoint.metadata == {file: {"format": "pt"} for file in SHARDS}
    assert checkpoint.nbytes == (7 * 5 + 6 * 5) * 2 + 5 * 4 + 6 * 5 * 2 + 5 * 4 + (6 * 5 + 7 * 5) * 2
    assert checkpoint.unindexed == checkpoint.unindexed_files == checkpoint.superseded == ()


def test_one_file_and_a_byte_source_in_place_of_a_path(tmp_path):
    write_shard(tmp_path / "model.safetensors", SHARDS[FIRST])
    (tmp_path / "config.json").write_text("{}")
    assert set(open_checkpoint(LocalSource(str(tmp_path))).tensors) == set(SHARDS[FIRST])


def test_quantisation_configs_beside_the_main_one(indexed):
    assert open_checkpoint(str(indexed)).quant_config_files == {}
    (indexed / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    (indexed / "quantize_config.json").write_text('{"bits": 4}')
    assert open_checkpoint(str(indexed)).quant_config_files == {
        "hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}},
        "quantize_config.json": {"bits": 4},
    }


def test_shards_in_a_folder_below_are_read_when_the_index_names_them(tmp_path):
    (tmp_path / "weights").mkdir()
    write_shard(tmp_path / "weights" / "a.safetensors", SHARDS[SECOND])
    write_index(tmp_path, dict.fromkeys(SHARDS[SECOND], "weights/a.safetensors"))
    (tmp_path / "config.json").write_text("{}")
    assert open_checkpoint(str(tmp_path)).tensors["norm.1"].file == "weights/a.safetensors"


# --- digest -----------------------------------------------------------------------------------------------------


def test_digest_does_not_depend_on_the_place(indexed, tmp_path):
    shutil.copytree(indexed, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "README.md").write_text("irrelevant")
    (tmp_path / "elsewhere" / "config.json").write_text(json.dumps(CONFIG, indent=3, sort_keys=True))
    assert open_checkpoint(str(indexed)).digest == open_checkpoint(str(tmp_path / "elsewhere")).digest


def change_config(folder):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 6}))


def change_quant(folder):
    (folder / "quantize_config.json").write_text("{}")


def change_dtype(folder):
    arrays = {name: array(name, shape).astype(np.float16) for name, shape in SHARDS[SECOND].items()}
    safetensors.numpy.save_file(arrays, folder / SECOND)


def change_place(folder):
    write_shard(folder / THIRD, SHARDS[THIRD] | {"norm.1": (5,)})
    write_index(folder, WEIGHT_MAP | {"norm.1": THIRD})


@pytest.mark.parametrize("change", [change_config, change_quant, change_dtype, change_place])
def test_digest_changes_with_what_matters(indexed, change):
    before = open_checkpoint(str(indexed)).digest
    change(indexed)
    assert open_checkpoint(str(indexed)).digest != before


def test_digest_changes_with_the_index_alone(folder):
    write_shard(folder / THIRD, SHARDS[THIRD] | {"norm.1": (5,)}, seed=1)
    digests = set()
    for file in (SECOND, THIRD):
        write_index(folder, WEIGHT_MAP | {"norm.1": file})
        digests.add(open_checkpoint(str(folder)).digest)
    assert len(digests) == 2


# --- extras: listed, never read ---------------------------------------------------------------------------------


def test_unindexed_tensors_are_listed(indexed):
    write_shard(indexed / THIRD, SHARDS[THIRD] | {"mtp.fc": (5, 6)})
    checkpoint = open_checkpoint(str(indexed))
    assert checkpoint.unindexed == ("mtp.fc",)
    assert set(checkpoint.tensors) == set(WEIGHT_MAP)


def test_a_stale_copy_never_overrides(indexed):
    """An overlay: the third shard holds an old copy of a tensor that the index places in the second."""
    write_shard(indexed / THIRD, SHARDS[THIRD] | {"layers.1.w": (6, 5)}, seed=1)
    checkpoint = open_checkpoint(str(indexed))
    one = checkpoint.tensors["layers.1.w"]
    assert one.file == SECOND
    assert checkpoint.source.read(one.file, one.offset, one.nbytes) == array("layers.1.w", (6, 5)).tobytes()
    assert [(stale.name, stale.file) for stale in checkpoint.superseded] == [("layers.1.w", THIRD)]
    assert checkpoint.unindexed == ()


def test_a_stray_file_beside_indexed_shards_is_listed(indexed):
    write_shard(indexed / "model.safetensors", SHARDS[FIRST] | {"projector": (4, 3)}, seed=1)
    checkpoint = open_checkpoint(str(indexed))
    assert checkpoint.unindexed_files == ("model.safetensors",)
    assert checkpoint.unindexed == ("projector",)
    assert {stale.file for stale in checkpoint.superseded} == {"model.safetensors"}
    assert checkpoint.tensors["embed"].file == FIRST


def test_a_broken_stray_file_does_no_harm(indexed):
    (indexed / "old.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert open_checkpoint(str(indexed)).unindexed_files == ("old.safetensors",)


@pytest.mark.parametrize("with_index", [True, False])
def test_mistrals_second_copy_is_not_merged(folder, with_index):
    write_shard(folder / "consolidated.safetensors", {"tok_embeddings.weight": (7, 5)})
    if with_index:
        write_index(folder, WEIGHT_MAP)
    checkpoint = open_checkpoint(str(folder))
    assert set(checkpoint.tensors) == set(WEIGHT_MAP)
    assert checkpoint.unindexed == ("tok_embeddings.weight",)
    assert checkpoint.unindexed_files == ("consolidated.safetensors",)


def test_consolidated_alone_is_the_checkpoint(tmp_path):
    write_shard(tmp_path / "consolidated.safetensors", {"tok_embeddings.weight": (7, 5)})
    (tmp_path / "config.json").write_text("{}")
    assert set(open_checkpoint(str(tmp_path)).tensors) == {"tok_embeddings.weight"}


# --- index against disk -----------------------------------------------------------------------------------------


def test_missing_shard(indexed):
    os.remove(indexed / SECOND)
    words = f"{SECOND}: expected a shard with 2 tensors, as {INDEX} says (layers.1.w, norm.1); found no such file"
    assert only_problem(indexed).startswith(words)


def test_a_link_to_nothing_is_a_missing_shard(indexed):
    os.remove(indexed / SECOND)
    os.symlink("../blobs/gone", indexed / SECOND)
    assert "found no such file. Fetch this shard." in only_problem(indexed)


def test_missing_shard_without_an_index_shows_by_the_numbers(folder):
    os.remove(folder / SECOND)
    words = "model-*: expected 3 shards, as their names say; found 1 of them missing"
    assert words in only_problem(folder)


def test_stale_index_that_names_renamed_files_shows_both_lists(indexed):
    for number, file in enumerate(SHARDS):
        os.rename(indexed / file, indexed / f"renamed-{number}.safetensors")
    problems = problems_of(indexed)
    assert len(problems) == 4
    assert all(file in problem for file, problem in zip(SHARDS, problems, strict=False))
    words = "found 3 of its shards missing, and here but not in it: renamed-0.safetensors, renamed-1.safetensors"
    assert words in problems[3]


def test_indexed_tensor_that_no_file_holds(indexed):
    write_index(indexed, WEIGHT_MAP | {"mtp.fc": THIRD})
    words = f"mtp.fc: expected to be in {THIRD}, as {INDEX} says; found it in no file here"
    assert words in only_problem(indexed)


def test_indexed_tensor_that_lies_in_another_shard(indexed):
    write_index(indexed, WEIGHT_MAP | {"norm.1": FIRST})
    words = f"norm.1: expected to be in {FIRST}, as {INDEX} says; found it in {SECOND} instead"
    assert words in only_problem(indexed)


def test_many_absent_tensors_make_one_sentence(indexed):
    write_index(indexed, WEIGHT_MAP | {f"mtp.{number}": THIRD for number in range(31)})
    assert "mtp.0, mtp.1, mtp.2, mtp.3, mtp.4 and 26 more: expected" in only_problem(indexed)


def test_the_same_tensor_in_two_shards_without_an_index(folder):
    write_shard(folder / THIRD, SHARDS[THIRD] | {"norm.0": (5,)})
    words = f"norm.0: expected to be stored once; found it in {FIRST}, {THIRD}. Keep one of the files"
    assert words in only_problem(folder)


def test_shards_and_a_merged_file_without_an_index(folder):
    write_shard(folder / "model.safetensors", {name: s for shapes in SHARDS.values() for name, s in shapes.items()})
    problems = problems_of(folder)
    assert len(problems) == 3
    assert f"found it in {FIRST}, model.safetensors" in problems[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", f"{INDEX}: expected the index as JSON; found an empty file"),
        ("{", f"{INDEX}: expected the index as JSON; found text that is not JSON"),
        ("[1]", f"{INDEX}: expected the index as a JSON object; found a JSON list: [1]"),
        ("{}", f"{INDEX}: expected a weight_map: tensor names to shard names; found null"),
        ('{"weight_map": {}}', "expected a weight_map"),
        ('{"weight_map": {"a": 3}}', f"a (in {INDEX}): expected a file name inside the folder; found 3"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "expected a file name inside the folder; found ../b"),
        ("version https://git-lfs.github.com/spec/v1\nsize 23950\n", f"{INDEX}: expected the file itself; found a"),
    ],
)  # fmt: skip
def test_a_bad_index(folder, content, words):
    (folder / INDEX).write_text(content)
    assert words in problems_of(folder)[0]


def test_a_name_twice_in_the_index(indexed):
    text = (indexed / INDEX).read_text().replace('"weight_map": {', f'"weight_map": {{"norm.0": "{SECOND}", ')
    (indexed / INDEX).write_text(text)
    assert only_problem(indexed).startswith(f"norm.0 (in {INDEX}): expected one entry in the index")


# --- shards, config and folder ----------------------------------------------------------------------------------


def test_bad_shards_are_told_once_each_and_all_together(indexed):
    raw = (indexed / FIRST).read_bytes()
    (indexed / FIRST).write_bytes(raw[:-1])
    (indexed / SECOND).write_bytes(b"version https://git-lfs.github.com/spec/v1\nsize 77\n")
    (indexed / "config.json").unlink()
    problems = problems_of(indexed)
    assert len(problems) == 3
    assert f"config.json: expected the model's config in {indexed}; found no such file" in problems[0]
    assert FIRST in problems[1]
    assert "1 bytes are missing" in problems[1]
    assert "Git-LFS pointer for 77 bytes" in problems[2]


def test_zero_size_tensor(indexed):
    write_shard(indexed / SECOND, SHARDS[SECOND] | {"empty": (0, 5)})
    write_index(indexed, WEIGHT_MAP | {"empty": SECOND})
    words = f"empty (in {SECOND}): expected at least one element; found shape [0, 5]. Orbax cannot save"
    assert only_problem(indexed).startswith(words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a": 1,}', "config.json: expected the config as JSON; found text that is not JSON (Expecting property"),
        (b"[]", "config.json: expected the config as a JSON object; found a JSON list: []"),
        (b"", "config.json: expected the config as JSON; found an empty file"),
        (b'{"a": "\xff"}', "config.json: expected the config as JSON; found text that is not JSON (not UTF-8 at"),
    ],
)  # fmt: skip
def test_a_bad_config(indexed, content, words):
    (indexed / "config.json").write_bytes(content)
    problem = only_problem(indexed)
    assert problem.startswith(words)
    assert "\n" not in problem


def test_infinity_in_a_config_is_accepted(indexed):
    (indexed / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    assert open_checkpoint(str(indexed)).config["time_step_limit"][1] == float("inf")


def test_no_such_path(tmp_path):
    assert only_problem(tmp_path / "x").startswith(f"{tmp_path}/x: expected a checkpoint's folder; found no such path")


def test_a_file_in_place_of_the_folder(indexed):
    assert f"found a file. Give the folder: {indexed}" in only_problem(indexed / FIRST)


def test_an_empty_folder(tmp_path):
    assert "expected a Hugging Face checkpoint (config.json and *.safetensors" in only_problem(tmp_path)
    assert "found an empty folder" in only_problem(tmp_path)


def test_not_a_checkpoint_lists_what_is_there(tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "weights").mkdir()
    assert "found config.json, tokenizer.json, weights/. Give the folder that holds" in only_problem(tmp_path)


@pytest.mark.parametrize("inside", ["0/items/_METADATA", "items/d/x", "_CHECKPOINT_METADATA", "manifest.ocdbt"])
def test_an_orbax_checkpoint(tmp_path, inside):
    path = tmp_path / inside
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    problem = only_problem(tmp_path)
    assert "found an Orbax checkpoint: " in problem
    assert "`tensorferry export`" in problem


def test_the_cache_folder_of_the_hub(tmp_path):
    for name in ("blobs", "refs", "snapshots"):
        (tmp_path / name).mkdir()
    assert "Give the folder of one revision, inside snapshots/." in only_problem(tmp_path)


def test_permission_denied(indexed, monkeypatch):
    def refuse(path, *_args, real=os.open):
        if str(path).endswith(SECOND):
            raise PermissionError(13, "Permission denied")
        return real(path, *_args)

    monkeypatch.setattr(os, "open", refuse)
    words = f"{SECOND}: expected a readable file in {indexed}; found permission denied"
    assert only_problem(indexed).startswith(words)


def test_a_folder_that_may_not_be_listed(indexed, monkeypatch):
    def refuse(_path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    assert only_problem(indexed).startswith(f"{indexed}: expected a checkpoint's folder; found permission denied")


def test_a_scheme_that_cannot_be_read():
    with pytest.raises(FerryError, match="found s3://"):
        open_checkpoint("s3://bucket/model")
