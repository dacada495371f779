"""Typed PRNG keys: which implementation a stored key belongs to, and whether the reader can take it."""

from dataclasses import dataclass
from typing import Literal

from tensorferry.mappings.tunix.step_tree import Leaf

RngImpl = Literal["unsafe_rbg", "threefry2x32", "keep"]

THREEFRY = "threefry2x32"
_THREEFRY_WORDS, _RBG_WORDS = 2, 4


@dataclass(frozen=True, slots=True)
class KeyDecision:
    """What happens to one key.

    Attributes:
      carried: the key goes to the new layout.
      impl: implementation to record with it; empty writes plain uint32 words.
      told: why it is dropped, or what had to be guessed; empty when there is nothing to say.
    """

    carried: bool
    impl: str = ""
    told: str = ""


def key_decision(leaf: Leaf, wanted: RngImpl) -> KeyDecision:
    """Decides about a stored key for a reader that runs one implementation.

    A key of another implementation makes a full resume fail with an opaque error; a missing one is drawn
    fresh.

    Args:
      leaf: the key data, uint32, shape ``[…, words]``.
      wanted: the reader's implementation, or ``keep``.
    """
    impl, guess = _implementation(leaf)
    if wanted in ("keep", impl):
        return KeyDecision(True, impl, guess)
    if not impl and wanted == "unsafe_rbg" and _words(leaf) == _RBG_WORDS:
        return KeyDecision(True, "", guess)
    return KeyDecision(False, "", f"a {impl or 'untyped'} key, and the reader runs {wanted}; its count is kept")


def _words(leaf: Leaf) -> int:
    return leaf.shape[-1] if leaf.shape else 0


def _implementation(leaf: Leaf) -> tuple[str, str]:
    if leaf.prng_impl:
        return leaf.prng_impl, ""
    if _words(leaf) == _THREEFRY_WORDS:
        return THREEFRY, f"unmarked PRNG keys of two words are taken for {THREEFRY}"
    return "", "unmarked PRNG keys of four words may be rbg or unsafe_rbg: written as plain uint32"
