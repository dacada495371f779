"""Taking a constant factor out of scales again: the scales that, multiplied by it, were rounded to what is there."""

from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

_STEPS = (0, 1, -1, 2, -2)


def fold(scales: np.ndarray, factors: Sequence[float]) -> np.ndarray:
    """Scales times constant factors, each product rounded to float32, as a conversion does it."""
    for factor in factors:
        scales = np.multiply(scales, np.float32(factor), dtype=np.float32)
    return np.asarray(scales)


def unfold(folded: np.ndarray, factors: Sequence[float], known: np.ndarray | None = None) -> np.ndarray:
    """The inverse of ``fold``.

    Args:
      folded: positive, float32.
      factors: as for ``fold``.
      known: what the scales may have been, float32; taken wherever it folds to what is there.

    Returns:
      Scales, float32. Where several fold to the same number: the known one; else one that bfloat16 can hold; else the
      one nearest to the quotient. Where none does, the quotient.
    """
    quotient = folded
    for factor in reversed(factors):
        quotient = np.divide(quotient, np.float32(factor), dtype=np.float32)
    quotient = np.asarray(quotient)
    if not factors:
        return quotient
    found = np.array(quotient)
    for candidate in reversed(list(_candidates(quotient, known))):
        np.copyto(found, candidate, where=fold(candidate, factors) == folded)
    return found


def _candidates(quotient: np.ndarray, known: np.ndarray | None) -> Iterator[np.ndarray]:
    """From the most to the least likely."""
    if known is not None:
        yield known
    yield quotient.astype(ml_dtypes.bfloat16).astype(np.float32)
    # Neighbours of a positive float are neighbours as integers.
    bits = quotient.view(np.int32)
    yield from ((bits + step).view(np.float32) for step in _STEPS)
