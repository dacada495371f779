"""What a source holds: stored tensors (bytes in a file) and the logical tensors that mappings see."""

from dataclasses import dataclass, field
from typing import Any

from tensorferry.transforms.dtypes import stored_bytes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A contiguous, C-order run of bytes in a file of the source.

    Attributes:
      name: the tensor's name in the checkpoint.
      dtype: dtype name as in ``tensorferry.transforms.dtypes`` (``bfloat16``, ``float8_e4m3fn``, …).
      shape: logical shape in elements, as the header states it.
      file: path relative to the source's root.
      offset: absolute byte offset of the first element in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A tensor as mappings see it: values of a shape and dtype, and the recipe that yields them.

    Attributes:
      name: the name that rules match.
      shape: logical shape in elements.
      dtype: dtype of the values before any cast (``float32`` for a dequantised tensor).
      stored: role to stored tensor; a plain tensor has the single role ``values``.
      scheme: name of the quantisation scheme in the registry of `schemes`; ``plain`` reads values as stored.
      params: the scheme's parameters (block size, group size, …), plain JSON values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored: dict[str, StoredTensor]
    scheme: str = "plain"
    params: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def plain(cls, stored: StoredTensor) -> "LogicalTensor":
        return cls(stored.name, stored.shape, stored.dtype, {"values": stored})

    @property
    def nbytes(self) -> int:
        """Bytes this tensor occupies in the source, companions included."""
        return sum(tensor.nbytes for tensor in self.stored.values())
