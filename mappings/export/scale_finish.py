"""The last step of a scale on its way home: from the entries that an array has to those that a checkpoint stores."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tensorferry.mappings.export.low_bit_exports import logical_tensor, stored_tensor
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.rules.geometry import Box

# Beside a scale as it was assembled: the entries that are kept, what they stand for, and where the two differ.
COPIES = 4


@dataclass(frozen=True)
class Finish:
    """How one scale is finished.

    Attributes:
      scale: the scale in entries as the array has them (scheme ``scale``); its role ``scale`` is what is stored.
      factors: constant factors that are folded into the array's scale.
      source: where the scale of the FP8 checkpoint lies, to tell apart two that a factor makes one; None when it is
        not at hand or no factor is folded.
      part_axis: the axis along which it is the scale of a part of the weight; -1 for a whole weight.
      offset: where that part begins, in elements of the weight.
    """

    scale: LogicalTensor
    factors: tuple[float, ...] = ()
    source: StoredTensor | None = None
    part_axis: int = -1
    offset: int = 0

    @property
    def stored(self) -> StoredTensor:
        return self.scale.stored["scale"]

    @property
    def encoding(self) -> str:
        """How the stored scale's elements are numbers."""
        return self.scale.params["encoding"]

    @property
    def spec(self) -> ArraySpec:
        """The tensor that is written, in one chunk."""
        stored = self.stored
        chunk = tuple(max(1, length) for length in stored.shape)
        return ArraySpec((stored.name,), stored.dtype, stored.shape, chunk, chunk)

    def blocks(self, axis: int) -> list[int]:
        """The block of the weight that each entry of an axis belongs to."""
        params, entries = self.scale.params, self.scale.shape[axis]
        block = params["blocks"][axis]
        offset = self.offset if axis == self.part_axis else 0
        if "row_starts" in params and axis == len(params["weight_shape"]) - 2:
            return [bisect_right(params["row_starts"], offset + entry) - 1 for entry in range(entries)]
        grain = params["grains"][axis] or block
        return [(offset + entry * grain) // block if block else 0 for entry in range(entries)]

    def kept(self, axis: int) -> list[int]:
        """The first entry of every block: those that are stored."""
        blocks = self.blocks(axis)
        return [entry for entry, block in enumerate(blocks) if entry == 0 or blocks[entry - 1] != block]

    def box(self) -> Box:
        """The region of the stored scale that the kept entries are."""
        spans = [(blocks[0], blocks[-1] + 1) for blocks in map(self.blocks, range(len(self.scale.shape)))]
        return tuple(spans[axis] if axis >= 0 else (0, 1) for axis in self.scale.params["scale_axes"])

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``from_json`` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Finish":
        source = stored_tensor(data["source"]) if data["source"] else None
        scale, factors = logical_tensor(data["scale"]), tuple(data["factors"])
        return cls(scale, factors, source, data["part_axis"], data["offset"])
