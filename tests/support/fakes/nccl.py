"""A simulated NCCL on the simulated GPU: members are processes, or threads, and their messages are files of one directory.

It is as stubborn as the real one: an enqueued operation waits on the stream for the other members, until it is aborted.
And it is as strict: a call while the last one has not settled fails.
"""

from __future__ import annotations

import collections
import functools
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hvdlab.collectives.planes.base import storage_type
from hvdlab.collectives.planes.gpu import nccl_library
from hvdlab.collectives.planes.gpu.nccl_library import ID_BYTES, TYPES, NcclFailed, NcclPiece
from hvdlab.collectives.reduce import make_fold
from hvdlab.collectives.types import DType, ReduceOp
from support.fakes.cuda import FakeCuda, bytes_at

DIRECTORY = "FAKE_NCCL_DIRECTORY"
"""The variable that says where the files are; those of a group of the conformance suite are in the group's directory."""
_LOOK_AGAIN = 0.0005  # seconds


class FakeNccl:
    """See :class:`hvdlab.collectives.planes.gpu.nccl_library.Nccl`."""

    version_text = "2.28.9"

    def __init__(self, device: FakeCuda) -> None:
        self.device = device

    def unique_id(self) -> bytes:
        parent = os.environ.get(DIRECTORY) or os.environ["HVDLAB_CONFORMANCE_DUMPS"]
        return tempfile.mkdtemp(prefix="nccl-", dir=parent).encode().ljust(ID_BYTES, b"\0")

    def connect(self, identity: bytes, members: int, index: int) -> FakeCommunicator:
        return FakeCommunicator(self.device, Path(identity.rstrip(b"\0").decode()), members, index)


class FakeCommunicator:
    """See :class:`hvdlab.collectives.planes.gpu.nccl_library.Communicator`."""

    def __init__(self, device: FakeCuda, directory: Path, members: int, index: int) -> None:
        self.device, self.directory, self.members, self.index = device, directory, members, index
        self.aborted = threading.Event()
        self.failure = ""
        #: Not even the members have found each other yet; afterwards: how often the answer is that a call has not settled.
        self._is_connected, self._unsettled = False, 0
        #: Messages to and from each member so far.
        self._sent: collections.Counter[int] = collections.Counter()
        self._received: collections.Counter[int] = collections.Counter()
        (directory / f"member-{index}").touch()

    # -- calls --------------------------------------------------------------------------------------------------------

    def settled(self) -> bool:
        assert not self.aborted.is_set(), "the communicator is gone"
        if self.failure:
            raise NcclFailed(self.failure)
        if not self._is_connected:
            self._is_connected = all((self.directory / f"member-{i}").exists() for i in range(self.members))
            return self._is_connected
        self._unsettled = max(0, self._unsettled - 1)
        return not self._unsettled

    def _enqueue(self, stream: int, work: Callable[[], None]) -> None:
        if not self._is_connected or self._unsettled:
            raise NcclFailed("NCCL: a call before the last one has settled")
        assert not self.aborted.is_set(), "the communicator is gone"
        self._unsettled = 2
        self.device._put(stream, work)

    def allreduce(
        self, source: int, target: int, count: int, dtype: DType, op: ReduceOp, stream: int
    ) -> None:
        kind = storage_type(dtype)
        assert dtype in TYPES
        assert not (dtype.is_floating and op in (ReduceOp.MIN, ReduceOp.MAX)), "NCCL's lose NaNs"

        def work() -> None:
            everything = self._gathered(source, count * kind.itemsize)
            if everything is not None:
                arrays = [np.frombuffer(one, kind) for one in everything]
                result = np.empty(count, kind)
                make_fold(dtype, op)(arrays, result, 1.0, 1.0)
                bytes_at(target, result.nbytes)[:] = result.view(np.uint8)

        self._enqueue(stream, work)

    def allgather(self, source: int, target: int, nbytes: int, stream: int) -> None:
        def work() -> None:
            everything = self._gathered(source, nbytes)
            if everything is not None:
                bytes_at(target, nbytes * self.members)[:] = np.frombuffer(b"".join(everything), np.uint8)

        self._enqueue(stream, work)

    def broadcast(self, source: int, target: int, nbytes: int, root: int, stream: int) -> None:
        others = [other for other in range(self.members) if other != root]

        def work() -> None:
            if self.index == root:
                content = bytes(bytes_at(source, nbytes))
                for other in others:
                    self._send(other, content)
                received: bytes | None = content
            else:
                received = self._receive(root)
            if received is not None:
                bytes_at(target, nbytes)[:] = np.frombuffer(received, np.uint8)

        self._enqueue(stream, work)

    def exchange(self, sends: Sequence[NcclPiece], receives: Sequence[NcclPiece], stream: int) -> None:
        for pieces in (sends, receives):
            members = [piece.member for piece in pieces]
            assert len(set(members)) == len(members), "at most one piece from one member to another"
            assert self.index not in members
            assert all(piece.nbytes for piece in pieces)

        def work() -> None:
            for piece in sends:
                self._send(piece.member, bytes(bytes_at(piece.pointer, piece.nbytes)))
            for piece in receives:
                content = self._receive(piece.member)
                if content is None:
                    return
                assert len(content) == piece.nbytes
                bytes_at(piece.pointer, piece.nbytes)[:] = np.frombuffer(content, np.uint8)

        self._enqueue(stream, work)

    def abort(self) -> None:
        self.aborted.set()

    def close(self, within: float) -> None:
        self.aborted.set()

    # -- on the stream --------------------------------------------------------------------------------------------------

    def _gathered(self, source: int, nbytes: int) -> list[bytes] | None:
        """Return the memory of all members, by position; ``None`` after an abort."""
        own = bytes(bytes_at(source, nbytes))
        others = [other for other in range(self.members) if other != self.index]
        for other in others:
            self._send(other, own)
        everything = {self.index: own}
        for other in others:
            content = self._receive(other)
            if content is None:
                return None
            everything[other] = content
        return [everything[member] for member in range(self.members)]

    def _send(self, member: int, content: bytes) -> None:
        if self.aborted.is_set():
            return
        self._sent[member] += 1
        name = f"{self.index}-{member}-{self._sent[member]}"
        unfinished = self.directory / f"{name}.part"
        unfinished.write_bytes(content)
        unfinished.rename(self.directory / name)

    def _receive(self, member: int) -> bytes | None:
        self._received[member] += 1
        path = self.directory / f"{member}-{self.index}-{self._received[member]}"
        while not path.exists():
            if self.aborted.wait(_LOOK_AGAIN):
                return None
        content = path.read_bytes()
        path.unlink()
        return content


def install(device: FakeCuda) -> None:
    """Give this process, which has a simulated GPU, a simulated NCCL."""
    nccl_library.nccl = functools.cache(lambda: FakeNccl(device))
