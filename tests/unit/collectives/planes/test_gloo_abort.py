"""Leftovers of an abort in a Gloo group: none, and the others get all that this member had to send."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives.planes import gloo
from hvdlab.collectives.planes.base import KeyValue, PhaseTimes, PlaneAborted, PlaneContext
from hvdlab.collectives.planes.gloo import GlooPlane, listeners, traffic
from hvdlab.collectives.types import SUM, DType
from support.patience import HOUR, PATIENCE

pytest.importorskip("torch.distributed")

COUNT = 1 << 20


class Shared(KeyValue):
    """Store of planes within one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout)
            return self._values[key]


@pytest.fixture
def pair() -> Iterator[list[GlooPlane]]:
    planes = connected("127.0.0.1")
    yield planes
    for plane in planes:
        plane.close()


def connected(address: str) -> list[GlooPlane]:
    store = Shared()
    planes = [
        GlooPlane(PlaneContext(0, 1, index, 2, (0, 1), ("here", "here"), store, -1, address, {}))
        for index in range(2)
    ]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda plane: plane.connect(30.0), planes))
    return planes


def add(plane: GlooPlane) -> Any:
    ones, out = np.ones(COUNT, np.float32), np.empty(COUNT, np.float32)
    plane.allreduce([ones], [out], DType.F32, SUM, PhaseTimes())
    return out


def test_others_get_all_of_an_operation_that_is_aborted_while_it_begins(
    pair: list[GlooPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo, "_FINISH_SECONDS", PATIENCE)  # however late the other one begins
    first, second = pair
    group = first._group

    def begin(*args: object) -> Any:
        """Begin the operation, which is aborted before any code has recorded that."""
        work = group.allreduce(*args)
        first.abort()
        return work

    first._group = SimpleNamespace(allreduce=begin)
    with ThreadPoolExecutor(2) as threads:
        aborted, other = threads.submit(add, first), threads.submit(add, second)
        assert isinstance(aborted.exception(PATIENCE), PlaneAborted)
        assert np.all(other.result(PATIENCE) == 2)
    assert not first.gave_up


def test_aborted_operation_ends_once_a_descriptor_is_free(
    pair: list[GlooPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = pair
    group, find = first._group, gloo._inet_sockets
    looks: list[int] = []

    def find_sockets() -> Any:
        looks.append(1)
        if len(looks) <= 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return find()

    def begin(*args: object) -> Any:
        """Begin the operation, in which the other member takes no part, and abort it."""
        work = group.allreduce(*args)
        first.abort()
        return work

    first._group = SimpleNamespace(allreduce=begin)
    with monkeypatch.context() as patch:
        patch.setattr(gloo, "_inet_sockets", find_sockets)
        with pytest.raises(PlaneAborted):
            add(first)
    assert not first._running, "Gloo still works on the tensors"
    assert not first.gave_up
    first._group = group


def test_others_end_when_one_has_aborted_between_operations(pair: list[GlooPlane]) -> None:
    first, second = pair
    first.abort()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(add, second)
        second.abort()
        assert isinstance(waiting.exception(PATIENCE), PlaneAborted)
    assert not second.gave_up


class Deserter(Shared):
    """Store of a member that is aborted just after it has published its address to the others."""

    def __init__(self, store: Shared) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, timeout: float) -> bytes:
        if key.startswith("gloo/"):
            raise PlaneAborted
        return self._store.get(key, timeout)


@pytest.mark.parametrize("deserter", [0, 1])
def test_who_waits_for_a_member_that_does_not_come_ends_with_an_abort(deserter: int) -> None:
    """Which of two connects to the other depends on their ports, which the system chooses."""
    for _ in range(4):
        store = Shared()
        stores = [Deserter(store) if index == deserter else store for index in range(2)]
        planes = [
            GlooPlane(PlaneContext(0, 1, index, 2, (0, 1), ("here", "here"), mine, -1, "127.0.0.1", {}))
            for index, mine in enumerate(stores)
        ]
        with ThreadPoolExecutor(2) as threads:
            waiting = [threads.submit(plane.connect, HOUR) for plane in planes]
            assert isinstance(waiting[deserter].exception(PATIENCE), PlaneAborted)
            planes[1 - deserter].abort()
            assert isinstance(waiting[1 - deserter].exception(PATIENCE), PlaneAborted)
        for plane in planes:
            plane.close()


def test_a_group_that_was_given_up_is_let_go_when_gloo_gives_up_as_well(
    pair: list[GlooPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    mine = first._ports
    first._group._set_default_timeout(timedelta(seconds=1))
    monkeypatch.setattr(gloo, "_completes", lambda work, seconds: False)
    monkeypatch.setattr(first, "_disconnect", lambda how: None)

    def begin(*args: object) -> Any:
        """Begin the operation, which is then aborted."""
        work = first._group.gloo.allreduce(*args)
        first.abort()
        return work

    first._group = SimpleNamespace(gloo=first._group, allreduce=begin)
    with pytest.raises(PlaneAborted):
        add(first)
    assert first.gave_up
    second.close()
    deadline = time.monotonic() + PATIENCE
    while mine & listeners("127.0.0.1"):
        assert time.monotonic() < deadline, "its sockets are still open"
        time.sleep(0.02)
    for thread in threading.enumerate():
        if thread.name == "hvdlab-gloo-let-go":
            thread.join(PATIENCE)


def test_traffic_counts_what_came_and_went() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as caller,
        server.accept()[0] as callee,
    ):
        ports = {server.getsockname()[:2]}
        assert sum(traffic(ports).values()) < 10
        caller.sendall(b"x" * 1000)
        assert len(callee.recv(1000, socket.MSG_WAITALL)) == 1000
        counts = traffic(ports)
        assert counts[callee.getsockname(), callee.getpeername()] >= 1000
        assert traffic({("127.0.0.1", 1)}) == {}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_listener_of_the_users_that_came_in_the_same_instant_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    import torch.distributed as dist

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    create, servers = dist.ProcessGroupGloo.create_device, []

    def create_device(**options: Any) -> Any:
        servers.append(socket.create_server((address, 0), family=family))
        return create(**options)

    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", create_device)
    planes = connected(address)
    assert len(planes[0]._ports) == 2
    for server in servers:
        with (
            server,
            socket.create_connection(server.getsockname()[:2], 10) as caller,
            server.accept()[0] as callee,
        ):
            for plane in planes:
                plane.abort()
            caller.sendall(b"still here")
            assert callee.recv(10, socket.MSG_WAITALL) == b"still here"
    for plane in planes:
        plane.close()
