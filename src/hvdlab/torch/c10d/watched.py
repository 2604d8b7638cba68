"""Watched groups: each operation is handed over to an inner group of torch's own, and the ranks compare their launches only when one is late.

Nothing is agreed before an operation. A rank records its launches in a ring, and searches it at times for a launch that has not ended. A launch that
is late, or that torch's backend has failed, it reports to the lowest living rank of the group, the *comparer*. That rank asks the others for their
rings and sends all of them its verdict. The control threads do that, so no rank's user has to be free for it.

* The ranks have launched different operations: the comparer has the coordinator end the generation of the group's process set.
* Some have not launched it: those that have now wait for them in the core, by a barrier that stands for the launch (its *stand-in*). The core
  ends this wait as it ends any other: the missing rank comes, fails, ends its cell, dies, or is interrupted; and it reports the stall.
* All have launched it: it is slow.

The end of a generation ends the inner group on each rank. Once all ranks have reported that, they make the next one. All decisions are made on
the control thread, between two messages of the coordinator.
"""

from __future__ import annotations

import functools
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import torch

from hvdlab.collectives import context
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.entries import Handle
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import (
    AbortedError,
    Cause,
    CauseKind,
    CollectiveError,
    HvdlabError,
    InvalidRequestError,
    MismatchError,
    Pending,
)
from hvdlab.collectives.protocol.messages import Abort
from hvdlab.collectives.text import call_site
from hvdlab.collectives.types import DType, OpKind
from hvdlab.torch.c10d.call_forms import canonical
from hvdlab.torch.c10d.call_history import CallHistoryMessage
from hvdlab.torch.c10d.inner_groups import InnerGroup, make_inner
from hvdlab.torch.c10d.launch_ring import (
    COLLECTIVES,
    AnyWatchMail,
    FailedCell,
    InnerEnded,
    Inquiry,
    LateLaunch,
    LaunchAnswer,
    LaunchQuery,
    LaunchRing,
    LaunchSlot,
    LaunchVerdict,
    MakeInner,
    WatchMail,
    launch_of,
)
from hvdlab.torch.c10d.operation_names import OPERATIONS, ROOTED, renamed
from hvdlab.torch.c10d.process_group import HvdlabProcessGroup
from hvdlab.torch.c10d.store import HvdlabStore
from hvdlab.torch.c10d.tensors import CopyBack, contiguous, first, require_exchange
from hvdlab.torch.c10d.watch_options import LATE_AFTER
from hvdlab.torch.c10d.watched_work import EndRequest, Generation, WatchedWork
from hvdlab.torch.c10d.world import C10dWorld
from hvdlab.torch.dynamo import untraced_methods

STUCK_AFTER = 5.0
"""Seconds that torch's backend has to end an operation after its group was aborted: Gloo can miss the end of a connection."""

ANSWER_WITHIN = 1.0
"""Seconds that ranks have to answer the comparer."""
ANSWER_EACH = 0.2e-3
"""Seconds more for each rank that is asked: the coordinator relays their reports, the query and the answers one after the other."""
REFUSED_WITHIN = 0.05
"""Seconds after which a launch counts as made although torch's call has not returned: NCCL can wait in it, and refuses at once."""
LATE_IN_FAILED_CELL = 0.1
"""Seconds after which a launch counts as late while its cell has failed on another rank: a pool soon interrupts the ranks on which it runs, and
their users are to get the failed rank's name instead."""
_CHECKS = 4
"""How often within the time after which a launch is late a rank looks for late launches."""
_TOPIC = "c10d.watched"
_CREATION = "dist.new_group"
_SPACE_KEY, _SPACE_BYTES = "watched", 16
"""The key of torch's store under which rank 0 names the inner groups' spaces in hvdlab's, and the random bytes of that name."""


