"""Verifying: re-reads a committed checkpoint and its source, and compares every element by another road."""

import json
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tensorferry.mappings.lowbit.tensors import LogicalTensor
from tensorferry.mappings.plan.conversion_plan import Plan
from tensorferry.mappings.plan.work import Part, WorkItem
from tensorferry.mappings.rules.geometry import Box
from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.convert.conversion_planning import Conversion, ConversionOptions, options_of, plan_conversion
from tensorferry.pipelines.engine.beam_args import choose_engine
from tensorferry.pipelines.engine.cluster_args import complete_args, plan_resources, refuse_out_of_reach
from tensorferry.pipelines.engine.runner import run_items
from tensorferry.pipelines.orbax.orbax_view import OrbaxItem, find_item, open_item, read_manifest, read_region
from tensorferry.pipelines.orbax.stored_tree import stored_tree
from tensorferry.pipelines.output.bucket_receipts import BucketReceipts
from tensorferry.pipelines.output.receipts import Receipts
from tensorferry.pipelines.regions.adapter_bytes import open_with_adapter
from tensorferry.pipelines.storage.byte_budget import shared_budget
from tensorferry.pipelines.storage.byte_source import ByteSource
from tensorferry.pipelines.storage.kvstores import is_local, store_words
from tensorferry.pipelines.verify.difference import Difference, compare_part
from tensorferry.pipelines.verify.expected import expected_parts
from tensorferry.pipelines.verify.findings import Findings, open_findings
from tensorferry.pipelines.verify.source_region import source_region
from tensorferry.transforms.statistics import statistics

_WHOLE = 1 << 32


@dataclass(frozen=True)
class Verdict:
    """What was compared, and what differs.

    Attributes:
      item: the item's directory.
      arrays: arrays of which at least one chunk was compared.
      nbytes: bytes of target chunks compared.
      elements: elements compared.
      differences: everything that differs, the first elements of each chunk only.
    """

    item: str
    arrays: int
    nbytes: int
    elements: int
    differences: tuple[Difference, ...]


def verify(
    source: str,
    output: str,
    sample: float = 1.0,
    beam_args: tuple[str, ...] = (),
    show_progress: bool = True,
    lora: str = "",
) -> Verdict:
    """Compares a checkpoint with its source.

    Args:
      source: the checkpoint it was converted from; all other choices are in the manifest.
      output: the output directory, a step, or an item.
      sample: share of the work items to compare, above 0 up to 1; at least one per array.
      lora: the adapter that was merged or moved, where it is not at the place that the manifest tells.

    Raises:
      FerryError: there is no checkpoint or no manifest, or the source cannot be read.
    """
    refuse_out_of_reach(source, output, beam_args)
    item = find_item(output)
    manifest = read_manifest(item)
    conversion = plan_conversion(_options(manifest, source, item, lora))
    conversion.plan.require()
    other = tuple(_source_differences(conversion, manifest))
    if other:
        return Verdict(item, 0, 0, 0, other)
    tree = tuple(_tree_differences(conversion.plan, item))
    with open_findings(item, not choose_engine(beam_args).is_local) as findings:
        verdict = _compare(conversion, item, manifest, sample, findings, beam_args, show_progress)
    return replace(verdict, differences=tree + verdict.differences)


def _options(manifest: Mapping[str, Any], source: str, item: str, lora: str) -> ConversionOptions:
    """The options that a checkpoint was made by, for source and adapter at their present places."""
    options = options_of(manifest["options"], source)
    if lora and options.lora_only:
        return replace(options, lora_only=lora)
    if lora and not options.lora:
        fix = "Leave --lora out, or convert with it."
        raise FerryError(str(Problem(item, "a checkpoint with an adapter merged", "one without", fix)))
    return replace(options, lora=lora or options.lora)


def _compare(
    conversion: Conversion,
    item: str,
    manifest: Mapping[str, Any],
    sample: float,
    findings: Findings,
    beam_args: tuple[str, ...],
    show_progress: bool,
) -> Verdict:
    plan = conversion.plan
    chosen = list(sampled(plan.items(), sample, plan.digest))
    items_path = findings.share_items("".join(_line(one, manifest) for one in chosen))
    bound = plan.options.worker_memory_bytes
    source, adapter = conversion.source.url, conversion.merge.url if conversion.merge else ""
    work = VerifyWork(source, open_item(item), findings.receipts, bound, uuid.uuid4().hex, adapter)
    is_far = not (is_local(item) and is_local(conversion.source.url))
    args = complete_args(beam_args, plan_resources(plan), findings.scratch, is_far)
    run_items(items_path, [one.write_bytes for one in chosen], work, findings.how(chosen, args, show_progress))
    receipts = work.receipts.finished().values()
    if len(receipts) != len(chosen):
        raise FerryError(f"only {len(receipts):,} of {len(chosen):,} comparisons came back; run verify again")
    differences = [Difference(**found) for receipt in receipts for found in receipt["differences"]]
    if sample >= 1:
        told = {difference.array for difference in differences}
        differences += (d for d in _statistics_differences(receipts, manifest) if d.array not in told)
    arrays = {part.spec.key for one in chosen for part in one.parts}
    nbytes = sum(one.write_bytes for one in chosen)
    return Verdict(item, len(arrays), nbytes, sum(r["elements"] for r in receipts), tuple(differences))


def sampled(items: Iterator[WorkItem], sample: float, seed: str) -> Iterator[WorkItem]:
    """A share of the work items, the same for the same plan; the first item of every array is always in."""
    seen: set[str] = set()
    for item in items:
        new = {part.spec.key for part in item.parts} - seen
        seen |= new
        if new or zlib.crc32(f"{seed}{item.id}".encode()) < sample * _WHOLE:
            yield item


