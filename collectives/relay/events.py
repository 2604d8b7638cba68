"""What happens to a relay, and what it wants done about it."""

from __future__ import annotations

from typing import NamedTuple

from hvdlab.collectives.protocol.messages import Faulty, From, Lost, Pong

# -- events -----------------------------------------------------------------------------------------------------------


class Opened(NamedTuple):
    """A connection from below. At its other end is a rank, or another relay if ``relays``; ``connection`` is never used again."""

    connection: int
    relays: bool = False


class Heard(NamedTuple):
    """The payload of a frame came over a connection from below."""

    connection: int
    payload: bytes


class Ended(NamedTuple):
    """A connection from below has ended, and not because this relay has closed it. ``faulty``: it broke the protocol."""

    connection: int
    reason: str
    faulty: bool = False


class Told(NamedTuple):
    """The payload of a frame came from above."""

    payload: bytes


class Tick(NamedTuple):
    """The time that :meth:`RelayState.next_deadline` named has come."""


Event = Opened | Heard | Ended | Told | Tick

# -- effects ----------------------------------------------------------------------------------------------------------


class SendUp(NamedTuple):
    """Send a message to the coordinator, or to the relay above."""

    message: From | Lost | Faulty | Pong


class SendDown(NamedTuple):
    """Send a payload over these connections from below."""

    connections: tuple[int, ...]
    payload: bytes


class CloseConnection(NamedTuple):
    """Close a connection once what was sent over it is delivered; no event follows."""

    connection: int


Effect = SendUp | SendDown | CloseConnection
