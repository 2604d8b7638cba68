"""Members of a plane of GPUs in one process, on a simulated GPU: the shared parts of their tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives.planes.base import KeyValue, PhaseTimes, Plane
from hvdlab.collectives.planes.gpu import gpu_plane
from hvdlab.collectives.planes.gpu.gpu_group import GpuGroup
from hvdlab.collectives.planes.gpu.gpu_plane import (
    CudaBuffer,
    StreamMark,
    allocated,
    buffer_on_stream,
)
from hvdlab.collectives.types import DType, ReduceOp, Reduction
from support.fakes.cuda import FakeCuda, FakeGpus, bytes_at
from support.patience import PATIENCE

COUNT = 1000


class Store(KeyValue):
    """Rendezvous within this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout):
                raise TimeoutError(key)
            return self._values[key]


@contextmanager
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Yield a GPU that this process seems to have."""
    found = FakeGpus()
    monkeypatch.setattr(gpu_plane, "gpus", lambda: found)
    monkeypatch.setattr(gpu_plane, "why_missing", lambda: None)
    monkeypatch.setenv(gpu_plane.SWITCH, "1")
    yield found.device
    for pointer in list(found.device._memory):
        found.device.free(pointer)


def on_gpu(gpu: FakeCuda, value: float, stream: int = 0) -> CudaBuffer:
    """Return ``COUNT`` numbers, once the stream is done."""
    pointer = gpu.allocate(4 * COUNT)
    bytes_at(pointer, 4 * COUNT).view(np.float32)[:] = value
    return buffer_on_stream(pointer, (COUNT,), DType.F32, 0, stream, None)


def value_of(buffer: CudaBuffer) -> float:
    return float(bytes_at(buffer.pointer, buffer.nbytes).view(np.float32)[-1])


def begun(plane: Plane, buffer: CudaBuffer, factor: float = 2.0) -> Any:
    """An allreduce in place."""
    return plane.start_allreduce([buffer], [buffer], DType.F32, Reduction(ReduceOp.SUM, factor), PhaseTimes())


def assert_an_interrupt_leaves_tensors_to_the_gpu(
    plane: Plane,
    gpu: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    where: tuple[object, str] = (GpuGroup, "_add"),
) -> None:
    """Interrupt a member of a plane, whose GPU has work to do before the operation, in the method ``where``; it ends the plane."""
    stream, computed = gpu.new_stream(), threading.Event()
    gpu._put(stream, lambda: computed.wait() and None)
    tensor = allocated(gpu, 0, (COUNT,), DType.F32)
    tensor.after = StreamMark(gpu, stream)
    pointer = tensor.pointer

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            begun(plane, tensor)
    del tensor  # as a cell that ends by the interrupt does
    plane.abort()  # as the executor does
    assert gpu.allocation_of(pointer) is not None, "a GPU that goes on writes to it"
    computed.set()
    plane.close()
    assert gpu.allocation_of(pointer) is None
    gpu.end_stream(stream)


def outcome(completion: Any) -> Exception | None:
    ends: SimpleQueue[Exception | None] = SimpleQueue()
    completion.on_end(ends.put)
    return ends.get(timeout=PATIENCE)
