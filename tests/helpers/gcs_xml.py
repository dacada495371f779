"""The part of Cloud Storage's XML API that obstore writes with, which fake-gcs-server lacks: objects put whole or in
parts. The proxy serves it; what is finished goes on to the emulator."""

import hashlib
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

Answer = tuple[int, dict[str, str], bytes]
Put = Callable[[str, str, bytes], None]
_XML = {"Content-Type": "application/xml"}


@dataclass
class XmlUploads:
    """Uploads in parts that are under way.

    Attributes:
      put: writes an object: bucket, name, content.
      parts: upload id to its parts by number.
    """

    put: Put
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, method: str, path: str, body: bytes) -> Answer | None:
        """The answer to a request, or None where it is none of this API's writes."""
        parts = urlsplit(path)
        match = re.fullmatch(r"/([^/]+)/(.+)", parts.path)
        if method not in ("PUT", "POST", "DELETE") or not match or match[1] in ("upload", "storage"):
            return None
        bucket, name = unquote(match[1]), unquote(match[2])
        return self._write(method, bucket, name, parse_qs(parts.query, keep_blank_values=True), body)

    def _write(self, method: str, bucket: str, name: str, query: Mapping[str, list[str]], body: bytes) -> Answer | None:
        if method == "POST" and "uploads" in query:
            return self._begin()
        if "uploadId" in query:
            return self._go_on(method, bucket, name, query, body)
        if method != "PUT":
            return None
        self.put(bucket, name, body)
        return 200, _tag(body), b""

    def _begin(self) -> Answer:
        upload = uuid.uuid4().hex
        with self.lock:
            self.parts[upload] = {}
        text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
        return 200, dict(_XML), text.encode()

    def _go_on(self, method: str, bucket: str, name: str, query: Mapping[str, list[str]], body: bytes) -> Answer:
        upload = query["uploadId"][0]
        with self.lock:
            if upload not in self.parts:
                return 404, dict(_XML), b"<Error><Code>NoSuchUpload</Code></Error>"
            if method == "PUT":
                self.parts[upload][int(query["partNumber"][0])] = body
                return 200, _tag(body), b""
            parts = self.parts.pop(upload)
        if method == "DELETE":
            return 204, {}, b""
        wanted = [int(number) for number in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
        whole = b"".join(parts[number] for number in wanted)
        self.put(bucket, name, whole)
        text = f"<CompleteMultipartUploadResult><ETag>{_tag(whole)['ETag']}</ETag></CompleteMultipartUploadResult>"
        return 200, dict(_XML), text.encode()


def _tag(body: bytes) -> dict[str, str]:
    return {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}
