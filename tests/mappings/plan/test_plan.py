"""The plan: arrays, work items, totals and a digest; and everything that stops it."""

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from pace import pace
from small_family import headers, small_family
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import FamilyOptions
from tensorferry.mappings.families.registry import make_family
from tensorferry.mappings.lowbit.tensors import LogicalTensor
from tensorferry.mappings.plan.conversion_plan import Plan, PlanOptions, make_plan, plan_json
from tensorferry.mappings.plan.work import WorkItem
from tensorferry.mappings.rules.rule import Rule
from tensorferry.mappings.words.problems import PlanError


def plan(digest: str = "", tensors: dict[str, LogicalTensor] | None = None, **options: Any) -> Plan:
    family = small_family()
    return make_plan(family, tensors or headers(family), PlanOptions(**options), digest)


def test_arrays_of_both_modes() -> None:
    scanned = {array.name: array.spec.shape for array in plan().arrays}
    assert scanned == {
        "params-embedding": (12, 6), "params-decoder-layers-norm-scale": (6, 3),
        "params-decoder-layers-query": (6, 3, 5, 2), "params-decoder-layers-key": (6, 3, 1, 2),
        "params-decoder-layers-value": (6, 3, 1, 2), "params-decoder-layers-wi_0": (4, 3, 6, 7),
        "params-decoder-layers-wi_1": (4, 3, 6, 7),
    }  # fmt: skip
    unrolled = {array.name: array.spec.shape for array in plan(scan_layers=False).arrays}
    assert len(unrolled) == 1 + 3 * 6
    assert unrolled["params-decoder-layers_2-wi_1"] == (4, 6, 7)


def test_dtypes_follow_the_option_unless_the_rule_has_its_own() -> None:
    dtypes = {array.name: array.spec.dtype for array in plan(dtype="source").arrays}
    assert dtypes.pop("params-decoder-layers-norm-scale") == "float32"
    assert set(dtypes.values()) == {"bfloat16"}
    assert {array.spec.dtype for array in plan(dtype="float32").arrays} == {"float32"}


def test_the_digest_is_that_of_the_run() -> None:
    assert plan().digest == plan().digest
    moved = headers(small_family())
    name = "model.layers.1.norm.weight"
    stored = moved[name].stored["values"]
    moved[name] = LogicalTensor.plain(replace(stored, offset=stored.offset + 2))
    others = [plan("other headers"), plan(scan_layers=False), plan(dtype="float32"), plan(chunk_bytes=100),
              plan(tensors=moved)]  # fmt: skip
    assert len({plan().digest, *(other.digest for other in others)}) == 6


@pytest.mark.parametrize("chunk_bytes", [10, 100, 1000, 64 << 20])
def test_totals_are_sums_over_the_work_items(chunk_bytes: int) -> None:
    made = plan(chunk_bytes=chunk_bytes)
    items = list(made.items())
    totals = made.totals
    assert totals.arrays == 7
    assert totals.work_items == len(items)
    assert totals.objects == sum(len(item.parts) for item in items)
    assert totals.write_bytes == sum(array.spec.nbytes for array in made.arrays)
    assert totals.largest_item_bytes == max(item.peak_bytes for item in items)
    assert totals.read_bytes == sum(item.read_bytes for item in items)


def test_every_source_byte_is_read_once() -> None:
    """Whatever the chunks: no tensor is read for two arrays whose elements interleave in it."""
    stored = sum(tensor.nbytes for tensor in headers(small_family()).values())
    assert plan().totals.read_bytes == stored
    assert plan(scan_layers=False).totals.read_bytes == stored


def test_every_object_has_one_writer() -> None:
    parts = [part for item in plan(chunk_bytes=60).items() for part in item.parts]
    keys = [part.spec.chunk_key(part.grid, "zarr3") for part in parts]
    assert len(set(keys)) == len(keys)
    assert set(keys) == {key for array in plan(chunk_bytes=60).arrays for key in array.spec.chunk_keys("zarr3")}


def test_work_items_survive_json() -> None:
    for line, item in plan(chunk_bytes=100).lines():
        again = WorkItem.from_json(json.loads(line))
        assert json.dumps(again.to_json(), separators=(",", ":")) == line
        assert (again.write_bytes, again.peak_bytes, again.id) == (item.write_bytes, item.peak_bytes, item.id)


def test_an_item_too_big_for_a_worker_is_a_problem() -> None:
    found = plan(worker_memory_bytes=20).problems
    assert found
    words = str(found[0])
    assert "expected work items of at most 20 bytes (--worker-memory-bytes)" in words
    assert "the array cannot be cut finer" in words
    with pytest.raises(PlanError, match="--worker-memory-bytes"):
        plan(worker_memory_bytes=20).require()


def test_rules_that_disagree_about_an_array_are_a_problem() -> None:
    family = small_family()
    other = Rule("model.other", "params-embedding", "heads embed -> heads embed")
    wrong = replace(family, rules=(*family.rules, other))
    found = make_plan(wrong, headers(wrong), PlanOptions()).problems
    assert [problem.name for problem in found] == ["params-embedding"]
    assert "every element written exactly once" in str(found[0])


def test_the_plan_is_plain_data() -> None:
    data = json.loads(json.dumps(plan_json(plan("headers"))))
    assert data["source_digest"] == "headers"
    assert data["totals"]["arrays"] == len(data["arrays"]) == 7
    (query,) = [array for array in data["arrays"] if array["path"][-1] == "query"]
    assert query["sources"] == "model.layers.{0..2}.qkv.weight"
    assert query["ops"] == "qkv.q(heads lane) embed -> embed layer heads lane; scale 0.5"


@pytest.mark.slow
def test_a_hundred_thousand_tensors_are_planned_in_seconds() -> None:
    config = {
        "model_type": "qwen3_moe", "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151_936, "num_hidden_layers": 94, "num_experts": 360,
        "moe_intermediate_size": 1536, "intermediate_size": 12288, "num_experts_per_tok": 8, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    family = make_family(Config(config), [], FamilyOptions())
    tensors = headers(family)
    assert len(tensors) > 100_000
    start = time.process_time()
    made = make_plan(family, tensors, PlanOptions())
    assert not made.problems
    assert made.totals.write_bytes > 10**12
    assert time.process_time() - start < 10 * pace()
