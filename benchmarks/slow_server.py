"""A web server with a long, thin wire: each answer waits, each stream and all streams together have a rate.

``python -m benchmarks.slow_server FOLDER --latency 0.05 --stream 100e6 --link 100e6`` prints its port and serves until
its standard input closes, then prints what the wire carried.
"""

import argparse
import json
import os
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_BLOCK_BYTES = 1 << 17
# Headers, configs and the index are read before the work begins.
_WEIGHT_BYTES = 1 << 20


class Wire:
    """The link that all streams share.

    Args:
      bytes_per_second: its rate.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._began = self._ended = 0.0
        self.carried = 0

    def carry(self, nbytes: int, counts: bool) -> float:
        """Takes bytes onto the wire; returns when they are through, on `time.perf_counter`'s clock."""
        with self._lock:
            now = time.perf_counter()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self._rate
            if counts:
                self._began = self._began or now
                self._ended = self._free_at
                self.carried += nbytes
            return self._free_at

    def stats(self) -> dict[str, float]:
        """Bytes of weights, seconds from the first to the last of them, and the share of that the wire was busy."""
        seconds = self._ended - self._began
        return {
            "bytes": self.carried,
            "seconds": seconds,
            "busy": self.carried / self._rate / seconds if seconds else 0,
        }


class Handler(BaseHTTPRequestHandler):
    """Serves ranges of the files of a folder."""

    protocol_version = "HTTP/1.1"
    folder: Path
    wire: Wire
    latency_seconds: float
    stream_rate: float

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        time.sleep(self.latency_seconds)
        path = self.folder / self.path.strip("/")
        if not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        size = path.stat().st_size
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        start, stop = (int(match[1]), min(int(match[2]) + 1, size)) if match else (0, size)
        self.send_response(206 if match else 200)
        self.send_header("Content-Length", str(stop - start))
        if match:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.flush()
            self._send(path, start, stop)

    def _send(self, path: Path, start: int, stop: int) -> None:
        began, at = time.perf_counter(), start
        with path.open("rb") as file:
            while at < stop:
                count = min(_BLOCK_BYTES, stop - at)
                through = self.wire.carry(count, counts=stop - start >= _WEIGHT_BYTES)
                due = max(through, began + (at + count - start) / self.stream_rate)
                time.sleep(max(0.0, due - time.perf_counter()))
                at += os.sendfile(self.connection.fileno(), file.fileno(), at, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds before each answer")
    parser.add_argument("--stream", type=float, default=100e6, help="bytes a second of each stream")
    parser.add_argument("--link", type=float, default=100e6, help="bytes a second of all together")
    args = parser.parse_args()
    wire = Wire(args.link)
    Handler.folder, Handler.wire = args.folder, wire
    Handler.latency_seconds, Handler.stream_rate = args.latency, args.stream
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    print(json.dumps(wire.stats()), flush=True)


if __name__ == "__main__":
    main()
