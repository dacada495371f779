"""Rules: a source name, a target name and a layout. Data; nothing here touches an array."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tensorferry.mappings.rules.dims import Dims, Grid
from tensorferry.mappings.rules.layout import Layout, parse_layout, side_atoms
from tensorferry.transforms.ops import Op, Ops, Pad, Spec, Whole

_FIELD = re.compile(r"\{(\w+)(\.pos)?\}")
_BLOCK = re.compile(r"\[(\w+)\]")


@dataclass(frozen=True)
class Template:
    """A name with index words: ``model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight``.

    ``{layer}`` prints the label (the number the checkpoint uses), ``{layer.pos}`` the position counted from 0.
    """

    text: str

    @cached_property
    def words(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(match.group(1) for match in _FIELD.finditer(self.text)))

    @cached_property
    def _form(self) -> tuple[str, list[tuple[str, str | None]]]:
        """The name with ``%s`` for each index word, and the words, each with its ``.pos`` or None."""
        split = _FIELD.split(self.text)
        literals = [literal.replace("%", "%%") for literal in split[::3]]
        return "%s".join(literals), list(zip(split[1::3], split[2::3], strict=True))

    def atoms(self, dims: Dims) -> tuple[str, ...]:
        """The dims that this name enumerates, in order of appearance."""
        return tuple(atom for word in self.words for atom in dims.atoms_of(word))

    def fill(self, dims: Dims, at: Mapping[str, int]) -> str:
        """The concrete name at given positions of its dims."""

        # A plan fills names by the hundred thousand.
        form, fields = self._form
        return form % tuple([dims.position(word, at) if mark else dims.label(word, at) for word, mark in fields])

    def fixed(self, dims: Dims, at: Mapping[str, int]) -> "Template":
        """The name with those of its words filled in whose dims all have a position."""

        def value(match: re.Match[str]) -> str:
            known = at.keys() >= set(dims.atoms_of(match.group(1)))
            return Template(match.group(0)).fill(dims, at) if known else match.group(0)

        return Template(_FIELD.sub(value, self.text))

    def pattern(self, dims: Dims) -> str:
        """The name with each index shown as its range, for people: ``model.layers.{0..31}.…``."""

        def value(match: re.Match[str]) -> str:
            every = dims.positions(dims.atoms_of(match.group(1)))
            ends = [str((dims.position if match.group(2) else dims.label)(match.group(1), at)) for at in every]
            return ends[0] if len(ends) == 1 else f"{{{ends[0]}..{ends[-1]}}}"

        return _FIELD.sub(value, self.text)


@dataclass(frozen=True, slots=True)
class Block:
    """How a group of layers is spelt in the target's names.

    Attributes:
      scanned: level name when layers are stacked (``layers``, ``moe_layers``, ``layers-layers_2``).
      unrolled: level name with the index when each layer has arrays of its own (``layers_{layer}``).
      stacked: whether scanned mode stacks at all; a left-over block keeps its index in the name in both modes.
    """

    scanned: str
    unrolled: str
    stacked: bool = True


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a family's table.

    Attributes:
      source: source tensor name; ``{layer}`` enumerates tensors.
      target: target path with ``-`` between levels, collection first; ``[layer]`` stands for the layer's block.
      layout: axes of both sides, written for scanned mode; a grid's word stands for an axis per dim of it.
      ops: arithmetic and padding, applied from source to target.
      dtype: target dtype whatever ``--dtype`` says; empty follows the option.
      whole: integer dtype of the source tensors where the target's floats stand for whole numbers; empty elsewhere.
    """

    source: str
    target: str
    layout: str
    ops: tuple[Op, ...] = ()
    dtype: str = ""
    whole: str = ""


@dataclass(frozen=True, slots=True)
class Constant:
    """A target array that no tensor fills: MaxText's model has a parameter where the checkpoint's has none.

    Attributes:
      target: as a rule's.
      axes: the target side of a layout, written for scanned mode.
      value: what every element is.
    """

    target: str
    axes: str
    value: float


@dataclass(frozen=True, slots=True)
class Ignore:
    """Source tensors that are left out on purpose: a name or pattern with ``*``, and the reason."""

    pattern: str
    why: str


@dataclass(frozen=True, slots=True)
class Tie:
    """``name`` holds the same values as ``to``; when both are stored their bytes must agree."""

    name: str
    to: str


