"""The coordinator's messages in the situations that users meet."""

from __future__ import annotations

from typing import TypeVar

import pytest

from hvdlab.collectives.coordinator.events import CloseConnection, PeerConnected, PeerLost, Received
from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.coordinator.state import RANK_HANDLERS
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import OpKind
from support.simulation.coordinator import CLIENT, SimulatedRank, Simulation, Submission, signature

M = TypeVar("M", bound=m.Message)


def simulate(size: int | None = 3, *, tracked: bool = False, **options: float) -> Simulation:
    """Return a world of ``size`` ranks and a client; in a pool, all run the cell ``cell``."""
    sim = Simulation(CoordinatorOptions(size=size, **options))  # type: ignore[arg-type]  # tests give the right ones
    sim.connect_client()
    if size is not None:
        sim.world(*range(size), tracked=tracked)
        if tracked:
            start_cell(sim, "cell", range(size))
    sim.to_client.clear()
    return sim


def start_cell(sim: Simulation, cell: str, ranks: range | list[int]) -> None:
    sim.client_says(m.CellStarted(cell, tuple(ranks)))
    for rank in ranks:
        sim.ranks[rank].say(m.CellBegin(cell))
    sim.drain()


def submit(sim: Simulation, name: str, *ranks: int, **fields: object) -> None:
    for rank in ranks:
        sim.ranks[rank].submit(signature(name, **fields))  # type: ignore[arg-type]  # tests give the right ones
    sim.drain()


def last(rank: SimulatedRank, kind: type[M]) -> M:
    return [message for message in rank.received if isinstance(message, kind)][-1]


def count(rank: SimulatedRank, kind: type[m.Message]) -> int:
    return sum(isinstance(message, kind) for message in rank.received)


def of_client(sim: Simulation, kind: type[M]) -> list[M]:
    return [message for message in sim.to_client if isinstance(message, kind)]


# -- the world --------------------------------------------------------------------------------------------------------


def test_the_world_is_formed_when_all_expected_ranks_are_there() -> None:
    sim = Simulation(CoordinatorOptions(size=2))
    (first,) = sim.world(0)
    assert last(first, m.Welcome).rank == 0
    assert count(first, m.Configure) == 0
    sim.world(1)
    assert last(first, m.Configure).generation == 1
    assert [member.rank for member in last(first, m.Configure).members] == [0, 1]
    assert last(first, m.Configure).plane == "shm"
    assert last(first, m.Configure).has_memory


def test_without_a_size_the_world_waits_for_a_client() -> None:
    sim = simulate(None)
    (rank,) = sim.world(0)
    assert count(rank, m.Configure) == 0
    sim.client_says(m.Expect((0,)))
    sim.drain()
    assert last(rank, m.Configure).plane == "local"


def test_a_rank_that_died_before_it_came_is_not_waited_for() -> None:
    sim = simulate(None)
    sim.client_says(m.Expect((0, 1)))
    (rank,) = sim.world(0)
    sim.client_says(m.RankLost(1, 77, "exit code 1"))
    sim.drain()
    assert last(rank, m.Configure).generation == 1
    assert of_client(sim, m.World)[-1].deaths[0].reason == "exit code 1"


def test_a_living_rank_is_not_replaced() -> None:
    sim = simulate(1)
    second = sim.connect(0)
    assert "already connected" in second.incoming[0].reason  # type: ignore[attr-defined]  # it is Refused
    assert sim.state.membership.ranks[0].peer != second.peer


def test_a_rank_that_is_not_expected_is_refused() -> None:
    sim = simulate(1)
    stranger = sim.connect(7)
    assert isinstance(stranger.incoming[0], m.Refused)


def test_a_rank_beyond_the_numbers_that_recordings_have_room_for_is_refused() -> None:
    sim = Simulation()
    for rank, refused in ((m.MOST_RANKS - 1, False), (m.MOST_RANKS, True)):
        sim.handle(PeerConnected(rank, m.Hello(1, "", "rank", rank, pid=7)))
        assert (rank not in sim.state.by_peer) == refused
    assert (
        f"rank {m.MOST_RANKS} is too high; ranks have numbers from 0 to 65534" in sim.state.admission.refusals
    )


def test_a_rank_may_ask_for_a_number() -> None:
    sim = Simulation(CoordinatorOptions(size=3))
    sim.connect(1)
    for peer, expected in ((50, 0), (51, 2)):
        sim.handle(PeerConnected(peer, m.Hello(1, "", "rank", -1, pid=peer)))
        assert sim.state.by_peer[peer].rank == expected


