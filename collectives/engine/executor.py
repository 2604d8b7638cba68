"""The executor: begins batches on the planes, in the coordinator's order, one at a time.

A host plane has executed a batch when its call returns. A device plane may only have begun it: it reports the end later,
from a thread of its own, and the executor goes on with the next batch meanwhile. So the batches of a process set begin in the
same order on all ranks, whatever their devices, and those of one device class end in that order.

Work is queued in a :class:`Lane`. The thread that works holds the lane's baton: the lane's own thread, or a user's thread that
waits for a result anyway and so saves a change of threads. If a plane does not obey an abort, the executor abandons the
whole lane, with the thread that is stuck in it, and goes on with a new one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.engine.effects import RunBatch
from hvdlab.collectives.engine.hooks import Hooks
from hvdlab.collectives.engine.operations import run_batch, run_message, source_of
from hvdlab.collectives.engine.request import Result
from hvdlab.collectives.engine.slots import PlaneSlot, Scope
from hvdlab.collectives.engine.small import Folds, run_small
from hvdlab.collectives.planes.base import Completion, PhaseTimes, PlaneAborted
from hvdlab.collectives.planes.buffers import HOST

Close = Callable[[], None]
Job = RunBatch | Close


class Outcomes(Protocol):
    """Receives how batches end. Called by the thread that ran them."""

    def batch_done(
        self, batch: RunBatch, results: list[Result], started: int, phases: PhaseTimes
    ) -> None: ...

    def batch_unfinished(self, batch: RunBatch, started: int, phases: PhaseTimes) -> None: ...

    def batch_failed(self, batch: RunBatch, error: Exception) -> None: ...


class Lane:
    """Jobs in order, the baton, and the thread that works when no user's thread does."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.jobs: deque[Job] = deque()
        self.baton = threading.Lock()
        self.bell: SimpleQueue[bool] = SimpleQueue()
        self.abandoned = False
        self.folds: Folds = {}
        self.current: Job | None = None
        self.running: PlaneSlot | None = None
        self.thread: threading.Thread | None = None

    @property
    def stuck(self) -> bool:
        """Whether a thread, the lane's or a user's, is in the middle of an operation."""
        return self.running is not None


