"""Planes come and go without leaving threads, descriptors or memory behind."""

from __future__ import annotations

import os

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.system import HOST_VARIABLE
from support.ranks.resident import Ranks

SETS = 12
LARGE = 50_000  # elements: more than travels with the negotiation


Held = tuple[int, int, int]
"""Descriptors, threads and mapped segments of a process."""


def held() -> Held:
    with open("/proc/self/maps") as maps:
        segments = maps.read().count("memfd:hvdlab")
    return (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), segments)


def join(hosts: str, plane: str) -> None:
    os.environ[HOST_VARIABLE] = hosts[int(os.environ["HVDLAB_RANK"])]
    os.environ["HVDLAB_PLANE"] = plane
    context.init()
    reduce(0)


def reduce(process_set: int) -> None:
    size = context.engine().size
    assert (hvd.allreduce(np.ones(LARGE), op=hvd.Sum, process_set=process_set) == size).all()


def come_and_go(times: int) -> Held:
    e = context.engine()
    for _ in range(times):
        chosen = e.add_process_set(range(e.size))
        reduce(chosen)
        e.remove_process_set(chosen)
    # Its plane is closed by the executor before this is executed.
    reduce(0)
    return held()


def side_by_side(count: int, used: bool) -> tuple[Held, Held]:
    e = context.engine()
    chosen = [e.add_process_set(range(e.size)) for _ in range(count)]
    if used:
        for process_set in chosen:
            reduce(process_set)
    most = held()
    for process_set in chosen:
        e.remove_process_set(process_set)
    reduce(0)
    return most, held()


@pytest.mark.parametrize(("plane", "hosts"), [("shm", "aa"), ("gloo", "aa"), ("hierarchical", "aab")])
def test_nothing_is_left_of_planes(plane: str, hosts: str) -> None:
    with Ranks(len(hosts), init=False, imports=["torch"]) as ranks:
        ranks.run(join, hosts, plane, timeout=60)
        before = ranks.run(come_and_go, 1, timeout=60)
        unused = ranks.run(side_by_side, SETS, False, timeout=60)
        after = ranks.run(side_by_side, SETS, True, timeout=60)
        again = ranks.run(come_and_go, SETS, timeout=60)
    slack = 3  # descriptors that a library closes from a thread of its own
    for first, (idle, _), (busy, left), last in zip(before, unused, after, again, strict=True):
        descriptors, threads, segments = first
        assert idle[0] <= descriptors + 2 * SETS + slack  # the memory, and the board that is mapped of it
        assert idle[1] <= threads + slack, "a plane was built that nobody used"
        assert busy[2] <= segments + 2 * SETS
        for end in (left, last):
            assert all(now <= then + slack for now, then in zip(end, first, strict=True)), (first, end)
