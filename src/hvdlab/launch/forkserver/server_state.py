"""The fork server's children and the decisions about them: pure logic, no I/O.

``handle(event, now)`` receives an event and returns actions; :mod:`hvdlab.launch.forkserver.server` does it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

import msgspec

from hvdlab.launch.forkserver.messages import (
    CONTROLLER,
    Adopt,
    Children,
    ControllerUp,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    ForkServerMessage,
    Guard,
    Keep,
    Kept,
    Loaded,
    ReportEngine,
    Shutdown,
    Signal,
    ToServer,
)
from hvdlab.launch.processes import OutputTail

GRACE_WITHOUT_POOL = 0.5
"""Seconds that children have to end by themselves when the pool's process is gone."""


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolRequested:
    """Event: the pool sent a message."""

    message: ToServer


@dataclass(frozen=True, slots=True)
class Imported:
    """Event: the imports are done: children can be forked."""

    loaded: Loaded


@dataclass(frozen=True, slots=True)
class PoolLost:
    """Event: the pool's process ended, or closed its end."""


@dataclass(frozen=True, slots=True)
class PoolFound:
    """Event: a successor of the pool's process has connected."""


@dataclass(frozen=True, slots=True)
class ListenReturned:
    """Event: listening for successors has begun, or failed (``error``); or has ended, if ``path`` is empty."""

    path: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class ForkReturned:
    """Event: a fork that was ordered succeeded (``child``) or failed (``error``)."""

    number: int
    child: Forked | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """Event: a child was reaped, or an adopted process has ended; ``max_rss`` in bytes.

    ``code`` -1 without a signal: how it ended is unknown. ``seen`` and ``left`` as in :class:`Exited`.
    """

    pid: int
    code: int = -1
    signal: int = 0
    max_rss: int = 0
    out_of_memory: bool = False
    seen: bool = False
    left: bytes | None = None


@dataclass(frozen=True, slots=True)
class ChildWrote:
    """Event: bytes came from a child's log or, after its end, were left in its standard error."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class ControllerListens:
    """Event: the controller has reported that it is up."""


@dataclass(frozen=True, slots=True)
class ForkServerTick:
    """Event: the time that :meth:`ForkServerState.next_tick` named has come."""


Event = (
    PoolRequested
    | Imported
    | PoolLost
    | PoolFound
    | ListenReturned
    | ForkReturned
    | ChildEnded
    | ChildWrote
    | ControllerListens
    | ForkServerTick
)


# -- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForkChild:
    """Effect: fork a child; answered by :class:`ForkReturned`."""

    order: Fork


@dataclass(frozen=True, slots=True)
class WatchProcess:
    """Effect: watch for the end of this process, which is not our child, and read its log; :class:`ChildEnded` if it has ended."""

    child: Forked


@dataclass(frozen=True, slots=True)
class Listen:
    """Effect: wait for a successor at this path, or (empty) no longer; answered by :class:`ListenReturned`."""

    path: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Effect: send a signal to a process, or to its process group."""

    pid: int
    signal: int
    group: bool = False


@dataclass(frozen=True, slots=True)
class SendToPool:
    """Effect: send a message to the pool, if it is still there."""

    message: ForkServerMessage


@dataclass(frozen=True, slots=True)
class NotifyController:
    """Effect: report to the controller that a rank is an engine now, or has ended."""

    rank: int
    joined: bool


@dataclass(frozen=True, slots=True)
class Exit:
    """Effect: remove these files and end."""

    paths: tuple[str, ...]


Effect = ForkChild | WatchProcess | Listen | Kill | SendToPool | NotifyController | Exit


@dataclass(slots=True)
class _Child:
    record: Forked
    tail: OutputTail

    @property
    def number(self) -> int:
        return self.record.number

    @property
    def pid(self) -> int:
        return self.record.pid


LONGEST_GRACE = 86400.0
"""Seconds that children may have at most to end by themselves, whatever the pool asks for."""


