"""Events that the coordinator's state machine handles, and the effects that its server carries out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hvdlab.collectives.protocol.messages import Configure, FromClient, FromRank, Hello, Message

# -- events -----------------------------------------------------------------------------------------------------------


class PeerConnected(NamedTuple):
    """Introduction of a connection with a valid token. ``peer`` is a number that is never used again."""

    peer: int
    hello: Hello


class Received(NamedTuple):
    """Message from a peer that was welcomed."""

    peer: int
    message: FromRank | FromClient


class PeerLost(NamedTuple):
    """End of a peer's connection without Bye.

    ``silence`` are the seconds since its last bytes. ``faulty``: it broke the protocol, and would do so again.
    """

    peer: int
    reason: str
    silence: float = 0.0
    faulty: bool = False


class Tick(NamedTuple):
    """Arrival of the time that :meth:`CoordinatorState.next_deadline` has named."""


Event = PeerConnected | Received | PeerLost | Tick

# -- effects ----------------------------------------------------------------------------------------------------------


class Send(NamedTuple):
    """Order to send one message to these peers."""

    peers: tuple[int, ...]
    message: Message


class SendConfigure(NamedTuple):
    """Order to send ``message`` to these peers with one shared memory object of ``memory`` bytes.

    If the object can't be created, the server sends ``fallback`` without one.
    """

    peers: tuple[int, ...]
    message: Configure
    memory: int
    fallback: Configure


class CloseConnection(NamedTuple):
    """Order to close a peer's connection once all messages to it are delivered; no event follows."""

    peer: int


class Log(NamedTuple):
    """Order to write a line for the operator.

    ``warning`` is False for news that peers learn anyway, such as a death: they go to the log file only. ``decision`` is the entry of the
    decision log that the line is about, or 0.
    """

    text: str
    warning: bool = True
    decision: int = 0


class Tuned(NamedTuple):
    """Order to add a line to the tuner's log."""

    line: str


Effect = Send | SendConfigure | CloseConnection | Log | Tuned


class Effects:
    """Effects in the order in which they were caused."""

    __slots__ = ("_effects",)

    def __init__(self) -> None:
        #: Effects that are not carried out yet.
        self._effects: list[Effect] = []

    def __bool__(self) -> bool:
        return bool(self._effects)

    def add(self, effect: Effect) -> None:
        """Add an effect behind the others."""
        self._effects.append(effect)

    def extend(self, effects: Iterable[Effect]) -> None:
        """Add effects behind the others."""
        self._effects += effects

    def send(self, peers: tuple[int, ...], message: Message) -> None:
        """Send a message to these peers, if there are any."""
        if peers:
            self._effects.append(Send(peers, message))

    def log(self, text: str, decision: int = 0) -> None:
        """Write a warning for the operator, about an entry of the decision log if there is one."""
        self._effects.append(Log(text, decision=decision))

    def note(self, text: str, decision: int = 0) -> None:
        """Write a line to the log file only, about an event that peers learn anyway."""
        self._effects.append(Log(text, warning=False, decision=decision))

    def pop_all(self) -> list[Effect]:
        """Remove and return all effects."""
        effects, self._effects = self._effects, []
        return effects
