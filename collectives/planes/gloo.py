"""The ``gloo`` plane: CPU tensors between hosts, through ``torch.distributed``'s Gloo process group.

Rendezvous goes through the coordinator's store, so that no extra port is opened; Gloo's own sockets bind to
``PlaneContext.address``. Gloo has no call that cancels an operation, so an abort shuts its sockets down: a call that waits on
them returns with an error at once, on this rank and on its peers. Only a message that has arrived in part keeps its call waiting
for the rest; hence an abort first lets messages through that are still on their way.
"""

from __future__ import annotations

import _socket
import ctypes
import itertools
import operator
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdlab.collectives.planes.base import HostArray, PhaseTimes, PlaneAborted, PlaneBroken, PlaneContext
from hvdlab.collectives.planes.host import HostPlane, Staging
from hvdlab.collectives.text import LOG
from hvdlab.collectives.time_limits import Deadline
from hvdlab.collectives.types import DType, ReduceOp, Reduction

if TYPE_CHECKING:
    import torch

_GLOO_TIMEOUT = timedelta(hours=1)
"""Longest time in which Gloo may see nothing from a peer that takes part in an operation, as from one that was stopped. A group
whose operation does not end after an abort is also kept that long."""
_NEWS_SECONDS = 0.5
"""Seconds to wait for an abort after an error of Gloo: a peer that got the abort first closes its connections before it arrives here."""
_FINISH_SECONDS = 0.3
"""Seconds that an aborted operation may go on in any case."""
LOOK_SECONDS = 0.1
"""After that a byte has to be sent or received in each such time."""
FLOWING_SECONDS = 1.0
"""An operation whose bytes flow may go on for this long, and not much longer."""
_GIVE_UP_SECONDS = 0.2
"""Seconds that an operation gets to end once its sockets are shut down, before it is left to Gloo."""
_SO_ATTACH_FILTER = 26  # Linux; Python does not name it
_TCP_COUNTS = struct.Struct("120xQQ")  # Linux: bytes acknowledged and received, within struct tcp_info
# Linux: struct tcp_md5sig is a sockaddr_storage, flags, prefix length, key length, interface, and room for a key.
_TCP_MD5SIG_EXT = 32
_SOCKADDR_STORAGE, _MD5_KEY_LIMIT = 128, 80  # bytes
_MD5_HEAD = struct.Struct("=BBHi")
_MD5_PREFIX = 1  # the flag by which the prefix length counts: 0 for all addresses
_KEY_BYTES = 32  # of a random key that is not kept
_KNOCK_SECONDS = 0.2
"""Seconds for one connection to a listener of this process."""
_NUMBER = struct.Struct("=q")  # the number of a connection, which Gloo reads first
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # a packet filter of one instruction: return 0 bytes
_one_listens = threading.Lock()
"""Held while Gloo opens its listener, so that no other plane of this process takes the listener for its own."""


