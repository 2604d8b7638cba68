"""Who may use a port on the loopback interface."""

from __future__ import annotations

import os
import socket
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
