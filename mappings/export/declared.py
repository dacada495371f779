"""The FP8 scheme that a config.json declares, where the headers of its weights are not at hand."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tensorferry.mappings.export.carried import Tensors, carried_pairs, stacked_sources, target_uses
from tensorferry.mappings.lowbit.claims import read_config
from tensorferry.mappings.lowbit.companion_names import scale_aliases, scale_of
from tensorferry.mappings.lowbit.quantisation import resolve
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.rules.compiled import CompiledRule, source_shape
from tensorferry.mappings.words.problems import Problem


def declared_low_bit(
    rules: Sequence[CompiledRule], tensors: Tensors, config: Mapping[str, Any], names: Collection[str]
) -> tuple[dict[str, LogicalTensor], tuple[Problem, ...]]:
    """The quantised weights of a checkpoint whose config.json states blocks, as its headers would tell them.

    Args:
      rules: the family's rules, towards MaxText.
      tensors: the arrays of the source.
      config: config.json of the FP8 checkpoint.
      names: names of its tensors, from its index; may be empty.

    Returns:
      The weights that the source carries as FP8, by name, and why there are none.
    """
    claims = read_config(dict(config), {}).claims
    blocks = {claim.block for claim in claims if claim.strategy == "block"}
    if len(blocks) != 1 or len(claims) != 1:
        return {}, (_headers_wanted("; ".join(claim.text for claim in claims) or "nothing"),)
    (block,) = blocks
    made = dict(_stored(rules, tensors, tuple(block or ()), frozenset(names)))
    found = resolve(made, dict(config))
    weights = {name: tensor for name, tensor in found.logical.items() if tensor.scheme != "plain"}
    return weights, (*found.problems, *_dequantised(rules, tensors, weights, names))


def _stored(
    rules: Sequence[CompiledRule], tensors: Tensors, block: tuple[int, ...], names: Collection[str]
) -> Iterator[tuple[str, StoredTensor]]:
    for array, use in target_uses(rules, carried_pairs(tensors)):
        shape = source_shape(use.compiled)
        grid = (*shape[:-2], *(-(-n // size) for n, size in zip(shape[-2:], block, strict=True)))
        for name in stacked_sources(use):
            scale = scale_of(name, names) if names else scale_aliases(name)[0]
            if scale:
                yield name, StoredTensor(name, tensors[array].dtype, shape, "", 0)
                yield scale, StoredTensor(scale, "float32", grid, "", 0)


def _dequantised(
    rules: Sequence[CompiledRule], tensors: Tensors, weights: Collection[str], names: Collection[str]
) -> Iterator[Problem]:
    """Weights that the FP8 checkpoint has as codes, and the source as numbers."""
    for rule in rules:
        for name in rule.sources():
            if name not in weights and scale_of(name, names):
                fix = "Give the FP8 checkpoint with its weights as --fp8-from, or export with --dtype bfloat16."
                yield Problem(name, "FP8 codes, as --config's index has them", "numbers in the source", fix)


def _headers_wanted(told: str) -> Problem:
    return Problem(
        "--config",
        "the headers of the FP8 checkpoint's weights, or weight_block_size in config.json",
        told,
        "Give the repository with its weights (an hf:// address is enough), or export with --dtype bfloat16.",
    )
