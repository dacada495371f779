"""An object of Cloud Storage that is written front to back: a resumable upload by google-cloud-storage.

TensorStore writes whole objects only. The client library tries each piece again on 429, 5xx and broken connections, and
compares the CRC32C of the whole with the store's at the end; an upload that is lost all the same is begun anew by
`whole_again`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.sinks.sink import bucket_refusal, store_error
from tensorferry.pipelines.storage.buckets import emulator_address
from tensorferry.pipelines.storage.remote_faults import is_passing, status_words
from tensorferry.pipelines.storage.retries import PassingFault, retried

T = TypeVar("T")

_RUN_BYTES = 1 << 20
_WHOLE_TRIES = 4
_CONNECTIONS = 64
_FIRST_WAIT_SECONDS = 0.5
# What the store answers when it knows nothing of an upload that has begun.
_LOST = (404, 410)
_EXPECTED = "an object that can be written"


class BucketStream:
    """One object; see `tensorferry.pipelines.storage.streams.Stream`.

    Attributes:
      nbytes: bytes put so far.
    """

    def __init__(self, url: str, piece_bytes: int) -> None:
        """Begins an upload; nothing is sent yet.

        Args:
          url: ``gs://bucket/name``.
          piece_bytes: what is sent at once; a multiple of 256 KiB.

        Raises:
          FerryError: no client library, or no credentials.
        """
        bucket, _, name = url.removeprefix("gs://").partition("/")
        self.nbytes, self._url = 0, url
        self._room, self._taken = np.empty(0, np.uint8), 0
        with self._told():
            self._writer = _writer(bucket, name, piece_bytes)

    def take(self, nbytes: int) -> np.ndarray:
        """The place of the object's next bytes, to be filled before the next call."""
        self._put_taken()
        if self._room.size < nbytes:
            self._room = np.empty(nbytes, np.uint8)
        self.nbytes += nbytes
        self._taken = nbytes
        return self._room[:nbytes]

    def append(self, octets: bytes | memoryview) -> None:
        """Puts the next bytes."""
        self._put_taken()
        self._put(memoryview(octets))
        self.nbytes += len(octets)

    def close(self) -> None:
        """Makes the object, whole."""
        self._put_taken()
        with self._told():
            self._writer.close()

    def abort(self) -> None:
        """Forgets the upload, and tells the store if it listens; the store forgets it after a week by itself."""
        with suppress(Exception):
            self._writer.terminate()

    def _put_taken(self) -> None:
        taken, self._taken = self._taken, 0
        self._put(self._room[:taken].data)

    def _put(self, octets: memoryview) -> None:
        # In runs, for the library joins what it has not sent yet.
        for start in range(0, len(octets), _RUN_BYTES):
            with self._told():
                self._writer.write(octets[start : start + _RUN_BYTES])

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turns the library's errors into sentences and passing faults."""
        try:
            yield
        except (FerryError, PassingFault):
            raise
        except Exception as error:
            raise _fault(self._url, error) from error


def require_client(url: str) -> None:
    """Refuses to begin what could not be written.

    Raises:
      FerryError: the client library is not installed.
    """
    if _is_missing("google.cloud.storage"):
        fix = "pip install 'tensorferry[gcp]'"
        raise FerryError(f"{url}: writing large objects needs google-cloud-storage, and it is not installed: {fix}.")


def whole_again(name: str, call: Callable[[], T]) -> T:
    """Calls again, from its beginning, what lost an upload.

    Raises:
      FerryError: it was lost each time.
    """
    try:
        return retried(call, _WHOLE_TRIES)
    except PassingFault as fault:
        found = RuntimeError(f"{fault.found}, again and again")
        raise store_error(name, "an upload that comes to its end", found) from fault


def _is_missing(module: str) -> bool:
    try:
        return find_spec(module) is None
    except ModuleNotFoundError:
        return True


def _writer(bucket: str, name: str, piece_bytes: int) -> Any:
    require_client(f"gs://{bucket}/{name}")
    from google.cloud.storage.fileio import BlobWriter
    from google.cloud.storage.retry import DEFAULT_RETRY

    class Upload(BlobWriter):
        def __del__(self) -> None:
            """Python closes a file that is let go of, and closing ends the upload: half an object."""

    blob = _client(emulator_address(), os.getpid()).bucket(bucket).blob(name)
    retry = DEFAULT_RETRY.with_delay(initial=_FIRST_WAIT_SECONDS)
    return Upload(blob, chunk_size=piece_bytes, retry=retry, checksum="auto")


@cache
def _client(emulator: str, _process: int) -> Any:
    """The one client of this process, for all threads: credentials from the usual places, none for an emulator."""
    from google.cloud import storage
    from requests.adapters import HTTPAdapter

    if emulator:
        from google.auth.credentials import AnonymousCredentials

        options = {"api_endpoint": emulator}
        client = storage.Client(project=None, credentials=AnonymousCredentials(), client_options=options)
    else:
        client = storage.Client(project=None)
    # More threads than the ten connections that are kept otherwise.
    client._http.mount("https://", HTTPAdapter(pool_maxsize=_CONNECTIONS))
    return client


def _fault(url: str, error: Exception) -> Exception:
    """What an error of the library is to us; whatever it cannot foresee stays as it is."""
    from google.api_core.exceptions import RetryError
    from google.auth.exceptions import DefaultCredentialsError, RefreshError, TransportError
    from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
    from requests.exceptions import RequestException

    if isinstance(error, RetryError) and isinstance(error.cause, Exception):
        return _fault(url, error.cause)
    if isinstance(error, DataCorruption):
        return PassingFault("another CRC32C than that of what was sent")
    if isinstance(error, DefaultCredentialsError | RefreshError):
        return bucket_refusal(url, _EXPECTED, 401)
    if isinstance(error, InvalidResponse):
        status = error.response.status_code
        has_begun = error.response.request.method == "PUT"
        if is_passing(status) or (has_begun and status in _LOST):
            return PassingFault(status_words(status), rate_limited=status == 429)
        return bucket_refusal(url, _EXPECTED, status)
    # A ValueError: the store has kept a part of a piece, which the library does not send again.
    if isinstance(error, RequestException | TransportError | OSError | ValueError):
        return PassingFault(status_words(None))
    return error
