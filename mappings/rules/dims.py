"""Dims: what a word of a layout or of a name stands for."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Index:
    """A dim whose positions have labels, so that it may enumerate tensors by name.

    Attributes:
      labels: one per position: Hugging Face layer numbers ``3 … 60``, or part names ``("wi_0", "wi_1")``.
    """

    labels: tuple[int | str, ...]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True)
class Grid:
    """A name's index that is spread over several dims; its label is the sum of theirs.

    ``Grid("block", "local")`` with ``block`` labelled 0, 4, 8 and ``local`` labelled 0, 1, 2 names the layers
    0, 1, 2, 4, 5, 6, 8, 9, 10: three layers of each cycle of four, stacked on two axes.

    Attributes:
      atoms: the dims, outermost first; each an Index of ints.
    """

    atoms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Concat:
    """An axis made of parts of different sizes, one after the other.

    Attributes:
      parts: part name to length in elements, in storage order.
    """

    parts: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, **parts: int) -> "Concat":
        return cls(tuple(parts.items()))

    @property
    def length(self) -> int:
        return sum(length for _, length in self.parts)

    def span(self, part: str) -> tuple[int, int]:
        """Offset and length of a part, in elements."""
        offset = 0
        for name, length in self.parts:
            if name == part:
                return offset, length
            offset += length
        raise KeyError(f"no part {part!r} among {[name for name, _ in self.parts]}")


Dim = int | Index | Grid | Concat
DimSpec = int | range | Sequence[int | str] | Index | Grid | Concat


class Dims:
    """The dims of one family at one size: word to size, index set, grid or concatenation."""

    def __init__(self, specs: Mapping[str, DimSpec]) -> None:
        self._dims: dict[str, Dim] = {word: _dim(spec) for word, spec in specs.items()}

    def __contains__(self, word: str) -> bool:
        return word in self._dims

    def __getitem__(self, word: str) -> Dim:
        return self._dims[word]

    def items(self) -> list[tuple[str, Dim]]:
        return list(self._dims.items())

    def size(self, atom: str) -> int:
        """Length of a dim in elements; the word ``1`` is a dim of length 1."""
        if atom == "1":
            return 1
        dim = self._dims[atom]
        if isinstance(dim, int):
            return dim
        if isinstance(dim, Index):
            return len(dim)
        raise TypeError(f"{atom!r} is a {type(dim).__name__}, which has no single size")

    def concat(self, word: str) -> Concat:
        dim = self._dims[word]
        if not isinstance(dim, Concat):
            raise TypeError(f"{word!r} is not a concatenation")
        return dim

    def atoms_of(self, word: str) -> tuple[str, ...]:
        """The dims that an index word of a name stands for."""
        dim = self._dims[word]
        return dim.atoms if isinstance(dim, Grid) else (word,)

    def label(self, word: str, at: Mapping[str, int]) -> int | str:
        """The label of an index word at given positions of its dims."""
        dim = self._dims[word]
        if isinstance(dim, Index):
            return dim.labels[at[word]]
        labels = [self._labels(atom)[at[atom]] for atom in self.atoms_of(word)]
        return labels[0] if len(labels) == 1 else sum(int(label) for label in labels)

    def position(self, word: str, at: Mapping[str, int]) -> int:
        """The row-major position of an index word, counted from 0."""
        position = 0
        for atom in self.atoms_of(word):
            position = position * self.size(atom) + at[atom]
        return position

    def positions(self, atoms: Sequence[str]) -> list[dict[str, int]]:
        """Every combination of positions of some dims, row-major."""
        grids = itertools.product(*(range(self.size(atom)) for atom in atoms))
        return [dict(zip(atoms, at, strict=True)) for at in grids]

    def volume(self, atoms: Sequence[str]) -> int:
        return math.prod(self.size(atom) for atom in atoms)

    def _labels(self, atom: str) -> tuple[int | str, ...]:
        dim = self._dims[atom]
        if not isinstance(dim, Index):
            raise TypeError(f"{atom!r} enumerates no tensors: it has no labels")
        return dim.labels


def _dim(spec: DimSpec) -> Dim:
    if isinstance(spec, int | Index | Grid | Concat):
        return spec
    return Index(tuple(spec))
