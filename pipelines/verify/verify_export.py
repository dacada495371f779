"""Verifying an export: re-reads source and files by other code than wrote them, and compares every element."""

import json
import math
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tensorferry.mappings.export.export_plan import ExportPlan
from tensorferry.mappings.export.low_bit_exports import LowBit
from tensorferry.mappings.export.shards import INDEX_FILE, Place, all_places
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.work import Part, WorkItem
from tensorferry.mappings.rules.geometry import Box
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.engine.beam_args import choose_engine
from tensorferry.pipelines.engine.cluster_args import complete_args, plan_resources, refuse_out_of_reach
from tensorferry.pipelines.engine.runner import run_items
from tensorferry.pipelines.export.export_planning import Export, options_of, plan_export
from tensorferry.pipelines.export.export_work import Task
from tensorferry.pipelines.huggingface.checkpoint import Checkpoint, open_checkpoint
from tensorferry.pipelines.huggingface.repository import CONFIG
from tensorferry.pipelines.orbax.orbax_view import OrbaxItem
from tensorferry.pipelines.output.bucket_receipts import BucketReceipts
from tensorferry.pipelines.output.export_manifest import ADAPTER_KIND, KIND
from tensorferry.pipelines.output.receipts import Receipts
from tensorferry.pipelines.sinks.listing import MANIFEST_NAME
from tensorferry.pipelines.storage.byte_budget import shared_budget
from tensorferry.pipelines.storage.byte_source import ByteSource, MissingFileError, open_source
from tensorferry.pipelines.storage.kvstores import is_local
from tensorferry.pipelines.verify.carried_check import compare_scale, read_values
from tensorferry.pipelines.verify.difference import Difference, compare_part
from tensorferry.pipelines.verify.expected import expected_parts
from tensorferry.pipelines.verify.findings import Findings, open_findings
from tensorferry.pipelines.verify.verify_conversion import Verdict, held_bytes, item_line, sampled
from tensorferry.transforms.decode.scales import scale_values
from tensorferry.transforms.digest import digest
from tensorferry.transforms.dtypes import numpy_dtype
from tensorferry.transforms.requantise import block_counts, spread

_CODE_SLACK = 0.07


def is_export(output: str) -> bool:
    """Whether a directory is a repository, or an adapter's folder, that ``export`` wrote."""
    return _manifest(output).get("kind") in (KIND, ADAPTER_KIND)


