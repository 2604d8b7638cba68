"""Submitted collectives (entries), the local ids that they are announced as, and the orders of the rank's state about them (effects).

The entry of a user's request is a handle, on which threads wait, and whose completion hook the engine calls when the request is finished.

A handle is completed under the rank's lock, on whichever thread brings its end, and its hook is only queued there. A thread
of the engine calls it once it holds no lock any more; it releases the work queue's lock before. A user's thread, which
executes while it waits, wakes the control thread instead. Ctrl-C can interrupt that thread between any two steps, and a hook
has to run once and to its end. Every thread finds the hooks that are due in one queue, and the control thread checks it
whenever it wakes. So no hook is forgotten if a thread is interrupted before it could wake the control thread.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hvdlab.collectives.engine.requests import CompletionHook, Limit, Request, Result
from hvdlab.collectives.errors import CauseKind, InvalidRequestError
from hvdlab.collectives.planes.base import HOST, storage_type
from hvdlab.collectives.protocol.messages import Definition, Member, Signature
from hvdlab.collectives.text import LOG
from hvdlab.collectives.types import DType, OpKind, ReduceOp, Reduction

# Phases of an entry. By the coordinator: UNANNOUNCED (held, or about to be queued), ANNOUNCED, EXECUTING, ENDED. A new generation makes
# an ANNOUNCED entry UNANNOUNCED again, and announces it. By the board: UNANNOUNCED, or ANNOUNCED if the announcement was not sent yet,
# becomes POSTED. From there it is ENDED if it was agreed and this rank computes the result, EXECUTING if it was agreed and needs the
# plane, UNANNOUNCED if it was not agreed. An error ends an entry in any phase, and ENDED is left by none.
UNANNOUNCED, ANNOUNCED, EXECUTING, ENDED, POSTED = range(5)

LOCAL_LIMIT = 4096
"""Local ids of a rank at most, by default: the coordinator keeps a definition for each, of every rank."""

Key = tuple[object, ...]


class Entry:
    """Submitted collective. Its fields belong to :class:`RankState`, under the engine's lock.

    Attributes:
        request: The user's request.
        name: Tensor name as the coordinator matches it (anonymous ones of a kind have a common one).
        site: Call site.
        submitted: Time of submission, in nanoseconds of ``time.monotonic_ns``.
        received: Time at which ``Execute`` came, in the same nanoseconds, or 0.
        phase: ``UNANNOUNCED`` (not announced yet), ``ANNOUNCED``, ``EXECUTING``, ``ENDED`` or ``POSTED`` (on the board of its generation).
        generation: Generation that it is (or, if held, at the earliest will be) announced in.
        local: The local id that it is announced as.
        extra: Numbers that go along with the announcement and can differ between ranks (allgather: rows; alltoall: splits).
        given_up: Whether this rank has withdrawn it: it ends with its generation.
        waited: Seconds that the user's thread has waited for it, as this rank reported to the coordinator, or 0.
    """

    __slots__ = (
        "extra",
        "generation",
        "given_up",
        "local",
        "name",
        "phase",
        "received",
        "request",
        "site",
        "submitted",
        "waited",
    )  # fmt: skip

    def __init__(self, request: Request, site: str, submitted: int) -> None:
        self.request = request
        self.site = site
        self.submitted = submitted
        self.received = 0
        self.name = ""
        self.phase = UNANNOUNCED
        self.generation = 0
        self.local: Local = NO_LOCAL
        self.extra: tuple[int, ...] = ()
        self.given_up = False
        self.waited = 0.0


class Zeros(Entry):
    """Entry with zeros for a collective that other ranks have submitted, since this rank has joined. No thread waits for its end.

    Attributes:
        shape: Shape of the zeros. If they are on a device the request has no input: its plane makes them.
    """

    __slots__ = ("shape",)

    def __init__(self, process_set: int, signature: Signature) -> None:
        kind, dtype = OpKind(signature.kind), DType(signature.dtype)
        self.shape = signature.shape
        tensor = None
        if kind is OpKind.ALLREDUCE and signature.device == HOST:
            # The system hands out zeroed memory as it is touched: until this entry is executed, its zeros cost nothing.
            tensor = np.zeros(signature.shape, storage_type(dtype))
        request = Request(
            kind,
            signature.name,
            tensor,
            tensor,
            dtype,
            Reduction(ReduceOp(signature.op), signature.prescale, signature.postscale),
            process_set=process_set,
            device=signature.device,
        )
        Entry.__init__(self, request, "join", 0)
        self.name = signature.name

    def complete(self, result: Result | None, error: Exception | None) -> None:
        """Do nothing: only the ranks that submitted the collective have handles."""


@dataclass(slots=True)
class Cancellation:
    """Cancellation of a message to another rank, as this rank asks the coordinator for it.

    Attributes:
        entry: The message.
        kind: Kind of the cause.
        text: The cause, as errors name it.
        asked: Whether the coordinator has the question in the present generation of the message.
    """

    entry: Entry
    kind: CauseKind
    text: str
    asked: bool = False


# -- local ids ----------------------------------------------------------------------------------------------------


class Local:
    """Local id: a signature and call site as an integer.

    Attributes:
        id: The integer.
        key: The key of :class:`Locals` for it.
        signature: The part of its requests that ranks must agree on.
        site: The call site of its requests.
        queue: Entries that were announced under this id and not decided yet, oldest first.
        priority: As in :class:`Request`.
        defined: Whether this rank has sent the coordinator the definition.
    """

    __slots__ = ("defined", "id", "key", "priority", "queue", "signature", "site")

    def __init__(
        self, id: int, key: Key, signature: Signature, site: str, priority: int | None = None
    ) -> None:
        self.id = id
        self.key = key
        self.signature = signature
        self.site = site
        self.priority = priority
        self.queue: deque[Entry] = deque()
        self.defined = False

    def definition(self) -> Definition:
        """Return the definition of the id for the coordinator, and mark it as sent."""
        self.defined = True
        return Definition(self.id, self.signature, self.site, self.priority)


#: The local id of an entry that was not announced yet; its own object, so that no field is ``None``.
NO_LOCAL = Local(-1, (), Signature(0, "", 0, 0, ()), "")


class Locals:
    """Local ids of this rank, and the entries that were announced under each of them.

    An id stands for a signature and call site. This rank sends its definition to the coordinator once.

    Args:
        limit: Number of ids from which on the least recently used ones are given to other signatures.
    """

    def __init__(self, limit: int = LOCAL_LIMIT) -> None:
        #: Local ids by number.
        self.by_id: dict[int, Local] = {}
        self._limit = limit
        #: Local ids by their key, the least recently used first once ids become scarce.
        self._by_key: OrderedDict[Key, Local] = OrderedDict()
        #: The next number that was never used.
        self._next = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def queue(self, entry: Entry) -> None:
        """Give an entry its local id, and queue it behind other entries of that id."""
        entry.local = local = self.local_of(entry)
        entry.phase = ANNOUNCED
        local.queue.append(entry)

    def local_of(self, entry: Entry) -> Local:
        """Return the local id for entries like this one; a new one is defined."""
        request = entry.request
        shape = matched_shape(request)
        if request.reduction.has_nan:
            # NaN equals nothing, itself included, so it would define a new id with every request.
            request.reduction = _with_one_nan(request.reduction)
        key: Key = (
            entry.name, request.kind, shape, request.dtype, request.reduction, entry.site, request.process_set, request.root,
            request.group, request.device, request.ranks, request.channel, request.about,
            request.priority,
        )  # fmt: skip
        local = self._by_key.get(key)
        if local is None:
            local = self._define(key, entry, shape)
        # Only once half of the ids are in use: before, each step of a training would pay for an order that no eviction reads.
        elif len(self._by_key) * 2 > self._limit:
            self._by_key.move_to_end(key)
        return local

    def unqueue(self, entry: Entry) -> None:
        """Remove an announced entry from the queue of its local id."""
        local = entry.local
        if entry.phase == ANNOUNCED and local is not NO_LOCAL:
            # Nearly always the oldest: the queue is searched only if it is not.
            if local.queue and local.queue[0] is entry:
                local.queue.popleft()
            elif entry in local.queue:
                local.queue.remove(entry)

    def take(self, id: int) -> Entry | None:
        """Remove and return the oldest entry that was announced as ``id``, or ``None`` if none is left."""
        local = self.by_id.get(id)
        return local.queue.popleft() if local is not None and local.queue else None

    def clear(self) -> None:
        """Forget all ids: each is defined again before its next use."""
        self._by_key.clear()
        self.by_id.clear()
        self._next = 0

    def _define(self, key: Key, entry: Entry, shape: tuple[int, ...]) -> Local:
        id = self._free_id()
        request = entry.request
        signature = signature_of(request, entry.name, shape)
        local = Local(id, key, signature, entry.site + request.about, request.priority)
        self._by_key[key] = local
        self.by_id[id] = local
        return local

    def _free_id(self) -> int:
        """Return a new id below the limit; at the limit the least recently used one that has nothing in flight, if there is one."""
        if self._next >= self._limit:
            for key, local in self._by_key.items():
                # One with entries in flight can't change its meaning: decisions about them name the id.
                if not local.queue:
                    del self._by_key[key]
                    return local.id
        # Beyond the limit only while that many different tensors are in flight.
        self._next += 1
        return self._next - 1

    def validate(self) -> None:
        """Assert the invariants that hold between calls."""
        ids = [local.id for local in self._by_key.values()]
        assert len(ids) == len(set(ids)), "an id stands for two things"
        for local in self._by_key.values():
            assert self.by_id[local.id] is local
            for entry in local.queue:
                assert entry.phase == ANNOUNCED, entry.phase
        assert len(self._by_key) <= max(self._limit, self._next)


def plain_name(name: object) -> str:
    """Return a name as it can be sent: one of a subclass of ``str``, such as ``numpy.str_``, as a ``str``."""
    if not isinstance(name, str):
        raise InvalidRequestError(f"name= takes a text, not {name!r} ({type(name).__name__}).")
    return str.__str__(name)


def signature_of(request: Request, name: str, shape: tuple[int, ...]) -> Signature:
    """Return the part of a request that ranks must agree on."""
    group, count = request.group or ("", 0)
    op, prescale, postscale = request.reduction
    return Signature(
        int(request.kind),
        name,
        int(request.dtype),
        int(op),
        shape,
        request.root,
        prescale,
        postscale,
        request.device,
        group,
        count,
        request.ranks,
        request.channel,
    )


def _with_one_nan(reduction: Reduction) -> Reduction:
    """Return the reduction with ``math.nan`` for every NaN: one object, which a dict finds again, so one id for all NaN."""
    op, *factors = reduction
    return Reduction(op, *(math.nan if math.isnan(factor) else factor for factor in factors))


def matched_shape(request: Request) -> tuple[int, ...]:
    """Return the shape as far as ranks must agree on it."""
    if request.input is None:
        return ()
    shape = request.input.shape
    if request.kind is OpKind.ALLGATHER or request.kind is OpKind.ALLTOALL:
        return shape[1:]
    return shape


# -- effects ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RunBatch:
    """Order to execute these entries as one operation of the plane of this process set, generation and device class.

    With ``payloads``, the small tensors of all members by position, no plane is needed. ``(process_set, sequence, batch)`` names
    the operation and is equal on all members. With ``reported``, this rank reports the end of the operation to the coordinator.
    """

    process_set: int
    generation: int
    sequence: int
    batch: int
    entries: tuple[Entry, ...]
    tables: tuple[tuple[tuple[int, ...], ...], ...]
    payloads: tuple[bytes, ...] = ()
    device: str = HOST
    reported: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """Order to end an entry with an error."""

    entry: Entry
    error: Exception


@dataclass(frozen=True, slots=True)
class Succeed:
    """Order to end an entry that moves no data."""

    entry: Entry
    process_set: int = -1


@dataclass(frozen=True, slots=True)
class AbortPlane:
    """Order to end the running operation of the plane of this process set and generation at once, and to drop the plane."""

    process_set: int
    generation: int


@dataclass(frozen=True, slots=True)
class ClosePlanes:
    """Order to close the planes of this process set older than ``generation`` once their work is done."""

    process_set: int
    generation: int


@dataclass(frozen=True, slots=True)
class NewGeneration:
    """Order to prepare the planes of a process set's new generation; ``index`` is -1 where this rank is no member.

    ``plane`` is for tensors of the host, ``device_planes`` are for those of other device classes.
    """

    process_set: int
    generation: int
    index: int
    members: tuple[Member, ...]
    plane: str
    options: dict[str, str]
    has_memory: bool
    device_planes: dict[str, str]


Effect = RunBatch | Fail | Succeed | AbortPlane | ClosePlanes | NewGeneration


# -- handles ------------------------------------------------------------------------------------------------------


class HandleOwner(Protocol):
    """Part of an engine that its handles use."""

    hooks: CompletionHooks

    def wait_for(self, handle: Handle, timeout: float | None, limit: Limit | None = None, /) -> None: ...

    def tell_blocked(self, handle: Handle, seconds: float, /) -> None: ...

    def tell_unblocked(self, handle: Handle, /) -> None: ...


class Wakeable(Protocol):
    """Thread that other threads wake. The control thread then sends queued messages, recovers the state, and calls hooks."""

    def wake(self) -> None:
        """Wake it. Any thread; does not wait."""
        ...


class Handle(Entry):
    """Handle of a collective in flight; threads can wait for its end. Made by :meth:`Engine.submit`.

    Attributes:
        at_once: Whether the thread that submitted it waits for it next, and has not begun to.
        hook_called: Whether its completion hook was called; belongs to :class:`CompletionHooks`.
        wakeup: Eventfd that the waiting thread polls instead of the lock, or -1.
        done_lock: Lock that is held until the end, on which threads wait.
    """

    __slots__ = ("_done", "_engine", "_error", "_result", "at_once", "done_lock", "hook_called", "wakeup")

    def __init__(self, engine: HandleOwner, request: Request, site: str, submitted: int) -> None:
        Entry.__init__(self, request, site, submitted)
        self._engine = engine
        self.at_once = False
        #: Whether it has ended; stored after the outcome, which is in the next two.
        self._done = False
        self._result: Result | None = None
        self._error: Exception | None = None
        self.hook_called = False
        self.wakeup = -1
        # A bare lock, held until the end, is the cheapest object on which a thread can wait and Ctrl-C can break the wait.
        self.done_lock = _thread.allocate_lock()
        self.done_lock.acquire()

    def done(self) -> bool:
        """Return whether it has ended, well or badly. Never blocks."""
        return self._done

    def wait_or_withdraw(self, limit: Limit) -> Result:
        """Wait for the end; after ``limit`` give it up on all ranks, with everything pending in its process set.

        Raises:
            MismatchError, AbortedError, KeyboardInterrupt: As :meth:`wait`; ``AbortedError`` also when the limit has passed.
        """
        if not self._done:
            self._engine.wait_for(self, limit.seconds, limit)
        return self.wait()

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the collective to end and return its result. Can be called again and from several threads.

        Args:
            timeout: Seconds, or ``None`` for ever.

        Raises:
            MismatchError: The ranks disagree; raised on all of them.
            AbortedError: It can't complete (a rank died, failed, left, was interrupted, …). Output is undefined.
            TimeoutError: It is still in flight; the handle stays valid.
            KeyboardInterrupt: The user interrupted; the collective is then withdrawn on all ranks.
        """
        if not self._done:
            self._engine.wait_for(self, timeout)
        if self._error is not None:
            # Without the last traceback: each wait() would add its frames to that of the same exception.
            raise self._error.with_traceback(None)
        assert self._result is not None
        return self._result

    def complete(self, result: Result | None, error: Exception | None) -> None:
        """End it; the first call counts. For the engine only."""
        if not self._done:
            # The result before the mark: a thread that sees the mark reads the result without a lock.
            self._result, self._error = result, error
            self._done = True
            try:  # noqa: SIM105  (done for each tensor of a step, and a context costs more time than the other statements)
                self.done_lock.release()
            except RuntimeError:
                pass  # a thread that gave up waiting has seen it done, and has opened the lock for all others
            # A thread that polls stores the descriptor and then reads the mark; here the mark is stored before the descriptor is read.
            if self.wakeup >= 0:
                with contextlib.suppress(OSError):  # it was closed: no thread watches it any more
                    os.eventfd_write(self.wakeup, 1)
        # Last, and also if it had ended: perhaps the thread that completed it was interrupted just before this.
        if self.request.on_done is not None:
            self._engine.hooks.add(self)

    def add_hook(self, hook: CompletionHook) -> bool:
        """Add a completion hook to a request that was submitted without one.

        Returns:
            Whether the engine calls it, or has done so. ``False``: the collective had ended before, and the caller has to do
            the hook's work.
        """
        # The same one comes again if an interrupt has struck in here, or before the caller had the answer.
        assert self.request.on_done in (None, hook), "a request has one completion hook"
        # complete() marks the end and then reads the hook; this sets the hook and then reads the mark. So at least one of the two
        # threads sees the other's store; if both do, the one that claims the hook calls it.
        self.request.on_done = hook
        return not (self._done and self._engine.hooks.try_claim(self))

    def tell_blocked(self, seconds: float) -> None:
        """Report to the coordinator that the user's code can't continue before this has ended, and has waited for ``seconds``.

        For a caller that waits in another way than by :meth:`wait`.
        """
        self._engine.tell_blocked(self, seconds)

    def tell_unblocked(self) -> None:
        """Report to the coordinator that the wait of :meth:`tell_blocked` is over."""
        self._engine.tell_unblocked(self)

    def outcome(self) -> tuple[Result | None, Exception | None]:
        """Return result and error of a handle that is done; one of them is ``None``."""
        return (self._result, None) if self._error is None else (None, self._error)

    def release_waiters(self) -> None:
        """Wake all threads that wait. For the engine only."""
        if self.done_lock.locked():
            with contextlib.suppress(RuntimeError):  # another thread has just released it
                self.done_lock.release()


