"""Vision and audio towers beside a language model."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tensorferry.mappings.families.family import Family, make_dims
from tensorferry.mappings.families.spelling import Spelling
from tensorferry.mappings.rules.rule import Ignore, Rule


@dataclass(frozen=True)
class Tower:
    """A vision or audio tower beside the language model, to be added to a family: empty when it is left out.

    Attributes:
      dims: words of its own.
      rules: its table.
      ignores: its tensors, when it is left out.
      settings: MaxText settings of it.
      sizes_from: dim to the config.json key its size came from.
      notes: sentences for the plan.
    """

    dims: dict[str, Any] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    ignores: tuple[Ignore, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    sizes_from: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def left_out(patterns: Iterable[str], what: str) -> Tower:
    """A tower that is left out, with the reason."""
    return Tower(ignores=tuple(Ignore(pattern, why=f"{what}; --multimodal converts it") for pattern in patterns))


def with_towers(family: Family, name: str, spelled: Spelling, *towers: Tower) -> Family:
    """A language model's family in another spelling, with towers beside it.

    Raises:
      ValueError: two of them mean different dims by one word (a mistake in the family file).
    """
    parts = (family, *towers)
    words = [word for part in parts for word, _ in part.dims.items()]
    if len(set(words)) < len(words):
        raise ValueError(f"words that stand twice: {sorted(word for word in set(words) if words.count(word) > 1)}")
    return replace(
        family,
        name=name,
        dims=make_dims({word: dim for part in parts for word, dim in part.dims.items()}),
        rules=(*spelled.rules(family.rules), *(rule for tower in towers for rule in tower.rules)),
        ties=(spelled.tie,),
        ignores=tuple(ignore for part in parts for ignore in part.ignores),
        settings={key: value for part in parts for key, value in part.settings.items()},
        sizes_from={word: key for part in parts for word, key in part.sizes_from.items()},
        notes=(spelled.note, *(note for part in parts for note in part.notes)),
    )
