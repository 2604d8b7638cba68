from __future__ import annotations

import re

import pytest

from hvdlab.collectives.coordinator.planes import SHM_LIMIT, choose_plane
from hvdlab.collectives.planes.shm.layout import segment_size
from hvdlab.collectives.protocol.messages import Member

ALL = ("shm", "gloo", "mpi")
LOCAL = ("shm", "gloo")


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
