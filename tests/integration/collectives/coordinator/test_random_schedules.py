"""Random schedules: in any order of events, every submission ends once, and all agree on the order."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.coordinator.process_sets import OPEN
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import OpKind
from support.effort import examples
from support.simulation.coordinator import SimulatedRank, Simulation, signature

ANONYMOUS, JOIN = "allreduce.noname", "join.noname"
priorities = st.sampled_from([None, None, None, 0, 0, 3])
plain_names = st.sampled_from(["a", "b", "c", ANONYMOUS])
extents = st.sampled_from([4, 4, 4, 5])
index = st.integers(0, 1_000_000)


class RandomSchedules(RuleBasedStateMachine):
    """Up to five ranks, several process sets, and everything that can go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = 0

    @initialize(
        size=st.integers(1, 5),
        tracked=st.booleans(),
        threshold=st.sampled_from([0, 32, 1 << 20]),
        delay=st.sampled_from([0.0, 0.0, 0.2]),
    )
    def begin(self, size: int, tracked: bool, threshold: int, delay: float) -> None:
        self.size, self.tracked, self.delay = size, tracked, delay
        #: Planes whose failure a rank has reported.
        self.failed: list[tuple[SimulatedRank, int, int]] = []
        options = CoordinatorOptions(
            size=size, fusion_threshold=threshold, flush_delay=delay, scheduling_credit=20
        )
        self.sim = Simulation(options)
        self.sim.connect_client()
        for rank in range(size):
            self.sim.connect(rank, tracked=tracked)
        self.sim.drain()
        if tracked:
            self.start_cell(tuple(range(size)))

    def drain(self) -> None:
        """Deliver all messages, withheld ones included; a rank that disagrees has waited for the others."""
        self.sim.drain()
        wait = self.delay > 0
        # What was queued behind a rejected request begins a round of its own, in which ranks may disagree as well.
        while wait or any(ps.negotiation.mismatches for ps in self.sim.state.sets):
            self.sim.tick(self.delay + self.sim.state.options.dispute_grace)
            self.sim.drain()
            wait = False

    # -- helpers --------------------------------------------------------------------------------------------------

    def pick(self, number: int) -> SimulatedRank | None:
        ranks = [self.sim.ranks[r] for r in sorted(self.sim.ranks) if not self.sim.ranks[r].left]
        return ranks[number % len(ranks)] if ranks else None

    def start_cell(self, ranks: tuple[int, ...]) -> None:
        self.cells += 1
        cell = f"cell {self.cells}"
        self.sim.client_says(m.CellStarted(cell, ranks))
        for rank in ranks:
            if rank in self.sim.ranks:
                self.sim.ranks[rank].cells.add(cell)
                self.sim.ranks[rank].say(m.CellBegin(cell))

    def target(self, rank: SimulatedRank, number: int) -> int | None:
        ids = sorted(rank.sets)
        return ids[number % len(ids)] if ids else None

    # -- acts of users --------------------------------------------------------------------------------------------

    @rule(who=index, where=index, name=plain_names, extent=extents, priority=priorities)
    def submit(self, who: int, where: int, name: str, extent: int, priority: int | None) -> None:
        rank = self.pick(who)
        if rank is None or (set_id := self.target(rank, where)) is None:
            return
        if name != ANONYMOUS and rank.in_flight(name, set_id):
            rank.say(m.Duplicate(set_id, rank.sets[set_id].generation, name, "first", "second"))
            return
        rank.submit(signature(name, shape=(extent,)), set_id, priority=priority)

    @rule(
        where=index,
        names=st.lists(plain_names, min_size=1, max_size=4),
        skipped=index,
        priority=priorities,
    )
    def submit_everywhere(self, where: int, names: list[str], skipped: int, priority: int | None) -> None:
        """Submit the same on all ranks, sometimes but one: most programs are right most of the time."""
        for rank in list(self.sim.ranks.values()):
            if rank.left or rank.rank == skipped % 8 or (set_id := self.target(rank, where)) is None:
                continue
            for name in names:
                if name == ANONYMOUS or not rank.in_flight(name, set_id):
                    rank.submit(signature(name), set_id, priority=priority)

    @rule(who=index, where=index, rows=st.integers(0, 9))
    def gather(self, who: int, where: int, rows: int) -> None:
        rank = self.pick(who)
        if rank is not None and (set_id := self.target(rank, where)) is not None:
            rank.submit(signature("allgather.noname", OpKind.ALLGATHER, shape=(3,)), set_id, (rows,))

    @rule(who=index, where=index)
    def run_out_of_data(self, who: int, where: int) -> None:
        rank = self.pick(who)
        if rank is not None and (set_id := self.target(rank, where)) is not None:
            rank.submit(signature(JOIN, OpKind.JOIN, shape=()), set_id)

    @rule(where=index)
    def all_run_out_of_data(self, where: int) -> None:
        for rank in list(self.sim.ranks.values()):
            set_id = self.target(rank, where)
            if not rank.left and set_id is not None and not rank.in_flight(JOIN, set_id):
                rank.submit(signature(JOIN, OpKind.JOIN, shape=()), set_id)

    @rule(
        who=index,
        where=index,
        member=st.integers(0, 2),
        extent=extents,
        size=st.sampled_from([3, 3, 3, 3, 2]),
    )
    def submit_of_group(self, who: int, where: int, member: int, extent: int, size: int) -> None:
        rank = self.pick(who)
        if rank is None or (set_id := self.target(rank, where)) is None:
            return
        name = f"group.{member}"
        if not rank.in_flight(name, set_id):
            rank.submit(signature(name, shape=(extent,), group="group", group_size=size), set_id)

    @rule(members=st.sets(st.integers(0, 4), min_size=1))
    def add_process_set(self, members: set[int]) -> None:
        ranks = tuple(sorted(members))
        name = f"add {ranks}"
        for rank in list(self.sim.ranks.values()):
            if not rank.left and 0 in rank.sets and not rank.in_flight(name):
                rank.submit(signature(name, OpKind.ADD_PROCESS_SET, shape=(), ranks=ranks))

    @rule(number=st.integers(1, 6))
    def remove_process_set(self, number: int) -> None:
        name = f"remove {number}"
        for rank in list(self.sim.ranks.values()):
            if not rank.left and 0 in rank.sets and not rank.in_flight(name):
                rank.submit(signature(name, OpKind.REMOVE_PROCESS_SET, shape=(), root=number))

    @rule(who=index, where=index)
    def interrupt(self, who: int, where: int) -> None:
        rank = self.pick(who)
        if rank is not None and (set_id := self.target(rank, where)) is not None and rank.sets[set_id].open:
            rank.say(
                m.Withdraw(set_id, rank.sets[set_id].generation, "interrupted", "interrupted by the user")
            )

    @rule(who=index, where=index)
    def plane_fails(self, who: int, where: int) -> None:
        rank = self.pick(who)
        if rank is not None and (set_id := self.target(rank, where)) is not None:
            rank.say(m.PlaneFailed(set_id, rank.sets[set_id].generation, "no luck"))
            self.failed.append((rank, set_id, rank.sets[set_id].generation))

    @rule(who=index, where=index)
    def renew(self, who: int, where: int) -> None:
        rank = self.pick(who)
        if rank is not None and (set_id := self.target(rank, where)) is not None:
            rank.say(m.Renew(set_id, rank.sets[set_id].generation))

    @rule(who=index, where=index)
    def block(self, who: int, where: int) -> None:
        rank = self.pick(who)
        if rank is None or (set_id := self.target(rank, where)) is None:
            return
        waiting = [s for s in rank.sets[set_id].pending if s.local >= 0]
        local = waiting[0].local if waiting else -1
        rank.say(m.Blocked(set_id, rank.sets[set_id].generation, local, 0.5))

    @precondition(lambda self: self.tracked)
    @rule(who=index, error=st.sampled_from(["", "ValueError: no"]))
    def end_cell(self, who: int, error: str) -> None:
        rank = self.pick(who)
        if rank is not None and rank.cells:
            rank.say(m.CellEnd(rank.cells.pop(), error))

    @precondition(lambda self: self.tracked)
    @rule(chosen=st.sets(st.integers(0, 4), min_size=1))
    def next_cell(self, chosen: set[int]) -> None:
        self.start_cell(tuple(sorted(chosen & self.sim.ranks.keys())))

    # -- coming and going -----------------------------------------------------------------------------------------

    @rule(who=index, reason=st.sampled_from(["", "killed by SIGKILL"]))
    def die(self, who: int, reason: str) -> None:
        rank = self.pick(who)
        if rank is None:
            return
        pid = (
            self.sim.state.membership.ranks[rank.rank].pid
            if rank.rank in self.sim.state.membership.ranks
            else 0
        )
        if reason and pid:
            self.sim.client_says(m.RankLost(rank.rank, pid, reason))
        else:
            self.sim.kill(rank.rank)

    @rule(who=index)
    def leave(self, who: int) -> None:
        rank = self.pick(who)
        if rank is not None:
            self.sim.leave(rank.rank)

    @rule(rank=st.integers(0, 4))
    def join(self, rank: int) -> None:
        expected = self.sim.state.membership.expected or ()
        if rank in expected and rank not in self.sim.ranks:
            self.sim.connect(rank, tracked=self.tracked)

    @rule(size=st.integers(1, 5))
    def resize(self, size: int) -> None:
        self.sim.client_says(m.Expect(tuple(range(size))))
        for rank in list(self.sim.ranks.values()):
            if rank.rank >= size and not rank.left:
                self.sim.leave(rank.rank)

    # -- the network ----------------------------------------------------------------------------------------------

    @rule(choices=st.lists(index, min_size=1, max_size=12))
    def deliver_some(self, choices: list[int]) -> None:
        for choice in choices:
            ranks = [self.sim.ranks[r] for r in sorted(self.sim.ranks)]
            queues = [(r, "in") for r in ranks if r.incoming] + [(r, "out") for r in ranks if r.outgoing]
            if not queues:
                return
            rank, direction = queues[choice % len(queues)]
            (self.sim.deliver_to if direction == "in" else self.sim.deliver_from)(rank)

    @rule(seconds=st.sampled_from([0.1, 0.3, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.sim.tick(seconds)

    @rule()
    def deliver_all(self) -> None:
        self.drain()
        self.check_nothing_waits_in_vain()

    # -- invariants -----------------------------------------------------------------------------------------------

    def check_nothing_waits_in_vain(self) -> None:
        state = self.sim.state
        for ps in state.sets:
            if ps.phase != OPEN:
                continue
            views = {r: self.sim.ranks[r].sets[ps.id] for r in ps.members if r not in ps.gone}
            waiting = {
                r: {s.signature.name: s.signature for s in reversed(v.pending)} for r, v in views.items()
            }
            names = {name for pending in waiting.values() for name in pending}
            joined = {r for r in waiting if JOIN in waiting[r]}
            assert not (names and ps.gone), "a rank has left while others wait"
            for name in names:
                # A rank's submission after it has joined, and after others have executed theirs without it, is another
                # one.
                held = [
                    c
                    for group in ps.negotiation.incomplete_groups.values()
                    for c in group
                    if c.info.name == name
                ]
                late = {r for current in held for r in current.absent}
                heads = [waiting[r][name] for r in waiting if name in waiting[r] and r not in late]
                exempt = joined if name != JOIN else set()
                missing = [r for r in ps.members if name not in waiting.get(r, {}) and r not in exempt]
                if not heads:
                    continue
                assert len(set(heads)) == 1, f"a mismatch of {name} was not told"
                assert missing or heads[0].group, f"{name} was not released"
                assert not any(r in state.cells.idle for r in missing), f"an idle rank is waited for: {name}"

    @invariant()
    def agree_on_order(self) -> None:
        if hasattr(self, "sim"):
            self.sim.check_order()

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        sim = self.sim
        self.drain()
        self.check_nothing_waits_in_vain()
        self.check_failed_planes_were_told()
        for rank in list(sim.ranks.values()):
            while rank.cells:
                rank.say(m.CellEnd(rank.cells.pop()))
        self.drain()
        if self.tracked and not sim.state.cells.idle.symmetric_difference(sim.ranks):
            for rank in sim.ranks.values():
                assert all(s.outcome is not None for s in rank.submissions if 0 in rank.sets), (
                    "still waits, all idle"
                )
        for number in sorted(sim.ranks):
            if not sim.ranks[number].left:
                sim.leave(number)
                self.drain()
                for rank in sim.ranks.values():
                    done = [v for v in rank.sets.values() if v.open and number in v.ranks and v.pending]
                    assert not done, "waits for a rank that has left"
        self.drain()
        sim.tick(1000)
        self.check_empty()
        sim.check_order()

    def check_failed_planes_were_told(self) -> None:
        """Check that operations executed on a plane that failed have ended, in any later state of its generation."""
        self.sim.tick(0.3)
        self.drain()
        for rank, set_id, generation in self.failed:
            if self.sim.ranks.get(rank.rank) is rank and not rank.left and set_id in rank.sets:
                aborts = [a for a in rank.received if isinstance(a, m.Abort) and a.process_set == set_id]
                assert any(a.generation >= generation for a in aborts), (
                    f"the plane of generation {generation} failed, and stays so"
                )

    def check_empty(self) -> None:
        state = self.sim.state
        assert not state.membership.ranks
        assert len(state.signatures) == 0
        assert not state.by_peer
        assert set(state.sets.by_id) == {0}
        assert not state.sets.world.negotiation.pending
        assert not state.sets.world.negotiation.owed
        assert not state.cells.idle


TestRandomSchedules = RandomSchedules.TestCase
TestRandomSchedules.settings = settings(
    max_examples=examples(150),
    report_multiple_bugs=False,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
