"""Questions about a rank and its variables, and the answers."""

from __future__ import annotations

from typing import Any

import msgspec

from hvdlab.kernel_ext.payload import Payload


class AskStatus(Payload, frozen=True):
    """Ask for a :class:`Status`."""

    ticket: int


class AskStack(Payload, frozen=True):
    """Ask for a :class:`Stack`."""

    ticket: int


class AskNames(Payload, frozen=True):
    """Ask for :class:`Names`."""

    ticket: int


class Complete(Payload, frozen=True):
    """Ask for completions of ``code`` at ``cursor`` from the rank's variables."""

    ticket: int
    code: str
    cursor: int


class Inspect(Payload, frozen=True):
    """Ask for the documentation of what stands at ``cursor``."""

    ticket: int
    code: str
    cursor: int
    detail: int = 0


class Express(Payload, frozen=True):
    """Ask for :class:`Expressed`: the client's expressions, by the names that it gives them."""

    ticket: int
    expressions: dict[str, str]


class PendingNow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A collective the rank is in; ``executing`` once all ranks have submitted it."""

    collective: str
    name: str
    site: str
    seconds: float
    executing: bool = False


class ServerNow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A parameter server that the rank is connected to: how many keys of the rank's stores it has, and the bytes of their values.

    ``pss`` is the memory of its process, 0 if that is on another host.
    """

    index: int
    host: str
    pid: int
    keys: int
    bytes: int
    pss: int


class Status(Payload, frozen=True):
    """Answer to AskStatus; made by the control thread, so it comes even while the rank is busy.

    Memory in bytes; ``cpu`` in seconds of CPU time used so far; ``links`` as :data:`hvdlab.collectives.planes.links.Links`.
    """

    ticket: int
    state: str
    cell: str
    rss: int
    pss: int
    cpu: float
    threads: int
    device: str
    plane: str
    pending: tuple[PendingNow, ...] = ()
    servers: tuple[ServerNow, ...] = ()
    device_memory: int = 0
    links: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)


class StackFrame(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where one function stands: ``place`` is ``cell [7]`` or a file's path, ``text`` the line if it is at hand."""

    function: str
    place: str
    line: int
    text: str = ""


class Stack(Payload, frozen=True):
    """Answer to AskStack; made by the control thread, so it comes even while the rank is stuck.

    ``frames`` are the cell's own and what they called, innermost last; empty if no cell is running. ``paused`` says why the
    rank waits for the user, such as at a prompt, as it reads after ``rank 3 is``; empty if it does not.
    """

    ticket: int
    cell: str
    frames: tuple[StackFrame, ...]
    pending: tuple[PendingNow, ...] = ()
    paused: str = ""


class Names(Payload, frozen=True):
    """Answer to AskNames, also from a busy rank: the names that the user has made there, in that order, modules apart."""

    ticket: int
    variables: tuple[str, ...]
    modules: tuple[str, ...]


class Completions(Payload, frozen=True):
    """Answer to Complete."""

    ticket: int
    matches: tuple[str, ...]
    start: int
    end: int
    types: tuple[str, ...] = ()


class Inspection(Payload, frozen=True):
    """Answer to Inspect; ``data`` is a mime bundle."""

    ticket: int
    found: bool
    data: dict[str, Any]


class Expressed(Payload, frozen=True):
    """Answer to Express: for each name what Jupyter's protocol wants in ``user_expressions``."""

    ticket: int
    results: dict[str, Any]
