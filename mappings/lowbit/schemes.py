"""Quantisation schemes: how codes and scales lie in a checkpoint. Geometry only; the numbers are in transforms.

Adding a scheme: a :class:`~.scheme.Scheme` in :data:`SCHEMES` (often a new name for an existing class), and a
recogniser (``find_*.py``) that turns stored tensors into a logical tensor of that scheme.
"""

from tensorferry.mappings.lowbit.bitsandbytes import Flat4Bit
from tensorferry.mappings.lowbit.merged import Merged, factor_bytes
from tensorferry.mappings.lowbit.packed_integers import Awq, Gptq, PackQuantized
from tensorferry.mappings.lowbit.scaled_codes import Scale, Scaled, expand
from tensorferry.mappings.lowbit.scheme import Box, CarryPlan, Registry, Scheme
from tensorferry.mappings.lowbit.tensors import LogicalTensor

__all__ = [
    "SCHEMES", "Box", "CarryPlan", "Scheme", "expand", "factor_bytes", "is_low_bit", "is_merged", "merged_base",
    "scheme_of",
]  # fmt: skip

SCHEMES = Registry()
SCHEMES.add(
    *(Scaled(f"fp8-{kind}", carried=True) for kind in ("tensor", "channel", "group", "block", "expert", "parts")),
    Scaled("mxfp8", carried=True),
    Scaled("mxfp4"),
    Scaled("mxfp4-blocks"),
    Scaled("nvfp4"),
    Scaled("int8"),
    Scaled("bnb-int8", rule="nonnegative"),
    Scale(),
    PackQuantized(),
    Gptq(),
    Awq(),
    Flat4Bit("bnb-nf4"),
    Flat4Bit("bnb-fp4"),
)
_MERGED = Merged(registry=SCHEMES)
SCHEMES.add(_MERGED)


def scheme_of(logical: LogicalTensor) -> Scheme | None:
    """The scheme of a logical tensor; None for a plain one, whose values are read as stored."""
    return None if logical.scheme == "plain" else SCHEMES[logical.scheme]


def is_merged(logical: LogicalTensor) -> bool:
    """Whether a low-rank adapter is merged into a tensor."""
    return logical.scheme == _MERGED.name


def merged_base(logical: LogicalTensor) -> LogicalTensor:
    """A tensor without the adapter that is merged into it."""
    return _MERGED.base(logical) if is_merged(logical) else logical


def is_low_bit(logical: LogicalTensor) -> bool:
    """Whether a tensor's values are stored as codes of few bits."""
    return merged_base(logical).scheme != "plain"
