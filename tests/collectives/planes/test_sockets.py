"""Looking at a process's own sockets leaves no descriptor behind, whatever other threads open and close meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import threading
from types import FrameType

import pytest

from hvdlab.collectives.planes.sockets import connections, listeners, shut_doors


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


def test_nobody_connects_through_a_shut_door() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        shut_doors({server.getsockname()[:2]})
        with socket.socket() as caller:
            caller.settimeout(0.2)
            try:
                caller.connect(server.getsockname())
            except TimeoutError:
                return
        raise AssertionError("a shut door let somebody in")


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


# A duplicate that nobody could close is closed with its object, which says so.
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