class GlooPlane(HostPlane):
    """Data plane: collectives of one process set and generation over Gloo. See :class:`hvdlab.collectives.planes.base.Plane`."""

    name = "gloo"

    def __init__(self, context: PlaneContext) -> None:
        super().__init__(context)
        # Gloo has no int16 kernels; int32 holds every sum that int16 would, and wraps alike when narrowed.
        self._staging = Staging({DType.I16: np.dtype(np.int32)})
        self._group: Any = None
        #: Addresses of all members' listeners, by which Gloo's connections are found among the process's.
        self._ports: set[tuple[str, int]] = set()
        self._listeners: set[tuple[str, int]] = set()  # where Gloo listens for other members, while it does
        self._aborted = threading.Event()
        #: Set when the operation that goes on ends, or by an abort.
        self._settled = threading.Event()
        self._busy = False  # whether a thread begins an operation or waits for its end
        self._running: list[Any] = []  # the operation that goes on, if one does
        self.gave_up = False
        """Whether an aborted operation did not end, and was left to Gloo with the group's descriptors."""

    @classmethod
    def unavailable(cls) -> str | None:
        try:
            import torch.distributed as dist
        except ImportError:
            return "the gloo plane needs PyTorch; install it with `pip install hvdlab[torch]`"
        if not dist.is_available() or not dist.is_gloo_available():
            return (
                "this PyTorch was built without Gloo; install an official build, or choose plane shm or mpi"
            )
        return None

    def connect(self, timeout: float) -> None:
        import torch.distributed as dist

        store = self.context.store
        if store is None:
            raise PlaneBroken("the gloo plane needs a rendezvous store")
        me = self.context
        with self._failures():
            with _one_listens:
                before = listeners(me.address)
                device = dist.ProcessGroupGloo.create_device(hostname=me.address)
                ports = listeners(me.address) - before
            store.set(f"port/{me.index}", ",".join(f"{h}:{p}" for h, p in ports).encode())
            for index in range(me.size):
                self._ports |= _parse_ports(store.get(f"port/{index}", timeout))
            gloo: Any = dist.ProcessGroupGloo  # its Options class is missing from torch's stubs
            options = gloo._Options()
            options._timeout = timedelta(seconds=timeout)
            options._devices = [device]
            options._threads = 1  # operations come one at a time
            said: list[bytes] = []
            self._listeners = ports
            # The doors are stored before the flag is read, and abort() sets the flag before it reads the doors: one of them sees it.
            if self._aborted.is_set():
                raise PlaneAborted
            self._group = dist.ProcessGroupGloo(_make_store(store, timeout, said), me.index, me.size, options)
            # There is a group: from now on an abort ends its connections, and connects in place of no member any more.
            self._listeners = set()
        # The proof that all members have come, before their listeners are blocked below.
        self.barrier(PhaseTimes())
        with self._failures():
            # Another thread may have opened a listener in the same instant; the addresses that Gloo published are its own.
            gloos = mentioned(self._ports, b"".join(said))
            if len(gloos) == me.size:
                self._ports, ports = gloos, ports & gloos
            # All members have come, and Gloo would keep a descriptor for each stranger.
            still_open = block_listeners(ports)
            if still_open:
                LOG.warning(
                    "Gloo goes on to listen at %s: this system lets no ordinary user shut that, so strangers that reach it can "
                    "take up descriptors of this process, though they get no data",
                    ", ".join(f"{host}:{port}" for host, port in sorted(still_open)),
                )
            self._group._set_default_timeout(_GLOO_TIMEOUT)

    def allreduce(
        self,
        ins: Sequence[HostArray],
        outs: Sequence[HostArray],
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        import torch.distributed as dist

        start = time.monotonic_ns()
        packed = self._staging.pack(ins, outs, dtype, reduction.prescale)
        packed_at = time.monotonic_ns()
        if packed.size:
            options = dist.AllreduceOptions()
            options.reduceOp = _reduce_op(reduction.op)
            self._wait(partial(self._usable.allreduce, [_tensor(packed)], options))
        moved_at = time.monotonic_ns()
        self._staging.unpack(packed, outs, dtype, reduction.postscale)
        phases.pack += packed_at - start
        phases.transfer += moved_at - packed_at
        phases.unpack += time.monotonic_ns() - moved_at

    def allgather(self, send: HostArray, counts: Sequence[int], out: HostArray, phases: PhaseTimes) -> None:
        start = time.monotonic_ns()
        raw_send, raw_out = _raw(send), _raw(out)
        if len(set(counts)) == 1:
            if raw_out.size:
                self._wait(partial(self._usable._allgather_base, _tensor(raw_out), _tensor(raw_send)))
        else:
            self._gather_ragged(raw_send, [c * send.itemsize for c in counts], raw_out)
        phases.transfer += time.monotonic_ns() - start

    def _gather_ragged(self, send: HostArray, sizes: Sequence[int], out: HostArray) -> None:
        """Broadcast once per member, straight into its place: no padding to the longest, no copy back."""
        import torch.distributed as dist

        offset = 0
        for root, size in enumerate(sizes):
            piece = out[offset : offset + size]
            offset += size
            if not size:
                continue
            if root == self.context.index:
                np.copyto(piece, send)
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            tensor = _tensor(piece)
            self._wait(partial(self._usable.broadcast, [tensor], options))

    def broadcast(self, buffer: HostArray, root: int, phases: PhaseTimes) -> None:
        import torch.distributed as dist

        start = time.monotonic_ns()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        if buffer.size:
            self._wait(partial(self._usable.broadcast, [_tensor(_raw(buffer))], options))
        phases.transfer += time.monotonic_ns() - start

    def reducescatter(
        self,
        send: HostArray,
        counts: Sequence[int],
        out: HostArray,
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        """Send each slice to its owner, which reduces in member order: every byte crosses the network once."""
        start = time.monotonic_ns()
        mine, size = counts[self.context.index], self.context.size
        widened = self._staging.widened(send, dtype, reduction.prescale)
        packed_at = time.monotonic_ns()
        pieces = np.empty(mine * size, widened.dtype)
        self._exchange(widened, list(counts), [mine] * size, pieces)
        moved_at = time.monotonic_ns()
        rows = pieces.reshape(size, mine)
        reduced = np.ascontiguousarray(rows[0])
        for row in rows[1:]:
            _FOLD[reduction.op](reduced, row, out=reduced)
        self._staging.unpack(reduced, [out], dtype, reduction.postscale)
        phases.pack += packed_at - start
        phases.transfer += moved_at - packed_at
        phases.unpack += time.monotonic_ns() - moved_at

    def alltoall(
        self,
        send: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: HostArray,
        phases: PhaseTimes,
    ) -> None:
        start = time.monotonic_ns()
        self._exchange(send, send_counts, recv_counts, out)
        phases.transfer += time.monotonic_ns() - start

    def _exchange(
        self, send: HostArray, send_counts: Sequence[int], recv_counts: Sequence[int], out: HostArray
    ) -> None:
        import torch.distributed as dist

        item = send.itemsize
        splits_in, splits_out = [c * item for c in send_counts], [c * item for c in recv_counts]
        tensors = _tensor(_raw(out)), _tensor(_raw(send))
        options = dist.AllToAllOptions()
        self._wait(partial(self._usable.alltoall_base, *tensors, splits_out, splits_in, options))

    def barrier(self, phases: PhaseTimes) -> None:
        # Not Gloo's own barrier: it waits for ever on a connection that was shut down before it began.
        start = time.monotonic_ns()
        self._wait(partial(self._usable.allreduce, [_tensor(np.zeros(1, np.uint8))]))
        phases.wait += time.monotonic_ns() - start

    def abort(self) -> None:
        # Before ``_busy`` is read, which _wait() sets before it reads this: see there.
        self._aborted.set()
        if not self._busy:  # a busy thread in _wait() does it in a moment
            self._half_close()
        self._settled.set()

    def _half_close(self) -> None:
        """Send nothing more: members that are in the middle of an operation get all that this one has sent for it, then the end."""
        if self._group is None:  # it is being connected, or nothing is left of it
            self._disconnect(socket.SHUT_RDWR)
            # Gloo waits for minutes for a member that has published its address and does not come; this process comes in its place.
            connect_once(self._listeners, self.context.size)
        elif not self._running:
            self._disconnect(socket.SHUT_WR)

    def _disconnect(self, how: int) -> None:
        for sock, local, peer in connections():
            if local in self._ports or peer in self._ports:
                with suppress(OSError):  # disconnected meanwhile
                    sock.shutdown(how)

    def close(self) -> None:
        # The destructor joins Gloo's threads. They end by themselves unless an operation goes on for ever, such as one whose
        # waiting thread was interrupted.
        if self._running and not self._ends(self._running[-1]):
            self._give_up()
        self._running.clear()
        self._listeners = set()
        self._group = None

    def _give_up(self) -> None:
        """Leave the operation that does not end, and its group, to Gloo, which gives it up after ``_GLOO_TIMEOUT``."""
        self.gave_up = True
        kept = [self._group, *self._running]
        work = kept[-1]
        self._group = None
        self._running.clear()

        # A thread of the group calls this, and must not be the one that drops the last reference to the group: the destructor joins
        # that thread. Until then Gloo holds the operation, which holds this function, which holds the group.
        def let_go(_: object) -> None:
            threading.Thread(target=kept.clear, name="hvdlab-gloo-let-go", daemon=True).start()

        work.get_future().add_done_callback(let_go)

    @property
    def _usable(self) -> Any:
        """Return the group, unless it was given up with an aborted operation."""
        if self._group is None:
            raise PlaneAborted
        return self._group

    def _wait(self, start: partial[Any]) -> None:
        """Run an operation to its end, or to an abort.

        When a connection ends, Gloo fails the buffers that wait for a message's beginning, but not one whose message has
        arrived in part, as from a member that died: its operation waits for as long as Gloo ever does. Such an
        operation and its group are left to Gloo; nothing can arrive on sockets that are shut down, so no buffer changes any more.
        """
        # Set before this thread looks for an abort, while abort() sets its flag before it reads this: at least one of the two
        # calls _half_close().
        self._busy = True
        try:
            with self._failures():
                # Starting the operation and noting it are one step of the interpreter: an interrupt can't come in between.
                self._running.extend(map(operator.call, (start,)))
                work = self._running[-1]
                settled = self._settled = threading.Event()
                work.get_future().add_done_callback(lambda _: settled.set())
                if not self._aborted.is_set():
                    settled.wait()
                # Before ``wait()``, which has no limit and would not return from an operation whose message has arrived in part.
                if not self._ends(work):
                    self._give_up()
                    raise PlaneAborted
                self._running.clear()
                # It has ended; this raises its error.
                work.wait()
        finally:
            self._busy = False
            if self._aborted.is_set():
                # An error, for lack of descriptors, would replace the operation's; the coordinator's abort reaches the others anyway.
                with suppress(OSError):
                    self._half_close()

    def _ends(self, work: Any) -> bool:
        """Return whether the operation has ended, or ends after an abort; with or without an error.

        As long as bytes flow all members may finish it, as they do unless one has died or never began. When nothing
        comes any more, the only messages that have arrived in part are those of members that died or were stopped.
        """
        if work.is_completed():
            return True
        deadline = Deadline(FLOWING_SECONDS)
        while not deadline.expired:
            try:
                if self._finishes(work):
                    return True
                self._disconnect(socket.SHUT_RDWR)
                return _completes(work, _GIVE_UP_SECONDS)
            except OSError:
                # No descriptor is left to look at the sockets, while Gloo still works. The system does not notify of a free one.
                if _completes(work, LOOK_SECONDS):
                    return True
        return False

    def _finishes(self, work: Any) -> bool:
        """Return whether the operation ends while its bytes flow."""
        deadline = Deadline(FLOWING_SECONDS)
        before = traffic(self._ports)
        if _completes(work, _FINISH_SECONDS):
            return True
        while not deadline.expired:
            now = traffic(self._ports)
            # A connection that has ended is missing, which is no traffic.
            if all(count == before.get(connection, 0) for connection, count in now.items()):
                return False
            before = now
            if _completes(work, LOOK_SECONDS):
                return True
        return False

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn all exceptions of Gloo into the plane's two."""
        if self._aborted.is_set():
            raise PlaneAborted
        try:
            yield
        except (RuntimeError, ValueError, OSError, TimeoutError) as error:
            # A peer that got the abort first, or died, closes the connection before the abort arrives at this rank.
            if self._aborted.wait(_NEWS_SECONDS):
                raise PlaneAborted from error
            raise PlaneBroken(f"Gloo failed: {error}") from error
        if self._aborted.is_set():
            raise PlaneAborted


_FOLD: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


def _raw(buffer: HostArray) -> HostArray:
    return buffer.view(np.uint8)


def _completes(work: Any, seconds: float) -> bool:
    """Return whether the operation ends within this time, with or without an error."""
    ended = threading.Event()
    work.get_future().add_done_callback(lambda _: ended.set())
    return ended.wait(seconds)


def _tensor(buffer: HostArray) -> torch.Tensor:
    """Return torch's view of the buffer's memory; data that numpy marks read-only is only ever sent."""
    import torch

    if not buffer.flags.writeable:
        buffer = buffer.copy()
    return torch.from_numpy(buffer)


def _reduce_op(op: ReduceOp) -> Any:
    import torch.distributed as dist

    return {
        ReduceOp.SUM: dist.ReduceOp.SUM,
        ReduceOp.MIN: dist.ReduceOp.MIN,
        ReduceOp.MAX: dist.ReduceOp.MAX,
        ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    }[op]


def _make_store(kv: Any, timeout: float, said: list[bytes]) -> Any:
    """Return a ``torch.distributed.Store`` whose values live in the coordinator; ``said`` gets those that pass through."""
    from torch._C import _distributed_c10d as c10d

    base: Any = c10d.Store

    class CoordinatorStore(base):  # type: ignore[misc]  # torch's stubs leave Store untyped
        def set(self, key: str, value: bytes | str) -> None:
            said.append(value.encode() if isinstance(value, str) else bytes(value))
            kv.set(f"gloo/{key}", said[-1])

        def get(self, key: str) -> bytes:
            said.append(bytes(kv.get(f"gloo/{key}", timeout)))
            return said[-1]

        def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=timeout)) -> None:
            for key in keys:
                kv.get(f"gloo/{key}", timeout.total_seconds())

    return CoordinatorStore()


