"""Tensors that leave as FP8: the codes and scales of an FP8 checkpoint where nothing changed, new ones elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tensorferry.mappings.lowbit.scaled_codes import scale_box
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.words.problems import Problem

# Beside a part as it was read: the source's codes and ours, both decoded values, and the masks over them.
BYTES_PER_ELEMENT = 16


@dataclass(frozen=True)
class LowBit:
    """One tensor of the FP8 checkpoint.

    Attributes:
      tensor: how it is stored there.
      forward: elementwise ops from its values to the array in MaxText's layout, as JSON.
    """

    tensor: LogicalTensor
    forward: tuple[dict[str, Any], ...] = field(default=())

    @property
    def blocks(self) -> tuple[int, ...]:
        """Block length per axis; 0 when one scale serves the whole axis."""
        return tuple(self.tensor.params["blocks"])

    @property
    def codes(self) -> StoredTensor:
        return self.tensor.stored["values"]

    @property
    def scale(self) -> StoredTensor:
        return self.tensor.stored["scale"]

    def scale_box(self, box: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """The region of the scale that belongs to a region of the weight."""
        return scale_box(self.tensor.params, self.scale.shape, box)

    def specs(self, chunk: tuple[int, ...]) -> tuple[ArraySpec, ArraySpec]:
        """The two tensors that are written: codes cut as the weight is, scales cut with them."""
        codes, scale = self.codes, self.scale
        first = self.scale_box(tuple((0, length) for length in chunk))
        lengths = tuple(max(1, stop) for _, stop in first)
        return (
            ArraySpec((codes.name,), codes.dtype, codes.shape, chunk, chunk),
            ArraySpec((scale.name,), scale.dtype, scale.shape, lengths, lengths),
        )

    def scale_grid(self, grid: Sequence[int]) -> tuple[int, ...]:
        """The index of the scale's chunk that goes with a chunk of the weight."""
        return tuple(grid[axis] if axis >= 0 else 0 for axis in self.tensor.params["scale_axes"])

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``from_json`` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "LowBit":
        return cls(logical_tensor(data["tensor"]), tuple(data["forward"]))


def logical_tensor(data: Mapping[str, Any]) -> LogicalTensor:
    """A logical tensor from its fields as JSON has them."""
    stored = {role: stored_tensor(one) for role, one in data["stored"].items()}
    return LogicalTensor(**{**data, "shape": tuple(data["shape"]), "stored": stored})


def stored_tensor(data: Mapping[str, Any]) -> StoredTensor:
    """A stored tensor from its fields as JSON has them."""
    return StoredTensor(**{**data, "shape": tuple(data["shape"])})


def refusal(tensor: LogicalTensor) -> Problem | None:
    """Why a tensor's scheme cannot be written again; None when it can."""
    params = tensor.params
    axes = [axis for axis in params.get("scale_axes", ()) if axis >= 0]
    plain = not {"order", "row_starts", "global", "divisor"} & params.keys() and tensor.stored.keys() == {
        "values",
        "scale",
    }
    if plain and axes == sorted(axes) and str(params.get("code", "")).startswith("float8"):
        return None
    return Problem(
        tensor.name,
        "FP8 codes with a scale per tensor, channel or block (--fp8-from)",
        f"the scheme {tensor.scheme}",
        "Leave --fp8-from out and export with --dtype bfloat16.",
        file=tensor.stored["values"].file,
    )
