"""The two rules of a low-rank adapter, derived from the rule of the weight that it adapts.

PEFT keeps A ``[rank, in]`` and B ``[out, rank]`` beside a weight ``[out, in]``: W becomes W + scale B A. MaxText's
model (by qwix) keeps two arrays beside a kernel: ``kernel_lora_a``, the kernel's input dims merged in the kernel's own
order and then the rank; ``kernel_lora_b``, the rank and then its output dims merged. Where layers are stacked, their
axes stand after the first axis, as they do in the kernel:

| kernel | ``kernel_lora_a`` | ``kernel_lora_b`` |
|---|---|---|
| ``embed mlp`` | ``embed rank`` | ``rank mlp`` |
| ``embed layer heads head_dim`` | ``embed layer rank`` | ``rank layer (heads head_dim)`` |
| ``heads layer head_dim embed`` | ``(heads head_dim) layer rank`` | ``rank layer embed`` |

So what the weight's rule does to its input axis (merging, the order of lanes) A's rule does, and what it does to its
output axis B's does. A factor belongs to the product, and goes to B alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tensorferry.mappings.rules.dims import Dims
from tensorferry.mappings.rules.layout import Axis, Layout, Side, Slice, side_atoms
from tensorferry.mappings.rules.rule import PlainRule, Template
from tensorferry.transforms.ops import Op, Pad, RoundTo, Scale

RANK = "lora_rank"
WEIGHT, KERNEL = ".weight", "-kernel"
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
KERNEL_A, KERNEL_B = "-kernel_lora_a", "-kernel_lora_b"


class NotAdaptable(ValueError):
    """A weight whose adapter has no place in MaxText's model; says why."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """How the dims of a kernel divide.

    Attributes:
      inputs: dims that the layer contracts, in the kernel's order.
      outputs: dims that it makes, in the kernel's order.
      stack: dims of stacked layers.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    stack: tuple[str, ...]


def factor_rules(rule: PlainRule, dims: Dims, prefix: str, scale: float = 1.0) -> tuple[PlainRule, PlainRule]:
    """The rules of A and of B for an adapter of the weights that a rule maps.

    Args:
      rule: of the weight, in one mode.
      dims: its sizes; ``RANK`` need not be among them.
      prefix: what stands before a weight's name in the adapter's names.
      scale: a further factor on B.

    Raises:
      NotAdaptable: MaxText's model has no factors for it.
    """
    parts = _parts(rule, dims)
    out_axis, in_axis = rule.layout.source
    stem, target = rule.source.text.removesuffix(WEIGHT), rule.target.text.removesuffix(KERNEL)
    stacked: Side = tuple((atom,) for atom in parts.stack)
    a = PlainRule(
        Template(f"{prefix}{stem}{LORA_A}"),
        Template(target + KERNEL_A),
        Layout(((RANK,), in_axis), (parts.inputs, *stacked, (RANK,))),
        _padding(rule.ops, parts.inputs),
        rule.dtype,
        optional=bool(parts.stack),
    )
    b = PlainRule(
        Template(f"{prefix}{stem}{LORA_B}"),
        Template(target + KERNEL_B),
        Layout((out_axis, (RANK,)), ((RANK,), *stacked, parts.outputs)),
        (*_factors(rule.ops, scale), *_padding(rule.ops, parts.outputs)),
        rule.dtype,
        optional=bool(parts.stack),
    )
    return a, b


def _parts(rule: PlainRule, dims: Dims) -> _Parts:
    source, target = rule.layout.source, rule.layout.target
    if rule.split_atoms(dims) or any(isinstance(term, Slice) for axis in (*source, *target) for term in axis):
        raise NotAdaptable("a fused weight, of which MaxText's model has the parts")
    if not rule.source.text.endswith(WEIGHT) or not rule.target.text.endswith(KERNEL):
        raise NotAdaptable(f"{rule.target.text.rpartition('-')[2]} in MaxText's model, which is no kernel")
    if len(source) != 2:
        raise NotAdaptable(f"a weight of {len(source)} axes")
    if any(not isinstance(op, Scale | Pad | RoundTo) for op in rule.ops):
        raise NotAdaptable("a weight that is changed by more than a factor on the way")
    return _divided(target, side_atoms((source[1],)), rule.stack_atoms(dims))


def _divided(target: Side, inputs: Sequence[str], stack: Sequence[str]) -> _Parts:
    """Divides a kernel's dims; it must hold its inputs before its outputs, and stacked layers after its first axis."""
    layers = tuple(axis[0] for axis in target[1:] if axis[0] in stack)
    if {atom for atom in side_atoms(target[:1]) if atom in stack}:
        raise NotAdaptable("one of several weights that are stacked for a grouped product, such as experts")
    if tuple(axis[0] for axis in target[1 : 1 + len(layers)]) != layers:
        raise NotAdaptable("a kernel whose stacked axes do not follow its first")
    rest = [atom for atom in side_atoms(target) if atom not in stack]
    first = [atom in inputs for atom in rest]
    if first != sorted(first, reverse=True):
        raise NotAdaptable("a grouped product, whose kernel has outputs before inputs")
    count = sum(first)
    return _Parts(_axis(rest[:count]), _axis(rest[count:]), tuple(str(atom) for atom in layers))


def _axis(atoms: Sequence[str]) -> tuple[str, ...]:
    return tuple(atoms) or ("1",)


def _padding(ops: Sequence[Op], atoms: Axis) -> tuple[Op, ...]:
    return tuple(op for op in ops if isinstance(op, Pad) and op.dim in atoms)


def _factors(ops: Sequence[Op], scale: float) -> tuple[Op, ...]:
    """One factor for all: the product of those on the weight and the adapter's own; none where it is 1."""
    factor = scale
    for op in ops:
        if isinstance(op, Scale):
            factor *= op.factor
    return () if factor == 1 else (Scale(factor),)
