"""A member of a group whose GPUs work on each other's memory.

For each operation every member announces in shared memory where its tensors are (:mod:`ipc_memory`), and signals that they may be used. On each GPU
one member is the *worker*, the first one there. The worker waits until all members have written where their tensors are, and enqueues on its
GPU: a wait until all tensors may be used, and one kernel that reads the members' tensors and writes their outputs. Once that is done it
signals so to all. With several GPUs each worker has a share of the elements.

So data moves once, from where it is to where it goes. One member does the work of a GPU because a GPU runs the processes that share it by turns
of some hundred microseconds each. A process whose turn it is does nothing for the others. The other members' part in an operation is therefore left to their hosts
where that is possible. If all work that makes a tensor is done already, the host stores the word *ready*, and no GPU has to.
The end comes to all members by words that hosts wait for.

At most ``RING`` operations are on their way: a member that would be further ahead waits for the end of an earlier one. A worker
enqueues an operation only once all members have announced it. So all members have then seen the end of the operation that had the same
place there, and nothing reads that place any more, on the host or on a GPU.

Giving up
---------
A GPU can't be made to stop waiting. But the words that it waits for lie in memory of the host: a member that gives up stores values
there that end every wait, again and again until its GPU has nothing left to do, since enqueued work may overwrite them. Before
the first of these values it sets its word ``stopped``. Kernels read that word of all members before they write anything, and a worker
reads it before it signals that an operation is done. So the remains of such an operation never pass for a result. A member ends
the operation only when its own GPU has nothing left to do, or needs too long for that.
The workers must also have signalled that their GPUs write nothing more. It waits half a second for the workers: after that they are dead, or hang.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from hvdlab.collectives.planes.base import PendingCompletion, PhaseTimes, PlaneAborted, PlaneBroken
from hvdlab.collectives.planes.gpu.device import Device, DeviceFailed, KernelLaunch
from hvdlab.collectives.planes.gpu.gpu_group import STUCK_AFTER, GpuGroup
from hvdlab.collectives.planes.gpu.gpu_plane import CudaBuffer
from hvdlab.collectives.planes.gpu.ipc_memory import (
    QUIET,
    READY,
    RING,
    STOPPED,
    TENSORS,
    Array64,
    ExportedMemory,
    GpuAnnouncements,
    ImportedMemory,
)
from hvdlab.collectives.planes.gpu.jobs import MOST_ADDRESSES, GpuOperation, Inputs, JobTable, share, table_of
from hvdlab.collectives.planes.shm.signals import ARRIVED, Signals

QUIET_WITHIN = 0.5
"""Seconds that the workers get to signal that their GPUs write nothing more, once this member's own GPU is drained or given up."""
_BEYOND = 1 << 30
"""How far ahead of all operations the values are that end every wait; less than 2**31, as the GPU compares overflowing counters."""
_QUIET_INTERVAL = 0.001
"""Seconds between two polls of the workers' words after a stop: a GPU that stores one wakes no thread."""
_FOREVER = 1 << 62
"""The number up to which a member that is no worker has executed all operations: nothing waits for it."""
_TABLES = 64
"""Tables that a worker keeps to use them again."""
_ALIGN = 256  # bytes
_LEAST_ARENA = 1 << 20  # bytes


class _CopyBack(NamedTuple):
    """Copy to an output that other members can't open, in bytes."""

    target: int
    source: int
    nbytes: int


class _Begun(NamedTuple):
    """Operation that is enqueued.

    Attributes:
        number: Its number.
        ready: A CUDA event that comes when this member's GPU has signalled that its tensors may be used; ``None`` if the host has done so.
            The group waits for it because a GPU that failed never signals, and no other member would know.
        done: A CUDA event that comes when this worker's kernel has written the outputs; ``None`` if this member is no worker.
        back: Copies to make once all workers are done.
        pending: The completion that :meth:`IpcGroup.run` returned.
        phases: Receives the operation's times.
        started: When the operation began, by ``time.monotonic_ns()``.
        operation: The operation; the reference keeps its tensors alive.
    """

    number: int
    ready: int | None
    done: int | None
    back: Sequence[_CopyBack]
    pending: PendingCompletion
    phases: PhaseTimes
    started: int
    operation: GpuOperation


