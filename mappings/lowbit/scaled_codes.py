"""Codes with a scale per block of a grid: FP8 of every granularity, MXFP8, MXFP4, NVFP4, int8.

``params`` (all axes in stored order, which differs from the logical order only for gpt-oss):

- ``code``: what a byte holds (``float8_e4m3fn``, ``fp4``, ``int8``, …);
- ``pack``: values per stored element of the last axis (2 for nibbles in bytes);
- ``blocks``: block length per axis, 0 when one scale serves the whole axis;
- ``scale_axes``: the axis that each dim of the scale follows, -1 for a dim of one entry that follows none;
- ``encoding``: ``float``, ``e8m0`` or the one-byte float that the scale is stored in;
- ``order``: stored axis k is logical axis ``order[k]``, when they differ;
- ``row_starts``: where each part of a fused row axis begins, when each part has a scale of its own;
- ``global``: ``multiply`` or ``divide``: what the second scale does to the first;
- ``divisor``: a constant divisor (bitsandbytes int8).
"""

from dataclasses import dataclass
from typing import Any

from tensorferry.mappings.lowbit.scheme import Box, CarryPlan, Scheme, outward
from tensorferry.mappings.lowbit.tensors import LogicalTensor


@dataclass(frozen=True)
class Scaled(Scheme):
    """A tensor of codes and one scale per block.

    Attributes:
      carried: whether the codes may be kept as they are beside their scale.
      rule: what the scale's values must be.
    """

    kernel: str = "scaled"
    carried: bool = False
    rule: str = "positive"

    def stored_box(self, logical: LogicalTensor, box: Box) -> dict[str, Box]:
        params = logical.params
        stored = _in_stored_order(params, box)
        boxes = {"values": _values_box(params, logical.stored["values"].shape, stored)}
        boxes["scale"] = scale_box(params, logical.stored["scale"].shape, stored)
        if "zero" in logical.stored:
            boxes["zero"] = boxes["scale"]
        if "global" in logical.stored:
            boxes["global"] = _global_box(logical.stored["global"].shape, stored)
        return boxes

    def kernel_args(self, logical: LogicalTensor, box: Box) -> dict[str, Any]:
        params = logical.params
        stored = _in_stored_order(params, box)
        args = {
            "code": params["code"],
            "blocks": list(params["blocks"]),
            "offsets": block_offsets(params["blocks"], stored),
            "encoding": params["encoding"],
            "lead": stored[-1][0] % _last_unit(params, logical.stored["values"].shape) if stored else 0,
        }
        if "order" in params:
            args["order"] = list(params["order"])
        if "row_starts" in params:
            args["row_edges"] = row_edges(params["row_starts"], stored[-2])
        if "global" in params:
            args["global_scale"] = params["global"]
        if "divisor" in params:
            args["divisor"] = params["divisor"]
        return args

    def granularity(self, logical: LogicalTensor) -> tuple[int, ...]:
        params = logical.params
        stored = [1] * len(logical.shape)
        if stored:
            stored[-1] = _last_unit(params, logical.stored["values"].shape)
            if params["blocks"][-1] and params.get("pack", 1) > 1:
                stored[-1] = params["blocks"][-1]
        return _in_logical_order(params, tuple(stored))

    def memory_order(self, logical: LogicalTensor) -> tuple[int, ...]:
        return tuple(logical.params.get("order") or range(len(logical.shape)))

    def scale_axes(self, logical: LogicalTensor) -> tuple[int | None, ...] | None:
        if "row_starts" in logical.params:
            return None
        blocks = tuple(block or None for block in logical.params["blocks"])
        return _in_logical_order(logical.params, blocks)

    def carry(self, logical: LogicalTensor) -> CarryPlan | None:
        if not self.carried or "zero" in logical.stored:
            return None
        values = logical.stored["values"]
        codes = LogicalTensor(logical.name, values.shape, values.dtype, {"values": values})
        scale = scale_tensor(logical)
        blocks = list(logical.params["blocks"])
        if "row_starts" in logical.params:
            blocks[-2] = 1
        return CarryPlan(codes, scale, tuple(block or None for block in blocks))

    def scale_rules(self, logical: LogicalTensor) -> dict[str, tuple[str, str]]:
        rules = {"scale": (logical.params["encoding"], self.rule)}
        if "global" in logical.stored:
            rules["global"] = ("float", "positive")
        return rules

    def describe(self, logical: LogicalTensor) -> str:
        scale = logical.stored["scale"]
        blocks = logical.params["blocks"]
        grid = "" if not any(b > 1 for b in blocks) else " " + "x".join(str(b or "all") for b in blocks[-2:])
        return f"{self.name}{grid}, scale {scale.name} {scale.dtype} {list(scale.shape)}"


@dataclass(frozen=True)
class Scale(Scheme):
    """The scale of a carried tensor as a tensor of its own: float32, same rank as the codes.

    ``params`` are those of :class:`Scaled` plus ``weight_shape`` and, per axis, ``grains``: elements of the weight per
    entry where that is not a block but an even part of one (or anything, where one entry serves the axis); else 0.
    """

    name: str = "scale"
    kernel: str = "scale"

    def stored_box(self, logical: LogicalTensor, box: Box) -> dict[str, Box]:
        params = logical.params
        return {"scale": scale_box(params, logical.stored["scale"].shape, _in_elements(params, box))}

    def kernel_args(self, logical: LogicalTensor, box: Box) -> dict[str, Any]:
        params = logical.params
        elements = _in_elements(params, box)
        args = {
            "encoding": params["encoding"],
            "blocks": list(params["blocks"]),
            "offsets": block_offsets(params["blocks"], elements),
            "grains": [0 if _axis_of_parts(params, a) else grain for a, grain in enumerate(params["grains"])],
        }
        if "row_starts" in params:
            args["row_edges"] = row_edges(params["row_starts"], box[-2])
        return args

    def scale_rules(self, logical: LogicalTensor) -> dict[str, tuple[str, str]]:
        return {"scale": (logical.params["encoding"], "positive")}

    def describe(self, logical: LogicalTensor) -> str:
        expanded = [a for a, grain in enumerate(logical.params["grains"]) if grain]
        along = f", expanded along {'axis' if len(expanded) == 1 else 'axes'} " if expanded else ""
        along += " and ".join(map(str, expanded))
        return f"scale {logical.stored['scale'].name} as float32 {list(logical.shape)}{along}"


