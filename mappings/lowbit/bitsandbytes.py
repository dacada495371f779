"""bitsandbytes 4-bit (nf4, fp4): one flat run of nibbles. Its int8 is one of `scaled_codes`.

``params``: ``block`` (values per absmax), ``nested_block`` (absmax values per nested absmax, 0 without nesting),
``absmax_plus`` (added to a nested absmax).
"""

import math
from dataclasses import dataclass
from typing import Any

from tensorferry.mappings.lowbit.scheme import Box, Scheme, outward, whole
from tensorferry.mappings.lowbit.tensors import LogicalTensor


@dataclass(frozen=True)
class Flat4Bit(Scheme):
    """Nibbles of the flattened tensor, high first; whole rows are read, then cut."""

    kernel: str = "bnb4"

    def stored_box(self, logical: LogicalTensor, box: Box) -> dict[str, Box]:
        params, stored = logical.params, logical.stored
        flat = self._flat(logical, box)
        absmax = outward(flat, params["block"])
        boxes: dict[str, Box] = {
            "values": (outward(flat, 2), *whole(stored["values"].shape[1:])),
            "absmax": (absmax,),
            "code": whole(stored["code"].shape),
        }
        if params["nested_block"]:
            boxes["nested_absmax"] = (outward(absmax, params["nested_block"]),)
            boxes["nested_code"] = whole(stored["nested_code"].shape)
        return boxes

    def kernel_args(self, logical: LogicalTensor, box: Box) -> dict[str, Any]:
        params = logical.params
        flat = self._flat(logical, box)
        first_absmax = flat[0] // params["block"]
        nested = params["nested_block"]
        return {
            "row_shape": list(logical.shape[1:]),
            "window": [list(span) for span in box[1:]],
            "lead": flat[0] % 2,
            "block": params["block"],
            "block_offset": flat[0] % params["block"],
            "nested_block": nested,
            "nested_offset": first_absmax % nested if nested else 0,
            "absmax_plus": params["absmax_plus"],
        }

    def granularity(self, logical: LogicalTensor) -> tuple[int, ...]:
        """Whole rows: every axis but the first is read entire."""
        return 1, *logical.shape[1:]

    def scale_rules(self, logical: LogicalTensor) -> dict[str, tuple[str, str]]:
        if logical.params["nested_block"]:
            return {"nested_absmax": ("float", "nonnegative")}
        return {"absmax": ("float", "nonnegative")}

    def describe(self, logical: LogicalTensor) -> str:
        absmax = logical.stored["absmax"]
        nested = ", nested" if logical.params["nested_block"] else ""
        return f"{self.name} block {logical.params['block']}{nested}, scale {absmax.name} {absmax.dtype}"

    def _flat(self, logical: LogicalTensor, box: Box) -> tuple[int, int]:
        row = math.prod(logical.shape[1:])
        return box[0][0] * row, box[0][1] * row
