from __future__ import annotations

import re

import pytest

from hvdlab.collectives.coordinator.plane_selection import SHM_LIMIT, Hierarchy, choose_plane, without_memory
from hvdlab.collectives.planes.shm.layout import segment_size
from hvdlab.collectives.protocol.messages import Member

ALL = ("shm", "gloo", "mpi")
LOCAL = ("shm", "gloo")
CUDA = ("cuda/ipc", "cuda/nccl")


def members(*planes: tuple[str, ...], hosts: str = "", wishes: tuple[str, ...] = ()) -> list[Member]:
    hosts = hosts or "a" * len(planes)
    return [
        Member(rank, hosts[rank], 100 + rank, planes=offered, plane=wishes[rank] if wishes else "auto")
        for rank, offered in enumerate(planes)
    ]


@pytest.mark.parametrize(
    ("group", "plane"),
    [
        (members(LOCAL, LOCAL), "shm"),
        (members(LOCAL), "local"),
        (members(ALL), "mpi"),
        (members(ALL, ALL), "mpi"),
        (members(ALL, LOCAL), "shm"),
        (members(LOCAL, LOCAL, LOCAL, hosts="aab"), "hierarchical"),
        (members(ALL, ALL, ALL, hosts="aba"), "hierarchical"),
        (members(LOCAL, LOCAL, ("gloo",), hosts="aab"), "hierarchical"),
        (members(LOCAL, ("gloo",), LOCAL, hosts="aab"), "gloo"),
        (members(ALL, ALL, hosts="ab"), "mpi"),
        (members(LOCAL, LOCAL, LOCAL, hosts="aab", wishes=("gloo", "gloo", "gloo")), "gloo"),
        (members(LOCAL, LOCAL, wishes=("hierarchical", "hierarchical")), "hierarchical"),
        (members(LOCAL, LOCAL, hosts="ab"), "gloo"),
        (members(LOCAL, ("gloo",)), "gloo"),
        (members(LOCAL, LOCAL, wishes=("gloo", "gloo")), "gloo"),
        (members(ALL, ALL, wishes=("auto", "shm")), "shm"),
    ],
)
def test_the_plane_follows_from_the_members(group: list[Member], plane: str) -> None:
    choice = choose_plane(group)
    assert choice.plane == plane
    assert choice.notes == ()


def test_shared_memory_is_sized_for_the_members() -> None:
    choice = choose_plane(members(LOCAL, LOCAL, LOCAL))
    assert choice.memory == segment_size(3, int(choice.options["chunk_bytes"]), int(choice.options["slots"]))
    assert choose_plane(members(LOCAL, LOCAL, hosts="ab")).memory == 0


@pytest.mark.parametrize(
    ("group", "plane", "note"),
    [
        (members(LOCAL, LOCAL, wishes=("shm", "gloo")), "shm", "different planes"),
        (members(LOCAL, LOCAL, hosts="ab", wishes=("shm", "shm")), "gloo", "several hosts"),
        (members(ALL, LOCAL, wishes=("mpi", "mpi")), "shm", r"ranks \[1\] can't use it"),
        (members(LOCAL, LOCAL, wishes=("local", "auto")), "shm", "room for one"),
        (members(LOCAL, LOCAL, LOCAL, hosts="aab", wishes=("shm",) * 3), "hierarchical", "several hosts"),
        (members(LOCAL, ("gloo",), wishes=("hierarchical",) * 2), "gloo", r"ranks \[1\] have no plane shm"),
    ],
)
def test_a_wish_that_can_not_be_met_is_told(group: list[Member], plane: str, note: str) -> None:
    choice = choose_plane(group)
    assert choice.plane == plane
    assert len(choice.notes) == 1
    assert re.search(note, choice.notes[0])
    assert choice.options["note"] == choice.notes[0]


def test_more_ranks_than_share_a_segment() -> None:
    assert choose_plane(members(*[LOCAL] * (SHM_LIMIT + 1))).plane == "gloo"


TWO_HOSTS = members(LOCAL, LOCAL, LOCAL, LOCAL, hosts="aabb")