def _parse_ports(text: bytes) -> set[tuple[str, int]]:
    pairs = (item.rpartition(":") for item in text.decode().split(",") if item)
    return {(host, int(port)) for host, _, port in pairs}


# -- Gloo's sockets, of which the library shows none: they are found among this process's descriptors -------------------------


_adopt = partial(_socket.socket, -1, -1, -1)  # finds out family and kind by asking the system


def _inet_sockets() -> Iterator[_socket.socket]:
    """Yield duplicates of this process's IP sockets, each closed after use."""
    for entry in os.listdir("/proc/self/fd"):
        if (duplicate := _duplicate(int(entry))) is None:
            continue
        with closing(duplicate):
            if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                yield duplicate


def _duplicate(fd: int) -> _socket.socket | None:
    """Return a socket object of its own for a descriptor; ``None`` if it is no socket, or closed meanwhile.

    Duplicating and keeping are one step of the interpreter: an interrupt of the main thread in between would leave the
    duplicate open for good.
    """
    try:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
            return None
    except OSError:
        return None
    number, again = itertools.tee(map(os.dup, (fd,)))
    try:
        return next(map(_adopt, number))
    except OSError:  # closed meanwhile, or by now the number is that of another thread's file of another kind
        for own in again:
            os.close(own)
        return None


