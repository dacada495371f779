"""Orbax's own messages: what it warns of is meant to be so, and would only puzzle the user."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_orbax() -> Iterator[None]:
    """Keeps warnings of Orbax and JAX from the terminal inside the `with` block; errors still show.

    Orbax warns that there is no jax.Array among our type handlers, that there are no per-process OCDBT databases to
    merge, and that an item is not a step.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