def test_an_unknown_role_is_refused() -> None:
    sim = simulate(1)
    sim.handle(PeerConnected(50, m.Hello(1, "", "spy")))
    assert 50 not in sim.state.by_peer


# -- collectives ------------------------------------------------------------------------------------------------------


def test_all_ranks_are_told_to_execute_in_the_same_order() -> None:
    sim = simulate(2)
    submit(sim, "b", 0)
    submit(sim, "a", 0, 1)
    submit(sim, "b", 1)
    assert [[s.name for s in names] for _, names, _ in sim.ranks[0].executed[0, 1]] == [["a"], ["b"]]
    sim.check_order()


def test_what_is_announced_together_is_fused() -> None:
    sim = simulate(2)
    for rank in (0, 1):
        locals = tuple(range(10, 15))
        definitions = tuple(m.Definition(n, signature(f"grad.{n}"), "") for n in locals)
        for n in locals:
            sim.ranks[rank].sets[0].pending.append(submission(n, sim.ranks[rank]))
        sim.ranks[rank].say(m.Announce(0, 1, locals, definitions))
    sim.drain()
    assert last(sim.ranks[0], m.Execute).batches == (m.Batch((10, 11, 12, 13, 14)),)


def submission(local: int, rank: SimulatedRank) -> Submission:
    entry = Submission(signature(f"grad.{local}"), (), local, 1)
    rank.submissions.append(entry)
    return entry


def test_rows_of_an_allgather_come_back_as_a_table() -> None:
    sim = simulate(3)
    for rank in (2, 0, 1):
        sim.ranks[rank].submit(signature("g", OpKind.ALLGATHER, shape=(8,)), 0, (rank * 10,))
    sim.drain()
    assert last(sim.ranks[1], m.Execute).batches[0].tables == (((0,), (10,), (20,)),)


def test_a_mismatch_is_raised_on_every_rank_with_both_sites_and_the_group_goes_on() -> None:
    sim = simulate(3)
    submit(sim, "loss", 0, shape=(10, 4))
    submit(sim, "loss", 2, shape=(10, 5))
    assert count(sim.ranks[0], m.Reject) == 0
    submit(sim, "loss", 1, shape=(10, 4))
    for rank in range(3):
        reject = last(sim.ranks[rank], m.Reject)
        assert [(p.ranks, p.request, p.site) for p in reject.parties] == [
            ((0, 1), "allreduce float32[10, 4] sum", "line 0"),
            ((2,), "allreduce float32[10, 5] sum", "line 2"),
        ]
    submit(sim, "loss", 0, 1, 2)
    assert count(sim.ranks[0], m.Execute) == 1
    assert count(sim.ranks[0], m.Abort) == 0


def test_a_dispute_about_groups_ends_the_generation() -> None:
    sim = simulate(2)
    submit(sim, "x", 0, group="g", group_size=2)
    submit(sim, "x", 1)
    assert last(sim.ranks[0], m.Abort).kind == "mismatch"
    assert last(sim.ranks[0], m.Configure).generation == 2


def test_a_duplicate_name_fails_on_every_rank() -> None:
    sim = simulate(2)
    submit(sim, "x", 0)
    sim.ranks[0].say(m.Duplicate(0, 1, "x", "line 1", "line 2"))
    sim.drain()
    submit(sim, "x", 1)
    for rank in (0, 1):
        told = last(sim.ranks[rank], m.RejectDuplicate)
        assert (told.rank, told.first_site, told.second_site) == (0, "line 1", "line 2")


def test_announcements_of_an_ended_generation_are_dropped_but_their_definitions_kept() -> None:
    sim = simulate(2)
    sim.ranks[0].submit(signature("x"))
    sim.handle(Received(sim.ranks[1].peer, m.Withdraw(0, 1, "interrupted", "interrupted")))
    sim.drain()  # now the announcement arrives, too late
    assert sim.ranks[0].submissions[0].outcome is not None
    submit(sim, "x", 0, 1)  # by its number alone
    assert count(sim.ranks[0], m.Execute) == 1


@pytest.mark.parametrize("shape", [(-1,), (1 << 60,), (5,)])
def test_tensor_of_another_size_than_its_shape_ends_its_rank_alone(shape: tuple[int, ...]) -> None:
    sim = simulate(2)
    peer = sim.ranks[0].peer
    sim.ranks[1].submit(signature("join", OpKind.JOIN, shape=()))
    sim.drain()
    definition = m.Definition(7, signature("x", shape=shape), "line")
    sim.handle(Received(peer, m.Announce(0, 1, (7,), (definition,), (), bytes(16))))
    assert [*sim.ranks] == [1]
    sim.drain()
    assert "a tensor of another size" in last(sim.ranks[1], m.Abort).text


