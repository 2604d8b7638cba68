"""The plane of a process set's CUDA tensors: chosen by the GPUs that they are on, and checked before anything depends on it.

Which GPU a rank uses is known only at its first collective of CUDA tensors. Its members then publish their GPUs, choose the plane
that suits all of them, and reduce known numbers on it, on a thread of its own and within :data:`CHECK_WITHIN` seconds. If the plane gives wrong
numbers, fails, or does not end, the process set's CUDA tensors go through the host (:mod:`staged_plane`), and the rank at position 0 warns of it.

One decision
------------
All members must go the same way. The rendezvous store has one key for the decision. Only the member at position 0 ever writes that the plane
may be used, and only once each member has reported that its numbers were right. It writes the opposite if a report is missing at the bound; it does
one of the two, once. A member whose check failed has not reported, and writes the opposite at once. So all values that
the key ever has mean the same, whichever of them a member reads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

import numpy as np

from hvdlab.collectives.planes.base import (
    THROUGH_HOST,
    Buffer,
    Completion,
    KeyValue,
    Links,
    PhaseTimes,
    Plane,
    PlaneAborted,
    PlaneBroken,
    PlaneContext,
    ScopedStore,
)
from hvdlab.collectives.planes.gpu import gpu_plane, nccl_library
from hvdlab.collectives.planes.gpu.device import Device, DeviceFailed
from hvdlab.collectives.planes.gpu.gpu_plane import CUDA, CudaBuffer, allocated, cuda_buffer
from hvdlab.collectives.planes.gpu.ipc_plane import CudaPlane
from hvdlab.collectives.planes.gpu.nccl_plane import NcclPlane
from hvdlab.collectives.planes.gpu.staged_plane import PinnedMemory, StagedPlane
from hvdlab.collectives.text import format_ranks
from hvdlab.collectives.types import SUM, DType, Reduction

LOG = logging.getLogger("hvdlab")

CHECK_WITHIN = 15.0
"""Seconds that the check of a plane may take: NCCL needs up to some seconds to connect the GPUs of several hosts."""
REPORTS_WITHIN = 0.5
"""Seconds after that in which the member at position 0 finds out which members have not reported."""
CLOSE_WITHIN = 12.0
"""Seconds that a plane which was given up gets to free its memory, when this one is closed."""
ELEMENTS = 1 << 16
"""Float32 numbers that the check reduces: 256 KiB, which NCCL moves over all its channels."""

_CANDIDATES = {
    "cuda/auto": (NcclPlane.name, CudaPlane.name),
    NcclPlane.name: (NcclPlane.name,),
    CudaPlane.name: (CudaPlane.name,),
}
_VERDICT = "verdict"

_failed: dict[tuple[str, ...], str] = {}
"""Groups whose plane failed its check, and why: the plane's name, and of each member its GPU and its process.

