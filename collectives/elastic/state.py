"""The state that elastic training goes on from: each rank saves it, restores it after a failure, and all synchronize it after a change."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Iterable
from typing import Any

from hvdlab.collectives.elastic.interrupts import HostsUpdatedInterrupt, HostUpdateResult

BroadcastObject = Callable[[Any], Any]
"""Returns on all ranks the object of one rank, on which all agree."""

News = tuple[float, float, int]
"""When the world changed last, as known before; when, as known now; and how it has changed since."""


class State:
    """The base of all states; a subclass says what is saved, restored and synchronized.

    Args:
        bcast_object: Broadcasts an object.
        get_rank: Returns the number of this rank.
    """

    def __init__(self, bcast_object: BroadcastObject, get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._commits = 0

    def __getstate__(self) -> dict[str, Any]:
        """The attributes that another rank gets. News of the world are this rank's own, and do not go along."""
        return {name: value for name, value in self.__dict__.items() if name != "_host_messages"}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        # Not by setattr(): assigning to an attribute of a state may do more than store it.
        self.__dict__.update(
            attributes, _host_messages=queue.SimpleQueue(), _last_updated_timestamp=0, _commits=0
        )
        if (
            "_saves" in attributes
        ):  # a rank that only got the state has committed nothing: the others must not go on from its state
            self.__dict__["_saves"] = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call these whenever training begins again with other ranks, before the state is synchronized.

        A callback is the place to adapt what depends on ``hvd.size()``, such as the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Training begins again: drop news of the old world, then call :meth:`reset` and the callbacks."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """The world is about to change. Any thread; takes effect with the next :meth:`check_host_updates`.

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
        """Ranks are about to leave, and can still take part in collectives: let them give the others what only they know.

        Returns:
            Whether the ranks that stay have to synchronize their states after this.
        """
        return False

    def _agree(self, news: News) -> News:
        """Make the news the same on all ranks, which they reach at different times."""
        agreed: News = self._bcast_object(news)
        return agreed

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the state the same on all ranks, which call this alike."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the ranks that are there now. Called by :meth:`on_reset`."""


class ObjectState(State):
    """Any Python objects as state; each is an attribute, to be read and assigned.

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
