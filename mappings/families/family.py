"""A family: dims, blocks, rules. One function per architecture makes it from a checkpoint's own config."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tensorferry.mappings.families.config import Config
from tensorferry.mappings.rules.dims import Dims, DimSpec
from tensorferry.mappings.rules.rule import Block, Constant, Ignore, PlainRule, Rule, Tie, resolve, resolve_constant


@dataclass(frozen=True)
class FamilyOptions:
    """What a user may decide about a mapping.

    Attributes:
      scan_layers: stack the layers of a block into one array (MaxText's ``scan_layers=true``).
      vocab_size: pad the vocabulary with zero rows up to this size; None keeps the checkpoint's.
      rope_lanes: ``interleaved``, ``split`` or ``auto``: the lane order that MaxText's attention will rotate.
      multimodal: convert vision and audio towers too, where MaxText has a place for them.
      mtp: convert multi-token prediction layers too, where MaxText has a place for them.
      match_maxtext: round where MaxText's converter rounds, even where that is worse than necessary.
    """

    scan_layers: bool = True
    vocab_size: int | None = None
    rope_lanes: str = "auto"
    multimodal: bool = False
    mtp: bool = False
    match_maxtext: bool = False


@dataclass(frozen=True)
class Family:
    """Everything that says how one checkpoint maps to MaxText.

    Attributes:
      name: family name, as ``--family`` takes it.
      dims: word to size, index set, grid or concatenation.
      blocks: index word to how its layer group is spelt.
      rules: the table.
      ties: pairs of names that hold the same values.
      ignores: tensors left out on purpose, with reasons.
      constants: target arrays that no tensor fills; there is nothing of them in a Hugging Face checkpoint.
      settings: MaxText settings that load the result; written as ``maxtext.yml``.
      sizes_from: dim to the config.json key its size came from, for error messages.
      notes: sentences for the plan (which spelling was found, which choice was made).
    """

    name: str
    dims: Dims
    blocks: Mapping[str, Block]
    rules: tuple[Rule, ...]
    ties: tuple[Tie, ...] = ()
    ignores: tuple[Ignore, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    sizes_from: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    constants: tuple[Constant, ...] = ()

    def plain_rules(self, scan_layers: bool) -> tuple[PlainRule, ...]:
        """The table for one mode."""
        return tuple(resolve(rule, self.blocks, self.dims, scan_layers) for rule in self.rules)

    def plain_constants(self, scan_layers: bool) -> tuple[PlainRule, ...]:
        """The constants for one mode, as rules that read nothing."""
        return tuple(resolve_constant(one, self.blocks, self.dims, scan_layers) for one in self.constants)

    @cached_property
    def constant_names(self) -> frozenset[str]:
        """Every array that a constant fills, in either mode."""
        plain = (*self.plain_constants(True), *self.plain_constants(False))
        return frozenset(
            rule.target.fill(self.dims, at)
            for rule in plain
            for at in self.dims.positions(rule.target.atoms(self.dims))
        )


FamilyMaker = Callable[[Config, Collection[str], FamilyOptions], Family]
MAKERS: dict[str, FamilyMaker] = {}
MODEL_TYPES: dict[str, str] = {}


def register(name: str, *model_types: str) -> Callable[[FamilyMaker], FamilyMaker]:
    """Registers a family under its name and the ``model_type`` values (or architectures) that mean it."""

    def keep(maker: FamilyMaker) -> FamilyMaker:
        MAKERS[name] = maker
        MODEL_TYPES.update(dict.fromkeys(model_types or (name,), name))
        return maker

    return keep


def make_dims(specs: Mapping[str, DimSpec]) -> Dims:
    """Dims from a family's dictionary, leaving out those of size zero."""
    return Dims({word: spec for word, spec in specs.items() if spec != 0})
