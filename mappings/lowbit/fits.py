"""Where a scale's entries lie on a weight: by the config's block, or by the shape alone when it says so."""

from dataclasses import dataclass
from functools import lru_cache

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """One way a scale's shape fits a weight's shape.

    Attributes:
      kind: ``tensor``, ``channel``, ``group``, ``block`` or ``expert`` (one scale per entry of axis 0).
      blocks: block length per axis of the weight, 0 when one scale serves the whole axis.
      scale_axes: the axis that each dim of the scale follows, -1 for a dim of one entry that follows none.
    """

    kind: str
    blocks: Shape
    scale_axes: Shape


def grid_shape(shape: Shape, block: Shape) -> Shape:
    """Blocks per axis of a weight: the last axes cut into ``block``, a short last block counted, the others kept.

    >>> grid_shape((576, 7168), (128, 128)), grid_shape((4, 9, 13), (4, 5))
    ((5, 56), (4, 3, 3))
    """
    leading = len(shape) - len(block)
    return (*shape[:leading], *(-(-n // b) for n, b in zip(shape[leading:], block, strict=True)))


@lru_cache(maxsize=4096)
def fit_blocks(shape: Shape, scale_shape: Shape, block: Shape) -> Fit | None:
    """The fit of a known block size; None when the grid is not ``ceil(shape / block)``."""
    if len(shape) < len(block):
        return None
    axes = tuple(range(len(shape)))
    if len(shape) == 2 and len(scale_shape) == 4 and scale_shape[1::2] == (1, 1):  # [rows, 1, columns, 1]
        scale_shape, axes = scale_shape[::2], (0, -1, 1, -1)
    if scale_shape != grid_shape(shape, block):
        return None
    kind = "group" if block[0] == 1 and len(block) == 2 else "block"
    return Fit(kind, (1,) * (len(shape) - len(block)) + block, axes)


@lru_cache(maxsize=4096)
def fit_broadcast(shape: Shape, scale_shape: Shape) -> tuple[Fit, ...]:
    """Every fit in which an axis of the weight has one scale or one per element; more than one is ambiguous."""
    rank = len(shape)
    if all(n == 1 for n in scale_shape) and len(scale_shape) <= max(rank, 1):
        return (Fit("tensor", (0,) * rank, (-1,) * len(scale_shape)),)
    if len(scale_shape) == rank and rank:
        return _same_rank(shape, scale_shape)
    if len(scale_shape) == 1 and rank >= 2 and scale_shape[0] == shape[0]:
        return (Fit("channel" if rank == 2 else "expert", (1,) + (0,) * (rank - 1), (0,)),)
    if len(scale_shape) == 2 and rank == 3 and scale_shape[0] == shape[0]:
        return tuple(
            Fit("channel", (1, *(int(a == axis) for a in (1, 2))), (0, axis))
            for axis in (1, 2)
            if shape[axis] == scale_shape[1]
        )
    return ()


def _same_rank(shape: Shape, scale_shape: Shape) -> tuple[Fit, ...]:
    if any(s not in (1, n) for s, n in zip(scale_shape, shape, strict=True)):
        return ()
    blocks = tuple(int(s == n and n > 1) for s, n in zip(scale_shape, shape, strict=True))
    axes = tuple(axis if block else -1 for axis, block in enumerate(blocks))
    leading_only = len(shape) == 3 and blocks[0] and not any(blocks[1:])
    return (Fit("expert" if leading_only else "channel", blocks, axes),)


def part_rows(name: str, rows: int, parts: int, config: dict) -> list[int] | None:
    """Where the parts of a fused row axis begin (and, last, end); None when the widths cannot be known.

    Fused query/key/value rows are told by the head counts of the config; two parts (gate and up, key and
    value) are halves.
    """
    if parts == 2 and rows % 2 == 0:
        return [0, rows // 2, rows]
    text = config.get("text_config") or config
    heads, kv_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if parts != 3 or not heads:
        return None
    kv_heads = kv_heads or heads
    head_dim = text.get("head_dim") or rows // (heads + 2 * kv_heads)
    edges = [0, heads * head_dim, (heads + kv_heads) * head_dim, (heads + 2 * kv_heads) * head_dim]
    return edges if edges[-1] == rows and any(k in name.lower() for k in ("qkv", "query_key_value")) else None
