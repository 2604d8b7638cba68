"""Ranks behind relays, which the coordinator counts as one as long as they agree: all peers get what they got with a connection each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator_simulation import SimulatedRank, Simulation, Submission, signature
from effort import examples
from hvdlab.collectives.coordinator.events import (
    CloseConnection,
    Effect,
    Event,
    PeerConnected,
    Received,
    ReceivedTogether,
    Send,
    SendConfigure,
)
from hvdlab.collectives.coordinator.options import CoordinatorOptions
from hvdlab.collectives.coordinator.pending import PendingRounds
from hvdlab.collectives.coordinator.process_sets import OPEN
from hvdlab.collectives.coordinator.state import CoordinatorState
from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.protocol import messages as m


def each_alone(events: Iterable[Event]) -> Iterable[Event]:
    """The same events, with a connection for each rank."""
    for event in events:
        if isinstance(event, ReceivedTogether):
            yield from (Received(peer, event.message) for peer in event.peers)
        else:
            yield PeerConnected(event.peer, event.hello) if isinstance(event, PeerConnected) else event


def by_peer(effects: Iterable[Effect]) -> dict[int, list[object]]:
    """What each peer gets, in order; what is logged is under -1."""
    told: dict[int, list[object]] = {}
    for effect in effects:
        if isinstance(effect, Send | SendConfigure):
            for peer in effect.peers:
                told.setdefault(peer, []).append(effect.message)
        elif isinstance(effect, CloseConnection):
            told.setdefault(effect.peer, []).append("closed")
        else:
            told.setdefault(-1, []).append(effect)
    return told


def rounds_of(matcher: PendingRounds) -> list[tuple[object, ...]]:
    """The rounds of a matcher that are not over, rank by rank."""
    held = [current for rounds in matcher.held.values() for current in rounds]
    return [
        (
            current.info.signature,
            {rank: (head.local, head.site) for rank, head in sorted(matcher.heads_of(current).items())},
            current.extras,
            current.payloads,
            {rank: len(queue) for rank, queue in sorted((current.behind or {}).items())},
            (current.since, current.reported, current.disputed, current.priority, current.absent),
        )
        for current in [*matcher.rounds.values(), *held, *matcher.schedule]
    ]


class Twins(Simulation):
    """A coordinator with ranks behind relays, and one that sees the same from a connection each: both say the same to every peer.

    Attributes:
        as_one: How many announcements were taken in for a whole bloc.
    """

    def __init__(self, options: CoordinatorOptions, relays: dict[int, int]) -> None:
        super().__init__(options)
        self.relays = relays
        self.twin = CoordinatorState(options)
        self.as_one = 0

    def react(self, events: Sequence[Event]) -> list[Effect]:
        effects = self.state.handle_all(events, self.now)
        expected = by_peer(self.twin.handle_all(each_alone(events), self.now))
        assert by_peer(effects) == expected
        assert self.state.next_deadline() == self.twin.next_deadline()
        assert [rounds_of(ps.matcher) for ps in self.state.sets] == [
            rounds_of(ps.matcher) for ps in self.twin.sets
        ]
        self.as_one += sum(isinstance(event, ReceivedTogether) and self._is_whole(event) for event in events)
        return effects

    def _is_whole(self, event: ReceivedTogether) -> bool:
        ranks = {self.state.by_peer[peer].rank for peer in event.peers if peer in self.state.by_peer}
        ps = self.state.sets.by_id.get(event.message.process_set)
        return ps is not None and any(ranks == {*bloc} for bloc in ps.matcher.blocs.values())

    def deliver_together(self, ranks: Iterable[SimulatedRank]) -> bool:
        """Have the relay send on the next message of these ranks: as one where it is an equal announcement."""
        waiting = [rank for rank in ranks if rank.outgoing]
        if not waiting:
            return False
        said = waiting[0].outgoing[0]
        alike = [rank for rank in waiting if rank.outgoing[0] == said]
        if len(alike) == 1 or not isinstance(said, m.Announce):
            self.deliver_from(waiting[0])
            return True
        for rank in alike:
            rank.outgoing.popleft()
        self.handle(ReceivedTogether(tuple([rank.peer for rank in alike]), said))
        return True


PLAIN = [
    signature("a"),
    signature("b"),
    signature("b", shape=(5,)),
    signature("loss", OpKind.BROADCAST, root=0),
    signature("all", OpKind.ALLGATHER),
    signature("allreduce.noname"),
    signature("barrier.noname", OpKind.BARRIER, shape=()),
]
JOIN = signature("join.noname", OpKind.JOIN, shape=())
GROUP = [signature(f"g.{number}", group="g", group_size=3) for number in range(3)]


class Play:
    """Ranks behind relays that do anything in any order, mostly alike.

    Args:
        relays: Of each rank; 0 for one with a connection of its own.
        seed: What is left to chance.
    """

    def __init__(self, relays: Sequence[int], seed: int) -> None:
        self.chance = random.Random(seed)
        options = CoordinatorOptions(
            size=len(relays),
            stall_seconds=2.0,
            stall_shutdown=self.chance.choice((0.0, 5.0)),
            flush_delay=self.chance.choice((0.0, 0.0, 0.3)),
            scheduling_credit=self.chance.choice((0, 16, 16)),
        )
        self.sim = Twins(options, dict(enumerate(relays)))
        self.sim.connect_client()
        self.sim.world(*range(len(relays)))
        self.sets = 0

    def run(self, steps: int) -> None:
        often = [self.step_alike] * 6 + [self.deliver] * 8 + [self.hear] * 6
        seldom = [self.alone, self.tick, self.kill, self.leave, self.come, self.say, self.join_set]
        for _ in range(steps):
            self.chance.choice(often if self.chance.random() < 0.93 else seldom)()
        self.sim.drain()
        self.sim.check_order()

    def _some(self, ranks: Iterable[SimulatedRank]) -> SimulatedRank | None:
        found = list(ranks)
        return self.chance.choice(found) if found else None

    def _behind(self, relay: int) -> list[SimulatedRank]:
        return [rank for rank in self.sim.ranks.values() if relay and self.sim.relays[rank.rank] == relay]

    def _program(self) -> list[tuple[m.Signature, int | None]]:
        draw = self.chance.random()
        if draw < 0.15:
            part = self.chance.choice((GROUP, GROUP[:1], GROUP[1:]))
            return [(each, self.chance.choice((None, 3))) for each in part]
        if draw < 0.2:
            return [(JOIN, None)]
        drawn = self.chance.sample(PLAIN, self.chance.choice((1, 1, 2, 3)))
        return [
            (each, self.chance.choice((None, None, 1, 5)) if each.kind == OpKind.ALLREDUCE else None)
            for each in drawn
        ]

    def _submit(self, rank: SimulatedRank, program: Sequence[tuple[m.Signature, int | None]]) -> None:
        ids = [id for id, view in rank.sets.items() if rank.rank in view.ranks]
        if rank.left or not ids:
            return
        id = 0 if self.chance.random() < 0.6 else max(ids)
        if id not in rank.sets:
            return
        names = [s.name for s, _ in program if "noname" not in s.name]
        joined = any(s.signature.kind == OpKind.JOIN for s in rank.sets[id].pending)
        if joined or len({*names}) < len(names) or any(rank.in_flight(name, id) for name in names):
            return
        extras = {OpKind.ALLGATHER: (self.gathered,)}
        new = [Submission(s, extras.get(OpKind(s.kind), ()), priority=priority) for s, priority in program]
        rank.submit_all(new, id)

    # -- what may happen ------------------------------------------------------------------------------------------

    def step_alike(self) -> None:
        """All ranks, or those of one relay, run the same lines."""
        program, self.gathered = self._program(), self.chance.randint(1, 2)
        ranks = list(self.sim.ranks.values())
        if self.chance.random() < 0.3:
            ranks = self._behind(self.chance.choice([*self.sim.relays.values()])) or ranks
        choice = self.chance.getstate()
        for rank in ranks:
            self.chance.setstate(choice)  # alike
            self._submit(rank, program)

    def alone(self) -> None:
        """One rank does something by itself."""
        self.gathered = self.chance.randint(1, 3)
        if (rank := self._some(self.sim.ranks.values())) is not None:
            self._submit(rank, self._program())

    def deliver(self) -> None:
        """A message of some rank, or of several behind a relay, arrives."""
        rank = self._some(rank for rank in self.sim.ranks.values() if rank.outgoing)
        if rank is None:
            return
        together = self._behind(self.sim.relays[rank.rank])
        if together and self.chance.random() < 0.95:
            self.sim.deliver_together(together)
        else:
            self.sim.deliver_from(rank)

    def hear(self) -> None:
        for rank in list(self.sim.ranks.values()):
            while rank.incoming and self.chance.random() < 0.9:
                self.sim.deliver_to(rank)

    def tick(self) -> None:
        self.sim.tick(self.chance.choice((0.2, 0.6, 2.5)))

    def kill(self) -> None:
        if len(self.sim.ranks) > 1 and (rank := self._some(self.sim.ranks.values())) is not None:
            self.sim.kill(rank.rank)

    def leave(self) -> None:
        rank = self._some(rank for rank in self.sim.ranks.values() if not rank.left)
        if rank is not None and self.chance.random() < 0.3:
            self.sim.leave(rank.rank)

    def come(self) -> None:
        absent = [rank for rank in self.sim.relays if rank not in self.sim.ranks]
        if absent:
            self.sim.connect(self.chance.choice(absent))

    def say(self) -> None:
        """A rank says something that concerns what it has submitted."""
        rank = self._some(rank for rank in self.sim.ranks.values() if not rank.left and 0 in rank.sets)
        if rank is None or not rank.sets[0].pending or not rank.sets[0].open:
            return
        epoch, about = rank.sets[0].epoch, self.chance.choice(rank.sets[0].pending)
        name = about.signature.name
        rank.say(
            self.chance.choice(
                (
                    m.Blocked(0, epoch, about.local, 0.5),
                    m.Blocked(0, epoch, -1, 0.0),
                    m.Duplicate(0, epoch, name, "line 1", "line 2"),
                    m.Withdraw(0, epoch, "timeout", "it took too long"),
                )
            )
        )

    def join_set(self) -> None:
        """All ranks add a process set: of all, of those of a relay, or of any."""
        ranks = list(self.sim.ranks)
        if not ranks:
            return
        relay = self.chance.choice([*self.sim.relays.values()])
        some = [rank for rank in ranks if self.sim.relays[rank] == relay]
        chosen = self.chance.choice(
            (ranks, some, self.chance.sample(ranks, self.chance.randint(1, len(ranks))))
        )
        self.sets += 1
        adding = signature(f"add {self.sets}", OpKind.ADD_PROCESS_SET, ranks=tuple(sorted(chosen)))
        for rank in self.sim.ranks.values():
            if not rank.left and 0 in rank.sets:
                rank.submit(adding)


@settings(max_examples=examples(150), deadline=None)
@given(
    relays=st.lists(st.integers(0, 2), min_size=2, max_size=7),
    steps=st.integers(1, 250),
    seed=st.integers(0, 1 << 32),
)
def test_a_bloc_changes_nothing_that_any_peer_sees(relays: list[int], steps: int, seed: int) -> None:
    Play(relays, seed).run(steps)


def world(*relays: int) -> tuple[Twins, list[SimulatedRank]]:
    sim = Twins(CoordinatorOptions(size=len(relays)), dict(enumerate(relays)))
    return sim, sim.world(*range(len(relays)))


def drain(sim: Twins, ranks: Sequence[SimulatedRank]) -> None:
    """Deliver everything, announcements of ranks behind one relay together."""
    relays = {sim.relays[rank.rank] for rank in ranks}
    busy = True
    while busy:
        busy = False
        for relay in relays:
            busy |= sim.deliver_together([r for r in ranks if sim.relays[r.rank] == relay])
        for rank in ranks:
            while rank.incoming:
                sim.deliver_to(rank)
                busy = True


def heads(sim: Twins) -> int:
    """How many heads the coordinator keeps for the rounds that wait."""
    return sum(len(current.heads) for current in sim.state.sets.world.matcher.rounds.values())


def submit(ranks: Iterable[SimulatedRank], *names: str, **fields: object) -> None:
    for rank in ranks:
        rank.submit_all([Submission(signature(name, **fields)) for name in names])  # type: ignore[arg-type]


def blocs(sim: Twins) -> set[tuple[int, ...]]:
    return {*sim.state.sets.world.matcher.blocs.values()}


def test_what_a_bloc_announces_is_one_head_and_one_definition() -> None:
    sim, ranks = world(1, 1, 1, 2, 2, 0)
    submit(ranks[:5], "a", "b")
    drain(sim, ranks[:5])
    assert blocs(sim) == {(0, 1, 2), (3, 4)}
    assert heads(sim) == 4
    assert {info.references for info in sim.state.signatures} == {2}
    submit(ranks[5:], "a", "b")
    drain(sim, ranks)
    assert sim.as_one == 2
    assert all(s.outcome is not None for rank in ranks for s in rank.submissions)


def split_by(act: Callable[[Twins, list[SimulatedRank]], None]) -> set[tuple[int, ...]]:
    """The blocs that are left after ``act``, while all ranks but the last wait for ``a``; then all goes on."""
    sim, ranks = world(1, 1, 1, 2, 2, 0)
    submit(ranks[:5], "a")
    drain(sim, ranks)
    act(sim, ranks)
    drain(sim, [rank for rank in ranks if rank.rank in sim.ranks])
    return blocs(sim)


def test_an_announcement_of_one_rank_takes_its_bloc_apart() -> None:
    assert split_by(lambda sim, ranks: submit(ranks[:1], "b")) == {(3, 4)}


def test_what_waits_behind_the_same_name_takes_its_bloc_apart() -> None:
    def act(sim: Twins, ranks: list[SimulatedRank]) -> None:
        submit(ranks[3:5], "barrier.noname", kind=OpKind.BARRIER, shape=())
        submit(ranks[3:5], "barrier.noname", kind=OpKind.BARRIER, shape=())

    assert split_by(act) == {(0, 1, 2)}


def test_joining_and_verdicts_concern_ranks_singly() -> None:
    assert split_by(lambda sim, ranks: submit(ranks[:3], "join.noname", kind=OpKind.JOIN, shape=())) == set()
    assert split_by(lambda sim, ranks: submit(ranks[5:], "a", shape=(9,))) == set()
    assert split_by(lambda sim, ranks: ranks[4].say(m.Duplicate(0, 1, "a", "", ""))) == set()


def test_what_says_nothing_of_submissions_leaves_blocs_whole() -> None:
    def act(sim: Twins, ranks: list[SimulatedRank]) -> None:
        ranks[0].say(m.Blocked(0, 1, 0, 0.5))
        ranks[1].say(m.Pong(1))
        ranks[3].say(m.Events(b"recorded"))

    assert split_by(act) == {(0, 1, 2), (3, 4)}


def test_an_announcement_of_an_ended_epoch_leaves_blocs_whole() -> None:
    sim, ranks = world(1, 1, 2, 2)
    submit(ranks, "a")
    drain(sim, ranks)
    ranks[2].say(m.Renew(0, 1))
    drain(sim, ranks)
    submit(ranks[:2], "a")
    drain(sim, ranks)
    sim.handle(Received(ranks[0].peer, m.Announce(0, 1, (ranks[0].submissions[0].local,))))
    assert blocs(sim) == {(0, 1)}


def test_a_bloc_is_one_again_once_none_of_its_ranks_waits() -> None:
    sim, ranks = world(1, 1, 2, 2)
    submit(ranks, "a", "b")
    drain(sim, ranks)
    definitions = {info.references for info in sim.state.signatures}
    submit(ranks[:1], "b")  # the other one is late
    submit(ranks[2:], "b")
    drain(sim, ranks)
    assert blocs(sim) == {(2, 3)}
    submit(ranks[:2], "a")
    drain(sim, ranks)
    assert blocs(sim) == {(2, 3)}, "its first rank waits still"
    submit(ranks[1:2], "b")
    submit(ranks[2:], "a")
    drain(sim, ranks)
    submit(ranks, "b")
    drain(sim, ranks)
    assert blocs(sim) == {(0, 1), (2, 3)}
    assert {info.references for info in sim.state.signatures} == definitions, "its table was parted"


def test_a_death_takes_its_bloc_apart_and_the_others_are_one() -> None:
    sim, ranks = world(1, 1, 1, 2, 2, 0)
    submit(ranks[:5], "a")
    drain(sim, ranks)
    sim.kill(1)
    living = [ranks[rank] for rank in (0, 2, 3, 4, 5)]
    drain(sim, living)
    submit(living, "b")
    drain(sim, living)
    assert blocs(sim) == {(0, 2), (3, 4)}


def test_ranks_whose_local_ids_stand_for_different_things_are_no_bloc() -> None:
    sim, ranks = world(1, 1, 0)
    submit(ranks, "a")
    drain(sim, ranks)
    submit(ranks[:1], "own")
    drain(sim, ranks)
    assert blocs(sim) == set()
    submit(ranks[1:], "own")
    drain(sim, ranks)
    ranks[2].say(m.Renew(0, 1))
    drain(sim, ranks)
    submit(ranks[:2], "a")
    drain(sim, ranks)
    assert blocs(sim) == {(0, 1)}, "they have defined the same in the end"
    submit(ranks[:1], "more")
    drain(sim, ranks)
    submit(ranks[2:], "a")
    drain(sim, ranks)
    before = sim.as_one
    submit(ranks[:2], "a")
    drain(sim, ranks)
    assert sim.as_one == before
    assert blocs(sim) == set()


def test_a_process_set_has_the_blocs_that_are_in_it_as_a_whole() -> None:
    sim, ranks = world(1, 1, 2, 2)
    for rank in ranks:
        rank.submit(signature("add", OpKind.ADD_PROCESS_SET, ranks=(0, 1, 2)))
    drain(sim, ranks)
    assert blocs(sim) == {(0, 1), (2, 3)}
    for rank in ranks[:3]:
        rank.submit(signature("a"), 1)
    drain(sim, ranks[:2])
    added = sim.state.sets.by_id[1].matcher
    assert added.blocs == {0: (0, 1)}
    drain(sim, ranks)
    assert blocs(sim) == {(0, 1)}, "rank 2 has defined something alone"


def together(sim: Twins, ranks: Iterable[SimulatedRank], message: m.Announce) -> None:
    sim.handle(ReceivedTogether(tuple([rank.peer for rank in ranks]), message))


def test_what_makes_no_sense_is_a_violation_of_the_first_rank_and_the_end_of_the_epoch() -> None:
    sim, ranks = world(1, 1, 0)
    submit(ranks, "a")
    drain(sim, ranks)
    together(sim, ranks[:2], m.Announce(0, 1, (ranks[0].submissions[0].local, 77)))
    assert sim.state.membership.ranks.keys() == {1, 2}
    assert sim.state.sets.world.epoch == 2


def test_ranks_behind_different_relays_are_no_bloc() -> None:
    sim, ranks = world(1, 2, 0, 0)
    for some in (ranks[:2], ranks[2:]):
        together(sim, some, m.Announce(0, 1, (5,), (m.Definition(5, signature("a"), "line 1"),)))
    assert blocs(sim) == set()


def test_ranks_of_which_some_are_no_members_are_no_bloc_in_that_process_set() -> None:
    sim, ranks = world(1, 1, 0)
    for rank in ranks:
        rank.submit(signature("add", OpKind.ADD_PROCESS_SET, ranks=(0, 2)))
    drain(sim, ranks)
    epoch = ranks[0].sets[1].epoch
    together(sim, ranks[:2], m.Announce(1, epoch, (9,), (m.Definition(9, signature("a"), "line 1"),)))
    assert sim.state.sets.by_id[1].matcher.blocs == {}


def test_ranks_behind_a_relay_are_no_bloc_while_another_has_joined() -> None:
    sim, ranks = world(1, 1, 0)
    submit(ranks[2:], "join.noname", kind=OpKind.JOIN, shape=())
    drain(sim, ranks)
    submit(ranks[:2], "a")
    drain(sim, ranks)
    assert blocs(sim) == set()
    assert all(isinstance(rank.submissions[0].outcome, m.Execute) for rank in ranks[:2])


def test_ranks_behind_a_relay_are_no_bloc_while_one_of_them_owes_a_submission() -> None:
    sim, ranks = world(1, 1, 0)
    submit(ranks, "a")
    drain(sim, ranks)
    submit(ranks[:1], "a")
    submit(ranks[2:], "a", shape=(9,))
    drain(sim, ranks)
    sim.tick(1.0)
    drain(sim, ranks)
    assert isinstance(ranks[0].submissions[-1].outcome, m.Reject)
    submit(ranks[:2], "a")
    drain(sim, ranks)
    assert isinstance(ranks[1].submissions[-1].outcome, m.Reject)
    assert ranks[0].submissions[-1].outcome is None
    assert blocs(sim) == set()


def test_gathered_extents_are_kept_for_each_rank() -> None:
    sim, ranks = world(1, 1, 0)
    for rank, extent in zip(ranks, (4, 4, 7), strict=True):
        rank.submit(signature("all", OpKind.ALLGATHER), extra=(extent,))
    drain(sim, ranks)
    (execute,) = [message for message in ranks[0].received if isinstance(message, m.Execute)]
    assert execute.batches[0].tables == (((4,), (4,), (7,)),)
    assert sim.as_one == 1


def test_the_client_reads_the_ranks_of_a_bloc_in_a_report_of_what_waits() -> None:
    sim = Twins(CoordinatorOptions(size=3, stall_seconds=2.0), {0: 1, 1: 1, 2: 0})
    sim.connect_client()
    ranks = sim.world(0, 1, 2)
    submit(ranks[:2], "a")
    drain(sim, ranks)
    sim.tick(3.0)
    (stalled,) = [message for message in sim.to_client if isinstance(message, m.Stalled)]
    assert (stalled.collective.waited, stalled.collective.missing) == ((0, 1), (2,))
    assert stalled.collective.sites == ("line 1001",) * 2
    assert blocs(sim) == {(0, 1)}


def test_ranks_of_a_bloc_that_wait_for_each_other_are_found() -> None:
    sim, ranks = world(1, 1, 0)
    submit(ranks[:2], "a")
    submit(ranks[2:], "b")
    for rank in ranks:
        rank.say(m.Blocked(0, 1, rank.submissions[0].local, 0.5))
    drain(sim, ranks)
    aborts = [message for message in ranks[2].received if isinstance(message, m.Abort)]
    assert [abort.kind for abort in aborts] == ["deadlock"]
    assert aborts[0].ranks == (0, 1, 2)
    assert sim.as_one == 1
    assert sim.state.sets.world.phase == OPEN


def test_a_round_that_begins_behind_is_not_older_than_what_a_bloc_submits_along() -> None:
    sim, ranks = world(1, 1, 0)
    for _ in range(2):
        submit(ranks[2:], "barrier.noname", kind=OpKind.BARRIER, shape=())
    drain(sim, ranks)
    for rank in ranks[:2]:
        barrier = signature("barrier.noname", OpKind.BARRIER, shape=())
        rank.submit_all([Submission(barrier), Submission(signature("a"))])
    drain(sim, ranks)  # which compares the order of the rounds
    assert [*sim.state.sets.world.matcher.rounds] == ["a", "barrier.noname"]


def test_a_verdict_on_what_a_bloc_submits_leaves_nothing_out_that_it_submits_along() -> None:
    sim, ranks = world(1, 1, 0, 0)
    submit(ranks[2:3], "b")
    submit(ranks[3:], "b", shape=(5,))
    drain(sim, ranks)
    submit(ranks[:2], "b", "a")
    drain(sim, ranks)
    assert all(isinstance(rank.submissions[0].outcome, m.Reject) for rank in ranks)
    submit(ranks[2:], "a")
    drain(sim, ranks)
    assert all(isinstance(rank.submissions[1].outcome, m.Execute) for rank in ranks)


def test_a_name_that_is_submitted_twice_at_once_is_no_blocs() -> None:
    sim, ranks = world(1, 1, 0)
    submit(ranks[:2], "allreduce.noname", "allreduce.noname")
    drain(sim, ranks)
    assert blocs(sim) == set()
    submit(ranks[2:], "allreduce.noname", "allreduce.noname")
    drain(sim, ranks)
    assert all(s.outcome is not None for rank in ranks for s in rank.submissions)