def test_an_announcement_without_a_definition_ends_the_connection() -> None:
    sim = simulate(2)
    victim = sim.ranks[0]
    sim.handle(Received(victim.peer, m.Announce(0, 1, (99,))))
    assert 0 not in sim.ranks
    sim.drain()
    assert "makes no sense" in last(sim.ranks[1], m.Abort).text


# -- ends -------------------------------------------------------------------------------------------------------------


def test_a_death_ends_what_waits_and_the_survivors_go_on() -> None:
    sim = simulate(3)
    submit(sim, "grad", 0)
    sim.kill(2)
    sim.drain()
    abort = last(sim.ranks[0], m.Abort)
    assert (abort.kind, abort.ranks, abort.generation) == ("rank_died", (2,), 1)
    assert abort.pending == (m.AbortedCollective(0, "grad", (0,), (1, 2), ("line 0",)),)
    assert [member.rank for member in last(sim.ranks[0], m.Configure).members] == [0, 1]
    submit(sim, "grad", 0, 1)
    assert last(sim.ranks[1], m.Execute).generation == 2
    assert of_client(sim, m.World)[-1].deaths[0].rank == 2


def test_what_the_launcher_knows_replaces_what_the_socket_told() -> None:
    sim = simulate(2)
    pid = sim.state.membership.ranks[1].pid
    sim.kill(1, "end of file")
    sim.client_says(m.RankLost(1, pid, "killed by SIGKILL"))
    assert [d.reason for world in of_client(sim, m.World) for d in world.deaths] == [
        "end of file",
        "killed by SIGKILL",
    ]
    sim.client_says(m.RankLost(1, pid, "again"))
    assert of_client(sim, m.World)[-1].deaths[0].reason == "killed by SIGKILL"


def test_the_launchers_word_alone_ends_the_generation() -> None:
    sim = simulate(2)
    submit(sim, "grad", 0)
    pid = sim.state.membership.ranks[1].pid
    sim.client_says(m.RankLost(1, pid, "killed by SIGKILL"))
    sim.drain()
    assert last(sim.ranks[0], m.Abort).text == "rank 1 died: killed by SIGKILL"


def test_news_of_an_older_process_does_not_concern_its_successor() -> None:
    sim = simulate(2)
    sim.client_says(m.RankLost(1, 4242, "killed"))
    assert 1 in sim.state.membership.ranks


def test_the_end_of_a_process_that_said_goodbye_is_no_death() -> None:
    sim = simulate(2)
    pid = sim.state.membership.ranks[1].pid
    sim.leave(1)
    sim.drain()
    sim.client_says(m.RankLost(1, pid, "exit code 0"))
    assert of_client(sim, m.World)[-1].deaths == ()


def test_a_replaced_rank_joins_under_its_old_number() -> None:
    sim = simulate(3)
    sim.kill(1)
    sim.drain()
    sim.world(1)
    configured = last(sim.ranks[0], m.Configure)
    assert configured.generation == 3
    assert [member.rank for member in configured.members] == [0, 1, 2]
    assert count(sim.ranks[0], m.Abort) == 1  # the death; no collective fails for a newcomer
    submit(sim, "x", 0, 1, 2)
    assert last(sim.ranks[1], m.Execute).generation == 3


def test_what_is_pending_when_a_rank_joins_is_announced_again() -> None:
    sim = simulate(2)
    sim.client_says(m.Expect((0, 1, 2)))
    submit(sim, "x", 0)
    sim.world(2)
    assert last(sim.ranks[0], m.Configure).generation == 2
    submit(sim, "x", 1)
    assert count(sim.ranks[0], m.Execute) == 0
    submit(sim, "x", 2)
    assert [count(sim.ranks[r], m.Execute) for r in range(3)] == [1, 1, 1]
    assert count(sim.ranks[0], m.Abort) == 0


def test_a_rank_that_leaves_while_others_wait() -> None:
    sim = simulate(3)
    submit(sim, "x", 0, 1)
    sim.leave(2)
    sim.drain()
    assert last(sim.ranks[0], m.Abort).kind == "rank_left"
    assert [member.rank for member in last(sim.ranks[0], m.Configure).members] == [0, 1]


def test_the_first_collective_after_a_rank_left_fails_and_the_next_one_works() -> None:
    sim = simulate(2)
    sim.leave(1)
    sim.drain()
    assert count(sim.ranks[0], m.Abort) == 0
    submit(sim, "x", 0)
    assert last(sim.ranks[0], m.Abort).ranks == (1,)
    submit(sim, "x", 0)
    assert count(sim.ranks[0], m.Execute) == 1