class _Arena(NamedTuple):
    """Memory of the group's own that other members can open, for tensors in memory that they can't."""

    base: int
    nbytes: int
    slot: int


class IpcGroup(GpuGroup[_Begun]):
    """Member of a group whose GPUs work on each other's memory.

    Args:
        device: This member's GPU.
        memory: The shared memory, of ``GpuAnnouncementsLayout.size`` bytes.
        index: This member's position.
        workers: Positions of the workers.
    """

    kind: ClassVar[str] = "cuda"

    def __init__(
        self, device: Device, memory: mmap.mmap, index: int, members: int, workers: Sequence[int]
    ) -> None:
        super().__init__(device)
        self._index, self._memory = index, memory
        self._workers = tuple(workers)
        self.announcements = GpuAnnouncements(memory, members)
        layout = self.announcements.layout
        self.signals = Signals(memory, layout, index)
        #: By which members wait for the end of an operation. Of the watcher's thread, once the group is connected.
        self._executed = Signals(memory, layout, index, offset=layout.ends)
        self._exports = ExportedMemory(device, self.announcements, index)
        self._arenas: list[_Arena] = []
        self._worker: IpcWorker | None = None
        self._open()

    def _acquire(self) -> None:
        device, free = self._device, self._resources
        address = self.announcements.address
        self._base = device.register(address, self.announcements.layout.size)
        free.callback(device.unregister, address)
        self.stream, self._back = device.new_stream(), device.new_stream()
        for stream in (self.stream, self._back):
            free.callback(device.end_stream, stream)
        if self._index in self._workers:
            self._worker = IpcWorker(
                device,
                self.announcements,
                self._base,
                self._index,
                self._workers,
                self._exports,
                self.signals,
                free,
            )

    def connect(self, deadline: float) -> None:
        """Wait for the other members. Raises ``PlaneBroken`` at the deadline (``time.monotonic()``)."""
        if self._worker is None:
            self._executed.post(ARRIVED, _FOREVER)
        self.signals.post(ARRIVED, 1)
        self.signals.wait(ARRIVED, 1, deadline)

    # -- operations -------------------------------------------------------------------------------------------------

    def run(self, operation: GpuOperation, phases: PhaseTimes, started: int) -> PendingCompletion:
        """Begin an operation; its outputs are there when the returned completion ends.

        ``started`` is when the collective began, by ``time.monotonic_ns()``.

        Raises:
            PlaneAborted: This member, or another one, has given up.
            PlaneBroken: The GPU refused something.
        """
        # Held while anything is enqueued: _leave_gpu() passes through it, and the streams get no work after that.
        with self._enqueuing:
            if self.stopped or self._others_stopped():
                raise PlaneAborted
            try:
                with self._device:
                    return self._begin(operation, phases, started)
            except DeviceFailed as error:
                raise PlaneBroken(f"the GPU of this rank: {error}") from error

    def _begin(self, operation: GpuOperation, phases: PhaseTimes, started: int) -> PendingCompletion:
        device, stream = self._device, self.stream
        number = self._number + 1
        self._await_place(number)
        self._number = number
        self._being_enqueued = (*operation.ins, *operation.outs)
        marks = {buffer.after.event for buffer in self._being_enqueued if buffer.after is not None}
        unfinished = [mark for mark in marks if not device.has_come(mark)]
        for mark in unfinished:
            device.wait_event(stream, mark)
        back = self._announce(number % RING, operation)
        ready: int | None = None
        # The word counts upwards: the host may store it only if the stream has stored it for all operations before.
        if unfinished or not device.is_idle(stream):
            device.write_value(
                stream, self._base + self.announcements.layout.flag(READY, self._index), number
            )
            ready = self._record(stream)
        else:
            # In 32 bits, as the GPU's own store would be: waits compare them as counters that overflow.
            self.announcements.flags(READY)[self._index] = number & 0xFFFFFFFF
        # After the announcement, which workers read once all members have posted. The first post was connect()'s, hence + 1.
        self.signals.post(ARRIVED, number + 1)
        done: int | None = None
        if self._worker is not None:
            self._worker.work(number, operation)
            done = self._record(self._worker.stream)
        pending = PendingCompletion()
        self._add(_Begun(number, ready, done, back, pending, phases, started, operation))
        return pending

    def _announce(self, place: int, operation: GpuOperation) -> list[_CopyBack]:
        """Announce where the tensors are; inputs in memory that other members can't open are copied to the arena.

        Returns:
            The copies to make at the end, from the arena to outputs.
        """
        announcements, exports = self.announcements, self._exports
        exports.begin(self._number, self._finished)
        rows: list[tuple[int, int, int, int]] = []
        staged: list[tuple[int, int, CudaBuffer]] = []  # row, column of the input or the output, tensor
        for row, (source, out) in enumerate(zip(operation.ins, operation.outs, strict=True)):
            of_input = exports.locate(source.pointer, source.nbytes)
            if of_input is None:
                staged.append((row, 0, source))
            same = out is source and of_input is not None
            of_output = of_input if same else exports.locate(out.pointer, out.nbytes)
            if of_output is None:
                staged.append((row, 2, out))
            rows.append((*(of_input or (0, 0)), *(of_output or (0, 0))))
        if rows:
            announcements.places[place, self._index, : len(rows)] = rows
        if operation.numbers:
            announcements.numbers[place, self._index] = operation.numbers
        return self._stage(place, staged) if staged else []

    def _stage(self, place: int, staged: list[tuple[int, int, CudaBuffer]]) -> list[_CopyBack]:
        offsets: list[int] = []
        size = 0
        for _, _, buffer in staged:
            offsets.append(size)
            size += -(-buffer.nbytes // _ALIGN) * _ALIGN
        arena = self._arena(size)
        back = []
        for offset, (row, column, buffer) in zip(offsets, staged, strict=True):
            self.announcements.places[place, self._index, row, column : column + 2] = (arena.slot, offset)
            if column == 0:
                self._device.copy(arena.base + offset, buffer.pointer, buffer.nbytes, self.stream)
            else:
                back.append(_CopyBack(buffer.pointer, arena.base + offset, buffer.nbytes))
        return back

    def _arena(self, size: int) -> _Arena:
        """Return memory that other members can open. An arena that has become too small stays: enqueued operations may use it."""
        if not self._arenas or self._arenas[-1].nbytes < size:
            nbytes = 1 << max(size - 1, _LEAST_ARENA - 1).bit_length()
            base = self._device.allocate(nbytes)
            self._resources.callback(self._device.free, base)
            self._arenas.append(_Arena(base, nbytes, self._exports.publish(base)))
        return self._arenas[-1]

    def _others_stopped(self) -> bool:
        return bool(self.announcements.flags(STOPPED).any())

    # -- ends -------------------------------------------------------------------------------------------------------

    def _outcome(self, begun: _Begun) -> Exception | None:
        try:
            # Within the ``try``: to make the context current fails, too, once the GPU's context is gone, and the operation has to end.
            with self._device:
                for event in (begun.ready, begun.done):
                    if event is not None:
                        self._device.synchronize(event)
                        self._events.append(event)
                if begun.done is not None:
                    # Before this worker posts the end: the others take the post as the sign that the outputs are written.
                    self._refuse_remains()
                    self._executed.post(ARRIVED, begun.number)
                self._executed.wait(ARRIVED, begun.number)
                self._refuse_remains()
                if begun.back:
                    self._copy_back(begun.back)
                    self._refuse_remains()
        except DeviceFailed as failure:
            return PlaneBroken(f"the GPU of this rank: {failure}")
        except PlaneAborted as aborted:
            self.stop()
            self._quiet.wait()
            return aborted
        return None

    def _refuse_remains(self) -> None:
        """Raise ``PlaneAborted`` if a member gave up: the kernel may have written nothing then."""
        if self.stopped or self._others_stopped():
            raise PlaneAborted

    def _copy_back(self, copies: Sequence[_CopyBack]) -> None:
        device = self._device
        with self._guard:
            if self.stopped:
                raise PlaneAborted
            # Under the guard: a stop comes before these copies, or finds them on the stream that it drains.
            for copy in copies:
                device.copy(copy.target, copy.source, copy.nbytes, self._back)
            event = device.new_event()
            device.record(event, self._back)
        try:
            device.synchronize(event)
        finally:
            device.end_event(event)

    def _measure(self, begun: _Begun) -> None:
        """Add the time of the kernel, by the GPU's clock; the rest of the time that has passed is waiting."""
        times = self.announcements.times[begun.number % RING]
        # Differences only: the GPU of each worker has a clock of its own.
        spent = max(int(times[worker, 1]) - int(times[worker, 0]) for worker in self._workers)
        begun.phases.transfer += max(spent, 0)
        begun.phases.wait = max(0, time.monotonic_ns() - begun.started - begun.phases.transfer)

    # -- giving up ----------------------------------------------------------------------------------------------------

    def _end_waits(self) -> None:
        # Stored before the values that end the waits: a kernel or member that such a value lets go on then finds this word set.
        # x86 keeps the stores in this order, and so do a GPU's reads.
        self.announcements.flags(STOPPED)[self._index] = 1
        self.signals.abort()
        self._executed.abort()
        self._push_on()

    def _push_on(self) -> None:
        # The words of all members, not this one's alone: this GPU can wait for any of them.
        self.announcements.flags(READY)[:] = (self._number + _BEYOND) & 0xFFFFFFFF

    def _leave_gpu(self) -> bool:
        # A thread that enqueues has left after this, and later ones find the group stopped: the GPU's work only gets less.
        with self._enqueuing:
            pass
        drained = self._drain_gpu(time.monotonic() + STUCK_AFTER)
        if drained:
            self.announcements.flags(QUIET)[self._index] = 1
        return drained

    def _drained(self) -> bool:
        streams = [self.stream, self._back, *([] if self._worker is None else [self._worker.stream])]
        return all(self._device.drained(stream) for stream in streams)

    def _await_others(self) -> None:
        """Wait until the workers' GPUs write nothing more, at most ``QUIET_WITHIN`` seconds."""
        end = time.monotonic() + QUIET_WITHIN
        while time.monotonic() < end and not self._all_quiet():
            time.sleep(_QUIET_INTERVAL)

    def _all_quiet(self) -> bool:
        return bool(self.announcements.flags(QUIET)[list(self._workers)].all())

    # -- the end ------------------------------------------------------------------------------------------------------

    def _keep_memory(self) -> None:
        self.signals.close()  # the GPU may still write to all other memory
        self._executed.close()

    def _free_host(self) -> None:
        self.signals.close()
        self._executed.close()
        self.announcements.close()
        with contextlib.suppress(BufferError):  # a traceback holds a view: it is unmapped when that goes
            self._memory.close()


class IpcWorker:
    """Worker of a GPU, which does the work of that GPU for all members. ``free`` gets the callbacks that give its resources back.

    Attributes:
        stream: The stream of its kernels.
    """

    def __init__(
        self,
        device: Device,
        announcements: GpuAnnouncements,
        base: int,
        index: int,
        workers: Sequence[int],
        exports: ExportedMemory,
        signals: Signals,
        free: contextlib.ExitStack,
    ) -> None:
        self._device, self._announcements, self._base, self._signals = device, announcements, base, signals
        self._index, self._members = index, announcements.layout.members
        self._part, self._parts = tuple(workers).index(index), len(workers)
        self._imports = ImportedMemory(device, announcements, index, exports)
        free.callback(self._imports.close)
        self.stream = device.new_stream()
        free.callback(device.end_stream, self.stream)
        # A table goes from pinned memory to the GPU's own, at another place for each operation that may be on its way.
        # The most jobs of an operation: one for each tensor, or for each pair of members in an alltoall.
        rows = max(TENSORS, self._members**2)
        self._place_bytes = (
            # In words of 8 bytes, as table_of() lays them out.
            -(-8 * (2 * rows + 1 + rows * min(2 * self._members, MOST_ADDRESSES)) // 4096) * 4096
        )
        pinned = mmap.mmap(-1, RING * self._place_bytes)
        self._words = np.frombuffer(pinned, np.uint64).reshape(RING, -1)
        address = self._words.ctypes.data
        self._source = device.register(address, RING * self._place_bytes)
        free.callback(device.unregister, address)
        self._tables = device.allocate(RING * self._place_bytes)
        free.callback(device.free, self._tables)
        # A kernel's blocks read which members gave up from the GPU's own memory: reading it from the host's would cost each of them a microsecond.
        self._stopped_bytes = 4 * announcements.layout.stride * self._members
        self._stopped = device.allocate(self._stopped_bytes)
        free.callback(device.free, self._stopped)
        #: The last tables, by the parts that they were made of: ranks that train reduce the same gradients again and again.
        self._made: OrderedDict[tuple[object, ...], tuple[JobTable, int, int]] = OrderedDict()
        #: ``ImportedMemory.changes`` when the first of these was made.
        self._made_at = 0

    def work(self, number: int, operation: GpuOperation) -> None:
        """Wait until all members have announced an operation, and enqueue the work on this GPU."""
        device, announcements, stream = self._device, self._announcements, self.stream
        self._signals.wait(ARRIVED, number + 1)
        launch = self._prepare(number, operation)
        ready = announcements.flags(READY)
        for member in range(self._members):
            if (int(ready[member]) - number) & 0xFFFFFFFF >= 1 << 31:  # as the GPU compares them
                device.wait_value(stream, self._base + announcements.layout.flag(READY, member), number)
        if launch is not None:
            table, nbytes = launch.table, 8 * (2 * launch.jobs + 1 + launch.jobs * (launch.ins + launch.outs))
            device.copy(table, self._source + (number % RING) * self._place_bytes, nbytes, stream)
            # After the waits, so that a kernel which a giving up member let go on finds that it has.
            device.copy(
                launch.stopped,
                self._base + announcements.layout.flag(STOPPED, 0),
                self._stopped_bytes,
                stream,
            )
            device.launch(launch, stream)

    def _prepare(self, number: int, operation: GpuOperation) -> KernelLaunch | None:
        place, tensors = number % RING, len(operation.ins)
        announcements = self._announcements
        announcements.times[place, self._index] = 0
        if not tensors:
            return None
        # Only now: all members have posted, so the pieces that their tensors lie in are announced.
        self._imports.refresh()
        table, ins, outs = self._jobs_of(
            operation, announcements.places[place, :, :tensors], announcements.numbers[place]
        )
        if not table.jobs or not outs:
            return None
        self._words[place, : len(table.words)] = table.words
        layout = announcements.layout
        return KernelLaunch(
            dtype=operation.dtype,
            reduction=operation.reduction,
            jobs=table.jobs,
            ins=ins,
            outs=outs,
            chunk=table.chunk,
            chunks=table.chunks,
            table=self._tables + place * self._place_bytes,
            stopped=self._stopped,
            members=self._members,
            stride=layout.stride,
            times=self._base + layout.times + (place * self._members + self._index) * 16,
        )

    def _jobs_of(
        self, operation: GpuOperation, places: Array64, numbers: Array64
    ) -> tuple[JobTable, int, int]:
        """Return the table of an operation, and how many addresses each job reads and writes. The last tables are kept."""
        # A table holds addresses at which pieces of other members were open. After any change one of them can be another's.
        if self._made_at != self._imports.changes:
            self._made.clear()
            self._made_at = self._imports.changes
        key = (
            operation.jobs,
            operation.itemsize,
            places.tobytes(),
            numbers.tobytes() if operation.numbers else b"",
        )
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._make(operation, places, numbers)
            if len(self._made) > _TABLES:
                self._made.popitem(last=False)
        else:
            self._made.move_to_end(key)
        return made

    def _make(self, operation: GpuOperation, places: Array64, numbers: Array64) -> tuple[JobTable, int, int]:
        members = np.arange(self._members)[:, np.newaxis]
        bases = self._imports.bases
        starts = bases[members, places[:, :, 0]], bases[members, places[:, :, 2]]
        if not (starts[0].all() and starts[1].all()):
            member = int(np.argwhere((starts[0] == 0) | (starts[1] == 0))[0][0])
            why = self._imports.why_closed(member) or "it was withdrawn"
            raise DeviceFailed(f"the GPU memory of member {member} can't be opened: {why}")
        jobs = operation.jobs(
            Inputs(starts[0] + places[:, :, 1], starts[1] + places[:, :, 3], numbers.astype(np.int64))
        )
        begins, counts = share(jobs.counts, self._part, self._parts, operation.itemsize)
        read = (begins * operation.itemsize).astype(np.uint64)[:, np.newaxis]
        written = (begins * operation.itemsize).astype(np.uint64)[:, np.newaxis]
        addresses = np.concatenate((jobs.ins + read, jobs.outs + written), axis=1)
        return table_of(counts, addresses, operation.itemsize), jobs.ins.shape[1], jobs.outs.shape[1]
