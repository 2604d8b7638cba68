"""Messages of one rank to another: rounds of two, of which the others hear nothing, and which end alone."""

from __future__ import annotations

import pytest

from coordinator_simulation import SimulatedRank, Simulation, Submission, signature
from hvdlab.collectives.coordinator.options import CoordinatorOptions
from hvdlab.collectives.coordinator.signatures import describe
from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.protocol import messages as m

RING = ("0>1", "1>2", "2>3", "3>0")


def simulate(*, tracked: bool = True) -> Simulation:
    sim = Simulation(CoordinatorOptions(size=4))
    sim.connect_client()
    sim.world(0, 1, 2, 3, tracked=tracked)
    if tracked:
        sim.client_says(m.CellStarted("cell", (0, 1, 2, 3)))
        for rank in range(4):
            sim.ranks[rank].say(m.CellBegin("cell"))
    sim.drain()
    return sim


def message(source: int, target: int, shape: tuple[int, ...] = (4,)) -> m.Signature:
    return m.Signature(
        int(OpKind.SENDRECV), f"{source}>{target}", 8, 1, shape, root=source, ranks=(source, target)
    )


def executed(rank: SimulatedRank) -> list[str]:
    return [each.name for _, names, _ in rank.executed[0, 1] for each in names]  # type: ignore[attr-defined]


def cancelled(rank: SimulatedRank) -> list[m.Cancelled]:
    return [each for each in rank.received if isinstance(each, m.Cancelled)]


def cancel(sim: Simulation, rank: int, waiting: Submission, later: int = 0, ticket: int = 7) -> None:
    sim.ranks[rank].say(m.Cancel(0, 1, waiting.local, later, ticket, "timeout", "after 1 s", "line"))
    sim.drain()


def test_the_two_execute_a_message_and_the_others_hear_nothing() -> None:
    sim = simulate()
    heard = len(sim.ranks[2].received)
    for rank in (1, 3):
        sim.ranks[rank].submit(message(1, 3))
    sim.drain()
    assert [executed(sim.ranks[rank]) for rank in range(4)] == [[], ["1>3"], [], ["1>3"]]
    assert len(sim.ranks[2].received) == heard


def test_messages_stand_where_they_were_complete_among_what_concerns_all() -> None:
    """All ranks that execute two things execute them in one order, so none waits for another that waits for it."""
    sim = simulate()
    for rank in sim.ranks.values():
        rank.submit(signature("before"))
        for source, target in ((0, 1), (1, 2), (2, 3), (3, 0)):
            if rank.rank in (source, target):
                rank.submit(message(source, target))
        rank.submit(signature("after"))
    sim.drain()
    of_number: dict[int, str] = {}
    for rank in sim.ranks.values():
        done = rank.executed[0, 1]
        numbers = [number for number, _, _ in done]
        assert numbers == sorted(numbers)  # type: ignore[type-var]
        assert {*executed(rank)} == {"before", "after", *(n for n in RING if str(rank.rank) in n)}
        for number, names, _ in done:
            (name,) = {each.name for each in names}  # type: ignore[attr-defined]
            assert of_number.setdefault(number, name) == name  # type: ignore[call-overload]


def test_messages_of_one_name_come_in_order_and_others_overtake_them() -> None:
    sim = simulate()
    first, second = (sim.ranks[0].submit(message(0, 1, (n,))) for n in (1, 2))
    sim.ranks[0].submit(message(0, 2))
    sim.ranks[2].submit(message(0, 2))
    sim.drain()
    assert executed(sim.ranks[0]) == ["0>2"]
    for n in (1, 2):
        sim.ranks[1].submit(message(0, 1, (n,)))
    sim.drain()
    assert first.outcome is not None
    assert second.outcome is not None
    assert executed(sim.ranks[1]) == ["0>1", "0>1"]


def test_the_two_are_told_if_they_disagree_and_nobody_else() -> None:
    sim = simulate()
    sent, received = sim.ranks[0].submit(message(0, 1)), sim.ranks[1].submit(message(0, 1, (5,)))
    sim.drain()
    for end in (sent, received):
        assert isinstance(end.outcome, m.Reject)
        assert {party.request for party in end.outcome.parties} == {
            "sendrecv float32[4] from rank 0 to rank 1", "sendrecv float32[5] from rank 0 to rank 1",
        }  # fmt: skip
    assert not sim.state.sets.world.matcher.debts


