"""Poller: descriptors that the server waits for, and the target that handles each."""

from __future__ import annotations

import math
import select
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
_AT_ONCE = 256
"""Descriptors that one wait returns at most; the others follow in the next one."""

Target = TypeVar("Target")


class Pollable(Protocol):
    """Object with a descriptor."""

    def fileno(self) -> int: ...


class Poller(Generic[Target]):
    """Set of descriptors in an epoll; costs a third of ``selectors`` per wait, which is a good part of a small collective.

    Errors and hang-ups are reported as both readable and writable: the target meets them when it reads or writes.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        #: Targets by descriptor.
        self._targets: dict[int, Target] = {}

    def register(self, watched: Pollable | int, events: int, target: Target) -> None:
        """Watch a descriptor for ``READ``, ``WRITE`` or both."""
        descriptor = watched if isinstance(watched, int) else watched.fileno()
        self._epoll.register(descriptor, events)
        self._targets[descriptor] = target

    def modify(self, watched: Pollable, events: int) -> None:
        """Change the events to watch for."""
        self._epoll.modify(watched.fileno(), events)

    def unregister(self, watched: Pollable | int) -> None:
        """Watch no longer. Must be called before the descriptor is closed."""
        descriptor = watched if isinstance(watched, int) else watched.fileno()
        del self._targets[descriptor]
        self._epoll.unregister(descriptor)

    def __iter__(self) -> Iterator[Target]:
        return iter(list(self._targets.values()))

    def wait(self, timeout: float | None) -> list[tuple[Target, int]]:
        """Wait for at most ``timeout`` seconds (``None``: for ever). Return the targets that are ready, with their events."""
        # Rounded up: otherwise the caller would spend the last fraction of a millisecond in a busy loop.
        seconds = -1 if timeout is None else math.ceil(timeout * 1000) / 1000
        targets = self._targets
        return [
            (targets[descriptor], events if not events & ~(READ | WRITE) else READ | WRITE)
            for descriptor, events in self._epoll.poll(seconds, _AT_ONCE)
        ]

    def close(self) -> None:
        self._epoll.close()
