"""Executor: begins batches on the planes, in the coordinator's order, one at a time.

A host plane has executed a batch when its call returns. A device plane can have only begun it: it reports the end later,
from a thread of its own, and the executor continues with the next batch meanwhile. So the batches of a process set begin in the
same order on all ranks, on all devices, and those of one device class end in that order.

Work is queued in a :class:`WorkQueue`. The thread that works holds the queue's ``run_lock``: the queue's own thread, or a user's
thread that waits for a result anyway and so saves a change of threads. If a plane does not obey an abort, the executor abandons
the whole queue, with the thread that is stuck in it, and continues with a new one.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from hvdlab.collectives.engine.entries import CompletionHooks, Entry, RunBatch
from hvdlab.collectives.engine.locked_state import complete
from hvdlab.collectives.engine.operations import run_batch, run_message, run_small, source_of
from hvdlab.collectives.engine.requests import Result
from hvdlab.collectives.planes import registry
from hvdlab.collectives.planes.base import HOST, Completion, PhaseTimes, Plane, PlaneAborted, PlaneContext
from hvdlab.collectives.planes.registry import PeerPlanes
from hvdlab.collectives.reduce import FoldScratch
from hvdlab.collectives.text import LOG
from hvdlab.collectives.types import OpKind

CONNECT_TIMEOUT = 30.0
"""Seconds that the members of a plane have to connect to each other, unless the coordinator chooses another limit."""

Scope = tuple[int, int, str]
"""Process set, generation and device class."""
Close = Callable[[], None]
Job = RunBatch | Close


class PlaneSlot:
    """Plane of one process set, generation and device class, which is built at its first use.

    ``open`` and ``close`` belong to the thread that holds the queue's ``run_lock``; any thread can call ``abort``.

    Args:
        name: Name of the plane.
        device: The device class that it is for.
        context: Members, options and memory, from which the plane is built, and the store, which ends with its generation.

    Attributes:
        scope: Process set, generation and device class.
        plane: The plane, once it is built.
        aborted: Whether the generation has ended; nothing more is executed in it.
        error: Why the plane failed here, if it did.
        under_way: Batches that were begun and have not ended yet, without a thread that waits for them. Belongs to the executor.
        operations: How many batches have begun on it; equal on all members between two of them. Belongs to the thread that holds
            ``run_lock``.
        outdated: Whether a newer generation has begun; the plane is closed once nothing is under way. Belongs to the executor.
        failing: Entries that fail once no aborted operation is at work on the plane, with their errors. They stay here, so that an
            interrupted thread loses none.
    """

    def __init__(self, name: str, device: str, context: PlaneContext) -> None:
        self.name = name
        self.context = context
        self.scope: Scope = (context.process_set, context.generation, device)
        self.under_way = self.operations = 0
        self.outdated = False
        self.failing: list[tuple[Entry, Exception]] = []
        self.plane: Plane | None = None
        self.aborted = False
        self.error: Exception | None = None
        #: Channels of messages, once a message has used them.
        self._pairs: PeerPlanes | None = None
        #: Whether the plane is connected.
        self._connected = False
        #: Whether :meth:`close` was called.
        self._closed = False
        #: Size in bytes of the slices; 0 before the coordinator has chosen one.
        self._slice = 0

    def open(self) -> Plane:
        """Return the plane, built and connected at the first call. Blocks; raises as the plane does, ``PlaneAborted`` after an abort."""
        plane = self.plane
        if plane is None:
            plane = self.plane = registry.build(self.name, self.context)
        if not self._connected:
            # The plane is stored before the flag is read, and abort() sets the flag before it reads the plane: one of them sees it.
            if self.aborted:
                raise PlaneAborted(f"generation {self.context.generation} has ended")
            plane.connect(float(self.context.options.get("connect_timeout", CONNECT_TIMEOUT)))
            self._connected = True
            plane.tune(self._slice)
        return plane

    def pairs(self) -> PeerPlanes:
        """Return the channels by which two members exchange messages. The plane need not be open: other members have no part in them."""
        pairs = self._pairs
        if pairs is None:
            timeout = float(self.context.options.get("connect_timeout", CONNECT_TIMEOUT))
            pairs = self._pairs = PeerPlanes(self.name, self.context, timeout)
        if self.aborted:  # read after ``_pairs`` was stored, as in open()
            raise PlaneAborted(f"generation {self.context.generation} has ended")
        return pairs

    def tune(self, slice_bytes: int) -> None:
        """Set the size of slices, as :meth:`Plane.tune` does; before the plane is connected the size is only stored."""
        self._slice = slice_bytes
        if self.plane is not None and self._connected:
            self.plane.tune(slice_bytes)

    def abort(self) -> None:
        """End the operations that run on the plane, and the waits for values of the store. Any thread; never blocks."""
        # The mark before the plane is read; open() and pairs() store in the other order.
        self.aborted = True
        if self.plane is not None:
            self._try(self.plane.abort)
        if self._pairs is not None:
            self._try(self._pairs.abort)
        if self.context.store is not None:
            self.context.store.abort()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = self.aborted = True
        if self._pairs is not None:
            self._try(self._pairs.close)
        if self.plane is not None:
            self._try(self.plane.close)
        elif self.context.memory_fd >= 0:
            os.close(self.context.memory_fd)  # no plane was built that would own it

    def _try(self, end: Close) -> None:
        """Abort or close a part of a generation that is over; log an error, such as one for lack of descriptors."""
        # Not raised: the control thread and the queue's own thread come here, and would end by it. The rank would be lost, or wait for
        # ever with its next operation. An operation that goes on in spite of its abort is abandoned.
        try:
            end()
        except Exception:  # noqa: BLE001  (the code of any plane, and of libraries below it)
            LOG.exception(
                "the %s plane of process set %d, generation %d, failed at its end", self.name, *self.scope[:2]
            )


class Outcomes(Protocol):
    """Receiver of ends of batches. The thread that ran a batch calls it."""

    def batch_done(
        self, batch: RunBatch, results: list[Result], started: int, phases: PhaseTimes
    ) -> None: ...

    def batch_unfinished(self, batch: RunBatch, started: int, phases: PhaseTimes) -> None: ...

    def batch_failed(self, batch: RunBatch, error: Exception) -> None: ...


class WorkQueue:
    """Queue of jobs, with the lock of the thread that runs them, and the queue's own thread, which works when no user's thread does.

    Attributes:
        number: Number of the queue; 1 for the first.
        jobs: Jobs that no thread has begun.
        run_lock: Held by the thread that runs jobs.
        wakeup: Wakes the queue's own thread; ``False`` ends it.
        abandoned: Whether the executor continues without this queue, since a thread is stuck in it.
        folds: Scratch memory of the thread that runs jobs.
        current: The job that is running, or was when its thread was interrupted.
        running: The slot of the plane whose operation is running, or ``None``.
        thread: The queue's own thread.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.jobs: deque[Job] = deque()
        self.run_lock = threading.Lock()
        self.wakeup: SimpleQueue[bool] = SimpleQueue()
        self.abandoned = False
        self.folds = FoldScratch()
        self.current: Job | None = None
        self.running: PlaneSlot | None = None
        self.thread: threading.Thread | None = None

    @property
    def stuck(self) -> bool:
        """Return whether a thread, the queue's own or a user's, is in the middle of an operation."""
        return self.running is not None


