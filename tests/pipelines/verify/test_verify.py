"""Verify finds what was changed behind its back, and says where."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import llama_config, llama_tensors, qwen3_moe_config, qwen3_moe_tensors, write_checkpoint
from tensorferry.pipelines.cli.main import main

MLP = "params.params.decoder.layers.mlp.wi_0.kernel"
CHUNKS = ("--chunk-bytes", "160")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), llama_config(), llama_tensors())


def convert(source: Path, output: Path, *args: str) -> Path:
    assert main(["convert", "--source", str(source), "--output", str(output), *CHUNKS, *args]) == 0
    return output / "0" / "items"


@pytest.fixture(scope="module")
def converted(llama, tmp_path_factory) -> Path:
    """A converted checkpoint that nobody changes."""
    output = tmp_path_factory.mktemp("converted")
    convert(llama, output)
    return output


@pytest.fixture
def output(converted, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(converted, tmp_path / "out"))


def verify(source: Path, output: Path, *args: str) -> int:
    return main(["verify", "--source", str(source), "--output", str(output), *args])


def flip(path: Path, at: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


@pytest.mark.parametrize("where", ["", "0", "0/items"])
def test_nothing_differs(where, llama, converted, capfd):
    assert verify(llama, converted / where) == 0
    told = capfd.readouterr().out
    # 37*10 twice, 3*10 twice, 10, and per layer 10*48*2 + 10*16*2 + 3*10*14.
    compared = "12 arrays, 11.54 KiB, 5,910 elements compared"
    assert told.startswith(f"verified {converted}/0/items: {compared}, no difference")


@pytest.mark.parametrize("args", [
    ("--format", "ocdbt"), ("--format", "zarr2", "--dtype", "float32"), ("--compression", "zstd1", "--no-scan-layers"),
    ("--vocab-size", "41", "--rope-lanes", "split"), ("--dtype", "source"),
], ids=" ".join)  # fmt: skip
def test_nothing_differs_in_other_forms(args, llama, tmp_path):
    convert(llama, tmp_path, *args)
    assert verify(llama, tmp_path) == 0


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_nothing_differs_among_experts(fused, tmp_path):
    source = write_checkpoint(tmp_path / "hf", qwen3_moe_config(), qwen3_moe_tensors(fused=fused))
    convert(source, tmp_path / "out")
    assert verify(source, tmp_path / "out") == 0


def test_a_flipped_bit_under_a_checksum_is_a_chunk_that_cannot_be_read(llama, output, capfd):
    chunk = sorted((output / "0/items" / MLP / "c").rglob("*"))[-1]
    flip(chunk, 5)
    assert verify(llama, output) == 3
    told = capfd.readouterr().err
    assert "1 difference;" in told
    assert re.search(rf"{MLP} chunk \[.*\]: expected a whole chunk; found it cannot be read: .*Digest mismatch", told)
    assert "Traceback" not in told


def test_a_flipped_bit_without_checksum_is_named_with_its_index(llama, tmp_path, capfd):
    items = convert(llama, tmp_path, "--format", "zarr2")
    values = llama_tensors()
    # Chunk [0, 1, 0] holds layer 1 from embed 0 on, mlp running fastest: its sixth element is embed 0, mlp 5.
    flip(items / MLP / "0.1.0", 2 * 5 + 1, 0x80)
    assert verify(llama, tmp_path) == 3
    told = capfd.readouterr().err
    right = values["model.layers.1.mlp.gate_proj.weight"][5, 0]
    where = f"{MLP} index [0, 1, 5]: expected {float(right)}; found {-float(right)}"
    assert f"{where} (1 element differs in chunk [0, 1, 0])" in told
    assert "1 difference;" in told
    assert "12 arrays, 11.54 KiB, 5,910 elements compared" in told


# Orbax leaves a task unfinished when it does not find an array.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("spoil", ["missing chunk", "missing array"])
def test_what_is_gone_is_named(spoil, llama, output, capfd):
    array = output / "0/items" / MLP
    if spoil == "missing array":
        shutil.rmtree(array)
    else:
        next(path for path in array.rglob("*") if path.is_file() and path.name != "zarr.json").unlink()
    assert verify(llama, output) == 3
    told = capfd.readouterr().err
    assert f"{MLP} chunk" in told
    assert "cannot be read" in told
    assert "tensorstore_spec" not in told
    assert ("a tree that stock Orbax can read" in told) == (spoil == "missing array")


def test_a_missing_chunk_of_zeros_is_no_chunk_of_zeros(tmp_path, capfd):
    tensors = llama_tensors()
    tensors["model.norm.weight"] = np.zeros_like(tensors["model.norm.weight"])
    source = write_checkpoint(tmp_path / "hf", llama_config(), tensors)
    items = convert(source, tmp_path / "out")
    (items / "params.params.decoder.decoder_norm.scale" / "c" / "0").unlink()
    assert verify(source, tmp_path / "out") == 3
    assert "decoder_norm.scale chunk [0]" in capfd.readouterr().err


def test_an_array_that_orbax_does_not_know_of_is_a_difference(llama, output, capfd):
    path = output / "0/items/_METADATA"
    metadata = json.loads(path.read_text())
    gone = next(key for key in metadata["tree_metadata"] if "wi_0" in key)
    del metadata["tree_metadata"][gone]
    path.write_text(json.dumps(metadata))
    assert verify(llama, output) == 3
    told = capfd.readouterr().err
    assert f"{MLP}: expected an array ((10, 3, 14), 'bfloat16'); found no such array in Orbax's metadata" in told
    assert "5,910 elements compared" in told


def changed_source(llama: Path, folder: Path, shard: int = 0) -> Path:
    """The same headers, one changed weight."""
    source = Path(shutil.copytree(llama, folder))
    path = sorted(source.glob("*.safetensors"))[shard]
    flip(path, path.stat().st_size - 1, 0x80)
    return source


def test_a_changed_source_value_is_named(llama, converted, tmp_path, capfd):
    assert verify(changed_source(llama, tmp_path / "hf"), converted) == 3
    told = capfd.readouterr().err
    assert "1 difference;" in told
    assert re.search(r"index \[\d+(, \d+)+\]: expected (-?)([\d.]+); found (?!\2)-?\3 \(1 element differs", told), told


def test_another_source_is_refused(converted, tmp_path, capfd):
    other = write_checkpoint(tmp_path / "hf", llama_config(), llama_tensors(), shards=2)
    assert verify(other, converted) == 3
    assert "not the checkpoint that was converted" in capfd.readouterr().err


def test_a_changed_manifest_is_told(llama, output, capfd):
    path = output / "0/items/tensorferry.manifest.json"
    manifest = json.loads(path.read_text())
    manifest["arrays"][MLP]["chunk_digests"][1] = "0" * 16
    manifest["arrays"]["params.params.decoder.decoder_norm.scale"]["statistics"]["max"] = 99.0
    path.write_text(json.dumps(manifest))
    assert verify(llama, output) == 3
    told = capfd.readouterr().err
    assert "digest 0000000000000000 (manifest)" in told
    assert "decoder_norm.scale statistics" in told
    assert "2 differences;" in told


def test_a_sample_compares_a_share_and_every_array(tmp_path, capfd):
    tensors = llama_tensors(head=True)
    random = np.random.default_rng(3)
    vocab = 240_001
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = random.standard_normal((vocab, 10), np.float32).astype(tensors[name].dtype)
    source = write_checkpoint(tmp_path / "hf", llama_config(vocab_size=vocab), tensors)
    assert main(["convert", "--source", str(source), "--output", str(tmp_path / "out"), "--chunk-bytes", "1MiB"]) == 0
    capfd.readouterr()
    assert verify(source, tmp_path / "out", "--sample", "0.01") == 0
    told = capfd.readouterr().out
    assert "12 arrays" in told
    assert "(a sample of 0.01), no difference" in told
    elements = int(re.search(r"([\d,]+) elements", told)[1].replace(",", ""))
    assert 5_000 < elements < 2 * vocab * 10 / 2


@pytest.mark.parametrize("text", ["0", "1.5", "-1", "nan", "half"])
def test_a_share_that_is_none_is_refused(text, llama, converted, capfd):
    with pytest.raises(SystemExit):
        verify(llama, converted, f"--sample={text}")
    assert "is not a share above 0, up to 1" in capfd.readouterr().err


def test_no_checkpoint_is_a_sentence(llama, tmp_path, capfd):
    assert verify(llama, tmp_path / "nowhere") == 1
    assert "found nothing there" in capfd.readouterr().err
    (tmp_path / "out" / ".tensorferry-0").mkdir(parents=True)
    assert verify(llama, tmp_path / "out") == 1
    assert "found an unfinished run" in capfd.readouterr().err


def test_a_checkpoint_of_another_is_a_sentence(llama, output, capfd):
    (output / "0/items/tensorferry.manifest.json").unlink()
    assert verify(llama, output) == 1
    told = capfd.readouterr().err
    assert "Only checkpoints that Tensorferry wrote can be verified" in told


def test_a_source_that_is_gone_is_a_sentence(converted, tmp_path, capfd):
    assert verify(tmp_path / "nowhere", converted) == 1
    told = capfd.readouterr().err
    assert told == f"tensorferry: {tmp_path}/nowhere: expected a checkpoint's folder; found no such path. " \
                   "Correct the path.\n"  # fmt: skip
