"""Inner groups: groups of torch's own backends to which a watched group hands over its operations, and their abort.

NCCL can abort a communicator. Gloo can't: a wait of its ends only as its connections do. So each inner group of Gloo's has an address of its
own on the loopback interface, by which its connections are found in this process, and its abort shuts their receiving side.

Gloo keeps a message whose transmission fails, or is cut off, for an event that never comes, and the thread that sends it waits until the timeout.
So an abort first lets messages through that are on their way. It does not shut the sending side. And an aborted group keeps a duplicate of each
connection: Gloo closes its own descriptor as soon as it reads the end, and a closed connection would answer the messages that the
other ranks send before their own abort with a reset.

A group that connects can be aborted as well. Gloo then waits in one of two ways: for a value of the store, which is closed, or for another rank
to connect, in whose place this process connects to itself.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hvdlab.collectives.errors import UnsupportedError
from hvdlab.collectives.planes.gloo import (
    FLOWING_SECONDS,
    LOOK_SECONDS,
    connect_once,
    connections,
    listeners,
    transferred,
)
from hvdlab.collectives.time_limits import Deadline
from hvdlab.torch.c10d.store import HvdlabStore

_LOOPBACK = "127."
_NEWS_SECONDS = 0.5
"""Seconds to wait for an abort after Gloo could not connect: a rank that got the abort first closes its connections before it arrives here."""
_OUTLIVES = 2
"""The limit of an inner group's own waits, as a multiple of the outer group's: the outer one gives up before, with a better text."""


class InnerGroup(Protocol):
    """One group of torch's own.

    Attributes:
        group: The group, which has torch's operations as methods, once it is connected.
    """

    group: Any

    def connect(self) -> None:
        """Make the group. Waits for the other ranks to do the same.

        Raises:
            RuntimeError, HvdlabError: Torch could not make it, or it was aborted meanwhile.
        """

    def abort(self) -> None:
        """End the operations in flight with an error, or :meth:`connect`. Does not wait for them, but for bytes that flow: a second at most."""

    def close(self) -> None:
        """Drop the group, after :meth:`abort`; waits until its threads have ended."""


def make_inner(kind: str, store: HvdlabStore, rank: int, size: int, timeout: timedelta) -> InnerGroup:
    """Return an inner group that is not connected yet.

    Args:
        kind: Torch's backend: ``gloo`` or ``nccl``.
        store: A store of this group's alone, in which the ranks find each other. An abort closes it.
        rank: This rank's number in the group.
        size: Number of its ranks.
        timeout: Limit of each wait of the outer group.

    Raises:
        UnsupportedError: There is no such inner group.
    """
    if kind == "gloo":
        return GlooInner(store, rank, size, timeout * _OUTLIVES)
    if kind == "nccl" and dist.is_nccl_available():
        return NcclInner(store, rank, size, timeout * _OUTLIVES)
    raise UnsupportedError(
        f"A watched group can't have an inner group of {kind!r} here: it has one of gloo, or of nccl if torch has that."
    )


def _in_group(backend: Any, store: Any, rank: int, size: int, device: str, kind: Any) -> Any:
    """Return a group with one backend: a group has more of torch's operations than a backend."""
    group: Any = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    return group


def _close_all(ends: Sequence[socket.socket]) -> None:
    for end in ends:
        end.close()


def _wait_idle(ends: Sequence[socket.socket]) -> None:
    """Wait until no more bytes flow over these connections; for :data:`FLOWING_SECONDS` at most.

    No event shows that Gloo has sent all of a message: what can be seen is how many bytes the other side has got.
    """
    deadline, before = Deadline(FLOWING_SECONDS), None
    while not deadline.expired:
        try:
            now = [transferred(end) for end in ends]
        except (OSError, struct.error):  # one has ended, or this system does not count
            return
        if now == before:
            return
        before = now
        time.sleep(LOOK_SECONDS)