def test_ranks_that_leave_one_after_another_disturb_nobody() -> None:
    sim = simulate(4)
    everyone = list(sim.ranks.values())
    for rank in range(4):
        sim.leave(rank)
        sim.drain()
    assert all(count(rank, m.Abort) == 0 and count(rank, m.Configure) == 1 for rank in everyone)


def test_an_interrupt_ends_the_wait_of_all() -> None:
    sim = simulate(2)
    submit(sim, "x", 0)
    sim.ranks[0].say(m.Withdraw(0, 1, "interrupted", "interrupted", "cell 1 line 2"))
    sim.drain()
    assert (last(sim.ranks[1], m.Abort).kind, last(sim.ranks[1], m.Abort).site) == (
        "interrupted",
        "cell 1 line 2",
    )
    sim.ranks[1].say(m.Withdraw(0, 1, "interrupted", "interrupted"))
    sim.drain()
    assert count(sim.ranks[0], m.Abort) == 1


def test_interrupts_are_relayed() -> None:
    sim = simulate(3)
    sim.client_says(m.InterruptRanks((0, 2, 9)))
    sim.drain()
    assert [count(sim.ranks[r], m.Interrupt) for r in range(3)] == [1, 0, 1]


def test_a_failed_plane_ends_the_generation_after_a_moment() -> None:
    sim = simulate(2)
    sim.ranks[0].say(m.PlaneFailed(0, 1, "connection reset"))
    sim.drain()
    assert count(sim.ranks[0], m.Abort) == 0
    sim.tick(0.3)
    sim.drain()
    assert last(sim.ranks[1], m.Abort).text == "the data plane failed on rank 0: connection reset"


def test_a_generation_is_renewed_for_one_whose_memory_was_lost() -> None:
    sim = simulate(2)
    submit(sim, "early", 1)
    sim.ranks[0].say(m.Renew(0, 1))
    sim.drain()
    assert [last(rank, m.Configure).generation for rank in sim.ranks.values()] == [2, 2]
    assert count(sim.ranks[1], m.Abort) == 0
    submit(sim, "early", 0)
    assert isinstance(sim.ranks[1].submissions[0].outcome, m.Execute)
    sim.ranks[1].say(m.Renew(0, 1))  # as the other rank, which did not know yet
    sim.drain()
    assert last(sim.ranks[1], m.Configure).generation == 2


def test_members_find_each_other_in_a_generation_that_was_changed_over_from() -> None:
    """They finish its running operations, and sometimes have to connect first."""
    sim = simulate(2)
    submit(sim, "loss", 0, 1)
    sim.ranks[0].say(m.StoreGet(0, 1, "port", 7))
    sim.drain()
    sim.ranks[1].say(m.Renew(0, 1))
    sim.drain()
    sim.ranks[1].say(m.StoreSet(0, 1, "port", b"1234"))
    sim.ranks[1].say(m.StoreGet(0, 1, "port", 8))
    sim.drain()
    assert last(sim.ranks[0], m.StoreValue) == m.StoreValue(7, b"1234")
    assert last(sim.ranks[1], m.StoreValue) == m.StoreValue(8, b"1234")
    sim.ranks[1].say(m.PlaneFailed(0, 1, "no luck"))
    sim.drain()
    sim.tick(0.3)
    sim.drain()
    sim.ranks[0].say(m.StoreGet(0, 1, "port", 9))
    sim.drain()
    assert last(sim.ranks[0], m.StoreValue).ticket == 7
    assert not sim.state.sets.world.past_stores


def test_a_plane_that_failed_before_its_generation_was_changed_over_from_ends_what_is_executed_in_it() -> (
    None
):
    sim = simulate(2)
    submit(sim, "loss", 0, 1)
    sim.ranks[0].say(m.PlaneFailed(0, 1, "no luck"))
    sim.ranks[1].say(m.Renew(0, 1))
    sim.drain()
    assert last(sim.ranks[0], m.Configure).generation == 2
    # The next one fails as well, and is changed over from before any message about the first.
    submit(sim, "more", 0, 1)
    sim.ranks[1].say(m.PlaneFailed(0, 2, "no luck either"))
    sim.ranks[1].say(m.Renew(0, 2))
    sim.drain()
    assert count(sim.ranks[0], m.Abort) == 0
    sim.tick(0.3)
    sim.drain()
    for rank in sim.ranks.values():
        assert (last(rank, m.Abort).generation, count(rank, m.Abort)) == (2, 1)
    assert last(sim.ranks[0], m.Abort).text == "the data plane failed on rank 1: no luck either"
    submit(sim, "again", 0, 1)
    assert isinstance(sim.ranks[1].submissions[-1].outcome, m.Execute)


