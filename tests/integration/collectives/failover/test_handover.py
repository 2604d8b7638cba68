"""The listening socket, the tokens and the key of a coordinator go to processes of its user only."""

from __future__ import annotations

import os
import resource
import select
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from hvdlab.collectives import system
from hvdlab.collectives.coordinator.process import CoordinatorLaunch
from hvdlab.collectives.failover.supervisor import Handover, take_over
from support import ordinary_user
from support.patience import PATIENCE


@pytest.fixture
def offered() -> Iterator[Handover]:
    """One whose directory others can enter: nothing but the check of the peer is left."""
    with (
        tempfile.TemporaryDirectory(prefix="hvd-h-", dir="/tmp") as directory,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        os.chmod(directory, 0o755)
        found = Handover(
            CoordinatorLaunch("secret", "another", directory, os.getpid(), listener=listener.fileno())
        )
        os.chmod(Path(directory) / "handover", 0o777)
        with closing(found):
            yield found


def ask(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(PATIENCE)
    sock.connect(path)
    return sock


def test_a_process_of_the_user_gets_it(offered: Handover) -> None:
    with ask(offered.socket.getsockname()) as peer:
        offered.serve()
        said, descriptors, _, _ = socket.recv_fds(peer, 1 << 16, 1)
        os.close(descriptors[0])
    assert b"secret" in said


def test_process_gets_it_where_no_descriptor_is_left(offered: Handover) -> None:
    """A connection that is not accepted would wake the coordinator again and again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    with ask(offered.socket.getsockname()) as peer:
        resource.setrlimit(resource.RLIMIT_NOFILE, (peer.fileno() + 20, hard))
        try:
            with suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            offered.serve()
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert not select.select([offered.socket], [], [], 0)[0]
        said, descriptors, _, _ = socket.recv_fds(peer, 1 << 16, 1)
        os.close(descriptors[0])
    assert b"secret" in said


def test_another_user_who_gets_to_the_socket_gets_nothing(offered: Handover) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to be two users")

    # The connection is made by the other user, and read by its present holder.
    def connect_and_read() -> bytes:
        with ask(offered.socket.getsockname()) as peer:
            return peer.recv(1 << 16)

    import threading

    with offered.socket as listener:
        listener.setblocking(True)
        serving = threading.Thread(target=offered.serve)
        serving.start()
        try:
            assert ordinary_user.run(connect_and_read) == b""
        finally:
            serving.join(PATIENCE)


def test_a_peer_of_another_user_is_sent_away(offered: Handover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "peer_credentials", lambda sock: (1, os.getuid() + 1))
    with ask(offered.socket.getsockname()) as peer:
        offered.serve()
        assert peer.recv(1 << 16) == b""


def test_who_is_sent_away_says_so(offered: Handover, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    def credentials(sock: socket.socket) -> tuple[int, int]:
        """Return those of another user on the coordinator's side only."""
        return 1, os.geteuid() + (threading.current_thread() is not threading.main_thread())

    monkeypatch.setattr(system, "peer_credentials", credentials)

    with offered.socket as listener:
        listener.setblocking(True)
        serving = threading.Thread(target=offered.serve)
        serving.start()
        try:
            with pytest.raises(OSError, match="hands nothing over"):
                take_over(Path(listener.getsockname()).parent, PATIENCE)
        finally:
            serving.join(PATIENCE)