def listeners(address: str) -> set[tuple[str, int]]:
    """Return address and port of each socket of this process that listens at this address."""
    return {
        sock.getsockname()[:2]
        for sock in _inet_sockets()
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.getsockname()[0] == address
    }


def mentioned(ports: set[tuple[str, int]], text: bytes) -> set[tuple[str, int]]:
    """Return those of the ``ports`` whose socket address (``struct sockaddr``) occurs in ``text``."""
    return {(host, port) for host, port in ports if _sockaddr(host, port) in text}


def _sockaddr(host: str, port: int) -> bytes:
    if ":" in host:
        return (
            struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", port, 0) + _packed(socket.AF_INET6, host)
        )
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + _packed(socket.AF_INET, host)


def _packed(family: int, host: str) -> bytes:
    return socket.inet_pton(family, host.partition("%")[0])


def block_listeners(ports: set[tuple[str, int]]) -> set[tuple[str, int]]:
    """Block these listeners: no process can connect to them any more. They can't be closed: Gloo watches them until its end.

    Existing connections go on. A packet filter that drops everything is the cheapest way. Some systems refuse that
    to ordinary users; then the listener asks for segments that are signed with a key that no process has.

    Returns:
        The listeners that stay open, since the system offers neither.
    """
    # In a variable, since the program only has its address.
    instruction = ctypes.create_string_buffer(_DROP)
    program = struct.pack("HP", 1, ctypes.addressof(instruction))
    still_open: set[tuple[str, int]] = set()
    for sock in _inet_sockets():
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.getsockname()[:2] in ports:
            try:
                sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            except OSError:
                if not _ask_for_signatures(sock):
                    still_open.add(sock.getsockname()[:2])
    return still_open


