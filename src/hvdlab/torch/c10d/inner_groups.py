"""Inner groups: groups of torch's own backends to which a watched group hands over its operations, and their abort.

NCCL can abort a communicator. Gloo can't: a wait of its ends only as its connections do. So each inner group of Gloo's has an address of its
own on the loopback interface, by which its connections are found in this process, and its abort shuts their receiving side.

Gloo keeps a message whose transmission fails, or is cut off, for an event that never comes, and the thread that sends it waits until the timeout.
So an abort first lets messages through that are on their way. It does not shut the sending side. And an aborted group keeps a duplicate of each
connection: Gloo closes its own descriptor as soon as it reads the end, and a closed connection would answer the messages that the
other ranks send before their own abort with a reset.
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
from hvdlab.collectives.planes.gloo import FLOWING_SECONDS, LOOK_SECONDS, connections, transferred
from hvdlab.collectives.time_limits import Deadline

_LOOPBACK = "127."
_OUTLIVES = 2
"""The limit of an inner group's own waits, as a multiple of the outer group's: the outer one gives up before, with a better text."""


class InnerGroup(Protocol):
    """One group of torch's own.

    Attributes:
        group: The group, which has torch's operations as methods.
    """

    group: Any

    def abort(self) -> None:
        """End the operations in flight with an error. Does not wait for them, but for bytes that flow: a second at most."""

    def close(self) -> None:
        """Drop the group, after :meth:`abort`; waits until its threads have ended."""


def make_inner(kind: str, store: Any, rank: int, size: int, timeout: timedelta) -> InnerGroup:
    """Make an inner group. Waits for the other ranks to do the same.

    Args:
        kind: Torch's backend: ``gloo`` or ``nccl``.
        store: A store of this group's alone, in which the ranks find each other.
        rank: This rank's number in the group.
        size: Number of its ranks.
        timeout: Limit of each wait of the outer group.

    Raises:
        UnsupportedError: There is no such inner group.
        RuntimeError: Torch could not make it.
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
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # All of 127.0.0.0/8 is the loopback interface. The first byte keeps clear of 127.0, which other programs use.
        own = _LOOPBACK + ".".join(str(1 + byte % 254) for byte in secrets.token_bytes(3))
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
        options._timeout = timeout
        store.set(f"address {rank}", own)
        backend: Any = dist.ProcessGroupGloo(store, rank, size, options)
        # An end of each connection has the address of the rank that has accepted it; the other one is not bound to its rank's.
        self._addresses = {store.get(f"address {other}").decode() for other in range(size)}
        # Before the group is used: a rank that is connected to all and destroys its group at once would close a connection that another
        # rank has not completed yet.
        store.set(f"connected {rank}", "")
        for other in range(size):
            store.get(f"connected {other}")
        self.group = _in_group(backend, store, rank, size, "cpu", dist.ProcessGroup.BackendType.GLOO)
        #: Guards the next two: a user's thread may close the group while the control thread aborts it.
        self._lock = threading.Lock()
        self._closed = False
        #: The connections that an abort has shut. They are open for as long as this object lives.
        self._duplicates: list[socket.socket] = []
        weakref.finalize(self, _close_all, self._duplicates)

    def abort(self) -> None:
        found = self._connections()
        with self._lock:
            if self._closed:
                _close_all(found)
                return
            self._duplicates += found
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
    """Inner group of NCCL's."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        self._backend: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        self.group = _in_group(self._backend, store, rank, size, "cuda", dist.ProcessGroup.BackendType.NCCL)

    def abort(self) -> None:
        if (backend := self._backend) is not None:  # a user's thread may have closed the group
            backend.abort()

    def close(self) -> None:
        self.group = self._backend = None