A group with another process is another one: a replaced rank may mend it.
"""


class MemberGpu(NamedTuple):
    """GPU that a member's tensors are on, as it publishes it.

    Attributes:
        identity: The GPU's UUID, equal in all processes that see it.
        owner: Random number of the member's process.
        ordinal: Its number in the member's process.
        gpus: Number of GPUs that the member's process sees.
        failed: Groups that failed their check before, with the reason.
    """

    identity: str
    owner: int
    ordinal: int
    gpus: int
    failed: dict[tuple[str, ...], str]

    def encode(self) -> bytes:
        """Return the description for the rendezvous store."""
        failed = [[list(group), why] for group, why in self.failed.items()]
        return json.dumps([self.identity, self.owner, self.ordinal, self.gpus, failed]).encode()

    @classmethod
    def decode(cls, value: bytes) -> MemberGpu:
        """Return the description that a member has published."""
        identity, owner, ordinal, gpus, failed = json.loads(value)
        return cls(identity, owner, ordinal, gpus, {tuple(group): why for group, why in failed})


class CheckedPlane(Plane):
    """Plane of CUDA tensors that chooses among others and checks the one that it has chosen.

    Args:
        context: The process set; ``on_chosen`` and ``on_links`` are called once the plane is checked.
        candidates: ``cuda/auto``, or the name of the only plane that suits.
    """

    name: ClassVar[str] = "cuda/auto"
    device: ClassVar[str] = CUDA

    def __init__(self, context: PlaneContext, candidates: str = "cuda/auto") -> None:
        super().__init__(context)
        self._candidates = _CANDIDATES[candidates]
        self._guard = threading.Lock()
        self._aborted = False
        self._timeout = 30.0
        self._slice = 0
        #: Number of this member's GPU in its process.
        self._ordinal = 0
        #: The plane that operations use, once it is decided upon.
        self._used: Plane | None = None
        #: Planes that were made, which an abort must end.
        self._made: list[Plane] = []
        #: Check of the plane that was chosen.
        self._check: PlaneCheck | None = None
        #: Gives up a plane that failed its check.
        self._discarding: threading.Thread | None = None

    @classmethod
    def unavailable(cls) -> str | None:
        return CudaPlane.unavailable()

    def connect(self, timeout: float) -> None:
        self._timeout = timeout
        if self._aborted:
            raise PlaneAborted

    # -- choosing ---------------------------------------------------------------------------------------------------

    def _plane(self, buffers: Sequence[Buffer]) -> Plane:
        """Return the plane to use. At the first call the members choose it and check it. Blocks; raises as operations do."""
        if self._aborted:
            raise PlaneAborted
        if self._used is None:
            ordinal = next((cuda_buffer(buffer).ordinal for buffer in buffers), None)
            self._ordinal = gpu_plane.gpus().used_ordinal() if ordinal is None else ordinal
            try:
                plane = self._decide(gpu_plane.gpus().open(self._ordinal))
            except (DeviceFailed, TimeoutError) as error:
                raise PlaneBroken(f"the plane for CUDA tensors: {error}") from error
            plane.tune(self._slice)
            # Last: close() takes a plane without it for one that was interrupted in the middle of the check.
            self._used = plane
        return self._used

    def _decide(self, device: Device) -> Plane:
        members = self._exchange(device)
        identities = [one.identity for one in members]
        if self.context.index == 0:
            _warn_of_one_gpu(self.context, members)
        name, why = chosen_plane(identities, self.context, self._candidates)
        if not name:
            return self._through_host(device, self._sentence(why))
        group = (name, *(f"{one.identity}/{one.owner}" for one in members))
        # From the members' messages, which are the same for all, and not from this process's table: all have to go the same way.
        known = next((one.failed[group] for one in members if group in one.failed), "")
        if known:
            return self._through_host(device, known, is_new=False)
        links: list[Links] = []
        context = replace(self._apart(f"{name}/"), on_links=links.append)
        plane = self._keep(NcclPlane(context) if name == NcclPlane.name else CudaPlane(context))
        # Longer than the check: a member that waits for another one in vain must not report itself as the one that failed.
        plane.connect(self._timeout + CHECK_WITHIN)
        self._check = PlaneCheck(plane, self._store, device, self._ordinal)
        failure = self._check.decision(self._timeout, members)
        if failure:
            self._discard(plane)
            text = self._sentence(f"`{name}` failed its check {failure}", " until one of them is restarted")
            _failed[group] = text
            return self._through_host(device, text)
        if links:
            self.context.on_links(links[-1])
        self.context.on_chosen(f"{_words(name)}, checked")
        return plane

    def _exchange(self, device: Device) -> list[MemberGpu]:
        me, deadline = self.context, time.monotonic() + self._timeout
        mine = MemberGpu(device.identity, device.owner, self._ordinal, gpu_plane.gpus().count(), _failed)
        self._store.set(f"member/{me.index}", mine.encode())
        return [
            MemberGpu.decode(self._store.get(f"member/{i}", max(0.0, deadline - time.monotonic())))
            for i in range(me.size)
        ]

    def _sentence(self, why: str, until: str = "") -> str:
        return f"CUDA tensors of {format_ranks(self.context.ranks)} are copied through the host{until}: {why}"

    def _through_host(self, device: Device, text: str, *, is_new: bool = True) -> Plane:
        if is_new and self.context.index == 0:
            LOG.warning("%s. `hvdlab check-gpus` tells more", text)
        plane = self._keep(StagedPlane(self._apart("host/"), device, self._ordinal))
        plane.connect(self._timeout)
        others = tuple(rank for rank in self.context.ranks if rank != self.context.ranks[self.context.index])
        self.context.on_links({THROUGH_HOST: others} if others else {})
        self.context.on_chosen("")
        return plane

    @property
    def _store(self) -> KeyValue:
        assert self.context.store is not None, "a group of the engine has a store"
        return self.context.store

    def _apart(self, prefix: str) -> PlaneContext:
        return replace(self.context, store=ScopedStore(self._store, prefix), memory_fd=-1)

    def _keep(self, plane: Plane) -> Plane:
        with self._guard:
            self._made.append(plane)
            aborted = self._aborted
        # An abort either found this plane in the list, or had set the flag before the list was changed.
        if aborted:
            plane.abort()
            raise PlaneAborted
        return plane

    def _discard(self, plane: Plane) -> None:
        """Give a plane up without waiting for its GPU, which may need seconds to leave the work under way."""
        check = self._check
        assert check is not None

        def discard() -> None:
            plane.abort()
            check.join(CLOSE_WITHIN)
            if not check.is_alive():
                plane.close()

        plane.abort()
        self._discarding = threading.Thread(target=discard, name="hvdlab-cuda-discard", daemon=True)
        self._discarding.start()

    # -- memory -----------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: DType) -> CudaBuffer:
        if self._used is None:
            self._ordinal = gpu_plane.gpus().used_ordinal()
        try:
            return allocated(gpu_plane.gpus().open(self._ordinal), self._ordinal, shape, dtype)
        except DeviceFailed as error:
            raise PlaneBroken(f"the GPU of this rank: {error}") from error

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> CudaBuffer:
        found = self._plane([]).zeros(shape, dtype)
        assert isinstance(found, CudaBuffer)
        return found

    def tune(self, slice_bytes: int) -> None:
        self._slice = slice_bytes
        if self._used is not None:
            self._used.tune(slice_bytes)

    # -- operations ---------------------------------------------------------------------------------------------------

    def start_allreduce(
        self,
        ins: Sequence[Buffer],
        outs: Sequence[Buffer],
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> Completion | None:
        return self._plane(ins).start_allreduce(ins, outs, dtype, reduction, phases)

    def start_allgather(
        self, send: Buffer, counts: Sequence[int], out: Buffer, phases: PhaseTimes
    ) -> Completion | None:
        return self._plane([send]).start_allgather(send, counts, out, phases)

    def start_broadcast(
        self, source: Buffer | None, out: Buffer, root: int, phases: PhaseTimes
    ) -> Completion | None:
        return self._plane([out]).start_broadcast(source, out, root, phases)

    def start_reducescatter(
        self,
        send: Buffer,
        counts: Sequence[int],
        out: Buffer,
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> Completion | None:
        return self._plane([send]).start_reducescatter(send, counts, out, dtype, reduction, phases)

    def start_alltoall(
        self,
        send: Buffer,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Buffer,
        phases: PhaseTimes,
    ) -> Completion | None:
        return self._plane([send]).start_alltoall(send, send_counts, recv_counts, out, phases)

    def start_barrier(self, phases: PhaseTimes) -> Completion | None:
        return self._plane([]).start_barrier(phases)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        with self._guard:
            self._aborted = True
            made = list(self._made)
        for plane in made:
            plane.abort()

    def close(self) -> None:
        with self._guard:
            self._aborted = True
            made = list(self._made)
        check = self._check
        if self._discarding is not None:
            assert check is not None
            self._discarding.join(CLOSE_WITHIN)  # it closes the plane that failed
            made.remove(check.plane)
        elif check is not None and self._used is None:
            check.plane.abort()  # interrupted in the middle of the check
            check.join(CLOSE_WITHIN)
            if check.is_alive():
                made.remove(
                    check.plane
                )  # the driver keeps its thread, which may still use all that the plane has
        for plane in made:
            plane.close()


def chosen_plane(
    identities: Sequence[str], context: PlaneContext, candidates: Sequence[str]
) -> tuple[str, str]:
    """Choose the plane for members whose tensors are on these GPUs.

    Args:
        identities: The UUID of each member's GPU, by position.
        context: Their ranks and hosts.
        candidates: Names of the planes that all members offer.

    Returns:
        The plane's name, or an empty text and the reason why no plane suits.
    """
    size, hosts = context.size, len(set(context.hosts))
    are_apart = len(set(identities)) == size
    if tuple(candidates) == (NcclPlane.name,) and hosts == 1:
        return NcclPlane.name, ""  # the user asks for it, and if ranks share a GPU, NCCL's own error names it
    # A single member needs no library to be connected with itself.
    connects = size > 1 or CudaPlane.name not in candidates
    if NcclPlane.name in candidates and are_apart and connects and size <= NcclPlane.most_members:
        return NcclPlane.name, ""
    if CudaPlane.name in candidates and hosts == 1 and size <= CudaPlane.most_members:
        return CudaPlane.name, ""
    if not are_apart:
        shared = next(one for one in identities if identities.count(one) > 1)
        sharing = [rank for rank, one in zip(context.ranks, identities, strict=True) if one == shared]
        return "", (
            f"{format_ranks(sharing)} share GPU {shared[:8]}, which NCCL refuses; "
            "torch.cuda.set_device(hvd.local_rank()) gives each rank one of its own where there are enough"
        )
    return "", f"no plane for GPUs connects {size} ranks on {hosts} hosts"


_warned: set[tuple[int, ...]] = set()
"""Ranks for which this process has warned that they all stay on the first of several GPUs."""


def _warn_of_one_gpu(context: PlaneContext, members: Sequence[MemberGpu]) -> None:
    """Warn once if all ranks of a host that has several GPUs stay on the first one."""
    for host in dict.fromkeys(context.hosts):
        here = [index for index, one in enumerate(context.hosts) if one == host]
        ranks = tuple(context.ranks[index] for index in here)
        gpus = min(members[index].gpus for index in here)
        on_first = all(members[index].ordinal == 0 for index in here)
        is_shared = len({members[index].identity for index in here}) == 1
        if len(here) > 1 and gpus > 1 and on_first and is_shared and ranks not in _warned:
            _warned.add(ranks)
            LOG.warning(
                "%s all use the first of %d GPUs: run torch.cuda.set_device(hvd.local_rank() %% torch.cuda.device_count()) on each "
                "rank before its first CUDA tensor (with CuPy: cupy.cuda.Device(...).use())",
                format_ranks(ranks),
                gpus,
            )


def _words(name: str) -> str:
    """Return a plane's name as it is shown: NCCL with its version."""
    return f"NCCL {nccl_library.nccl().version_text}" if name == NcclPlane.name else name


