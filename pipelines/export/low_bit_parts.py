"""One part of a tensor that leaves as FP8: the source's codes where the weight is unchanged, new ones elsewhere."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from tensorferry.mappings.export.low_bit_exports import LowBit
from tensorferry.mappings.lowbit.schemes import scheme_of
from tensorferry.mappings.lowbit.tensors import LogicalTensor
from tensorferry.mappings.rules.geometry import Box
from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.regions.boxes import Scratch, read_box
from tensorferry.pipelines.regions.decode_region import decode_region
from tensorferry.pipelines.storage.byte_source import ByteSource
from tensorferry.transforms.ops import Op, apply_elementwise
from tensorferry.transforms.requantise import block_counts, blockwise, choose_scales, encode, spread, stored_scales


def low_bit_part(
    raw: np.ndarray, box: Box, low_bit: LowBit, ops: tuple[dict[str, Any], ...], source: ByteSource
) -> tuple[np.ndarray, np.ndarray, int]:
    """Codes and scales of one part.

    Args:
      raw: the array's elements as stored in MaxText's layout, moved to the tensor's axes, no arithmetic done.
      box: where the part lies in the tensor; borders of blocks.
      low_bit: the tensor in the FP8 checkpoint.
      ops: elementwise ops from the array to the tensor.
      source: the FP8 checkpoint.

    Returns:
      Codes, scales in their stored shape, and how many blocks changed.

    Raises:
      FerryError: a changed weight is not finite.
    """
    stored = _stored(low_bit.tensor, box, source)
    changed = blockwise(~_unchanged(raw, low_bit, box, stored), low_bit.blocks, np.logical_or)
    count = int(np.count_nonzero(changed))
    if not count:
        return stored["values"], stored["scale"], 0
    values = apply_elementwise(raw, [Op.from_json(op) for op in ops], "float32")
    codes, scales = requantised(values, low_bit)
    mask = spread(changed, raw.shape, low_bit.blocks)
    if not np.isfinite(values[mask]).all():
        fix = "The training diverged; a scale cannot hold it."
        raise FerryError(str(Problem(low_bit.tensor.name, "finite weights to requantise", "NaN or infinity", fix)))
    changed = changed.reshape(stored["scale"].shape)
    return np.where(mask, codes, stored["values"]), np.where(changed, scales, stored["scale"]), count


def requantised(values: np.ndarray, low_bit: LowBit) -> tuple[np.ndarray, np.ndarray]:
    """New codes and scales for every block of a part."""
    code, encoding, scale = low_bit.codes.dtype, low_bit.tensor.params["encoding"], low_bit.scale
    finite = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    scales = choose_scales(finite, code, low_bit.blocks, encoding, scale.dtype)
    codes = encode(finite, spread(scales, values.shape, low_bit.blocks), code)
    counts = block_counts(values.shape, low_bit.blocks)
    axes = low_bit.tensor.params["scale_axes"]
    shape = tuple(counts[axis] if axis >= 0 else 1 for axis in axes)
    return codes, stored_scales(scales, encoding, scale.dtype).reshape(shape)


def _unchanged(raw: np.ndarray, low_bit: LowBit, box: Box, stored: Mapping[str, np.ndarray]) -> np.ndarray:
    """Where the array holds what a conversion of the FP8 checkpoint gives, bit for bit.

    Training keeps float32 copies of weights that began in bfloat16: those count as unchanged too.
    """
    ops = [Op.from_json(op) for op in low_bit.forward]
    decoded = "bfloat16" if raw.dtype == ml_dtypes.bfloat16 and not ops else "float32"
    values = decode_region(low_bit.tensor, box, stored, decoded)
    same = _same_bits(apply_elementwise(values, ops, raw.dtype), raw)
    if raw.dtype == np.float32:
        through = apply_elementwise(values, ops, "bfloat16").astype(np.float32)
        same |= _same_bits(through, raw)
    return same


def _same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    bits = np.dtype(f"u{a.itemsize}")
    return np.ascontiguousarray(a).view(bits) == np.ascontiguousarray(b).view(bits)


def _stored(tensor: LogicalTensor, box: Box, source: ByteSource) -> dict[str, np.ndarray]:
    scheme = scheme_of(tensor)
    assert scheme is not None
    boxes = scheme.stored_box(tensor, box)
    return {role: read_box(source, tensor.stored[role], stored, Scratch()) for role, stored in boxes.items()}
