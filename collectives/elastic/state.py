"""State that survives the loss of a rank: saved by each rank, restored after a failure, synchronized after a change of the world.

Ranks agree on two things here: whose state training resumes from (:func:`elect`), and whether the world is about to change
(:func:`merge_news`). :class:`NotificationManager` passes the coordinator's news of the world on to states.
"""

from __future__ import annotations

import copy
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from enum import IntFlag
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hvdlab.collectives import context
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.planes.base import host_view
from hvdlab.collectives.types import PLAIN, DType, OpKind, ReduceOp


class HostUpdateResult(IntFlag):
    """Flags: ranks were removed, added, or both."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class HostsUpdatedInterrupt(RuntimeError):
    """Notice that the world is about to change; raised by ``state.commit()`` and ``state.check_host_updates()`` on all ranks at once.

    Attributes:
        skip_sync: Whether the ranks that stay can go on without synchronizing their states, unless a rank comes meanwhile.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the world is about to change")
        self.skip_sync = skip_sync


BroadcastObject = Callable[[Any], Any]
"""A function that returns, on all ranks, the object of one rank, on which all agree."""

News = tuple[float, float, int]
"""When the world changed last, as known before; when, as known now; and how it has changed since."""


class State:
    """Base of all states; a subclass implements :meth:`save`, :meth:`restore` and :meth:`sync`.

    Args:
        bcast_object: Broadcasts an object.
        get_rank: Returns the number of this rank.
    """

    def __init__(self, bcast_object: BroadcastObject, get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        #: News that check_host_updates() has not read: when, and which change. Any thread adds some.
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        #: Time of the latest change on which all ranks have agreed, in seconds since 1970.
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], Any]] = []
        #: Commits of this rank; none on a rank that only received the state.
        self._commits = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that another rank gets: all but news of the world, which are this rank's own."""
        return {name: value for name, value in self.__dict__.items() if name != "_host_messages"}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        # Not by setattr(): assigning to an attribute of a state may do more than store it.
        self.__dict__.update(
            attributes, _host_messages=queue.SimpleQueue(), _last_updated_timestamp=0, _commits=0
        )
        # A rank that only received the state has committed nothing: training must not resume from it.
        if "_saves" in attributes:
            self.__dict__["_saves"] = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call functions whenever training begins again with other ranks, before the state is synchronized.

        A callback is the place to adapt values that depend on ``hvd.size()``, such as the learning rate.

        Args:
            callbacks: The functions, which are called without arguments in this order.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Drop news of the old world, then call :meth:`reset` and the callbacks. Called when training begins again."""
        # News that another thread adds to the old queue meanwhile is not lost: the training loop calls `remind()` after this.
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Record that the world is about to change. Any thread; the next :meth:`check_host_updates` acts on it.

        Args:
            timestamp: When, in seconds since 1970.
            update_res: A :class:`~hvdlab.collectives.elastic.HostUpdateResult`.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, then :meth:`check_host_updates`. Training goes on from here if it fails later."""
        self.save()
        # Before the check, which can raise: the state is saved then, too.
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Let the world change here, if it is about to. All ranks must call it alike, since they agree on that.

        Raises:
            HostsUpdatedInterrupt: The world is about to change; raised on all ranks.
        """
        before = latest = self._last_updated_timestamp
        changes = int(HostUpdateResult.no_update)
        # This thread alone removes from the queue, so that `get()` never waits.
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                changes |= int(change)
        before, latest, changes = self._agree((before, latest, changes))
        # The time on which all have agreed, not that of this rank's own news: on a rank that gets the same news later it must not
        # interrupt again.
        self._last_updated_timestamp = latest
        if latest > before:
            removed = bool(changes & HostUpdateResult.removed)
            handed = removed and self._hand_over()
            raise HostsUpdatedInterrupt(changes == HostUpdateResult.removed and not handed)

    def _hand_over(self) -> bool:
        """Let ranks that are about to leave, and can still take part in collectives, give the others data that only they have.

        Returns:
            Whether the ranks that stay have to synchronize their states after this.
        """
        return False

    def _agree(self, news: News) -> News:
        """Make the news the same on all ranks, which they reach at different times."""
        agreed: News = self._bcast_object(news)
        return agreed

    def save(self) -> None:
        """Copy the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the copy that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the state the same on all ranks, which call this alike."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the ranks that are there now. Called by :meth:`on_reset`."""


