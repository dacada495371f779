"""Where TensorStore keeps its keys: a directory or a bucket, and how hard it may work."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from tensorferry.mappings.words.problems import FerryError, Problem

if TYPE_CHECKING:
    import tensorstore as ts

# One copy thread: TensorStore otherwise encodes inner chunks in several malloc arenas at once, and the freed
# buffers stay in each (measured with two 64 MiB writers: 300 MiB resident instead of 128, and no faster).
_COPY_THREADS = 1
# How TensorStore talks to buckets: JSON over HTTP, or gRPC where the bucket and the network have it.
GCS_DRIVER = "TENSORFERRY_GCS_DRIVER"
GCS_GRPC = "gcs_grpc"
_GCS_DRIVERS = ("gcs", GCS_GRPC)
# Where gRPC goes instead of Google's own address: a private endpoint, or a server of the tests.
GCS_GRPC_ENDPOINT = "TENSORFERRY_GCS_GRPC_ENDPOINT"


def is_local(url: str) -> bool:
    """Whether the url is a path on this machine."""
    return "://" not in url


def kvstore(url: str) -> dict[str, Any]:
    """The TensorStore key-value store spec of a directory url; its ``path`` ends in a slash.

    Raises:
      FerryError: the scheme is not one we write to, or the variable `GCS_DRIVER` names no driver.
    """
    if is_local(url):
        return {"driver": "file", "path": os.path.abspath(url).rstrip("/") + "/"}
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.strip("/").partition("/")
    if scheme == "gs" and bucket:
        return {**_gcs_driver(), "bucket": bucket, "path": f"{path}/" if path else ""}
    raise FerryError(str(Problem(url, "a local path or gs://bucket/path", url, "Give one of those.")))


def _gcs_driver() -> dict[str, str]:
    driver = os.environ.get(GCS_DRIVER) or _GCS_DRIVERS[0]
    if driver not in _GCS_DRIVERS:
        raise FerryError(str(Problem(GCS_DRIVER, " or ".join(_GCS_DRIVERS), driver, "Correct or unset it.")))
    endpoint = os.environ.get(GCS_GRPC_ENDPOINT)
    return {"driver": driver, "endpoint": endpoint} if driver == GCS_GRPC and endpoint else {"driver": driver}


def worker_environment() -> dict[str, str]:
    """Variables of this process that workers elsewhere must have too."""
    return {name: os.environ[name] for name in (GCS_DRIVER, GCS_GRPC_ENDPOINT) if os.environ.get(name)}


@contextmanager
def gcs_by_grpc(wanted: bool) -> Iterator[None]:
    """Lets TensorStore talk to buckets by gRPC, here and in workers, until the ``with`` block ends."""
    before = os.environ.get(GCS_DRIVER)
    if wanted:
        os.environ[GCS_DRIVER] = GCS_GRPC
    try:
        yield
    finally:
        if wanted:
            os.environ.pop(GCS_DRIVER)
            os.environ.update({GCS_DRIVER: before} if before is not None else {})


def below(store: dict[str, Any], *names: str) -> dict[str, Any]:
    """The same store, some directories further down."""
    return {**store, "path": store["path"] + "".join(f"{name}/" for name in names)}


def new_context() -> "ts.Context":
    """A context that caches nothing, so that a written chunk leaves memory when its write returns."""
    import tensorstore as ts

    # No fsync per chunk: it halves the rate, and the commit syncs the whole tree once (see run_dir).
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": _COPY_THREADS},
            "file_io_sync": False,
        }
    )


@cache
def worker_context() -> "ts.Context":
    """The one context of a worker process: its limits hold for all threads together."""
    return new_context()


def store_words(error: BaseException, most: int = 300) -> str:
    """What TensorStore says went wrong, without its specs: how it begins and how it ends, where the cause is.

    >>> store_words(ValueError("RESOURCE_EXHAUSTED: /a: No space left on device [os_error_code='28'] [a='b']"))
    'RESOURCE_EXHAUSTED: /a: No space left on device'
    """
    from tensorferry.pipelines.storage.relay import spoken

    words = re.sub(r"( \[\w+='.*\])+$", "", " ".join(spoken(error).split()))
    return words if len(words) <= most else f"{words[: most // 3]} … {words[-(most - most // 3) :]}"
