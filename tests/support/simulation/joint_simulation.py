"""Ranks' states and the coordinator's, joined by queues that deliver in any interleaving. No process, no clock.

Every connection is a queue for each direction. Messages of one connection stay in order; those of different connections
overtake each other in any way. A rank that comes again is another connection and another state, under the same number;
when the coordinator dies, its ranks and its client look for the successor, each in its own time.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import numpy as np

from hvdlab.collectives.coordinator.events import (
    CloseConnection,
    Event,
    Log,
    PeerConnected,
    PeerLost,
    Received,
    Send,
    SendConfigure,
    Tick,
)
from hvdlab.collectives.coordinator.process import CoordinatorOptions
from hvdlab.collectives.coordinator.state import CoordinatorState
from hvdlab.collectives.engine.entries import (
    ANNOUNCED,
    AbortPlane,
    Effect,
    Fail,
    NewGeneration,
    RunBatch,
    Succeed,
)
from hvdlab.collectives.engine.process_set_view import PostedRequest, fits, needs_plane
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import AbortedError, Cause, CauseKind, HvdlabError
from hvdlab.collectives.planes.base import host_view
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.member_lists import SHORTENED, KnownMembers, SentMembers
from hvdlab.collectives.types import SUM, DType, OpKind
from support.simulation.joint_boards import AtBoard, Boards
from support.simulation.joint_losses import Losses
from support.simulation.joint_planes import Planes
from support.simulation.joint_ranks import Scope, SimEntry, SimRank

CLIENT = 1  # number of the client's connection
_FIRST_PEER = 100  # ranks' connections and processes are numbered from here, apart from the client's
_NOBODY = SimRank.nobody(0)
_PATIENCE = 5.0
"""Seconds ahead that the clock is put forward for what the coordinator has said it waits for."""


class StepWatcher(Protocol):
    """Observer of a simulation's steps, such as one that counts states."""

    def stepped(self, simulation: Simulation) -> None:
        """One event has been played."""