def scale_tensor(logical: LogicalTensor) -> LogicalTensor:
    """The scale of a tensor of the :class:`Scaled` schemes, one entry per block and axis, not expanded.

    Per-part scales of a fused matrix follow no blocks; they come expanded along the row axis.
    """
    params, shape = logical.params, logical.stored["values"].shape
    kept = {key: params[key] for key in ("blocks", "scale_axes", "encoding", "row_starts") if key in params}
    kept["weight_shape"] = list(shape)
    grid = [-(-n // block) if block else 1 for n, block in zip(shape, params["blocks"], strict=True)]
    if "row_starts" in params:
        grid[-2] = shape[-2]
    plain = LogicalTensor(logical.name + "#scale", (), "float32", {"scale": logical.stored["scale"]}, "scale", kept)
    return expand(plain, tuple(grid))


def expand(scale: LogicalTensor, shape: tuple[int, ...]) -> LogicalTensor:
    """The same scale in another shape: per axis one entry per block, or per even part of a block.

    An axis that one entry serves whole may have any length.
    """
    params = dict(scale.params)
    axes = zip(shape, params["weight_shape"], params["blocks"], strict=True)
    params["grains"] = [_grain(n, length, block) for n, length, block in axes]
    return LogicalTensor(scale.name, shape, scale.dtype, scale.stored, scale.scheme, params)


def _grain(entries: int, length: int, block: int) -> int:
    """Elements of the weight per entry; 0 where entries are those that are stored."""
    return 0 if entries == (-(-length // block) if block else 1) else max(1, length // entries)


def scale_box(params: dict[str, Any], scale_shape: tuple[int, ...], box: Box) -> Box:
    """The region of the stored scale that a region of the weight (stored order, in elements) needs."""

    def span(dim: int, axis: int) -> tuple[int, int]:
        if "row_starts" in params and dim == len(scale_shape) - 1:
            return _parts_touched(params["row_starts"], box[-2])
        block = params["blocks"][axis] if axis >= 0 else 0
        return outward(box[axis], block) if block else (0, 1)

    return tuple(span(dim, axis) for dim, axis in enumerate(params["scale_axes"]))


def block_offsets(blocks: list[int], box: Box) -> list[int]:
    """How far into its first block a region starts, per axis."""
    return [start % block if block else 0 for block, (start, _) in zip(blocks, box, strict=True)]


def row_edges(starts: list[int], rows: tuple[int, int]) -> list[int]:
    """Where the parts touched by a row range start and end, counted from the range's first row.

    ``starts`` ends with the row count: three parts have four entries.
    """
    first, last = _parts_touched(starts, rows)
    edges = [min(max(edge, rows[0]), rows[1]) for edge in starts[first : last + 1]]
    return [edge - rows[0] for edge in edges]


def _parts_touched(starts: list[int], rows: tuple[int, int]) -> tuple[int, int]:
    touched = [k for k in range(len(starts) - 1) if starts[k] < rows[1] and starts[k + 1] > rows[0]]
    return (touched[0], touched[-1] + 1) if touched else (0, 0)


def _in_stored_order(params: dict[str, Any], box: Box) -> Box:
    order = params.get("order")
    return box if order is None else tuple(box[axis] for axis in order)


def _in_logical_order(params: dict[str, Any], stored: tuple) -> tuple:
    order = params.get("order")
    return stored if order is None else tuple(stored[order.index(axis)] for axis in range(len(stored)))


def _last_unit(params: dict[str, Any], values_shape: tuple[int, ...]) -> int:
    """Values per entry of the values' axis that holds the logical last axis (``[…, groups, bytes]``: a group)."""
    pack = params.get("pack", 1)
    return pack * values_shape[-1] if len(values_shape) > len(params["blocks"]) else pack


def _values_box(params: dict[str, Any], values_shape: tuple[int, ...], box: Box) -> Box:
    if not box:
        return ()
    last = outward(box[-1], _last_unit(params, values_shape))
    if len(values_shape) > len(box):
        return (*box[:-1], last, (0, values_shape[-1]))
    return (*box[:-1], last)


def _global_box(shape: tuple[int, ...], box: Box) -> Box:
    """One factor for all, or one per entry of axis 0 (experts)."""
    if not shape or shape[0] == 1:
        return tuple((0, n) for n in shape)
    return (box[0], *((0, n) for n in shape[1:]))


def _in_elements(params: dict[str, Any], box: Box) -> Box:
    """A region of a scale tensor in elements of the weight."""
    spans = zip(box, params["grains"], params["blocks"], params["weight_shape"], strict=True)
    return tuple(
        span if grain and not block else _of_blocks(span, grain or block, n) for span, grain, block, n in spans
    )


def _of_blocks(span: tuple[int, int], block: int, length: int) -> tuple[int, int]:
    return (span[0] * block, min(span[1] * block, length)) if block else (0, length)


def _axis_of_parts(params: dict[str, Any], axis: int) -> bool:
    return "row_starts" in params and axis == len(params["weight_shape"]) - 2
