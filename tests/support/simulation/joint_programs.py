"""Programs of the ranks of a simulated elastic job: the real loop around elastic training, on a stack that waits its
turn.

Each rank's program has a stack of its own, a greenlet: the schedule lets one go on, which gives the turn back when it waits.
So everything happens in the order that the schedule's seed gives, on one thread. Below the loop is an engine without
sockets: submissions go to the simulated rank, and results are calculated from the entries that met there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, Protocol
from unittest import mock

import numpy as np
import numpy.typing as npt
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]  # it has no stubs

from hvdlab.bindings import elastic_state as bindings_state
from hvdlab.bindings.elastic_state import HandledState, HandlerRegistry
from hvdlab.collectives import context
from hvdlab.collectives.context import core_rank
from hvdlab.collectives.elastic import state as elastic_state
from hvdlab.collectives.elastic import training_loop
from hvdlab.collectives.elastic.state import Lineage, News, NotificationManager
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.engine.requests import Request, Result
from hvdlab.collectives.engine.world_view import ElasticMembership, WorldView
from hvdlab.collectives.errors import Cause, HvdlabError
from hvdlab.collectives.planes.base import storage_type
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import PLAIN, DType, OpKind, ReduceOp
from support.simulation.joint_ranks import SimEntry, SimRank
from support.simulation.joint_simulation import Simulation

_FOLDS: dict[ReduceOp, Callable[..., npt.NDArray[Any]]] = {
    ReduceOp.SUM: np.sum,
    ReduceOp.MIN: np.min,
    ReduceOp.MAX: np.max,
}

P = ParamSpec("P")

Values = npt.NDArray[Any]


class Killed(BaseException):
    """The process of this program has ended."""


class Turns:
    """Program that runs only when it is let, and lets go on only when it waits or has ended.

    Args:
        engine: The program's ``context.engine()``.
        main: The program.

    Attributes:
        ended: Whether it has ended.
    """

    def __init__(self, engine: SimEngine, main: Callable[[], None]) -> None:
        self.ended = False
        self._main = main
        self._until: Callable[[], bool] = lambda: True
        self._killed = False
        self._program = greenlet(self._run)
        self._program.engine = engine

    def _run(self) -> None:
        try:
            if not self._killed:
                self._main()
        except Killed:  # raised where the program waited, to unwind its stack
            pass
        finally:
            self.ended = True

    @property
    def can_go_on(self) -> bool:
        """Whether the condition of its wait holds."""
        return not self.ended and self._until()

    def go_on(self) -> None:
        """Let it run until it waits again, or has ended. Raises the exception that has ended it."""
        self._program.parent = getcurrent()  # has the turn when this one ends, and its exception
        self._program.switch()

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until this is so. Called by the program itself."""
        if self._killed:
            raise Killed
        self._until = until
        self._program.parent.switch()
        if self._killed:
            raise Killed

    def kill(self) -> None:
        """End it wherever it is."""
        self._killed = True
        while not self.ended:
            self.go_on()


