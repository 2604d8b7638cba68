"""Messages of one rank to another: rounds of two, of which the others hear nothing, and which end alone."""

from __future__ import annotations

import msgspec
import pytest

from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.coordinator.signatures import describe
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import OpKind
from support.simulation.coordinator import SimulatedRank, Simulation, Submission, signature

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
    return [each.name for batch in rank.executed[0, 1] for each in batch.signatures]


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
        assert numbers == sorted(numbers)
        assert {*executed(rank)} == {"before", "after", *(n for n in RING if str(rank.rank) in n)}
        for number, names, _ in done:
            (name,) = {each.name for each in names}
            assert of_number.setdefault(number, name) == name


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
    assert not sim.state.sets.world.negotiation.owed


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
    assert isinstance(other.outcome, m.Execute), "the generation did not go on"
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
    assert not sim.state.sets.world.negotiation.pending


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
    assert sim.state.sets.world.negotiation.pending, "the second message has no one to take it"


def test_one_that_was_ordered_meanwhile_ends_with_its_generation() -> None:
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


# -- receives from any rank -------------------------------------------------------------------------------------------


def on_channel(source: int, target: int, shape: tuple[int, ...] = (4,)) -> m.Signature:
    return msgspec.structs.replace(message(source, target, shape), channel="c")


def from_any(target: int, shape: tuple[int, ...] = (4,)) -> m.Signature:
    return m.Signature(int(OpKind.SENDRECV), f"any>{target}", 8, 1, shape, ranks=(target,), channel="c")


def sources(rank: SimulatedRank) -> list[int]:
    """Return the ranks from which this one has received, as its orders say."""
    return [tables[0][0][0] for _, (each,), tables in rank.executed[0, 1] if each.name.startswith("any")]


@pytest.mark.parametrize("first", ["receive", "send"])
def test_a_receive_from_any_rank_gets_what_one_sends_and_the_others_hear_nothing(first: str) -> None:
    sim = simulate()
    heard = len(sim.ranks[0].received)
    for what in ("receive", "send") if first == "receive" else ("send", "receive"):
        sim.ranks[1].submit(from_any(1)) if what == "receive" else sim.ranks[3].submit(on_channel(3, 1))
        sim.drain()
    assert [executed(sim.ranks[rank]) for rank in range(4)] == [[], ["any>1"], [], ["3>1"]]
    assert sources(sim.ranks[1]) == [3]
    assert len(sim.ranks[0].received) == heard
    assert not sim.state.sets.world.negotiation.pending


def test_of_several_messages_the_oldest_is_received_and_those_of_a_rank_in_their_order() -> None:
    sim = simulate()
    for source in (2, 0, 2, 3):
        sim.ranks[source].submit(on_channel(source, 1))
        sim.drain()
        sim.tick(1.0)
    sim.ranks[0].submit(on_channel(0, 3))  # to another rank
    sim.ranks[3].submit(message(3, 1))  # on no channel
    sim.drain()
    for _ in range(4):
        sim.ranks[1].submit(from_any(1))
        sim.drain()
        sim.tick(1.0)
    assert sources(sim.ranks[1]) == [2, 0, 3, 2], (
        "the second one of rank 2 became the oldest there when the first was received"
    )
    assert sim.ranks[1].submissions[-1].outcome is not None


def test_receives_from_any_rank_get_messages_in_their_order() -> None:
    sim = simulate()
    received = [sim.ranks[1].submit(from_any(1)) for _ in range(3)]
    sim.drain()
    for count, source in enumerate((3, 0, 3), 1):
        sim.ranks[source].submit(on_channel(source, 1))
        sim.drain()
        assert [each.outcome is not None for each in received] == [n < count for n in range(3)]
    assert sources(sim.ranks[1]) == [3, 0, 3]


def test_a_receive_that_names_the_sender_gets_its_message_before_one_from_any_rank() -> None:
    sim = simulate()
    whichever, named = sim.ranks[1].submit(from_any(1)), sim.ranks[1].submit(on_channel(2, 1))
    sim.drain()
    sim.ranks[2].submit(on_channel(2, 1))
    sim.drain()
    assert named.outcome is not None
    assert whichever.outcome is None
    sim.ranks[2].submit(on_channel(2, 1))
    sim.drain()
    assert whichever.outcome is not None


