"""Ops: what happens to values on their way. Each is frozen, invertible, and says its output without data.

Arithmetic is float32 from start to end of a chain and rounded once, at the end, to the target's dtype; a
``RoundTo`` inside a chain rounds there on purpose. ``Pad`` and ``Crop`` say shapes only: a block is placed in a
larger, zeroed target (or read from a smaller region), so padding stays zero whatever the other ops do.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np
from tensorferry.transforms.cast import as_dtype, cast, cast_into, is_float
from tensorferry.transforms.dtypes import numpy_dtype
from tensorferry.transforms.views import blocks


@dataclass(frozen=True)
class Spec:
    """An array without its data.

    Attributes:
      dtype: a name of the dtype table.
      dims: (axis name, length) in axis order.
    """

    dtype: str
    dims: tuple[tuple[str, int], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The axis lengths."""
        return tuple(size for _, size in self.dims)

    def size_of(self, dim: str) -> int:
        """The length of an axis.

        Raises:
          ValueError: there is no such axis.
        """
        if dim not in dict(self.dims):
            known = ", ".join(f"{name}={size}" for name, size in self.dims)
            raise ValueError(f"no axis {dim!r} in [{known}]")
        return dict(self.dims)[dim]

    def resized(self, dim: str, to: int) -> "Spec":
        """The same array with one axis of another length."""
        return replace(self, dims=tuple((name, to if name == dim else size) for name, size in self.dims))


class Op:
    """The contract of an op; subclasses are frozen dataclasses of plain values.

    Attributes:
      name: what the op is called in JSON.
      elementwise: whether ``apply`` changes values; shape ops leave blocks alone.
    """

    name: ClassVar[str]
    elementwise: ClassVar[bool] = True

    def output(self, spec: Spec) -> Spec:
        """What comes out when ``spec`` goes in.

        Raises:
          ValueError: the op cannot be applied to such an array.
        """
        raise NotImplementedError

    def inverse(self, spec: Spec) -> "Op":
        """The op that leads back to ``spec``, which this op was applied to."""
        raise NotImplementedError

    def apply(self, block: np.ndarray) -> np.ndarray:
        """The values of a block after the op; never changes ``block`` itself."""
        return block

    def describe(self) -> str:
        """A few words for the plan's table."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values, read back by ``Op.from_json``."""
        return {"op": self.name, **asdict(self)}  # pyright: ignore[reportArgumentType]

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Op":
        """The op that ``to_json`` wrote.

        Raises:
          ValueError: an unknown op name.
        """
        fields = dict(value)
        kinds = {kind.name: kind for kind in (Scale, Shift, RoundTo, Whole, Pad, Crop)}
        kind = kinds.get(fields.pop("op", ""))
        if kind is None:
            raise ValueError(f"unknown op {value.get('op')!r}; known: {', '.join(sorted(kinds))}")
        return kind(**fields)


@dataclass(frozen=True)
class Scale(Op):
    """Multiplies by ``float32(factor)`` in float32."""

    factor: float
    name: ClassVar[str] = "scale"

    def __post_init__(self) -> None:
        with np.errstate(all="ignore"):
            factor = np.float32(self.factor)
        if not np.isfinite(factor) or factor == 0:
            raise ValueError(f"a scale must be finite and not zero in float32; found {self.factor}")

    def output(self, spec: Spec) -> Spec:
        return _float_only(self, spec)

    def inverse(self, spec: Spec) -> "Scale":
        """Exact for powers of two within the range of the dtype; else within rounding."""
        return Scale(1.0 / self.factor)

    def apply(self, block: np.ndarray) -> np.ndarray:
        return np.multiply(cast(block, "float32"), np.float32(self.factor))

    def describe(self) -> str:
        return f"scale {self.factor:.3g}"


@dataclass(frozen=True)
class Shift(Op):
    """Adds ``float32(by)`` in float32."""

    by: float
    name: ClassVar[str] = "shift"

    def output(self, spec: Spec) -> Spec:
        return _float_only(self, spec)

    def inverse(self, spec: Spec) -> "Shift":
        return Shift(-self.by)

    def apply(self, block: np.ndarray) -> np.ndarray:
        return np.add(cast(block, "float32"), np.float32(self.by))

    def describe(self) -> str:
        return f"shift {self.by:+.3g}"


@dataclass(frozen=True)
class RoundTo(Op):
    """Rounds to a dtype, to nearest, ties to even; its inverse is a cast back to what was there."""

    dtype: str
    name: ClassVar[str] = "round_to"

    def __post_init__(self) -> None:
        numpy_dtype(self.dtype)

    def output(self, spec: Spec) -> Spec:
        return replace(spec, dtype=self.dtype)

    def inverse(self, spec: Spec) -> "RoundTo":
        return RoundTo(spec.dtype)

    def apply(self, block: np.ndarray) -> np.ndarray:
        return cast(block, self.dtype)

    def describe(self) -> str:
        return f"round to {self.dtype}"


