"""Which children the warm process has and what is to be done about them: pure logic, no I/O.

``handle(event, now)`` takes what happened and returns what to do; :mod:`hvdlab.kernel_ext.warm.process` does it.
"""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass

from hvdlab.kernel_ext.warm.messages import (
    CONTROLLER,
    ControllerUp,
    Engine,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    Guard,
    Shutdown,
    Signal,
    ToWarm,
    WarmMessage,
)

TAIL_BYTES = 16 * 1024
TAIL_LINES = 100
GRACE_WITHOUT_POOL = 0.5
"""Seconds that children get to end by themselves when the pool's process is gone."""


# -- what happens -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """The pool sent a message."""

    message: ToWarm


@dataclass(frozen=True, slots=True)
class PoolLost:
    """The pool's process ended, or closed its end."""


@dataclass(frozen=True, slots=True)
class ForkReturned:
    """A fork that was ordered succeeded (``pid``) or failed (``error``)."""

    number: int
    pid: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """A child was reaped; ``max_rss`` in bytes."""

    pid: int
    code: int
    signal: int
    max_rss: int
    out_of_memory: bool


@dataclass(frozen=True, slots=True)
class ChildWrote:
    """Bytes came from a child's log or, after its end, were left in its standard error."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class ControllerListens:
    """The controller said that it is up."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The time that :meth:`Supervisor.next_tick` named has come."""


Event = Asked | PoolLost | ForkReturned | ChildEnded | ChildWrote | ControllerListens | Tick


# -- what to do -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Do:
    """Fork a child; answered by :class:`ForkReturned`."""

    order: Fork


@dataclass(frozen=True, slots=True)
class Kill:
    """Send a signal to a process, or to its process group."""

    pid: int
    signal: int
    group: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the pool, if it is still there."""

    message: WarmMessage


@dataclass(frozen=True, slots=True)
class TellController:
    """Tell the controller that a rank is an engine now, or has ended."""

    rank: int
    joined: bool


@dataclass(frozen=True, slots=True)
class Exit:
    """Remove these files and end."""

    paths: tuple[str, ...]


Effect = Do | Kill | Send | TellController | Exit


class Tail:
    """The end of a stream: the last lines, in a bounded number of bytes."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._size = 0

    def add(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size += len(data)
        while self._size - len(self._pieces[0]) >= TAIL_BYTES:
            self._size -= len(self._pieces.popleft())

    def text(self) -> str:
        data = b"".join(self._pieces)[-TAIL_BYTES:]
        return "\n".join(data.decode("utf-8", "replace").rstrip().splitlines()[-TAIL_LINES:])


@dataclass(slots=True)
class _Child:
    number: int
    pid: int
    tail: Tail


class Supervisor:
    """The warm process's table of children.

    A child's ``Exited`` is sent once it is reaped and everything that it wrote was handed to :meth:`handle`.
    """

    def __init__(self) -> None:
        self._children: dict[int, _Child] = {}
        self._guarded: tuple[str, ...] = ()
        self._stopping = False
        self._kill_at: float | None = None
        self._exited = False

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Asked(message):
                return self._asked(message, now)
            case PoolLost():
                return self._stop(GRACE_WITHOUT_POOL, now)
            case ForkReturned():
                return self._forked(event)
            case ChildEnded():
                return self._ended(event)
            case ChildWrote(number, data):
                child = self._children.get(number)
                if child is not None:
                    child.tail.add(data)
                return []
            case ControllerListens():
                child = self._children.get(CONTROLLER)
                return [Send(ControllerUp(child.pid))] if child else []
            case Tick():
                return self._tick(now)

    def next_tick(self) -> float | None:
        """When :class:`Tick` is due, on the clock of ``now``; ``None`` for never."""
        return self._kill_at

    def children(self) -> dict[int, int]:
        """Number to process id of the living children."""
        return {number: child.pid for number, child in self._children.items()}

    # -- requests -------------------------------------------------------------------------------------------------

    def _asked(self, message: ToWarm, now: float) -> list[Effect]:
        match message:
            case Fork(number):
                return self._order(message, number)
            case Signal(number, wanted, group):
                child = self._children.get(number)
                return [Kill(child.pid, wanted, group)] if child else []
            case Guard(paths):
                self._guarded = paths
                return []
            case Engine(rank, joined):
                return [TellController(rank, joined)] if CONTROLLER in self._children else []
            case Shutdown(grace):
                return self._stop(grace, now)

    def _order(self, order: Fork, number: int) -> list[Effect]:
        if self._stopping:
            return [Send(ForkFailed(number, "the warm process is stopping"))]
        if number in self._children:
            return [Send(ForkFailed(number, f"it runs already, as process {self._children[number].pid}"))]
        return [Do(order)]

    def _forked(self, event: ForkReturned) -> list[Effect]:
        if event.error:
            return [Send(ForkFailed(event.number, event.error))]
        self._children[event.number] = _Child(event.number, event.pid, Tail())
        return [Send(Forked(event.number, event.pid))]

    # -- ends -----------------------------------------------------------------------------------------------------

    def _ended(self, event: ChildEnded) -> list[Effect]:
        child = next((c for c in self._children.values() if c.pid == event.pid), None)
        if child is None:
            return []  # an orphan of a rank, adopted and reaped
        del self._children[child.number]
        effects: list[Effect] = [
            Send(
                Exited(
                    child.number,
                    child.pid,
                    event.code,
                    event.signal,
                    event.max_rss,
                    event.out_of_memory,
                    child.tail.text(),
                )
            ),
        ]
        if child.number != CONTROLLER and CONTROLLER in self._children:
            effects.append(TellController(child.number, False))
        return effects + self._exit_if_done()

    def _stop(self, grace: float, now: float) -> list[Effect]:
        kill_at = now + grace
        if self._stopping:
            # A second, shorter wish counts; a longer one does not prolong the first.
            if self._kill_at is not None:
                self._kill_at = min(self._kill_at, kill_at)
            return []
        self._stopping = True
        self._kill_at = kill_at
        effects: list[Effect] = [Kill(child.pid, signal.SIGTERM) for child in self._children.values()]
        return effects + self._exit_if_done()

    def _tick(self, now: float) -> list[Effect]:
        if self._kill_at is None or now < self._kill_at:
            return []
        self._kill_at = None
        return [Kill(child.pid, signal.SIGKILL, group=True) for child in self._children.values()]

    def _exit_if_done(self) -> list[Effect]:
        if not self._stopping or self._children or self._exited:
            return []
        self._exited = True
        self._kill_at = None
        return [Exit(self._guarded)]
