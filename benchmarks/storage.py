"""A stand-in for Cloud Storage that costs next to no CPU: what converting into a bucket asks of it, from memory.

Of large objects it keeps the size only. It compares generations, checks no rights and never fails.
"""

import itertools
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

Answer = tuple[int, Mapping[str, str], bytes]


@dataclass(frozen=True)
class StoredObject:
    """An object, or what is known of it.

    Attributes:
      nbytes: its size.
      data: its content; None when it was too large to keep.
    """

    nbytes: int
    data: bytes | None
    generation: int
    written: str


class Storage:
    """Buckets, made when they are first named, and what the JSON and XML APIs answer."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str], StoredObject] = {}
        self._generations = itertools.count(1)
        self._lock = threading.Lock()

    def answer(self, method: str, url: str, nbytes: int, data: bytes | None) -> Answer:
        """Answers a request.

        Args:
          url: path and query.
          nbytes: length of the body.
          data: the body, or None when it was not kept.
        """
        parts = urlsplit(url)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if match := re.fullmatch(r"/upload/storage/v1/b/([^/]+)/o", parts.path):
            return self._write(match[1], query, nbytes, data)
        if match := re.fullmatch(r"/storage/v1/b/([^/]+)/o/(.+)", parts.path):
            name = match[1], unquote(match[2])
            return self._delete(name, query) if method == "DELETE" else self._read(name, query)
        if (match := re.fullmatch(r"/([^/]+)", parts.path)) and "list-type" in query:
            return self._list(match[1], query["prefix"])
        return 501, {}, f"{method} {url}: nothing that this stand-in knows".encode()

    def _write(self, bucket: str, query: Mapping[str, str], nbytes: int, data: bytes | None) -> Answer:
        name = bucket, query["name"]
        with self._lock:
            if not self._matches(name, query):
                return 412, {}, b"{}"
            written = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            self._objects[name] = StoredObject(nbytes, data, next(self._generations), written)
            return _described(name, self._objects[name])

    def _delete(self, name: tuple[str, str], query: Mapping[str, str]) -> Answer:
        with self._lock:
            if not self._matches(name, query):
                return 412, {}, b"{}"
            return (204, {}, b"") if self._objects.pop(name, None) else (404, {}, b"{}")

    def _read(self, name: tuple[str, str], query: Mapping[str, str]) -> Answer:
        found = self._objects.get(name)
        if found is None:
            return 404, {}, b"{}"
        if query.get("alt") != "media":
            return _described(name, found)
        if found.data is None:
            return 501, {}, b"too large to have been kept"
        return 200, {"x-goog-generation": str(found.generation)}, found.data

    def _list(self, bucket: str, prefix: str) -> Answer:
        found = sorted((name, one) for (where, name), one in list(self._objects.items())
                       if where == bucket and name.startswith(prefix))  # fmt: skip
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>{one.written}</LastModified>"
            f"<ETag>{one.generation}</ETag><Size>{one.nbytes}</Size></Contents>"
            for name, one in found
        )
        text = f"<ListBucketResult><KeyCount>{len(found)}</KeyCount>{entries}</ListBucketResult>"
        return 200, {"Content-Type": "application/xml"}, text.encode()

    def _matches(self, name: tuple[str, str], query: Mapping[str, str]) -> bool:
        """Whether the object is the one that a request is meant for."""
        wanted, found = query.get("ifGenerationMatch"), self._objects.get(name)
        return wanted is None or wanted == str(found.generation if found else 0)


def _described(name: tuple[str, str], found: StoredObject) -> Answer:
    told = {"bucket": name[0], "name": name[1], "size": str(found.nbytes), "generation": str(found.generation),
            "updated": found.written}  # fmt: skip
    return 200, {"Content-Type": "application/json"}, json.dumps(told).encode()
