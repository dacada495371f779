"""Regions of merged weights of every low-bit scheme, and adapters that lie on a hub."""

from pathlib import Path

import numpy as np
import pytest
import tiny_llama
from adapters import adapter_config, factors, write_adapter
from exports import here
from hub_server import serve_hub
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit_zoo import ZOO
from tensorferry.mappings.lora.merged_weights import Product
from tensorferry.mappings.lora.peft_adapter import Pair
from tensorferry.mappings.lowbit.schemes import SCHEMES, is_merged
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.convert import conversion as converting
from tensorferry.pipelines.orbax.orbax_view import read_manifest
from tensorferry.pipelines.regions.adapter_bytes import open_with_adapter
from tensorferry.pipelines.regions.decode_region import decode_region
from tensorferry.pipelines.storage import remote_source
from tensorferry.pipelines.verify import verify_conversion as verifying
from tensorferry.pipelines.verify.expected_lora import merged_region
from test_decode_region import region, resolved

RANK = 3
REPOS = {kind: repo for kind, build in ZOO.items() if len((repo := build()).expected.shape) >= 2}


def merged_tensor(base: LogicalTensor) -> tuple[LogicalTensor, np.ndarray, np.ndarray]:
    """A low-bit tensor with an adapter in it, A and B; of one with experts an adapter that they share."""
    random = np.random.default_rng(3)
    *lead, rows, cols = base.shape
    experts = lead[0] if lead else 1
    a, b = random.normal(size=(experts * RANK, cols)), random.normal(size=(rows, RANK * experts))
    a, b = a.astype(np.float32), b.astype(np.float32)
    pair = Pair("m", *(StoredTensor(n, "float32", one.shape, "f", 0) for n, one in (("a", a), ("b", b))))
    return Product(RANK, 1.5, False, experts, -1 if lead else 0).into(base, pair), a, b


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(REPOS)), st.data())
def test_any_box_is_decoded_and_then_merged(kind, data):
    repo = REPOS[kind]
    base = resolved(repo)
    tensor, a, b = merged_tensor(base)
    box = []
    for n in base.shape:
        start = data.draw(st.integers(0, n - 1))
        box.append((start, data.draw(st.integers(start + 1, n))))
    here = tuple(slice(*span) for span in box)
    boxes = SCHEMES[tensor.scheme].stored_box(tensor, tuple(box))
    factor = {"lora_a": a, "lora_b": b}
    arrays = {
        role: factor[role][tuple(slice(*span) for span in one)]
        if role in factor
        else region(repo, base.stored[role].name, one)
        for role, one in boxes.items()
    }
    other = merged_region(
        tensor, tuple(box), repo.expected[here], lambda stored, part: factor[f"lora_{stored.name}"][
            tuple(slice(*span) for span in part)
        ]
    )  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        found = decode_region(tensor, tuple(box), arrays, dtype)
        assert found.tobytes() == other.astype(found.dtype).tobytes()
    stack = repo.expected[None] if repo.expected.ndim == 2 else repo.expected
    count = len(stack)
    product = np.einsum("ore,eri->eoi", b.reshape(-1, RANK, count), a.reshape(count, RANK, -1))
    near = (stack + 1.5 * product).reshape(repo.expected.shape)[here]
    np.testing.assert_allclose(other, near, rtol=1e-5, atol=1e-5)


def test_geometry_is_the_bases():
    """So that merged weights are cut and read as their base is."""
    for repo in REPOS.values():
        base = resolved(repo)
        tensor, _, _ = merged_tensor(base)
        own, merged = SCHEMES[base.scheme], SCHEMES[tensor.scheme]
        assert is_merged(tensor)
        for how in ("granularity", "shared_runs", "memory_order", "stored_order", "scale_rules"):
            assert getattr(merged, how)(tensor) == getattr(own, how)(base)
        assert merged.carry(tensor) is None
        assert merged.describe(tensor) == f"lora r=3 x 1.5 into {own.describe(base)}"


@pytest.fixture
def hub(monkeypatch):
    with serve_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        remote_source.web_store.cache_clear()
        yield hub


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_base_and_adapter_on_a_hub(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(converting, "run_items", here)
    monkeypatch.setattr(verifying, "run_items", here)
    weights, modules = tiny_llama.tensors(), ["model.layers.1.self_attn.o_proj", "lm_head"]
    local = write_adapter(tmp_path / "a", adapter_config(modules, RANK, 6), factors(weights, modules, RANK))
    base = tiny_llama.write(tmp_path / "m")
    hub.add("org/m", tiny_llama.files())
    commit = hub.add("org/a", files(local))
    where = ("--source", "hf://org/m", "--lora", "hf://org/a", "--output", str(tmp_path / "far"))
    assert main(["convert", *where, "--dtype", "float32"]) == 0
    near = ("--source", str(base), "--lora", str(local), "--output", str(tmp_path / "near"))
    assert main(["convert", *near, "--dtype", "float32"]) == 0
    manifests = [read_manifest(str(tmp_path / name / "0" / "items")) for name in ("far", "near")]
    one, other = ({key: array["chunk_digests"] for key, array in m["arrays"].items()} for m in manifests)
    assert one == other
    assert manifests[0]["adapter"]["path"] == manifests[0]["options"]["lora"] == f"hf://org/a@{commit}"
    # The branch moves on; what was merged is known by its commit.
    hub.add(
        "org/a", files(write_adapter(tmp_path / "b", adapter_config(modules, RANK, 6), factors(weights, modules, 3, 9)))
    )
    assert main(["verify", "--source", "hf://org/m", "--output", str(tmp_path / "far")]) == 0
    assert main(["verify", "--source", "hf://org/m", "--output", str(tmp_path / "far"), "--lora", "hf://org/a"]) == 3


def test_files_are_told_apart(tmp_path):
    for name in ("base", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    source = open_with_adapter(str(tmp_path / "base"), str(tmp_path / "adapter"))
    assert source.url == str(tmp_path / "base")
    assert source.read("model.safetensors", 0, 4) == b"base"
    assert source.read("adapter:model.safetensors", 1, 4) == b"dapt"
    assert source.size("adapter:model.safetensors") == 7
    buffer = bytearray(3)
    source.readinto("adapter:model.safetensors", 4, memoryview(buffer))
    assert buffer == b"ter"
    assert open_with_adapter(str(tmp_path / "base"), "").list() == {"model.safetensors": 4}
