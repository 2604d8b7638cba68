"""Large reductions between hosts, block by block: their overlap, and their end at a failure."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives.planes.base import PhaseTimes, PlaneAborted, PlaneContext
from hvdlab.collectives.planes.hierarchical import HierarchicalPlane, OuterThread
from hvdlab.collectives.types import SUM, DType
from support.patience import PATIENCE

BLOCK = 4096  # bytes of a block


class Inner:
    """Plane of a host whose other member has only zeros; it counts its reductions."""

    def __init__(self, fails_at: int = -1) -> None:
        self.reduced = [threading.Event() for _ in range(16)]
        self.gathered = 0
        self._fails_at, self._count = fails_at, 0

    def reducescatter(self, send: Any, counts: list[int], out: Any, *_: object) -> None:
        if self._count == self._fails_at:
            raise PlaneAborted
        out[...] = send[: counts[0]]
        self.reduced[self._count].set()
        self._count += 1

    def allgather(self, send: Any, counts: list[int], out: Any, phases: PhaseTimes) -> None:
        out[: counts[0]], out[counts[0] :] = send, 0
        self.gathered += 1


class Outer:
    """Plane between hosts: each reduction goes on until the next block was reduced within the host, or it is
    aborted."""

    def __init__(self, inner: Inner, blocks: int) -> None:
        self.calls: list[str] = []
        self._inner, self._blocks, self._aborted = inner, blocks, threading.Event()

    def allreduce(self, ins: Any, outs: Any, *_: object) -> None:
        self.calls.append(threading.current_thread().name)
        following = len(self.calls)
        if following < self._blocks and not self._inner.reduced[following].wait(PATIENCE):
            raise AssertionError(f"block {following} was not reduced meanwhile")
        outs[0][...] *= 2

    def block(self) -> None:
        """From now on a reduction goes on until the abort."""
        self.allreduce = self._until_abort  # type: ignore[method-assign,assignment]  # on purpose

    def _until_abort(self, *_: object) -> None:
        self.calls.append("begun")
        assert self._aborted.wait(PATIENCE)
        self.calls.append("ended")
        raise PlaneAborted

    def abort(self) -> None:
        self._aborted.set()


def plane_of(inner: Inner, outer: Outer) -> HierarchicalPlane:
    options = {"block_bytes": str(BLOCK)}
    plane = HierarchicalPlane(PlaneContext(0, 1, 0, 4, (0, 1, 2, 3), tuple("aabb"), options=options))
    plane._inner, plane._outer = inner, outer  # type: ignore[assignment]  # only the used parts
    plane._subgroups._planes = [outer]  # type: ignore[list-item]  # those that an abort reaches
    return plane


def reduce(plane: HierarchicalPlane, values: Any, out: Any, phases: PhaseTimes) -> None:
    plane.allreduce([values], [out], DType.F32, SUM, phases)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def test_the_network_works_while_the_next_block_is_reduced_within_the_host() -> None:
    values, out = np.arange(8 * BLOCK // 4, dtype=np.float32), np.empty(8 * BLOCK // 4, np.float32)
    inner = Inner()
    outer = Outer(inner, 8)
    plane = plane_of(inner, outer)
    reduce(plane, values, out, phases := PhaseTimes())
    assert outer.calls == ["hvdlab-outer"] * 8
    assert inner.gathered == 8
    halves = out.reshape(8, 2, -1)
    assert np.array_equal(halves[:, 0], 2 * values.reshape(8, 2, -1)[:, 0])
    assert not halves[:, 1].any()
    assert phases.transfer > 0
    outer.abort = lambda: None  # type: ignore[method-assign]
    plane._subgroups._planes = []
    plane.close()


def test_a_small_tensor_needs_no_thread() -> None:
    values, out = np.ones(BLOCK // 4, np.float32), np.empty(BLOCK // 4, np.float32)
    plane = HierarchicalPlane(
        PlaneContext(0, 1, 0, 4, (0, 1, 2, 3), tuple("aabb"), options={"outer": "gloo"})
    )
    inner = Inner()
    outer = Outer(inner, 1)
    plane._inner, plane._outer = inner, outer  # type: ignore[assignment]
    plane._reduce_slices(values, out, DType.F32, SUM, PhaseTimes())
    assert outer.calls == [threading.current_thread().name]
    plane.close()


def test_an_error_within_the_host_is_raised_when_the_network_has_let_go_of_the_memory() -> None:
    values, out = np.ones(8 * BLOCK, np.float32), np.empty(8 * BLOCK, np.float32)
    inner = Inner(fails_at=1)
    outer = Outer(inner, 32)
    outer.block()
    plane = plane_of(inner, outer)
    with pytest.raises(PlaneAborted):
        reduce(plane, values, out, PhaseTimes())
    assert outer.calls in (["begun", "ended"], [])
    plane._subgroups._planes = []
    plane.close()


def test_an_error_of_the_network_is_raised_by_the_operation() -> None:
    values, out = np.ones(8 * BLOCK, np.float32), np.empty(8 * BLOCK, np.float32)
    inner = Inner()
    outer = Outer(inner, 32)
    plane = plane_of(inner, outer)
    outer.block()
    outer.abort()
    with pytest.raises(PlaneAborted):
        reduce(plane, values, out, PhaseTimes())
    plane._subgroups._planes = []
    plane.close()


def test_members_cut_alike_whatever_they_carry() -> None:
    cuts = []
    for index in range(3):
        options = {"block_bytes": str(BLOCK)}
        plane = HierarchicalPlane(PlaneContext(0, 1, index, 3, (0, 1, 2), tuple("aab"), options=options))
        cuts.append(plane._cuts(np.empty(3 * BLOCK + 5, np.float32)))
        plane.close()
    assert cuts[0] == cuts[1] == cuts[2]
    assert len(cuts[0]) == 13


def test_outer_thread_that_can_not_start_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    outer, operation_ran = OuterThread(), threading.Event()
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            outer.submit(operation_ran.set)
    outer.close()
    outer.submit(operation_ran.set).result(PATIENCE)
    assert operation_ran.is_set()
    outer.close()
