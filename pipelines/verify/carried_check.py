"""Verifying carried FP8 by another road than the export's: element by element, from sizes of blocks."""

import numpy as np
from tensorferry.mappings.export.scale_finish import Finish
from tensorferry.mappings.lowbit.tensors import LogicalTensor
from tensorferry.mappings.plan.work import Part
from tensorferry.mappings.rules.geometry import Box
from tensorferry.pipelines.orbax.orbax_view import OrbaxItem, read_region
from tensorferry.pipelines.verify.difference import Difference
from tensorferry.transforms.decode.scales import scale_values
from tensorferry.transforms.digest import digest
from tensorferry.transforms.unfold import fold, unfold

# A factor that is not a power of two moves a scale by a rounding, there and back.
_ROUNDINGS = np.float32(2.5e-7)


def read_values(item: OrbaxItem, tensor: LogicalTensor, box: Box) -> np.ndarray:
    """A box of an array; FP8 codes that leave as numbers times their scale, float32."""
    values = _read(item, tensor, "values", box)
    if "scale" not in tensor.stored:
        return values
    whole = tuple((0, length) for length in tensor.stored["scale"].shape)
    scale = unfold(scale_values(_read(item, tensor, "scale", whole)), tensor.params["folded"])
    index = [np.arange(low, high) for low, high in box]
    for dim, axis in enumerate(tensor.params["scale_axes"]):
        block = tensor.params["blocks"][axis] or tensor.shape[axis]
        scale = np.take(scale, index[axis] // block, axis=dim)
    missing = [axis for axis in range(len(box)) if axis not in tensor.params["scale_axes"]]
    return values.astype(np.float32) * np.expand_dims(scale, tuple(missing))


def _read(item: OrbaxItem, tensor: LogicalTensor, role: str, box: Box) -> np.ndarray:
    key = tensor.stored[role].file
    return read_region(item.open(key), key, box)


def compare_scale(part: Part, entries: np.ndarray, stored: np.ndarray, finish: Finish, told: str) -> list[Difference]:
    """Differences of one finished scale: each entry of the array against the stored scale of its block."""
    params, numbers = finish.scale.params, fold(scale_values(stored, finish.encoding), finish.factors)
    for dim, axis in enumerate(params["scale_axes"]):
        if axis >= 0:
            numbers = np.take(numbers, _blocks(finish, axis, entries.shape[axis]), axis=dim)
    followed = [axis for axis in params["scale_axes"] if axis >= 0]
    numbers = numbers.reshape([entries.shape[axis] if axis in followed else 1 for axis in range(entries.ndim)])
    wrong = np.abs(numbers - entries) > (_ROUNDINGS * np.abs(entries) if finish.factors else 0)
    if wrong.any():
        at = [int(i) for i in np.argwhere(wrong)[0]]
        wanted, instead = (np.broadcast_to(one, entries.shape)[tuple(at)] for one in (entries, numbers))
        return [Difference(finish.stored.name, f"entry {at} of {part.spec.key}", str(wanted), str(instead))]
    now = digest(np.ascontiguousarray(stored[tuple(slice(*span) for span in finish.box())]))
    return [] if now == told else [Difference(finish.stored.name, "", f"digest {told} (manifest)", now)]


def _blocks(finish: Finish, axis: int, entries: int) -> np.ndarray:
    """The block that each entry of an axis belongs to."""
    params = finish.scale.params
    block, grain = params["blocks"][axis], params["grains"][axis]
    elements = np.arange(entries) * (grain or block) + (finish.offset if axis == finish.part_axis else 0)
    if "row_starts" in params and axis == len(params["weight_shape"]) - 2:
        starts = np.array(params["row_starts"][1:])
        return (np.arange(entries)[:, None] + (elements[0] if entries else 0) >= starts).sum(axis=1)
    return elements // block if block else np.zeros(entries, int)
