"""Requests of MPI that are left unfinished, without MPI."""

from __future__ import annotations

import _thread
import gc
import operator
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import compress
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlab.collectives.errors import StartError
from hvdlab.collectives.planes import mpi
from hvdlab.collectives.planes.base import PhaseTimes, PlaneContext
from hvdlab.collectives.planes.mpi import MpiPlane
from hvdlab.collectives.rendezvous import backends
from hvdlab.collectives.time_limits import Deadline


def test_request_that_is_begun_as_an_interrupt_comes_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI still uses the counts in it; an interrupt is raised as soon as a call of MPI returns."""
    request = object()
    kept: list[object] = []
    monkeypatch.setattr(mpi, "leave_to_library", lambda *objects: kept.extend(objects))
    # All in C, as MPI's calls are: a function in Python would raise the interrupt itself.
    calls: list[Any] = [_thread.interrupt_main, partial(operator.getitem, [request], 0)]
    steps: Iterator[Any] = map(operator.call, calls)
    plane = MpiPlane(PlaneContext(0, 1, 0, 2, (0, 1), ("a", "a"), None, -1, "", {}))
    plane._comm = SimpleNamespace(Ibarrier=partial(next, compress(steps, (False, True))))
    with pytest.raises(KeyboardInterrupt):
        plane.barrier(PhaseTimes())
    assert kept == [request]


def test_array_of_a_broadcast_that_is_given_up_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays: list[weakref.ref[Any]] = []

    def begin(array: Any, root: int) -> Any:
        """Begin a broadcast in which another rank never takes part."""
        arrays.append(weakref.ref(array))
        return SimpleNamespace(Test=lambda: False)

    world = SimpleNamespace(rank=0, size=2, Ibcast=begin)
    monkeypatch.setattr(backends, "_initialized", lambda deadline: world)
    with pytest.raises(StartError):
        backends.MpiBackend(0, 2, Deadline(0)).publish(b"the coordinator's address")
    gc.collect()
    assert arrays[0]() is not None, "MPI can still read it"
