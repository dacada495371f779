"""A finished repository goes to a bucket: whole files, the one that makes it a checkpoint last."""

import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from tensorferry.mappings.export.shards import INDEX_FILE
from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.mappings.words.text import bytes_text
from tensorferry.pipelines.output.replacing import refuse_to_replace
from tensorferry.pipelines.sinks.listing import MANIFEST_NAME
from tensorferry.pipelines.storage.buckets import bucket_store, split_bucket_url
from tensorferry.pipelines.storage.retries import PassingFault, retried

_PIECE_BYTES = 32 << 20
_AT_ONCE = 4
# What no second try mends.
_FINAL = ("PermissionDenied", "Unauthenticated", "NotFound", "InvalidPath", "NotSupported")
_FINAL_STATUS = re.compile(r"status code: 4(?!08|29)\d\d")


def replaced_objects(url: str, names: Collection[str], last: str, digest: str, overwrite: bool) -> list[str]:
    """What must go before an upload: nothing in an empty place or after an interrupted upload of the same files; with
    ``overwrite`` an earlier export, the files that make it one first and its manifest at the end.

    Args:
      url: ``gs://bucket/path``.
      names: the files that will be there.
      last: the one that makes it a checkpoint to readers.
      digest: of the plan that they are written by.
      overwrite: whether an export may be replaced.

    Raises:
      FerryError: something else is there, or it cannot be listed.
    """
    found = remote_sizes(url)
    manifest = read_object(url, MANIFEST_NAME) if MANIFEST_NAME in found else None
    own = not found or (manifest is not None and digest.encode() in manifest)
    if own and found.keys() <= set(names) and last not in found:
        return []
    refuse_to_replace(url, found, manifest, overwrite, "an empty place, or an unfinished upload of the same export")
    return sorted(found, key=lambda name: (name == MANIFEST_NAME, name not in (last, INDEX_FILE), name))


def read_object(url: str, name: str) -> bytes:
    """A small object below a URL."""
    bucket, prefix = split_bucket_url(url)
    return bytes(tried(url, lambda: bucket_store(bucket).get(prefix + name).bytes()))


def delete_objects(url: str, names: Iterable[str]) -> None:
    """Deletes objects below a URL, in order.

    Raises:
      FerryError: the store refuses.
    """
    bucket, prefix = split_bucket_url(url)
    for name in names:
        tried(url, lambda name=name: bucket_store(bucket).delete(prefix + name))


def upload(folder: Path, url: str, names: Iterable[str], last: str, say: Callable[[str], None]) -> None:
    """Copies files to a bucket; those that are there at full size already stay. The manifest goes first: by it the same
    command knows an interrupted upload for its own.

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
    for name in sorted(names, key=lambda name: (name == last, name != MANIFEST_NAME, name)):
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
    listed = tried(url, lambda: [one for batch in bucket_store(bucket).list(prefix or None) for one in batch])
    return {one["path"].removeprefix(prefix): one["size"] for one in listed}


def remote_size(url: str, name: str) -> int:
    """Bytes of an object below a URL.

    Raises:
      FerryError: it cannot be looked at.
    """
    bucket, prefix = split_bucket_url(url)
    return int(tried(url, lambda: bucket_store(bucket).head(prefix + name))["size"])


def _put(store: Any, key: str, file: Path, url: str) -> None:
    import obstore

    tried(url, lambda: obstore.put(store, key, file, chunk_size=_PIECE_BYTES, max_concurrency=_AT_ONCE))


def tried(url: str, call: Callable[[], Any]) -> Any:
    """Calls until the store answers.

    Raises:
      FerryError: it refuses, or does not answer.
    """
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