def _manifest(output: str) -> dict[str, Any]:
    try:
        data = json.loads(_content(open_source(output), MANIFEST_NAME) or b"")
    except (FerryError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _content(source: ByteSource, name: str) -> bytes | None:
    """A small file, if it is there."""
    try:
        return source.read(name, 0, source.size(name))
    except MissingFileError:
        return None


def verify_export(
    source: str,
    output: str,
    config: str = "",
    sample: float = 1.0,
    beam_args: tuple[str, ...] = (),
    show_progress: bool = True,
) -> Verdict:
    """Compares an exported repository with the Orbax checkpoint that it came from, tensor by tensor.

    Args:
      source: the Orbax checkpoint; all other choices are in the manifest.
      output: the repository.
      config: the repository that ``--config`` named, when it has moved since.
      sample: share of the work items to compare, above 0 up to 1; at least one per tensor.

    Raises:
      PlanError: source, config or output cannot be read.
    """
    refuse_out_of_reach(source, output, beam_args)
    manifest = _manifest(output)
    if manifest.get("kind") == ADAPTER_KIND:
        from tensorferry.pipelines.verify.verify_adapter import verify_adapter

        return verify_adapter(manifest, source, output, config, sample, beam_args, show_progress)
    export = plan_export(options_of(manifest["options"], source=source, config=config))
    export.plan.require()
    written = open_checkpoint(output)
    found = [*plan_differences(export, manifest), *header_differences(export.plan, written.tensors, written.metadata)]
    found += _file_differences(export, written)
    if found:
        return Verdict(output, 0, 0, 0, tuple(found))
    with open_findings(output, not choose_engine(beam_args).is_local) as findings:
        return compare_tensors(export, output, manifest, sample, findings, beam_args, show_progress)


def compare_tensors(
    export: Export,
    output: str,
    manifest: Mapping[str, Any],
    sample: float,
    findings: Findings,
    beam_args: tuple[str, ...],
    show_progress: bool,
) -> Verdict:
    """Compares every tensor of an export with its source, or a sample of them."""
    plan, places = export.plan, all_places(export.plan.shards)
    chosen = list(sampled(plan.items(), sample, plan.digest))
    items_path = findings.share_items("".join(_line(one, manifest, places, plan) for one in chosen))
    bound = plan.options.worker_memory_bytes
    work = VerifyExport(output, export.source.item, findings.receipts, bound, uuid.uuid4().hex)
    is_far = not (is_local(output) and is_local(export.source.item.path))
    args = complete_args(beam_args, plan_resources(plan), findings.scratch, is_far)
    run_items(items_path, [one.write_bytes for one in chosen], work, findings.how(chosen, args, show_progress))
    receipts = list(work.receipts.finished().values())
    if len(receipts) != len(chosen):
        raise FerryError(f"only {len(receipts):,} of {len(chosen):,} comparisons came back; run verify again")
    tensors = {part.spec.key for one in chosen for part in one.parts}
    differences = tuple(Difference(**found) for receipt in receipts for found in receipt["differences"])
    nbytes = sum(one.write_bytes for one in chosen)
    return Verdict(output, len(tensors), nbytes, sum(receipt["elements"] for receipt in receipts), differences)


def _line(item: WorkItem, manifest: Mapping[str, Any], places: Mapping[str, Place], plan: ExportPlan) -> str:
    """A work item with the digests that its parts must have, and where they lie."""
    return item_line(item, plan.item_json(item, places), manifest)


@dataclass(frozen=True)
class VerifyExport:
    """Compares the parts of one work item; a difference is a result, not a failure.

    Attributes:
      output: the repository.
      source: the Orbax item.
      receipts: where findings go.
      worker_memory_bytes: bound on tensor bytes held at once.
      run_token: names the run for the shared budget.
    """

    output: str
    source: OrbaxItem
    receipts: Receipts | BucketReceipts
    worker_memory_bytes: int
    run_token: str

    def setup(self) -> None:
        """Nothing to prepare."""

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        task = Task.from_json(item)
        decoded = any("scale" in read.tensor.stored for read in task.item.reads)
        coding = task.held_bytes if task.low_bit or task.finishes or decoded else 0
        with shared_budget(self.run_token, self.worker_memory_bytes).admit(held_bytes(task.item) + coding):
            receipt = self._compare(task, item["digests"])
        self.receipts.add(task.item.id, receipt)
        return receipt

    def _compare(self, task: Task, digests: list[str]) -> dict[str, Any]:
        def load(tensor: LogicalTensor, box: Box) -> np.ndarray:
            return read_values(self.source, tensor, box)

        differences: list[Difference] = []
        item = task.item
        # A low-bit part is compared in float32: what it decodes to against what the array says.
        exact = replace(item, parts=tuple(_float32(part, task.low_bit) for part in item.parts))
        for part, wanted, told, place in zip(
            item.parts, expected_parts(exact, load), digests, task.places, strict=True
        ):
            if part.spec.key in task.low_bit:
                differences += self._compare_low_bit(part, wanted, told, place, *task.low_bit[part.spec.key])
            elif finish := task.finishes.get(part.spec.key):
                found = self._found(Part(finish.spec, (0,) * len(finish.spec.shape)), *place)
                differences += compare_scale(part, wanted, found, finish, told)
            else:
                differences += compare_part(part, wanted, self._found(part, *place), told)
        elements = sum(math.prod(part.spec.box_shape(part.grid)) for part in item.parts)
        return {"bytes": item.write_bytes, "elements": elements, "differences": [vars(one) for one in differences]}

    def _compare_low_bit(
        self, part: Part, wanted: np.ndarray, told: str, place: tuple[str, int], low_bit: LowBit,
        scale_place: tuple[str, int],
    ) -> list[Difference]:  # fmt: skip
        """Codes times scale against the wanted values: no further off than a code's rounding."""
        code_spec, scale_spec = low_bit.specs(part.spec.chunk)
        codes = self._found(Part(code_spec, part.grid), *place)
        scale_part = Part(scale_spec, low_bit.scale_grid(part.grid))
        scales = scale_values(self._found(scale_part, *scale_place), low_bit.tensor.params["encoding"])
        scales = spread(scales.reshape(block_counts(wanted.shape, low_bit.blocks)), wanted.shape, low_bit.blocks)
        return compare_codes(part, wanted, codes, scales, told)

    def _found(self, part: Part, file: str, offset: int) -> np.ndarray:
        spec = part.spec
        tensor = self._octets(file, offset, part).view(numpy_dtype(spec.dtype)).reshape(spec.shape)
        return np.array(tensor[tuple(slice(*span) for span in spec.box(part.grid))])

    def _octets(self, file: str, offset: int, part: Part) -> np.ndarray:
        """The bytes of the part's tensor; those of no concern to the part may be left out of memory."""
        spec = part.spec
        if is_local(self.output):
            return np.memmap(Path(self.output, file), np.uint8, "r", offset, spec.nbytes)
        source, whole = open_source(self.output), np.empty(spec.nbytes, np.uint8)
        for start, length in _stretches(part):
            whole[start : start + length] = np.frombuffer(source.read(file, offset + start, length), np.uint8)
        return whole


def _stretches(part: Part) -> list[tuple[int, int]]:
    """What to read of a tensor over a network: from the first row of the part to its last, as one stretch."""
    spec, box = part.spec, part.spec.box(part.grid)
    if not spec.shape:
        return [(0, spec.nbytes)]
    row = spec.nbytes // max(spec.shape[0], 1)
    (first, last), *_ = box
    return [(first * row, (last - first) * row)]


def _float32(part: Part, low_bit: Mapping[str, Any]) -> Part:
    return replace(part, spec=replace(part.spec, dtype="float32")) if part.spec.key in low_bit else part


def compare_codes(part: Part, wanted: np.ndarray, codes: np.ndarray, scales: np.ndarray, told: str) -> list[Difference]:
    """Differences of one low-bit part: values further off than rounding explains, and the manifest's digest.

    A code is off by half a step of its own binade at most, and what was stored in bfloat16 in between by a little more.
    """
    info = ml_dtypes.finfo(codes.dtype)
    found = codes.astype(np.float32) * scales
    step = np.maximum(np.abs(wanted) * np.float32(info.eps), scales * np.float32(info.smallest_subnormal))
    wrong = ~(np.abs(found - wanted) <= step * np.float32(0.5 + _CODE_SLACK))
    where = f"chunk {list(part.grid)}"
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        index = [low + i for (low, _), i in zip(part.spec.box(part.grid), at, strict=True)]
        count = f"({int(np.count_nonzero(wrong)):,} elements are off in {where})"
        return [Difference(part.spec.key, f"index {index}", str(wanted[at]), f"{found[at]} {count}")]
    now = digest(np.ascontiguousarray(codes))
    return [] if now == told else [Difference(part.spec.key, where, f"digest {told} (manifest)", now)]


def plan_differences(export: Export, manifest: Mapping[str, Any]) -> Iterator[Difference]:
    """Whether source and plan are those that the manifest tells of."""
    if manifest["source_digest"] != export.plan.source_digest:
        found = "other metadata: not the checkpoint that was exported, or --config has changed"
        yield Difference("source", export.source.item.path, f"metadata {manifest['source_digest'][:16]}…", found)
    elif manifest["plan_digest"] != export.plan.digest:
        yield Difference("plan", "digest", manifest["plan_digest"], f"{export.plan.digest}: made by another version of "
                         "Tensorferry")  # fmt: skip


def header_differences(
    plan: ExportPlan, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, Mapping[str, str]]
) -> Iterator[Difference]:
    """What the files' own headers say, against the plan.

    Args:
      plan: of the export.
      tensors: by name, as the headers tell.
      metadata: file to its header's free text.
    """
    found = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()}
    wanted = {spec.key: (spec.dtype, list(spec.shape)) for spec in plan.specs}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            told, there = wanted.get(name, "no such tensor"), found.get(name, "no such tensor")
            yield Difference(name, "header", str(told), str(there))
    for file, told in metadata.items():
        if told != {"format": "pt"}:
            yield Difference(file, "__metadata__", "{'format': 'pt'}", str(told))


def _file_differences(export: Export, written: Checkpoint) -> Iterator[Difference]:
    """The small files and the index."""
    repository, source = export.repository, written.source
    for name in repository.files:
        wanted = repository.source.read(name, 0, repository.files[name])
        if _content(source, name) != wanted:
            yield Difference(name, "", "the bytes of --config's file", "other bytes, or no such file")
    if _content(source, CONFIG) != export.config:
        yield Difference(CONFIG, "", "--config's, with the changes that the plan lists", "other bytes")
    index = _content(source, INDEX_FILE)
    if index is not None:
        total = json.loads(index)["metadata"]["total_size"]
        if total != written.nbytes:
            yield Difference(INDEX_FILE, "metadata.total_size", f"{written.nbytes:,}", f"{total:,}")