class ForkServerState:
    """The fork server's table of children.

    A child's ``Exited`` is sent once it is reaped and everything that it wrote was handed to :meth:`handle`.
    """

    def __init__(self) -> None:
        #: The living children by number.
        self._children: dict[int, _Child] = {}
        #: The outcome of the imports; until then orders wait in ``_early``.
        self._loaded: Loaded | None = None
        self._early: list[Fork] = []
        #: Whether a socket for successors of the pool's process exists.
        self._kept = False
        self._alone = False  # kept, and no pool's process is connected
        # Ends of ranks that have not been started again: a successor of the pool's process must learn of them.
        self._ends: dict[int, Exited] = {}
        #: Files that this process removes at its end.
        self._guarded: tuple[str, ...] = ()
        #: Whether all children were sent SIGTERM; when those that are left get SIGKILL; and whether ``Exit``
        #: was returned.
        self._stopping = False
        self._kill_at: float | None = None
        self._exited = False

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case PoolRequested(message):
                return self._asked(message, now)
            case Imported(loaded):
                self._loaded = loaded
                early, self._early = self._early, []
                return [SendToPool(loaded), *(effect for order in early for effect in self._order(order))]
            case PoolLost():
                self._alone = True
                return self._leave_if_useless(now) if self._kept else self._stop(GRACE_WITHOUT_POOL, now)
            case PoolFound():
                self._alone = False
                return self._introduce()
            case ListenReturned(path, error):
                self._kept = bool(path and not error)
                return [SendToPool(Kept(path, error))]
            case ForkReturned():
                return self._forked(event)
            case ChildEnded():
                return self._ended(event) + self._leave_if_useless(now)
            case ChildWrote(number, data):
                child = self._children.get(number)
                if child is not None:
                    child.tail.add(data)
                return []
            case ControllerListens():
                child = self._children.get(CONTROLLER)
                return [SendToPool(ControllerUp(child.pid))] if child else []
            case ForkServerTick():
                return self._tick(now)

    def next_tick(self) -> float | None:
        """Return when :class:`ForkServerTick` is due, on the clock of ``now``; ``None`` for never."""
        return self._kill_at

    @property
    def kept(self) -> bool:
        """Return whether this process stays when the pool's ends."""
        return self._kept and not self._stopping

    def children(self) -> dict[int, int]:
        """Return number to process id of the living children."""
        return {number: child.pid for number, child in self._children.items()}

    # -- requests -------------------------------------------------------------------------------------------------

    def _asked(self, message: ToServer, now: float) -> list[Effect]:
        match message:
            case Fork():
                return self._order(message)
            case Adopt(children):
                return self._adopt(children)
            case Keep(path):
                return [Listen(path)]
            case Signal(number, wanted, group):
                # An unknown number is no fault: the child may have ended after the pool sent this and
                # before `Exited` reached the pool.
                child = self._children.get(number)
                return [Kill(child.pid, wanted, group)] if child else []
            case Guard(paths):
                self._guarded = paths
                return []
            case ReportEngine(rank, joined):
                return [NotifyController(rank, joined)] if CONTROLLER in self._children else []
            case Shutdown(grace):
                return self._stop(grace, now)

    def _order(self, order: Fork) -> list[Effect]:
        number = order.number
        if self._loaded is None and not self._stopping:
            self._early.append(order)
            return []
        if self._stopping:
            return [SendToPool(ForkFailed(number, "the fork server is stopping"))]
        if number in self._children:
            return [
                SendToPool(ForkFailed(number, f"it runs already, as process {self._children[number].pid}"))
            ]
        return [ForkChild(order)]

    def _forked(self, event: ForkReturned) -> list[Effect]:
        if event.child is None:
            return [SendToPool(ForkFailed(event.number, event.error))]
        # No stop can have come since the order: the shell handles answers before all other events. So this child gets SIGTERM
        # like the others.
        self._add(event.child)
        return [SendToPool(event.child)]

    def _adopt(self, children: tuple[Forked, ...]) -> list[Effect]:
        for child in children:
            self._add(child)
        # The SIGTERM of `_stop` went to the children of that moment only.
        kill: list[Effect] = [Kill(child.pid, signal.SIGTERM) for child in children if self._stopping]
        return [*(WatchProcess(child) for child in children), *kill]

    def _add(self, child: Forked) -> None:
        self._children[child.number] = _Child(child, OutputTail())
        self._ends.pop(child.number, None)

    def _introduce(self) -> list[Effect]:
        """Return the messages that a successor of the pool's process needs."""
        loaded: list[Effect] = [SendToPool(self._loaded)] if self._loaded is not None else []
        children = tuple(child.record for child in self._children.values())
        return [
            *loaded,
            SendToPool(Children(children, self._guarded)),
            *(SendToPool(end) for end in self._ends.values()),
        ]

    # -- ends -----------------------------------------------------------------------------------------------------

    def _ended(self, event: ChildEnded) -> list[Effect]:
        child = next((c for c in self._children.values() if c.pid == event.pid), None)
        if child is None:
            return []  # an orphan of a rank, adopted and reaped
        del self._children[child.number]
        end = Exited(
            child.number,
            child.pid,
            event.code,
            event.signal,
            event.max_rss,
            event.out_of_memory,
            child.tail.text(),
            event.seen,
            event.left,
        )
        effects: list[Effect] = [SendToPool(end)]
        if child.number >= 0:
            # Without ``left``: a later process of the pool waits for no cell of a rank that it did not find.
            self._ends[child.number] = msgspec.structs.replace(end, left=None)
        if child.number >= 0 and CONTROLLER in self._children:
            effects.append(NotifyController(child.number, False))
        return effects + self._exit_if_done()

    def _leave_if_useless(self, now: float) -> list[Effect]:
        """Stop if this process stays for a successor of the pool's process, which would find no rank."""
        ranks = any(number >= 0 for number in self._children)
        return [] if ranks or not self._alone or self._stopping else self._stop(GRACE_WITHOUT_POOL, now)

    def _stop(self, grace: float, now: float) -> list[Effect]:
        # A wait for longer than that, or for NaN seconds, can't be asked of the selector.
        kill_at = now + (min(grace, LONGEST_GRACE) if grace > 0 else 0.0)
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