def test_a_death_explains_a_failed_plane() -> None:
    sim = simulate(3)
    sim.ranks[0].say(m.PlaneFailed(0, 1, "connection reset"))
    sim.drain()
    sim.kill(2)
    sim.tick(0.3)
    sim.drain()
    assert last(sim.ranks[0], m.Abort).kind == "rank_died"
    assert count(sim.ranks[0], m.Abort) == 1


# -- cells ------------------------------------------------------------------------------------------------------------


def test_a_cell_that_ended_without_a_collective() -> None:
    sim = simulate(3, tracked=True)
    submit(sim, "loss", 0, 1)
    sim.ranks[2].say(m.CellEnd("cell"))
    sim.drain()
    abort = last(sim.ranks[0], m.Abort)
    assert (abort.kind, abort.ranks) == ("cell_ended", (2,))
    assert abort.text == "rank 2 finished its cell without it"


def test_a_cell_that_failed() -> None:
    sim = simulate(3, tracked=True)
    sim.ranks[1].say(m.CellEnd("cell", "ValueError: no data"))
    sim.drain()
    assert count(sim.ranks[0], m.Abort) == 0
    submit(sim, "loss", 0)
    abort = last(sim.ranks[0], m.Abort)
    assert (abort.kind, abort.ranks, abort.text) == (
        "cell_failed",
        (1,),
        "rank 1 failed: ValueError: no data",
    )


def test_a_rank_without_a_cell_is_not_blamed_for_an_old_failure() -> None:
    sim = simulate(2, tracked=True)
    for rank in (0, 1):
        sim.ranks[rank].say(m.CellEnd("cell", "ValueError: old"))
    sim.drain()
    start_cell(sim, "next", [0])
    submit(sim, "x", 0)
    abort = last(sim.ranks[0], m.Abort)
    assert (abort.kind, abort.text) == ("cell_ended", "rank 1 runs no cell")


def test_a_cell_that_is_on_its_way_counts() -> None:
    sim = simulate(2, tracked=True)
    for rank in (0, 1):
        sim.ranks[rank].say(m.CellEnd("cell"))
    sim.drain()
    sim.client_says(m.CellStarted("next", (0, 1)))
    submit(sim, "x", 0)  # rank 1 has not begun yet
    assert count(sim.ranks[0], m.Abort) == 0
    submit(sim, "x", 1)
    assert count(sim.ranks[0], m.Execute) == 1


def test_a_verdict_dies_with_the_cell_that_owes_it() -> None:
    sim = simulate(3, tracked=True)
    submit(sim, "x", 0, shape=(1,))
    submit(sim, "x", 1, shape=(2,))
    for rank in range(3):
        sim.ranks[rank].say(m.CellEnd("cell"))
    sim.drain()
    start_cell(sim, "next", [0, 1, 2])
    submit(sim, "x", 0, 1, 2)
    assert count(sim.ranks[2], m.Reject) == 0
    assert count(sim.ranks[2], m.Execute) == 1


def test_a_newcomer_without_a_cell_does_not_break_a_running_one() -> None:
    sim = simulate(2, tracked=True)
    sim.kill(1)
    sim.drain()
    newcomer = sim.connect(1, tracked=True)
    submit(sim, "x", 0)
    assert count(sim.ranks[0], m.Execute) == 1
    sim.ranks[0].say(m.CellEnd("cell"))
    sim.drain()
    assert [member.rank for member in last(newcomer, m.Configure).members] == [0, 1]


def test_a_newcomer_with_a_cell_joins_at_once() -> None:
    sim = simulate(2, tracked=True)
    sim.kill(1)
    sim.drain()
    newcomer = sim.connect(1, tracked=True)
    sim.client_says(m.CellStarted("elastic", (1,)))
    sim.drain()
    assert last(newcomer, m.Configure).generation == 3


def test_a_cell_of_one_that_has_just_died_is_not_its_successors() -> None:
    sim = simulate(2, tracked=True)
    sim.kill(1)
    sim.client_says(m.Expect((0, 1)))
    sim.client_says(m.CellStarted("next", (0, 1)))
    for cell in ("cell", "next"):
        sim.ranks[0].say(m.CellEnd(cell))
    sim.drain()
    sim.connect(1, tracked=True)
    sim.drain()
    start_cell(sim, "another", [0])
    submit(sim, "x", 0)
    assert last(sim.ranks[0], m.Abort).kind == "cell_ended"


