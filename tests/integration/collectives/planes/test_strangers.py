"""Strangers at the ports of Gloo's ranks, while they connect and afterwards: the job goes on, and nothing is kept."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.planes import gloo
from support.ranks.resident import Ranks

GARBAGE = (
    b"",
    b"x",
    b"GET / HTTP/1.1\r\n\r\n",
    random.Random(1).randbytes(8),
    random.Random(2).randbytes(60_000),
)


@pytest.fixture
def two() -> Iterator[Ranks]:
    pytest.importorskip("torch")
    with Ranks(2, env={"HVDLAB_PLANE": "gloo"}) as ranks:
        yield ranks


def total() -> float:
    return float(hvd.allreduce(np.ones(100_000, np.float32), "t", op=hvd.Sum)[0])


def doors(ranks: Ranks) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for process in ranks.processes:
        for connection in psutil.Process(process.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found.append((connection.laddr.ip, connection.laddr.port))
    return found


def knock(door: tuple[str, int], data: bytes) -> socket.socket | None:
    try:
        sock = socket.create_connection(door, 0.2)
    except OSError:
        return None
    # The member may refuse it before all is sent.
    with contextlib.suppress(OSError):
        sock.sendall(data)
    return sock


def test_garbage_while_the_group_connects_and_no_door_afterwards(two: Ranks) -> None:
    opened: list[socket.socket | None] = []
    over = threading.Event()

    def bother() -> None:
        while not over.is_set():
            for door in doors(two):
                opened.extend(knock(door, data) for data in GARBAGE)
            over.wait(0.001)

    stranger = threading.Thread(target=bother)
    stranger.start()
    try:
        assert two.run(total, timeout=60) == [2.0] * 2
    finally:
        over.set()
        stranger.join()
        for sock in opened:
            if sock is not None:
                sock.close()
    held = [psutil.Process(process.pid).num_fds() for process in two.processes]
    assert doors(two)
    for door in doors(two):
        assert knock(door, b"hello") is None
    assert two.run(total) == [2.0] * 2
    assert [psutil.Process(process.pid).num_fds() for process in two.processes] == held


def without_filters() -> None:
    gloo._SO_ATTACH_FILTER = -1


def again() -> float:
    context.shutdown()
    context.init()
    return total()


def test_no_door_where_filters_are_refused_as_to_ordinary_users(two: Ranks) -> None:
    """Traffic goes on through the doors' older connections, and new groups connect."""
    two.run(without_filters)
    for train in (total, total, again, total):
        assert two.run(train, timeout=60) == [2.0] * 2
        assert doors(two)
        assert [door for door in doors(two) if knock(door, b"hello") is not None] == []