@pytest.mark.parametrize(
    ("hierarchy", "plane", "flat"),
    [
        (Hierarchy(), "hierarchical", ""),
        (Hierarchy(allreduce=True, allgather=True), "hierarchical", ""),
        (Hierarchy(allreduce=True, allgather=False), "hierarchical", "allgather"),
        (Hierarchy(allreduce=False, allgather=True), "hierarchical", "allreduce"),
        (Hierarchy(allgather=False), "hierarchical", "allgather"),
        (Hierarchy(allreduce=False), "gloo", ""),
        (Hierarchy(allreduce=False, allgather=False), "gloo", ""),
    ],
    ids=str,
)
def test_the_user_says_what_is_hierarchical(hierarchy: Hierarchy, plane: str, flat: str) -> None:
    choice = choose_plane(TWO_HOSTS, hierarchy)
    assert choice.plane == plane
    assert choice.options.get("flat", "") == flat
    assert choice.notes == ()


def test_between_hosts_the_hierarchical_plane_uses_what_all_have() -> None:
    assert choose_plane(TWO_HOSTS).options["outer"] == "gloo"
    assert choose_plane(members(ALL, ALL, ALL, hosts="aab")).options["outer"] == "mpi"
    assert choose_plane(TWO_HOSTS).memory == 0


def test_a_hierarchy_that_can_not_be_had_is_told() -> None:
    choice = choose_plane(members(LOCAL, LOCAL, hosts="ab"), Hierarchy(allreduce=True))
    assert choice.plane == "gloo"
    assert "no host has more than one rank" in choice.options["note"]


def test_one_host_is_not_concerned() -> None:
    assert choose_plane(members(LOCAL, LOCAL), Hierarchy(allreduce=False)).plane == "shm"


def test_members_make_the_memory_that_can_not_be_handed_out() -> None:
    choice = without_memory(choose_plane(members(LOCAL, LOCAL)))
    assert (choice.plane, choice.memory) == ("hierarchical", 0)
    assert "make it themselves" in choice.options["note"]


@pytest.mark.parametrize(
    ("group", "planes"),
    [
        (members(LOCAL, LOCAL), {}),
        (members((*LOCAL, "cuda/nccl"), (*LOCAL, "cuda/nccl")), {"cuda": "cuda/nccl"}),
        (members((*LOCAL, "cuda/nccl"), LOCAL), {}),
        (
            members(("cuda/nccl", "cuda/other", "tpu/x", "shm"), ("tpu/x", "cuda/other", "shm")),
            {"cuda": "cuda/other", "tpu": "tpu/x"},
        ),
        (members(("cuda/a", "cuda/b"), ("cuda/b", "cuda/a")), {"cuda": "cuda/a"}),
        (members((*LOCAL, "cuda/nccl")), {"cuda": "cuda/nccl"}),
        (members((*LOCAL, "cuda/ipc"), (*LOCAL, "cuda/ipc")), {"cuda": "cuda/ipc"}),
        (members((*LOCAL, "cuda/ipc"), (*LOCAL, "cuda/ipc"), hosts="ab"), {}),
        (members(*[(*LOCAL, "cuda/ipc")] * 65), {}),
        (members(*[(*LOCAL, "cuda/ipc", "cuda/nccl")] * 2), {"cuda": "cuda/auto"}),
        (members(*[(*LOCAL, "cuda/ipc", "cuda/nccl")] * 2, hosts="ab"), {"cuda": "cuda/nccl"}),
        (
            members((*LOCAL, "cuda/ipc", "cuda/nccl"), (*LOCAL, "cuda/nccl")),
            {"cuda": "cuda/nccl"},
        ),
        (members((*LOCAL, "cuda/ipc"), (*LOCAL, "cuda/nccl")), {}),
        (members(*[(*LOCAL, "cuda/ipc", "cuda/nccl")] * 65), {"cuda": "cuda/nccl"}),
        (members(*[(*LOCAL, "cuda/ipc", "cuda/nccl")] * 128), {}),
        (members(*[(*LOCAL, *CUDA)] * 3, hosts="aab"), {"cuda": "cuda/nccl"}),
        (members(*[(*LOCAL, *CUDA)] * 3), {"cuda": "cuda/auto"}),
    ],
)
def test_a_device_class_has_a_plane_that_all_offer(group: list[Member], planes: dict[str, str]) -> None:
    choice = choose_plane(group)
    assert choice.device_planes == planes
    assert "/" not in choice.plane
    assert without_memory(choice).device_planes == planes


def test_a_plane_for_devices_is_not_taken_for_the_host() -> None:
    choice = choose_plane(members((*LOCAL, "cuda/nccl"), (*LOCAL, "cuda/nccl"), wishes=("cuda/nccl",) * 2))
    assert choice.plane == "shm"
    assert "not for tensors of the host" in choice.notes[0]
