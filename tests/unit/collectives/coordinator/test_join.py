"""The coordinator's messages while ranks have joined: no rank waits for them, and they wait for all."""

from __future__ import annotations

from typing import TypeVar

from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import OpKind
from support.simulation.coordinator import SimulatedRank, Simulation, signature

M = TypeVar("M", bound=m.Message)
JOIN = signature("join.noname", OpKind.JOIN, shape=())


def formed(size: int = 3, *, tracked: bool = False, **options: float) -> Simulation:
    sim = Simulation(CoordinatorOptions(size=size, **options))  # type: ignore[arg-type]  # tests give the right ones
    sim.connect_client()
    sim.world(*range(size), tracked=tracked)
    if tracked:
        begin_cell(sim, size)
    sim.to_client.clear()
    return sim


def begin_cell(sim: Simulation, size: int) -> None:
    sim.client_says(m.CellStarted("cell", tuple(range(size))))
    for rank in sim.ranks.values():
        rank.say(m.CellBegin("cell"))
    sim.drain()


def submit(sim: Simulation, name: str, *ranks: int, **fields: object) -> None:
    for rank in ranks:
        sim.ranks[rank].submit(signature(name, **fields))  # type: ignore[arg-type]  # tests give the right ones
    sim.drain()


def join(sim: Simulation, *ranks: int) -> None:
    for rank in ranks:
        sim.ranks[rank].submit(JOIN)
    sim.drain()


def block(sim: Simulation, *ranks: int) -> None:
    for rank in ranks:
        pending = sim.ranks[rank].sets[0].pending[-1]
        sim.ranks[rank].say(m.Blocked(0, pending.generation, pending.local, 0.5))
    sim.drain()


def last(rank: SimulatedRank, kind: type[M]) -> M:
    return [message for message in rank.received if isinstance(message, kind)][-1]


def count(rank: SimulatedRank, kind: type[m.Message]) -> int:
    return sum(isinstance(message, kind) for message in rank.received)


def test_a_rank_that_has_joined_is_told_what_to_do_with_zeros() -> None:
    sim = formed()
    join(sim, 1)
    submit(sim, "x", 0, 2)
    (batch,) = last(sim.ranks[1], m.Execute).batches
    assert batch.locals == (-1,)
    assert batch.zeros == (signature("x"),)
    (batch,) = last(sim.ranks[0], m.Execute).batches
    assert batch.locals[0] >= 0
    assert batch.zeros == ()
    assert last(sim.ranks[0], m.Execute).sequence == last(sim.ranks[1], m.Execute).sequence
    sim.check_order()


def test_what_is_fused_may_be_submitted_by_some_that_have_joined() -> None:
    sim = formed(2)
    sim.ranks[1].submit(signature("b"))
    sim.drain()
    join(sim, 1)
    view = sim.ranks[0]
    for name in "abc":
        view.submit(signature(name))
    # One frame, so that they are fused.
    messages = [view.outgoing.popleft() for _ in range(3)]
    locals = tuple(x.locals[0] for x in messages)  # type: ignore[attr-defined]  # they are announcements
    view.say(m.Announce(0, 1, locals, tuple(d for x in messages for d in x.definitions)))  # type: ignore[attr-defined]
    sim.drain()
    (batch,) = last(sim.ranks[1], m.Execute).batches
    assert [local < 0 for local in batch.locals] == [True, False, True]
    assert [-1 - local for local in batch.locals if local < 0] == [0, 1]
    assert [zeros.name for zeros in batch.zeros] == ["a", "c"]
    sim.check_order()


def test_small_tensors_still_travel_with_the_negotiation() -> None:
    sim = formed()
    join(sim, 1)
    for rank in (0, 2):
        sig = signature("p")
        sim.ranks[rank].submit(sig)
        said = sim.ranks[rank].outgoing.pop()
        assert isinstance(said, m.Announce)
        sim.ranks[rank].say(m.Announce(0, 1, said.locals, said.definitions, (), bytes([rank + 1]) * 16))
    sim.drain()
    (batch,) = last(sim.ranks[1], m.Execute).batches
    assert batch.payloads == (bytes([1]) * 16, bytes(16), bytes([3]) * 16)


def test_all_are_told_who_joined_last_and_it_begins_anew() -> None:
    sim = formed()
    for order in ((2, 0, 1), (0, 1, 2)):
        for rank in order:
            join(sim, rank)
        for rank in range(3):
            assert last(sim.ranks[rank], m.Execute).batches[0].tables == (((order[-1],),) * 3,)
    submit(sim, "x", 0, 1)
    executed = count(sim.ranks[0], m.Execute)
    submit(sim, "x", 2)
    assert count(sim.ranks[0], m.Execute) == executed + 1