def _line(item: WorkItem, manifest: Mapping[str, Any]) -> str:
    """A work item with the digests that its parts must have."""
    return item_line(item, item.to_json(), manifest)


def item_line(item: WorkItem, data: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """A line of work: plain data of an item, and the digests that its parts must have."""
    digests = [_digest_of(part, manifest) for part in item.parts]
    return json.dumps({**data, "digests": digests}, separators=(",", ":")) + "\n"


def _digest_of(part: Part, manifest: Mapping[str, Any]) -> str:
    at = int(np.ravel_multi_index(part.grid, part.spec.grid)) if part.grid else 0
    return manifest["arrays"][part.spec.key]["chunk_digests"][at]


@dataclass(frozen=True)
class VerifyWork:
    """Compares the parts of one work item; a difference is a result, not a failure.

    Attributes:
      source: url of the source.
      item: the target.
      receipts: where findings go.
      worker_memory_bytes: bound on tensor bytes held at once.
      run_token: names the run for the shared budget.
      adapter: url of the adapter that was merged; empty for none.
    """

    source: str
    item: OrbaxItem
    receipts: Receipts | BucketReceipts
    worker_memory_bytes: int
    run_token: str
    adapter: str = ""

    def setup(self) -> None:
        """Nothing to prepare."""

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        one = WorkItem.from_json(item)
        with shared_budget(self.run_token, self.worker_memory_bytes).admit(held_bytes(one)):
            receipt = compare_item(one, item["digests"], self.item, open_with_adapter(self.source, self.adapter))
        self.receipts.add(one.id, receipt)
        return receipt


def held_bytes(item: WorkItem) -> int:
    """Tensor bytes that comparing an item holds: what is expected, what it is made of, and the largest part as read
    together with its mask."""
    largest = max(part.nbytes for part in item.parts)
    # A merged weight is float32 before it is rounded.
    copies = 5 if item.factor_bytes else 3
    read = copies * max(item.read_bytes // max(1, len(item.reads)), 1)
    return item.write_bytes + 3 * largest + read + item.factor_bytes


def compare_item(item: WorkItem, digests: list[str], target: OrbaxItem, source: ByteSource) -> dict[str, Any]:
    """Compares every part of a work item with what the source says it must hold."""

    def load(tensor: LogicalTensor, box: Box) -> np.ndarray:
        return source_region(source, tensor, box)

    differences: list[Difference] = []
    elements = 0
    found_statistics = []
    for part, wanted, told in zip(item.parts, expected_parts(item, load), digests, strict=True):
        try:
            array = target.open(part.spec.key, zeros_for_missing=False)
            found = read_region(array, part.spec.key, part.spec.box(part.grid))
        except FerryError as error:
            differences.append(_unreadable(part, error))
            continue
        differences += compare_part(part, wanted, found, told)
        elements += found.size
        found_statistics.append([part.spec.key, statistics(found).to_json()])
    return {
        "bytes": item.write_bytes,
        "elements": elements,
        "differences": [vars(difference) for difference in differences],
        "statistics": found_statistics,
    }


def _unreadable(part: Part, error: FerryError) -> Difference:
    reason = store_words(error.__cause__ or error)
    return Difference(part.spec.key, f"chunk {list(part.grid)}", "a whole chunk", f"it cannot be read: {reason}")


def _source_differences(conversion: Conversion, manifest: Mapping[str, Any]) -> Iterator[Difference]:
    if manifest["source_digest"] != conversion.checkpoint.digest:
        wanted = f"headers {manifest['source_digest'][:16]}…, as converted"
        found = f"{conversion.checkpoint.digest[:16]}…: not the checkpoint that was converted"
        yield Difference("source", conversion.checkpoint.root, wanted, found)
    elif conversion.merge and manifest["adapter"]["digest"] != conversion.merge.digest:
        wanted, found = f"{manifest['adapter']['digest'][:16]}…, as merged", f"{conversion.merge.digest[:16]}…"
        yield Difference("adapter", conversion.merge.url, wanted, f"{found}: not the adapter that was merged")
    elif manifest["plan_digest"] != conversion.plan.digest:
        yield Difference("plan", "digest", manifest["plan_digest"], f"{conversion.plan.digest}: made by other options "
                         "or another version of Tensorferry")  # fmt: skip


def _tree_differences(plan: Plan, item: str) -> Iterator[Difference]:
    """Compares what stock Orbax says of the tree with the plan."""
    found = stored_tree(item)
    if found is None:
        yield Difference(item, "", "a tree that stock Orbax can read", "metadata that it cannot: see the arrays below")
        return
    wanted = {array.spec.key: (array.spec.shape, array.spec.dtype) for array in plan.arrays}
    for key in sorted(wanted.keys() - found.keys()):
        yield Difference(key, "", f"an array {wanted[key]}", "no such array in Orbax's metadata")
    for key in sorted(found.keys() - wanted.keys() - {"step"}):
        yield Difference(key, "", "no such array", f"one {found[key]} in Orbax's metadata")
    for key in sorted(wanted.keys() & found.keys()):
        if wanted[key] != found[key]:
            yield Difference(key, "", str(wanted[key]), str(found[key]))


def _statistics_differences(receipts: Any, manifest: Mapping[str, Any]) -> Iterator[Difference]:
    from tensorferry.transforms.statistics import Statistics

    totals: dict[str, Statistics] = {}
    for receipt in receipts:
        for key, data in receipt["statistics"]:
            one = Statistics.from_json(data)
            totals[key] = totals[key].merge(one) if key in totals else one
    for key, total in totals.items():
        told = manifest["arrays"][key]["statistics"]
        if total.to_json() != told:
            yield Difference(key, "statistics", str(told), str(total.to_json()))
