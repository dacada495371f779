"""A finished repository goes to a bucket: whole files, the one that makes it a checkpoint last."""

import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from mappings.problems import FerryError, Problem
from mappings.text import bytes_text
from pipelines.buckets import bucket_store, split_bucket_url
from pipelines.retries import PassingFault, retried

_PIECE_BYTES = 32 << 20
_AT_ONCE = 4
_SHOWN = 5
# What no second try mends.
_FINAL = ("PermissionDenied", "Unauthenticated", "NotFound", "InvalidPath", "NotSupported")
_FINAL_STATUS = re.compile(r"status code: 4(?!08|29)\d\d")


def refuse_occupied(url: str, names: Collection[str], last: str) -> None:
    """Refuses a place that holds anything but what an interrupted upload of the same files left.

    Args:
      url: ``gs://bucket/path``.
      names: the files that will be there.
      last: the one that makes it a checkpoint to readers.

    Raises:
      FerryError: says what is there.
    """
    found = remote_sizes(url)
    strangers = sorted(found.keys() - set(names)) or ([last] if last in found else [])
    if strangers:
        shown = ", ".join(strangers[:_SHOWN]) + (" …" if len(strangers) > _SHOWN else "")
        expected = "an empty place, or an unfinished upload of the same export"
        raise FerryError(str(Problem(url, expected, shown, "Nothing is ever overwritten; choose another output.")))


def upload(folder: Path, url: str, names: Iterable[str], last: str, say: Callable[[str], None]) -> None:
    """Copies files to a bucket; those that are there at full size already stay.

    Args:
      folder: where they lie.
      url: ``gs://bucket/path``.
      names: all of them.
      last: the one to copy at the end.
      say: shows the user a line.

    Raises:
      FerryError: the store refuses; the same command goes on.
    """
    bucket, prefix = split_bucket_url(url)
    store, there = bucket_store(bucket), remote_sizes(url)
    for name in sorted(names, key=lambda name: (name == last, name)):
        nbytes = (folder / name).stat().st_size
        if there.get(name) != nbytes or name.endswith(".json"):
            _put(store, prefix + name, folder / name, url)
            say(f"uploaded {name}, {bytes_text(nbytes)}")


def remote_sizes(url: str) -> dict[str, int]:
    """Every object below a URL: the rest of its name, and its size.

    Raises:
      FerryError: it cannot be listed.
    """
    bucket, prefix = split_bucket_url(url)
    listed = _tried(url, lambda: [one for batch in bucket_store(bucket).list(prefix or None) for one in batch])
    return {one["path"].removeprefix(prefix): one["size"] for one in listed}


def _put(store: Any, key: str, file: Path, url: str) -> None:
    import obstore

    _tried(url, lambda: obstore.put(store, key, file, chunk_size=_PIECE_BYTES, max_concurrency=_AT_ONCE))


def _tried(url: str, call: Callable[[], Any]) -> Any:
    from obstore.exceptions import BaseError

    def once() -> Any:
        try:
            return call()
        except BaseError as error:
            kind, found = type(error).__name__, " ".join(str(error).split())[:200]
            if kind.startswith(_FINAL) or _FINAL_STATUS.search(found):
                raise _refused(url, found) from error
            raise PassingFault(found) from error

    try:
        return retried(once)
    except PassingFault as fault:
        raise _refused(url, fault.found) from fault


def _refused(url: str, found: str) -> FerryError:
    fix = "Repair access, then run the same command again: what is uploaded stays."
    return FerryError(str(Problem(url, "a bucket that can be listed and written", found, fix)))