# -- deadlocks and stalls ---------------------------------------------------------------------------------------------


def blocked(sim: Simulation, rank: int, process_set: int = 0) -> None:
    view = sim.ranks[rank].sets[process_set]
    sim.ranks[rank].say(m.Blocked(process_set, view.generation, view.pending[0].local, 0.5))
    sim.drain()


def test_ranks_that_wait_for_each_other_are_told() -> None:
    sim = simulate(3)
    submit(sim, "a", 0, 1)
    submit(sim, "b", 2)
    blocked(sim, 0)
    blocked(sim, 1)
    assert count(sim.ranks[0], m.Abort) == 0
    blocked(sim, 2)
    abort = last(sim.ranks[0], m.Abort)
    assert (abort.kind, abort.ranks) == ("deadlock", (0, 1, 2))
    for where in (
        "rank 0 in allreduce `a` (line 0)",
        "rank 1 in allreduce `a` (line 1)",
        "rank 2 in allreduce `b`",
    ):
        assert where in abort.text


def test_waiting_for_a_rank_that_still_works_is_no_deadlock() -> None:
    sim = simulate(2)
    submit(sim, "a", 0)
    blocked(sim, 0)
    submit(sim, "b", 1)
    assert count(sim.ranks[0], m.Abort) == 0
    submit(sim, "a", 1)
    assert count(sim.ranks[0], m.Execute) == 1


def test_a_wait_that_is_over_does_not_count() -> None:
    sim = simulate(2)
    submit(sim, "a", 0)
    blocked(sim, 0)
    sim.ranks[0].say(m.Blocked(0, 1, -1, 0.0))
    submit(sim, "b", 1)
    blocked(sim, 1)
    assert count(sim.ranks[0], m.Abort) == 0


def test_a_deadlock_across_process_sets() -> None:
    sim = simulate(3)
    submit(sim, "add", 0, 1, 2, kind=OpKind.ADD_PROCESS_SET, shape=(), ranks=(0, 1))
    sim.ranks[0].submit(signature("a"), 1)
    sim.drain()
    blocked(sim, 0, 1)
    submit(sim, "b", 1)
    blocked(sim, 1)
    assert count(sim.ranks[0], m.Abort) == 0  # rank 2 may yet free rank 1, which may free rank 0
    submit(sim, "c", 2)
    blocked(sim, 2)
    assert {(a.process_set, a.kind) for a in sim.ranks[0].received if isinstance(a, m.Abort)} == {
        (0, "deadlock"), (1, "deadlock")
    }  # fmt: skip


def test_an_incomplete_group_that_all_wait_for_is_a_deadlock() -> None:
    sim = simulate(2)
    submit(sim, "x", 0, 1, group="g", group_size=2)
    blocked(sim, 0)
    blocked(sim, 1)
    assert last(sim.ranks[0], m.Abort).kind == "deadlock"


def test_who_waits_behind_a_dispute_is_found_when_it_is_over() -> None:
    sim = simulate(3)
    name = "allreduce.noname"  # of which several may be in flight
    submit(sim, name, 0)
    submit(sim, name, 1, shape=(7,))
    submit(sim, name, 0)
    submit(sim, "b", 1)
    submit(sim, "c", 2)
    blocked(sim, 0)
    for rank in (1, 2):
        view = sim.ranks[rank].sets[0]
        sim.ranks[rank].say(m.Blocked(0, view.generation, view.pending[-1].local, 0.5))
    sim.drain()
    assert count(sim.ranks[0], m.Abort) == 0  # the dispute's verdict may free rank 0
    sim.tick(1)
    sim.drain()
    assert count(sim.ranks[0], m.Reject) == 1
    sim.tick(1)
    sim.drain()
    abort = last(sim.ranks[0], m.Abort)
    assert (abort.kind, abort.ranks) == ("deadlock", (0, 1, 2))


def test_stalls_are_reported_once_per_interval() -> None:
    sim = simulate(2)
    submit(sim, "x", 0)
    times = []
    for _ in range(35):
        sim.tick(1.0)
        times += [round(s.seconds) for s in of_client(sim, m.Stalled)]
        sim.to_client.clear()
    assert times == [10, 20, 30]


def test_no_timer_is_left_when_nothing_waits() -> None:
    sim = simulate(2)
    sim.tick(1.0)
    submit(sim, "x", 0, 1)
    sim.tick(11.0)
    assert sim.state.next_deadline() is None


