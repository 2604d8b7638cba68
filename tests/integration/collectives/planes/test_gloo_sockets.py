"""The sockets of Gloo. Listing a process's own sockets leaves no descriptor behind, while other threads open and close
some."""

from __future__ import annotations

import os
import signal
import socket
import threading
from types import FrameType

import pytest

from hvdlab.collectives.planes import gloo
from hvdlab.collectives.planes.gloo import block_listeners, connections, listeners
from support import ordinary_user


def test_a_listener_is_found_by_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.getsockname()[:2] in listeners("127.0.0.1")
        assert server.getsockname()[:2] not in listeners("127.0.0.2")


def test_a_shut_connection_ends_on_both_sides() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as caller,
        server.accept()[0] as callee,
    ):
        address = callee.getsockname()[:2], callee.getpeername()[:2]
        for sock, local, peer in connections():
            if (local, peer) == address:
                sock.shutdown(socket.SHUT_RDWR)
        assert caller.recv(1) == b""
        assert callee.recv(1) == b""


FAMILIES = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]


def lets_in(family: socket.AddressFamily, address: tuple[str, int]) -> bool:
    with socket.socket(family) as caller:
        caller.settimeout(0.2)
        try:
            caller.connect(address)
        except TimeoutError:
            return False
    return True


def shut_and_try(family: socket.AddressFamily, host: str) -> tuple[bool, bool, bytes]:
    """Return whether strangers are admitted before and after, and the data that an earlier connection still carries."""
    with socket.create_server((host, 0), family=family) as server:
        address = server.getsockname()[:2]
        before = lets_in(family, address)
        server.accept()[0].close()
        with socket.create_connection(address) as caller, server.accept()[0] as callee:
            assert block_listeners({address}) == set()
            after = lets_in(family, address)
            caller.sendall(b"data")
            return before, after, callee.recv(4)


@pytest.mark.parametrize(("family", "host"), FAMILIES)
def test_nobody_connects_through_a_shut_door(family: socket.AddressFamily, host: str) -> None:
    assert shut_and_try(family, host) == (True, False, b"data")


@pytest.mark.parametrize(("family", "host"), FAMILIES)
def test_an_ordinary_user_can_shut_it_too(family: socket.AddressFamily, host: str) -> None:
    """Where filters are for root only."""
    assert ordinary_user.run(shut_and_try, family, host) == (True, False, b"data")


def test_a_signature_shuts_it_without_a_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "_SO_ATTACH_FILTER", -1)
    for family, host in FAMILIES:
        assert shut_and_try(family, host) == (True, False, b"data")


def test_a_door_that_can_not_be_shut_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "_SO_ATTACH_FILTER", -1)
    monkeypatch.setattr(gloo, "_TCP_MD5SIG_EXT", -1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()[:2]
        assert block_listeners({address}) == {address}


def test_numbers_that_change_their_meaning_leave_nothing_open() -> None:
    """A descriptor that is a socket when listed may be a pipe when duplicated."""
    over = threading.Event()

    def churn() -> None:
        while not over.is_set():
            a, b = socket.socketpair()
            a.close()
            b.close()
            for end in os.pipe():
                os.close(end)

    before = len(os.listdir("/proc/self/fd"))
    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            for _ in connections():
                pass
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert len(os.listdir("/proc/self/fd")) == before


class Interrupted(Exception):
    """As Ctrl-C would."""


# A duplicate that no caller could close is closed with its object, which warns of it.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_leaves_nothing_open() -> None:
    """The main thread looks, and may be interrupted between any two steps."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    looks = 0
    before = len(os.listdir("/proc/self/fd"))
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for turn in range(1500):
            try:
                signal.setitimer(signal.ITIMER_REAL, 20e-6 + turn % 100 * 3e-6)
                for _ in connections():
                    pass
                for _ in range(100):
                    listeners("127.0.0.1")
            except Interrupted:
                looks += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert looks > 1000
    assert len(os.listdir("/proc/self/fd")) == before
