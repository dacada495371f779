"""A target array: where it sits in the tree, what it holds, and the grid of chunks it is stored in."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from tensorferry.transforms.dtypes import numpy_dtype


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of the target checkpoint.

    Attributes:
      path: tree path below the item, e.g. ``("params", "params", "decoder", "decoder_norm", "scale")``.
      dtype: dtype name as in ``tensorferry.transforms.dtypes``.
      shape: lengths of the axes, in elements; ``()`` for a scalar.
      chunk: lengths of one storage chunk (one object), which is exactly what one part writes at once.
      inner: lengths of one inner chunk, which readers may fetch alone; divides ``chunk`` on every axis.

    Raises:
      ValueError: the ranks differ, or ``inner`` does not divide ``chunk``.
    """

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    inner: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.path or not all(self.path):
            raise ValueError(f"array path {self.path!r} has no name or an empty one")
        if not len(self.shape) == len(self.chunk) == len(self.inner):
            raise ValueError(f"{self.key}: ranks of shape, chunk and inner differ: {self.grids_text}")
        if any(length < 1 for length in self.chunk + self.inner) or any(length < 0 for length in self.shape):
            raise ValueError(f"{self.key}: lengths must be positive: {self.grids_text}")
        if any(outer % inner for outer, inner in zip(self.chunk, self.inner, strict=True)):
            raise ValueError(f"{self.key}: inner must divide chunk on every axis: {self.grids_text}")

    @property
    def key(self) -> str:
        """The array's directory name in the store, e.g. ``params.params.decoder.decoder_norm.scale``."""
        return ".".join(self.path)

    @property
    def grids_text(self) -> str:
        """Shape, chunk and inner chunk, for messages."""
        return f"shape {list(self.shape)}, chunk {list(self.chunk)}, inner {list(self.inner)}"

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, one byte for a sub-byte dtype (that is how zarr stores them)."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one whole chunk."""
        return math.prod(self.chunk) * numpy_dtype(self.dtype).itemsize

    @property
    def grid(self) -> tuple[int, ...]:
        """How many chunks along each axis; the last one of an axis may be ragged."""
        return tuple(-(-length // chunk) for length, chunk in zip(self.shape, self.chunk, strict=True))

    def indices(self) -> Iterator[tuple[int, ...]]:
        """Every index of the grid in C order; one empty index for a scalar."""
        return itertools.product(*(range(count) for count in self.grid))

    def box(self, index: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """The (start, stop) of a chunk along each axis, in elements, clipped to the shape.

        Raises:
          IndexError: the index is outside the grid.
        """
        box = []
        for at, chunk, length in zip(index, self.chunk, self.shape, strict=False):
            start = at * chunk
            if not 0 <= start < length:
                break
            box.append((start, min(start + chunk, length)))
        if not len(box) == len(index) == len(self.shape):
            raise IndexError(f"{self.key}: grid index {list(index)} is outside the grid {list(self.grid)}")
        return tuple(box)

    def box_shape(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Lengths of the chunk's box."""
        return tuple(stop - start for start, stop in self.box(index))

    def chunk_key(self, index: tuple[int, ...], store_format: str) -> str:
        """The store key of one chunk: ``KEY/c/0/1`` in zarr3 and ocdbt, ``KEY/0.1`` in zarr2."""
        if store_format == "zarr2":
            return f"{self.key}/{'.'.join(map(str, index)) or '0'}"
        return "/".join((self.key, "c", *map(str, index)))

    def chunk_keys(self, store_format: str) -> Iterator[str]:
        """Store keys of every chunk, in C order."""
        return (self.chunk_key(index, store_format) for index in self.indices())
