"""What a scheme can say about a logical tensor: which stored regions it needs and how they are decoded."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorferry.mappings.lowbit.tensors import LogicalTensor
from tensorferry.mappings.rules.geometry import Box


@dataclass(frozen=True)
class CarryPlan:
    """The two tensors that keep a quantised tensor as it is: its codes and its scale.

    Both are logical tensors like any other: they have a name, a shape, boxes and a decoding.

    Attributes:
      codes: the values role as a plain tensor, bit for bit.
      scale: float32, same rank as the codes, one entry per block (scheme ``scale``); see ``expand``.
      blocks: block length per axis; None when one scale serves the whole axis.
    """

    codes: LogicalTensor
    scale: LogicalTensor
    blocks: tuple[int | None, ...]


@dataclass(frozen=True)
class Scheme:
    """How the elements of a logical tensor are stored. Frozen, without data; the registry holds one of each.

    Attributes:
      name: the registry's name.
      kernel: the name of the kernel in ``tensorferry.transforms.decode``.
    """

    name: str
    kernel: str

    def stored_box(self, logical: LogicalTensor, box: Box) -> dict[str, Box]:
        """The smallest region of each stored tensor that a region of the logical tensor needs.

        Args:
          logical: a tensor of this scheme.
          box: (start, stop) per logical axis, any alignment.

        Returns:
          Role to (start, stop) per axis of that stored tensor.
        """
        raise NotImplementedError

    def kernel_args(self, logical: LogicalTensor, box: Box) -> dict[str, Any]:
        """Plain values that the kernel needs beside the stored regions."""
        raise NotImplementedError

    def granularity(self, logical: LogicalTensor) -> tuple[int, ...]:
        """Multiples, per logical axis, at which a box should start so that hardly a byte is read twice.

        Any box is decoded correctly; one that starts elsewhere reads the word or group it starts in.
        """
        return (1,) * len(logical.shape)

    def shared_runs(self, logical: LogicalTensor) -> tuple[int, ...]:
        """Lengths, per logical axis, that share what is read beside the codes: cuts between them read nothing twice."""
        return tuple(block or 1 for block in self.scale_axes(logical) or (1,) * len(logical.shape))

    def memory_order(self, logical: LogicalTensor) -> tuple[int, ...]:
        """Logical axes in the order in which they are stored, slowest first.

        An output whose memory has this order is written fastest: for gpt-oss ``(0, 2, 1)``, a C-contiguous
        ``[experts, outputs, inputs]`` buffer seen through its transpose.
        """
        return tuple(range(len(logical.shape)))

    def stored_order(self, logical: LogicalTensor) -> tuple[int, ...]:
        """Logical axes in the order of their bytes in the file, slowest first: a box cut along the first is one run."""
        return self.memory_order(logical)

    def scale_axes(self, logical: LogicalTensor) -> tuple[int | None, ...] | None:
        """Block length of the scale per logical axis (None: one for the whole axis), or None without a grid."""
        return None

    def carry(self, logical: LogicalTensor) -> CarryPlan | None:
        """How to keep the codes instead of decoding them; None when this scheme cannot."""
        return None

    def scale_rules(self, logical: LogicalTensor) -> dict[str, tuple[str, str]]:
        """Role to (encoding, rule) of each stored tensor whose values must make sense as scales.

        The rule is one of ``tensorferry.transforms.decode.check_scale``; the values are checked as they are read.
        """
        return {}

    def describe(self, logical: LogicalTensor) -> str:
        """A few words for the plan: the scheme, its geometry and the scale it uses."""
        return self.name


@dataclass(frozen=True)
class Registry:
    """Schemes by name."""

    schemes: dict[str, Scheme] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Scheme:
        return self.schemes[name]

    def add(self, *schemes: Scheme) -> None:
        self.schemes.update({scheme.name: scheme for scheme in schemes})


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, n) for n in shape)


def outward(span: tuple[int, int], unit: int) -> tuple[int, int]:
    """The units that a span of elements touches.

    >>> outward((5, 17), 8)
    (0, 3)
    """
    return span[0] // unit, -(-span[1] // unit)
