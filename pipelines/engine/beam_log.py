"""Beam's messages: kept from the terminal, and boiled down to one line."""

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BEAM_ERROR = re.compile(r"^(?:[\w.]*\.)?(\w+): (.+?)(?: \[while running '([^']+)'\])?$")


def last_words(error: BaseException) -> str:
    """The one line of Beam's error that says what happened: its text may be a whole traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    matches = [match for line in lines if (match := _BEAM_ERROR.match(line))]
    if len(lines) > 1 and matches:
        return f"{matches[-1][1]}: {matches[-1][2]}"
    return re.sub(r" \[while running '[^']+'\]$", "", lines[-1])


@contextmanager
def logs_to(path: str) -> Iterator[None]:
    """Sends warnings and log messages to a file, and nothing to the terminal, inside the `with` block."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    handlers = root.handlers[:]
    to_file = logging.FileHandler(path, delay=True)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.handlers[:] = [to_file]
    thread_hook = threading.excepthook
    # Beam's own threads die noisily when a worker does.
    threading.excepthook = lambda args: root.warning("a thread died: %r", args.exc_value)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        threading.excepthook = thread_hook
        root.handlers[:] = handlers
        to_file.close()
