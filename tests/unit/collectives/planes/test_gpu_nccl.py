"""The plane `cuda/nccl` on a simulated GPU with a simulated NCCL: members in this process. The conformance suite has them in processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives import basics
from hvdlab.collectives.planes import registry
from hvdlab.collectives.planes.base import Completion, PhaseTimes, PlaneAborted, PlaneBroken, PlaneContext
from hvdlab.collectives.planes.gpu import gpu_plane, nccl_library
from hvdlab.collectives.planes.gpu import nccl_group as groups
from hvdlab.collectives.planes.gpu import nccl_plane as planes
from hvdlab.collectives.planes.gpu.device import DeviceFailed
from hvdlab.collectives.planes.gpu.gpu_plane import CudaBuffer, buffer_on_stream
from hvdlab.collectives.planes.gpu.ipc_memory import RING
from hvdlab.collectives.planes.gpu.jobs import table_of
from hvdlab.collectives.planes.gpu.nccl_group import TABLE_BYTES
from hvdlab.collectives.planes.gpu.nccl_library import NcclFailed
from hvdlab.collectives.planes.gpu.nccl_plane import MOST_BLOCKS, TENSORS, NcclPlane
from hvdlab.collectives.types import PLAIN, SUM, DType, ReduceOp, Reduction
from support.fakes import nccl as fake_nccl
from support.fakes.cuda import FakeCuda, bytes_at
from support.fakes.nccl import FakeCommunicator
from support.patience import PATIENCE
from support.ranks.gpu_members import (
    COUNT,
    Store,
    assert_an_interrupt_leaves_tensors_to_the_gpu,
    begun,
    on_gpu,
    outcome,
    simulated_gpu,
    value_of,
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeCuda]:
    """Yield a GPU that this process seems to have, and NCCL."""
    monkeypatch.setenv(fake_nccl.DIRECTORY, str(tmp_path))
    monkeypatch.setattr(groups, "LEARN_WITHIN", 0.0)
    monkeypatch.setattr(groups, "CHECK_INTERVAL", 0.01)
    monkeypatch.setattr(groups, "STUCK_AFTER", PATIENCE)
    monkeypatch.setattr(groups, "CLOSE_WITHIN", PATIENCE)
    with simulated_gpu(monkeypatch) as found:
        nccl = fake_nccl.FakeNccl(found)
        monkeypatch.setattr(nccl_library, "nccl", lambda: nccl)
        yield found


def connected(members: int, generation: int = 0) -> list[NcclPlane]:
    """Return members that have joined, each from a thread of its own."""
    store = Store()
    ranks, hosts = tuple(range(members)), ("here",) * members
    made = [NcclPlane(PlaneContext(0, generation, i, members, ranks, hosts, store)) for i in ranks]
    with ThreadPoolExecutor(members) as pool:
        for plane in made:
            plane.connect(PATIENCE)
        assert (
            list(pool.map(lambda plane: outcome(plane.start_barrier(PhaseTimes())), made)) == [None] * members
        )
    return made


@pytest.fixture
def alone(gpu: FakeCuda) -> Iterator[NcclPlane]:
    """Yield a member that has the group for itself."""
    (plane,) = connected(1)
    yield plane
    plane.close()


@pytest.fixture
def two(gpu: FakeCuda) -> Iterator[list[NcclPlane]]:
    made = connected(2)
    yield made
    for plane in made:
        plane.close()


def communicator(plane: NcclPlane) -> FakeCommunicator:
    assert plane._group is not None
    found = plane._group.communicator
    assert isinstance(found, FakeCommunicator)
    return found


def array_on(gpu: FakeCuda, array: Any, dtype: DType) -> CudaBuffer:
    pointer = gpu.allocate(array.nbytes + 1)
    bytes_at(pointer, array.nbytes)[:] = array.view(np.uint8)
    return CudaBuffer(pointer, array.shape, dtype)


def array_of(buffer: CudaBuffer, kind: Any) -> Any:
    return bytes_at(buffer.pointer, buffer.nbytes).view(kind).copy()


# -- operations -----------------------------------------------------------------------------------------------------------


def test_work_waits_for_what_is_on_the_tensors_stream_and_nothing_waits_on_the_host(
    two: list[NcclPlane], gpu: FakeCuda
) -> None:
    stream, computed = gpu.new_stream(), threading.Event()
    mine, other = on_gpu(gpu, 1.0), on_gpu(gpu, 3.0)
    memory = bytes_at(mine.pointer, mine.nbytes).view(np.float32)

    def compute() -> None:
        computed.wait()
        memory[:] = 5.0

    gpu._put(stream, compute)
    later = buffer_on_stream(mine.pointer, mine.shape, DType.F32, 0, stream, None)
    completions = [begun(two[0], later), begun(two[1], other)]  # return although a tensor is not there yet
    assert value_of(mine) == 1.0
    computed.set()
    assert [outcome(completion) for completion in completions] == [None, None]
    assert (value_of(mine), value_of(other)) == (16.0, 16.0)
    del later, completions
    gpu.end_stream(stream)


def test_operations_that_are_begun_end_in_order_however_many_they_are(
    alone: NcclPlane, gpu: FakeCuda
) -> None:
    buffer, order, done = on_gpu(gpu, 1.0), [], threading.Semaphore(0)

    def ended(number: int) -> Callable[[Exception | None], None]:
        def note(error: Exception | None) -> None:
            order.append((number, error))
            done.release()

        return note

    for number in range(3 * RING):
        begun(alone, buffer).on_end(ended(number))
    for _ in range(3 * RING):
        assert done.acquire(timeout=PATIENCE)
    assert order == [(number, None) for number in range(3 * RING)]
    assert value_of(buffer) == 2.0 ** (3 * RING)


def test_more_tensors_than_are_packed_together_become_several_operations(
    alone: NcclPlane, gpu: FakeCuda
) -> None:
    pointer = gpu.allocate(4 * (TENSORS + 3))
    numbers = bytes_at(pointer, 4 * (TENSORS + 3)).view(np.float32)
    numbers[:] = 3.0
    each = [CudaBuffer(pointer + 4 * i, (1,), DType.F32) for i in range(TENSORS + 3)]
    phases = PhaseTimes()
    completion = alone.start_allreduce(each, each, DType.F32, Reduction(ReduceOp.SUM, 2.0, 1.5), phases)
    assert outcome(completion) is None
    assert (numbers == 9.0).all()
    assert phases.transfer > 0


def test_what_our_kernels_add_goes_through_in_blocks(
    two: list[NcclPlane], gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planes, "BLOCK_BYTES", 256)
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=1003).astype(np.float16) for _ in two]
    inputs = [array_on(gpu, array, DType.F16) for array in arrays]
    outs = [array_on(gpu, np.zeros_like(array), DType.F16) for array in arrays]
    completions = [
        plane.start_allreduce(
            [source], [out], DType.F16, Reduction(ReduceOp.SUM, postscale=0.5), PhaseTimes()
        )
        for plane, source, out in zip(two, inputs, outs, strict=True)
    ]
    assert [outcome(completion) for completion in completions] == [None, None]
    expected = ((arrays[0].astype(np.float32) + arrays[1]) * 0.5).astype(np.float16)
    for out in outs:
        np.testing.assert_array_equal(array_of(out, np.float16), expected)
    counts = [700, 303]
    slices = [array_on(gpu, np.zeros(count, np.float16), DType.F16) for count in counts]
    completions = [
        plane.start_reducescatter(
            source, counts, out, DType.F16, Reduction(ReduceOp.SUM, postscale=0.5), PhaseTimes()
        )
        for plane, source, out in zip(two, inputs, slices, strict=True)
    ]
    assert [outcome(completion) for completion in completions] == [None, None]
    np.testing.assert_array_equal(
        np.concatenate([array_of(one, np.float16) for one in slices]), expected, strict=True
    )


def test_a_maximum_keeps_nans_which_nccls_would_lose(two: list[NcclPlane], gpu: FakeCuda) -> None:
    tensors = [on_gpu(gpu, 1.0), on_gpu(gpu, 2.0)]
    bytes_at(tensors[0].pointer, 4).view(np.float32)[0] = np.nan
    completions: list[Completion | None] = [
        plane.start_allreduce([tensor], [tensor], DType.F32, PLAIN[ReduceOp.MAX], PhaseTimes())
        for plane, tensor in zip(two, tensors, strict=True)
    ]
    assert [outcome(completion) for completion in completions] == [None, None]
    for tensor in tensors:
        numbers = bytes_at(tensor.pointer, tensor.nbytes).view(np.float32)
        assert np.isnan(numbers[0])
        assert (numbers[1:] == 2.0).all()


def test_the_tables_of_the_largest_operation_have_room() -> None:
    def nbytes(jobs: int, width: int) -> int:
        addresses = np.zeros((jobs, width), np.uint64)
        return table_of(np.ones(jobs, np.int64), addresses, 1).words.nbytes

    packing, folding = nbytes(TENSORS, 2), nbytes(1, NcclPlane.most_members + 1)
    assert 2 * packing + MOST_BLOCKS * folding <= TABLE_BYTES
    for count in (1, 10**6, 10**9, 10**12):
        assert len(list(planes._blocks(count, 1000))) <= max(
            MOST_BLOCKS, -(-count // 1000) * (count < 64_000)
        )


def test_a_rank_that_has_joined_takes_part_with_zeros_that_are_freed_afterwards(
    alone: NcclPlane, gpu: FakeCuda
) -> None:
    held = len(gpu._memory)
    zeros = alone.zeros((COUNT,), DType.F32)
    result = alone.empty((COUNT,), DType.F32)
    bytes_at(result.pointer, result.nbytes)[:] = 255
    completion = alone.start_allreduce([zeros], [result], DType.F32, SUM, PhaseTimes())
    assert outcome(completion) is None
    assert not bytes_at(result.pointer, result.nbytes).any()
    del zeros, result, completion
    assert len(gpu._memory) == held


# -- ends -----------------------------------------------------------------------------------------------------------------


def test_an_abort_ends_a_wait_and_a_new_group_works_in_the_same_process(
    two: list[NcclPlane], gpu: FakeCuda
) -> None:
    tensor = on_gpu(gpu, 1.0)
    completion = begun(two[0], tensor, 1.0)  # the other member does not come
    two[0].abort()
    assert isinstance(outcome(completion), PlaneAborted)
    assert communicator(two[0]).aborted.is_set()
    with pytest.raises(PlaneAborted):
        begun(two[0], tensor)
    for plane in two:
        plane.close()
    tensors = [on_gpu(gpu, 1.0), on_gpu(gpu, 2.0)]
    anew = connected(2, generation=1)
    completions = [begun(plane, tensor) for plane, tensor in zip(anew, tensors, strict=True)]
    assert [outcome(one) for one in completions] == [None, None]
    assert [value_of(one) for one in tensors] == [6.0, 6.0]
    for plane in anew:
        plane.close()


def test_tensors_of_an_operation_whose_enqueuing_is_interrupted_stay_until_the_gpu_is_done(
    two: list[NcclPlane], gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_an_interrupt_leaves_tensors_to_the_gpu(two[0], gpu, monkeypatch)


def test_a_member_that_has_stopped_believes_no_result(two: list[NcclPlane], gpu: FakeCuda) -> None:
    """An aborted communicator's leftovers on other members look like one."""
    stream, computed = gpu.new_stream(), threading.Event()
    gpu._put(stream, lambda: computed.wait() and None)
    completions = [begun(two[0], on_gpu(gpu, 1.0, stream)), begun(two[1], on_gpu(gpu, 1.0))]
    two[1].abort()
    computed.set()
    assert isinstance(outcome(completions[1]), PlaneAborted)
    two[0].abort()
    outcome(completions[0])
    del completions
    gpu.end_stream(stream)