def test_a_message_to_a_rank_whose_cell_ends_ends_alone_with_what_is_behind_it() -> None:
    sim = simulate()
    two = [sim.ranks[0].submit(message(0, 1)) for _ in range(2)]
    other = sim.ranks[2].submit(message(3, 2))
    sim.drain()
    sim.ranks[1].say(m.CellEnd("cell"))
    sim.drain()
    told = cancelled(sim.ranks[0])
    assert [(each.kind, each.ranks, each.pending.missing) for each in told] == [
        ("cell_ended", (1,), (1,))
    ] * 2
    assert [end.outcome for end in two] == told
    sim.ranks[3].submit(message(3, 2))
    sim.drain()
    assert isinstance(other.outcome, m.Execute), "the epoch did not go on"
    # One that comes later is in vain as well.
    sim.ranks[0].submit(message(1, 0))
    sim.drain()
    assert len(cancelled(sim.ranks[0])) == 3


def test_one_that_is_given_up_ends_alone_and_the_next_takes_its_place() -> None:
    sim = simulate()
    first, second = (sim.ranks[1].submit(message(0, 1)) for _ in range(2))
    sim.drain()
    cancel(sim, 1, first, later=1, ticket=3)
    (told,) = cancelled(sim.ranks[1])
    assert (told.ticket, told.kind, told.text, told.pending.missing) == (3, "timeout", "after 1 s", (0,))
    sim.ranks[1].sets[0].pending.remove(first)
    sim.ranks[0].submit(message(0, 1))
    sim.drain()
    assert isinstance(second.outcome, m.Execute)
    assert not sim.state.sets.world.matcher.pending


def test_the_last_of_several_is_given_up_from_behind() -> None:
    sim = simulate()
    sim.ranks[1].submit(message(0, 1))
    last = sim.ranks[1].submit(message(0, 1))
    sim.drain()
    cancel(sim, 1, last)
    sim.ranks[1].sets[0].pending.remove(last)
    for _ in range(2):
        sim.ranks[0].submit(message(0, 1))
    sim.drain()
    assert executed(sim.ranks[1]) == ["0>1"]
    assert sim.state.sets.world.matcher.pending, "the second message has no one to take it"


def test_one_that_was_ordered_meanwhile_ends_with_its_epoch() -> None:
    sim = simulate()
    sent = sim.ranks[0].submit(message(0, 1))
    sim.ranks[1].submit(message(0, 1))
    sim.drain()
    cancel(sim, 0, sent)
    assert cancelled(sim.ranks[0]) == []
    (abort,) = [each for each in sim.ranks[2].received if isinstance(each, m.Abort)]
    assert (abort.kind, abort.text) == ("timeout", "after 1 s")


def test_two_that_both_receive_from_each_other_are_in_a_deadlock() -> None:
    sim = simulate()
    for rank, signed in ((0, message(1, 0)), (1, message(0, 1))):
        waiting = sim.ranks[rank].submit(signed)
        sim.drain()
        sim.ranks[rank].say(m.Blocked(0, 1, waiting.local, 1.0))
    sim.drain()
    sim.tick(1.0)
    (abort,) = [each for each in sim.ranks[0].received if isinstance(each, m.Abort)]
    assert abort.kind == "deadlock"
    assert "rank 0 in sendrecv" in abort.text


def test_a_rank_that_has_joined_takes_no_part_in_messages() -> None:
    sim = simulate(tracked=False)
    sim.ranks[1].submit(signature("join.noname", OpKind.JOIN, shape=()))
    sent = sim.ranks[0].submit(message(0, 1))
    sim.drain()
    assert isinstance(sent.outcome, m.Decline)
    assert sent.outcome.joined == (1,)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_death_ends_it(dead: int) -> None:
    sim = simulate()
    waiting = sim.ranks[1 - dead].submit(message(0, 1))
    sim.drain()
    sim.kill(dead)
    sim.drain()
    assert isinstance(waiting.outcome, m.Abort)
    assert waiting.outcome.kind == "rank_died"


def test_it_is_described_by_its_ranks() -> None:
    assert describe(message(3, 1)) == "sendrecv float32[4] from rank 3 to rank 1"