class Simulation:
    """Ranks, a coordinator and, optionally, a client.

    Args:
        size: Number of ranks that are there at the start.
        seed: Of everything that is left to chance.
        local_limit: How many tensors a rank knows by number.
        tracked: Whether ranks' collectives belong to cells.
        options: The coordinator's settings.
        validate: How often (a probability) states are validated after a step.
        lacking: How often a rank does not get the memory of a generation.
        returns: Whether ranks of a pool come back when the others have gone on without them; those that train elastically do.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        *,
        local_limit: int = 4096,
        tracked: bool = False,
        options: CoordinatorOptions | None = None,
        validate: float = 1.0,
        lacking: float = 0.0,
        returns: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.tracked, self._local_limit, self._validate = tracked, local_limit, validate
        self._lacking, self._returns = lacking, returns
        #: The answer to the last Hello, if that was refused.
        self._refused: m.Refused | None = None
        #: Processes that the coordinator has let in again after it had given them up.
        self.returned: set[int] = set()
        self.options = options or CoordinatorOptions(size=size)
        self.coordinator = CoordinatorState(self.options)
        self._members = SentMembers()
        self.ranks: list[SimRank] = []
        self.former: list[SimRank] = []
        self.client: deque[m.Message] = deque()
        self.generations: dict[Scope, tuple[int, ...]] = {}
        self.losses = Losses(self)
        self._newest: dict[int, int] = {}
        self._by_peer: dict[int, SimRank] = {}
        self.by_pid: dict[int, SimRank] = {}
        self.planes = Planes(self.by_pid)
        self.boards = Boards()
        self._peers = _FIRST_PEER
        self._running: dict[str, set[int]] = {}  # processes that may run each cell
        self._told: m.World | None = None  # worlds etc. of which the coordinator has notified the client
        self._moving: list[SimRank] = []
        self._gone = False  # whether some of them may be over
        self._numbers = 0
        self._expected: tuple[int, ...] = ()  # the client's requests
        self._released: dict[int, int] = {}  # ranks that it asks to release, and their processes
        #: Notified after each step.
        self.watcher: StepWatcher | None = None
        #: Called with each world of which the coordinator notifies the client.
        self.client_hears: Callable[[m.World], None] = lambda world: None
        #: Called when the coordinator notifies the client that a rank is back.
        self.client_hears_of_return: Callable[[m.Returned], None] = lambda returned: None
        self._carry_out(PeerConnected(CLIENT, m.Hello(m.PROTOCOL_VERSION, "", "client")))
        if self.options.size is None and size:
            self._carry_out(Received(CLIENT, m.Expect(tuple(range(size)))))
        for rank in range(size):
            self.connect(rank)
        self.run()

    # -- processes ------------------------------------------------------------------------------------------------

    def connect(
        self, rank: int, *, pid: int = 0, hears: Callable[[m.Message], None] | None = None
    ) -> SimRank | None:
        """Connect a new process for ``rank``; ``None`` if the coordinator refuses it.

        Args:
            rank: Its number; there need not be one for each lower number.
            pid: Its process, which no other has; 0 for the next one.
            hears: Called with each message of the coordinator's, once the rank's state has it.
        """
        pid = pid or _FIRST_PEER + len(self.by_pid)
        me = SimRank(rank, pid, RankState(rank, self._local_limit), hears=hears)
        self.by_pid[me.pid] = me
        self._moving.append(me)
        while len(self.ranks) <= rank:  # numbers that no process has had yet
            self.ranks.append(SimRank.nobody(len(self.ranks)))
        if self.ranks[rank].pid:
            self.former.append(self.ranks[rank])
        self.ranks[rank] = me
        self._introduce(me)
        me.alive, me.ending = me.open, not me.open
        return me if me.open else None

    def _introduce(self, me: SimRank) -> None:
        self._peers += 1
        me.peer, me.open = self._peers, True
        me.members_told, me.members_known = 0, KnownMembers()
        self._by_peer[me.peer] = me
        self._refused = None
        self._carry_out(PeerConnected(me.peer, self._hello(me)))

    def _hello(self, me: SimRank) -> m.Hello:
        return m.Hello(
            m.PROTOCOL_VERSION,
            "",
            "rank",
            me.rank,
            "host",
            me.pid,
            planes=("shm",),
            cells_tracked=self.tracked,
            incarnation=me.incarnation,
            returns=self.may_return(me),
        )

    def connected(self) -> Iterator[SimRank]:
        """Yield the processes that are part of the job, or whose connections the coordinator has not closed."""
        return (me for me in self._moving if me.alive or me.open)

    def may_return(self, me: SimRank) -> bool:
        """Whether a rank comes back when the others have gone on without it."""
        return me.state.elastic or (self.tracked and self._returns)

    def _knock(self, me: SimRank) -> None:
        """Connect again before the coordinator has given its old connection up."""
        self._peers += 1
        self._by_peer[self._peers] = SimRank.nobody(me.rank)
        self._refused = None
        self._carry_out(PeerConnected(self._peers, self._hello(me)))
        assert self._refused is not None
        assert self._refused.again, self._refused.reason

    def _reconnect(self, me: SimRank) -> None:
        """Find the coordinator, or a successor, and report the state to it; or it is refused."""
        me.lost = me.cut = me.early = False
        me.from_coordinator.clear()
        me.to_coordinator.clear()
        self._introduce(me)
        if me.open:
            me.ending = False
            me.to_coordinator.append(me.state.reconnect(me.world))
            self._flush(me)
        elif self._refused is not None and self._refused.again:
            me.lost = me.ending = me.early = True
            me.from_coordinator.clear()  # or the end of this connection is news each time, and no time ever passes
        else:
            me.ending = True
            self._end(me, Cause(CauseKind.COORDINATOR_LOST, (), "the coordinator is gone"))

    def _comes_again(self, me: SimRank) -> bool:
        """Connect again, as the coordinator has ordered. Returns whether it was not too early once more."""
        self._reconnect(me)
        return not me.early

    def kill(self, rank: int) -> None:
        """End its process; its last messages are read or lost."""
        me = self.ranks[rank]
        me.alive, me.early, me.ending, me.killed = False, False, True, True
        me.from_coordinator.clear()
        me.jobs.clear()
        self._lose_some(me.to_coordinator)

    def leave(self, rank: int) -> None:
        """Shut down: give up all waits, send Bye, and let the operations in flight fail."""
        me = self.ranks[rank]
        for group in list(me.state.sets.values()):
            group.close_board()
            if group.pending:
                me.state.withdraw(group.id, CauseKind.RANK_LEFT, f"rank {rank} left the job")
        self._flush(me)
        me.to_coordinator.append(m.Bye("shutdown"))
        me.ending = True
        self._end(me, Cause(CauseKind.SHUTDOWN, (rank,), f"rank {rank} shut down"))

    def cut(self, rank: int, *, away: bool = False) -> None:
        """Let its network fail for so long that both sides give the connection up, each in its own time.

        Args:
            rank: Whose.
            away: Whether the network stays away, until :meth:`mend`.
        """
        me = self.ranks[rank]
        me.cut = me.ending = True
        me.away = me.away or away
        self._lose_some(me.to_coordinator)
        self._lose_some(me.from_coordinator)
        me.from_coordinator.append(None)

    def mend(self) -> None:
        """Mend the network for all ranks."""
        for me in self.ranks:
            me.away = False

    def restart(self, *, client: bool = True) -> None:
        """Kill the coordinator and start a successor. With a client, the successor receives the client's state.

        Messages in flight are lost: all that were sent to the coordinator, and some of its own.
        """
        self.options = dataclasses.replace(self.options, incarnation=self.options.incarnation + 1)
        self.coordinator = CoordinatorState(self.options)
        self._members = SentMembers()
        for me in self._moving:
            if me.open:
                me.open, self._gone = False, True
                me.to_coordinator.clear()
                if me.alive and not me.cut:
                    self._lose_some(me.from_coordinator)
                    me.from_coordinator.append(None)
        for _ in range(self.random.randint(0, len(self.client))):
            self.client.popleft()
        self._carry_out(PeerConnected(CLIENT, m.Hello(m.PROTOCOL_VERSION, "", "client")))
        if client:
            self._recall()

    def _recall(self) -> None:
        """Send the client's state to the successor, and again each request that can have been lost."""
        told = self._told
        assert told is not None
        waiting, self.client = self.client, deque()
        cells = {
            cell: tuple(sorted(self.by_pid[pid].rank for pid in pids if self.by_pid[pid].alive))
            for cell, pids in self._running.items()
        }
        self.say(
            m.Recall(
                self._expected or told.expected,
                told.members,
                told.deaths,
                tuple((c, r) for c, r in cells.items() if r),
                tuple(
                    r
                    for r, pid in self._released.items()
                    if any((r, pid) == (x.rank, x.pid) for x in told.members)
                ),
            )
        )
        for me in self.ranks:
            if not me.alive and me.pid:
                self.say(m.RankLost(me.rank, me.pid, "its process has ended"))
        for cell, ranks in cells.items():
            if ranks:
                self.say(m.Post(cell, b"", ranks))
        # Cells that were about to be sent are among those that it has reported.
        self.client.extend(x for x in waiting if not isinstance(x, m.CellStarted | m.Post))

    def _lose_some(self, queue: deque[m.Message] | deque[m.Message | None]) -> None:
        for _ in range(self.random.randint(0, len(queue))):
            queue.pop()

    def _end(self, me: SimRank, cause: Cause) -> None:
        """No more of this process."""
        me.alive, me.early, self._gone = False, False, True
        for effect in me.state.close(cause):
            if isinstance(effect, Fail) and isinstance(effect.entry, SimEntry):
                effect.entry.complete(effect.error)
        me.from_coordinator.clear()
        me.jobs.clear()

    # -- acts of users --------------------------------------------------------------------------------------------

    def submit(
        self, rank: int, request: Request, site: str = "", *, directly: bool = False
    ) -> SimEntry | HvdlabError:
        """Submit as a user; ``directly`` for a user that waits for it, at the board if that may be."""
        me, waits = self.ranks[rank], directly
        self._numbers += 1
        if request.input is not None:
            assert isinstance(request.input, np.ndarray)
            request.input[...] = self._numbers % 65_521  # names its submission where it turns up
        entry = SimEntry(request, site or f"rank.py:{rank}", self._numbers)
        try:
            directly = directly and fits(request)
            queued = not directly or self.random.random() < 0.3
            if queued:
                me.state.submit(entry)
            again = self._post_again(me, entry) if directly and not queued else None
            posting = again or (self._post(me, entry, queued=queued) if directly else None)
            if posting is not None:
                me.at_board = AtBoard(entry, posting, has_handle=again is None)
            elif not queued:
                me.state.submit(entry)
        except HvdlabError as error:
            self.losses.ended(me, entry, error)
            self._flush(me)
            return error
        me.entries.append(entry)
        entry.ends = partial(self.losses.ended, me, entry)
        if waits:
            me.blocked = entry
        if self.random.random() < 0.5:
            self._flush(me)
        return entry

    def submit_after_loss(self, rank: int, make: Callable[[], Request]) -> SimEntry | HvdlabError:
        """Submit as a program that catches the loss of a member and goes on with the others."""
        entry = self.submit(rank, make())
        return self.submit(rank, make()) if is_loss(entry) else entry

    def _post_again(self, me: SimRank, entry: SimEntry) -> PostedRequest | None:
        """Post an allreduce without a handle, as a rank does that has posted one of the same name, type and shape before.

        It has, or it has not: then this has the board's member keep the facts about it.
        """
        request = entry.request
        group = me.state.sets.get(request.process_set)
        if group is None or group.board_member is None or request.input is None:
            return None
        member, source = group.board_member, host_view(request.input)
        if request.reduction.is_scaled or request.kind is not OpKind.ALLREDUCE:
            return None
        if request.anonymous or request.group is not None or self.random.random() < 0.5:
            return None
        entry.name = request.name or request.kind.label + ".noname"
        member._layout(entry)
        reduction = member.reductions.get((request.name, source.dtype, source.shape, request.reduction.op))
        if reduction is None:
            return None
        number = me.state.post_reduction(entry, member, reduction, source)
        return PostedRequest(member, number, reduction.layout.parts[number & 1]) if number else None

    def _post(self, me: SimRank, entry: SimEntry, *, queued: bool) -> PostedRequest | None:
        """Post as the direct way does: operations of the plane are posted only while nothing is executed on this
        rank."""
        group = me.state.sets.get(entry.request.process_set)
        if group is None or group.board_member is None:
            return None
        if not needs_plane(entry.request, group.board_member.board.capacity):
            return me.state.try_post(entry, queued=queued)
        if me.jobs:
            return None
        scope = entry.request.process_set, group.generation
        return me.state.try_post(entry, (group.generation, me.operations[scope]), queued=queued)

    def withdraw(self, rank: int, process_set: int = 0) -> None:
        """A user is interrupted in the middle of a wait, at the board perhaps, and does not come back there."""
        me = self.ranks[rank]
        if me.at_board is not None and me.at_board.entry.request.process_set == process_set:
            me.at_board = None
        me.state.withdraw(process_set, CauseKind.INTERRUPTED, f"rank {rank} was interrupted")
        self._flush(me)

    def tear(self, rank: int) -> None:
        """Interrupt the rank in the middle of a submission."""
        me = self.ranks[rank]
        me.at_board = None
        me.state.abandon_interrupted(f"rank {rank} was interrupted")
        self._flush(me)

    def say(self, *messages: m.Message) -> None:
        """Send a message of the client."""
        self.client.extend(messages)
        for message in messages:
            if isinstance(message, m.Expect):
                self._expected = message.ranks
                self._released = {r: pid for r, pid in self._released.items() if r in message.ranks}
            elif isinstance(message, m.Release) and self._told is not None:
                pids = {member.rank: member.pid for member in self._told.members}
                self._released |= {rank: pids[rank] for rank in message.ranks if rank in pids}

    def start_cell(self, cell: str, ranks: tuple[int, ...]) -> None:
        """Send a cell from the client to ranks."""
        self._running[cell] = {self.ranks[rank].pid for rank in ranks}
        self.say(m.CellStarted(cell, ranks), m.Post(cell, b"", ranks))

    def end_cell(self, rank: int, error: str) -> None:
        """End the last cell that runs on a rank. The client hears of it, sooner or later."""
        me = self.ranks[rank]
        cell, _ = me.cells.popitem()
        me.state.end_cell(cell, error)
        if self.random.random() < 0.8:
            self._running.get(cell, set()).discard(me.pid)

    # -- the world's steps ----------------------------------------------------------------------------------------

    def step(self, *, work: bool = True, clock: bool = True) -> bool:
        """Play one random possible event; return false if there is none.

        Args:
            work: Whether operations are executed.
            clock: Whether the clock is put forward if no other event is possible.
        """
        choices: list[tuple[Callable[[SimRank], None], SimRank]] = []
        if self._gone:
            self._moving = [me for me in self._moving if me.alive or me.open]
            self._gone = False
        for me in self._moving:
            if me.open and (me.to_coordinator or me.ending):
                choices.append((self._to_coordinator, me))
            if me.alive:
                if me.lost and not me.open and not me.early and not me.away:
                    choices.append((self._reconnect, me))
                elif me.lost and me.open and not me.away and self.may_return(me):
                    choices.append((self._knock, me))
                if me.state.has_messages and not me.ending:
                    choices.append((self._flush, me))
                if me.from_coordinator:
                    choices.append((self._from_coordinator, me))
                if me.at_board is not None and self.boards.can_go_on(me):
                    choices.append((self.boards.go_on, me))
                if me.blocked is not None and _waits_untold(me):
                    choices.append((self._tell_wait, me))
                if me.jobs and work:
                    if self.planes.can_run(me):
                        choices.append((self.planes.run, me))
                    elif self.planes.meets_nobody(me):
                        choices.append((self.planes.break_one, me))
        if self.client and not (isinstance(self.client[0], m.Post) and self.coordinator.restoring.active):
            choices.append((self._from_client, _NOBODY))
        if choices:
            action, me = self.random.choice(choices)
            action(me)
            if self.watcher is not None:
                self.watcher.stepped(self)
            return True
        came = [self._comes_again(me) for me in self._moving if me.early and not me.away]
        if any(came):
            return True
        if not clock:
            return False
        deadline = self.coordinator.next_deadline()
        if deadline is not None and deadline < self.now + _PATIENCE and not self._repeats_itself(deadline):
            self.pass_time(deadline)
            return True
        return False

    def pass_time(self, until: float) -> None:
        """Move the clock to that time, or later."""
        self.now = max(self.now, until)
        self._carry_out(Tick())

    def _repeats_itself(self, deadline: float) -> bool:
        """Whether the only event due is another report of long waits."""
        state = self.coordinator
        if deadline != state.stalls.due or state.options.stall_shutdown:
            return False
        return all(current.reported for ps in state.sets for current, _ in ps.negotiation.waiting())

    def run(self, limit: int = 200_000, *, work: bool = True) -> None:
        """Play all possible events, until none is left."""
        for _ in range(limit):
            if not self.step(work=work):
                return
        raise AssertionError("it does not come to rest")

    def read_all(self) -> None:
        """Let the coordinator read all its messages."""
        for me in self._moving:
            while me.open and me.to_coordinator:
                self._to_coordinator(me)

    def _flush(self, me: SimRank) -> None:
        if me.lost:
            return  # kept for the successor
        messages = me.state.take_messages()
        if not me.ending:
            me.to_coordinator.extend(messages)

    def _to_coordinator(self, me: SimRank) -> None:
        events: list[Event] = []
        for _ in range(self.random.randint(1, 3)):
            if me.to_coordinator:
                events.append(Received(me.peer, me.to_coordinator.popleft()))  # type: ignore[arg-type]  # ranks say FromRank
        if me.ending and not me.to_coordinator:
            said_bye = events and isinstance(events[-1].message, m.Bye)  # type: ignore[union-attr]  # all are Received
            if not said_bye:
                events.append(PeerLost(me.peer, "connection closed"))
                me.open, self._gone = False, True
        self._carry_out(*events)

    def _from_client(self, _: SimRank) -> None:
        message = self.client.popleft()
        if isinstance(message, m.RankLost):  # the process's output before its end is read first
            me = self.by_pid.get(message.pid)
            while me is not None and me.open and me.to_coordinator:
                self._to_coordinator(me)
        self._carry_out(Received(CLIENT, message))  # type: ignore[arg-type]  # clients say FromClient

    def _carry_out(self, *events: Event) -> None:
        effects = self.coordinator.handle_all(events, self.now)
        if self._validate >= 1.0 or self.random.random() < self._validate:
            self.coordinator.validate_state()
        for effect in effects:
            if isinstance(effect, Send | SendConfigure):
                if isinstance(effect.message, m.Configure):
                    self._note_generation(effect.message)
                if isinstance(effect.message, m.Refused):
                    self._refused = effect.message
                elif isinstance(effect.message, m.Returned):
                    self.returned.add(effect.message.pid)
                    self.client_hears_of_return(effect.message)
                for peer in effect.peers:
                    me = self._by_peer.get(peer)
                    if me is not None and me.alive and me.peer == peer and not me.cut:
                        if isinstance(effect.message, m.Welcome):
                            me.incarnation = effect.message.incarnation  # a connecting rank waits for it
                        else:
                            me.from_coordinator.append(self._shortened(me, effect.message))
                if (
                    CLIENT in effect.peers
                    and isinstance(effect.message, m.World)
                    and not effect.message.restoring
                ):
                    self._told = effect.message
                    self.client_hears(effect.message)
            elif isinstance(effect, CloseConnection):
                closed = self._by_peer[effect.peer]
                if closed.peer == effect.peer:
                    closed.open, self._gone = False, True
                    closed.to_coordinator.clear()
                if closed.alive and not closed.cut and closed.peer == effect.peer:
                    closed.from_coordinator.append(None)
            elif isinstance(effect, Log):
                assert " sent " not in effect.text, effect.text

    def _shortened(self, me: SimRank, message: m.Message) -> m.Message:
        """Return a message to this rank as the coordinator's server shortens it."""
        if type(message) not in SHORTENED:
            return message
        self._members.add(message)
        short, me.members_told = self._members.shorten(message, me.members_told)
        return short

    def _note_generation(self, message: m.Configure) -> None:
        members = tuple(member.pid for member in message.members)
        assert message.generation > self._newest.get(message.process_set, 0), "a generation is used again"
        self.losses.generation_begins(message, self._newest.get(message.process_set, 0))
        self._newest[message.process_set] = message.generation
        self.generations[message.process_set, message.generation] = members

    def _tell_wait(self, me: SimRank) -> None:
        """A user has waited for long."""
        assert me.blocked is not None
        me.state.report_waiting(me.blocked, 0.5)

    def _from_coordinator(self, me: SimRank) -> None:
        message = me.from_coordinator.popleft()
        if message is None:
            me.ending = me.lost = True
            self._perform(
                me, me.state.disconnect(Cause(CauseKind.COORDINATOR_LOST, (), "the coordinator is gone"))
            )
            return
        if type(message) in SHORTENED:
            message = me.members_known.restore(message)
        if isinstance(message, m.Leave):
            me.told_to_leave = True
        elif isinstance(message, m.World):
            me.world = tuple(member.rank for member in message.members)
        elif isinstance(message, m.Mail) and message.topic not in me.known_cells:
            me.known_cells.add(message.topic)
            if not me.cells:
                self.losses.program_begins(me)
            me.cells[message.topic] = None
            me.state.begin_cell(message.topic)
        self._perform(me, me.state.handle(message, 0))
        if me.hears is not None:
            me.hears(message)
        if self._validate >= 1.0 or self.random.random() < self._validate:
            me.state.validate()

    def _perform(self, me: SimRank, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case RunBatch():
                    me.jobs.append(effect)
                case Fail(entry, error):
                    if isinstance(entry, SimEntry):
                        entry.complete(error)
                case Succeed(entry, process_set):
                    entry.complete(("set", process_set))  # type: ignore[attr-defined]  # no joins there
                case AbortPlane(process_set, generation):
                    me.aborted.update(s for s in me.members if s[0] == process_set and s[1] <= generation)
                case NewGeneration():
                    me.members[effect.process_set, effect.generation] = tuple(x.pid for x in effect.members)
                    if self.random.random() >= self._lacking:
                        self.boards.open(me, effect)

    # -- invariants -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that every handle of a living rank has ended, and all members saw one order of operations."""
        for me in self.ranks:
            if me.alive:
                me.state.validate()
                for entry in me.entries:
                    assert entry.outcome is not None, (me.rank, entry.name, entry.phase)
        self.check_order()

    def check_order(self) -> None:
        """Check that all members saw one order of operations, as far as they came."""
        everybody = [*self.ranks, *self.former]
        for scope in {scope for me in everybody for scope in me.order}:
            orders = [me.order.get(scope, []) for me in everybody if scope in me.members]
            longest = max(orders, key=len)
            for order in orders:
                assert order == longest[: len(order)], scope


def is_loss(outcome: object) -> bool:
    """Whether a submission has failed since its process set has lost a member."""
    return isinstance(outcome, AbortedError) and outcome.cause.kind.is_loss


def _waits_untold(me: SimRank) -> bool:
    waits = me.blocked
    return waits is not None and waits.outcome is None and waits.phase == ANNOUNCED and not waits.waited


def allreduce(name: str | None, shape: tuple[int, ...] = (4,), **changes: object) -> Request:
    """Return a request like those that bindings make."""
    request = Request(OpKind.ALLREDUCE, name, np.zeros(shape, np.float32), dtype=DType.F32, reduction=SUM)
    for key, value in changes.items():
        setattr(request, key, value)
    return request


def message(
    source: int | None,
    target: int,
    channel: str,
    shape: tuple[int, ...],
    process_set: int,
    *,
    receives: bool,
) -> Request:
    """Return one part of a message on a channel; without a ``source`` the receive of one from any rank."""
    tensor = np.zeros(shape, np.float32)
    return Request(
        OpKind.SENDRECV,
        f"{'any' if source is None else source}>{target}.{channel}",
        tensor,
        tensor if receives else None,
        dtype=DType.F32,
        root=-1 if source is None else source,
        ranks=(target,) if source is None else (source, target),
        channel=channel,
        process_set=process_set,
        anonymous=True,
    )