def test_other_members_get_time_to_learn_of_an_abort_in_the_middle_of_an_operation(
    two: list[NcclPlane], gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[object] = []
    monkeypatch.setattr(groups, "LEARN_WITHIN", 77.0)
    monkeypatch.setattr(
        groups,
        "time",
        SimpleNamespace(monotonic=time.monotonic, monotonic_ns=time.monotonic_ns, sleep=happened.append),
    )

    def abort(communicator: FakeCommunicator) -> None:
        happened.append("abort")
        communicator.close(0.0)

    monkeypatch.setattr(FakeCommunicator, "abort", abort)
    completion = begun(two[0], on_gpu(gpu, 1.0))
    two[0].abort()
    assert isinstance(outcome(completion), PlaneAborted)
    assert happened[:2] == [77.0, "abort"]
    happened.clear()
    two[1].abort()  # which is in no operation
    two[1].close()
    assert happened[0] == "abort"


def test_what_other_members_get_while_they_have_not_learned_of_an_abort_is_right(
    two: list[NcclPlane], gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned, stream, computed = threading.Event(), gpu.new_stream(), threading.Event()
    monkeypatch.setattr(
        groups,
        "time",
        SimpleNamespace(
            monotonic=time.monotonic, monotonic_ns=time.monotonic_ns, sleep=lambda _: learned.wait()
        ),
    )
    gpu._put(stream, lambda: computed.wait() and None)
    mine, other = (array_on(gpu, np.full(COUNT, value, np.float16), DType.F16) for value in (1.0, 2.0))
    mine.after = gpu_plane.StreamMark(gpu, stream)
    completions = [
        plane.start_allreduce([tensor], [tensor], DType.F16, SUM, PhaseTimes())
        for plane, tensor in zip(two, (mine, other), strict=True)
    ]
    two[1].abort()  # while its kernel waits for the other member's share, and before it hands out its own
    computed.set()
    try:
        assert outcome(completions[0]) is None
        assert (array_of(mine, np.float16) == 3.0).all()
    finally:
        learned.set()
    assert isinstance(outcome(completions[1]), PlaneAborted)
    del completions
    mine.after = None
    gpu.end_stream(stream)


def test_a_lost_connection_ends_what_waits_with_what_nccl_says(two: list[NcclPlane], gpu: FakeCuda) -> None:
    completion = begun(two[0], on_gpu(gpu, 1.0))
    communicator(two[0]).failure = "NCCL: remote process exited or there was a network error"
    error = outcome(completion)
    assert isinstance(error, PlaneBroken)
    assert "network error" in str(error)
    with pytest.raises(PlaneBroken, match="network error"):
        begun(two[0], on_gpu(gpu, 1.0))


def test_a_member_that_does_not_come_is_not_awaited_for_ever(gpu: FakeCuda) -> None:
    plane = NcclPlane(PlaneContext(0, 0, 0, 2, (0, 1), ("here",) * 2, Store()))
    plane.connect(0.05)
    with pytest.raises(PlaneBroken, match="did not connect all members in time"):
        plane.start_barrier(PhaseTimes())
    plane.close()


def test_an_abort_ends_the_wait_for_members(gpu: FakeCuda) -> None:
    plane = NcclPlane(PlaneContext(0, 0, 0, 2, (0, 1), ("here",) * 2, Store()))
    plane.connect(PATIENCE)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(plane.start_barrier, PhaseTimes())
        plane.abort()
        assert isinstance(joining.exception(PATIENCE), PlaneAborted)
    plane.close()


def test_a_gpu_that_is_busy_for_long_is_left_alone(
    alone: NcclPlane, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "STUCK_AFTER", 0.01)
    stream, computed = gpu.new_stream(), threading.Event()
    gpu._put(stream, lambda: computed.wait() and None)
    completion = begun(alone, on_gpu(gpu, 1.0, stream))
    alone.abort()
    assert isinstance(outcome(completion), PlaneAborted)
    assert not computed.is_set()
    alone.close()
    assert alone._group is not None
    assert alone._group.stream in gpu._streams, "the GPU still works for it"
    computed.set()
    alone._group._watcher.join()
    del completion
    for left in list(gpu._streams):
        gpu.end_stream(left)


def test_a_communicator_that_nccl_does_not_close_is_left_alone(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plane,) = connected(1)
    monkeypatch.setattr(groups, "CLOSE_WITHIN", 0.01)
    others_left = threading.Event()
    monkeypatch.setattr(FakeCommunicator, "close", lambda self, within: others_left.wait() and None)
    plane.close()
    assert plane._group is not None
    assert plane._group.stream in gpu._streams, "NCCL still uses it"
    others_left.set()
    for thread in threading.enumerate():
        if thread.name == "hvdlab-nccl-close":
            thread.join()
    plane._group._watcher.join()
    for left in list(gpu._streams):
        gpu.end_stream(left)


def test_a_gpu_that_is_out_of_memory_breaks_the_plane_with_the_drivers_word(
    alone: NcclPlane, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [on_gpu(gpu, 1.0), on_gpu(gpu, 1.0)]
    alone._group._scratch = (0, 0)  # type: ignore[union-attr]  # that of the barrier is enough for these

    def full(nbytes: int, opened: bool | None = None) -> int:
        raise DeviceFailed("out of memory (CUDA_ERROR_OUT_OF_MEMORY)")

    monkeypatch.setattr(gpu, "allocate", full)
    with pytest.raises(PlaneBroken, match="out of memory"):
        alone.start_allreduce(tensors, tensors, DType.F32, SUM, PhaseTimes())
    with pytest.raises(PlaneBroken, match="out of memory"):
        begun(alone, tensors[0])


def test_a_kernel_that_fails_is_told_by_the_operation_and_leaves_the_process(
    alone: NcclPlane, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def illegal(launch: Any) -> None:
        raise DeviceFailed("an illegal memory access was encountered")

    monkeypatch.setattr("support.fakes.cuda.run_kernel", illegal)
    error = outcome(begun(alone, on_gpu(gpu, 1.0)))
    assert isinstance(error, PlaneBroken)
    assert "illegal memory access" in str(error)


def test_a_tensor_on_another_gpu_than_before_is_refused(alone: NcclPlane, gpu: FakeCuda) -> None:
    other = on_gpu(gpu, 1.0)
    other.ordinal = 1
    with pytest.raises(PlaneBroken, match="one is on GPU 1"):
        begun(alone, other)


def test_what_the_plane_got_from_the_gpu_is_given_back(gpu: FakeCuda) -> None:
    (plane,) = connected(1)
    buffer = on_gpu(gpu, 1.0)
    assert outcome(begun(plane, buffer)) is None
    assert gpu._streams
    plane.close()
    plane.close()
    del buffer
    assert (gpu._streams, gpu._events) == ({}, {})
    assert len(gpu._memory) == 1, "the tensor's"


# -- the group ------------------------------------------------------------------------------------------------------------


def test_it_is_offered_where_nccl_is(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [name for name in registry.offered() if "/" in name] == ["cuda/ipc", "cuda/nccl"]
    assert registry.plane_class("cuda/nccl") is NcclPlane
    assert basics.nccl_built()
    for choice, offered in (
        ("nccl", ["cuda/nccl"]),
        ("IPC", ["cuda/ipc"]),
        ("auto", ["cuda/ipc", "cuda/nccl"]),
    ):
        monkeypatch.setenv(gpu_plane.CHOICE, choice)
        assert [name for name in registry.offered() if "/" in name] == offered
        assert "shm" in registry.offered()
        assert basics.nccl_built()

    def missing() -> None:
        raise NcclFailed("NCCL is missing.")

    monkeypatch.setattr(nccl_library, "nccl", missing)
    assert "NCCL is missing." in (registry.why_unavailable("cuda/nccl") or "")
    assert not basics.nccl_built()
    assert basics.cuda_built()