# -- process sets -----------------------------------------------------------------------------------------------------


def test_a_process_set_is_configured_before_it_is_reported() -> None:
    sim = simulate(3)
    submit(sim, "add", 0, 1, 2, kind=OpKind.ADD_PROCESS_SET, shape=(), ranks=(0, 2))
    kinds = [type(message) for message in sim.ranks[0].received]
    assert kinds.index(m.ProcessSetAdded) > [i for i, k in enumerate(kinds) if k is m.Configure][-1]
    added = last(sim.ranks[1], m.ProcessSetAdded)
    assert (added.process_set, added.ranks) == (1, (0, 2))
    assert 1 not in sim.ranks[1].sets
    sim.ranks[0].submit(signature("x"), 1)
    sim.ranks[2].submit(signature("x"), 1)
    sim.drain()
    assert len(sim.ranks[0].executed[1, 1]) == 1


def test_process_sets_fail_independently() -> None:
    sim = simulate(3)
    submit(sim, "add", 0, 1, 2, kind=OpKind.ADD_PROCESS_SET, shape=(), ranks=(0, 1))
    submit(sim, "w", 0)
    sim.ranks[0].submit(signature("s"), 1)
    sim.ranks[0].say(m.Withdraw(1, 1, "interrupted", ""))
    sim.drain()
    assert sim.ranks[0].sets[0].generation == 1
    assert sim.ranks[0].sets[1].generation == 2
    assert [s.signature.name for s in sim.ranks[0].sets[0].pending] == ["w"]


def test_a_set_without_survivors_is_forgotten() -> None:
    sim = simulate(3)
    submit(sim, "add", 0, 1, 2, kind=OpKind.ADD_PROCESS_SET, shape=(), ranks=(1, 2))
    sim.kill(1)
    assert sim.state.sets.by_id[1].members == (2,)
    sim.kill(2)
    assert set(sim.state.sets.by_id) == {0}


def test_a_set_of_ranks_that_are_not_there_is_refused_on_all() -> None:
    sim = simulate(2)
    submit(sim, "add", 0, 1, kind=OpKind.ADD_PROCESS_SET, shape=(), ranks=(0, 5))
    assert "rank 5 not in the world" in last(sim.ranks[1], m.Decline).reason


def test_removing_a_set_ends_its_collectives() -> None:
    sim = simulate(3)
    submit(sim, "add", 0, 1, 2, kind=OpKind.ADD_PROCESS_SET, shape=(), ranks=(0, 1))
    sim.ranks[0].submit(signature("x"), 1)
    sim.drain()
    submit(sim, "remove", 0, 1, 2, kind=OpKind.REMOVE_PROCESS_SET, shape=(), root=1)
    assert last(sim.ranks[0], m.Abort).process_set == 1
    assert 1 not in sim.ranks[0].sets
    assert set(sim.state.sets.by_id) == {0}
    assert all(s.outcome is not None for s in sim.ranks[0].submissions)
    submit(sim, "remove", 0, 1, 2, kind=OpKind.REMOVE_PROCESS_SET, shape=(), root=1)
    assert "no such process set" in last(sim.ranks[0], m.Decline).reason


# -- resizing ---------------------------------------------------------------------------------------------------------


def test_the_world_grows_when_the_last_newcomer_is_there() -> None:
    sim = simulate(2)
    sim.client_says(m.Expect((0, 1, 2, 3)))
    sim.world(2)
    submit(sim, "x", 0, 1)
    assert last(sim.ranks[0], m.Execute).generation == 1
    sim.world(3)
    assert [member.rank for member in last(sim.ranks[0], m.Configure).members] == [0, 1, 2, 3]
    assert count(sim.ranks[0], m.Abort) == 0


def test_the_world_shrinks_at_once() -> None:
    sim = simulate(3)
    sim.client_says(m.Expect((0, 1)))
    sim.drain()
    assert count(sim.ranks[2], m.Leave) == 1
    assert last(sim.ranks[0], m.Configure).generation == 2
    submit(sim, "x", 0, 1)
    assert count(sim.ranks[0], m.Execute) == 1
    sim.kill(2)
    assert of_client(sim, m.World)[-1].deaths == ()


def test_shrinking_while_a_collective_waits_ends_it() -> None:
    sim = simulate(3)
    submit(sim, "x", 0)
    sim.client_says(m.Expect((0, 1)))
    sim.drain()
    assert last(sim.ranks[0], m.Abort).kind == "membership"


# -- mail, store, events ----------------------------------------------------------------------------------------------


