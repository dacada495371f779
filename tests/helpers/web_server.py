"""A web server on this machine that lists its folders and answers ranges; faults can be ordered, as at `hub_server`."""

import html
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from hub_server import Fault

_ABSOLUTE = "https://elsewhere.example/other/"


@dataclass
class Web:
    """The server, how it lists, and what it was asked.

    Attributes:
      style: whose pages it imitates: ``python``, ``nginx``, ``apache``, ``caddy``; ``none`` does not list.
    """

    style: str = "python"
    requests: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    server: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def fail(self, pattern: str, status: int, times: int = 1, after: int = 0) -> None:
        """Requests whose ``METHOD PATH`` matches fail; status 0 breaks the body off half way."""
        self.faults.append(Fault(re.compile(pattern), status, times, after))

    def note(self, request: str) -> int | None:
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if not fault.times or not fault.pattern.search(request):
                    continue
                if fault.after:
                    fault.after -= 1
                    continue
                fault.times -= 1
                return fault.status
        return None


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, *args: Any, web: Web, **more: Any) -> None:
        self.web = web
        super().__init__(*args, **more)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve(super().do_HEAD)

    def do_GET(self) -> None:
        self._serve(super().do_GET)

    def _serve(self, plainly: Any) -> None:
        status = self.web.note(f"{self.command} {unquote(self.path)}")
        if status:
            return self._send(status, b"trouble ordered by the test")
        path = Path(self.translate_path(self.path))
        if path.is_file() and self.command == "GET":
            return self._file(path.read_bytes(), cut=status == 0)
        if path.is_dir() and self.path.endswith("/") and self.web.style != "python":
            return self._page(path)
        return plainly()

    def _file(self, data: bytes, cut: bool) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if match is None:
            return self._send(200, data, cut=cut)
        start, stop = int(match[1]), min(int(match[2]) + 1, len(data))
        if start >= len(data):
            return self._send(416, b"")
        return self._send(206, data[start:stop], f"bytes {start}-{stop - 1}/{len(data)}", cut)

    def _page(self, folder: Path) -> None:
        if self.web.style == "none":
            return self._send(403, b"no listing")
        here = unquote(urlsplit(self.path).path)
        names = sorted(f"{one.name}/" if one.is_dir() else one.name for one in os.scandir(folder))
        body = "\n".join(_lines(self.web.style, here, names)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        # As nginx does: nobody is told how long the page is.
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        return None

    def _send(self, status: int, body: bytes, span: str = "", cut: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)
            self.close_connection = self.close_connection or cut


def _lines(style: str, here: str, names: list[str]) -> Iterator[str]:
    """A page as these servers write it, with what else they link to."""
    yield f"<html><head><title>Index of {html.escape(here)}</title></head><body><h1>Index of {html.escape(here)}</h1>"
    if style == "apache":
        for column in "NMSD":
            yield f'<th><a href="?C={column};O=A">x</a></th>'
        above = quote(here.rstrip("/").rpartition("/")[0] + "/")
        yield f'<a href="{above}">Parent Directory</a>'
    elif style == "nginx":
        names = [name for name in names if not name.startswith(".")]
        yield '<pre><a href="../">../</a>'
    elif style == "caddy":
        yield f'<a href="..">up</a><a href="./?sort=name&amp;order=desc">Name</a><a href="{_ABSOLUTE}">Caddy</a>'
    for name in names:
        target = quote(here + name) if style == "caddy-absolute" else quote(name)
        target = f"./{target}" if style == "caddy" else target
        yield f'<a href="{html.escape(target)}">{html.escape(name)}</a>  01-Dec-2026 05:00  -'


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


@contextmanager
def serve_web(folder: Path, style: str = "python") -> Iterator[Web]:
    """A running server of a folder; ends with the ``with`` block."""
    web = Web(style)
    web.server = _Server(("127.0.0.1", 0), partial(_Handler, directory=str(folder), web=web))
    threading.Thread(target=web.server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield web
    finally:
        web.server.shutdown()
        web.server.server_close()