class ObjectState(State):
    """State of any Python objects, each of which is an attribute to read and assign.

    Args:
        bcast_object: Broadcasts an object.
        get_rank: Returns the number of this rank.
        kwargs: The attributes and their values at the start, which can be copied and pickled.
    """

    def __init__(self, bcast_object: BroadcastObject, get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state: dict[str, Any] = kwargs
        self._saves = 0
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved_state = copy.deepcopy(kwargs)

    def save(self) -> None:
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._saved_state})
        self._saves += 1

    def restore(self) -> None:
        # A copy: training changes the objects, and the next failure has to find the save as it was.
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        if self._saved_state:
            synced = self._bcast_object({name: getattr(self, name) for name in self._saved_state})
            self._saved_state = synced
            for name, value in synced.items():
                setattr(self, name, value)
            # Other objects than the attributes, which training changes in place.
            self._saved_state = copy.deepcopy(synced)
        self._saves += 1


ATTEMPT = 1 << 24
"""Saves reserved for each restart: when the ranks begin again together, the count of their saves continues at the next multiple.

So a rank that was cut off, and that the others have continued without, is behind them however often it had saved.
"""


def next_attempt(saves: int) -> int:
    """Return the count of saves from which all ranks go on after a restart with the state of a rank that has saved ``saves`` times."""
    return (saves // ATTEMPT + 1) * ATTEMPT


BEFORE_THE_JOB = 0
"""Lineage of a training that began without other ranks, or in another job. The generations of a world begin at 1."""


@dataclass(frozen=True)
class Standing:
    """Standing of a rank's state in an election.

    Attributes:
        rank: The rank, as the core numbers it.
        lineage: Generation of the world in which the training began that the state comes from (:class:`Lineage`).
        saves: Count of saves (:data:`ATTEMPT`).
        commits: Commits since that beginning.
        number: The rank, as its script numbers it.
    """

    rank: int
    lineage: int
    saves: int
    commits: int
    number: int

    @property
    def begun(self) -> bool:
        """Return whether training has begun with this state: it was synchronized. Otherwise it is as its script has made it."""
        return self.saves >= ATTEMPT


class Lineage:
    """Lineage of the states of this process: the generation of the world in which its training began from nothing.

    All that synchronize from one state share its lineage. A coordinator's successor continues above all generations of before, so a lineage
    that begins later in a job has a higher number. A process keeps its lineage for further states: a program that begins another
    training is no newcomer.
    """

    def __init__(self) -> None:
        #: Address of the coordinator that counted the generations; ``None`` before the first training.
        self._job: str | None = None
        self.began = BEFORE_THE_JOB

    def number(self, job: str, generation: int, *, begun: bool) -> int:
        """Return the lineage of a state of this process.

        Args:
            job: Address of the coordinator of the world that it synchronizes in.
            generation: Present generation of that world: the lineage of a process that has none yet.
            begun: Whether training has begun with the state. If it has in no world, or in another job's, whose generations
                are no measure here, it is older than any training of this job.
        """
        if self._job == job:
            return self.began
        return BEFORE_THE_JOB if begun else generation

    def join(self, job: str, began: int) -> None:
        """Keep the lineage that this process has synchronized to."""
        self._job, self.began = job, began


process_lineage = Lineage()
"""The lineage of this process."""


@dataclass(frozen=True)
class Election:
    """Result of an election, and the standing of this rank in it.

    Attributes:
        source: The rank whose state all go on from.
        own: This rank.
        lineage: Lineage of all ranks from now on.
        saves: Count of saves from which all go on: above any of before.
        job: Address of the coordinator that counts the generations; ``None`` without other ranks.
    """

    source: Standing
    own: Standing
    lineage: int
    saves: int
    job: str | None

    @property
    def replaced(self) -> bool:
        """Return whether this rank has trained, and all go on from another lineage, that of the source."""
        return self.own.begun and self.own.lineage != self.lineage

    @property
    def overtaken(self) -> bool:
        """Return whether the source's state has not learnt from all that this rank has processed.

        That is so if the others have restarted without this rank, or if it has trained in another lineage.
        """
        return self.own.saves // ATTEMPT < self.source.saves // ATTEMPT or self.replaced

    def join(self) -> None:
        """Have this process continue the lineage of the source, with whose state it has synchronized."""
        if self.job is not None:
            process_lineage.join(self.job, self.lineage)


def elect(saves: int, commits: int) -> Election:
    """Agree on the rank whose state is ahead. A small collective: all ranks call it alike.

    Args:
        saves: This rank's count of saves (:data:`ATTEMPT`).
        commits: Commits since the beginning of its training.

    Returns:
        The result. Without other ranks, this one is the source.
    """
    if not context.is_initialized():
        own = Standing(0, BEFORE_THE_JOB, saves, commits, 0)
        return _election([own], own, None)
    engine = context.engine()
    job = engine.settings.coordinator
    assert job is not None
    lineage = process_lineage.number(job, engine.processes()[0], begun=saves >= ATTEMPT)
    # The source is named by the core's number: ranks that are let go before training has begun may change the other one on the way.
    own = Standing(engine.rank, lineage, saves, commits, context.shown_number(engine.rank))
    if engine.size == 1:
        return _election([own], own, job)
    # Gathered, since the world can change in order on the way: nothing here depends on its size.
    mine = np.array([astuple(own)], dtype=np.int64)
    rows = _run(Request(OpKind.ALLGATHER, "elastic.root", mine, dtype=DType.I64))
    return _election([Standing(*row) for row in rows.reshape(-1, len(mine[0])).tolist()], own, job)


def _election(every: Sequence[Standing], own: Standing, job: str | None) -> Election:
    source = ahead(every)
    # Without a state that training has begun with, a lineage begins here, or goes on from that of a process which had trained before.
    lineage = source.lineage if source.begun else min(standing.lineage for standing in every)
    saves = next_attempt(max(standing.saves for standing in every))
    return Election(source, own, lineage, saves, job)


def ahead(every: Sequence[Standing]) -> Standing:
    """Return the rank whose state all go on from.

    Within a lineage that is, of those that restarted last, the rank that saved most often; among several, the one that its script knows by
    the lowest number: where training begins, perhaps only the script's rank 0 has loaded a checkpoint. After a failure that hit ranks at
    different points, one of them may have committed once more than the others. A newcomer has not begun, so its state is never chosen if
    another has: that would undo the others' training.

    There are several lineages if all ranks that could be reached were lost, newcomers began from nothing, and one that was only
    cut off is back with its memory. Then training continues from the oldest lineage with a commit. A commit lasts
    as long as a rank lives that has it, and the ranks of a later lineage began only because that rank was out of reach.
    Restarts and commits do not tell which training has come further: each counts from a beginning of its own, which may be a checkpoint, and
    a rank alone commits after fewer samples than several. A lineage without a commit has only the state that its script began with, and
    gives way to one that has trained.
    """
    begun = [standing for standing in every if standing.begun]
    fronts: dict[int, Standing] = {}
    for standing in sorted(begun or every, key=lambda one: (one.saves, -one.number, -one.rank)):
        # Of states that training has not begun with, none is older than another.
        fronts[standing.lineage if begun else 0] = standing
    return min(fronts.values(), key=lambda one: (one.commits == 0, one.lineage))


def merge_news(news: News) -> News:
    """Return the news of all ranks together. A small collective: all ranks call it alike."""
    if not context.is_initialized() or context.engine().size == 1:
        return news
    before, latest, changes = news
    removed, added = bool(changes & HostUpdateResult.removed), bool(changes & HostUpdateResult.added)
    # One collective for all four: float64 has room for the flags, and for seconds since 1970 to a microsecond.
    mine = np.array([before, latest, removed, added], dtype=np.float64)
    request = Request(OpKind.ALLREDUCE, "elastic.news", mine, dtype=DType.F64, reduction=PLAIN[ReduceOp.MAX])
    before, latest, removed, added = _run(request).tolist()
    return before, latest, HostUpdateResult.removed * int(removed) | HostUpdateResult.added * int(added)


def _run(request: Request) -> npt.NDArray[Any]:
    """Run a collective of a few numbers, and return its result."""
    result = context.engine().run(request)
    assert result.output is not None
    return host_view(result.output)


class Listener(Protocol):
    """Recipient of changes of the world, such as a :class:`State`."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None: ...


class NotificationManager:
    """Subscription to the coordinator's news of the world: that a rank waits to be let in, or leaves with its host.

    Lost ranks are not among the news: collectives fail then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._engine: Engine | None = None
        self._unwatch: Callable[[], None] | None = None
        #: The ranks that wait, and those that leave, as listeners were notified last.
        self._notified_waiting: tuple[int, ...] = ()
        self._notified_leaving: tuple[int, ...] = ()
        #: Time of the newest news, in seconds since 1970.
        self._newest = 0.0

    def __reduce__(self) -> str:
        """Pickle the name alone: an elastic function that is sent to another rank uses the manager there."""
        return "notification_manager"

    def init(self) -> None:
        """Listen to the engine of this process, if it has one."""
        engine = context.engine() if context.is_initialized() else None
        with self._lock:
            if engine is self._engine:
                return
            if self._unwatch is not None:
                self._unwatch()
            self._engine, self._notified_waiting, self._notified_leaving = engine, (), ()
            self._unwatch = None if engine is None else engine.elastic.watch(self._on_world)

    def register_listener(self, listener: Listener) -> None:
        """Notify this listener from now on, and now of ranks that wait or leave already."""
        with self._lock:
            self._listeners.append(listener)
        self.remind(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Notify this listener no longer."""
        with self._lock:
            self._listeners[:] = [other for other in self._listeners if other is not listener]

    def remind(self, listener: Listener) -> None:
        """Notify this listener of ranks that wait or leave now. A reset makes it forget them.

        This rank itself does not count: it waits no more, even if that news has not arrived yet.
        """
        engine = self._engine
        if engine is not None and set(engine.elastic.waiting) - {engine.rank}:
            listener.on_hosts_updated(self._time_for(listener), HostUpdateResult.added)
        if engine is not None and engine.elastic.leaving:
            listener.on_hosts_updated(self._time_for(listener), HostUpdateResult.removed)

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Notify all listeners of a change. Any thread."""
        with self._lock:
            listeners = list(self._listeners)
        # Without the lock: a listener may register or remove others.
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)

    def _on_world(self, waiting: tuple[int, ...], leaving: tuple[int, ...]) -> None:
        come, gone = set(waiting) - set(self._notified_waiting), set(leaving) - set(self._notified_leaving)
        self._notified_waiting, self._notified_leaving = waiting, leaving
        if come:
            self._notify(HostUpdateResult.added)
        if gone:
            self._notify(HostUpdateResult.removed)

    def _notify(self, change: HostUpdateResult) -> None:
        """Notify all listeners of a change that has come now."""
        with self._lock:
            listeners = list(self._listeners)
        # Without the lock, as in handle_hosts_updated().
        for listener in listeners:
            listener.on_hosts_updated(self._time_for(listener), change)

    def _time_for(self, listener: Listener) -> float:
        """Return the time now, in seconds since 1970, or just above the last one on which the listener has agreed.

        A state drops news that is not newer. The agreed time can come from a rank whose clock is ahead, and this clock can be set back.
        """
        agreed = listener._last_updated_timestamp if isinstance(listener, State) else 0.0
        with self._lock:
            # Above the news before it, too: of two changes with one time, a state would drop the second.
            self._newest = max(time.time(), math.nextafter(max(agreed, self._newest), math.inf))
            return self._newest


notification_manager = NotificationManager()
"""The manager of this process: there is one, as there is one engine."""
