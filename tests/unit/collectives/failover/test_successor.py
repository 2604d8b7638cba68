"""A successor puts together the world of the coordinator that died, from the reports of ranks and client."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pytest

from hvdlab.collectives.coordinator.events import (
    Event,
    PeerConnected,
    PeerLost,
    Received,
    Send,
    SendConfigure,
    Tick,
)
from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.coordinator.state import CoordinatorState
from hvdlab.collectives.errors import CauseKind
from hvdlab.collectives.failover.successor import GENERATIONS
from hvdlab.collectives.protocol import messages as m
from support.simulation.coordinator import CLIENT, hello, signature

M = TypeVar("M", bound=m.Message)


def world(*ranks: int, generation: int = 7) -> m.KnownSet:
    """Return the world of these ranks, with the processes that :func:`hello` gives them."""
    return m.KnownSet(0, generation, ranks, tuple(1000 + rank for rank in ranks))


WORLD = world(0, 1, 2)


class Successor:
    """State of a coordinator of incarnation 1, and its messages to each peer (a rank's is 10 + its number)."""

    def __init__(self, size: int | None = 3, *, tracked: bool = False) -> None:
        self.state = CoordinatorState(CoordinatorOptions(size=size, incarnation=1))
        self.tracked = tracked
        self.said: dict[int, list[m.Message]] = {}
        self.now = 0.0

    def __call__(self, *events: Event) -> None:
        for effect in self.state.handle_all(events, self.now):
            if isinstance(effect, Send | SendConfigure):
                for peer in effect.peers:
                    self.said.setdefault(peer, []).append(effect.message)
        self.state.validate_state()

    def connect(self, rank: int, incarnation: int = 0, pid: int | None = None) -> None:
        self(PeerConnected(10 + rank, hello(rank, tracked=self.tracked, incarnation=incarnation, pid=pid)))

    def comes(self, rank: int, *sets: m.KnownSet, alive: Iterable[int] = (0, 1, 2), **fields: object) -> None:
        self.connect(rank)
        self.says(rank, m.Resume(sets or (WORLD,), tuple(alive), **fields))  # type: ignore[arg-type]  # tests know

    def says(self, rank: int, message: m.Message) -> None:
        self(Received(10 + rank, message))  # type: ignore[arg-type]  # ranks send the messages of ranks

    def client(self, *messages: m.Message) -> None:
        self(PeerConnected(CLIENT, m.Hello(m.PROTOCOL_VERSION, "", "client", incarnation=0)))
        for message in messages:
            self(Received(CLIENT, message))  # type: ignore[arg-type]  # clients send the messages of clients

    def last(self, peer: int, kind: type[M]) -> M:
        return [message for message in self.said[peer] if isinstance(message, kind)][-1]

    def count(self, peer: int, kind: type[m.Message]) -> int:
        return sum(isinstance(message, kind) for message in self.said.get(peer, ()))

    def configured(self, process_set: int = 0) -> tuple[int, ...]:
        return self.state.sets.by_id[process_set].members if process_set in self.state.sets.by_id else ()

    def wait(self) -> None:
        """Wait until no peer is awaited any more."""
        while self.state.restoring.active:
            due = self.state.next_deadline()
            assert due is not None
            self.now = due
            self(Tick())


def members(*ranks: int) -> tuple[m.Member, ...]:
    return tuple(m.Member(rank, "host", 1000 + rank) for rank in ranks)


def test_the_world_is_there_again_when_all_have_come() -> None:
    successor = Successor()
    successor.comes(0)
    successor.comes(2)
    assert successor.count(10, m.Configure) == 0
    assert successor.last(10, m.World).restoring
    successor.comes(1)
    configure = successor.last(10, m.Configure)
    assert [member.rank for member in configure.members] == [0, 1, 2]
    assert configure.generation > GENERATIONS
    assert not successor.last(10, m.World).restoring
    assert successor.last(10, m.Welcome).incarnation == 1


def test_mail_reaches_ranks_that_come_later_than_its_sender_in_order() -> None:
    successor = Successor()
    successor.comes(0)
    successor.says(0, m.Post("topic", b"1", (1, 2)))
    successor.comes(1)
    successor.says(0, m.Post("topic", b"2", (1, 2)))
    successor.comes(2)
    successor.says(0, m.Post("topic", b"3", (1, 2)))
    for peer in (11, 12):
        got = [message for message in successor.said[peer] if isinstance(message, m.Welcome | m.Mail)]
        assert isinstance(got[0], m.Welcome)
        assert got[1:] == [m.Mail("topic", 0, body) for body in (b"1", b"2", b"3")]


def test_mail_of_a_client_reaches_ranks_that_come_later_once() -> None:
    successor = Successor()
    successor.comes(0)
    successor.client(m.Post("topic", b"1", (0, 1, 2)))
    successor.comes(1)
    successor.comes(2)
    for peer in (10, 11, 12):
        got = [message for message in successor.said[peer] if isinstance(message, m.Welcome | m.Mail)]
        assert isinstance(got[0], m.Welcome)
        assert got[1:] == [m.Mail("topic", -1, b"1")]


def test_mail_for_a_rank_that_does_not_come_is_dropped() -> None:
    successor = Successor()
    successor.comes(0)
    successor.says(0, m.Post("topic", b"1", (1, 2)))
    successor.connect(1, incarnation=-1)  # another process
    assert successor.count(11, m.Mail) == 0
    successor.wait()
    assert successor.state.restoring.mail == {}


def test_generations_go_on_above_all_that_were() -> None:
    successor = Successor(1)
    successor.comes(0, world(0, generation=5 * GENERATIONS), alive=[0])
    assert successor.last(10, m.Configure).generation > 5 * GENERATIONS


@pytest.mark.parametrize("fields", [{"last_set": (1 << 64) - 1}, {}])
def test_rank_with_impossible_generations_ends_alone(fields: dict[str, int]) -> None:
    successor = Successor(size=2)
    known = WORLD if fields else world(0, 1, 2, generation=(1 << 64) - 1)
    successor.comes(0, known, alive=(0, 1), **fields)
    successor.comes(1, alive=(0, 1))
    successor.wait()
    configure = successor.last(11, m.Configure)
    assert [member.rank for member in configure.members] == [1]
    assert configure.generation < 1 << 62


def test_who_does_not_come_in_time_is_dead() -> None:
    successor = Successor()
    successor.comes(0)
    successor.comes(1)
    successor.wait()
    assert successor.configured() == (0, 1)
    (death,) = successor.last(10, m.World).deaths
    assert (death.rank, death.admitted) == (2, True)
    assert "did not come back within 10 s" in death.reason
    successor.connect(2)
    assert successor.count(12, m.Refused) == 0, "the launcher has not said which process it was"


def test_who_was_declared_dead_does_not_get_in_again() -> None:
    successor = Successor(None)
    successor.client(m.Recall((0, 1, 2), members(0, 1, 2)))
    successor.comes(0)
    successor.comes(1)
    successor.wait()
    successor.connect(2)
    assert "gone on without it" in successor.last(12, m.Refused).reason
    successor.said.clear()
    successor.connect(2, incarnation=-1, pid=4711)
    assert successor.configured() == (0, 1, 2)


def test_who_is_lost_by_this_coordinator_does_not_get_in_again() -> None:
    successor = Successor(1)
    successor.comes(0, world(0, generation=1), alive=[0])
    successor(PeerLost(10, "cut off"))
    successor.connect(0, incarnation=1)
    assert "gone on without it" in successor.last(10, m.Refused).reason


def test_the_launcher_knows_who_died_meanwhile() -> None:
    successor = Successor(None)
    successor.client(m.Recall((0, 1, 2), members(0, 1, 2)))
    successor.comes(0)
    successor.comes(1)
    assert successor.configured() == ()
    successor(Received(CLIENT, m.RankLost(2, 1002, "killed by SIGKILL")))
    assert successor.configured() == (0, 1)
    assert successor.last(CLIENT, m.World).deaths[0].reason == "killed by SIGKILL"


@pytest.mark.parametrize("said", ["recalled", "on the way", "afterwards"])
def test_who_was_to_be_let_go_still_leaves_at_the_next_commit(said: str) -> None:
    successor = Successor(None)
    released = (2,) if said == "recalled" else ()
    successor.client(m.Recall((0, 1, 2), members(0, 1, 2), released=released))
    successor.comes(0, elastic=True)
    if said == "on the way":
        successor(Received(CLIENT, m.Release((2,))))
    successor.comes(1, elastic=True)
    successor.comes(2, elastic=True)
    if said == "afterwards":
        successor(Received(CLIENT, m.Release((2,))))
    assert successor.configured() == (0, 1, 2)
    assert successor.last(10, m.World).leaving == (2,)
    assert successor.count(12, m.Leave) == 0
    for rank in range(3):
        successor.says(rank, m.Regroup(1, 1, ""))
    assert successor.configured() == (0, 1)
    assert successor.count(12, m.Leave) == 1


@pytest.mark.parametrize("size", [3, None])
def test_without_a_client_a_rank_that_was_to_be_let_go_leaves_at_the_next_commit(size: int | None) -> None:
    """The rank itself has reported it; ``None``: no process has reported the number of ranks to this coordinator."""
    successor = Successor(size, tracked=True)
    for rank in range(3):
        successor.comes(rank, elastic=True, cells=("cell",), released=rank == 2)
    successor.wait()
    assert successor.configured() == (0, 1, 2)
    assert successor.last(10, m.World).leaving == (2,)
    assert successor.count(12, m.Leave) == 0
    for rank in range(3):
        successor.says(rank, m.Regroup(1, 1, ""))
    assert successor.configured() == (0, 1)
    assert successor.count(10, m.Regrouped) == 1
    assert successor.count(12, m.Leave) == 1


def test_without_any_word_of_how_many_there_are_ranks_train_on_without_those_that_do_not_come_back() -> None:
    successor = Successor(None, tracked=True)
    for rank in (0, 2):
        successor.comes(rank, elastic=True, cells=("cell",))
    successor.wait()
    for rank in (0, 2):
        successor.says(rank, m.Regroup(1, 1, ""))
    assert successor.configured() == (0, 2)
    assert [successor.count(10 + rank, m.Regrouped) for rank in (0, 2)] == [1, 1]
    assert [death.rank for death in successor.last(10, m.World).deaths] == [1]
    successor.client(m.Recall((0, 1, 2), members(0, 2)))
    assert successor.last(CLIENT, m.World).expected == (0, 1, 2)


def test_one_in_the_place_of_a_rank_that_was_to_be_let_go_stays() -> None:
    successor = Successor(None)
    successor.client(m.Recall((0, 1), members(0, 1), released=(1,)))
    successor.comes(0, alive=[0, 1])
    successor.connect(1, incarnation=-1, pid=4711)
    assert successor.configured() == (0, 1)
    assert successor.count(11, m.Leave) == 0


def test_one_that_dies_on_the_way_is_not_waited_for() -> None:
    successor = Successor()
    successor.comes(0)
    successor.comes(1)
    successor(PeerLost(11, "it died, too"))
    successor.comes(2)
    assert successor.configured() == (0, 2)


def test_deaths_from_before_are_remembered() -> None:
    successor = Successor(None)
    death = m.Death(1, 1001, 12.5, "killed by SIGSEGV", True)
    successor.client(m.Recall((0, 1, 2), members(0, 2), (death,)))
    successor.comes(0, world(0, 2), alive=[0, 2])
    successor.comes(2, world(0, 2), alive=[0, 2])
    assert successor.configured() == (0, 2)
    assert successor.last(CLIENT, m.World).deaths == (death,)


def test_a_pools_world_waits_for_its_client() -> None:
    successor = Successor(None, tracked=True)
    for rank in range(3):
        successor.comes(rank)
    assert successor.configured() == ()
    successor.client(m.Recall((0, 1, 2), members(0, 1, 2)))
    assert successor.configured() == (0, 1, 2)


def test_a_pool_without_ranks() -> None:
    successor = Successor(None)
    successor.client(m.Recall((0,)))
    successor.connect(0, incarnation=-1)
    assert successor.configured() == (0,)


def test_ranks_that_were_still_starting_are_not_dead() -> None:
    successor = Successor(2)
    successor.comes(0, alive=[])
    assert successor.state.membership.deaths == {}
    successor.connect(1, incarnation=-1)
    assert successor.configured() == (0, 1)


def test_process_sets_keep_their_ids_and_new_ones_get_others() -> None:
    successor = Successor()
    pair, lone = m.KnownSet(4, 3, (0, 2)), m.KnownSet(6, 1, (1,))
    successor.comes(0, WORLD, pair, m.KnownSet(6, 0, (1,)), last_set=7)
    successor.comes(1, WORLD, m.KnownSet(4, 0, (0, 2)), lone, last_set=7)
    successor.comes(2, WORLD, pair, m.KnownSet(6, 0, (1,)), last_set=7)
    assert successor.configured(4) == (0, 2)
    assert successor.configured(6) == (1,)
    assert successor.state.apply(successor.state.sets.add_set((0, 1))).id == 8


def test_a_set_whose_members_died_is_without_them() -> None:
    successor = Successor()
    pair = m.KnownSet(4, 3, (0, 2))
    successor.comes(0, WORLD, pair)
    successor.comes(1)
    successor.wait()
    assert successor.configured(4) == (0,)


def test_a_newcomer_under_an_old_number_is_no_member() -> None:
    successor = Successor()
    pair = m.KnownSet(4, 3, (0, 2))
    successor.comes(0, WORLD, pair)
    successor.comes(1)
    successor.connect(2, incarnation=-1, pid=4711)
    assert successor.configured(4) == (0,)
    assert successor.configured() == (0, 1, 2)


@pytest.mark.parametrize("elastic", [True, False])
def test_a_newcomer_under_an_old_number_that_knew_a_coordinator_comes_last(elastic: bool) -> None:
    """It came to a coordinator that died before it had restored the world, so it comes with an incarnation, like those that trained."""
    successor = Successor()
    successor.state = CoordinatorState(CoordinatorOptions(size=3, incarnation=2, by_seniority=True))
    successor.connect(0, incarnation=1, pid=4711)
    successor.says(0, m.Resume((), (0, 1, 2)))
    for rank in (1, 2):
        successor.comes(rank, elastic=elastic)
    if elastic:
        assert successor.configured() == (1, 2)
        for rank in (1, 2):
            successor.says(rank, m.Regroup(1, 1, ""))
    assert successor.configured() == (1, 2, 0)


def test_a_member_that_has_not_heard_of_its_world_keeps_its_place() -> None:
    successor = Successor()
    successor.state = CoordinatorState(CoordinatorOptions(size=3, incarnation=1, by_seniority=True))
    successor.connect(1)
    successor.says(1, m.Resume((), (0, 1, 2)))
    for rank in (0, 2):
        successor.comes(rank, world(2, 1, 0))
    assert successor.configured() == (2, 1, 0)


def test_one_whose_number_another_process_had_meanwhile_has_fallen_behind() -> None:
    successor = Successor()
    successor.comes(1, world(0, 1, 2, generation=5), elastic=True)
    newest = m.KnownSet(0, 7, (0, 1, 2), (1000, 4711, 1002))
    for rank in (0, 2):
        successor.comes(rank, newest, elastic=True)
    assert successor.configured() == (0, 2)
    assert successor.count(11, m.Outdated) == 1
    assert successor.count(10, m.Outdated) == 0


@pytest.mark.parametrize("of_two", [0, 1])
def test_a_set_that_was_added_on_some_ranks_only_is_undone(of_two: int) -> None:
    successor = Successor(2)
    added = m.KnownSet(1, 2, (0, 1))
    both = world(0, 1)
    for rank in (0, 1):
        if rank == of_two:
            successor.comes(rank, both, added, alive=[0, 1], last_set=1)
        else:
            successor.comes(rank, both, alive=[0, 1], adding=((0, 1),))
    assert successor.configured(1) == ()
    assert successor.last(10 + of_two, m.Dissolve).process_set == 1


def test_a_set_is_undone_for_the_sake_of_one_outside() -> None:
    successor = Successor()
    added = m.KnownSet(1, 2, (0, 1))
    successor.comes(0, WORLD, added, last_set=1)
    successor.comes(1, WORLD, added, last_set=1)
    successor.comes(2, WORLD, adding=((0, 1),))
    assert successor.configured(1) == ()
    assert successor.count(10, m.Dissolve) == successor.count(11, m.Dissolve) == 1


def test_an_older_set_of_the_same_ranks_stands() -> None:
    successor = Successor()
    pair = m.KnownSet(1, 2, (0, 1))
    for rank in range(3):
        known = pair if rank < 2 else m.KnownSet(1, 0, (0, 1))
        successor.comes(rank, WORLD, known, last_set=1, adding=((0, 1),))
    assert successor.configured(1) == (0, 1)


def test_a_removal_that_failed_somewhere_is_done() -> None:
    successor = Successor()
    pair = m.KnownSet(1, 2, (0, 1))
    successor.comes(0, WORLD, last_set=1)
    successor.comes(1, WORLD, pair, last_set=1, removing=(1,))
    successor.comes(2, WORLD, m.KnownSet(1, 0, (0, 1)), last_set=1, removing=(1,))
    assert successor.configured(1) == ()
    assert successor.count(11, m.Dissolve) == successor.count(12, m.Dissolve) == 1


def test_cells_go_on_and_ends_count_even_if_the_client_has_not_heard_of_them() -> None:
    successor = Successor(None, tracked=True)
    recall = m.Recall((0, 1, 2), members(0, 1, 2), cells=(("c7", (0, 1, 2)),))
    successor.comes(0, cells=("c7",))
    successor.client(recall)
    successor.comes(1, ended=(("c7", "ZeroDivisionError: no"),))
    successor.comes(2)  # the cell was on its way to it; the pool sends it again
    active = [successor.state.cells.is_running(rank) for rank in range(3)]
    assert active == [True, False, True]
    successor.client(recall)  # over a connection that it gave up, which is read after all
    assert [successor.state.cells.is_running(rank) for rank in range(3)] == active
    definition = m.Definition(1, signature("loss"), "cell [7] line 4")
    generation = successor.state.sets.world.generation
    successor.says(0, m.Announce(0, generation, (1,), (definition,)))
    abort = successor.last(10, m.Abort)
    assert (abort.kind, abort.ranks) == (CauseKind.CELL_FAILED, (1,))
    assert "ZeroDivisionError" in abort.text


def test_a_cell_of_a_process_that_died_is_not_one_of_its_successor() -> None:
    successor = Successor(None, tracked=True)
    successor.connect(0, pid=77)
    successor.says(0, m.Resume((), (0,)))
    successor.comes(1, cells=("c7",), alive=(0, 1))
    successor.client(m.Recall((0, 1), members(0, 1), cells=(("c7", (1,)),)))
    successor.wait()
    # Over a connection that the client gave up before it knew that rank 0 had died.
    successor.client(m.Recall((0, 1), members(0, 1), cells=(("c7", (0, 1)),)))
    assert [successor.state.cells.is_running(rank) for rank in (0, 1)] == [False, True]


def test_elastic_training_goes_on() -> None:
    successor = Successor(2)
    both = world(0, 1)
    for rank in (0, 1):
        successor.comes(rank, both, alive=[0, 1], elastic=True)
    assert successor.state.elastic.training == {0, 1}
    assert successor.configured() == (0, 1)
    for rank in (0, 1):
        successor.says(rank, m.Regroup(5, 1, "the coordinator is gone"))
    assert successor.last(11, m.Regrouped).ticket == 5


def test_a_client_may_come_late_or_twice() -> None:
    successor = Successor()
    for rank in range(3):
        successor.comes(rank)
    successor.client(m.Recall((0, 1, 2), members(0, 1, 2)))
    assert successor.configured() == (0, 1, 2)
    assert successor.count(10, m.Configure) == 1
    assert not successor.last(CLIENT, m.World).restoring


def test_ranks_without_a_place_are_told_to_leave() -> None:
    successor = Successor(None)
    successor.comes(0)
    successor.comes(2)
    successor.client(m.Recall((0, 1), members(0, 1, 2)))
    assert successor.count(12, m.Leave) == 1
    successor.comes(1)
    assert successor.configured() == (0, 1)


@pytest.mark.parametrize("by_seniority", [True, False])
def test_the_positions_of_ranks_outlive_the_coordinator(by_seniority: bool) -> None:
    new = Successor()
    new.state = CoordinatorState(CoordinatorOptions(size=3, incarnation=1, by_seniority=by_seniority))
    known = world(2, 0, 1), m.KnownSet(3, 8, (2, 0))
    for rank in range(3):
        new.comes(rank, *(known if rank != 1 else known[:1]))
    new.wait()
    assert new.configured() == ((2, 0, 1) if by_seniority else (0, 1, 2))
    assert new.configured(3) == ((2, 0) if by_seniority else (0, 2))
