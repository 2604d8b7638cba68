"""The planes that ranks use, from their reports of their process sets."""

from __future__ import annotations

from hvdlab.collectives.tracing.record_format import Event, Members, encode
from hvdlab.collectives.tracing.recording import Planes, Recording

START = 7_000_000_000


def configured(process_set: int, generation: int, plane: str, size: int = 2) -> Members:
    return Members(process_set, generation, size, START, plane)


def test_each_process_set_has_the_plane_that_was_configured_last() -> None:
    planes = Planes()
    assert planes.of(0) == {}
    planes.update(0, [configured(0, 1, "shm"), configured(1, 2, "gloo")])
    assert planes.of(0) == {0: "shm", 1: "gloo"}
    planes.update(0, [configured(0, 3, "gloo"), configured(0, 2, "mpi")])
    assert planes.of(0) == {0: "gloo", 1: "gloo"}


def test_a_set_that_is_gone_or_goes_on_without_a_rank_has_none_there() -> None:
    planes = Planes()
    for rank in (0, 1, 2):
        planes.update(rank, [configured(0, 1, "shm", 3), configured(1, 1, "gloo", 3)])
    for rank in (0, 1):
        planes.update(rank, [configured(1, 2, "gloo")])
    assert [planes.of(rank) for rank in (0, 1, 2)] == [{0: "shm", 1: "gloo"}] * 2 + [{0: "shm"}]
    planes.update(0, [configured(1, 3, "", 0)])
    assert [planes.of(rank) for rank in (0, 1)] == [{0: "shm"}] * 2


def test_of_a_rank_that_has_not_told_of_the_worlds_new_generation_the_old_plane_is_known() -> None:
    planes = Planes()
    for rank in (0, 1):
        planes.update(rank, [configured(0, 1, "shm")])
    planes.update(0, [configured(0, 2, "gloo")])
    assert [planes.of(rank) for rank in (0, 1)] == [{0: "gloo"}, {0: "shm"}]


def test_a_recording_learns_them_of_its_ranks() -> None:
    recording = Recording()
    events: list[Event] = [configured(0, 1, "shm"), configured(4, 1, "gloo"), configured(4, 2, "", 0)]
    recording.feed(1, encode(1, events))
    assert recording.planes(1) == {0: "shm"}
    assert recording.planes(0) == {}
