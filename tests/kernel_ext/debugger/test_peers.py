"""Who may use a port on the loopback interface."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from hvdlab.kernel_ext.debugger.peers import is_mine


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whose a connection is")
def test_connections_of_other_users_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert is_mine(connection)
            other = os.getuid() + 1
            monkeypatch.setattr(os, "getuid", lambda: other)
            assert not is_mine(connection)


BLIND = """\
import encodings.idna, os, socket, sys
os.setuid(65534)
there = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
there.sendall(b"blindly")
"""


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root can be another user")
def test_a_stranger_who_has_closed_the_connection_is_not_root() -> None:
    """The kernel shows connections that were closed as those of user 0."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        subprocess.run([sys.executable, "-c", BLIND, str(listener.getsockname()[1])], check=True, timeout=60)
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(7) == b"blindly"
            assert not is_mine(connection)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whose a connection is")
def test_a_connection_that_was_closed_or_reset_is_nobody_s() -> None:
    for linger in (b"", b"\1\0\0\0\0\0\0\0"):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            there = socket.create_connection(listener.getsockname())
            if linger:
                there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection, _ = listener.accept()
            with connection:
                there.close()
                assert not is_mine(connection)
