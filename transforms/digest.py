"""Digests of array bytes: XXH3 with 128 bits, written ``xxh3-128:<hex>``."""

from collections.abc import Iterable

import numpy as np

PREFIX = "xxh3-128:"


class Digest:
    """A digest fed block by block; equal to the digest of the blocks' bytes in one piece."""

    def __init__(self) -> None:
        import xxhash

        self._state = xxhash.xxh3_128()

    def update(self, array: np.ndarray) -> None:
        """Adds the C-order bytes of a contiguous array of any dtype.

        Raises:
          ValueError: the array is not C-contiguous.
        """
        if not array.flags.c_contiguous:
            raise ValueError(f"only C-contiguous arrays have a digest; found strides {array.strides}")
        self._state.update(array.reshape(-1).view(np.uint8).data)

    def text(self) -> str:
        """The digest of everything so far."""
        return PREFIX + self._state.hexdigest()


def digest(array: np.ndarray) -> str:
    """``xxh3-128:<32 hex digits>`` of the C-order bytes; dtype and shape do not enter.

    Raises:
      ValueError: the array is not C-contiguous.
    """
    whole = Digest()
    whole.update(array)
    return whole.text()


def combine(digests: Iterable[str]) -> str:
    """One digest of many, e.g. of an array's chunks; their order matters.

    Raises:
      ValueError: an entry is not a digest of this module.
    """
    import xxhash

    state = xxhash.xxh3_128()
    for text in digests:
        raw = bytes.fromhex(text.removeprefix(PREFIX)) if text.startswith(PREFIX) else b""
        if len(raw) != 16:
            raise ValueError(f"not a digest: {text!r}; expected {PREFIX}<32 hex digits>")
        state.update(raw)
    return PREFIX + state.hexdigest()