class _Condition:
    """Condition on which a :class:`WorldView` waits: its turn. No wait comes to the end of its time, since none may be
    in vain."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], timeout: float) -> bool:
        if timeout > 0 and not predicate():
            self._turns.wait(predicate)
        return predicate()


class SimEngine:
    """Engine of a simulated rank, with the calls that the elastic loop makes.

    Args:
        job: Values and objects of all that is submitted.
        numbers: As ``HVDLAB_RANK_NUMBERS``.
        least: Ranks that are needed to go on.
    """

    closed = False
    waits_for_successor = True
    failed_cells = 0

    def __init__(self, job: Submitted, numbers: str, least: int) -> None:
        self.job = job
        self.world = WorldView()
        self.settings = SimpleNamespace(
            coordinator="simulated", rank_numbers=numbers, min_np=least, reset_limit=0, elastic_timeout=600.0
        )
        self.lineage = Lineage()
        self.manager = NotificationManager()
        #: Generation of the last collective that ended well.
        self.generation = 0
        #: Processes that took part in the last broadcast of an object.
        self.broadcast_among: frozenset[int] = frozenset()

    def attach(self, me: SimRank, turns: Turns) -> None:
        """This is the rank, and the program that uses the engine."""
        self.me, self.turns, self.rank = me, turns, me.rank
        self.world._changed = _Condition(turns)  # type: ignore[assignment]  # stands in for a Condition
        self.elastic = ElasticMembership(me.rank, self, self.world)  # type: ignore[arg-type]  # stands in for a LockedState

    def hears(self, message: m.Message) -> None:
        """As the dispatcher does it, once the state has the message."""
        match message:
            case m.World():
                self.world.update(message)
            case m.Leave():
                self.world.released(message.reason)
            case m.Regrouped():
                self.world.regrouped(message.ticket)
            case m.Configure() if message.process_set == 0:
                self.world.configured([member.rank for member in message.members], message.generation)

    def update(
        self, change: Callable[Concatenate[RankState, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Change the state, and send the messages that come of it."""
        change(self.me.state, *args, **kwargs)
        self.job.simulation._flush(self.me)

    def processes(self) -> tuple[int, tuple[tuple[int, str, int], ...]]:
        group = self.me.state.sets[0]
        return group.generation, tuple((member.rank, member.host, member.pid) for member in group.members)

    def ranks(self) -> tuple[int, ...]:
        group = self.me.state.sets.get(0)
        return group.ranks if group is not None else ()

    @property
    def size(self) -> int:
        return len(self.ranks())

    @property
    def failure(self) -> Cause | None:
        return self.me.state.failure

    def run(self, request: Request, *, given: object = None, directly: bool = False) -> Result:
        """Submit a request and wait for its end; ``given`` is the value of a broadcast's root."""
        real = None if request.input is None else request.input.copy()  # type: ignore[union-attr]  # all are arrays
        entry = self.job.simulation.submit(self.rank, request, directly=directly)
        if isinstance(entry, HvdlabError):
            raise entry
        self.job.values[entry.number], self.job.objects[entry.number] = real, given
        self.me.blocked = entry
        self.turns.wait(lambda: entry.outcome is not None)
        outcome = entry.outcome
        if isinstance(outcome, Exception):
            raise outcome
        assert isinstance(outcome, tuple)
        if outcome[0] == "set":
            return Result(process_set=outcome[1])
        self.generation = outcome[2] if request.process_set == 0 else self.generation
        if real is None:
            return Result()
        met = _met(entry, outcome)
        if request.kind is OpKind.BROADCAST:
            root = self.job.members(request.process_set, outcome[2]).index(request.root)
            return Result(copy.deepcopy(self.job.objects[met[root]]))  # type: ignore[arg-type]  # any object
        values = [self.job.values[number] for number in met]
        if request.kind is OpKind.ALLGATHER:
            return Result(np.concatenate(values))  # type: ignore[arg-type]  # all are arrays
        return Result(_FOLDS[request.reduction.op](values, axis=0))

    def allreduce(
        self, name: str, value: float, op: ReduceOp = ReduceOp.SUM, process_set: int = 0, *, directly: bool
    ) -> float:
        """Reduce the members' arrays, by a sum for example."""
        request = Request(
            OpKind.ALLREDUCE,
            name,
            np.array([value], np.float32),
            dtype=DType.F32,
            reduction=PLAIN[op],
            process_set=process_set,
        )
        result = self.run(request, directly=directly).output
        assert isinstance(result, np.ndarray)
        return float(result[0])

    def broadcast_object(self, obj: object, root: int) -> object:
        """Return the object of the rank that scripts know by the number ``root``."""
        # A rank whose others have just died fails in its next collective, before it begins again alone.
        if self.size == 1 and self.failure is None:
            self.broadcast_among = frozenset((self.me.pid,))
            return obj
        tensor = np.zeros(3, np.float32)
        request = Request(
            OpKind.BROADCAST, "state", tensor, tensor, dtype=DType.F32, root=core_rank(root, "state")
        )
        received = self.run(request, given=copy.deepcopy(obj)).output
        self.broadcast_among = frozenset(self.job.simulation.generations[0, self.generation])
        return received

    def shutdown(self) -> None:
        """Leave the job, once the operations executed here have ended."""
        if not self.closed:
            self.turns.wait(lambda: not self.me.jobs)
            self.closed = True
            if self.me.alive:
                self.job.simulation.leave(self.rank)


