"""The manifest of an export: what the repository was made from and how, kept inside it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tensorferry.mappings.export.export_plan import ExportPlan
from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.plan.target_arrays import TargetArray
from tensorferry.pipelines.export.export_planning import Export, ExportOptions
from tensorferry.pipelines.output.manifest import MANIFEST_FORMAT, Receipt, chunk_receipts, versions
from tensorferry.transforms.digest import combine
from tensorferry.transforms.statistics import Statistics

KIND, ADAPTER_KIND = "export", "adapter"

Parts = Mapping[tuple[str, tuple[int, ...]], Mapping[str, Any]]


def export_manifest(export: Export, options: ExportOptions, receipts: Mapping[str, Receipt]) -> dict[str, Any]:
    """The manifest of a finished export; every part of every tensor must have its receipt.

    Raises:
      KeyError: a part has none.
    """
    plan, parts = export.plan, chunk_receipts(receipts.values())
    return {
        "format": MANIFEST_FORMAT,
        "kind": KIND,
        "plan_digest": plan.digest,
        "source": export.source.item.path,
        "config": export.repository.source.url,
        "source_digest": plan.source_digest,
        "options": asdict(options),
        "family": plan.family.name,
        "notes": [*plan.notes, *export.notes],
        "files": {shard.file: shard.nbytes for shard in plan.shards},
        "copied": sorted({*export.repository.files, *export.fp8.files()}),
        "arrays": dict(_arrays(plan, parts)),
        "low_bit": _low_bit(export, receipts),
        "versions": versions(),
    }


def _arrays(plan: ExportPlan, parts: Parts) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every tensor under its name; scales of parts of a weight, which make one tensor, each under its own."""
    for array in plan.arrays:
        told = [parts[array.spec.key, index] for index in array.spec.indices()]
        spec = plan.finishes[array.name].spec if array.name in plan.finishes else array.spec
        yield array.spec.key, _array(array, spec, told)


def _low_bit(export: Export, receipts: Mapping[str, Receipt]) -> dict[str, Any]:
    """Per weight that left as FP8: its two tensors, and how many blocks of its scale changed."""
    plan = export.plan
    told = [part for receipt in receipts.values() for part in receipt.get("scales", ())]
    parts = {(part["array"], tuple(part["grid"])): part for part in told}
    found = {}
    for array in plan.arrays:
        if array.name in plan.low_bit:
            codes, scale = plan.written(array)
            own = [parts[scale.key, index] for index in scale.indices()]
            found[array.name] = {
                "codes": {"name": codes.key, "dtype": codes.dtype},
                "scale": _array(array, scale, own) | {"name": scale.key},
                "changed_blocks": sum(part["changed_blocks"] for part in own),
                "blocks": sum(part["blocks"] for part in own),
            }
    return found


def _array(array: TargetArray, spec: ArraySpec, told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total = Statistics.from_json(told[0]["statistics"])
    for part in told[1:]:
        total = total.merge(Statistics.from_json(part["statistics"]))
    return {
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "chunk": list(spec.chunk),
        "sources": array.sources,
        "ops": array.ops,
        "digest": combine(part["digest"] for part in told),
        "chunk_digests": [part["digest"] for part in told],
        "statistics": total.to_json(),
    }
