"""The benchmark's synthetic checkpoint: one that other readers open, of the size that was asked for."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from benchmarks.make_checkpoint import POOL_ELEMENTS, RandomWeights, make_checkpoint
from benchmarks.shapes import LlamaShapes

ODD = LlamaShapes(layers=3, vocab=51, embed=20, mlp=33, heads=4, kv_heads=2, head_dim=6)


def headers(directory: Path) -> dict[str, tuple[str, list[int], str]]:
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                found[name] = (tensor.get_dtype(), tensor.get_shape(), path.name)
    return found


def test_the_safetensors_library_reads_what_the_index_and_the_config_say(tmp_path):
    make_checkpoint(tmp_path / "c", ODD, shards=3)
    found = headers(tmp_path / "c")
    index = json.loads((tmp_path / "c/model.safetensors.index.json").read_text())
    config = json.loads((tmp_path / "c/config.json").read_text())
    assert {name: file for name, (_, _, file) in found.items()} == index["weight_map"]
    assert len(set(index["weight_map"].values())) == 3
    assert index["metadata"]["total_size"] == ODD.nbytes
    assert len(found) == 3 + 9 * config["num_hidden_layers"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    assert found["model.layers.2.self_attn.k_proj.weight"][:2] == ("BF16", [keys, config["hidden_size"]])
    assert found["lm_head.weight"][1] == [config["vocab_size"], config["hidden_size"]]


def test_fp8_weights_have_a_scale_per_block_ragged_edges_included(tmp_path):
    make_checkpoint(tmp_path / "c", replace(ODD, fp8_block=8))
    found = headers(tmp_path / "c")
    name = "model.layers.1.mlp.down_proj.weight"
    assert found[name][:2] == ("F8_E4M3", [20, 33])
    assert found[f"{name}_scale_inv"][:2] == ("F32", [3, 5])
    assert found["model.layers.1.input_layernorm.weight"][0] == "BF16"
    config = json.loads((tmp_path / "c/config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [8, 8]


@pytest.mark.parametrize(("gigabytes", "fp8_block"), [(2, None), (8, None), (2, 128), (8, 128)])
def test_the_size_is_near_what_was_asked(gigabytes, fp8_block):
    assert LlamaShapes.of_size(gigabytes, fp8_block).nbytes == pytest.approx(gigabytes * 1e9, rel=0.05)


def test_no_value_is_not_a_number_and_tensors_differ():
    weights = RandomWeights(seed=1)
    pieces = [b"".join(weights.pieces("F8_E4M3", 1000)) for _ in range(2)]
    assert pieces[0] != pieces[1]
    codes = np.frombuffer(b"".join(weights.pieces("F8_E4M3", POOL_ELEMENTS)), np.uint8)
    assert not np.any((codes & 0x7F) == 0x7F)


def test_a_tensor_larger_than_the_pool_is_filled_to_its_end():
    sizes = [len(piece) for piece in RandomWeights(seed=2).pieces("BF16", POOL_ELEMENTS + 7)]
    assert sum(sizes) == 2 * (POOL_ELEMENTS + 7)
