"""A checkpoint on the web and a bucket behind the same long, thin link, which carries both ways at once.

``python -m benchmarks.slow_server FOLDER --latency 0.05 --stream 100e6 --link 100e6`` prints its port and serves until
its standard input closes, then prints what the link carried down (read) and up (written). Each answer waits; each
stream has a rate, and so have all streams of a direction together. The files are below ``/files/``, the bucket's API is
everything else.
"""

import argparse
import json
import os
import re
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks.storage import Storage
from benchmarks.wire import Stream, Wire

FILES = "/files/"
_BLOCK_BYTES = 1 << 17
# Headers, configs and the index are read before the work begins; receipts and metadata are small, too.
_WEIGHT_BYTES = 1 << 20


@dataclass
class Far:
    """What lies at the other end of the link.

    Attributes:
      folder: the checkpoint.
      latency_seconds: before each answer.
      stream_rate: bytes a second of each stream.
    """

    folder: Path
    latency_seconds: float
    stream_rate: float
    down: Wire
    up: Wire
    storage: Storage = field(default_factory=Storage)


class Handler(BaseHTTPRequestHandler):
    """Serves ranges of the folder's files, and the bucket."""

    protocol_version = "HTTP/1.1"
    # Headers and body go separately: without this, each answer waits 40 ms for the client.
    disable_nagle_algorithm = True
    far: Far

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.startswith(FILES):
            self._serve_file()
        else:
            self._serve_bucket()

    do_HEAD = do_POST = do_DELETE = do_GET

    def handle_expect_100(self) -> bool:
        time.sleep(self.far.latency_seconds)
        return super().handle_expect_100()

    def _serve_file(self) -> None:
        time.sleep(self.far.latency_seconds)
        path = self.far.folder / self.path.removeprefix(FILES).strip("/")
        if not path.is_file():
            return self._begin(404, 0)
        size = path.stat().st_size
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        start, stop = (int(match[1]), min(int(match[2]) + 1, size)) if match else (0, size)
        span = {"Content-Range": f"bytes {start}-{stop - 1}/{size}"} if match else {}
        self._begin(206 if match else 200, stop - start, span)
        if self.command == "GET":
            self.wfile.flush()
            self._send(path, start, stop)
        return None

    def _send(self, path: Path, start: int, stop: int) -> None:
        stream, at = self._stream(self.far.down, stop - start), start
        with path.open("rb") as file:
            while at < stop:
                count = min(_BLOCK_BYTES, stop - at)
                stream.carry(count)
                at += os.sendfile(self.connection.fileno(), file.fileno(), at, count)

    def _serve_bucket(self) -> None:
        nbytes = int(self.headers.get("content-length") or 0)
        data = self._receive(nbytes)
        time.sleep(self.far.latency_seconds)
        status, headers, body = self.far.storage.answer(self.command, self.path, nbytes, data)
        self._begin(status, len(body), dict(headers))
        self.wfile.write(body)

    def _receive(self, nbytes: int) -> bytes | None:
        """The body of a request, unless it is large."""
        stream, left = self._stream(self.far.up, nbytes), nbytes
        kept, block = bytearray(), memoryview(bytearray(_BLOCK_BYTES))
        while left:
            count = self.rfile.readinto1(block[: min(left, _BLOCK_BYTES)])  # pyright: ignore[reportAttributeAccessIssue]
            if not count:
                raise ConnectionError("the client went away")
            stream.carry(count)
            left -= count
            if nbytes < _WEIGHT_BYTES:
                kept += block[:count]
        return bytes(kept) if nbytes < _WEIGHT_BYTES else None

    def _stream(self, wire: Wire, nbytes: int) -> Stream:
        return Stream(wire, self.far.stream_rate, counts=nbytes >= _WEIGHT_BYTES)

    def _begin(self, status: int, nbytes: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(nbytes), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds before each answer")
    parser.add_argument("--stream", type=float, default=100e6, help="bytes a second of each stream")
    parser.add_argument("--link", type=float, default=100e6, help="bytes a second of all together, each way")
    args = parser.parse_args()
    far = Far(args.folder, args.latency, args.stream, Wire(args.link), Wire(args.link))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"far": far}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    print(json.dumps({"down": far.down.stats(), "up": far.up.stats()}), flush=True)


if __name__ == "__main__":
    main()
