"""Event loop of a thread: descriptors that it waits for, each with its target, and calls that are due at a time."""

from __future__ import annotations

import contextlib
import math
import os
import select
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
NEVER = math.inf
"""Time of a call that is not due: later than any other."""
_AT_ONCE = 256
"""Descriptors that one wait returns at most; the others follow in the next one."""

Target = TypeVar("Target")


class Pollable(Protocol):
    """Object with a descriptor."""

    def fileno(self) -> int: ...


class CallScheduler(Protocol):
    """Scheduler of calls on the thread of an event loop."""

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Schedule a call at ``when`` (``time.monotonic()``)."""


class EventLoop(Generic[Target]):
    """Descriptors in an epoll, and calls; the thread that owns it waits in :meth:`wait` and decides what each target means.

    An epoll costs a third of ``selectors`` per wait, which is a good part of a small collective.
    Errors and hang-ups are reported as both readable and writable: the target meets them when it reads or writes.

    Attributes:
        next_call: Time at which :meth:`call_due` has something to do (``time.monotonic()``), or :data:`NEVER`.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        #: Targets by descriptor.
        self._targets: dict[int, Target] = {}
        #: Calls of :meth:`call_at`, with their times.
        self._calls: list[tuple[float, Callable[[], None]]] = []
        self.next_call = NEVER

    # -- descriptors --------------------------------------------------------------------------------------------------

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
        # A whole list, before the caller handles the first target: that can unregister others.
        return [
            (targets[descriptor], events if not events & ~(READ | WRITE) else READ | WRITE)
            for descriptor, events in self._epoll.poll(seconds, _AT_ONCE)
        ]

    # -- calls --------------------------------------------------------------------------------------------------------

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Schedule a call by :meth:`call_due` at ``when`` (``time.monotonic()``)."""
        self._calls.append((when, call))
        self.next_call = min(self.next_call, when)

    def call_due(self, now: float) -> None:
        """Make the calls that are due at ``now``, in the order in which they were scheduled."""
        if now < self.next_call:
            return
        # Removed before they are made: a call can schedule itself again.
        due = [call for when, call in self._calls if now >= when]
        self._calls = [(when, call) for when, call in self._calls if now < when]
        self.next_call = min([when for when, _ in self._calls], default=NEVER)
        for call in due:
            call()

    def close(self) -> None:
        """End the watch of all descriptors, which stay open."""
        self._epoll.close()


class WakeUp:
    """Descriptor that other threads, and signals, make readable to wake the thread of an event loop.

    Attributes:
        writer: For ``signal.set_wakeup_fd``.
    """

    def __init__(self) -> None:
        # A pipe, not an eventfd: a signal writes one byte, and an eventfd takes only eight.
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self.writer, False)

    def fileno(self) -> int:
        return self._reader

    def wake(self) -> None:
        """Make it readable. Any thread."""
        # A full pipe wakes as well as one more byte.
        with contextlib.suppress(BlockingIOError):
            os.write(self.writer, b"\0")

    def drain(self) -> None:
        """End the readability, before the reason for it is handled. On the loop's thread."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)

    def close(self) -> None:
        """Close both ends. No thread must wake it afterwards."""
        os.close(self._reader)
        os.close(self.writer)
