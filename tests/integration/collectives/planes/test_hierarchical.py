"""Hosts and columns, memory that a host's members make, and the engine's choice on several hosts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.planes.base import KeyValue, PlaneBroken, open_memfd, publish_memfd
from hvdlab.collectives.planes.hierarchical import GatherPlan, Topology
from hvdlab.collectives.system import HOST_VARIABLE
from support.ranks.resident import Ranks

HOSTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


class OneStore(KeyValue):
    """Store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str, timeout: float) -> bytes:
        return self.values[key]


# -- topology -----------------------------------------------------------------------------------------------------


@given(HOSTS)
def test_everybody_is_served_once_and_carriers_serve_themselves(hosts: list[str]) -> None:
    top = Topology.of(hosts, 0)
    served = [m for c in range(top.columns) for h in range(len(top.hosts)) for m in top.served(c, h)]
    assert sorted(served) == list(range(len(hosts)))
    for column in range(top.columns):
        for host, carrier in enumerate(top.column(column)):
            assert carrier in top.served(column, host)
            assert len({hosts[m] for m in top.served(column, host)}) == 1
    if top.even:
        assert all(len(top.served(c, h)) == 1 for c in range(top.columns) for h in range(len(top.hosts)))


@given(HOSTS, st.data())
def test_members_find_each_other(hosts: list[str], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(hosts) - 1))
    top = Topology.of(hosts, index)
    assert top.here[top.local] == index
    assert top.find(index) == (top.host, top.local)
    assert top.carries == any(index in top.column(c) for c in range(top.columns))


@given(HOSTS, st.data())
def test_gathered_pieces_end_up_in_the_order_of_the_members(hosts: list[str], data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 300), min_size=len(hosts), max_size=len(hosts)))
    parts = [np.full(size, member, np.uint8) for member, size in enumerate(sizes)]
    top = Topology.of(hosts, 0)
    plan = GatherPlan.of(top, sizes)
    assert all(low <= high for bounds in plan.bounds for low, high in pairwise(bounds))
    blocks = [np.concatenate([parts[m] for m in members]) for members in top.hosts]
    columns = [
        np.concatenate([blocks[h][slice(*plan.piece(c, h))] for h in range(len(blocks))])
        for c in range(top.columns)
    ]
    assert [len(column) for column in columns] == plan.column_sizes()[: top.columns]
    out = np.full(sum(sizes), 255, np.uint8)
    plan.place(np.concatenate(columns), out)
    assert np.array_equal(out, np.concatenate(parts))


# -- memory -------------------------------------------------------------------------------------------------------


def test_a_segment_is_opened_by_way_of_its_maker() -> None:
    store = OneStore()
    made = publish_memfd(store, "test", 8192)
    opened = open_memfd(store, 1.0)
    try:
        os.pwrite(made, b"hello", 4096)
        assert os.pread(opened, 5, 4096) == b"hello"
    finally:
        os.close(made)
        os.close(opened)


def test_another_file_under_the_number_is_refused() -> None:
    store = OneStore()
    made = publish_memfd(store, "test", 8192)
    other = publish_memfd(OneStore(), "other", 8192)
    pid, _, name = store.values["memory"].split()
    store.values["memory"] = b" ".join([pid, str(other).encode(), name])
    try:
        with pytest.raises(PlaneBroken, match="not the segment that was offered"):
            open_memfd(store, 1.0)
    finally:
        os.close(made)
        os.close(other)


def test_a_maker_that_is_gone_is_told() -> None:
    store = OneStore()
    os.close(publish_memfd(store, "test", 8192))
    with pytest.raises(PlaneBroken, match="HVDLAB_HOST"):
        open_memfd(store, 1.0)


# -- the engine's choice ------------------------------------------------------------------------------------------


def join(hosts: str) -> None:
    os.environ[HOST_VARIABLE] = hosts[int(os.environ["HVDLAB_RANK"])]
    context.init()


def work() -> tuple[str, bool]:
    """Run all that the variables concern; return the plane and whether memory is shared."""
    e = context.engine()
    count = 30_000  # more than travels with the negotiation
    assert (hvd.allreduce(np.full(count, e.rank + 1.0), op=hvd.Sum) == sum(range(e.size + 1))).all()
    gathered = hvd.allgather(np.full((count, 1), e.rank))
    assert gathered[:, 0].tolist() == np.repeat(np.arange(e.size), count).tolist()
    with open("/proc/self/maps") as maps:
        return e.plane(), "memfd:hvdlab" in maps.read()


def place() -> tuple[int, int, int, int]:
    e = context.engine()
    return e.local_rank, e.local_size, e.cross_rank, e.cross_size


@pytest.fixture
def started(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Ranks, str, bool]]:
    hosts, environment, plane, shares = request.param
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with Ranks(len(hosts), init=False, tls=len(set(hosts)) == 1, imports=["torch"]) as ranks:
        ranks.run(join, hosts, timeout=60)
        yield ranks, plane, shares


@pytest.mark.parametrize(
    "started",
    [
        pytest.param(("aabb", {}, "hierarchical", True), id="by-itself"),
        pytest.param(("aabb", {"HOROVOD_HIERARCHICAL_ALLREDUCE": "0"}, "gloo", False), id="flat"),
        pytest.param(
            ("aabb", {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1", "HOROVOD_HIERARCHICAL_ALLGATHER": "0"}, "hierarchical", True),
            id="flat-allgather",
        ),
        pytest.param(("aa", {}, "hierarchical", True), id="one-host-over-tls"),
    ],
    indirect=True,
)  # fmt: skip
def test_the_plane_of_several_hosts(started: tuple[Ranks, str, bool]) -> None:
    ranks, plane, shares = started
    assert ranks.run(work, timeout=60) == [(plane, shares)] * ranks.size


def test_the_name_of_a_host_decides_the_place() -> None:
    with Ranks(3, init=False) as ranks:
        ranks.run(join, "aba", timeout=60)
        assert ranks.run(place) == [(0, 2, 0, 2), (0, 1, 1, 2), (1, 2, 0, 1)]


def test_process_sets_of_parts_of_hosts() -> None:
    with Ranks(4, init=False, imports=["torch"]) as ranks:
        ranks.run(join, "aabb", timeout=60)
        assert ranks.run(of_a_set, [0, 1, 3], timeout=60) == [
            "hierarchical",
            "hierarchical",
            "",
            "hierarchical",
        ]
        assert ranks.run(of_a_set, [1, 2], timeout=60) == ["", "gloo", "gloo", ""]
        assert ranks.run(of_a_set, [2, 3], timeout=60) == ["", "", "shm", "shm"]
        ranks.run(threads_are_few, timeout=60)


def of_a_set(members: list[int]) -> str:
    e = context.engine()
    chosen = e.add_process_set(members)
    plane = ""
    if e.rank in members:
        total = hvd.allreduce(np.full(20_000, e.rank), op=hvd.Sum, process_set=chosen)
        assert (total == sum(members)).all()
        plane = e.plane(chosen)
    hvd.barrier()
    e.remove_process_set(chosen)
    return plane


def threads_are_few() -> None:
    names = [thread.name for thread in threading.enumerate()]
    assert len(names) < 12, names
