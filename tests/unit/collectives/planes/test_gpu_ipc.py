"""The plane `cuda/ipc` on a simulated GPU: several members in this process, each with a view of the GPU of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives import basics
from hvdlab.collectives.planes import registry
from hvdlab.collectives.planes.base import PhaseTimes, PlaneAborted, PlaneBroken, PlaneContext
from hvdlab.collectives.planes.gpu import gpu_plane
from hvdlab.collectives.planes.gpu.device import DeviceFailed
from hvdlab.collectives.planes.gpu.gpu_plane import CudaBuffer, buffer_on_stream
from hvdlab.collectives.planes.gpu.ipc_memory import RING, TENSORS
from hvdlab.collectives.planes.gpu.ipc_plane import CudaPlane
from hvdlab.collectives.types import SUM, DType, ReduceOp, Reduction
from support.fakes.cuda import FakeCuda, bytes_at
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
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Yield a GPU that this process seems to have."""
    with simulated_gpu(monkeypatch) as found:
        yield found


@pytest.fixture
def alone(gpu: FakeCuda) -> Iterator[CudaPlane]:
    """Yield a member that has the group for itself."""
    plane = CudaPlane(PlaneContext(0, 0, 0, 1, (0,), ("here",), Store()))
    plane.connect(PATIENCE)
    yield plane
    plane.close()


def test_work_waits_for_what_is_on_the_tensors_stream_and_nothing_waits_on_the_host(
    alone: CudaPlane, gpu: FakeCuda
) -> None:
    stream, computed = gpu.new_stream(), threading.Event()
    buffer = on_gpu(gpu, 1.0)
    memory = bytes_at(buffer.pointer, buffer.nbytes).view(np.float32)

    def compute() -> None:
        computed.wait()
        memory[:] = 5.0

    gpu._put(stream, compute)
    later = buffer_on_stream(buffer.pointer, buffer.shape, DType.F32, 0, stream, None)
    completion = begun(alone, later)  # returns although the tensor is not there yet
    assert value_of(buffer) == 1.0
    computed.set()
    assert outcome(completion) is None
    assert value_of(buffer) == 10.0
    del later, completion
    gpu.end_stream(stream)


