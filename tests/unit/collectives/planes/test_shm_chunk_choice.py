"""Which size of chunks a group uses, and that all members use the same."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.collectives.planes.base import PhaseTimes, PlaneContext
from hvdlab.collectives.planes.shm import ShmPlane
from hvdlab.collectives.planes.shm.layout import part, segment_size, slot_bytes
from hvdlab.collectives.planes.shm.plane import ROUNDS, TRIAL_BYTES, ChunkChoice
from hvdlab.collectives.types import SUM, DType

KIB = 1024


def chosen(members: int, times: Sequence[int]) -> ChunkChoice:
    choice = ChunkChoice(members, slot_bytes(members))
    for nanoseconds in times:
        choice.measured(nanoseconds)
    return choice


def test_sizes_are_tried_by_turns() -> None:
    choice = ChunkChoice(4, slot_bytes(4))
    tried = []
    while (size := choice.candidate) is not None:
        tried.append(size // KIB)
        assert choice.chosen == 512 * KIB
        choice.measured(100)
    assert tried == [256, 512, 1024] * ROUNDS


@pytest.mark.parametrize(
    ("times", "size"),
    [
        ([100, 90, 70, 100, 90, 70, 100, 90, 70], 512),
        (
            [70, 90, 100, 99, 99, 99, 99, 99, 99],
            128,
        ),  # the best round counts, as work of others makes rounds longer
        ([99, 100, 99, 99, 100, 99, 98, 100, 98], 256),  # too little is gained
    ],
)
def test_the_fastest_size_is_chosen_if_it_gains_enough(times: list[int], size: int) -> None:
    choice = chosen(2, times)
    assert choice.candidate is None
    assert choice.chosen == size * KIB


@pytest.mark.parametrize(
    ("members", "slot"), [(2, 8192), (2, 256 * KIB), (9, slot_bytes(9)), (128, slot_bytes(128))]
)
def test_without_room_for_larger_chunks_none_are_tried(members: int, slot: int) -> None:
    choice = ChunkChoice(members, slot)
    assert choice.candidate is None
    assert choice.chosen <= slot


@given(st.lists(st.integers(0, 6), max_size=6), st.data())
def test_a_part_is_a_view_of_consecutive_elements(lengths: list[int], data: st.DataObject) -> None:
    total = sum(lengths)
    first = data.draw(st.integers(0, total))
    count = data.draw(st.integers(0, total - first))
    whole = np.arange(total)
    bounds = np.cumsum([0, *lengths])
    buffers = [whole[a:b] for a, b in pairwise(bounds)]
    views = part(buffers, first, count)
    assert [x for view in views for x in view] == list(range(first, first + count))
    assert all(len(view) and np.shares_memory(view, whole) for view in views)


@pytest.mark.parametrize("members", [2, 3])
def test_all_members_choose_the_same_and_reduce_right_meanwhile(members: int) -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, segment_size(members))
    told: list[list[int]] = [[] for _ in range(members)]
    wrong: list[str] = []

    def context(index: int) -> PlaneContext:
        ranks, hosts = tuple(range(members)), ("here",) * members
        return PlaneContext(
            0, 1, index, members, ranks, hosts, memory_fd=os.dup(fd), on_chunks=told[index].append
        )

    planes = [ShmPlane(context(i)) for i in range(members)]
    os.close(fd)
    count = TRIAL_BYTES // 4
    numbers = np.arange(count + 5000, dtype=np.float32) % 1000

    def run(index: int) -> None:
        plane = planes[index]
        plane.connect(10)
        for operation in range(members + 3 * ROUNDS):
            large = numbers + index + operation
            small = np.full(3 + operation, index, np.float32)
            # One trial each, across both buffers; some elements are left, and in place every second time.
            outs = [small, large] if operation % 2 else [np.empty_like(small), np.empty_like(large)]
            plane.allreduce([small, large], outs, DType.F32, SUM, PhaseTimes())
            if operation < 3 * ROUNDS - 1 and told[index]:
                wrong.append(f"{index} chose before the last trial")
            ranks = sum(range(members))
            if not (outs[0] == ranks).all() or not (outs[1] == members * (numbers + operation) + ranks).all():
                wrong.append(f"{index}, {operation}")

    threads = [threading.Thread(target=run, args=(i,)) for i in range(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for plane in planes:
        plane.close()
    assert not wrong
    assert all(sizes == told[0] and len(sizes) == 1 for sizes in told)


def test_a_size_from_elsewhere_ends_the_trials() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, segment_size(2))
    told: list[int] = []
    ranks, hosts = (0, 1), ("here", "here")
    planes = [
        ShmPlane(PlaneContext(0, 1, i, 2, ranks, hosts, memory_fd=os.dup(fd), on_chunks=told.append))
        for i in ranks
    ]
    os.close(fd)

    def run(plane: ShmPlane) -> None:
        plane.connect(10)
        plane.tune(64 * KIB)
        x = np.ones(3 * ROUNDS * TRIAL_BYTES, np.uint8)
        plane.allreduce([x], [x], DType.U8, SUM, PhaseTimes())

    threads = [threading.Thread(target=run, args=(plane,)) for plane in planes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not told
    for plane in planes:
        plane.close()