def test_mail_goes_where_it_is_sent() -> None:
    sim = simulate(3)
    sim.client_says(m.Post("t", b"1", (0, 2, 7)))
    sim.ranks[1].say(m.Post("t", b"2"))
    sim.ranks[1].say(m.Post("t", b"3", (0,)))
    sim.drain()
    assert [msg.body for msg in sim.ranks[0].received if isinstance(msg, m.Mail)] == [b"1", b"3"]
    assert last(sim.ranks[2], m.Mail).sender == -1
    assert of_client(sim, m.Mail) == [m.Mail("t", 1, b"2")]


def test_the_store_answers_when_the_value_is_there() -> None:
    sim = simulate(2)
    sim.ranks[0].say(m.StoreGet(0, 1, "k", 5))
    sim.drain()
    assert count(sim.ranks[0], m.StoreValue) == 0
    sim.ranks[1].say(m.StoreSet(0, 1, "k", b"v"))
    sim.ranks[1].say(m.StoreGet(0, 1, "k", 6))
    sim.drain()
    assert last(sim.ranks[0], m.StoreValue) == m.StoreValue(5, b"v")
    assert last(sim.ranks[1], m.StoreValue) == m.StoreValue(6, b"v")


def test_the_store_is_empty_in_a_new_generation() -> None:
    sim = simulate(2)
    sim.ranks[1].say(m.StoreSet(0, 1, "k", b"old"))
    sim.ranks[1].say(m.Withdraw(0, 1, "interrupted", ""))
    sim.drain()
    sim.ranks[0].say(m.StoreGet(0, 2, "k", 5))
    sim.drain()
    assert count(sim.ranks[0], m.StoreValue) == 0


def test_a_late_subscriber_gets_the_history_that_fits() -> None:
    sim = simulate(1, history_bytes=10)
    for number in range(5):
        sim.ranks[0].say(m.Events(bytes([number]) * 4))
    sim.drain()
    sim.client_says(m.Subscribe(True))
    sim.ranks[0].say(m.Events(b"new"))
    sim.drain()
    assert [e.batch for e in of_client(sim, m.RankEvents)] == [b"\3" * 4, b"\4" * 4, b"new"]
    assert sim.state.history.dropped == 4
    sim.client_says(m.Subscribe(False))
    sim.ranks[0].say(m.Events(b"not heard"))
    sim.drain()
    assert len(of_client(sim, m.RankEvents)) == 3


def test_a_lost_client_is_forgotten() -> None:
    sim = simulate(1)
    sim.client_says(m.Subscribe(True))
    sim.handle(PeerLost(CLIENT, "gone"))
    sim.to_client.clear()
    sim.ranks[0].say(m.Events(b"x"))
    sim.ranks[0].say(m.Post("t", b""))
    sim.drain()
    assert sim.to_client == []


@pytest.mark.parametrize("stale", [0, 2, 99])
def test_messages_of_another_generation_have_no_effect(stale: int) -> None:
    sim = simulate(2)
    rank = sim.ranks[0]
    before = count(rank, m.Configure)
    for message in (
        m.Announce(0, stale, ()),
        m.Withdraw(0, stale, "interrupted", ""),
        m.PlaneFailed(0, stale, ""),
        m.Duplicate(0, stale, "x", "", ""),
        m.StoreSet(0, stale, "k", b""),
        m.StoreGet(7, stale, "k", 0),
    ):
        rank.say(message)
    sim.drain()
    sim.tick(1)
    assert count(rank, m.Configure) == before


# -- handlers that fail -----------------------------------------------------------------------------------------------


def fail(*arguments: object) -> None:
    raise ZeroDivisionError("made to fail")


def test_a_rank_whose_message_makes_a_handler_fail_is_lost_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = simulate()
    monkeypatch.setitem(RANK_HANDLERS, m.Ping, fail)
    sim.ranks[2].say(m.Ping(1))
    sim.drain()
    abort = last(sim.ranks[0], m.Abort)
    assert "the coordinator failed to handle: ZeroDivisionError('made to fail')" in abort.text
    assert not sim.state.unsound
    sim.state.validate_state()


def test_a_handler_that_fails_and_leaves_a_broken_state_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = simulate()

    def spoil(*arguments: object) -> None:
        sim.state.blocked.add(99)
        fail()

    monkeypatch.setitem(RANK_HANDLERS, m.Ping, spoil)
    effects = sim.state.handle(Received(sim.ranks[2].peer, m.Ping(1)), sim.now)
    assert CloseConnection(sim.ranks[2].peer) in effects
    assert "AssertionError" in sim.state.unsound
