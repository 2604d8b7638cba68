"""Requests of MPI that an interrupt leaves unfinished, without MPI."""

from __future__ import annotations

import _thread
import operator
from functools import partial
from itertools import compress
from types import SimpleNamespace

import pytest

from hvdlab.collectives.planes import mpi
from hvdlab.collectives.planes.base import PhaseTimes, PlaneContext
from hvdlab.collectives.planes.mpi import MpiPlane


def test_request_that_is_begun_as_an_interrupt_comes_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI still uses the counts in it; an interrupt is raised as soon as a call of MPI returns."""
    request = object()
    kept: list[object] = []
    monkeypatch.setattr(mpi, "leave_to_library", lambda *objects: kept.extend(objects))
    # All in C, as MPI's calls are: a function in Python would raise the interrupt itself.
    steps = map(operator.call, (_thread.interrupt_main, partial(operator.getitem, [request], 0)))
    plane = MpiPlane(PlaneContext(0, 1, 0, 2, (0, 1), ("a", "a"), None, -1, "", {}))
    plane._comm = SimpleNamespace(Ibarrier=partial(next, compress(steps, (False, True))))
    with pytest.raises(KeyboardInterrupt):
        plane.barrier(PhaseTimes())
    assert kept == [request]
