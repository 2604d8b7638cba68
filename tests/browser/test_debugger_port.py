"""A page in a real browser sends a debugger's request to the port that is open for debuggers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("playwright.sync_api")

from chromium import CHROMIUM, chromium
from fake_debuggee import FakeDebuggee
from hvdlab.kernel_ext.debugger.relay import Relay

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(180),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]

# Without `cors` the browser asks nobody before it sends this.
ATTACK = """(port) => fetch(`http://127.0.0.1:${port}/`, {
    method: 'POST', mode: 'no-cors',
    body: JSON.stringify({type: 'request', seq: 1, command: 'evaluate', arguments: {expression: '1', context: 'repl'}}),
}).then(() => 'answered', () => 'refused')"""


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<p>a page")

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """Another user's page on this host."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_a_page_gets_nothing_to_a_rank(elsewhere: str) -> None:
    rank = FakeDebuggee()
    came: list[bytes] = []

    def mine(connection: object) -> bool:
        came.append(b"")
        return True  # the browser is a process of the user's

    relay = Relay(rank, 0, keep=True, mine=mine)  # type: ignore[arg-type]  # stands where a client is needed
    try:
        with chromium() as browser:
            page = browser.new_page()
            page.goto(elsewhere)
            assert page.evaluate(ATTACK, relay.port) == "refused"
            page.close()
        assert came  # the browser let it through
    finally:
        relay.close()
    assert rank.mail == []
