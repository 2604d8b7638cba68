"""Reports of ranks that are known by their connections alone."""

from __future__ import annotations

from collections.abc import Callable

from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import Membership
from hvdlab.launch.mpi import MembershipRanks
from hvdlab.launch.starter import Ended, Started, Waiting


class Coordinator:
    """Coordinator that sends memberships as a test asks, and collects the reports."""

    def __init__(self) -> None:
        self.told: list[Callable[[Membership], None]] = []
        self.events: list[Started | Ended | Waiting] = []
        self.ranks = MembershipRanks(self, self)  # type: ignore[arg-type]  # no client is needed to listen

    def on_membership(self, callback: Callable[[Membership], None]) -> None:
        self.told.append(callback)

    def handle(self, event: Started | Ended | Waiting) -> None:
        self.events.append(event)

    def tell(self, *pids: int, deaths: tuple[m.Death, ...] = ()) -> list[Started | Ended | Waiting]:
        """Set the processes of ranks 0, 1, ... (0: none); return the reports of that."""
        members = tuple(
            m.Member(rank=rank, pid=pid, host="elsewhere") for rank, pid in enumerate(pids) if pid
        )
        self.events.clear()
        for callback in self.told:
            callback(Membership(members=members, deaths=deaths))
        return list(self.events)


def test_starts_and_ends_are_reported_once() -> None:
    coordinator = Coordinator()
    assert coordinator.tell(10, 11, 12) == [Started(0, 10), Started(1, 11), Started(2, 12)]
    assert coordinator.tell(10, 11, 12) == []
    death = m.Death(rank=1, pid=11, when=0.0, reason="its connection was closed")
    ended = Ended(1, 11, "its connection was closed")
    assert coordinator.tell(10, 0, 12, deaths=(death,)) == [ended]
    assert coordinator.tell(10, 0, 12, deaths=(death,)) == []
    assert coordinator.tell(10, 0, 0, deaths=(death,)) == [Ended(2, 12, "it left")]
    assert coordinator.tell(10, 0, 12, deaths=(death,)) == [Started(2, 12)]


def test_death_of_an_earlier_process_leaves_its_successor() -> None:
    coordinator = Coordinator()
    coordinator.tell(10, 11)
    death = m.Death(rank=1, pid=11, when=0.0, reason="its connection was closed")
    assert coordinator.tell(10, 12, deaths=(death,)) == [
        Ended(1, 11, "its connection was closed"),
        Started(1, 12),
    ]
    assert coordinator.tell(10, 12, deaths=(death,)) == []
    coordinator.events.clear()
    coordinator.ranks.end_all(2, "mpiexec ended")
    assert coordinator.events == [Ended(0, 10, "mpiexec ended"), Ended(1, 12, "mpiexec ended")]


def test_death_of_a_process_that_was_never_a_member_ends_its_rank() -> None:
    coordinator = Coordinator()
    coordinator.tell(10, 11)
    death = m.Death(rank=1, pid=12, when=0.0, reason="its connection was closed")
    assert coordinator.tell(10, deaths=(death,)) == [Ended(1, 12, "its connection was closed")]


def test_the_end_of_what_started_them_is_the_end_of_those_that_are_left() -> None:
    coordinator = Coordinator()
    coordinator.tell(10, 11)
    coordinator.tell(10)
    coordinator.events.clear()
    coordinator.ranks.end_all(3, "mpiexec ended", "last words")
    assert coordinator.events == [
        Ended(0, 10, "mpiexec ended", "last words"),
        Ended(2, 0, "mpiexec ended", "last words"),
    ]
    coordinator.events.clear()
    coordinator.ranks.end_all(3, "again")
    assert coordinator.events == []
    assert coordinator.tell(10) == []
