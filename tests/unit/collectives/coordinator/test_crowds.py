"""Strangers in crowds: connections over the network that do not send Hello are bounded in number."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from hvdlab.collectives.coordinator import connections
from hvdlab.collectives.coordinator.connections import Connections
from hvdlab.collectives.coordinator.process import CoordinatorOptions, ServerOptions
from support.logged_lines import LoggedLines


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connections]:
    monkeypatch.setattr(connections, "MOST_STRANGERS", 2)
    server = Connections(ServerOptions("token", state=CoordinatorOptions(size=1)), LoggedLines().log)
    yield server
    for connection in list(server._transient):
        server.close_now(connection)
    server.loop.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def arrive(server: Connections, listener: socket.socket) -> socket.socket:
    theirs = socket.create_connection(listener.getsockname())
    ours, _ = listener.accept()
    server.add(ours)
    return theirs


def test_the_oldest_stranger_ends_for_a_newcomer_once_it_has_had_its_time(
    bounded: Connections, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_HELLO_SECONDS", 0.0)
    peers = []
    for _ in range(4):
        assert bounded.has_place_for_stranger()
        peers.append(arrive(bounded, listener))
    assert len(bounded._transient) == 3, "two strangers and the rank that is expected"
    assert peers[0].recv(1) == b"", "the oldest was closed"
    for peer in peers:
        peer.close()


def test_a_newcomer_waits_while_all_others_may_still_say_hello(
    bounded: Connections, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = [arrive(bounded, listener) for _ in range(3)]
    assert not bounded.has_place_for_stranger()
    assert len(bounded._transient) == 3
    monkeypatch.setattr(connections, "_HELLO_SECONDS", 0.0)
    assert bounded.has_place_for_stranger(), "once the oldest has had its time"
    for peer in peers:
        peer.close()
