"""Each decision of the coordinator has a number and a cause, and all its consequences name that number."""

from __future__ import annotations

import pytest

from hvdlab.collectives.coordinator.decision_log import (
    DecisionEntry,
    DecisionKind,
    DecisionLog,
    line_of,
    subject_of,
)
from hvdlab.collectives.coordinator.events import Log, PeerConnected, PeerLost, Received
from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.failover.successor import GENERATIONS
from hvdlab.collectives.protocol import messages as m
from support.simulation.coordinator import CLIENT, Simulation, signature


def simulate(size: int = 3, **options: float) -> Simulation:
    sim = Simulation(CoordinatorOptions(size=size, **options))  # type: ignore[arg-type]  # tests give the right ones
    sim.connect_client()
    sim.world(*range(size))
    return sim


def story(sim: Simulation, last: int = 100, **subject: object) -> tuple[m.Decision, ...]:
    sim.client_says(m.StoryRequest(7, last, **subject))  # type: ignore[arg-type]  # as above
    answer = sim.to_client.pop()
    assert isinstance(answer, m.Story)
    assert answer.ticket == 7
    return answer.decisions


def find(decisions: tuple[m.Decision, ...], kind: DecisionKind) -> m.Decision:
    return [decision for decision in decisions if decision.kind == kind.value][-1]


def received(sim: Simulation, rank: int, kind: type[m.Message]) -> m.Message:
    return [message for message in sim.ranks[rank].received if isinstance(message, kind)][-1]


def log(kept: int = 4) -> DecisionLog:
    return DecisionLog(1000.0, kept=kept)


def test_a_death_explains_the_abort_and_that_the_next_generation() -> None:
    sim = simulate()
    sim.ranks[0].submit(signature("loss"))
    sim.drain()
    sim.kill(2, "its socket broke")
    sim.drain()
    told = story(sim)
    lost, died, aborted, began = told[-4:]
    assert [d.kind for d in (lost, died, aborted, began)] == ["lost connection", "died", "aborted", "began"]
    assert (died.cause, aborted.cause, began.cause) == (lost.number, died.number, aborted.number)
    assert lost.facts == {"reason": "its socket broke"}
    assert (died.ranks, aborted.names, aborted.process_set) == ((2,), ("loss",), 0)
    assert began.ranks == (0, 1)
    abort, configure = received(sim, 0, m.Abort), received(sim, 0, m.Configure)
    assert isinstance(abort, m.Abort)
    assert isinstance(configure, m.Configure)
    assert (abort.decision, configure.decision) == (aborted.number, began.number)


def test_orders_carry_the_number_of_their_generation_and_are_counted_there() -> None:
    sim = simulate()
    before = len(sim.state.log)
    for _ in range(3):
        for rank in sim.ranks.values():
            rank.submit(signature("loss"))
        sim.drain()
    assert len(sim.state.log) == before, "a healthy job writes nothing"
    began = find(story(sim), DecisionKind.BEGAN)
    order = received(sim, 1, m.Execute)
    assert isinstance(order, m.Execute)
    assert order.decision == began.number
    assert began.facts["orders"] == "3"


def test_a_mismatch_has_one_number_also_on_the_rank_that_comes_later() -> None:
    sim = simulate(dispute_grace=0.0)
    sim.ranks[0].submit(signature("loss", shape=(4,)))
    sim.ranks[1].submit(signature("loss", shape=(5,)))
    sim.drain()
    sim.tick(1.0)
    sim.drain()
    sim.ranks[2].submit(signature("loss", shape=(4,)))
    sim.drain()
    rejections = [received(sim, rank, m.Reject) for rank in range(3)]
    rejected = find(story(sim, name="loss"), DecisionKind.REJECTED)
    assert {message.decision for message in rejections if isinstance(message, m.Reject)} == {rejected.number}
    assert "allreduce" in rejected.facts["rank 0"]


def test_a_stall_is_one_decision_however_often_it_is_reported() -> None:
    sim = simulate(stall_seconds=1.0)
    sim.ranks[0].submit(signature("loss"))
    sim.drain()
    sim.tick(1.1)
    sim.tick(1.1)
    reports = [message for message in sim.to_client if isinstance(message, m.Stalled)]
    told = [d for d in story(sim, name="loss") if d.kind == DecisionKind.STALLED]
    assert len(reports) == 2
    assert [d.number for d in told] == [reports[0].decision]
    assert reports[0].decision == reports[1].decision
    assert told[0].ranks == (1, 2)


def test_a_stall_that_ends_the_generation_is_the_cause_of_the_abort() -> None:
    sim = simulate(stall_shutdown=1.0)
    sim.ranks[0].submit(signature("loss"))
    sim.drain()
    sim.tick(1.1)
    told = story(sim)
    assert find(told, DecisionKind.ABORTED).cause == find(told, DecisionKind.STALLED).number


