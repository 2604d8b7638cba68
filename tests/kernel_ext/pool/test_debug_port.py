"""The port for debuggers with a real rank behind it: a web page's request runs nothing there."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from dap_port import DapPort
from hvdlab.kernel_ext.debugger.relay import Relay
from hvdlab.kernel_ext.pool import Pool

pytest.importorskip("debugpy")

StartPool = Callable[..., Pool]

PATIENCE = 60


def test_a_web_page_s_request_runs_nothing_in_the_rank(start_pool: StartPool, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    expression = f"open({str(proof)!r}, 'w').write('here')"
    arguments = {"expression": expression, "context": "repl"}
    body = json.dumps({"type": "request", "seq": 1, "command": "evaluate", "arguments": arguments}).encode()
    head = (
        f"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: https://evil.example\r\nSec-Fetch-Site: cross-site\r\n"
        f"Content-Length: {len(body)}\r\nContent-Type: text/plain\r\n\r\n"
    )
    pool = start_pool(1)
    relay = Relay(pool.client, 0)
    try:
        with socket.create_connection(("127.0.0.1", relay.port), timeout=PATIENCE) as page:
            page.sendall(head.encode() + body)
            with contextlib.suppress(ConnectionResetError):
                assert page.recv(1) == b""
        assert list(pool.run("import sys\n'debugpy' in sys.modules")) == [False]
        assert not proof.exists()
        # The same from a debugger that introduces itself is what the port is there for.
        with DapPort(relay.port) as debugger:
            assert debugger.ask("initialize", adapterID="x", pathFormat="path")["success"]
            assert debugger.ask("attach", justMyCode=True)["success"]
            assert debugger.ask("evaluate", **arguments)["success"]
        assert proof.read_text() == "here"
    finally:
        relay.close()