class Submitted:
    """Submissions of a job, by the number of its submission."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.values: dict[int, Values | None] = {}
        self.objects: dict[int, object] = {}

    def members(self, process_set: int, generation: int) -> tuple[int, ...]:
        """Return ranks of a generation, by position."""
        pids = self.simulation.generations[process_set, generation]
        return tuple(self.simulation.by_pid[pid].rank for pid in pids)


def _met(entry: SimEntry, outcome: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the submissions that met in an entry's operation, by the members' positions."""
    if outcome[0] == "agreed":
        return tuple(int(number) for number in outcome[4][1])
    names, result = outcome[5], outcome[6]
    if len(result) == 3 and result[2] and isinstance(result[2][0], bytes):
        storage = storage_type(entry.request.dtype)
        return tuple(int(np.frombuffer(payload, storage)[0]) for payload in result[2])
    place = names.index(f"{entry.request.kind.label} {entry.name}")
    numbers: tuple[int, ...] = result[2][place]
    return numbers


class TrainingState(HandledState):
    """State of a simulated training, whose changes are watched.

    Attributes:
        batch: Steps done.
        groups: Ranks that trained together, and how many steps.
        done: Whether the training has ended.
        origin: Pid of the process whose first state this comes from.
    """

    batch: int
    groups: tuple[tuple[tuple[int, ...], int], ...]
    done: bool
    origin: int

    def __init__(self, watcher: StateWatcher, **values: object) -> None:
        super().__init__(HandlerRegistry([]), **values)
        self.watcher = watcher

    def sync(self) -> None:
        super().sync()
        self.watcher.synced(self)

    def restore(self) -> None:
        super().restore()
        self.watcher.restored(self)

    def _agree(self, news: News) -> News:
        agreed = super()._agree(news)
        self.watcher.agreed(self)
        return agreed


class StateWatcher(Protocol):
    """Watcher of the changes of a :class:`TrainingState`."""

    def synced(self, state: TrainingState) -> None:
        """It is the same on all ranks now."""

    def restored(self, state: TrainingState) -> None:
        """It has gone back."""

    def agreed(self, state: TrainingState) -> None:
        """All ranks have come to where the world may change."""


class _OwnManager:
    """Notification manager of the rank whose program asks."""

    def __getattr__(self, name: str) -> object:
        return getattr(_own().manager, name)


class _OwnLineage:
    """Lineage of the process whose program asks."""

    def __getattr__(self, name: str) -> object:
        return getattr(_own().lineage, name)


def _own() -> SimEngine:
    """Return the engine of the program that asks."""
    engine = getcurrent().engine
    assert isinstance(engine, SimEngine)
    return engine


@contextmanager
def own_engines() -> Iterator[None]:
    """The elastic loop of each program uses the program's engine."""
    with ExitStack() as stack:
        for where, name, stand_in in (
            (context, "is_initialized", lambda: not _own().closed),
            (context, "engine", lambda what="": _own()),
            (context, "shutdown", lambda: _own().shutdown()),
            (training_loop, "notification_manager", _OwnManager()),
            (elastic_state, "process_lineage", _OwnLineage()),
            (bindings_state, "broadcast_object", lambda obj, root: _own().broadcast_object(obj, root)),
        ):
            stack.enter_context(mock.patch.object(where, name, stand_in))
        yield