@dataclass(frozen=True)
class PlainRule:
    """A rule with its mode resolved: no blocks any more, so that its inverse is a swap.

    Attributes:
      source: name template of the source tensors.
      target: name template of the target arrays.
      layout: axes of both sides in this mode.
      ops: from source to target.
      dtype: fixed target dtype, or empty.
      stored: dims that the source side stores longer than they are, with that length (a padded vocabulary).
      value: what every element is where nothing is read; such a rule has no source and no inverse.
      optional: whether sources may be absent; their elements are zero then.
      whole: integer dtype of the source tensors, or empty.
    """

    source: Template
    target: Template
    layout: Layout
    ops: tuple[Op, ...] = ()
    dtype: str = ""
    stored: tuple[tuple[str, int], ...] = ()
    value: float | None = None
    optional: bool = False
    whole: str = ""

    def inverse(self, dims: Dims) -> "PlainRule":
        """The same rule from target to source; the ops are inverted in reverse order."""
        atoms = [atom for atom in side_atoms(self.layout.target) if atom != "1"]
        spec = Spec("float32", tuple((atom, dims.size(atom)) for atom in atoms))
        stored = tuple((op.dim, op.to) for op in self.ops if isinstance(op, Pad))
        ops = (*Ops(self.ops).inverse(spec).ops, *((Whole(),) if self.whole else ()))
        return PlainRule(self.target, self.source, self.layout.inverse, ops, self.whole, stored)

    def stack_atoms(self, dims: Dims) -> tuple[str, ...]:
        """Dims that enumerate sources and are dimensions of the target."""
        named = set(self.target.atoms(dims))
        return tuple(atom for atom in self.source.atoms(dims) if atom not in named)

    def split_atoms(self, dims: Dims) -> tuple[str, ...]:
        """Dims that enumerate targets and are dimensions of the source."""
        if self.value is not None:
            return ()
        named = set(self.source.atoms(dims))
        return tuple(atom for atom in self.target.atoms(dims) if atom not in named)

    def check(self, dims: Dims) -> None:
        """Every dim must stand once on each side, in the name or in the shape.

        Raises:
          ValueError: a mistake in the family file.
        """
        sides = []
        for name, shape in ((self.source, self.layout.source), (self.target, self.layout.target)):
            atoms = [*name.atoms(dims), *(atom for atom in side_atoms(shape) if atom != "1")]
            if len(set(atoms)) != len(atoms):
                raise ValueError(f"rule {self}: a dim stands both in the name and in the shape of one side")
            sides.append(set(atoms))
        if sides[0] != sides[1]:
            raise ValueError(f"rule {self}: only on one side: {sorted(sides[0] ^ sides[1])}")

    def __str__(self) -> str:
        return f"{self.source.text} => {self.target.text} : {self.layout}"


def resolve(rule: Rule, blocks: Mapping[str, Block], dims: Dims, scan_layers: bool) -> PlainRule:
    """Spells a rule out for one mode: unrolling moves the block's dims from the layout into the name."""
    plain = _spelled(rule, blocks, dims, scan_layers)
    plain.check(dims)
    return plain


def resolve_constant(constant: Constant, blocks: Mapping[str, Block], dims: Dims, scan_layers: bool) -> PlainRule:
    """Spells a constant out for one mode, as a rule that reads nothing."""
    plain = _spelled(Rule("", constant.target, f"-> {constant.axes}"), blocks, dims, scan_layers)
    return replace(plain, value=constant.value)


def _spelled(rule: Rule, blocks: Mapping[str, Block], dims: Dims, scan_layers: bool) -> PlainRule:
    grids = {word: dim.atoms for word, dim in dims.items() if isinstance(dim, Grid)}
    layout = parse_layout(rule.layout).spread(grids)
    unrolled: set[str] = set()
    target = rule.target
    for word in _BLOCK.findall(rule.target):
        block = blocks[word]
        stacked = scan_layers and block.stacked
        target = target.replace(f"[{word}]", block.scanned if scan_layers else block.unrolled)
        if not stacked:
            unrolled.update(dims.atoms_of(word))
    plain = layout.without(frozenset(unrolled))
    return PlainRule(Template(rule.source), Template(target), plain, rule.ops, rule.dtype, whole=rule.whole)


def prefixed(rules: tuple[Rule, ...], source: str = "", target: str = "") -> tuple[Rule, ...]:
    """The rules with something put in front of every source and target name."""
    return tuple(replace(rule, source=source + rule.source, target=target + rule.target) for rule in rules)
