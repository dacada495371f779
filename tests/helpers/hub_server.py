"""A hub on this machine: the part of its HTTP API that huggingface_hub and our reader call, and a second server on
another port for the weights, as the real one redirects to a store of its own. Faults can be ordered."""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit


@dataclass(frozen=True)
class Content:
    """A file: its size in bytes, and how to get a range of it."""

    size: int
    read: Callable[[int, int], bytes]
    sha256: str = ""

    @classmethod
    def of(cls, data: bytes) -> "Content":
        return cls(len(data), lambda start, stop: data[start:stop], hashlib.sha256(data).hexdigest())


@dataclass
class Repo:
    """Revisions to commits, commits to files."""

    revisions: dict[str, str]
    files: dict[str, Mapping[str, Content]]
    private: bool = False
    gated: bool = False


@dataclass(frozen=True)
class Request:
    server: str
    method: str
    path: str
    range: str
    authorization: str


@dataclass
class Fault:
    """An order for trouble: requests that match get this status, or a body that breaks off."""

    pattern: re.Pattern[str]
    status: int
    times: int
    after: int


@dataclass
class Hub:
    """Both servers, what they hold, and what they were asked."""

    token: str = "hf_valid"
    # What git LFS holds, so that it is read from the other server.
    lfs: re.Pattern[str] = re.compile(r".+\.(safetensors|bin)")
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    signature: str = "s1"
    lock: threading.Lock = field(default_factory=threading.Lock)
    api: Any = None
    cdn: Any = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.api.server_port}"

    def add(self, name: str, files: Mapping[str, bytes], revision: str = "main", **how: Any) -> str:
        """Commits files to a repository; returns the commit."""
        commit = hashlib.sha1(repr(sorted((n, hashlib.sha256(d).hexdigest()) for n, d in files.items())).encode())
        return self.add_contents(
            name, {n: Content.of(d) for n, d in files.items()}, commit.hexdigest(), revision, **how
        )

    def add_contents(
        self, name: str, files: Mapping[str, Content], commit: str, revision: str = "main", **how: Any
    ) -> str:
        repo = self.repos.setdefault(name, Repo({}, {}, **how))
        repo.revisions[revision] = commit
        repo.files[commit] = files
        return commit

    def fail(self, pattern: str, status: int, times: int = 1, after: int = 0) -> None:
        """Requests whose ``SERVER METHOD PATH`` matches fail; status 0 breaks the body off half way.

        Args:
          times: how many fail.
          after: how many go well before.
        """
        self.faults.append(Fault(re.compile(pattern), status, times, after))

    def seen(self, pattern: str) -> list[Request]:
        return [one for one in self.requests if re.search(pattern, f"{one.server} {one.method} {one.path}")]

    def note(self, request: Request) -> int | None:
        """Logs a request; the status of its fault, if one is ordered."""
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if not fault.times or not fault.pattern.search(f"{request.server} {request.method} {request.path}"):
                    continue
                if fault.after:
                    fault.after -= 1
                    continue
                fault.times -= 1
                return fault.status
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body go separately: without this, each answer waits 40 ms for the client.
    disable_nagle_algorithm = True
    hub: Hub
    name: str

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        headers = self.headers
        request = Request(
            self.name, self.command, self.path, headers.get("range", ""), headers.get("authorization", "")
        )
        self.cut = False
        status = self.hub.note(request)
        if status:
            return self._answer(status, b"trouble ordered by the test")
        self.cut = status == 0
        return self._respond(request)

    def _respond(self, request: Request) -> None:
        raise NotImplementedError

    def _answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if self.cut else body)
            self.close_connection = self.close_connection or self.cut

    def _send_content(self, content: Content, headers: Mapping[str, str]) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if not match or self.command == "HEAD":
            body = content.read(0, content.size) if self.command == "GET" else b""
            return self._answer(200, body, {**headers, "Content-Length": str(content.size), "Accept-Ranges": "bytes"})
        start, stop = int(match[1]), min(int(match[2]) + 1, content.size)
        if start >= content.size:
            return self._answer(416)
        span = {"Content-Range": f"bytes {start}-{stop - 1}/{content.size}"}
        return self._answer(206, content.read(start, stop), {**headers, **span})


class _Api(_Handler):
    name = "api"

    def _respond(self, request: Request) -> None:
        path = unquote(urlsplit(request.path).path)
        if match := re.fullmatch(r"/api/models/(.+)/revision/(.+)", path):
            return self._info(*match.groups())
        if match := re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(*match.groups())
        return self._answer(404)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code})

    def _repo(self, name: str) -> Repo | None:
        """The repository, if the request may see it; the refusal is sent otherwise."""
        repo = self.hub.repos.get(name)
        given = self.headers.get("authorization", "")
        if given and given != f"Bearer {self.hub.token}":
            self._refuse(401, "")
        elif repo is None or (repo.private and not given):
            # The hub does not tell apart what is missing and what is not shown.
            self._refuse(404 if given else 401, "RepoNotFound")
        elif repo.gated:
            self._refuse(403 if given else 401, "GatedRepo")
        else:
            return repo
        return None

    def _info(self, name: str, revision: str) -> None:
        repo = self._repo(name)
        if repo is None:
            return None
        commit = repo.revisions.get(revision, revision)
        if commit not in repo.files:
            return self._refuse(404, "RevisionNotFound")
        siblings = [_sibling(self.hub, commit, file, content) for file, content in repo.files[commit].items()]
        body = {"id": name, "modelId": name, "sha": commit, "private": repo.private, "siblings": siblings}
        return self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repo = self._repo(name)
        if repo is None:
            return None
        commit = repo.revisions.get(revision, revision)
        content = repo.files.get(commit, {}).get(file)
        if content is None:
            return self._refuse(404, "EntryNotFound")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_etag(commit, file, content)[:40]}"'}
        if not self.hub.lfs.fullmatch(file):
            return self._send_content(content, headers)
        linked = {"X-Linked-Size": str(content.size), "X-Linked-Etag": f'"{_etag(commit, file, content)}"'}
        location = (
            f"http://127.0.0.1:{self.hub.cdn.server_port}/{name}/{commit}/{quote(file)}?X-Sig={self.hub.signature}%2B"
        )
        return self._answer(302, b"", {**headers, **linked, "Location": location})


class _Cdn(_Handler):
    name = "cdn"

    def _respond(self, request: Request) -> None:
        parts = urlsplit(request.path)
        if parse_qs(parts.query).get("X-Sig") != [f"{self.hub.signature}+"] or request.authorization:
            return self._answer(403, b"signature")
        org, name, commit, file = parts.path.strip("/").split("/", 3)
        return self._send_content(self.hub.repos[f"{org}/{name}"].files[commit][unquote(file)], {})


def _etag(commit: str, file: str, content: Content) -> str:
    return content.sha256 or hashlib.sha256(f"{commit}/{file}".encode()).hexdigest()


def _sibling(hub: Hub, commit: str, file: str, content: Content) -> dict[str, Any]:
    etag = _etag(commit, file, content)
    entry: dict[str, Any] = {"rfilename": file, "size": content.size, "blobId": etag[:40]}
    if hub.lfs.fullmatch(file):
        entry["lfs"] = {"sha256": etag, "size": content.size, "pointerSize": 134}
    return entry


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A running hub; ends with the ``with`` block."""
    hub = Hub()
    servers = []
    for kind, attribute in ((_Api, "api"), (_Cdn, "cdn")):
        server = _Server(("127.0.0.1", 0), type(kind.__name__, (kind,), {"hub": hub}))
        setattr(hub, attribute, server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
