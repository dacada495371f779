"""FP8 codes with their scale in MaxText's layout: which arrays they are, and how they are read as numbers."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from tensorferry.mappings.lowbit.tensors import LogicalTensor
from tensorferry.mappings.plan.target_arrays import Use
from tensorferry.mappings.rules.compiled import CompiledRule
from tensorferry.mappings.rules.dims import Dims, Index
from tensorferry.mappings.rules.layout import Axis
from tensorferry.mappings.words.problems import Problem
from tensorferry.transforms.ops import Op, Pad, Scale

Tensors = Mapping[str, LogicalTensor]

_ENDING = "_scale"
_FIX = "Tensorferry exports scales that conversions write: one entry per even part of an axis."


def carried_pairs(tensors: Tensors) -> dict[str, str]:
    """Arrays of FP8 codes and the scale that stands beside each: ``…-kernel`` and ``…-kernel_scale``."""
    return {
        name: name + _ENDING
        for name, tensor in tensors.items()
        if tensor.dtype.startswith("float8") and name + _ENDING in tensors
    }


def target_uses(rules: Sequence[CompiledRule], names: Collection[str]) -> Iterator[tuple[str, Use]]:
    """Every rule's part in every array that is named."""
    for rule in rules:
        for name, at in rule.targets():
            if name in names:
                yield name, Use(rule, at)


def stacked_sources(use: Use) -> Iterator[str]:
    """The Hugging Face tensors that a rule puts into one array."""
    return (use.source_name(at) for at in use.compiled.dims.positions(use.compiled.stack))


def folded_factors(ops: Sequence[Op]) -> tuple[float, ...]:
    """The constant factors that a conversion folds into a scale: all arithmetic, or none of it."""
    if not all(isinstance(op, Scale | Pad) for op in ops):
        return ()
    return tuple(op.factor for op in ops if isinstance(op, Scale))


def decoded_tensors(
    rules: Sequence[CompiledRule], tensors: Tensors, names: Collection[str]
) -> tuple[dict[str, LogicalTensor], tuple[Problem, ...]]:
    """Arrays of FP8 codes as arrays of numbers, which are worked out from codes and scale as they are read.

    Args:
      rules: the family's rules, towards MaxText.
      tensors: the arrays.
      names: the arrays of codes.

    Returns:
      The tensors without the scales of those arrays, and why some cannot be decoded.
    """
    pairs = {name: scale for name, scale in carried_pairs(tensors).items() if name in names}
    found = {name: tensor for name, tensor in tensors.items() if name not in set(pairs.values())}
    ways: dict[str, set[tuple[float, ...]]] = {}
    problems: dict[str, Problem] = {}
    for name, use in target_uses(rules, pairs):
        scale = tensors[pairs[name]]
        grid = _grid(use.compiled, tensors[name].shape, scale.shape)
        factors = folded_factors(use.compiled.rule.ops)
        if grid is None or ways.setdefault(name, {factors}) != {factors}:
            told = f"one of shape {list(scale.shape)}"
            problems[name] = Problem(scale.name, f"a scale of {name} {list(tensors[name].shape)}", told, _FIX)
        else:
            found[name] = _logical(tensors[name], scale, *grid, factors)
    return found, tuple(problems.values())


def _logical(
    codes: LogicalTensor, scale: LogicalTensor, blocks: Sequence[int], axes: Sequence[int], factors: Sequence[float]
) -> LogicalTensor:
    params = {
        "blocks": list(blocks), "scale_axes": list(axes), "code": codes.dtype, "encoding": "float",
        "folded": list(factors),
    }  # fmt: skip
    stored = {"values": codes.stored["values"], "scale": scale.stored["values"]}
    return replace(codes, dtype="float32", stored=stored, scheme="fp8-block", params=params)


def _grid(rule: CompiledRule, shape: Sequence[int], scale: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """Block length per axis (0 for one entry) and the axis of each dim of a scale; None when it fits no way.

    A scale has its weight's rank, or the axes of layers and experts only.
    """
    axes = list(range(len(shape)))
    if len(scale) != len(shape):
        axes = [t for t, axis in enumerate(rule.rule.layout.target) if _label_sizes(rule.dims, axis)]
        entries = [_label_sizes(rule.dims, rule.rule.layout.target[t]) for t in axes]
        if list(scale) != entries:
            return None
    if any(shape[axis] % max(1, count) or not count for axis, count in zip(axes, scale, strict=True)):
        return None
    blocks = [0] * len(shape)
    for axis, count in zip(axes, scale, strict=True):
        blocks[axis] = shape[axis] // count if count > 1 else 0
    return blocks, axes


def _label_sizes(dims: Dims, axis: Axis) -> int:
    """How many combinations of labels (layers, experts, parts) an axis has; 0 when it has none."""
    words = [term for term in axis if isinstance(term, str) and term in dims]
    sizes = [dims.size(word) for word in words if isinstance(dims[word], Index)]
    return math.prod(sizes) if sizes else 0
