"""A layout says in one line how the axes of a source become the axes of a target.

``"(heads head_dim) embed -> embed layer heads head_dim"``: words are dims, parentheses merge several dims into one
stored axis (row-major), ``concat.part(dims)`` is a part of an axis whose parts have different sizes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

_TOKEN = re.compile(r"\s*(->|\(|\)|\w+\.\w+\(|\w+)")


@dataclass(frozen=True, slots=True)
class Slice:
    """The part ``part`` of the concatenation ``concat``; inside, ``atoms`` in row-major order."""

    concat: str
    part: str
    atoms: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.concat}.{self.part}({' '.join(self.atoms)})"


Term = str | Slice
Axis = tuple[Term, ...]
Side = tuple[Axis, ...]


def term_atoms(term: Term) -> tuple[str, ...]:
    """The dims inside one term of an axis."""
    return term.atoms if isinstance(term, Slice) else (term,)


def side_atoms(side: Side) -> tuple[str, ...]:
    """All dims of one side in row-major order."""
    return tuple(atom for axis in side for term in axis for atom in term_atoms(term))


def _side_text(side: Side) -> str:
    return " ".join(str(axis[0]) if len(axis) == 1 else f"({' '.join(map(str, axis))})" for axis in side)


@dataclass(frozen=True, slots=True)
class Layout:
    """Both sides of a rule's arrays, axis by axis.

    Attributes:
      source: axes of each source tensor.
      target: axes of each target array.
    """

    source: Side
    target: Side

    def __str__(self) -> str:
        return f"{_side_text(self.source)} -> {_side_text(self.target)}"

    @property
    def inverse(self) -> "Layout":
        return Layout(self.target, self.source)

    def without(self, atoms: frozenset[str]) -> "Layout":
        """The layout with some target dims taken out, as when layers are unrolled into names.

        >>> str(parse_layout("mlp embed -> embed layer mlp").without(frozenset({"layer"})))
        'mlp embed -> embed mlp'
        """
        kept = (tuple(term for term in axis if term not in atoms) for axis in self.target)
        return Layout(self.source, tuple(axis for axis in kept if axis))

    def spread(self, grids: Mapping[str, tuple[str, ...]]) -> "Layout":
        """The layout with each word of a grid replaced by the grid's dims, an axis each.

        >>> str(parse_layout("mlp embed -> embed local mlp").spread({"local": ("block", "inner")}))
        'mlp embed -> embed block inner mlp'
        """
        return Layout(_spread(self.source, grids), _spread(self.target, grids))


def _spread(side: Side, grids: Mapping[str, tuple[str, ...]]) -> Side:
    axes: list[Axis] = []
    for axis in side:
        word = axis[0]
        axes += [(atom,) for atom in grids[word]] if isinstance(word, str) and word in grids else [axis]
    return tuple(axes)


class LayoutError(ValueError):
    """The text of a layout cannot be read; a mistake in a family file."""


def _tokens(text: str) -> list[str]:
    tokens, at = [], 0
    stripped = text.rstrip()
    while at < len(stripped):
        match = _TOKEN.match(stripped, at)
        if match is None:
            raise LayoutError(f"layout {text!r}: cannot read {stripped[at:]!r}")
        tokens.append(match.group(1))
        at = match.end()
    return tokens


def _read_slice(opening: str, tokens: list[str], text: str) -> Slice:
    concat, part = opening[:-1].split(".")
    atoms = []
    while tokens and tokens[0] != ")":
        atoms.append(tokens.pop(0))
    if not tokens:
        raise LayoutError(f"layout {text!r}: '{opening}' is not closed")
    tokens.pop(0)
    return Slice(concat, part, tuple(atoms))


def _read_group(tokens: list[str], text: str) -> Axis:
    terms: list[Term] = []
    while tokens and tokens[0] != ")":
        token = tokens.pop(0)
        if token in ("(", "->"):
            raise LayoutError(f"layout {text!r}: {token!r} inside parentheses")
        terms.append(_read_slice(token, tokens, text) if token.endswith("(") else token)
    if not tokens:
        raise LayoutError(f"layout {text!r}: '(' is not closed")
    tokens.pop(0)
    return tuple(terms)


def _read_side(tokens: list[str], text: str) -> Side:
    axes: list[Axis] = []
    while tokens and tokens[0] != "->":
        token = tokens.pop(0)
        if token == ")":
            raise LayoutError(f"layout {text!r}: ')' without '('")
        if token == "(":
            axes.append(_read_group(tokens, text))
        else:
            axes.append((_read_slice(token, tokens, text) if token.endswith("(") else token,))
    return tuple(axes)


@cache
def parse_layout(text: str) -> Layout:
    """Reads a layout such as ``"expert embed (mlp part) -> expert layer embed mlp"``.

    Raises:
      LayoutError: the text does not have the form ``axes -> axes``, or a dim stands twice on one side.
    """
    tokens = _tokens(text)
    source = _read_side(tokens, text)
    if not tokens:
        raise LayoutError(f"layout {text!r}: no '->'")
    tokens.pop(0)
    target = _read_side(tokens, text)
    if tokens:
        raise LayoutError(f"layout {text!r}: more than one '->'")
    for side in (source, target):
        atoms = [atom for atom in side_atoms(side) if atom != "1"]
        if len(set(atoms)) != len(atoms):
            raise LayoutError(f"layout {text!r}: a dim stands twice on one side")
    return Layout(source, target)
