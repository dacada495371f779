"""A weight with a low-rank adapter in it: W + scale B A, where W may be of any scheme.

``params``:

- ``base``: scheme of W, ``plain`` or another of the registry; ``base_params``: that scheme's;
- ``scale``, ``rank``: of the product;
- ``transposed``: the weight is ``[in, out]``, as an embedding is for PEFT;
- ``experts``: how many share the factors (1: none do); ``expert``: which of them the weight is, -1 when its first
  axis is that of the experts;
- ``row``: where the weight's rows begin among those of the product.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from tensorferry.mappings.lowbit.scheme import Box, Registry, Scheme
from tensorferry.mappings.lowbit.tensors import LogicalTensor
from tensorferry.transforms.dtypes import stored_bytes

FACTORS = ("lora_a", "lora_b")
# Two limbs in float64, and an eighth of one again where few of them are low.
_WIDE_BYTES = 17
# Scratch of a product: five arrays in float64 of at most so many elements.
_SCRATCH_BYTES, _SCRATCH_ITEMS = 40, 1 << 17
# The geometry of a weight that is read as stored.
_PLAIN = Scheme("plain", "")


@dataclass(frozen=True)
class Merged(Scheme):
    """A weight of another scheme with a product added in float32.

    Attributes:
      registry: where the weight's own scheme is found.
    """

    name: str = "lora"
    kernel: str = "merged"
    registry: Registry = field(default_factory=Registry, repr=False)

    def base(self, logical: LogicalTensor) -> LogicalTensor:
        """The weight without its adapter."""
        stored = {role: one for role, one in logical.stored.items() if role not in FACTORS}
        params = logical.params
        return LogicalTensor(logical.name, logical.shape, logical.dtype, stored, params["base"], params["base_params"])

    def stored_box(self, logical: LogicalTensor, box: Box) -> dict[str, Box]:
        base, scheme = self._base(logical)
        own = {"values": box} if scheme is _PLAIN else scheme.stored_box(base, box)
        return {**own, **factor_boxes(logical, box)}

    def kernel_args(self, logical: LogicalTensor, box: Box) -> dict[str, Any]:
        base, scheme = self._base(logical)
        params = logical.params
        base_args = {} if scheme is _PLAIN else scheme.kernel_args(base, box)
        first, _ = _experts(logical, box)
        return {
            **({"order": base_args["order"]} if "order" in base_args else {}),
            "base": scheme.kernel,
            "base_args": base_args,
            "scale": params["scale"],
            "rank": params["rank"],
            "transposed": params["transposed"],
            "experts": params["experts"],
            "first_expert": first,
        }

    def granularity(self, logical: LogicalTensor) -> tuple[int, ...]:
        base, scheme = self._base(logical)
        return scheme.granularity(base)

    def shared_runs(self, logical: LogicalTensor) -> tuple[int, ...]:
        base, scheme = self._base(logical)
        return scheme.shared_runs(base)

    def memory_order(self, logical: LogicalTensor) -> tuple[int, ...]:
        base, scheme = self._base(logical)
        return scheme.memory_order(base)

    def stored_order(self, logical: LogicalTensor) -> tuple[int, ...]:
        base, scheme = self._base(logical)
        return scheme.stored_order(base)

    def scale_rules(self, logical: LogicalTensor) -> dict[str, tuple[str, str]]:
        base, scheme = self._base(logical)
        return scheme.scale_rules(base)

    def describe(self, logical: LogicalTensor) -> str:
        base, scheme = self._base(logical)
        into = "" if scheme is _PLAIN else f" into {scheme.describe(base)}"
        return f"lora r={logical.params['rank']} x {logical.params['scale']:.6g}{into}"

    def _base(self, logical: LogicalTensor) -> tuple[LogicalTensor, Scheme]:
        base = self.base(logical)
        return base, _PLAIN if base.scheme == "plain" else self.registry[base.scheme]


def _experts(logical: LogicalTensor, box: Box) -> tuple[int, int]:
    """First and last but one expert of a region."""
    own = logical.params["expert"]
    return (own, own + 1) if own >= 0 else box[0]


def factor_boxes(logical: LogicalTensor, box: Box) -> dict[str, Box]:
    """The regions of A and B that a region of the merged weight needs.

    B lies ``[out, (rank expert)]``, so that of one expert is read with those of all.
    """
    params, rank = logical.params, logical.params["rank"]
    (low, high), cols = box[-2:]
    rows = low + params["row"], high + params["row"]
    first, last = _experts(logical, box)
    into, out = (rows, cols) if params["transposed"] else (cols, rows)
    return {
        "lora_a": ((first * rank, last * rank), into),
        "lora_b": (out, (0, logical.stored["lora_b"].shape[1])),
    }


def factor_bytes(logical: LogicalTensor, box: Box) -> tuple[int, int]:
    """Bytes of A and B read for a region of a merged weight, and bytes held of them, as limbs, and of their product."""
    boxes = factor_boxes(logical, box)
    shapes = {role: tuple(stop - start for start, stop in one) for role, one in boxes.items()}
    read = sum(stored_bytes(logical.stored[role].dtype, shape) for role, shape in shapes.items())
    wide = logical.params["rank"] * (shapes["lora_a"][1] + shapes["lora_b"][0])
    elements = math.prod(stop - start for start, stop in box)
    return read, read + _WIDE_BYTES * wide + _SCRATCH_BYTES * min(elements, _SCRATCH_ITEMS)