class Executor:
    """Planes and work queues of one rank.

    ``enqueue``, ``abort`` and ``prepare`` are called under the engine's lock or on its control thread; ``run_pending`` by users'
    threads.
    """

    def __init__(self, outcomes: Outcomes, hooks: CompletionHooks, label: str) -> None:
        self._outcomes = outcomes
        self._hooks = hooks
        self._label = label
        #: Slots of planes that are not closed.
        self._slots: dict[Scope, PlaneSlot] = {}
        #: Aborted slots on whose operations entries that fail wait. Belongs to the control thread.
        self._ending: list[PlaneSlot] = []
        #: Queues with a stuck thread, which is joined once it has come back.
        self._abandoned: list[WorkQueue] = []
        #: Number of queues so far.
        self._queues = 0
        # Guards adding and removing jobs, moving them to another queue, and counting the batches under way.
        self._jobs_lock = threading.Lock()
        #: The queue that gets jobs.
        self.queue = self._new_queue()

    # -- work -----------------------------------------------------------------------------------------------------

    def prepare(self, slot: PlaneSlot) -> None:
        """Add the slot of a new generation's plane; the plane is built when it is first needed."""
        self._slots[slot.scope] = slot
        if self._abandoned:
            self._join_abandoned()

    def enqueue(self, job: Job) -> None:
        """Add work without waking the queue's thread; see :meth:`wake`."""
        with self._jobs_lock:
            self.queue.jobs.append(job)

    def wake(self) -> None:
        """Wake the queue's own thread, so that it runs the jobs."""
        self.queue.wakeup.put(True)

    def run_pending(self) -> None:
        """Run the queued jobs on the calling thread, unless another thread does already."""
        self._drain(self.queue)

    def _drain(self, queue: WorkQueue) -> None:
        # A thread that has added a job and finds ``run_lock`` locked can return: the holder checks for jobs again after it has released
        # the lock.
        while queue.jobs and not queue.abandoned and not queue.run_lock.locked():
            with queue.run_lock:
                while True:
                    with self._jobs_lock:
                        if queue.abandoned or not queue.jobs:
                            break
                        # Stored before it is removed from the queue: if Ctrl-C comes in between, its process set is known.
                        job = queue.current = queue.jobs[0]
                        queue.jobs.popleft()
                    if type(job) is RunBatch:
                        self._run(queue, job)
                    else:
                        _run_job(job)  # type: ignore[arg-type]  # the other kind of job
                    # Not in a ``finally``: an interrupted thread leaves the job here, and pop_interrupted() gives up its generation.
                    queue.current = None
                    if self._hooks.due:
                        break
            # Without ``run_lock``: while this thread runs hooks, another one can continue with the jobs.
            if self._hooks.due:
                self._hooks.run() if threading.current_thread() is queue.thread else self._hooks.defer_to_control()

    def with_idle_queue(self, scope: Scope, work: Callable[[PlaneSlot], bool]) -> bool:
        """Call ``work`` on this thread if the queue is idle, and keep its lock meanwhile: jobs that are added then wait.

        Args:
            scope: Process set, generation and device class of the needed plane.
            work: Gets that plane's slot, and may call :meth:`run_now`.

        Returns:
            The value of ``work``; false if the queue is busy or there is no such plane.
        """
        queue = self.queue
        slot = self._slots.get(scope)
        # A first check without a lock, so that a busy queue is left at once. It is made again once ``run_lock`` is held.
        if slot is None or queue.jobs or queue.run_lock.locked():
            return False
        try:
            # Not a context manager made of a generator: if Ctrl-C came as that is entered, it would keep ``run_lock`` until the
            # exception's traceback is gone.
            with queue.run_lock:
                return not (queue.abandoned or queue.jobs or slot.aborted) and work(slot)
        finally:
            # Their own wake-up has found ``run_lock`` locked.
            if queue.jobs:
                self.wake()

    def run_now(self, batch: RunBatch) -> None:
        """Run a batch on the calling thread, which has the queue by :meth:`with_idle_queue`."""
        self._run(self.queue, batch)

    def pop_interrupted(self) -> list[tuple[int, int]]:
        """Return process set and generation of the batch that the calling thread ran when it was interrupted, if it ran one."""
        queue = self.queue
        # An interrupted thread has released the lock and left its job; if the lock is held, the job is another thread's.
        job, locked = queue.current, queue.run_lock.locked()
        if locked or type(job) is not RunBatch:
            return []
        queue.current = None
        return [(job.process_set, job.generation)]

    def _run(self, queue: WorkQueue, batch: RunBatch) -> None:
        slot = self._slots.get((batch.process_set, batch.generation, batch.device))
        phases = PhaseTimes()
        if slot is None or slot.aborted:
            self._outcomes.batch_unfinished(batch, 0, phases)
            return  # the abort of its generation ends the batch's handles
        queue.running = slot
        started = time.monotonic_ns()
        finished = False
        completion: Completion | None = None
        try:
            # Stored before the mark is read, and abort() sets the mark before it reads ``running``: one of the two sees the other.
            if slot.aborted:
                raise PlaneAborted
            sender = source_of(batch) if batch.entries[0].request.kind is OpKind.SENDRECV else -1
            if batch.payloads:
                results = [run_small(batch.entries[0].request, batch.payloads, queue.folds, sender)]
            elif batch.entries[0].request.kind is OpKind.JOIN:
                results = [Result(last_joined=batch.tables[0][0][0])]  # after all that the other members did
            elif sender >= 0:
                # Not counted among the plane's operations, which are the same on all members.
                results = [run_message(slot.pairs(), batch.entries[0].request, sender, phases)]
            else:
                # Before the call: the number counts operations that have begun, also those that fail.
                slot.operations += 1
                results, completion = run_batch(slot.open(), batch, phases)
        except PlaneAborted:
            pass  # the abort that has ended it ends its handles, too
        except Exception as error:  # noqa: BLE001  (for any error the generation ends; all members read the reason)
            self._failed(slot, batch, error)
        except BaseException:
            slot.abort()  # an interrupt in the middle of an operation: this rank can't serve the plane's peers any more
            raise
        else:
            finished = True
            if completion is None:
                self._outcomes.batch_done(batch, results, started, phases)
            else:
                # Counted before the plane can report the end, which on_end() can do at once.
                with self._jobs_lock:
                    slot.under_way += 1
                completion.on_end(partial(self._ended, slot, batch, results, started, phases))
        finally:
            queue.running = None
            if slot.failing and not slot.under_way:
                self._end_failing(slot)
            if queue.abandoned:  # _close_older() has left the plane to this thread
                slot.close()
            if not finished:
                self._outcomes.batch_unfinished(batch, started, phases)

    def _failed(self, slot: PlaneSlot, batch: RunBatch, error: Exception) -> None:
        # For any error the generation ends; ``batch_failed`` reports the reason to all members.
        # Before the report: the abort that answers it fails the handles, and each gets this error as its cause (see error_of()).
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
        """End a batch that has run without a thread of the executor. Any thread, perhaps the plane's own."""
        if error is None:
            self._outcomes.batch_done(batch, results, started, phases)
        else:
            if not isinstance(error, PlaneAborted):
                self._failed(slot, batch, error)
            self._outcomes.batch_unfinished(batch, started, phases)
        self._hooks.defer_to_control()
        with self._jobs_lock:
            slot.under_way -= 1
            last = slot.outdated and not slot.under_way
        if slot.failing and not self._is_at_work(slot):
            self._end_failing(slot)
        # Without the lock, which enqueue() acquires.
        if last:
            self.close_older(slot.scope[0], slot.scope[1] + 1)

    def _loop(self, queue: WorkQueue) -> None:
        while queue.wakeup.get():
            self._drain(queue)
            if queue.abandoned:
                return
        # Closing: every plane that is still there is closed by this thread, after the work that came before.
        with queue.run_lock:
            for slot in list(self._slots.values()):
                slot.close()
            self._slots.clear()

    # -- ends -----------------------------------------------------------------------------------------------------

    def abort(self, process_set: int, generation: int) -> list[tuple[WorkQueue, PlaneSlot]]:
        """End the planes of a process set up to ``generation``. Control thread.

        Returns:
            Queue and slot of each plane on which operations are at work still; the caller calls :meth:`abandon` with them later.
        """
        busy = []
        for slot in list(self._slots.values()):
            if slot.scope[0] == process_set and slot.scope[1] <= generation:
                slot.abort()
                if self._is_at_work(slot):
                    self._ending.append(slot)
                    busy.append((self.queue, slot))
        self.close_older(process_set, generation + 1)
        return busy

    def _is_at_work(self, slot: PlaneSlot) -> bool:
        """Return whether operations run on a plane, or are under way there without a thread. Any thread."""
        return self.queue.running is slot or slot.under_way > 0

    def fail(self, entry: Entry, error: Exception) -> None:
        """End an entry with an error: at once, or after the aborted operations of its process set that are still at work. Control thread.

        Until then a library or a GPU may write to users' tensors; Gloo does for more than a second. A user that catches the error may
        restore these tensors, and would lose that.
        """
        request = entry.request
        busy = [
            slot
            for slot in self._ending
            if slot.scope[0] == request.process_set
            and slot.scope[1] >= entry.generation
            and self._is_at_work(slot)
        ]
        if not busy:
            complete(entry, None, error)
            return
        # That of its own tensors if there are several: the entry waits for one of them.
        slot = next((slot for slot in busy if slot.scope[2] == request.device), busy[0])
        slot.failing.append((entry, error))
        # Appended before this is read. The threads that end operations store that before they read the list: one of the two ends the entry.
        if not self._is_at_work(slot):
            self._end_failing(slot)

    def _end_failing(self, slot: PlaneSlot) -> None:
        """End the entries that wait for operations of a plane. Any thread, and perhaps two at once: the first end counts."""
        for entry, error in tuple(slot.failing):
            complete(entry, None, error)
        self._hooks.defer_to_control()

    def end_failing(self) -> None:
        """End all entries that wait for the end of operations, which will perhaps never come."""
        while self._ending:
            self._end_failing(self._ending.pop())

    def close_older(self, process_set: int, generation: int) -> None:
        """Close the planes of a process set older than ``generation``, after the jobs that are queued now."""
        if self._older(process_set, generation):
            self.enqueue(lambda: self._close_older(process_set, generation))
            self.wake()

    def _close_older(self, process_set: int, generation: int) -> None:
        for scope in self._older(process_set, generation):
            slot = self._slots[scope]
            with self._jobs_lock:
                slot.outdated = True
                if slot.under_way and not slot.aborted:
                    continue  # the thread that ends its last batch comes back here; an abort does as well
            del self._slots[scope]  # before close(), so that no other thread finds a closed plane
            # A thread that is stuck in the plane closes it when it comes back.
            if not any(queue.running is slot for queue in self._abandoned):
                slot.close()

    def _older(self, process_set: int, generation: int) -> list[Scope]:
        # The control thread adds slots while the queue's own thread removes some, so only a copy, which Python makes in one step, can be
        # iterated over.
        return [scope for scope in list(self._slots) if scope[0] == process_set and scope[1] < generation]

    def tune(self, process_set: int, generation: int, slice_bytes: int) -> None:
        """Set the slices of a host plane to ``slice_bytes`` bytes, after the jobs that are queued now."""
        # As a job: all members must change the size between the same two operations.

        def tune() -> None:
            slot = self._slots.get((process_set, generation, HOST))
            if slot is not None:
                slot.tune(slice_bytes)

        # No wake-up: the order that the coordinator sends next brings one.
        self.enqueue(tune)

    def failed(self, process_set: int, generation: int, error: Exception) -> None:
        """Execute nothing more in a generation, since a result that this rank computes without the plane has failed."""
        slot = self._slots.get((process_set, generation, HOST))
        if slot is not None:
            slot.error, slot.aborted = error, True

    def error_of(self, process_set: int, generation: int) -> Exception | None:
        """Return the exception with which a plane of this generation failed on this rank, or ``None``."""
        errors = (
            slot.error for slot in list(self._slots.values()) if slot.scope[:2] == (process_set, generation)
        )
        return next(filter(None, errors), None)

    def abandon(self, queue: WorkQueue, slot: PlaneSlot) -> None:
        """End the entries that wait for ``slot``, and continue with a new queue if ``queue`` is in an operation of it in spite of its abort.

        Control thread.
        """
        # Also if the operation has ended: perhaps its thread was interrupted before it could end the entries.
        if slot in self._ending:
            self._ending.remove(slot)
        self._end_failing(slot)
        # Under the lock, so that no job is added to the old queue after its jobs have moved.
        with self._jobs_lock:
            if queue is not self.queue or queue.running is not slot:
                return
            queue.abandoned = True
            self._abandoned.append(queue)
            new = self._new_queue()
            new.jobs, queue.jobs = queue.jobs, new.jobs
            self.queue = new
        queue.wakeup.put(True)  # its own thread can be idle, while a user's is stuck
        self.wake()

    def _join_abandoned(self, timeout: float = 0.0) -> None:
        """Join the threads of abandoned queues that are not stuck any more, each within ``timeout`` seconds."""
        back = [queue for queue in self._abandoned if not queue.stuck]
        for queue in back:
            assert queue.thread is not None
            # It is about to end: abandon() has woken it, and it returns since its queue is abandoned. But perhaps it runs a hook
            # of the user's first, for which the control thread must not wait: the next call joins it.
            queue.thread.join(timeout)
            if not queue.thread.is_alive():
                self._abandoned.remove(queue)

    @property
    def threads(self) -> list[threading.Thread]:
        """Return the own threads of all queues, abandoned ones included."""
        return [queue.thread for queue in (self.queue, *self._abandoned) if queue.thread is not None]

    @property
    def abandoned(self) -> int:
        """Return the number of abandoned queues that are still stuck."""
        return sum(queue.stuck for queue in self._abandoned)

    def close(self, timeout: float) -> None:
        """End all work and close all planes, within ``timeout`` seconds for the queue's own thread.

        The threads of abandoned queues are joined only if they are not stuck any more.
        """
        for slot in list(self._slots.values()):
            slot.abort()
        self.queue.wakeup.put(False)
        if self.queue.thread is not None:
            self.queue.thread.join(timeout)
        self.end_failing()  # a thread is stuck in an operation, or a user's thread has not come back yet
        self._join_abandoned(timeout)

    def _new_queue(self) -> WorkQueue:
        self._queues += 1
        queue = WorkQueue(self._queues)
        name = f"hvdlab-executor-{self._label}-{queue.number}"
        # A daemon: a thread that is stuck in a plane must not keep the process from its end.
        queue.thread = threading.Thread(target=self._loop, args=(queue,), name=name, daemon=True)
        queue.thread.start()
        return queue


def _run_job(job: Close) -> None:
    """Run a job that is no batch; log an error."""
    # The thread that runs it goes on: the batches behind it are of other generations, and their handles wait for this thread.
    try:
        job()
    except Exception:  # noqa: BLE001  (as above)
        LOG.exception("a job between two operations failed")