class GlooInner:
    """Inner group of Gloo's, of ranks on one host.

    After an abort its owner keeps the object until the other ranks have aborted theirs: it has the connections to them.

    Args:
        store, rank, size: As for :func:`make_inner`.
        timeout: Limit of each wait.
    """

    def __init__(self, store: HvdlabStore, rank: int, size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self.group: Any = None
        # All of 127.0.0.0/8 is the loopback interface. The first byte keeps clear of 127.0, which other programs use.
        self._own = _LOOPBACK + ".".join(str(1 + byte % 254) for byte in secrets.token_bytes(3))
        #: The addresses of the ranks. An end of each connection has that of the rank that has accepted it; the other one is not bound to its
        #: rank's.
        self._addresses = {self._own}
        #: Where Gloo listens for the other ranks, while it connects.
        self._listeners: set[tuple[str, int]] = set()
        #: Set by an abort, before anything that makes Gloo's connecting fail.
        self._aborted = threading.Event()
        #: Guards the next two: a user's thread may close the group while the control thread aborts it.
        self._lock = threading.Lock()
        self._closed = False
        #: The connections that an abort has shut. They are open for as long as this object lives.
        self._duplicates: list[socket.socket] = []
        weakref.finalize(self, _close_all, self._duplicates)

    def connect(self) -> None:
        try:
            group = self._connected()
        except RuntimeError:
            self._aborted.wait(_NEWS_SECONDS)
            raise
        with self._lock:
            if not self._closed:  # close() would not drop one that comes later
                self.group = group

    def _connected(self) -> Any:
        """Return torch's group, whose ranks are all connected."""
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._own)]
        options._timeout = self._timeout
        # Before a call of the store, which fails after an abort. The abort closes the store before it reads the listeners: either Gloo does
        # not begin to wait for a rank, or the abort connects in its place.
        self._listeners = listeners(self._own)
        self._store.set(f"address {self._rank}", self._own)
        # Before Gloo connects: an abort that comes meanwhile finds its connections.
        self._addresses = {self._store.get(f"address {other}").decode() for other in range(self._size)}
        backend: Any = dist.ProcessGroupGloo(self._store, self._rank, self._size, options)
        # Before the group is used: a rank that is connected to all and destroys its group at once would close a connection that another
        # rank has not completed yet.
        self._store.set(f"connected {self._rank}", "")
        for other in range(self._size):
            self._store.get(f"connected {other}")
        self._listeners = set()
        return _in_group(
            backend, self._store, self._rank, self._size, "cpu", dist.ProcessGroup.BackendType.GLOO
        )

    def abort(self) -> None:
        # First: connect(), which fails by one of the following, waits for this before it raises.
        self._aborted.set()
        self._store.close()
        # Gloo waits without the store for a rank that has published its address and does not connect; this process comes in its place.
        connect_once(self._listeners, self._size)
        found = self._connections()
        with self._lock:
            if self._closed:
                _close_all(found)
                return
            self._duplicates += found
        # Outside the lock: a user's thread that closes the group must not wait for bytes that flow.
        _wait_idle(found)
        for end in found:
            with contextlib.suppress(OSError):  # the other end has reset it
                end.shutdown(socket.SHUT_RD)

    def _connections(self) -> list[socket.socket]:
        """Return duplicates of this group's connections."""
        return [
            socket.socket(sock.family, sock.type, sock.proto, fileno=os.dup(sock.fileno()))
            for sock, (own, *_), (peer, *_) in connections()
            if own in self._addresses or peer in self._addresses
        ]

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.group = None  # waits in Gloo's destructor


class NcclInner:
    """Inner group of NCCL's.

    Args:
        store, rank, size: As for :func:`make_inner`.
        timeout: Limit of each wait.
    """

    def __init__(self, store: HvdlabStore, rank: int, size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self.group: Any = None
        #: The object that can be aborted, apart from the group: an abort on another thread finds it while torch
        #: still makes the group.
        self._backend: Any = None
        self._closed = False

    def connect(self) -> None:
        # Waits for no rank: NCCL connects in the first operation.
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        self._backend = dist.ProcessGroupNCCL(self._store, self._rank, self._size, options)
        self.group = _in_group(
            self._backend, self._store, self._rank, self._size, "cuda", dist.ProcessGroup.BackendType.NCCL
        )
        # After the stores: either this thread sees that it was closed meanwhile, or close() drops them.
        if self._closed:
            self.group = self._backend = None

    def abort(self) -> None:
        self._store.close()  # in which the ranks exchange what they need at their first operation
        if (backend := self._backend) is not None:  # a user's thread may have closed the group
            backend.abort()

    def close(self) -> None:
        self._closed = True
        self.group = self._backend = None
