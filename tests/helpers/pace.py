"""How slow this machine is at the moment: limits of time are meant for an ordinary one that does nothing else."""

import time
from collections.abc import Callable

_LOOPS = 1_000_000
# What the loop took on machines like those whose figures the tests' limits are made from.
_ORDINARY_SECONDS = 0.06


def pace(clock: Callable[[], float] = time.process_time) -> float:
    """How many times as long as usual plain Python takes; 1 on a faster machine too.

    Args:
      clock: ``time.process_time`` for limits of CPU time, ``time.perf_counter`` for those of waiting as well.
    """
    started, total = clock(), 0
    for number in range(_LOOPS):
        total += number * number % 7
    return max(1.0, (clock() - started) / _ORDINARY_SECONDS)
