"""Parts that the conformance suite does not test: the segment, the options, refusals."""

from __future__ import annotations

import os
import platform
import threading

import numpy as np
import pytest

from hvdlab.collectives.planes.base import PhaseTimes, PlaneAborted, PlaneBroken, PlaneContext
from hvdlab.collectives.planes.shm import ShmPlane
from hvdlab.collectives.planes.shm.layout import segment_size
from hvdlab.collectives.types import SUM, DType, ReduceOp, Reduction


def context(index: int, size: int, fd: int, **options: str) -> PlaneContext:
    return PlaneContext(
        0, 1, index, size, tuple(range(size)), ("here",) * size, memory_fd=fd, options=options
    )


def memory(size: int) -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    return fd


def test_is_available_on_this_kind_of_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ShmPlane.unavailable() is None
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    reason = ShmPlane.unavailable()
    assert reason is not None
    assert "aarch64" in reason
    assert "gloo" in reason


def test_connect_without_memory_says_so() -> None:
    plane = ShmPlane(context(0, 2, -1))
    with pytest.raises(PlaneBroken, match="no memory"):
        plane.connect(1)
    plane.close()


def test_connect_to_a_segment_of_another_layout_says_so() -> None:
    plane = ShmPlane(context(0, 2, memory(4096)))
    with pytest.raises(PlaneBroken, match=r"4096 bytes.*chunk_bytes"):
        plane.connect(1)
    plane.close()


def test_connect_names_members_that_do_not_come() -> None:
    plane = ShmPlane(context(0, 3, memory(segment_size(3))))
    with pytest.raises(PlaneBroken, match=r"\[1, 2\]"):
        plane.connect(0.05)
    plane.close()


def test_an_abort_before_connect_holds() -> None:
    plane = ShmPlane(context(0, 2, memory(segment_size(2))))
    plane.abort()
    with pytest.raises(PlaneAborted):
        plane.connect(10)
    plane.close()


def test_close_frees_the_memory_and_the_descriptor() -> None:
    fd = memory(segment_size(1))
    plane = ShmPlane(context(0, 1, fd))
    plane.connect(1)
    buffer = np.ones(10, np.float32)
    plane.allreduce([buffer], [buffer], DType.F32, SUM, PhaseTimes())
    with open("/proc/self/maps") as maps:
        assert "memfd:test" in maps.read()
    plane.close()
    with open("/proc/self/maps") as maps:
        assert "memfd:test" not in maps.read()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_close_without_connect_frees_the_descriptor() -> None:
    fd = memory(4096)
    ShmPlane(context(0, 2, fd)).close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_phases_account_for_the_time_of_an_operation() -> None:
    size = segment_size(2)
    fd = memory(size)
    planes = [ShmPlane(context(i, 2, os.dup(fd))) for i in range(2)]
    os.close(fd)
    phases = [PhaseTimes(), PhaseTimes()]
    outs = [np.empty(1 << 20, np.float32) for _ in range(2)]

    def run(index: int) -> None:
        planes[index].connect(10)
        source = np.full(1 << 20, index + 1.0, np.float32)
        planes[index].allreduce(
            [source], [outs[index]], DType.F32, Reduction(ReduceOp.SUM, postscale=0.5), phases[index]
        )

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for out, spent, plane in zip(outs, phases, planes, strict=True):
        assert (out == 1.5).all()
        assert spent.pack > 0
        assert spent.transfer > 0
        assert spent.wait > 0
        assert spent.unpack == 0
        plane.close()


def test_two_members_cut_little_into_two_chunks_and_much_into_small_ones() -> None:
    plane = ShmPlane(context(0, 2, memory(segment_size(2))))
    assert plane._chunk(1024 * 1024 // 4, 4) * 4 == 512 * 1024
    assert plane._chunk(64 * 1024 * 1024 // 4, 4) * 4 == 256 * 1024
    plane.tune(128 * 1024)
    assert plane._chunk(1024 * 1024 // 4, 4) * 4 == 128 * 1024
    plane.close()
