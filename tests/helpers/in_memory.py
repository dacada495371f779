"""Plans run on arrays in memory: no files, no Beam, the same work items."""

import json
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from tensorferry.mappings.families.family import Family
from tensorferry.mappings.lowbit.schemes import scheme_of
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.conversion_plan import Plan, PlanOptions, make_plan, plan_rules
from tensorferry.mappings.plan.target_arrays import hf_path
from tensorferry.mappings.plan.work import Part, WorkItem
from tensorferry.mappings.rules.compiled import compile_rule
from tensorferry.mappings.rules.geometry import Box
from tensorferry.pipelines.regions.assemble import assemble
from tensorferry.pipelines.regions.decode_region import decode_region
from tensorferry.transforms.dtypes import numpy_dtype

Arrays = Mapping[str, np.ndarray]


def logical(arrays: Arrays) -> dict[str, LogicalTensor]:
    """Headers of arrays in memory."""
    return {
        name: LogicalTensor.plain(StoredTensor(name, array.dtype.name, array.shape, "memory", 0))
        for name, array in arrays.items()
    }


def run_plan(plan: Plan, arrays: Arrays) -> dict[str, np.ndarray]:
    """Every target array by its key, assembled work item by work item from what each item's JSON says."""
    plan.require()

    def load(tensor: LogicalTensor, box: Box, wanted: str) -> np.ndarray:
        return load_region(arrays, tensor, box, wanted)

    out = {a.spec.key: np.zeros(a.spec.shape, numpy_dtype(a.spec.dtype)) for a in plan.arrays}
    written = {key: np.zeros(array.shape, np.uint8) for key, array in out.items()}
    for line, _ in plan.lines():
        item = WorkItem.from_json(json.loads(line))
        buffers = assemble(item, load, [_junk(part) for part in item.parts])
        for part, buffer in zip(item.parts, buffers, strict=True):
            box = tuple(slice(*span) for span in part.spec.box(part.grid))
            out[part.spec.key][box] = buffer
            written[part.spec.key][box] += 1
    twice = [key for key, times in written.items() if not (times == 1).all()]
    assert not twice, f"elements not written exactly once: {twice}"
    return out


def load_region(arrays: Arrays, tensor: LogicalTensor, box: Box, wanted: str) -> np.ndarray:
    """A box of a logical tensor whose stored tensors are arrays, decoded to ``wanted`` where it is quantised."""
    scheme = scheme_of(tensor)
    boxes = scheme.stored_box(tensor, box) if scheme else {"values": box}
    found = {role: _region(arrays[tensor.stored[role].name], stored) for role, stored in boxes.items()}
    return decode_region(tensor, box, found, wanted) if scheme else found["values"]


def _region(array: np.ndarray, box: Box) -> np.ndarray:
    return np.array(array[tuple(slice(*span) for span in box)], order="C")


def _junk(part: Part) -> np.ndarray:
    """A buffer whose forgotten elements would show."""
    junk = np.empty(part.spec.box_shape(part.grid), numpy_dtype(part.spec.dtype))
    junk.reshape(-1).view(np.uint8).fill(0xA5)
    return junk


def convert(family: Family, arrays: Arrays, options: PlanOptions) -> dict[str, np.ndarray]:
    """Hugging Face arrays to MaxText arrays, keys without the item's first ``params.``."""
    out = run_plan(make_plan(family, logical(arrays), options), arrays)
    return {key.removeprefix("params."): array for key, array in out.items()}


def convert_back(family: Family, arrays: Arrays, options: PlanOptions) -> dict[str, np.ndarray]:
    """MaxText arrays to Hugging Face arrays by the inverse of every rule."""
    named = {key.replace(".", "-"): array for key, array in arrays.items()}
    rules = [compile_rule(r.inverse(family.dims), family.dims) for r in family.plain_rules(options.scan_layers)]
    bare = replace(family, ties=(), ignores=())
    plan = plan_rules(bare, rules, logical(named), options, path_of=hf_path)
    return run_plan(plan, named)
