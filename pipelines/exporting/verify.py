"""Verifying an export: re-reads source and files by other code than wrote them, and compares every element."""

import json
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mappings.export.shards import INDEX_FILE, Place, all_places
from mappings.geometry import Box
from mappings.plan import Plan
from mappings.problems import FerryError
from mappings.tensors import LogicalTensor
from mappings.work import Part, WorkItem
from pipelines.checkpoint import Checkpoint, open_checkpoint
from pipelines.expected import expected_parts
from pipelines.exporting.manifest import KIND
from pipelines.exporting.planning import Export, options_of, plan_export
from pipelines.exporting.repository import CONFIG
from pipelines.memory import shared_budget
from pipelines.orbax_view import OrbaxItem, read_region
from pipelines.receipts import Receipts
from pipelines.runner import RunOptions, run_items
from pipelines.sinks.listing import MANIFEST_NAME
from pipelines.verify import Difference, Verdict, compare_part, held_bytes, sampled
from transforms.dtypes import numpy_dtype


def is_export(output: str) -> bool:
    """Whether a directory is a repository that ``export`` wrote."""
    return _manifest(output).get("kind") == KIND


def _manifest(output: str) -> dict[str, Any]:
    try:
        data = json.loads(Path(output, MANIFEST_NAME).read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


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
    manifest = _manifest(output)
    export = plan_export(options_of(manifest["options"], source=source, config=config))
    export.plan.require()
    written = open_checkpoint(output)
    found = [*_plan_differences(export, manifest), *_header_differences(export.plan, written)]
    found += _file_differences(export, Path(output), written)
    if found:
        return Verdict(output, 0, 0, 0, tuple(found))
    with tempfile.TemporaryDirectory(prefix="tensorferry-verify-") as scratch:
        return _compare(export, output, manifest, sample, Path(scratch), beam_args, show_progress)


def _compare(
    export: Export,
    output: str,
    manifest: Mapping[str, Any],
    sample: float,
    scratch: Path,
    beam_args: tuple[str, ...],
    show_progress: bool,
) -> Verdict:
    plan, places = export.plan, all_places(export.plan.shards)
    chosen = list(sampled(plan.items(), sample, plan.digest))
    lines = scratch / "items.jsonl"
    lines.write_text("".join(_line(one, manifest, places) for one in chosen))
    bound = plan.options.worker_memory_bytes
    work = VerifyExport(output, export.source.item, Receipts(str(scratch / "found")), bound, uuid.uuid4().hex)
    how = RunOptions(beam_args=beam_args, state_dir=str(scratch), show_progress=show_progress)
    run_items(str(lines), [one.write_bytes for one in chosen], work, how)
    receipts = list(work.receipts.finished().values())
    if len(receipts) != len(chosen):
        raise FerryError(f"only {len(receipts):,} of {len(chosen):,} comparisons came back; run verify again")
    tensors = {part.spec.key for one in chosen for part in one.parts}
    differences = tuple(Difference(**found) for receipt in receipts for found in receipt["differences"])
    nbytes = sum(one.write_bytes for one in chosen)
    return Verdict(output, len(tensors), nbytes, sum(receipt["elements"] for receipt in receipts), differences)


def _line(item: WorkItem, manifest: Mapping[str, Any], places: Mapping[str, Place]) -> str:
    """A work item with the digests that its parts must have, and where they lie."""
    data = item.to_json()
    data["digests"] = [_told(part, manifest) for part in item.parts]
    data["places"] = [[places[part.spec.key].file, places[part.spec.key].offset] for part in item.parts]
    return json.dumps(data, separators=(",", ":")) + "\n"


def _told(part: Part, manifest: Mapping[str, Any]) -> str:
    at = int(np.ravel_multi_index(part.grid, part.spec.grid)) if part.grid else 0
    return manifest["arrays"][part.spec.key]["chunk_digests"][at]


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
    receipts: Receipts
    worker_memory_bytes: int
    run_token: str

    def setup(self) -> None:
        """Nothing to prepare."""

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        one = WorkItem.from_json(item)
        with shared_budget(self.run_token, self.worker_memory_bytes).admit(held_bytes(one)):
            receipt = self._compare(one, item["digests"], item["places"])
        self.receipts.add(one.id, receipt)
        return receipt

    def _compare(self, item: WorkItem, digests: list[str], places: list[tuple[str, int]]) -> dict[str, Any]:
        def load(tensor: LogicalTensor, box: Box) -> np.ndarray:
            key = tensor.stored["values"].file
            return read_region(self.source.open(key), key, box)

        differences: list[Difference] = []
        for part, wanted, told, place in zip(item.parts, expected_parts(item, load), digests, places, strict=True):
            differences += compare_part(part, wanted, self._found(part, *place), told)
        elements = sum(int(np.prod(part.spec.box_shape(part.grid))) for part in item.parts)
        return {"bytes": item.write_bytes, "elements": elements, "differences": [vars(one) for one in differences]}

    def _found(self, part: Part, file: str, offset: int) -> np.ndarray:
        spec = part.spec
        whole = np.memmap(Path(self.output, file), np.uint8, "r", offset, spec.nbytes)
        tensor = whole.view(numpy_dtype(spec.dtype)).reshape(spec.shape)
        return np.array(tensor[tuple(slice(*span) for span in spec.box(part.grid))])


def _plan_differences(export: Export, manifest: Mapping[str, Any]) -> Iterator[Difference]:
    if manifest["source_digest"] != export.plan.source_digest:
        found = "other metadata: not the checkpoint that was exported, or --config has changed"
        yield Difference("source", export.source.item.path, f"metadata {manifest['source_digest'][:16]}…", found)
    elif manifest["plan_digest"] != export.plan.digest:
        yield Difference("plan", "digest", manifest["plan_digest"], f"{export.plan.digest}: made by another version of "
                         "Tensorferry")  # fmt: skip


def _header_differences(plan: Plan, written: Checkpoint) -> Iterator[Difference]:
    """What the files' own headers and index say, against the plan."""
    found = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in written.tensors.items()}
    wanted = {array.name: (array.spec.dtype, list(array.spec.shape)) for array in plan.arrays}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            told, there = wanted.get(name, "no such tensor"), found.get(name, "no such tensor")
            yield Difference(name, "header", str(told), str(there))
    for file, metadata in written.metadata.items():
        if metadata != {"format": "pt"}:
            yield Difference(file, "__metadata__", "{'format': 'pt'}", str(metadata))


def _file_differences(export: Export, output: Path, written: Checkpoint) -> Iterator[Difference]:
    """The small files and the index."""
    repository = export.repository
    for name in repository.files:
        wanted = repository.source.read(name, 0, repository.files[name])
        if not (output / name).is_file() or (output / name).read_bytes() != wanted:
            yield Difference(name, "", "the bytes of --config's file", "other bytes, or no such file")
    if (output / CONFIG).read_bytes() != export.config:
        yield Difference(CONFIG, "", "--config's, with the changes that the plan lists", "other bytes")
    if (output / INDEX_FILE).is_file():
        total = json.loads((output / INDEX_FILE).read_bytes())["metadata"]["total_size"]
        if total != written.nbytes:
            yield Difference(INDEX_FILE, "metadata.total_size", f"{written.nbytes:,}", f"{total:,}")