def test_a_resize_and_a_left_rank_are_told() -> None:
    sim = simulate()
    sim.client_says(m.Expect((0, 1)))
    sim.drain()
    told = story(sim)
    resized = find(told, DecisionKind.RESIZED)
    assert resized.ranks == (0, 1)
    assert find(told, DecisionKind.BEGAN).cause == resized.number
    leave = received(sim, 2, m.Leave)
    assert isinstance(leave, m.Leave)
    assert leave.decision == resized.number
    sim.leave(2)
    sim.drain()
    assert find(story(sim, rank=2), DecisionKind.LEFT).ranks == (2,)


def test_a_story_is_about_its_subject_and_has_the_causes() -> None:
    sim = simulate()
    sim.kill(2)
    sim.drain()
    assert [d.kind for d in story(sim, 1, rank=2)][-1] == DecisionKind.ABORTED
    (number,) = {d.number for d in story(sim, rank=2) if d.kind == DecisionKind.DIED}
    assert [d.number for d in story(sim, 1, decision=number)] == [number - 1, number]
    assert story(sim, name="never submitted") == ()
    assert story(sim, 0) == ()
    assert story(sim, -5) == ()


def test_log_lines_name_the_decision() -> None:
    sim = simulate()
    victim = sim.ranks[1]
    effects = sim.state.handle(PeerLost(victim.peer, "end of file"), sim.now)
    (line,) = [effect for effect in effects if isinstance(effect, Log)]
    assert line.decision == find(story(sim), DecisionKind.DIED).number


def test_a_successor_begins_with_the_facts_of_the_resume() -> None:
    sim = Simulation(CoordinatorOptions(size=1, incarnation=2))
    rank = sim.connect(0, incarnation=1)
    sim.handle(Received(rank.peer, m.Resume((m.KnownSet(0, 7, (0,), (1000,)),), (0,), cells=("c",))))
    sim.connect_client()
    told = story(sim)
    resumed, took_over, began = told
    assert resumed.facts == {"process sets": "0 (generation 7)", "cells": "c"}
    assert resumed.number == 2 * GENERATIONS + 1
    assert [d.kind for d in told] == ["resumed", "took over", "began"]
    assert (took_over.cause, began.cause) == (resumed.number, took_over.number)


def test_a_broken_invariant_tells_the_story_of_its_subject() -> None:
    sim = simulate()
    sim.kill(2)
    sim.drain()
    sim.ranks[1].submit(signature("loss"))
    sim.drain()
    sim.state.membership.deaths[0] = m.Death(0, 1, 0.0, "made up")
    with pytest.raises(AssertionError) as raised:
        sim.state.validate_state()
    notes = raised.value.__notes__
    assert notes
    assert all(note.startswith("decision ") for note in notes)
    del sim.state.membership.deaths[0]
    sim.state.sets.world.negotiation.rounds["other"] = sim.state.sets.world.negotiation.rounds["loss"]
    with pytest.raises(AssertionError) as raised:
        sim.state.validate_state()
    assert raised.value.subject.name == "other"  # type: ignore[attr-defined]  # InvariantOf adds it
    assert raised.value.subject.process_set == 0  # type: ignore[attr-defined]  # as above


def test_an_event_gets_an_entry_with_its_first_decision_alone() -> None:
    decisions = log()
    event = PeerLost(3, "end of file")
    decisions.handling(event, None)
    assert len(decisions) == 0
    assert decisions.add(DecisionEntry(DecisionKind.DIED, ranks=(1,))) == 2
    assert decisions.add(DecisionEntry(DecisionKind.ABORTED, process_set=0)) == 3
    told = decisions.story(m.StoryRequest(0, 9))
    assert [d.cause for d in told] == [0, 1, 1]


def test_the_log_is_bounded_and_so_are_its_texts() -> None:
    decisions = log()
    first = decisions.add(
        DecisionEntry(DecisionKind.DIED, facts={"reason": "x" * 5000}, names=["y" * 5000] * 50)
    )
    told = decisions.story(m.StoryRequest(0, 9))
    assert len(line_of(told[0])) < 4000
    for _ in range(9):
        decisions.add(DecisionEntry(DecisionKind.ABORTED, cause=first))
    assert (len(decisions), decisions.dropped) == (4, 6)
    decisions.amend(first, {"orders": "1"})  # it has made room for others
    decisions.amend(10, {"orders": "1"})
    told = decisions.story(m.StoryRequest(0, 9))
    assert [d.number for d in told] == [7, 8, 9, 10]
    assert [d.facts for d in told] == [{}, {}, {}, {"orders": "1"}]
    assert told[0].when == 1000.0


def test_entries_in_words() -> None:
    entry = m.Decision(18, 0.0, "aborted", 17, 0, 5, ("loss", "w"), (0, 1, 2), {"cause": "rank_died"})
    assert subject_of(entry) == "process set 0, generation 5, `loss`, `w`, ranks 0-2"
    assert line_of(entry) == f"18 aborted {subject_of(entry)}; cause: rank_died (caused by 17)"


def test_only_a_client_may_ask() -> None:
    sim = simulate()
    sim.handle(PeerConnected(CLIENT + 1, m.Hello(m.PROTOCOL_VERSION, "", "observer")))
    sim.handle(Received(CLIENT + 1, m.StoryRequest(1, 5)))
    assert CLIENT + 1 not in sim.state.membership.observers
