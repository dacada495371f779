"""A relay on the loopback: TensorStore reads from it what a `RangedSource` reads from the hub or the web.

TensorStore cannot follow the hub's redirects, and would keep the token in its specs. Here it asks a server of this
process at an address that nobody else knows, and redirects, token, retries and sentences stay the source's.
"""

import hashlib
import os
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from tensorferry.mappings.words.problems import Problem
from tensorferry.pipelines.storage.byte_budget import ByteBudget
from tensorferry.pipelines.storage.byte_source import MissingFileError, SourceError
from tensorferry.pipelines.storage.remote_source import RangedSource

T = TypeVar("T")

# What one request holds at a time, and all of them together. While it arrives, a window is there up to three times, as
# what came, joined, and here: eight requests of 64 MiB at once took 250 MiB more than none.
WINDOW_BYTES = 16 << 20
ROOM_BYTES = 64 << 20
_HOST = "127.0.0.1"
_KEPT_FAULTS = 1024
# TensorStore asks again after most statuses; after this one it does not.
_REFUSED = 403
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_FAULT = re.compile(r"relayed fault (\d+)")


class Relay:
    """The sources of one process, and what went wrong with them. Every public method may be called by any thread."""

    def __init__(self) -> None:
        self._secret = secrets.token_urlsafe(16)
        self._lock = threading.Lock()
        self._sources: list[RangedSource] = []
        self._faults: OrderedDict[int, Problem] = OrderedDict()
        self._broken_off: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._count = 0
        self._under_way: dict[tuple[str, str], Future[Any]] = {}
        self.room = ByteBudget(ROOM_BYTES)
        self.server = _Server((_HOST, 0), type("_BoundHandler", (_Handler,), {"relay": self}))
        threading.Thread(target=self.server.serve_forever, name="relay", daemon=True).start()

    def url(self, source: RangedSource, folder: str) -> str:
        """The address of a folder of a source, with a slash at the end."""
        with self._lock:
            if source not in self._sources:
                self._sources.append(source)
            number = self._sources.index(source)
        return self._address(number) + (quote(f"{folder}/") if folder else "")

    def find(self, address: str) -> tuple[RangedSource, str] | None:
        """The source and the path that a request's path means; None for what is none of ours."""
        _, secret, number, *names = unquote(urlsplit(address).path).split("/") + [""] * 2
        if not secrets.compare_digest(secret.encode(), self._secret.encode()):
            return None
        return self._sources[int(number)], "/".join(names).rstrip("/")

    def once(self, request: tuple[str, str], read: Callable[[], T]) -> T:
        """What a read gives; those who ask for the same while it is under way share it.

        TensorStore hangs up after a minute of silence and asks again, and a source may wait longer for a store that
        wants fewer requests.
        """
        with self._lock:
            shared = self._under_way.get(request)
            mine = self._under_way.setdefault(request, Future())
        if shared is not None:
            return shared.result()
        try:
            mine.set_result(read())
        except BaseException as error:
            mine.set_exception(error)
        finally:
            with self._lock:
                del self._under_way[request]
        return mine.result()

    def spoken(self, text: str) -> str:
        """A text with the sources' own addresses in place of this relay's."""
        for number, source in enumerate(self._sources):
            text = text.replace(self._address(number), f"{source.url.rstrip('/')}/")
        return text

    def _address(self, number: int) -> str:
        return f"http://{_HOST}:{self.server.server_port}/{self._secret}/{number}/"

    def keep(self, fault: SourceError, broken_off: tuple[str, str] | None = None) -> int:
        """Keeps a fault and returns its number.

        Args:
          fault: what the source said.
          broken_off: path and range of a request whose answer had begun: TensorStore will repeat it.
        """
        with self._lock:
            self._count += 1
            self._faults[self._count] = fault.problem
            if broken_off:
                self._broken_off[broken_off] = self._count
            for kept in (self._faults, self._broken_off):
                while len(kept) > _KEPT_FAULTS:
                    kept.popitem(last=False)
            return self._count

    def earlier(self, request: tuple[str, str]) -> int | None:
        """The number of the fault that broke off the same request's answer, once."""
        with self._lock:
            return self._broken_off.pop(request, None)

    def problem(self, number: int) -> Problem | None:
        """A fault that was kept."""
        return self._faults.get(number)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """TensorStore may hang up at any time; that is nobody's business."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    relay: Relay

    def log_message(self, format: str, *args: object) -> None:
        """The log would hold the secret address."""

    def do_GET(self) -> None:
        found = self.relay.find(self.path)
        request = (self.path, self.headers.get("range", ""))
        if found is None or found[0].is_listed(found[1]) is False:
            return self._answer(404)
        if number := self.relay.earlier(request):
            return self._refuse(number)
        etag = _etag(*found)
        if self.headers.get("if-none-match") == etag:
            return self._answer(304)
        try:
            return self._send(*found, etag)
        except MissingFileError as fault:
            # What a commit holds is not missing when the hub denies it: as a missing chunk it would read as zeros.
            return self._refuse(self.relay.keep(fault)) if found[0].is_listed(found[1]) else self._answer(404)
        except SourceError as fault:
            return self._refuse(self.relay.keep(fault))

    def _send(self, source: RangedSource, path: str, etag: str) -> None:
        """Sends a file, or a range of it; raises only before the answer has begun."""
        wanted = self.headers.get("range", "")
        start, stop = _span(wanted, lambda: self.relay.once((self.path, "size"), lambda: source.size(path)))
        at = min(start + WINDOW_BYTES, stop)
        with self.relay.room.admit(at - start):
            first = self.relay.once((self.path, wanted), lambda: _read(source, path, start, at))
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(stop - start))
            self.send_header("ETag", etag)
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/*")
            self.end_headers()
            self.wfile.write(first)
            del first
        try:
            for start in range(at, stop, WINDOW_BYTES):
                nbytes = min(WINDOW_BYTES, stop - start)
                with self.relay.room.admit(nbytes):
                    self.wfile.write(_read(source, path, start, start + nbytes))
        except SourceError as fault:
            self.relay.keep(fault, (self.path, wanted))
            self.close_connection = True

    def _refuse(self, number: int) -> None:
        self._answer(_REFUSED, f"relayed fault {number}".encode())

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        if status != 304:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _read(source: RangedSource, path: str, start: int, stop: int) -> memoryview:
    window = memoryview(bytearray(stop - start))
    source.readinto(path, start, window)
    return window


def _etag(source: RangedSource, path: str) -> str:
    """Names a file's content for this run, in which sources do not change."""
    return f'"{hashlib.sha256(f"{source.url} {path}".encode()).hexdigest()[:32]}"'


