"""No process gives its secrets to a Unix socket of another user's, and none takes a connection of another user's."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvdlab.collectives import system
from hvdlab.collectives.coordinator.process import ServerOptions
from hvdlab.collectives.coordinator.server import CoordinatorServer
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.failover.supervisor import server_of, take_over
from hvdlab.collectives.kvstore.servers import starting
from hvdlab.collectives.protocol.handshake import ForeignPeerError, connect
from hvdlab.collectives.protocol.messages import PROTOCOL_VERSION, Hello
from hvdlab.collectives.rendezvous.discovery import CoordinatorInfo
from hvdlab.collectives.system import host_key
from hvdlab.collectives.time_limits import Deadline
from hvdlab.launch.forkserver.client import ServerHandle
from hvdlab.launch.forkserver.server import PoolListener
from support import ordinary_user
from support.logged_lines import LoggedLines
from support.patience import PATIENCE

HELLO = Hello(PROTOCOL_VERSION, "secret" * 8, "rank", 0, "h", 1)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], socket.socket]]:
    """Make a socket of this name in a directory that all may enter, at which another user listens.

    As root it is one; otherwise the one function that reads credentials reports it.
    """
    with tempfile.TemporaryDirectory(prefix="hvd-f-", dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        made: list[socket.socket] = []

        def listen(name: str) -> socket.socket:
            listener = socket.socket(socket.AF_UNIX)
            made.append(listener)
            listener.bind(f"{directory}/{name}")
            os.chmod(f"{directory}/{name}", 0o777)
            if os.geteuid() == 0:
                ordinary_user.run(listener.listen)  # the kernel keeps the user that began to listen
            else:
                listener.listen()
                monkeypatch.setattr(system, "peer_credentials", lambda sock: (1, os.geteuid() + 1))
            return listener

        yield listen
        for listener in made:
            listener.close()


def heard(listener: socket.socket) -> bytes:
    """Return everything that the one connection to this listener brought."""
    listener.settimeout(PATIENCE)
    peer, _ = listener.accept()
    with peer:
        peer.settimeout(PATIENCE)
        return peer.recv(1 << 16)


def path_of(listener: socket.socket) -> Path:
    return Path(listener.getsockname())


def test_a_rank_sends_no_token_to_another_users_coordinator(theirs: Callable[[str], socket.socket]) -> None:
    listener = theirs("coordinator")
    with pytest.raises(
        ForeignPeerError, match=r"is not trusted, and was sent nothing: .* belongs to user \d+"
    ):
        connect(f"unix:{path_of(listener)}", HELLO, deadline=Deadline(PATIENCE))
    assert heard(listener) == b""


def test_a_card_that_leads_to_another_user_leads_nowhere(theirs: Callable[[str], socket.socket]) -> None:
    listener = theirs("coordinator")
    assert not CoordinatorInfo(2, host_key(), f"unix:{path_of(listener)}").answers(PATIENCE)


def test_a_successor_is_not_taken_from_another_user(theirs: Callable[[str], socket.socket]) -> None:
    listener = theirs("handover")
    assert server_of(path_of(listener).parent, PATIENCE) == 0
    with pytest.raises(PermissionError, match="belongs to user"):
        take_over(path_of(listener).parent, PATIENCE)


def test_no_pool_is_attached_to_that_another_user_keeps(theirs: Callable[[str], socket.socket]) -> None:
    listener = theirs("forkserver")
    with pytest.raises(StartError, match=r"no pool waits at .* belongs to user"):
        ServerHandle.find(str(path_of(listener)), Deadline(PATIENCE))


def test_another_users_parameter_server_does_not_count(theirs: Callable[[str], socket.socket]) -> None:
    listener = theirs(starting.SOCKET)
    assert not starting._is_serving(path_of(listener).parent)


# -- the accepting side -----------------------------------------------------------------------------------------------


def comes_from_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "peer_credentials", lambda sock: (1, os.geteuid() + 1))


def test_a_coordinator_takes_no_connection_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = LoggedLines()
    server = CoordinatorServer(ServerOptions(token="secret"), log=logged.log)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{tmp_path}/c")
    listener.listen()
    server.listen(listener)
    comes_from_another_user(monkeypatch)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(f"{tmp_path}/c")
            server.serve_once(PATIENCE)
            sock.settimeout(PATIENCE)
            assert sock.recv(1) == b""
        assert server.connections.idle
        assert ["belongs to user" in line for line in logged.lines()] == [True]
    finally:
        server.connections.close()


def test_a_fork_server_takes_no_connection_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = PoolListener(f"{tmp_path}/f")
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(listener.path)
            with monkeypatch.context() as other:
                comes_from_another_user(other)
                assert listener.accept() is None
            sock.settimeout(PATIENCE)
            assert sock.recv(1) == b""
        with socket.socket(socket.AF_UNIX) as sock:  # root may do everything anyway
            sock.connect(listener.path)
            with monkeypatch.context() as root:
                root.setattr(system, "peer_credentials", lambda sock: (7, 0))
                found = listener.accept()
        assert found is not None
        assert found[1] == 7
        found[0].close()
    finally:
        listener.close()
