"""JSON objects of a checkpoint, read so that every fault is a sentence and never a traceback."""

import json
import re
from typing import Any

from tensorferry.mappings.words.problems import Problem

LFS_POINTER = b"version https://git-lfs"


def parse_object(
    raw: bytes, file: str, what: str, unique_keys: bool = True
) -> tuple[dict[str, Any] | None, list[Problem]]:
    """A JSON object, or None with the problems that kept it from being one.

    Args:
      raw: the bytes, UTF-8.
      file: the file they come from, for the sentences.
      what: what the object is, for the sentences: ``header``, ``index``, ``config``.
      unique_keys: a key that stands twice in an object (at any depth) is a problem; the last one is kept.
    """
    repeated: dict[str, None] = {}

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            repeated.update(_repeats(items))
        return result

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs if unique_keys else None)
    except (ValueError, RecursionError) as error:
        return None, [_not_json(raw, file, what, error)]
    if not isinstance(value, dict):
        found = f"a JSON {type(value).__name__}: {shown(value)}"
        return None, [Problem(file, f"the {what} as a JSON object", found, "Fetch this file again.")]
    return value, [_repeated(file, what, key) for key in repeated]


def shown(value: object, limit: int = 80) -> str:
    """A value as text that any terminal can print, cut to ``limit`` characters."""
    text = value if isinstance(value, str) else _safe_repr(value)
    if len(text) > limit:
        text = f"{text[: limit - 1]}…"
    return text if is_text(text) and text.isprintable() else ascii(text)


def is_text(name: str) -> bool:
    """Whether a string can be encoded as UTF-8: JSON can smuggle in halves of surrogate pairs."""
    if name.isascii():
        return True
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def lfs_problem(raw: bytes, file: str) -> Problem | None:
    """The problem of a file that holds a Git-LFS pointer in place of its content."""
    if not raw.startswith(LFS_POINTER):
        return None
    size = re.search(rb"^size (\d{1,20})$", raw[:1024], re.MULTILINE)
    content = f" for {size[1].decode()} bytes that were not fetched" if size else ""
    fix = "Run `git lfs pull` there, or download the file."
    return Problem(file, "the file itself", f"a Git-LFS pointer{content}", fix)


def _repeats(items: list[tuple[str, Any]]) -> dict[str, None]:
    seen: set[str] = set()
    return {key: None for key, _ in items if key in seen or seen.add(key)}


def _repeated(file: str, what: str, key: str) -> Problem:
    return Problem(
        shown(key),
        f"one entry in the {what}",
        "the same key more than once",
        "Write the file again with unique names.",
        file,
    )


def _not_json(raw: bytes, file: str, what: str, error: Exception) -> Problem:
    if pointer := lfs_problem(raw, file):
        return pointer
    if not raw.strip():
        return Problem(file, f"the {what} as JSON", "an empty file", "Fetch this file again.")
    reason = "nested too deeply" if isinstance(error, RecursionError) else _one_line(error)
    return Problem(file, f"the {what} as JSON", f"text that is not JSON ({reason})", "Fetch or correct this file.")


def _one_line(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start}"
    return shown(str(error))


def _safe_repr(value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__}"
