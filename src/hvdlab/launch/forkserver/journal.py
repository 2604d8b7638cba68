"""What a fork server was ordered and what it has reported, which its successor must know if it dies. Pure logic."""

from __future__ import annotations

import signal

from hvdlab.launch.forkserver.messages import (
    CONTROLLER,
    Adopt,
    Children,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    ForkServerMessage,
    FromServer,
    Guard,
    Keep,
    Signal,
)

TRIES = 3
"""After this many fork servers have died over the order for a child, the next one does not get it."""


class Journal:
    """Kept up to date by :meth:`remember` and :meth:`heard`.

    Attributes:
        children: Number to child, for the children that live.
    """

    def __init__(self) -> None:
        self.children: dict[int, Forked] = {}
        self._orders: dict[int, Fork] = {}
        self._tries: dict[int, int] = {}
        self._ends: dict[int, Signal] = {}
        self._guard: Guard | None = None
        self._keep: Keep | None = None

    def remember(self, message: ForkServerMessage) -> None:
        """Note an order to the fork server."""
        match message:
            case Fork(number):
                self._orders[number], self._tries[number] = message, 0
            case Signal(number, wanted) if number in self.children and wanted in (
                signal.SIGTERM,
                signal.SIGKILL,
            ):
                self._ends[number] = message
            case Adopt(children):
                self.children.update({child.number: child for child in children})
            case Guard():
                self._guard = message
            case Keep():
                self._keep = message

    @property
    def guarded(self) -> tuple[str, ...]:
        """The files that the fork server removes at its end."""
        return self._guard.paths if self._guard is not None else ()

    def forget_keeping(self) -> None:
        """Drop the last :class:`Keep`, which failed."""
        self._keep = None

    def heard(self, message: FromServer) -> None:
        """Note a message of the fork server."""
        match message:
            case Forked(number):
                self._orders.pop(number, None)
                self.children[number] = message
            case ForkFailed(number):
                self._orders.pop(number, None)
            case Exited(number, pid):
                child = self.children.get(number)
                if child is not None and child.pid == pid:
                    del self.children[number]
                    self._ends.pop(number, None)
            case Children(children, guarded):
                self.children = {child.number: child for child in children}
                self._guard = Guard(guarded)

    def died(self) -> list[FromServer]:
        """The fork server has died. Returns the messages that it would have sent about what ended with it."""
        ended: list[FromServer] = []
        for number, order in list(self._orders.items()):
            self._tries[number] += 1
            if number == CONTROLLER or self._tries[number] >= TRIES:
                del self._orders[order.number]
                ended.append(ForkFailed(number, "the process that was to fork it died"))
        controller = self.children.pop(CONTROLLER, None)  # it ends with the fork server
        if controller is not None:
            ended.append(Exited(CONTROLLER, controller.pid, -1, 0, 0))
        return ended

    def for_successor(self) -> list[ForkServerMessage]:
        """The first messages to the successor."""
        settings = [message for message in (self._keep, self._guard) if message is not None]
        adopt = Adopt(tuple(self.children.values()))
        return [adopt, *settings, *self._orders.values(), *self._ends.values()]