class PlaneCheck:
    """Allreduce of known numbers on a plane, on a thread of its own, and the decision of all members about it.

    Args:
        plane: The plane, which has no operation yet.
        store: Rendezvous store of the members.
        device: This member's GPU.
        ordinal: Its number in this process.
    """

    def __init__(self, plane: Plane, store: KeyValue, device: Device, ordinal: int) -> None:
        self.plane = plane
        self._store = ScopedStore(store, "check/")
        self._device, self._ordinal = device, ordinal
        self._end = time.monotonic() + CHECK_WITHIN
        self._deciding = threading.Lock()
        self._has_decided = False
        #: On the member at position 0: positions of the members that have reported.
        self._reported: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="hvdlab-cuda-check", daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread, ``timeout`` seconds at most."""
        self._thread.join(timeout)

    def is_alive(self) -> bool:
        """Return whether the thread still runs."""
        return self._thread.is_alive()

    # -- the check --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        me = self.plane.context
        with contextlib.suppress(PlaneAborted):  # the generation has ended, or another member's check failed
            try:
                wrong = self._wrong_numbers()
            except PlaneAborted:
                raise
            except Exception as error:  # noqa: BLE001  (any error means that the plane can't be used, and all members read why)
                wrong = str(error) or type(error).__name__
            if wrong:
                self._write(wrong, [me.index])
            elif me.index:
                self._store.set(f"right/{me.index}", b"")
            else:
                self._gather()

    def _wrong_numbers(self) -> str:
        """Reduce known numbers. Return which of the results is wrong, or an empty text."""
        size, index = self.plane.context.size, self.plane.context.index
        # A prime period: numbers that come from, or go to, a place that is a power of two away are wrong.
        pattern = np.arange(ELEMENTS) % 251 + 1
        with self._device:
            memory = PinnedMemory(self._device)
        try:
            with self._device:
                buffer = allocated(self._device, self._ordinal, (ELEMENTS,), DType.F32)
                places = memory.places([ELEMENTS], DType.F32)
                places[0].array[:] = pattern * (index + 1)
                memory.store(places, [buffer])
            completion = self.plane.start_allreduce([buffer], [buffer], DType.F32, SUM, PhaseTimes())
            _await(completion)
            # The array has this member's input. If nothing were fetched, a group of one would find that right.
            places[0].array[:] = 0
            with self._device:
                memory.fetch([buffer], places)
            expected = pattern * (size * (size + 1) // 2)  # at most 251 * 8128, which float32 has exactly
            wrong = np.flatnonzero(places[0].array != expected)
            if not len(wrong):
                return ""
            first = int(wrong[0])
            return (
                f"{len(wrong)} of {ELEMENTS} sums were wrong, "
                f"the first {places[0].array[first]:g} in place of {expected[first]}"
            )
        finally:
            with self._device:
                memory.close()

    # -- the decision -----------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Wait until all members have reported, and decide for the plane. The thread of the member at position 0."""
        self._reported.add(0)
        for index in range(1, self.plane.context.size):
            try:
                self._store.get(f"right/{index}", max(0.0, self._end - time.monotonic()))
            except TimeoutError:
                return  # the thread that waits for the decision makes it
            self._reported.add(index)
        self._decide("", [])

    def _decide(self, failure: str, members: Sequence[int]) -> None:
        """Write the decision of the member at position 0, unless it has made one."""
        with self._deciding:
            # The check's own thread and the one that waits for its end may both come here; the first one decides.
            if not self._has_decided:
                self._has_decided = True
                self._store.set(_VERDICT, json.dumps([failure, list(members)]).encode())

    def _write(self, failure: str, members: Sequence[int]) -> None:
        """Write a decision against the plane."""
        if self.plane.context.index == 0:
            self._decide(failure, members)
        else:
            self._store.set(_VERDICT, json.dumps([failure, list(members)]).encode())

    def decision(self, timeout: float, members: Sequence[MemberGpu]) -> str:
        """Wait for the decision of all members.

        Args:
            timeout: Seconds that the member at position 0 may need beyond the check.
            members: The members' GPUs, for the text.

        Returns:
            An empty text if all of them use the plane; otherwise where it failed and why.

        Raises:
            PlaneAborted: The generation has ended.
            PlaneBroken: The member at position 0 did not decide.
        """
        leads = self.plane.context.index == 0
        left = max(0.0, self._end - time.monotonic())
        try:
            verdict = self._store.get(_VERDICT, left if leads else left + timeout)
        except TimeoutError as error:
            if not leads:
                raise PlaneBroken(f"the check of the plane: {error}") from error
            self._ask_the_others()
            missing = [i for i in range(self.plane.context.size) if i not in self._reported]
            self._decide(f"it did not end within {CHECK_WITHIN:g} s", missing)
            # Read, not assumed: the check's own thread has perhaps decided just before, for the plane.
            verdict = self._store.get(_VERDICT, timeout)
        failure, positions = json.loads(verdict)
        if not failure:
            self._thread.join()  # it has reported, and ends
            return ""
        return f"{self._places(positions, members)}: {failure}"

    def _ask_the_others(self) -> None:
        """Find out, for the text, which members have reported behind one that has not."""
        end = time.monotonic() + REPORTS_WITHIN
        for index in range(1, self.plane.context.size):
            if index not in self._reported:
                with contextlib.suppress(TimeoutError):
                    self._store.get(f"right/{index}", max(0.0, min(0.1, end - time.monotonic())))
                    self._reported.add(index)

    def _places(self, positions: Sequence[int], members: Sequence[MemberGpu]) -> str:
        ranks = self.plane.context.ranks
        if not positions:
            return "on some rank"
        gpus = ", ".join(f"GPU {members[i].ordinal} ({members[i].identity[:8]})" for i in positions)
        return f"on {format_ranks([ranks[i] for i in positions])}, {gpus}"


def _await(completion: Completion | None) -> None:
    """Wait for the end of an operation, and raise the error that it ends with."""
    if completion is None:
        return
    ended = threading.Event()
    errors: list[Exception | None] = []

    def end(error: Exception | None) -> None:
        errors.append(error)
        ended.set()

    completion.on_end(end)
    ended.wait()
    if errors[0] is not None:
        raise errors[0]
