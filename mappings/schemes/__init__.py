"""Quantisation schemes: how codes and scales lie in a checkpoint. Geometry only; the numbers are in transforms.

Adding a scheme: a :class:`~mappings.schemes.base.Scheme` in :data:`SCHEMES` (often a new name for an existing
class), and a recogniser (``find_*.py``) that turns stored tensors into a logical tensor of that scheme.
"""

from mappings.schemes.base import Box, CarryPlan, Registry, Scheme
from mappings.schemes.bitsandbytes import Flat4Bit
from mappings.schemes.integers import Awq, Gptq, PackQuantized
from mappings.schemes.scaled import Scale, Scaled, expand
from mappings.tensors import LogicalTensor

__all__ = ["SCHEMES", "Box", "CarryPlan", "Scheme", "expand", "scheme_of"]

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


def scheme_of(logical: LogicalTensor) -> Scheme | None:
    """The scheme of a logical tensor; None for a plain one, whose values are read as stored."""
    return None if logical.scheme == "plain" else SCHEMES[logical.scheme]
