"""Ranks on several hosts whose CUDA tensors go over `cuda/hierarchical`, on a simulated GPU of each host. The conformance suite has the operations."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fake_cuda import FakeCuda, bytes_at
from gpu_members import simulated_gpu
from hvdlab.collectives import context
from hvdlab.collectives.engine.hosts import HOST_VARIABLE
from hvdlab.collectives.errors import AbortedError
from hvdlab.collectives.planes import registry
from hvdlab.collectives.planes.cuda import gpus
from hvdlab.collectives.planes.cuda.device import DeviceFailed
from hvdlab.collectives.planes.cuda_hosts import plane as hosts_plane
from hvdlab.collectives.planes.cuda_hosts.stage import LEAST, Stage
from interrupting import press_ctrl_c, when_this_thread_waits
from patience import PATIENCE
from ranks import RankGone, Ranks

COUNT = 50_000


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A GPU that this process seems to have."""
    with simulated_gpu(monkeypatch) as found:
        yield found


@pytest.fixture
def three() -> Iterator[Ranks]:
    with Ranks(3, init=False, imports=["torch"]) as ranks:
        yield ranks


# -- on the ranks -----------------------------------------------------------------------------------------------------


def arrays() -> Any:
    import fake_gpu_arrays

    return fake_gpu_arrays


def join(hosts: str) -> str:
    """Join as a rank with a GPU; returns the plane for CUDA tensors."""
    os.environ[HOST_VARIABLE] = hosts[int(os.environ["HVDLAB_RANK"])]
    os.environ[gpus.CHOICE] = "hierarchical"
    os.environ.setdefault(gpus.SWITCH, "1")
    arrays()
    context.init()
    return context.engine().device_plane(0, "cuda")


def total() -> float:
    hvd = arrays()
    return float(hvd.allreduce(hvd.on_gpu(np.ones(COUNT)), op=hvd.Sum).get()[-1])


def links() -> dict[str, tuple[int, ...]]:
    return dict(context.engine().links())


def total_in_which(rank: int, number: int) -> float:
    """A rank gets a signal when its share is about to go to the other host."""

    def struck(*arguments: object) -> Any:
        signal.raise_signal(number)

    if context.engine().rank == rank:
        hosts_plane.CudaHierarchicalPlane._fetched = struck  # type: ignore[method-assign]
    return total()


def waits_for_rank_0() -> None:
    hvd = arrays()
    interrupt = when_this_thread_waits(press_ctrl_c) if context.engine().rank == 1 else None
    try:
        hvd.allreduce(hvd.on_gpu(np.ones(COUNT)), op=hvd.Sum, name="waits for rank 0")
    finally:
        if interrupt is not None:
            interrupt.join()


# -- tests ------------------------------------------------------------------------------------------------------------


def test_ranks_of_several_hosts_sum_on_their_gpus_and_between_the_hosts(three: Ranks) -> None:
    assert three.run(join, "aab", timeout=60) == ["cuda/hierarchical"] * 3
    assert three.run(total, timeout=60) == [3.0] * 3
    network = "network, through the host"
    expected = [{"same GPU": (1,), network: (2,)}, {"same GPU": (0,), network: (2,)}, {network: (0, 1)}]
    assert three.run(links) == expected


def test_survivors_of_a_rank_that_dies_between_the_hosts_go_on(three: Ranks) -> None:
    three.run(join, "aab", timeout=60)
    three.run(total, timeout=60)
    running = three.start(total_in_which, 0, signal.SIGKILL)
    kinds = [type(outcome) for outcome in running.outcomes(PATIENCE)]
    assert kinds == [RankGone, AbortedError, AbortedError]
    assert three.run(total, ranks=[1, 2], timeout=60) == [2.0, 2.0]


def test_an_interrupt_ends_a_wait_and_the_next_operation_works(three: Ranks) -> None:
    three.run(join, "aab", timeout=60)
    three.run(total, timeout=60)
    outcomes = three.outcomes(waits_for_rank_0, ranks=[1, 2], timeout=60)
    assert [type(outcome) for outcome in outcomes] == [KeyboardInterrupt, AbortedError]
    three.catch_up()
    assert three.run(total, timeout=60) == [3.0] * 3


def test_it_is_offered_behind_the_planes_that_need_no_host(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [name for name in registry.offered() if "/" in name][-1] == "cuda/hierarchical"
    monkeypatch.setenv(gpus.CHOICE, "hierarchical")
    assert [name for name in registry.offered() if "/" in name] == ["cuda/hierarchical"]
    monkeypatch.delenv(gpus.SWITCH)
    assert "HVDLAB_CUDA=1" in (registry.why_unavailable("cuda/hierarchical") or "")


def test_a_stage_copies_in_order_and_gives_everything_back(gpu: FakeCuda) -> None:
    stage, size = Stage(gpu), LEAST + 7
    pointer, other = gpu.allocate(size), gpu.allocate(size)
    bytes_at(pointer, size)[:] = 7
    room = stage.room(10)
    stage.fetch(0, pointer, 10)
    stage.wait()
    assert room.tolist() == [7] * 10
    room = stage.room(size)  # more than there was
    room[:] = 9
    stage.bring(other, 0, size)
    stage.copy(pointer, other, size)
    stage.wait()
    assert bytes_at(pointer, size).tolist() == [9] * size
    assert stage.room(0).size == 0
    del room
    stage.close()
    assert (gpu._streams, gpu._events) == ({}, {})


def test_a_stage_whose_gpu_has_failed_closes(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(gpu)
    stage.room(1)

    def refuse(*arguments: object) -> None:
        raise DeviceFailed("the context is gone")

    with monkeypatch.context() as patch:
        patch.setattr(gpu, "copy", refuse)
        with pytest.raises(DeviceFailed):
            stage.fetch(0, ctypes.addressof(ctypes.c_char()), 1)
        patch.setattr(gpu, "end_event", refuse)
        stage.close()
    for stream in gpu.streams():
        gpu.end_stream(stream)
