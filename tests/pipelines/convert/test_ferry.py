"""Ferrying a whole plan: each source byte is read once, each chunk is written once, receipts tell the truth."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    Sizes,
    llama_config,
    llama_tensors,
    qwen3_moe_config,
    qwen3_moe_tensors,
    write_checkpoint,
)
from golden import MODELS
from oracle_models import plan_of as oracle_plan
from safetensors.numpy import save_file
from small_family import headers, small_family
from tensorferry.mappings.families.family import FamilyOptions
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.conversion_plan import Plan, PlanOptions, make_plan
from tensorferry.mappings.plan.work import BLOCK_BYTES, WorkItem
from tensorferry.mappings.rules.geometry import Box, box_of
from tensorferry.pipelines.convert.conversion_planning import ConversionOptions, plan_conversion
from tensorferry.pipelines.convert.ferry import ferry, part_buffers
from tensorferry.pipelines.huggingface.headers import scan_header
from tensorferry.pipelines.regions import boxes as regions
from tensorferry.pipelines.regions.assemble import blocks
from tensorferry.pipelines.regions.boxes import Scratch
from tensorferry.pipelines.storage.byte_source import ByteSource, LocalSource
from tensorferry.transforms.digest import digest
from tensorferry.transforms.statistics import statistics

# Big enough that gaps, blocks and cuts matter, small enough to be quick.
SIZES = Sizes(layers=3, vocab=301, embed=64, heads=6, kv_heads=2, head_dim=16, mlp=150, experts=5, expert_mlp=34)


@dataclass
class CountingSource:
    """Counts what is read from another source."""

    inner: ByteSource
    nbytes: int = 0

    def readinto(self, path: str, start: int, buffer: memoryview) -> None:
        self.nbytes += len(buffer)
        self.inner.readinto(path, start, buffer)


@dataclass
class RecordingSink:
    """Keeps what is written, as a sink that is one part writer."""

    writes: Counter = field(default_factory=Counter)
    arrays: dict = field(default_factory=dict)

    def open_part(self, attempt_id: str) -> "RecordingSink":
        return self

    def __enter__(self) -> "RecordingSink":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def write(self, spec, index, array) -> None:
        self.writes[spec.key, index] += 1
        self.arrays[spec.key, index] = array.copy()


def run(plan: Plan, source: ByteSource) -> tuple[CountingSource, RecordingSink, list[dict]]:
    counting, sink, scratch = CountingSource(source), RecordingSink(), Scratch()
    items = [WorkItem.from_json(json.loads(line)) for line, _ in plan.lines()]
    return counting, sink, [ferry(item, counting, sink, scratch) for item in items]


def used_bytes(plan: Plan) -> int:
    return sum(plan.tensors[name].nbytes for name in plan.account.claims)


def plan_of(folder: Path, config, tensors, scan: bool, chunk_bytes: int, **options) -> tuple[Plan, ByteSource]:
    source = write_checkpoint(folder, config, tensors)
    target = PlanOptions(scan, "bfloat16", chunk_bytes)
    conversion = plan_conversion(ConversionOptions(str(source), mapping=FamilyOptions(scan, **options), target=target))
    conversion.plan.require()
    return conversion.plan, conversion.source


def interleaved(folder: Path, chunk_bytes: int) -> tuple[Plan, ByteSource]:
    """A made-up family whose gate and up rows alternate in one source tensor."""
    family = small_family(embed=60)
    shapes = headers(family)
    random = np.random.default_rng(4)
    tensors = {
        name: random.standard_normal(tensor.shape, np.float32).astype("bfloat16") for name, tensor in shapes.items()
    }
    save_file(tensors, folder / "one.safetensors")
    source = LocalSource(str(folder))
    header, _ = scan_header(source, "one.safetensors", source.size("one.safetensors"))
    assert header
    places = {tensor.name: tensor for tensor in header.tensors}
    logical = {name: LogicalTensor.plain(places[name]) for name in tensors}
    plan = make_plan(family, logical, PlanOptions(True, "bfloat16", chunk_bytes))
    plan.require()
    return plan, source


@pytest.fixture(params=[1 << 10, 6 << 10, 1 << 20], ids=["1K", "6K", "1M"])
def chunk_bytes(request) -> int:
    return request.param


@pytest.fixture(params=["llama", "llama unscan", "split lanes", "qwen", "qwen unscan", "qwen fused", "interleaved"])
def plan_and_source(request, chunk_bytes, tmp_path):
    kind = request.param
    scan = "unscan" not in kind
    if kind == "interleaved":
        return interleaved(tmp_path, chunk_bytes)
    if kind.startswith("qwen"):
        tensors = qwen3_moe_tensors(SIZES, fused="fused" in kind)
        return plan_of(tmp_path, qwen3_moe_config(SIZES), tensors, scan, chunk_bytes)
    lanes = "split" if "split" in kind else "auto"
    return plan_of(tmp_path, llama_config(SIZES), llama_tensors(SIZES), scan, chunk_bytes, rope_lanes=lanes)


def test_each_source_byte_is_read_once_and_each_chunk_written_once(plan_and_source, monkeypatch):
    # Rows of real models are longer than what counts as short; here both are smaller.
    monkeypatch.setattr(regions, "_SHORT_RUN_BYTES", 32)
    plan, source = plan_and_source
    counting, sink, receipts = run(plan, source)

    assert used_bytes(plan) <= counting.nbytes <= 1.02 * used_bytes(plan)
    chunks = [(array.spec.key, index) for array in plan.arrays for index in array.spec.indices()]
    assert sink.writes == Counter(chunks)
    assert sum(receipt["bytes"] for receipt in receipts) == plan.totals.write_bytes
    assert sum(receipt["bytes"] for receipt in receipts) == sum(a.nbytes for a in sink.arrays.values())


@pytest.mark.parametrize("family", ["deepseek", "gpt_oss", "llama", "llama4", "qwen3_5_moe", "qwen3_vl_moe"])
def test_models_of_real_sizes_are_read_once_and_in_long_stretches(family):
    """By arithmetic: what `read_box` would read for every block of every work item."""
    plan = oracle_plan(MODELS[family], "scan") or oracle_plan(MODELS[family], "unscan")
    assert plan
    nbytes = reads = 0
    for tensor, box in boxes_read(plan):
        hull = regions._hull(tensor, box) or box
        nbytes += tensor.nbytes * math.prod(regions.box_shape(hull)) // math.prod(tensor.shape)
        reads += math.prod(regions.box_shape(hull[: regions._run_axis(tensor, hull)]))
    assert used_bytes(plan) <= nbytes <= 1.02 * used_bytes(plan)
    assert nbytes / reads > 1 << 20


def boxes_read(plan: Plan) -> Iterator[tuple[StoredTensor, Box]]:
    for item in plan.items():
        for read in item.reads:
            move, stored = item.moves[read.move], read.tensor.stored["values"]
            ranges = {atom: (0, size) for atom, size in move.sizes.items()} | dict(read.ranges)
            for block in blocks(move.source, ranges, BLOCK_BYTES // 2):
                yield stored, box_of(move.source, block)


def test_a_receipt_tells_what_was_written(tmp_path):
    plan, source = plan_of(tmp_path, llama_config(SIZES), llama_tensors(SIZES), True, 1 << 12)
    _, sink, receipts = run(plan, source)
    told = {(p["array"], tuple(p["grid"])): p for receipt in receipts for p in receipt["parts"]}
    assert told.keys() == sink.arrays.keys()
    for place, array in sink.arrays.items():
        assert told[place]["digest"] == digest(array)
        assert told[place]["statistics"] == statistics(array).to_json()
    assert len({receipt["attempt"] for receipt in receipts}) == len(receipts)


def test_scratch_is_used_again_and_stays_small(tmp_path):
    plan, source = plan_of(tmp_path, llama_config(SIZES), llama_tensors(SIZES), True, 1 << 20)
    scratch = Scratch()
    for item in plan.items():
        ferry(item, source, RecordingSink(), scratch)
    assert scratch.nbytes <= plan.totals.largest_item_bytes


def test_buffers_of_an_item_do_not_overlap(tmp_path):
    plan, _ = plan_of(tmp_path, llama_config(SIZES), llama_tensors(SIZES), True, 1 << 10)
    for item in plan.items():
        buffers = part_buffers(item, Scratch())
        for number, buffer in enumerate(buffers):
            buffer.reshape(-1).view(np.uint8).fill(number % 251)
        for number, buffer in enumerate(buffers):
            assert (buffer.reshape(-1).view(np.uint8) == number % 251).all()