class BoardEntry(Entry):
    """Entry of a collective that a thread posts on the board and waits for there. It gets a handle only if it goes to the coordinator.

    Attributes:
        handle: The handle in its place; ``None`` before :meth:`hand_over`.
    """

    __slots__ = ("_error", "handle")

    def __init__(self, request: Request, name: str, site: str, submitted: int) -> None:
        Entry.__init__(self, request, site, submitted)
        self.name = name
        self._error: Exception | None = None
        self.handle: Handle | None = None

    def complete(self, result: Result | None, error: Exception | None) -> None:
        """End it with an error. For the engine only; without an error it ends on its own thread, which needs no call for that."""
        self._error = error
        if self.handle is not None:
            self.handle.complete(result, error)

    def hand_over(self, handle: Handle) -> None:
        """Let ``handle`` end in place of this entry, also if an error has ended this one already."""
        # complete() stores the error and then reads the handle; this stores the handle and then reads the error. So at least one of the
        # two threads completes the handle; if both do, the first call counts.
        self.handle = handle
        if self._error is not None:
            handle.complete(None, self._error)


class CompletionHooks:
    """Queue of completion hooks of one rank that are due. Any thread.

    Args:
        rank: This rank.
        control: The control thread, which calls :meth:`run` when it is woken.

    Attributes:
        inside: Threads that are in the middle of a hook.
    """

    def __init__(self, rank: int, control: Wakeable) -> None:
        self._rank = rank
        self._wake = control.wake
        #: Completed handles whose hooks no thread has claimed; a handle can be in it twice.
        self._due: deque[Handle] = deque()
        # Held while a handle is removed from ``_due`` and marked, so that this is one step for other threads. No hook runs under it.
        self._claiming = threading.Lock()
        self.inside: set[int] = set()

    def add(self, handle: Handle) -> None:
        """Queue the hook of a completed handle. A thread that recovers from an interrupt can call this again."""
        self._due.append(handle)

    @property
    def due(self) -> bool:
        """Return whether there is a hook to call."""
        return bool(self._due)

    @property
    def run_here(self) -> bool:
        """Return whether the calling thread is in a hook."""
        return bool(self.inside) and threading.get_ident() in self.inside

    def defer_to_control(self) -> None:
        """Wake the control thread for the hooks that are due, if there are any."""
        if self._due:
            self._wake()

    def run(self) -> None:
        """Call the hooks that are due, on this thread. The caller holds no lock, and is a thread of the engine or closes it."""
        while (handle := self._next()) is not None:
            self._call(handle)

    def try_claim(self, handle: Handle) -> bool:
        """Return whether the caller has to call this handle's hook, since no other thread has claimed it; true once per handle."""
        with self._claiming:
            if handle.hook_called:
                return False
            handle.hook_called = True
            return True

    def _next(self) -> Handle | None:
        while self._due:
            with self._claiming:
                handle = self._due.popleft() if self._due else None
                if handle is not None and not handle.hook_called:
                    handle.hook_called = True
                    return handle
        return None

    def _call(self, handle: Handle) -> None:
        hook = handle.request.on_done
        assert hook is not None
        # Where hooks are nested, only the outermost one ends this thread's stay.
        me = threading.get_ident()
        nested = me in self.inside
        self.inside.add(me)
        try:
            hook(*handle.outcome())
        except BaseException as error:  # for any error the engine's thread continues
            if threading.current_thread() is threading.main_thread() and not isinstance(error, Exception):
                raise  # Ctrl-C while the engine is closed
            LOG.exception(
                "rank %d: the completion hook of %s `%s` (%s) failed; the collective itself did not",
                self._rank,
                handle.request.kind.label,
                handle.name,
                handle.site,
            )
        finally:
            if not nested:
                self.inside.discard(me)

    def refuse_to_wait(self) -> None:
        """Raise if the calling thread is in a hook: the awaited collective can need this very thread.

        Raises:
            InvalidRequestError: The calling thread is in a hook.
        """
        if self.run_here:
            raise InvalidRequestError(
                "A completion hook must neither wait for a collective nor close the engine: the thread that calls it may be the "
                "one that is waited for. Submit the next collective with a hook of its own, or let another thread wait."
            )

    def after_fork(self) -> None:
        """Drop the hooks in a forked child; the parent calls them."""
        self._due.clear()
        self.inside.clear()
        self._claiming = threading.Lock()