class Executor:
    """Planes and lanes of one rank.

    ``put``, ``abort`` and ``prepare`` are called under the engine's lock or on its control thread; ``help`` by users'
    threads.
    """

    def __init__(self, outcomes: Outcomes, hooks: Hooks, label: str) -> None:
        self._outcomes = outcomes
        self._hooks = hooks
        self._label = label
        self._slots: dict[Scope, PlaneSlot] = {}
        self._abandoned: list[Lane] = []
        self._lanes = 0
        # Guards taking and putting jobs, moving them to another lane, and counting the batches under way.
        self._handing = threading.Lock()
        self.lane = self._new_lane()

    # -- work -----------------------------------------------------------------------------------------------------

    def prepare(self, slot: PlaneSlot) -> None:
        """Take in the slot of a new epoch's plane; the plane is built when it is first needed."""
        self._slots[slot.scope] = slot
        if self._abandoned:
            self._reap()

    def put(self, job: Job) -> None:
        """Add work without waking the lane's thread; see :meth:`ring`."""
        with self._handing:
            self.lane.jobs.append(job)

    def ring(self) -> None:
        """Wake the lane's thread, so that it works on the jobs."""
        self.lane.bell.put(True)

    def help(self) -> None:
        """Work on the jobs on the calling thread, unless another thread does already."""
        self._drain(self.lane)

    def _drain(self, lane: Lane) -> None:
        # A thread that has put a job and finds the baton taken may go: the baton's holder looks for jobs again after it has
        # put the baton down.
        while lane.jobs and not lane.abandoned and not lane.baton.locked():
            with lane.baton:
                while True:
                    with self._handing:
                        if lane.abandoned or not lane.jobs:
                            break
                        # Noted before it is taken from the queue: if Ctrl-C comes in between, its process set is known.
                        job = lane.current = lane.jobs[0]
                        lane.jobs.popleft()
                    if type(job) is RunBatch:
                        self._run(lane, job)
                    else:
                        job()  # type: ignore[operator]  # the other kind of job
                    lane.current = None
                    if self._hooks.due:
                        break
            # Without the baton: while this thread runs hooks, another one may go on with the jobs.
            if self._hooks.due:
                self._hooks.run() if threading.current_thread() is lane.thread else self._hooks.leave()

    def while_idle(self, scope: Scope, work: Callable[[PlaneSlot], bool]) -> bool:
        """If the lane is idle, call ``work`` on this thread and keep the lane meanwhile: jobs that are put then wait.

        Args:
            scope: The process set, epoch and device class whose plane is needed.
            work: Is given that plane's slot, and may call :meth:`run_alone`.

        Returns:
            What ``work`` returned; false if the lane is busy or there is no such plane.
        """
        lane = self.lane
        slot = self._slots.get(scope)
        if slot is None or lane.jobs or lane.baton.locked():
            return False
        try:
            # Not a context manager made of a generator: if Ctrl-C came as that is entered, it would keep the baton until the
            # exception's traceback is gone.
            with lane.baton:
                return not (lane.abandoned or lane.jobs or slot.aborted) and work(slot)
        finally:
            if lane.jobs:
                self.ring()

    def run_alone(self, batch: RunBatch) -> None:
        """Run a batch on the calling thread, which has the lane by :meth:`while_idle`."""
        self._run(self.lane, batch)

    def take_interrupted(self) -> list[tuple[int, int]]:
        """Process set and epoch of the batch that the calling thread worked on when it was interrupted, if it did."""
        lane = self.lane
        job, baton = lane.current, lane.baton.locked()
        if baton or type(job) is not RunBatch:
            return []
        lane.current = None
        return [(job.process_set, job.epoch)]

    def _run(self, lane: Lane, batch: RunBatch) -> None:
        slot = self._slots.get((batch.process_set, batch.epoch, batch.device))
        phases = PhaseTimes()
        if slot is None or slot.aborted:
            self._outcomes.batch_unfinished(batch, 0, phases)
            return  # the abort of its epoch ends the batch's handles
        lane.running = slot
        started = time.monotonic_ns()
        finished = False
        completion: Completion | None = None
        try:
            sender = source_of(batch) if batch.entries[0].request.kind is OpKind.SENDRECV else -1
            if batch.payloads:
                results = [run_small(batch.entries[0].request, batch.payloads, lane.folds, sender)]
            elif batch.entries[0].request.kind is OpKind.JOIN:
                results = [Result(last_joined=batch.tables[0][0][0])]  # after all that the other members did
            elif sender >= 0:
                # Not counted among the plane's operations, which are the same on all members.
                results = [run_message(slot.pairs(), batch.entries[0].request, sender, phases)]
            else:
                slot.operations += 1
                results, completion = run_batch(slot.open(), batch, phases)
        except PlaneAborted:
            pass
        except Exception as error:  # noqa: BLE001  (whatever it is, the epoch can't go on; all members get to know why)
            self._failed(slot, batch, error)
        except BaseException:
            slot.abort()  # an interrupt in the middle of an operation: this rank can't serve the plane's peers any more
            raise
        else:
            finished = True
            if completion is None:
                self._outcomes.batch_done(batch, results, started, phases)
            else:
                with self._handing:
                    slot.under_way += 1
                completion.on_end(partial(self._ended, slot, batch, results, started, phases))
        finally:
            lane.running = None
            if lane.abandoned:
                slot.close()
            if not finished:
                self._outcomes.batch_unfinished(batch, started, phases)

    def _failed(self, slot: PlaneSlot, batch: RunBatch, error: Exception) -> None:
        # Whatever failed, the epoch can't go on; ``batch_failed`` lets all members know why.
        slot.error = error
        slot.aborted = True
        self._outcomes.batch_failed(batch, error)

    def _ended(
        self,
        slot: PlaneSlot,
        batch: RunBatch,
        results: list[Result],
        started: int,
        phases: PhaseTimes,
        error: Exception | None,
    ) -> None:
        """A batch has ended that went on without a thread of the executor. Any thread, perhaps the plane's own."""
        if error is None:
            self._outcomes.batch_done(batch, results, started, phases)
        else:
            if not isinstance(error, PlaneAborted):
                self._failed(slot, batch, error)
            self._outcomes.batch_unfinished(batch, started, phases)
        self._hooks.leave()
        with self._handing:
            slot.under_way -= 1
            last = slot.outdated and not slot.under_way
        if last:
            self.close_older(slot.scope[0], slot.scope[1] + 1)

    def _loop(self, lane: Lane) -> None:
        while lane.bell.get():
            self._drain(lane)
            if lane.abandoned:
                return
        # Closing: every plane that is still there is closed by this thread, after the work that came before.
        with lane.baton:
            for slot in list(self._slots.values()):
                slot.close()
            self._slots.clear()

    # -- ends -----------------------------------------------------------------------------------------------------

    def abort(self, process_set: int, epoch: int) -> tuple[Lane, PlaneSlot] | None:
        """End the planes of a process set up to ``epoch``; returns the lane and slot of an operation that is in one of them."""
        busy = None
        for slot in list(self._slots.values()):
            if slot.scope[0] == process_set and slot.scope[1] <= epoch:
                slot.abort()
                if self.lane.running is slot:
                    busy = (self.lane, slot)
        self.close_older(process_set, epoch + 1)
        return busy

    def close_older(self, process_set: int, epoch: int) -> None:
        """Close the planes of a process set older than ``epoch``, after the jobs that are queued now."""
        if self._older(process_set, epoch):
            self.put(lambda: self._close_older(process_set, epoch))
            self.ring()

    def _close_older(self, process_set: int, epoch: int) -> None:
        for scope in self._older(process_set, epoch):
            slot = self._slots[scope]
            with self._handing:
                slot.outdated = True
                if slot.under_way and not slot.aborted:
                    continue  # the thread that ends its last batch comes back here; an abort does as well
            del self._slots[scope]
            # A thread that is stuck in the plane closes it when it comes back.
            if not any(lane.running is slot for lane in self._abandoned):
                slot.close()

    def _older(self, process_set: int, epoch: int) -> list[Scope]:
        # The control thread adds slots while the lane's thread removes some, so only a copy, which Python makes in one step, can be
        # iterated over.
        return [scope for scope in list(self._slots) if scope[0] == process_set and scope[1] < epoch]

    def tune(self, process_set: int, epoch: int, slice_bytes: int) -> None:
        """Change the slices of a host plane to ``slice_bytes`` bytes, after the jobs that are queued now."""

        def tune() -> None:
            slot = self._slots.get((process_set, epoch, HOST))
            if slot is not None:
                slot.tune(slice_bytes)

        self.put(tune)

    def failed(self, process_set: int, epoch: int, error: Exception) -> None:
        """A result that this rank computes without the plane failed: nothing more is executed in this epoch."""
        slot = self._slots.get((process_set, epoch, HOST))
        if slot is not None:
            slot.error, slot.aborted = error, True

    def error_of(self, process_set: int, epoch: int) -> Exception | None:
        """The exception with which a plane of this epoch failed on this rank, or ``None``."""
        errors = (slot.error for slot in list(self._slots.values()) if slot.scope[:2] == (process_set, epoch))
        return next(filter(None, errors), None)

    def abandon(self, lane: Lane, slot: PlaneSlot) -> None:
        """Go on with a new lane if ``lane`` is still in ``slot``, whose abort it did not obey."""
        with self._handing:
            if lane is not self.lane or lane.running is not slot:
                return
            lane.abandoned = True
            self._abandoned.append(lane)
            new = self._new_lane()
            new.jobs, lane.jobs = lane.jobs, new.jobs
            self.lane = new
        lane.bell.put(True)
        self.ring()

    def _reap(self) -> None:
        """Let go of the abandoned lanes that have come back."""
        back = [lane for lane in self._abandoned if not lane.stuck]
        for lane in back:
            assert lane.thread is not None
            lane.thread.join()
            self._abandoned.remove(lane)

    @property
    def threads(self) -> list[threading.Thread]:
        """The lanes' own threads, those of abandoned lanes included."""
        return [lane.thread for lane in (self.lane, *self._abandoned) if lane.thread is not None]

    @property
    def abandoned(self) -> int:
        """How many lanes were left behind and are still stuck."""
        return sum(lane.stuck for lane in self._abandoned)

    def close(self, timeout: float) -> None:
        """End all work and close all planes. Waits ``timeout`` seconds for the lane's thread; joins the threads of abandoned lanes
        only if they are not stuck any more.
        """
        for slot in list(self._slots.values()):
            slot.abort()
        self.lane.bell.put(False)
        if self.lane.thread is not None:
            self.lane.thread.join(timeout)
        self._reap()

    def _new_lane(self) -> Lane:
        self._lanes += 1
        lane = Lane(self._lanes)
        name = f"hvdlab-executor-{self._label}-{lane.number}"
        lane.thread = threading.Thread(target=self._loop, args=(lane,), name=name, daemon=True)
        lane.thread.start()
        return lane