def test_what_needs_everyones_data_is_declined_and_the_join_goes_on() -> None:
    sim = formed()
    join(sim, 1)
    submit(sim, "g", 0, 2, kind=OpKind.BROADCAST, root=0)
    for rank in (0, 2):
        told = last(sim.ranks[rank], m.Decline)
        assert told.joined == (1,)
        assert "broadcast `g` is not supported with join: rank 1 has joined" in told.reason
    assert count(sim.ranks[1], m.Decline) == 0
    submit(sim, "add", 0, 2, kind=OpKind.ADD_PROCESS_SET, shape=(), ranks=(0, 2))
    assert "add_process_set" in last(sim.ranks[0], m.Decline).reason
    assert count(sim.ranks[0], m.Abort) == 0
    join(sim, 0, 2)
    assert last(sim.ranks[1], m.Execute).batches[0].tables[0][0] == (2,)


def test_a_joined_rank_is_never_the_one_that_is_missing() -> None:
    sim = formed(stall_seconds=10.0)
    join(sim, 2)
    submit(sim, "x", 0)
    sim.tick(10.5)
    (stalled, of_join) = sorted(
        (x for x in sim.to_client if isinstance(x, m.Stalled)), key=lambda x: x.collective.kind
    )
    assert (stalled.collective.waited, stalled.collective.missing, stalled.collective.joined) == (
        (0,),
        (1,),
        (2,),
    )
    assert of_join.collective.missing == (0, 1)
    assert any("joined ranks 2" in line for line in sim.logged)
    sim.ranks[0].say(m.Withdraw(0, 1, "interrupted", "interrupted"))
    sim.drain()
    reported = {c.name: c for c in last(sim.ranks[0], m.Abort).pending}
    assert reported["x"].missing == (1,)
    assert reported["join.noname"].missing == (0, 1)


def test_a_join_is_not_reported_while_the_others_work() -> None:
    sim = formed(2, stall_seconds=10.0)
    join(sim, 1)
    for _ in range(30):
        sim.tick(1.0)
        submit(sim, "x", 0)
    assert not any(isinstance(x, m.Stalled) for x in sim.to_client)
    for _ in range(11):
        sim.tick(1.0)
    assert [x.collective.name for x in sim.to_client if isinstance(x, m.Stalled)] == ["join.noname"]


def test_waiting_in_join_is_no_deadlock_but_part_of_one() -> None:
    sim = formed()
    join(sim, 2)
    block(sim, 2)
    submit(sim, "x", 0)
    block(sim, 0)
    assert count(sim.ranks[0], m.Abort) == 0
    submit(sim, "x", 1)
    assert count(sim.ranks[0], m.Execute) == 1
    sim.ranks[0].say(m.Blocked(0, 1, -1, 0.0))
    submit(sim, "a", 0)
    block(sim, 0)
    submit(sim, "b", 1)
    block(sim, 1)
    abort = last(sim.ranks[2], m.Abort)
    assert abort.kind == "deadlock"
    assert "rank 0 in allreduce `a` (line 0); rank 1 in allreduce `b` (line 1); rank 2 in join" in abort.text


def test_a_cell_that_ends_without_joining_ends_the_join_of_the_others() -> None:
    for error, kind in (("ValueError: no", "cell_failed"), ("", "cell_ended")):
        sim = formed(tracked=True)
        join(sim, 0, 1)
        sim.ranks[2].say(m.CellEnd("cell", error))
        sim.drain()
        for rank in (0, 1):
            abort = last(sim.ranks[rank], m.Abort)
            assert (abort.kind, abort.ranks) == (kind, (2,))
            assert {(c.name, c.waited, c.missing) for c in abort.pending} == {("join.noname", (0, 1), (2,))}


def test_who_joins_leaves_or_dies_later() -> None:
    for how in ("leave", "kill"):
        sim = formed()
        join(sim, 0)
        getattr(sim, how)(0)  # one that has joined
        sim.drain()
        assert last(sim.ranks[1], m.Abort).ranks == (0,)
        submit(sim, "x", 1, 2)
        assert isinstance(sim.ranks[1].submissions[-1].outcome, m.Execute)
        join(sim, 1)
        getattr(sim, how)(2)
        sim.drain()
        assert last(sim.ranks[1], m.Abort).kind == ("rank_left" if how == "leave" else "rank_died")


def test_an_orderly_change_of_the_world_keeps_the_join() -> None:
    sim = formed(2)
    join(sim, 0)
    sim.client_says(m.Expect((0, 1, 2)))
    sim.world(2)
    assert last(sim.ranks[0], m.Configure).generation == 2
    submit(sim, "x", 1, 2)
    assert last(sim.ranks[0], m.Execute).batches[0].zeros == (signature("x"),)
    join(sim, 2)
    join(sim, 1)
    assert last(sim.ranks[0], m.Execute).batches[0].tables[0][0] == (1,)
    assert count(sim.ranks[0], m.Abort) == 0


def test_a_thousand_ranks_of_which_half_has_joined() -> None:
    sim = Simulation(CoordinatorOptions(size=1000), validate=False)
    sim.world(*range(1000))
    join(sim, *range(500))
    submit(sim, "x", *range(500, 1000))
    assert all(isinstance(sim.ranks[rank].submissions[-1].outcome, m.Execute) for rank in range(500, 1000))
    assert len({id(last(sim.ranks[rank], m.Execute)) for rank in range(500)}) == 1, (
        "encoded once for all of them"
    )
