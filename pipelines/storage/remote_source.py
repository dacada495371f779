"""Byte ranges of files on object stores and web servers, read through obstore and retried until they are whole."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, ClassVar, TypeVar

from tensorferry.mappings.words.problems import Problem
from tensorferry.pipelines.storage.buckets import bucket_store, split_bucket_url
from tensorferry.pipelines.storage.byte_source import MissingFileError, SourceError, is_inside, outside, short_read
from tensorferry.pipelines.storage.remote_faults import final_fault, given_up, is_passing, no_ranges, passing, status_of
from tensorferry.pipelines.storage.retries import PassingFault, retried

T = TypeVar("T")

# Larger single reads are slower in every client, smaller ones pay the latency more often.
PIECE_BYTES = 8 << 20
_THREADS = 16


@dataclass(frozen=True)
class Place:
    """Where a file lies for obstore.

    Attributes:
      store: an obstore store.
      key: the file's path in it.
    """

    store: Any
    key: str


class RangedSource(ABC):
    """What sources over HTTP share: whole ranges, with retries, and sentences. Holds no client and no secret."""

    refused: ClassVar[dict[int, str]]

    @property
    @abstractmethod
    def url(self) -> str:
        """The root, as `open_source` takes it."""

    @abstractmethod
    def list(self) -> dict[str, int]:
        """Files directly in the root: relative path to size in bytes."""

    @abstractmethod
    def folders(self) -> tuple[str, ...]:
        """Names of the folders directly in the root."""

    @abstractmethod
    def place(self, path: str) -> Place:
        """Where a file is to be read."""

    def revision(self) -> str:
        """What changes when the content does, where the store can tell; else empty."""
        return ""

    def etags(self) -> dict[str, str]:
        """What names the content of files; empty where the store tells nothing that lasts."""
        return {}

    def is_listed(self, path: str) -> bool | None:
        """Whether a file is there, where the source knows all its files without being asked; else None."""
        return None

    def has_expired(self, path: str, status: int | None) -> bool:
        """Whether a refusal comes from an address that has to be looked up anew; then the next try does."""
        return False

    def size(self, path: str) -> int:
        import obstore

        return self.request(path, lambda place: obstore.head(place.store, place.key)["size"])

    def read(self, path: str, start: int, length: int) -> bytes:
        if length <= PIECE_BYTES:
            return bytes(self._range(path, start, length)) if length else b""
        buffer = bytearray(length)
        self.readinto(path, start, memoryview(buffer))
        return bytes(buffer)

    def readinto(self, path: str, start: int, buffer: memoryview) -> None:
        if not buffer.nbytes:
            return
        octets = buffer.cast("B")

        def fill(at: int) -> None:
            piece = octets[at : at + PIECE_BYTES]
            piece[:] = self._range(path, start + at, len(piece))

        for _ in at_once(fill, range(0, len(octets), PIECE_BYTES)):
            pass

    def _range(self, path: str, start: int, length: int) -> memoryview:
        """One range, whole."""
        import obstore

        def get(place: Place) -> memoryview:
            data = memoryview(obstore.get_range(place.store, place.key, start=start, length=length))
            if len(data) == length:
                return data
            if _ends_before(place, start + length):
                raise short_read(path, start, length, len(data))
            raise PassingFault(f"only {len(data)} of {length} bytes from byte {start} on")

        return self.request(path, get)

    def request(self, path: str, call: Callable[[Place], T]) -> T:
        """Does a request to a file's place until it succeeds.

        Raises:
          SourceError: it was refused, or kept failing.
        """
        if path and not is_inside(path):
            raise SourceError(outside(path))
        try:
            return retried(lambda: self._once(path, call))
        except PassingFault as fault:
            raise given_up(self.url, path, fault) from None

    def _once(self, path: str, call: Callable[[Place], T]) -> T:
        from obstore.exceptions import BaseError, NotSupportedError

        try:
            return call(self.place(path))
        # `from None`: obstore's text holds addresses, and those of signed links are secrets.
        except NotSupportedError:
            raise no_ranges(self.url, path) from None
        except (BaseError, FileNotFoundError) as error:
            status = status_of(error)
            # One store may refuse a signed address that has expired, another may be gone.
            expired = status != 429 and self.has_expired(path, status)
            if expired or is_passing(status):
                raise passing(error) from None
            raise final_fault(self.url, path, status, self.refused) from None


@dataclass(frozen=True)
class BucketSource(RangedSource):
    """A folder of a Google Cloud Storage bucket.

    Attributes:
      root: ``gs://bucket/path``.
    """

    root: str
    refused: ClassVar[dict[int, str]] = {
        401: "Log in: gcloud auth application-default login.",
        403: "Give the account that runs this the role Storage Object Viewer on the bucket.",
        404: "Correct the path.",
    }

    @property
    def url(self) -> str:
        return self.root

    def place(self, path: str) -> Place:
        bucket, prefix = split_bucket_url(self.root)
        return Place(bucket_store(bucket), f"{prefix}{path}")

    def list(self) -> dict[str, int]:
        return {_last(entry["path"]): entry["size"] for entry in self._listed()["objects"]}

    def folders(self) -> tuple[str, ...]:
        return tuple(sorted(_last(prefix.rstrip("/")) for prefix in self._listed()["common_prefixes"]))

    def revision(self) -> str:
        import hashlib

        tags = sorted(f"{_last(entry['path'])} {entry['e_tag']}" for entry in self._listed()["objects"])
        return hashlib.sha256("\n".join(tags).encode()).hexdigest()

    def files_in(self, folder: str) -> dict[str, int]:
        """Files directly in a folder of the root: path relative to the root, to size in bytes."""
        found = self.sizes_below(f"{folder}/")
        return {path: size for path, size in found.items() if path.rpartition("/")[0] == folder}

    def sizes_below(self, folder: str = "") -> dict[str, int]:
        """Every object below a folder at any depth: its path relative to the root, and its size in bytes."""
        return {path: entry["size"] for path, entry in self.entries_below(folder).items()}

    def entries_below(self, folder: str = "") -> dict[str, Any]:
        """Every object below a folder at any depth, as obstore describes it: ``size``, ``last_modified``, ``e_tag``."""
        import obstore

        _, root = split_bucket_url(self.root)
        prefix = f"{root}{folder}" or None
        found = self.request("", lambda place: obstore.list(place.store, prefix).collect())
        return {entry["path"].removeprefix(root): entry for entry in found}

    def _listed(self) -> Any:
        import obstore

        _, prefix = split_bucket_url(self.root)
        found = self.request("", lambda place: obstore.list_with_delimiter(place.store, prefix or None))
        if not found["objects"] and not found["common_prefixes"]:
            problem = Problem(self.root, "a checkpoint's folder", "nothing below that name", "Correct the path.")
            raise MissingFileError(problem)
        return found


@lru_cache(maxsize=1024)
def web_store(address: str, token_for: str = "") -> Any:
    """An obstore store for a web address; the cache keeps one connection pool for each.

    Args:
      address: the folder's URL; a query stays on every request.
      token_for: endpoint of the hub whose token goes along, or empty. The token itself is no part of any key.
    """
    from obstore.store import HTTPStore

    options: Any = {"allow_http": True, "timeout": "120s", "connect_timeout": "20s"}
    if token_for:
        from tensorferry.pipelines.storage.hub import authorization

        options["default_headers"] = authorization()
    # Retries are ours: obstore's own do not cover short bodies, and wait by another clock.
    return HTTPStore.from_url(address, client_options=options, retry_config={"max_retries": 0})


def open_remote(url: str) -> RangedSource:
    """The source for a ``gs://``, ``hf://`` or ``https://`` URL.

    Raises:
      FerryError: the URL is malformed, or the hub has no such repository.
    """
    scheme = url.partition("://")[0].lower()
    if scheme == "hf":
        from tensorferry.pipelines.storage.hub import open_hub

        return open_hub(url)
    if scheme == "gs":
        split_bucket_url(url)
        return BucketSource(url.rstrip("/"))
    from tensorferry.pipelines.storage.web_source import open_web

    return open_web(url)


def _ends_before(place: Place, end: int) -> bool:
    """Whether the file itself is too short, and not only the answer."""
    import obstore
    from obstore.exceptions import BaseError

    try:
        return obstore.head(place.store, place.key)["size"] < end
    except (BaseError, FileNotFoundError):  # signed addresses may not allow it
        return False


def _last(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def at_once(call: Callable[[Any], T], values: Iterable[Any]) -> Iterable[T]:
    """Calls for each value, several at once where there are several; in their order."""
    values = list(values)
    return map(call, values) if len(values) < 2 else _threads().map(call, values)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, "ranges")
