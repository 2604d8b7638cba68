"""State that survives the loss of a rank: saved by each rank, restored after a failure, synchronized after a change of the world.

Ranks agree on two things here: whose state training resumes from (:func:`elect`), and whether the world is about to change
(:func:`merge_news`). :class:`NotificationManager` passes the coordinator's news of the world on to states.
"""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Callable, Iterable
from enum import IntFlag
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hvdlab.collectives import context
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.planes.buffers import host_view
from hvdlab.collectives.protocol.messages import MOST_RANKS
from hvdlab.collectives.types import DType, OpKind, ReduceOp


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
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Let the world change here, if it is about to. All ranks must call it alike, since they agree on that.

        Raises:
            HostsUpdatedInterrupt: The world is about to change; raised on all ranks.
        """
        before = latest = self._last_updated_timestamp
        changes = int(HostUpdateResult.no_update)
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                changes |= int(change)
        before, latest, changes = self._agree((before, latest, changes))
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
        for name, value in copy.deepcopy(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        if self._saved_state:
            synced = self._bcast_object({name: getattr(self, name) for name in self._saved_state})
            self._saved_state = synced
            for name, value in synced.items():
                setattr(self, name, value)
            self._saved_state = copy.deepcopy(synced)
        self._saves += 1


ATTEMPT = 1 << 24
"""Saves reserved for each restart: when the ranks begin again together, the count of their saves continues at the next multiple.

So a rank that was cut off, and that the others have continued without, is behind them however often it had saved.
"""


def next_attempt(saves: int) -> int:
    """Return the count of saves from which all ranks go on after a restart with the state of a rank that has saved ``saves`` times."""
    return (saves // ATTEMPT + 1) * ATTEMPT


def is_overtaken(saves: int, elected: int) -> bool:
    """Return whether the others have restarted without a rank.

    Args:
        saves: That rank's count of saves.
        elected: Count of the rank that is ahead.
    """
    return saves // ATTEMPT < elected // ATTEMPT


def elect(saves: int) -> tuple[int, int]:
    """Agree on the rank whose state is ahead.

    That is, of those that restarted last, the one that saved most often; among several, the one that was started with the lowest number.

    A newcomer has not saved yet, so its state is never chosen, which would undo the others' training. After a failure that hit
    ranks at different points, one of them may have committed once more than the others.

    Args:
        saves: This rank's count of saves (:data:`ATTEMPT`).

    Returns:
        The rank, as the core numbers it, and its count. Without other ranks, this one.
    """
    # Not as scripts number them: ranks that are let go before training has begun may change these numbers on the way.
    if not context.is_initialized():
        return 0, saves
    engine = context.engine()
    if engine.size == 1:
        return engine.rank, saves
    # One number whose minimum is the rank with the most saves, and among several the lowest.
    mine = np.array([engine.rank - saves * MOST_RANKS], dtype=np.int64)
    least = int(_reduced(mine, DType.I64, "elastic.root", ReduceOp.MIN)[0])
    return least % MOST_RANKS, -(least // MOST_RANKS)


def merge_news(news: News) -> News:
    """Return the news of all ranks together. A small collective: all ranks call it alike."""
    if not context.is_initialized() or context.engine().size == 1:
        return news
    before, latest, changes = news
    removed, added = bool(changes & HostUpdateResult.removed), bool(changes & HostUpdateResult.added)
    mine = np.array([before, latest, removed, added], dtype=np.float64)
    before, latest, removed, added = _reduced(mine, DType.F64, "elastic.news", ReduceOp.MAX).tolist()
    return before, latest, HostUpdateResult.removed * int(removed) | HostUpdateResult.added * int(added)


def _reduced(values: npt.NDArray[Any], dtype: DType, name: str, op: ReduceOp) -> npt.NDArray[Any]:
    """Allreduce a few numbers."""
    result = context.engine().run(Request(OpKind.ALLREDUCE, name, values, dtype=dtype, op=op))
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
            listener.on_hosts_updated(time.time(), HostUpdateResult.added)
        if engine is not None and engine.elastic.leaving:
            listener.on_hosts_updated(time.time(), HostUpdateResult.removed)

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
            self.handle_hosts_updated(time.time(), HostUpdateResult.added)
        if gone:
            self.handle_hosts_updated(time.time(), HostUpdateResult.removed)


notification_manager = NotificationManager()
"""The manager of this process: there is one, as there is one engine."""
