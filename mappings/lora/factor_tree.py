"""Finds an adapter's factors in an Orbax tree, whoever wrote it, and what is on record of their scale."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tensorferry.mappings.export.parameter_tree import Parameters, find_parameters
from tensorferry.mappings.tunix.step_tree import Leaf
from tensorferry.mappings.words.problems import PlanError, Problem

HALVES = ("_lora_a", "_lora_b")


def find_factors(leaves: Iterable[Leaf], item: str) -> Parameters:
    """The low-rank factors among the leaves of an item; base weights beside them are left out.

    Args:
      leaves: all of them.
      item: what the item is called, for messages.
    """
    found = find_parameters(leaves, item)
    if not found.arrays:
        return found
    factors = {name: leaf for name, leaf in found.arrays.items() if name.endswith(HALVES)}
    others = len(found.arrays) - len(factors)
    told = (f"{others:,} arrays that are no low-rank factors: weights of the base model",) if others else ()
    problems = tuple(_wrong(factors)) if factors else (_none(item, others),)
    return replace(found, arrays=factors, left_out=(*found.left_out, *told), problems=problems)


def kernels_of(arrays: Iterable[str]) -> frozenset[str]:
    """The kernels that factors belong to.

    >>> sorted(kernels_of(["params-decoder-layers-mlp-wo-kernel_lora_a", "params-decoder-layers-mlp-wo-kernel_lora_b"]))
    ['params-decoder-layers-mlp-wo-kernel']
    """
    return frozenset(name.rpartition("_lora_")[0] for name in arrays)


def rank_of(arrays: Mapping[str, Leaf]) -> int:
    """The rank of an adapter: the last axis of every A.

    Raises:
      PlanError: they have different ones.
    """
    ranks = Counter(leaf.shape[-1] for name, leaf in arrays.items() if name.endswith(HALVES[0]) and leaf.shape)
    if len(ranks) == 1:
        return next(iter(ranks))
    (usual, _), *_ = ranks.most_common()
    odd = next(name for name, leaf in arrays.items() if name.endswith(HALVES[0]) and leaf.shape[-1] != usual)
    fix = "MaxText trains one rank for all; export adapters of other ranks one by one."
    raise PlanError([Problem(odd, f"rank {usual}, as most factors have", f"{arrays[odd].shape[-1]}", fix)])


def alpha_of(custom: Mapping[str, Any], rank: int, wanted: float | None) -> float:
    """The adapter's alpha: on record in the step's custom metadata, or given.

    Args:
      custom: metadata of the step; ``{"lora": {"lora_rank": …, "lora_alpha": …}}`` where MaxText or we wrote it.
      rank: as the factors' shapes tell it.
      wanted: what ``--lora-alpha`` says; None without.

    Raises:
      PlanError: neither tells it, or they disagree.
    """
    told = custom.get("lora")
    told = told if isinstance(told, Mapping) else {}
    alpha, known_rank = told.get("lora_alpha"), told.get("lora_rank")
    if known_rank and known_rank != rank:
        fix = "The metadata is wrong, or the factors are another adapter's."
        raise PlanError(
            [Problem("custom metadata lora_rank", f"{rank}, the rank of the factors", f"{known_rank}", fix)]
        )
    if wanted is not None and alpha and alpha != wanted:
        expected = f"{alpha:g}, which is on record in the step's metadata"
        raise PlanError([Problem("--lora-alpha", expected, f"{wanted:g}", "Leave the option out.")])
    known = wanted or alpha
    if not known:
        fix = "Give the lora_alpha that the adapter was trained with; B and A are multiplied by alpha / rank."
        expected = f"the adapter's alpha (its rank, {rank}, is known from shapes)"
        raise PlanError([Problem("--lora-alpha", expected, "none on record in the checkpoint", fix)])
    return float(known)


def _wrong(factors: Mapping[str, Leaf]) -> Iterator[Problem]:
    for name in factors:
        other = name[:-1] + ("b" if name.endswith("a") else "a")
        if other not in factors:
            fix = "Is the checkpoint complete? A and B belong together."
            yield Problem(name, f"its other half {other} beside it", "none", fix)


def _none(item: str, others: int) -> Problem:
    fix = "Export it without --lora."
    return Problem(item, "low-rank factors (…/kernel_lora_a, …/kernel_lora_b)", f"{others:,} arrays, none of them", fix)