@dataclass(frozen=True)
class Whole(Op):
    """Takes floats that are whole numbers as integers: indices that a model keeps beside its weights."""

    name: ClassVar[str] = "whole"

    def output(self, spec: Spec) -> Spec:
        return replace(spec, dtype="int64")

    def inverse(self, spec: Spec) -> RoundTo:
        return RoundTo(spec.dtype)

    def apply(self, block: np.ndarray) -> np.ndarray:
        numbers = np.nan_to_num(block, nan=0.5, posinf=0.5, neginf=0.5).astype(np.float64)
        whole = np.rint(numbers)
        if not (whole == numbers).all():
            raise ValueError(f"expected whole numbers, found {block[whole != numbers].reshape(-1)[0]}")
        return whole.astype(np.int64)

    def describe(self) -> str:
        return "as whole numbers"


@dataclass(frozen=True)
class Pad(Op):
    """Makes an axis ``to`` long with zeros at its end."""

    dim: str
    to: int
    name: ClassVar[str] = "pad"
    elementwise: ClassVar[bool] = False

    def output(self, spec: Spec) -> Spec:
        size = spec.size_of(self.dim)
        if self.to < size:
            raise ValueError(f"cannot pad {self.dim}={size} to {self.to}: it is longer already")
        return spec.resized(self.dim, self.to)

    def inverse(self, spec: Spec) -> "Crop":
        return Crop(self.dim, spec.size_of(self.dim))

    def describe(self) -> str:
        return f"pad {self.dim} to {self.to}"


@dataclass(frozen=True)
class Crop(Op):
    """Keeps the first ``to`` of an axis: the inverse of ``Pad``."""

    dim: str
    to: int
    name: ClassVar[str] = "crop"
    elementwise: ClassVar[bool] = False

    def output(self, spec: Spec) -> Spec:
        size = spec.size_of(self.dim)
        if self.to > size:
            raise ValueError(f"cannot crop {self.dim}={size} to {self.to}: it is shorter already")
        return spec.resized(self.dim, self.to)

    def inverse(self, spec: Spec) -> Pad:
        return Pad(self.dim, spec.size_of(self.dim))

    def describe(self) -> str:
        return f"crop {self.dim} to {self.to}"


@dataclass(frozen=True)
class Ops:
    """A chain of ops, first applied first."""

    ops: tuple[Op, ...] = ()

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def output(self, spec: Spec) -> Spec:
        """What comes out of the whole chain."""
        for op in self.ops:
            spec = op.output(spec)
        return spec

    def inverse(self, spec: Spec) -> "Ops":
        """The chain that leads from ``output(spec)`` back to ``spec``."""
        undone: list[Op] = []
        for op in self.ops:
            undone.append(op.inverse(spec))
            spec = op.output(spec)
        return Ops(tuple(reversed(undone)))

    def describe(self) -> str:
        """A few words for the plan's table; empty for no ops."""
        return ", ".join(op.describe() for op in self.ops)

    def to_json(self) -> list[dict[str, Any]]:
        """A list of JSON values, read back by ``Ops.from_json``."""
        return [op.to_json() for op in self.ops]

    @staticmethod
    def from_json(value: Iterable[dict[str, Any]]) -> "Ops":
        """The chain that ``to_json`` wrote."""
        return Ops(tuple(Op.from_json(op) for op in value))


def apply_elementwise(block: np.ndarray, ops: Iterable[Op], out_dtype: str | np.dtype) -> np.ndarray:
    """The block after the elementwise ops of a chain, in ``out_dtype``; shape ops are left to the caller.

    Returns:
      A new array of the same shape; ``block`` itself, bit for bit, when no op changes values or dtype.
    """
    steps, dtype = _steps(ops), as_dtype(out_dtype)
    if all(isinstance(op, RoundTo) and as_dtype(op.dtype) == dtype for op in steps) and block.dtype == dtype:
        return block
    out = np.empty(block.shape, dtype)
    apply_elementwise_into(out, block, steps)
    return out


def apply_elementwise_into(out: np.ndarray, block: np.ndarray, ops: Iterable[Op]) -> None:
    """As ``apply_elementwise``, into ``out`` of the same shape, which may be ``block`` itself.

    Scratch of about 1 MiB, whatever the size of the block.

    Raises:
      ValueError: shapes differ.
    """
    if out.shape != block.shape:
        raise ValueError(f"cannot write shape {block.shape} into shape {out.shape}")
    steps = _steps(ops)
    if not steps:
        cast_into(out, block)
        return
    with np.errstate(all="ignore"):
        for target, values in blocks(out, block):
            for op in steps:
                values = op.apply(values)
            cast_into(target, values)


def _steps(ops: Iterable[Op]) -> tuple[Op, ...]:
    return tuple(op for op in ops if op.elementwise)


def _float_only(op: Op, spec: Spec) -> Spec:
    if not is_float(numpy_dtype(spec.dtype)):
        raise ValueError(f"{op.describe()} needs a float dtype; found {spec.dtype}")
    return spec
