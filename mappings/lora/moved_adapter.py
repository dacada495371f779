"""A PEFT adapter as a family's rules see it: one rank and one alpha for all, and everything that does not fit."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tensorferry.mappings.families.family import Family
from tensorferry.mappings.lora.adapter_family import PREFIX, AdapterFamily, Wish, adapter_family, weight_names
from tensorferry.mappings.lora.factors import LORA_A, LORA_B, WEIGHT
from tensorferry.mappings.lora.merged_weights import Names
from tensorferry.mappings.lora.peft_adapter import CONFIG_FILE, Adapter, Pair
from tensorferry.mappings.lowbit.tensors import LogicalTensor
from tensorferry.mappings.rules.compiled import compile_rule
from tensorferry.mappings.words.problems import Problem

_MERGE = "Merge it into the weights with convert --lora."
_BASE_COPY = ".base_layer."


@dataclass(frozen=True)
class MovedAdapter:
    """An adapter on its way into MaxText's layout.

    Attributes:
      family: its rules.
      tensors: its factors under the names that the rules have.
      rank: of all of them.
      alpha: a b is scaled by alpha / rank; what differs from that for some modules is a factor on their B.
      ignored: tensors that are left out, with reasons.
      notes: choices that were made, as sentences.
    """

    family: AdapterFamily
    tensors: Mapping[str, LogicalTensor] = field(repr=False)
    rank: int
    alpha: float
    ignored: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def move_adapter(adapter: Adapter, base: Family, scan_layers: bool) -> tuple[MovedAdapter | None, list[Problem]]:
    """Finds a place for every factor of an adapter.

    Args:
      adapter: what PEFT saved.
      base: the family of the model that it adapts.
      scan_layers: whether MaxText stacks the layers.

    Returns:
      The adapter, or None when there are problems; and the problems.
    """
    problems = [*_not_factors(adapter), *_ranks(adapter), *_alphas(adapter)]
    if problems or not adapter.pairs:
        return None, problems or [_empty()]
    names = Names(weight_names(base))
    places = {pair.module: names.find(f"{pair.module}{WEIGHT}") for pair in adapter.pairs}
    unknown = [_unknown(pair, base) for pair in adapter.pairs if places[pair.module] is None]
    if unknown:
        return None, unknown
    scales = {str(places[pair.module]): adapter.config.scale_of(pair.module) for pair in adapter.pairs}
    rank, scale = adapter.pairs[0].a.shape[0], Counter(scales.values()).most_common(1)[0][0]
    wish = Wish.of_weights({weight: own / scale for weight, own in scales.items()})
    family, problems = adapter_family(base, scan_layers, rank, wish)
    tensors = {one.name: one for pair in adapter.pairs for one in _tensors(pair, str(places[pair.module]))}
    ignored = {tensor.name: "a copy of the base model's tensor" for tensor in adapter.whole.values()}
    notes = (*names.notes(), *_scale_notes(scale, scales), *_zero_notes(family, tensors))
    moved = MovedAdapter(family, tensors, rank, _rounded(scale * rank), ignored, notes)
    return (None if problems else moved), problems


def lora_path(name: str) -> tuple[str, ...]:
    """Where MaxText's ``lora_restore_path`` looks for a factor: at the root of the item, with a last level ``value``.

    >>> lora_path("params-decoder-layers-mlp-wo-kernel_lora_a")
    ('decoder', 'layers', 'mlp', 'wo', 'kernel_lora_a', 'value')
    """
    return (*name.split("-")[1:], "value")


def _tensors(pair: Pair, weight: str) -> Iterator[LogicalTensor]:
    stem = PREFIX + weight.removesuffix(WEIGHT)
    for stored, ending in ((pair.a, LORA_A), (pair.b, LORA_B)):
        yield LogicalTensor(f"{stem}{ending}", stored.shape, stored.dtype, {"values": stored})


def _rounded(alpha: float) -> float:
    """The whole number that an alpha is but for rounding."""
    return float(round(alpha)) if abs(alpha - round(alpha)) < 1e-9 * alpha else alpha


def _scale_notes(scale: float, scales: Mapping[str, float]) -> Iterator[str]:
    odd = [weight for weight, own in scales.items() if own != scale]
    if odd:
        own = f"{odd[0].removesuffix(WEIGHT)} has {scales[odd[0]]:.6g}"
        yield f"scale {scale:.6g} for all; the rest of the scales of {len(odd):,} modules ({own}) goes into their B"


def _zero_notes(family: AdapterFamily, tensors: Mapping[str, LogicalTensor]) -> Iterator[str]:
    rules = [compile_rule(rule, family.dims) for rule in family.plain if rule.optional]
    absent = [name for rule in rules for name in rule.sources() if name not in tensors]
    if absent:
        yield f"zero where the adapter leaves a stacked layer alone: {len(absent):,} factors, such as {absent[0]}"


def _not_factors(adapter: Adapter) -> Iterator[Problem]:
    expected = "factors of linear layers alone: MaxText's model has no others"
    for tensor in adapter.whole.values():
        if _BASE_COPY not in tensor.name:
            yield Problem(tensor.name, expected, "a whole tensor that was trained beside them", _MERGE, tensor.file)
    for pair in adapter.parameters:
        yield Problem(pair.module, expected, "factors of fused parameters (target_parameters)", _MERGE, pair.a.file)
    for pair in adapter.pairs:
        if pair.is_embedding:
            yield Problem(pair.module, expected, "factors of an embedding", _MERGE, pair.a.file)


def _ranks(adapter: Adapter) -> Iterator[Problem]:
    ranks = Counter(pair.a.shape[0] for pair in adapter.pairs)
    for pair in adapter.pairs:
        usual, rank = ranks.most_common(1)[0][0], pair.a.shape[0]
        if rank != usual:
            expected = f"rank {usual}, as most modules have: MaxText has one rank for all"
            yield Problem(pair.module, expected, str(rank), _MERGE, pair.a.file)


def _alphas(adapter: Adapter) -> Iterator[Problem]:
    for pair in adapter.pairs:
        scale = adapter.config.scale_of(pair.module)
        if scale <= 0:
            expected = "an alpha above 0, the only ones that MaxText takes"
            yield Problem(pair.module, expected, f"scale {scale:g}", "Train with a positive lora_alpha.", CONFIG_FILE)
            return


def _unknown(pair: Pair, base: Family) -> Problem:
    expected = f"a module of a {base.name} model that has a place in MaxText's tree"
    fix = "Is --source the model that it adapts?"
    return Problem(pair.module, expected, "no weight of this name in the family's table", fix, pair.a.file)


def _empty() -> Problem:
    return Problem(CONFIG_FILE, "an adapter of at least one linear layer", "none", "Is it the right one?")
