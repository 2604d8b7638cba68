"""The port for other debuggers: who gets to a rank through it, and who does not."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from dap_port import DapPort
from fake_debuggee import FakeDebuggee
from hvdlab.kernel_ext.debugger.framing import MOST, frame
from hvdlab.kernel_ext.debugger.relay import HANDSHAKE_MOST, Handshake, HandshakeError, Phase, Relay

PATIENCE = 60

EVALUATE = b'{"type": "request", "seq": 1, "command": "evaluate", "arguments": {"expression": "1", "context": "repl"}}'

POST = (
    b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: https://evil.example\r\nSec-Fetch-Site: cross-site\r\n"
    b"Content-Type: text/plain\r\nContent-Length: %d\r\n\r\n%b" % (len(EVALUATE), EVALUATE)
)


@pytest.fixture
def rank() -> FakeDebuggee:
    return FakeDebuggee()


@contextmanager
def relay_to(rank: FakeDebuggee, **how: Any) -> Iterator[Relay]:
    relay = Relay(rank, 0, **how)  # type: ignore[arg-type]  # stands where a client is needed
    try:
        yield relay
    finally:
        relay.close()


def request(command: str, **arguments: object) -> bytes:
    return json.dumps({"type": "request", "seq": 1, "command": command, "arguments": arguments}).encode()


def outcome(relay: Relay, sent: bytes) -> bytes:
    """What a stranger who sends this gets until the connection ends."""
    with socket.create_connection(("127.0.0.1", relay.port), timeout=PATIENCE) as stranger:
        got = b""
        try:
            stranger.sendall(sent)
            while data := stranger.recv(1 << 16):
                got += data
        except (ConnectionResetError, BrokenPipeError):
            pass
        return got


STRANGERS = {
    "a web page": POST,
    "a web page's preflight": POST.replace(b"POST", b"OPTIONS"),
    "another request first": frame(EVALUATE),
    "attach first": frame(request("attach")),
    "does not wait for the answer": frame(request("initialize")) + frame(request("attach")) + frame(EVALUATE),
    "begins a second message": frame(request("initialize")) + b"C",
    "no JSON": frame(b"hello"),
    "no request": frame(b'{"type": "event", "seq": 1, "command": "initialize"}'),
    "a list": frame(b"[]"),
    "nested without end": frame(b"[" * 100_000),
    "a length of 5000 digits": b"Content-Length: %b\r\n\r\n" % (b"9" * 5000),
    "too long for a handshake": b"Content-Length: %d\r\n\r\n" % (HANDSHAKE_MOST + 1),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


def test_strangers_are_refused_and_keep_no_debugger_out(rank: FakeDebuggee) -> None:
    with relay_to(rank) as relay:
        for name, sent in STRANGERS.items():
            assert outcome(relay, sent) == b"", name
            assert rank.mail == [], name
        with DapPort(relay.port) as debugger:
            assert debugger.ask("initialize", adapterID="x")["success"]
            assert debugger.ask("attach")["success"]
            assert rank.mail == ["open", "initialize", "attach"]


def test_what_is_wrong_is_refused_at_its_first_byte(rank: FakeDebuggee) -> None:
    with (
        relay_to(rank) as relay,
        socket.create_connection(("127.0.0.1", relay.port), timeout=PATIENCE) as page,
    ):
        page.sendall(b"P")
        assert page.recv(1) == b""


def test_only_attach_follows_initialize() -> None:
    for command in ("evaluate", "setBreakpoints", "configurationDone", "initialize", "disconnect"):
        rank = FakeDebuggee()
        with relay_to(rank) as relay, DapPort(relay.port) as debugger:
            assert debugger.ask("initialize", adapterID="x")["success"]
            with pytest.raises((AssertionError, ConnectionResetError)):  # the port was closed
                debugger.ask(command)
        assert rank.mail == ["open", "initialize", "close"], command


def test_who_sends_without_listening_gets_nowhere(rank: FakeDebuggee) -> None:
    """What comes before the answer is not what the protocol lets a debugger send: it is sent blindly."""
    with (
        relay_to(rank) as relay,
        socket.create_connection(("127.0.0.1", relay.port), timeout=PATIENCE) as deaf,
    ):
        rank.before_answer = lambda: deaf.sendall(frame(request("attach")) + frame(EVALUATE))
        deaf.sendall(frame(request("initialize")))
        with suppress(ConnectionResetError):
            assert deaf.recv(1) == b""
        relay.close()
        assert rank.mail == ["open", "initialize", "close"]


def test_one_session_and_then_it_is_shut(rank: FakeDebuggee) -> None:
    with relay_to(rank) as relay:
        with DapPort(relay.port) as debugger:
            debugger.ask("initialize", adapterID="x")
            debugger.ask("attach")
            assert (relay.busy, relay.listening, relay.over) == (True, False, False)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", relay.port), timeout=PATIENCE)
            assert debugger.ask("evaluate", expression="1")["success"]
        relay._thread.join(PATIENCE)
        assert relay.over
        assert rank.mail == ["open", "initialize", "attach", "evaluate", "close"]


def test_kept_open_for_the_next(rank: FakeDebuggee) -> None:
    with relay_to(rank, keep=True, unused_for=0) as relay:
        for _ in range(2):
            with DapPort(relay.port) as debugger:
                debugger.ask("initialize", adapterID="x")
                assert debugger.ask("attach")["success"]


def test_unused_it_closes(rank: FakeDebuggee) -> None:
    with relay_to(rank, unused_for=0.01) as relay:
        relay._thread.join(PATIENCE)
        assert relay.over
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", relay.port), timeout=PATIENCE)


def test_who_says_nothing_does_not_hold_the_port(rank: FakeDebuggee) -> None:
    with relay_to(rank, handshake_within=0.05) as relay:
        assert outcome(relay, b"") == b""
        assert outcome(relay, b"Content-Length: 100\r\n\r\n{") == b""
        assert relay.listening


def test_who_says_initialize_and_no_more_does_not_hold_the_rank(rank: FakeDebuggee) -> None:
    with relay_to(rank, handshake_within=2) as relay, DapPort(relay.port) as debugger:
        assert debugger.ask("initialize", adapterID="x")["success"]
        assert debugger._socket.recv(1) == b""
        relay.close()
        assert rank.mail == ["open", "initialize", "close"]


def test_it_closes_while_somebody_says_nothing(rank: FakeDebuggee) -> None:
    with (
        relay_to(rank, handshake_within=10 * PATIENCE) as relay,
        socket.create_connection(("127.0.0.1", relay.port), timeout=PATIENCE) as silent,
    ):
        relay.close()
        silent.settimeout(PATIENCE)
        with suppress(ConnectionResetError):  # it had not been accepted yet
            assert silent.recv(1) == b""


def test_it_may_be_closed_from_its_own_thread(rank: FakeDebuggee) -> None:
    relays: list[Relay] = []
    made = threading.Event()

    def mine(connection: socket.socket) -> bool:
        made.wait(PATIENCE)
        relays[0].close()
        return True

    with relay_to(rank, mine=mine) as relay:
        relays.append(relay)
        made.set()
        assert outcome(relay, frame(request("initialize"))) == b""
        relay._thread.join(PATIENCE)
        assert relay.over
        assert rank.mail == []


def test_a_broken_message_ends_an_attached_debugger_and_nothing_else(rank: FakeDebuggee) -> None:
    """A length that int() refuses ended the thread that listens: the port stayed bound, its writer blocked."""
    with relay_to(rank, keep=True) as relay:
        for broken in (
            b"Content-Length: %b\r\n\r\n" % (b"9" * 5000),
            b"Content-Length: %d\r\n\r\n" % (MOST + 1),
        ):
            with DapPort(relay.port) as debugger:
                debugger.ask("initialize", adapterID="x")
                debugger.ask("attach")
                debugger._socket.sendall(broken)
                with suppress(ConnectionResetError):
                    assert debugger._socket.recv(1) == b""
        with DapPort(relay.port) as debugger:
            assert debugger.ask("initialize", adapterID="x")["success"]


def test_a_rank_that_can_not_be_debugged_says_why(rank: FakeDebuggee) -> None:
    rank.error = "the notebook's debugger is debugging it"
    with relay_to(rank) as relay:
        with DapPort(relay.port) as debugger:
            refused = debugger.ask("initialize", adapterID="x")
            assert not refused["success"]
            assert refused["message"] == "rank 0 can't be debugged: the notebook's debugger is debugging it"
        rank.error = ""
        with DapPort(relay.port) as debugger:  # that was no session yet
            assert debugger.ask("initialize", adapterID="x")["success"]


def test_a_handshake_without_sockets() -> None:
    handshake = Handshake()
    handshake.from_debugger(request("initialize"))
    assert handshake.phase is Phase.ANSWER
    with pytest.raises(HandshakeError):
        handshake.from_debugger(request("attach"))
    assert not handshake.from_rank(b'{"type": "event", "event": "output"}')
    assert not handshake.from_rank(b"nonsense")
    assert handshake.from_rank(b'{"type": "response", "command": "initialize"}')
    handshake.answered()
    with pytest.raises(HandshakeError):
        handshake.from_debugger(request("evaluate"))
    handshake.from_debugger(request("launch"))
    assert handshake.phase is Phase.DONE