def _span(wanted: str, size: Callable[[], int]) -> tuple[int, int]:
    """First byte and the one after the last of a ``Range`` header's range; of the whole file without one."""
    match = _RANGE.fullmatch(wanted)
    if match is None:
        return 0, size()
    if not match[1]:
        stop = size()
        return max(0, stop - int(match[2])), stop
    return int(match[1]), int(match[2]) + 1 if match[2] else size()


_starting = threading.Lock()
_relay: Relay | None = None


def relay_url(source: RangedSource, folder: str) -> str:
    """The address at which TensorStore reads a folder of a source, with a slash at the end. Of this process only.

    Args:
      source: what is read.
      folder: path below the source's root; empty for the root itself.
    """
    global _relay
    with _starting:
        if _relay is None:
            _spare_proxies()
            _relay = Relay()
        return _relay.url(source, folder)


def relayed_problem(error: BaseException) -> Problem | None:
    """What the source said, where an error of TensorStore comes from a request that the relay refused."""
    number = _FAULT.search(str(error))
    return _relay.problem(int(number[1])) if number and _relay else None


def spoken(error: BaseException) -> str:
    """What an error of TensorStore says; what came through the relay in its source's words and addresses."""
    problem = relayed_problem(error)
    if problem:
        return f"{problem.found} ({problem.name})"
    return _relay.spoken(str(error)) if _relay else str(error)


def _spare_proxies() -> None:
    """Keeps TensorStore from asking a proxy for this machine's own address, and so from telling it the address."""
    if not any(os.environ.get(name) for name in ("http_proxy", "all_proxy", "ALL_PROXY")):
        return
    without = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if without != "*" and _HOST not in without.split(","):
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, (without, _HOST)))


def _forget() -> None:
    """After a fork: threads of the parent do not run here, so neither does its relay."""
    global _relay, _starting
    if _relay is not None:
        _relay.server.socket.close()
    _relay, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