def _ask_for_signatures(sock: _socket.socket) -> bool:
    """Make a listener accept signed segments only (RFC 2385), from any address, with a key that is not kept.

    The kernel drops a stranger's first segment without an answer. False where the kernel can't do that.
    """
    anybody = struct.pack("=H", sock.family).ljust(_SOCKADDR_STORAGE, b"\0")
    key = os.urandom(_KEY_BYTES)
    signature = anybody + _MD5_HEAD.pack(_MD5_PREFIX, 0, len(key), 0) + key.ljust(_MD5_KEY_LIMIT, b"\0")
    try:
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, signature)
    except OSError:
        return False
    return True


def connect_once(ports: set[tuple[str, int]], members: int) -> None:
    """Connect once to these listeners of Gloo's as each member that it may wait for, and leave.

    A process that connects sends the number of the listener's connection that it is for, from 0. Gloo keeps a connection for
    which it does not wait yet until it does.
    """
    for port in ports:
        for number in range(members):
            with suppress(OSError), socket.create_connection(port, _KNOCK_SECONDS) as sock:
                sock.sendall(_NUMBER.pack(number))


def connections() -> Iterator[tuple[_socket.socket, tuple[str, int], tuple[str, int]]]:
    """Yield duplicates of this process's connected IP sockets, each closed after use, with their own and the peer's address."""
    for sock in _inet_sockets():
        try:
            yield sock, sock.getsockname()[:2], sock.getpeername()[:2]
        except OSError:
            continue  # not connected


def traffic(
    ports: set[tuple[str, int]],
) -> dict[tuple[tuple[str, int], tuple[str, int]], int]:
    """Return the bytes that were sent and received over each connection with one of the ``ports`` at one end; empty if the system does not report it.

    Bytes that were sent count once the other host has them.
    """
    counts = {}
    if hasattr(socket, "TCP_INFO"):
        for sock, local, peer in connections():
            if local in ports or peer in ports:
                with suppress(OSError, struct.error):  # ended meanwhile; a system that does not count
                    counts[local, peer] = transferred(sock)
    return counts


def transferred(sock: _socket.socket) -> int:
    """Return the bytes that were sent and received over a connection. Bytes that were sent count once the other host has them.

    Raises:
        OSError, struct.error: It has ended, or this system does not count.
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_COUNTS.size)
    return sum(_TCP_COUNTS.unpack(info))