def test_operations_that_are_begun_end_in_order_however_many_they_are(
    alone: CudaPlane, gpu: FakeCuda
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


def test_more_tensors_than_an_operation_takes_become_several(alone: CudaPlane, gpu: FakeCuda) -> None:
    pointer = gpu.allocate(4 * (TENSORS + 3))
    numbers = bytes_at(pointer, 4 * (TENSORS + 3)).view(np.float32)
    numbers[:] = 3.0
    each = [CudaBuffer(pointer + 4 * i, (1,), DType.F32) for i in range(TENSORS + 3)]
    phases = PhaseTimes()
    completion = alone.start_allreduce(each, each, DType.F32, Reduction(ReduceOp.SUM, 2.0), phases)
    assert outcome(completion) is None
    assert (numbers == 6.0).all()
    assert phases.transfer > 0


def test_an_abort_ends_what_waits_for_a_stream_that_goes_on_for_long(alone: CudaPlane, gpu: FakeCuda) -> None:
    stream, computed = gpu.new_stream(), threading.Event()
    gpu._put(stream, lambda: computed.wait() and None)
    buffer = on_gpu(gpu, 1.0, stream)
    completion = begun(alone, buffer)
    alone.abort()
    with pytest.raises(PlaneAborted):
        begun(alone, buffer)
    computed.set()  # a GPU goes on as long as a kernel runs, independent of the host
    assert isinstance(outcome(completion), PlaneAborted)
    assert value_of(buffer) == 1.0, "nothing is written once a member has given up"
    alone.close()
    del completion, buffer
    gpu.end_stream(stream)


def test_abort_ends_operations_where_no_thread_can_start(
    alone: CudaPlane, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, computed = gpu.new_stream(), threading.Event()
    gpu._put(stream, lambda: computed.wait() and None)
    buffer = on_gpu(gpu, 1.0, stream)
    completion = begun(alone, buffer)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        alone.abort()
    computed.set()
    assert isinstance(outcome(completion), PlaneAborted)
    del completion, buffer
    gpu.end_stream(stream)


def test_tensors_of_an_operation_whose_enqueuing_is_interrupted_stay_until_the_gpu_is_done(
    alone: CudaPlane, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_an_interrupt_leaves_tensors_to_the_gpu(alone, gpu, monkeypatch)


def test_a_rank_that_has_joined_takes_part_with_zeros_that_are_freed_afterwards(
    alone: CudaPlane, gpu: FakeCuda
) -> None:
    held = len(gpu._memory)
    zeros = alone.zeros((COUNT,), DType.F32)
    result = alone.empty((COUNT,), DType.F32)
    bytes_at(result.pointer, result.nbytes)[:] = 255
    completion = alone.start_allreduce([zeros], [result], DType.F32, SUM, PhaseTimes())
    assert outcome(completion) is None
    assert not bytes_at(result.pointer, result.nbytes).any()
    ours = len(gpu._memory) - held - 2
    del zeros, result, completion
    assert len(gpu._memory) == held + ours


def test_a_gpu_that_is_out_of_memory_breaks_the_plane_with_the_drivers_word(
    alone: CudaPlane, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = on_gpu(gpu, 1.0)

    def full(nbytes: int, opened: bool | None = None) -> int:
        raise DeviceFailed("out of memory (CUDA_ERROR_OUT_OF_MEMORY)")

    monkeypatch.setattr(gpu, "allocate", full)
    with pytest.raises(PlaneBroken, match="out of memory"):
        begun(alone, buffer)
    with pytest.raises(PlaneBroken, match="out of memory"):
        alone.empty((3,), DType.F32)


def test_a_kernel_that_fails_is_told_by_the_operation_and_leaves_the_process(
    alone: CudaPlane, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def illegal(launch: Any) -> None:
        raise DeviceFailed("an illegal memory access was encountered")

    monkeypatch.setattr("support.fakes.cuda.run_kernel", illegal)
    error = outcome(begun(alone, on_gpu(gpu, 1.0)))
    assert isinstance(error, PlaneBroken)
    assert "illegal memory access" in str(error)


def test_nothing_waits_for_a_context_that_is_gone(
    alone: CudaPlane, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, stream, computed = on_gpu(gpu, 1.0), gpu.new_stream(), threading.Event()
    assert outcome(begun(alone, buffer)) is None
    gpu._put(stream, lambda: computed.wait() and None)
    buffer.after = gpu_plane.StreamMark(gpu, stream)
    completion = begun(alone, buffer)

    def gone(self: FakeCuda) -> None:
        raise DeviceFailed("the context was destroyed")

    with monkeypatch.context() as patch:
        patch.setattr(FakeCuda, "__enter__", gone)
        alone.abort()
        computed.set()
        assert isinstance(outcome(completion), PlaneAborted | PlaneBroken)
        with pytest.raises((PlaneAborted, PlaneBroken)):
            begun(alone, buffer)
        assert alone._group is not None
        alone._group._drainer.join()
    for number in gpu.streams():  # unlike those of a context that is gone, they work on, and use the tensor
        drained = threading.Event()
        gpu._put(number, drained.set)
        assert drained.wait(PATIENCE)
    del completion
    buffer.after = None
    gpu.end_stream(stream)


def test_a_tensor_on_another_gpu_than_before_is_refused(alone: CudaPlane, gpu: FakeCuda) -> None:
    assert outcome(begun(alone, on_gpu(gpu, 1.0))) is None
    other = on_gpu(gpu, 1.0)
    other.ordinal = 1
    with pytest.raises(PlaneBroken, match="one is on GPU 1"):
        begun(alone, other)


def test_what_the_plane_got_from_the_gpu_is_given_back(gpu: FakeCuda) -> None:
    plane = CudaPlane(PlaneContext(0, 0, 0, 1, (0,), ("here",), Store()))
    plane.connect(PATIENCE)
    buffer = on_gpu(gpu, 1.0)
    assert outcome(begun(plane, buffer)) is None
    assert gpu._streams
    plane.close()
    plane.close()
    del buffer
    assert (gpu._streams, gpu._events, gpu._opened) == ({}, {}, {})
    assert len(gpu._memory) == 1, "the tensor's"


def test_it_is_offered_where_a_driver_is_unless_it_is_switched_off(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "cuda/ipc" in registry.offered()
    assert registry.plane_class("cuda/ipc") is CudaPlane
    monkeypatch.setenv("HVDLAB_CUDA", "0")
    assert "cuda/ipc" not in registry.offered()
    assert "HVDLAB_CUDA=0" in (registry.why_unavailable("cuda/ipc") or "")


def test_no_variable_is_needed(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HVDLAB_CUDA")
    assert "cuda/ipc" in registry.offered()
    assert basics.cuda_built()


def test_without_a_driver_or_its_bindings_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpu_plane.SWITCH, "1")
    monkeypatch.setattr(gpu_plane, "DRIVERS", ("/nothing",))
    assert "no NVIDIA driver" in (gpu_plane.why_off() or "")
    monkeypatch.setattr(gpu_plane, "DRIVERS", ("/",))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'hvdlab[gpu]'" in (gpu_plane.why_off() or "")