class LaunchWatch:
    """Watch over the watched groups of this process: their mail, and the search for late launches. One object for each engine, kept beside it.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._groups: weakref.WeakValueDictionary[str, WatchedGroup] = weakref.WeakValueDictionary()
        #: Whether a check is scheduled already.
        self._due = False
        #: The number of the last one that was scheduled. A timer of an earlier one does nothing.
        self._scheduled = 0
        engine.on_abort(self._on_abort)
        engine.on_mail(_TOPIC, self._on_mail)
        engine.on_world(self._on_world)
        engine.on_leave(self._on_leave)
        engine.on_cell_failed(self._on_cell_failed)
        engine.on_reconnected(self._on_reconnected)

    def add(self, name: str, group: WatchedGroup) -> None:
        """Deliver mail to this group from now on."""
        self._groups[name] = group

    def remove(self, name: str) -> None:
        self._groups.pop(name, None)

    def schedule_check(self, seconds: float) -> None:
        """Schedule a check for late launches, unless one is scheduled already. Any thread."""
        if not self._due:
            self._due = True
            number = self._scheduled = self._scheduled + 1
            self._engine.call_later(seconds, lambda: self._check(number))

    def check_now(self) -> None:
        """Check for late launches now, in place of the scheduled check. Control thread."""
        self._scheduled += 1
        self._check(self._scheduled)

    def _check(self, number: int) -> None:
        if number != self._scheduled:
            return
        # Before the checks: a launch after them sees that it has to schedule another one.
        self._due = False
        now = time.monotonic()
        pauses = [group.check_launches(now) for group in list(self._groups.values())]
        if soonest := min((pause for pause in pauses if pause), default=0.0):
            self.schedule_check(soonest)

    def _on_abort(self, message: Abort) -> None:
        for group in list(self._groups.values()):
            group.generation_ended(message)

    def _on_world(self) -> None:
        for group in list(self._groups.values()):
            group.world_changed()

    def _on_leave(self, reason: str) -> None:
        for group in list(self._groups.values()):
            group.end_for_good(Abort(group.process_set, -1, CauseKind.COORDINATOR_LOST.value, (), reason, ""))

    def _on_cell_failed(self, cell: str) -> None:
        for group in list(self._groups.values()):
            group.cell_failed(cell)

    def _on_reconnected(self) -> None:
        for group in list(self._groups.values()):
            group.report_inner_ended_again()

    def _on_mail(self, sender: int, body: bytes) -> None:
        mail: AnyWatchMail = msgspec.msgpack.decode(body, type=AnyWatchMail)
        group = self._groups.get(mail.group)
        if group is not None:
            group.handle(sender, mail)


class WatchedGroup(HvdlabProcessGroup):
    """A process group that hands the operations on its device over to an inner group of torch's, and watches them.

    Operations on tensors of other devices, and monitored barriers, are those of an agreed group.

    Args:
        world, rank, size, name, members, timeout: As for :class:`HvdlabProcessGroup`.
        store: Torch's store for this group.
        inner: Torch's backend of the inner group: ``gloo`` for tensors of the host, ``nccl`` for those of GPUs.
        late: Seconds after which a launch that has not ended counts as late.
    """

    def __init__(
        self,
        world: C10dWorld,
        rank: int,
        size: int,
        name: str,
        members: Sequence[int],
        timeout: timedelta,
        store: Any,
        inner: str,
        late: float = LATE_AFTER,
    ) -> None:
        super().__init__(world, rank, size, name, members, timeout)
        self.on_device, self.inner_kind, self._late, self._world = inner != "gloo", inner, late, world
        self._device_type = "cuda" if self.on_device else "cpu"
        self._timeout = timeout
        #: Begins the names of the inner groups' spaces in hvdlab's store; equal on all ranks, and of this group alone.
        self._space = ""
        self._name_in_mail, self.process_set = self._calls.name_in_mail, self._calls.process_set
        #: The last launches of this rank, for a comparison.
        self._ring = LaunchRing()
        #: Held while a rank launches: the ring, the counts and the inner group have one order.
        self._launching = threading.RLock()
        #: The launch whose call torch has not returned from, and when that began: torch may still refuse it.
        self._entered: tuple[LaunchSlot, float] | None = None
        #: At the comparer: inquiries by generation, channel and number, and the ranks that can make a generation's inner group.
        self._inquiries: dict[tuple[int, str, int], Inquiry] = {}
        self._ended_on: dict[int, set[int]] = {}
        #: At the comparer: the last generation for which it has sent `MakeInner`.
        self._make_sent = -1
        self._generation = Generation(
            -1
        )  # until the ranks have met; ends of generations before that move it on
        #: The end of the generation before the present one.
        self._last_end: Abort | None = None
        #: The inner group that was aborted last. It has its connections until the next one is aborted: a rank that aborts it later must not
        #: find them reset.
        self._aborted: InnerGroup | None = None
        self._watch = context.companion(LaunchWatch)
        self._watch.add(self._name_in_mail, self)
        world.histories.attach(self._name_in_mail, self)
        world.add(self)
        try:
            self._begin_first(store)
        except BaseException:
            # Also after an interrupt: no caller has the group, so it must not go on to make inner groups.
            self.shutdown()
            raise

    def _begin_first(self, store: Any) -> None:
        """Make the first inner group: its number is that of the generation in which the ranks meet, so that it is equal on all.

        Args:
            store: Torch's store for this group.

        Raises:
            AbortedError: The generation ended before all ranks had made it. All ranks raise this, or their own error.
            InvalidRequestError: Torch could not make it.
            KeyboardInterrupt: The user interrupted.
        """
        if self.rank() == 0:
            store.set(_SPACE_KEY, secrets.token_hex(_SPACE_BYTES))
        generation = self._meet("watched")
        # It was set before the ranks met. So torch's store, whose waits no interrupt ends, does not wait.
        self._space = store.get(_SPACE_KEY).decode()
        try:
            self._connect_first(generation)
        except KeyboardInterrupt:
            self.withdraw_interrupted()
            raise
        # A rank that has made it waits for those that have not: if one of these is interrupted, the call ends with an error on all ranks.
        self._meet("watched.made")

    def _connect_first(self, number: int) -> None:
        begun = threading.Event()

        def begin() -> None:
            if self._generation.number < number:
                self._generation = Generation(number)
            # Unless an end of this very generation was handled between.
            if self._generation.number == number:
                self._begin_making(self._generation)
            begun.set()

        self._engine.call_on_control(begin)
        begun.wait()
        generation = self._generation
        if generation.number == number and not generation.made.wait(self._calls.seconds):
            raise self._not_all_came()
        end = self._last_end
        if end is not None and end.generation >= number:
            raise renamed(self._aborted_by(end, Pending("barrier", "")), _CREATION)
        self._calls.require_usable(_CREATION)
        self._require_made(generation)

    def _meet(self, name: str) -> int:
        """Wait for the group's ranks in the core, and return the generation in which they have met."""
        request = Request(OpKind.BARRIER, f"{self._calls.name_in_core}.{name}", process_set=self.process_set)
        request.site = _CREATION
        handle = self._engine.submit(request)
        try:
            handle.wait()
        except HvdlabError as error:
            raise renamed(error, _CREATION) from None
        return handle.generation

    # -- the inner group ----------------------------------------------------------------------------------------------

    def _begin_making(self, generation: Generation) -> None:
        """Make the inner group of a generation on a thread of its own: no interrupt would end a user's thread that waits in C++."""
        threading.Thread(
            target=self._make, args=(generation,), name="hvdlab-c10d-making", daemon=True
        ).start()

    def _make(self, generation: Generation) -> None:
        """Make the inner group of a generation, unless that was begun."""
        with generation.lock:
            begun, generation.begun = generation.begun, True
        if begun:
            return
        space = f"{self._space}.{generation.number}"
        store = HvdlabStore(self._world.link, space, self._members, self._timeout)
        try:
            inner = make_inner(self.inner_kind, store, self.rank(), self.size(), self._timeout)
            generation.connecting = inner
            # The thread that ends the generation stores the end before it reads that: either it aborts the inner group, or this thread
            # sees the end.
            if generation.ended is None:
                inner.connect()
        except Exception as error:  # noqa: BLE001  (raised by the next launch)
            generation.error = error
        else:
            generation.inner = inner
            if generation.ended is not None:  # by now another thread has aborted it
                generation.inner = generation.connecting = None
        generation.made.set()

    def _ready(self, operation: str) -> Generation:
        """Return the present generation, once its inner group is made."""
        while True:
            generation = self._generation
            if not generation.made.is_set():
                try:
                    made = generation.made.wait(self._calls.seconds)
                except KeyboardInterrupt:
                    self.withdraw_interrupted()
                    raise
                if not made:
                    raise self._not_all_came()
            self._calls.require_usable(operation)  # it may have lost ranks meanwhile
            if generation is not self._generation:
                continue
            self._require_made(generation)
            return generation

    def _not_all_came(self) -> InvalidRequestError:
        return InvalidRequestError(
            f"{self._calls}: not all ranks came within {self._calls.seconds:g} s to make the inner group of "
            f"{self.inner_kind}. Is one of them stopped?"
        )

    def _require_made(self, generation: Generation) -> None:
        """Raise ``InvalidRequestError`` if torch could not make this inner group."""
        if generation.error is not None:
            raise InvalidRequestError(
                f"{self._calls}: torch could not make the inner group of {self.inner_kind}: {generation.error}"
            )

    def generation_ended(self, message: Abort) -> None:
        """End the inner group with its generation, and report to the comparer that the next one can be made. Control thread."""
        old = self._generation
        if message.process_set != self.process_set or message.generation < old.number or self._calls.closed:
            return
        new = Generation(message.generation + 1)
        self._end_generation(old, message, new)
        if self._calls.has_its_ranks():
            self._send(InnerEnded(self._name_in_mail, new.number), [self._comparer(self._members)])

    def report_inner_ended_again(self) -> None:
        """Report again that the next inner group can be made: this mail, or the answer, may be lost with the coordinator. Control thread."""
        generation = self._generation
        if generation.number >= 0 and not generation.begun and self._calls.has_its_ranks():
            self._send(InnerEnded(self._name_in_mail, generation.number), [self._comparer(self._members)])

    def world_changed(self) -> None:
        """Let the threads go on that wait for an inner group, if there will be none: the group has lost ranks. Control thread."""
        generation = self._generation
        if generation.number >= 0 and not generation.made.is_set() and not self._calls.has_its_ranks():
            generation.made.set()

    def end_for_good(self, message: Abort) -> None:
        """End the inner group, with no other to follow: the coordinator is lost, or this rank leaves. Control thread."""
        last = Generation(self._generation.number)
        last.error = InvalidRequestError(message.text)
        last.made.set()
        self._end_generation(self._generation, message, last)

    def _end_generation(self, old: Generation, message: Abort, new: Generation) -> None:
        # The mark before the abort: a work that the abort fails finds the cause. The new one before that, so that no thread launches
        # anything in the old one that has seen its works fail.
        self._generation, old.ended, self._last_end = new, message, message
        self._inquiries.clear()
        # Before the thread that drops the inner group, which empties the list.
        flying = list(old.flying)
        new.split = old.split | {
            work.backward for work in flying if work.backward >= 0 and not work.is_over()
        }
        if (inner := old.inner or old.connecting) is not None:
            self._aborted = inner
            # From now on no thread launches anything in it. The abort can wait for bytes that flow, which the control thread must not do.
            old.inner = old.connecting = None
            threading.Thread(
                target=self._drop, args=(inner, old), name="hvdlab-c10d-dropping", daemon=True
            ).start()
        old.made.set()
        for work in flying:
            work.end_failed()
        self._end_later([work for work in flying if not work.is_over()])
        # The works have the generation: in this circle they would keep torch's works, and with these the group's sockets, until Python
        # looks for garbage. One that fails from now on sees the end by itself.
        old.flying.clear()

    def _end_later(self, flying: Sequence[WatchedWork]) -> None:
        """End works of an aborted inner group that torch's backend does not end in time. Any thread."""
        # Without references: a work that is over and forgotten must not keep the group's sockets for so long.
        left = [weakref.ref(work) for work in flying]

        def end_stuck() -> None:
            for reference in left:
                if (work := reference()) is not None:
                    work.end_stuck()

        if flying and not self.on_device:
            self._engine.call_later(STUCK_AFTER, end_stuck)

    def _drop(self, inner: InnerGroup, generation: Generation) -> None:
        """Abort an inner group and drop it; waits for torch's threads."""
        # Before the lock: a thread that launches can be waiting in torch's call.
        inner.abort()
        with self._launching:  # a thread in the middle of a launch has a reference of its own
            pass
        inner.close()
        # The works have the generation: in this circle they would keep torch's works, and with these the group's sockets, until Python
        # looks for garbage.
        generation.flying.clear()

    def shutdown(self) -> None:
        """Refuse further operations, and end the inner group."""
        super().shutdown()
        self._watch.remove(self._name_in_mail)
        generation = self._generation
        idle = generation.inner is not None and all(work.is_over() for work in list(generation.flying))
        if not idle:
            # Before the inner group is read, which a thread may be making.
            generation.ended = Abort(
                self.process_set,
                generation.number,
                CauseKind.SHUTDOWN.value,
                (),
                "the group was destroyed",
                "",
            )
        inner = generation.inner or generation.connecting
        generation.inner = generation.connecting = self._aborted = None
        if inner is not None:
            if not idle:
                self._aborted = inner
                inner.abort()
            inner.close()

    def require_root(self, operation: str, options: Any) -> None:
        """Raise ``InvalidRequestError`` if an operation's root is no rank of the group."""
        self._root(operation, options)

    # -- launching ----------------------------------------------------------------------------------------------------

    def is_watched(self, tensor: Any, options: Any) -> bool:
        """Return whether an operation on this tensor goes to the inner group."""
        if tensor is not None:
            return bool(tensor.device.type == self._device_type)
        return not self.on_device or getattr(options, "device", None) is not None

    def launch(
        self, method: str, operation: str, tensor: Any, channel: str, args: Any, kwargs: Any
    ) -> WatchedWork:
        """Hand an operation over to the inner group.

        Args:
            method: Torch's method.
            operation: Torch's name of the operation.
            tensor: The tensor whose shape and dtype the ranks compare, or ``None``.
            channel: The channel on which the launch counts.
            args, kwargs: The method's arguments.
        """
        calls = self._calls
        calls.require_usable(operation)
        part = calls.part(operation.removesuffix(" of lists"), [] if tensor is None else [tensor])
        # Gloo takes the memory of a strided tensor for contiguous memory. NCCL's backend refuses such tensors.
        given = args if self.on_device else contiguous(args)
        back = (
            None
            if given is args
            else CopyBack(operation, args[0], given[0], written=self._writes(method, args))
        )
        while True:
            generation = self._ready(operation)
            # A backward pass in C++ launches its next buckets before it raises the error of one that was given up. In this generation they
            # would meet other buckets, of ranks that begin the step again: messages of other sizes, at which Gloo ends the process. An error
            # here would leave the wrapped model in the middle of its reduction for ever.
            if generation.split and torch._C._current_graph_task_id() in generation.split:
                return self._abandoned(operation, channel, part.about)
            with self._launching:
                inner = generation.inner
                # _ready() waited without the lock, so this generation can have ended since.
                if inner is None and generation is not self._generation:
                    continue  # it has ended meanwhile
                if inner is None:
                    raise InvalidRequestError(
                        f"{operation}: {calls} was destroyed, or has lost its coordinator."
                    )
                return self._launch(
                    generation, inner, method, operation, tensor, channel, part.about, given, kwargs, back
                )

    def _writes(self, method: str, args: Any) -> bool:
        """Return whether an operation writes to its first argument on this rank."""
        if method in ("broadcast", "reduce"):
            return bool(self._root(method, args[-1]) == self.rank()) == (method == "reduce")
        return method != "send"

    def _abandoned(self, operation: str, channel: str, about: str) -> WatchedWork:
        """Return the work of a launch that is not made: it has ended with the generation in which its backward pass has begun."""
        assert self._last_end is not None
        former = Generation(self._last_end.generation)
        former.ended = self._last_end
        number = self._calls.sequence + 1
        slot = LaunchSlot(
            former.number, channel, 0, number, operation, None, None, call_site(2), about, self._world.steps.taken
        )  # fmt: skip
        work = WatchedWork(self, former, slot, self._calls.seconds)
        work.failed(RuntimeError("its backward pass was given up"))
        return work

    def _launch(
        self, generation: Generation, inner: InnerGroup, method: str, operation: str, tensor: Any, channel: str, about: str,
        args: Any, kwargs: Any, back: CopyBack | None,
    ) -> WatchedWork:  # fmt: skip
        calls = self._calls
        calls.sequence += 1
        number = generation.counts[channel] = generation.counts.get(channel, 0) + 1
        described = None if tensor is None else (tensor.shape, tensor.dtype)
        options = args[-1] if args else None
        slot = LaunchSlot(
            generation.number, channel, number, calls.sequence, operation, described, options, call_site(2), about,
            self._world.steps.taken,
        )  # fmt: skip
        # Before torch's call: other ranks can ask for the ring while that runs. The mark before both.
        self._entered = slot, time.monotonic()
        self._ring.add(slot)
        work = WatchedWork(self, generation, slot, calls.seconds)
        try:
            begun = getattr(inner.group, method)(*args, **kwargs)
        except Exception as error:
            refused = channel == COLLECTIVES or not isinstance(error, RuntimeError)
            if (
                refused and generation.ended is None
            ):  # torch refuses the arguments: no other rank has seen anything
                self._ring.drop_last()
                generation.counts[channel] -= 1
                self._entered = None
                raise
            work.failed(error)  # a connection that has ended
        else:
            if begun is None:  # within a coalescing block of the inner group, which makes one work of all
                self._entered = None
                return work
            work.begun(begun, args[0] if args else [], back)
        # After torch's call: a launch that it refuses was never in flight.
        self._entered = None
        generation.flying.append(work)
        # The control thread stores the end of the generation before it searches the launches in flight: either it has found this one, or this
        # thread sees the end.
        if generation.ended is not None:
            work.end_failed()
            self._end_later([] if work.is_over() else [work])
        calls.gather(work)
        self._watch.schedule_check(self._pause())
        # Other ranks have their stand-ins already, and wait for this rank's in the core.
        if number <= generation.wanted.get(channel, 0):
            self._engine.call_on_control(functools.partial(self._stand_in, generation, channel, number))
        return work

    def _late_after(self, seconds: float) -> float:
        """Return after how many seconds a launch whose wait is limited to ``seconds`` counts as late for the first time."""
        late = min(self._late, seconds / 2)
        failed = self._generation.failed_cell
        return min(late, LATE_IN_FAILED_CELL) if failed and failed in self._engine.cells else late

    def _pause(self) -> float:
        return self._late_after(self._calls.seconds) / _CHECKS

    def _start_coalescing(self, device: Any = None) -> None:
        if self.on_device and device is not None and device.type == self._device_type:
            self._ready("coalescing").inner.group._start_coalescing(device)  # type: ignore[union-attr]
        else:
            super()._start_coalescing(device)

    def _end_coalescing(self, device: Any = None) -> Any:
        if not (self.on_device and device is not None and device.type == self._device_type):
            return super()._end_coalescing(device)
        return self._ready("coalescing").inner.group._end_coalescing(device)  # type: ignore[union-attr]

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        if not self.is_watched(first(tensors), None):
            return super().send(tensors, dstRank, tag)
        self._messages.require_sound("send", tensors, dstRank, tag)
        return self.launch(
            "send", "send", first(tensors), f"{self.rank()}>{dstRank}.{tag}", (tensors, dstRank, tag), {}
        )

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        if not self.is_watched(first(tensors), None):
            return super().recv(tensors, srcRank, tag)
        self._messages.require_sound("recv", tensors, srcRank, tag)
        return self.launch(
            "recv", "recv", first(tensors), f"{srcRank}>{self.rank()}.{tag}", (tensors, srcRank, tag), {}
        )

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        if not self.is_watched(first(tensors), None):
            return super().recv_anysource(tensors, tag)
        raise InvalidRequestError(
            "recv: a watched group has no receives from any rank, since a message that is not watched could hang unseen. "
            'Name the source, or make a group with watch="agreed".'
        )

    # -- lateness -----------------------------------------------------------------------------------------------------

    def check_launches(self, now: float) -> float:
        """Report launches that are late, and repeat a request for the end. Returns the seconds until the next check; 0 for none. Control thread."""
        generation = self._generation
        flying = generation.flying
        while flying and flying[0].is_over():
            flying.popleft()
        seen: set[str] = set()
        for work in list(flying):
            channel = work.slot.channel
            if channel in seen or work.is_over():
                continue
            seen.add(channel)
            late = min(self._late, work.seconds / 2) if work.reported else self._late_after(work.seconds)
            if now - max(work.began, work.reported) >= late:
                self._report_late(work, now)
        request = generation.end_request
        # Control thread: as long as this is the present generation here, the request can't reach the next one.
        if request is not None and now - request.sent >= self._late:
            generation.end_request = request._replace(sent=now)
            self._engine.withdraw(request.text, self.process_set, CauseKind.TIMEOUT)
        return self._pause() if flying or generation.end_request is not None else 0.0

    def cell_failed(self, cell: str) -> None:
        """Tell the other ranks that this cell has failed here, if they may wait for this rank's launches. Control thread."""
        generation = self._generation
        if generation.inner is not None:
            others = [
                rank for rank in self._members if rank in self._engine.living and rank != self._engine.rank
            ]
            self._send(FailedCell(self._name_in_mail, generation.number, cell=cell), others)

    def report_failed(self, work: WatchedWork) -> None:
        """Have the ranks compare their launches, since torch's backend has failed one. Any thread."""
        self._engine.call_on_control(lambda: self._report_late(work, time.monotonic()))

    def _report_late(self, work: WatchedWork, now: float) -> None:
        if work.generation.ended is not None:
            work.end_failed()
            return
        key = work.slot.channel, work.slot.number
        work.reported = now
        stand_in = work.generation.stand_ins.get(key)
        if stand_in is not None and not stand_in.done():
            self._report_blocked(work, stand_in)
            return
        # A launch that is late again after a verdict is compared again, by the first comparer.
        if key in work.generation.judged:
            work.generation.judged.discard(key)
            work.asked.clear()
        # A comparer that has sent no verdict by now may be stopped: the next one finds that it does not answer.
        living = [rank for rank in self._ranks_of(work.slot.channel) if rank in self._engine.living]
        comparer = min((rank for rank in living if rank not in work.asked), default=None)
        if comparer is None:
            self._stand_in(work.generation, *key)
            return
        work.asked.add(comparer)
        self._send(LateLaunch(self._name_in_mail, work.generation.number, *key), [comparer])

    def _report_blocked(self, work: WatchedWork, stand_in: Handle) -> None:
        if work.waiting:
            stand_in.tell_blocked(time.monotonic() - work.began)

    def _ranks_of(self, channel: str) -> tuple[int, ...]:
        """Return the ranks of the world that launch on a channel."""
        if channel == COLLECTIVES:
            return tuple(self._members)
        source, target = channel.partition(".")[0].split(">")
        return self._members[int(source)], self._members[int(target)]

    def _comparer(self, ranks: Sequence[int]) -> int:
        living = self._engine.living
        return min((rank for rank in ranks if rank in living), default=self._engine.rank)

    def _send(self, mail: WatchMail, to: Sequence[int]) -> None:
        """Send mail to ranks; this rank handles its own at once."""
        others = [rank for rank in to if rank != self._engine.rank]
        if others:
            self._engine.post(_TOPIC, msgspec.msgpack.encode(mail), others)
        if len(others) < len(to):
            self.handle(self._engine.rank, mail)

    # -- the comparison -----------------------------------------------------------------------------------------------

    def handle(self, sender: int, mail: Any) -> None:
        """Handle mail of a rank of this group. Control thread."""
        generation = self._generation
        match mail:
            case InnerEnded():
                self._on_inner_ended(sender, mail.generation)
            case _ if mail.generation != generation.number:
                return  # of an inner group that has ended
            case FailedCell():
                generation.failed_cell = mail.cell
                self._watch.check_now()
            case LateLaunch():
                self._on_late(mail)
            case LaunchQuery():
                self._on_query(generation, sender, mail)
            case LaunchAnswer():
                inquiry = self._inquiries.get((mail.generation, mail.channel, mail.number))
                if inquiry is not None and inquiry.answered(sender, mail.report, stood_in=mail.stood_in):
                    self._conclude(mail.generation, mail.channel, inquiry)
            case LaunchVerdict():
                self._on_verdict(generation, mail)
            case MakeInner():
                self._begin_making(generation)

    def _on_inner_ended(self, sender: int, generation: int) -> None:
        if generation <= self._make_sent:  # the rank has reported it again, and has not got the answer
            self._send(MakeInner(self._name_in_mail, generation), [sender])
            return
        ended = self._ended_on.setdefault(generation, set())
        ended.add(sender)
        if ended >= set(self._members):
            # All earlier ones are past as well: a rank reports a later end only after it has seen the earlier ones.
            self._ended_on = {
                number: ranks for number, ranks in self._ended_on.items() if number > generation
            }
            self._make_sent = generation
            self._send(MakeInner(self._name_in_mail, generation), self._members)

    def _on_late(self, mail: LateLaunch) -> None:
        key = mail.generation, mail.channel, mail.number
        if key in self._inquiries:
            return
        ranks = self._ranks_of(mail.channel)
        living = [rank for rank in ranks if rank in self._engine.living]
        inquiry = self._inquiries[key] = Inquiry(mail.number, ranks, living)
        # Before the query: this rank's own answer may be the last one.
        seconds = ANSWER_WITHIN + ANSWER_EACH * len(living)
        self._engine.call_later(seconds, lambda: self._conclude(mail.generation, mail.channel, inquiry))
        self._send(LaunchQuery(mail.group, mail.generation, mail.channel, mail.number), living)

    def _on_query(self, generation: Generation, sender: int, mail: LaunchQuery) -> None:
        channel, number = mail.channel, mail.number
        if self._may_be_refused(channel, number):
            # Otherwise a call that fails on this rank alone would count as the launch that the others wait for.
            self._engine.call_later(REFUSED_WITHIN, lambda: self.handle(sender, mail))
            return
        if not self._engine.runs_cell and generation.counts.get(channel, 0) >= number:
            # Launched in a cell that has ended. Its stand-in goes before the answer, and so before those of all others: without it the
            # coordinator would take them to wait for a rank that has left the operation out.
            self._stand_in(generation, channel, number)
        report = self._ring.report(generation.number, channel, self._members)
        stood_in = (channel, number) in generation.stand_ins
        self._send(LaunchAnswer(mail.group, mail.generation, channel, number, report, stood_in), [sender])

    def _conclude(self, generation: int, channel: str, inquiry: Inquiry) -> None:
        """Send the verdict to the ranks, unless that was done or the inner group has ended."""
        key = generation, channel, inquiry.number
        if self._inquiries.get(key) is not inquiry:
            return
        # An answer or a timer that comes later finds none, so that each inquiry has one verdict.
        del self._inquiries[key]
        verdict = inquiry.verdict()
        stand_in = bool(verdict.missing) or inquiry.stood_in
        mail = LaunchVerdict.of(self._name_in_mail, *key, verdict, stand_in=stand_in)
        # Before the end of the generation, on the same connection: it reaches each rank before that.
        self._send(mail, [rank for rank in inquiry.members if rank in self._engine.living])
        if verdict.parties:
            text = f"the ranks disagreed about launch {inquiry.number} of {self._calls}"
            self._engine.withdraw(text, self.process_set, CauseKind.MISMATCH)

    def _on_verdict(self, generation: Generation, mail: LaunchVerdict) -> None:
        channel, number = mail.channel, mail.number
        verdict = generation.verdicts[channel, number] = mail.verdict()
        generation.judged.add((channel, number))
        if verdict.parties:
            return  # the end of the generation follows
        if mail.stand_in:
            generation.wanted[channel] = max(number, generation.wanted.get(channel, 0))
            if self._may_be_refused(channel, number):
                self._engine.call_later(
                    REFUSED_WITHIN, lambda: self._stand_in_launched(generation, channel, number)
                )
            else:
                self._stand_in_launched(generation, channel, number)
            return
        self._all_launched(generation, channel, number)

    def _may_be_refused(self, channel: str, number: int) -> bool:
        """Return whether torch may still refuse this launch. Control thread."""
        entered = self._entered
        if entered is None or entered[0][1:3] != (channel, number):
            return False
        return time.monotonic() - entered[1] < REFUSED_WITHIN

    def _stand_in_launched(self, generation: Generation, channel: str, number: int) -> None:
        """Let this rank's launch take part in the core if it was made; a later one does so by itself. Control thread."""
        if generation.counts.get(channel, 0) >= number:
            self._stand_in(generation, channel, number)

    def _stand_in(self, generation: Generation, channel: str, number: int) -> None:
        """Let this rank's launch take part in the core, too. Control thread."""
        if generation is not self._generation or (channel, number) in generation.stand_ins:
            return
        slot = next(
            (slot for slot in self._ring.slots(generation.number, channel) if slot.number == number), None
        )
        operation = "" if slot is None else slot.operation.removesuffix(" of lists")
        sequence, site, part = (0, "", "") if slot is None else (slot.sequence, slot.site, slot.part)
        name = f"{self._calls.name_in_core}.{generation.number}.{channel}#{number}"
        request = Request(OpKind.BARRIER, name, process_set=self.process_set, site=site, internal=True)
        if channel != COLLECTIVES:
            source, target = ranks = self._ranks_of(channel)
            byte = np.zeros(1, np.uint8)
            request.kind, request.root, request.ranks = OpKind.SENDRECV, source, (source, target)
            request.input, request.output, request.dtype = (
                byte,
                byte if ranks[1] == self._engine.rank else None,
                DType.U8,
            )
        if slot is not None:
            request.label = self._calls.recorded_as(operation)
            request.about = f", {self._calls.name_of(operation, sequence, part)}"
        try:
            handle = generation.stand_ins[channel, number] = self._engine.submit(request)
        except HvdlabError:
            return  # the process set, or the coordinator, is gone: the end of this inner group is on its way

        def done(result: object, error: Exception | None, /) -> None:
            if error is None:
                self._engine.call_on_control(lambda: self._all_launched(generation, channel, number))

        if not handle.add_hook(done):
            done(*handle.outcome())
        work = next((each for each in generation.flying if each.slot[1:3] == (channel, number)), None)
        if work is not None:
            self._report_blocked(work, handle)

    def _all_launched(self, generation: Generation, channel: str, number: int) -> None:
        """End the generation if torch's backend has failed a launch that all ranks have made: no rank explains that."""
        if generation is not self._generation:
            return
        for work in generation.flying:
            if work.failure and (work.slot.channel, work.slot.number) == (channel, number):
                text = f"torch's {self.inner_kind} failed on rank {self._engine.rank}: {work.failure}"
                self._engine.withdraw(text, self.process_set, CauseKind.PLANE_FAILED)
                return

    # -- ends ---------------------------------------------------------------------------------------------------------

    def give_up(self, work: WatchedWork, seconds: float) -> None:
        """Have all ranks give up the launches in flight, since a wait has exceeded its limit. Any thread; the end comes later."""
        text = f"it was given up on rank {self._engine.rank} after {seconds:g} s, the timeout of the process group"
        # A request can be lost with the coordinator, and the core repeats none: nothing is pending there. So check_launches() repeats it. Stored before it
        # is sent, and with the work's own generation: if that has ended by now, no check may end the next one.
        work.generation.end_request = EndRequest(text, time.monotonic())
        self._engine.withdraw(text, self.process_set, CauseKind.TIMEOUT)
        self._watch.schedule_check(self._pause())

    def withdraw_interrupted(self) -> None:
        """Have all ranks give up the launches in flight, since the user interrupts this rank."""
        self._engine.withdraw(
            f"rank {self._engine.rank} was interrupted", self.process_set, CauseKind.INTERRUPTED
        )

    def interrupted(self) -> None:
        """Give up the operations for which C++ may be waiting, since the user interrupts this rank. Control thread."""
        if any(work.has_future and not work.is_over() for work in list(self._generation.flying)):
            self.withdraw_interrupted()

    def future_asked_for(self) -> None:
        """Give up the launches in flight if an interrupt is held: C++ may wait for a future from now on."""
        if self._engine.interrupt_is_held():
            self.withdraw_interrupted()

    def passed_to_native(self, error: CollectiveError) -> None:
        """Keep an error that native code gets, which keeps its text alone."""
        self._engine.sent_through_native.append(error.with_traceback(None))

    def calls_of(self, group: str, generation: int) -> CallHistoryMessage:
        """Return the last collectives of an inner group, for the search for a skipped call. Any thread."""
        report = self._ring.report(generation, COLLECTIVES, self._members)
        return CallHistoryMessage(group, generation, report.first, report.launches)

    def error_of(self, work: WatchedWork) -> Exception:
        """Return the error with which a work of an inner group that has ended ends. May ask other ranks; not on the control thread."""
        end, slot = work.generation.ended, work.slot
        assert end is not None
        operation = self._calls.name_of(slot.operation.removesuffix(" of lists"), slot.sequence, slot.part)
        verdict = work.generation.verdicts.get((slot.channel, slot.number))
        if verdict is not None and verdict.parties:
            error = MismatchError(operation, self.process_set, verdict.parties).because_of(end.decision)
            if verdict.note:
                error.add_note(verdict.note)
            return error
        own = launch_of(slot, self._members).site
        pending = Pending("barrier", "", (self._engine.rank,), end.ranks, {self._engine.rank: own})
        if verdict is not None and verdict.missing:
            sites = dict(zip(verdict.waited, verdict.sites, strict=True))
            pending = Pending("barrier", "", verdict.waited, verdict.missing, sites)
        aborted = self._aborted_by(end, pending)
        why = self._calls.explain(work.generation.number, aborted) if slot.channel == COLLECTIVES else ""
        return renamed(aborted, operation, why, slot.part)

    def _aborted_by(self, end: Abort, pending: Pending) -> AbortedError:
        cause = Cause(CauseKind(end.kind), end.ranks, end.text, end.site, end.decision)
        return AbortedError(pending, cause, self.process_set, end.generation)


def _handing_over(method: str, operation: str, index: int, agreed: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of a watched group for one of torch's methods."""

    def call(self: WatchedGroup, *given: Any, **named: Any) -> Any:
        args = canonical(method, given, named)
        if method in ROOTED:
            self.require_root(operation, args[-1])
        tensor = first(args[index]) if 0 <= index < len(args) else None
        if not self.is_watched(tensor, args[-1]):
            return agreed(self, *args)
        # Gloo looks at lists and splits on a thread of its own, after the launch: its error would end the generation.
        require_exchange(method, args, self.size())
        return self.launch(method, operation, tensor, COLLECTIVES, args, {})

    call.__name__ = method
    return call


for _method, (_operation, _index) in OPERATIONS.items():
    setattr(
        WatchedGroup,
        _method,
        _handing_over(_method, _operation, _index, getattr(HvdlabProcessGroup, _method)),
    )

# Not one wrapped by `untraced`, whose frames would hide from the search for a bucket that C++ has called the group.
untraced_methods(WatchedGroup)
