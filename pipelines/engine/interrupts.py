"""Ctrl-C without an exception: raised in the middle of an import, one may crash the interpreter or be swallowed.

Outside of a run the process ends at once: as after any other kill, the same command goes on. During one, the run is
asked to stop; a second Ctrl-C ends the process.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

_watchers: list[threading.Event] = []
_sentence = ["Interrupted."]


def install() -> None:
    """Takes over SIGINT; for the program alone, not for those who import it."""
    signal.signal(signal.SIGINT, _handle)


def say(sentence: str) -> None:
    """What is said when the process ends."""
    _sentence[0] = sentence


@contextmanager
def watched() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, instead of ending the process, until the ``with`` block ends."""
    asked = threading.Event()
    _watchers.append(asked)
    try:
        yield asked
    finally:
        _watchers.remove(asked)


def end_now() -> NoReturn:
    """Says the sentence and ends the process with exit code 1."""
    os.write(2, f"tensorferry: {_sentence[0]}\n".encode())
    os._exit(1)


def _handle(*_: Any) -> None:
    if not _watchers or _watchers[-1].is_set():
        end_now()
    _watchers[-1].set()