def test_the_two_of_a_receive_from_any_rank_are_told_if_they_disagree() -> None:
    sim = simulate()
    received, sent = sim.ranks[1].submit(from_any(1)), sim.ranks[0].submit(on_channel(0, 1, (5,)))
    sim.drain()
    for end in (received, sent):
        assert isinstance(end.outcome, m.Reject)
        assert {party.request for party in end.outcome.parties} == {
            "sendrecv float32[4] from any rank to rank 1", "sendrecv float32[5] from rank 0 to rank 1",
        }  # fmt: skip
    sim.ranks[1].submit(from_any(1))
    sim.ranks[0].submit(on_channel(0, 1))
    sim.drain()
    assert executed(sim.ranks[1]) == ["any>1"]
    assert not sim.state.sets.world.negotiation.owed


def test_what_waits_behind_a_message_that_ranks_disagree_about_is_received() -> None:
    sim = simulate()
    for _ in range(2):
        sim.ranks[2].submit(on_channel(2, 1))
    sim.ranks[3].submit(msgspec.structs.replace(on_channel(3, 1), name="2>1"))
    sim.drain()
    received = sim.ranks[1].submit(from_any(1))
    sim.drain()
    assert received.outcome is None
    sim.tick(sim.state.options.dispute_grace)
    sim.drain()
    assert isinstance(received.outcome, m.Execute)
    assert executed(sim.ranks[2]) == ["2>1"]


def test_a_receive_from_any_rank_ends_when_no_rank_is_left_that_may_send() -> None:
    sim = simulate()
    two = [sim.ranks[1].submit(from_any(1)) for _ in range(2)]
    sim.drain()
    for rank in (0, 2):
        sim.ranks[rank].say(m.CellEnd("cell"))
        sim.drain()
    assert cancelled(sim.ranks[1]) == [], "rank 3 may send"
    sim.ranks[3].submit(on_channel(3, 1))
    sim.drain()
    assert two[0].outcome is not None
    sim.ranks[3].say(m.CellEnd("cell"))
    sim.drain()
    (told,) = cancelled(sim.ranks[1])
    assert (told.kind, told.pending.missing) == ("cell_ended", (0, 2, 3))
    assert two[1].outcome is told


def test_a_receive_from_any_rank_that_is_given_up_ends_alone() -> None:
    sim = simulate()
    first, second, third = (sim.ranks[1].submit(from_any(1)) for _ in range(3))
    sim.drain()
    cancel(sim, 1, second, later=1, ticket=3)
    (told,) = cancelled(sim.ranks[1])
    assert (told.ticket, told.pending.missing) == (3, (0, 2, 3))
    sim.ranks[1].sets[0].pending.remove(second)
    for _ in range(2):
        sim.ranks[0].submit(on_channel(0, 1))
    sim.drain()
    assert isinstance(first.outcome, m.Execute)
    assert isinstance(third.outcome, m.Execute)
    assert not sim.state.sets.world.negotiation.pending


def test_ranks_that_all_receive_from_any_rank_are_in_a_deadlock_and_not_before() -> None:
    sim = simulate()
    for rank in range(4):
        waiting = sim.ranks[rank].submit(from_any(rank))
        sim.drain()
        sim.ranks[rank].say(m.Blocked(0, 1, waiting.local, 1.0))
        sim.drain()
        if rank < 3:
            sim.tick(1.0)
            assert waiting.outcome is None
    sim.tick(1.0)
    (abort,) = [each for each in sim.ranks[0].received if isinstance(each, m.Abort)]
    assert abort.kind == "deadlock"
    assert abort.text.startswith(
        "deadlock, all wait for each other: rank 0 in recv from any rank `c` (line 0); rank 1 in recv"
    )


def test_when_all_others_have_joined_nothing_is_received_from_any_rank() -> None:
    sim = simulate(tracked=False)
    received = sim.ranks[1].submit(from_any(1))
    for rank in (0, 2, 3):
        assert received.outcome is None
        sim.ranks[rank].submit(signature("join.noname", OpKind.JOIN, shape=()))
        sim.drain()
    assert isinstance(received.outcome, m.Decline)
    assert received.outcome.joined == (0, 2, 3)


def test_a_death_ends_a_receive_from_any_rank() -> None:
    sim = simulate()
    waiting = sim.ranks[1].submit(from_any(1))
    sim.drain()
    sim.kill(3)
    sim.drain()
    assert isinstance(waiting.outcome, m.Abort)
    assert waiting.outcome.kind == "rank_died"


def test_nobody_receives_in_place_of_another_rank() -> None:
    sim = simulate()
    sim.ranks[2].submit(from_any(1))
    sim.drain()
    assert 2 not in sim.state.membership.ranks
    assert any("makes no sense" in line for line in sim.logged)
