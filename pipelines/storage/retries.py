"""Trying again: waits that grow, for faults that pass by themselves."""

import random
from collections.abc import Callable
from time import sleep
from typing import TypeVar

T = TypeVar("T")

_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 60.0
# About a minute and a half for a store that is down; a rate limit counts in windows of five minutes.
TRIES = 9
RATE_LIMIT_TRIES = 14


class PassingFault(Exception):
    """A fault that may be gone at the next try.

    Attributes:
      found: what was seen, for the sentence if it does not go away.
      rate_limited: the store asked for fewer requests.
    """

    def __init__(self, found: str, rate_limited: bool = False) -> None:
        self.found = found
        self.rate_limited = rate_limited
        super().__init__(found)


def retried(call: Callable[[], T], most_tries: int | None = None) -> T:
    """Calls until it succeeds, with growing waits between the tries.

    Args:
      call: raises `PassingFault` to be called again; whatever else it raises goes through.
      most_tries: how often; by default `TRIES`, or `RATE_LIMIT_TRIES`.

    Raises:
      PassingFault: the last one, when all tries are used up.
    """
    tries = 0
    while True:
        tries += 1
        try:
            return call()
        except PassingFault as fault:
            if tries >= (most_tries or (RATE_LIMIT_TRIES if fault.rate_limited else TRIES)):
                raise
            sleep(_wait_seconds(tries))


def _wait_seconds(tries: int) -> float:
    """Doubles with each try; random, so that many workers do not come back at the same instant."""
    longest = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2 ** (tries - 1))
    return longest * random.uniform(0.5, 1.0)
