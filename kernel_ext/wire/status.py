"""Requests about a rank and its variables with their replies, the status that a pool makes of these, and the dump of a stack.

C code that keeps the interpreter's lock keeps every thread from answering. Python's fault handler needs no lock: at
:data:`SIGNAL` it writes the main thread's calls to a file in memory, which the pool's process finds by its name.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import msgspec

from hvdlab.kernel_ext.wire.channel import RankReply, RankRequest

if TYPE_CHECKING:
    # Only for the checker: the module brings numpy, which a notebook without a pool does not need.
    from hvdlab.collectives.planes.base import Links


class AskStatus(RankRequest, frozen=True):
    """Ask for a :class:`Status`."""


class AskStack(RankRequest, frozen=True):
    """Ask for a :class:`Stack`."""


class AskNames(RankRequest, frozen=True):
    """Ask for :class:`UserNames`."""


class Complete(RankRequest, frozen=True):
    """Ask for completions of ``code`` at ``cursor`` from the rank's variables."""

    code: str
    cursor: int


class Inspect(RankRequest, frozen=True):
    """Ask for the documentation of the name at ``cursor``."""

    code: str
    cursor: int
    detail: int = 0


class EvaluateExpressions(RankRequest, frozen=True):
    """Ask for :class:`ExpressionValues`: the client's expressions, by the names that it gives them."""

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


class Status(RankReply, frozen=True):
    """Answer to AskStatus; made by the control thread, so it comes even while the rank is busy.

    Memory in bytes; ``cpu`` in seconds of CPU time used so far; ``links`` as :data:`hvdlab.collectives.planes.base.Links`.
    """

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


class Stack(RankReply, frozen=True):
    """Answer to AskStack; made by the control thread, so it comes even while the rank is stuck.

    ``frames`` are the cell's own and those that they called, innermost last; empty if no cell is running. ``paused`` says why the
    rank waits for the user, such as at a prompt, as it reads after ``rank 3 is``; empty if it does not.
    """

    cell: str
    frames: tuple[StackFrame, ...]
    pending: tuple[PendingNow, ...] = ()
    paused: str = ""


class UserNames(RankReply, frozen=True):
    """Answer to AskNames, also from a busy rank: the names that the user has made there, in that order, modules apart."""

    variables: tuple[str, ...]
    modules: tuple[str, ...]


class Completions(RankReply, frozen=True):
    """Answer to Complete."""

    matches: tuple[str, ...]
    start: int
    end: int
    types: tuple[str, ...] = ()


class Inspection(RankReply, frozen=True):
    """Answer to Inspect; ``data`` is a mime bundle."""

    found: bool
    data: dict[str, Any]


class ExpressionValues(RankReply, frozen=True):
    """Answer to EvaluateExpressions: for each name the value of ``user_expressions`` in Jupyter's protocol."""

    results: dict[str, Any]


@dataclass(frozen=True, slots=True, repr=False)
class RankStatus:
    """One rank now. Its ``repr`` leaves out all that is not known or not there.

    Attributes:
        rank: Its number.
        host: Host that it runs on.
        pid: Its process there; 0 if it has none.
        device: Device that it computes on.
        state: ``idle``, ``running``, ``starting``, ``no answer``, or ``lost: `` and why; of a rank that the pool has let go also
            that it ``leaves at the next commit``.
        cell: Id of the cell that it runs.
        rss, pss: Resident and proportional set size in bytes; ``pss`` counts shared pages by their share.
        cpu: Seconds of processor time that it has used, or ``None`` if it did not answer.
        threads: Number of its threads.
        plane: Data plane that it uses.
        pending: Collectives that it is in, and other calls in which it waits for ranks.
        servers: Parameter servers of its key-value stores.
        device_memory: Bytes of GPUs' memory that its frameworks hold, used or kept for later.
        links: What its CUDA tensors go over to the other ranks, which it names by kind of link: ``same GPU``, ``NVLink``, ``PCIe``, ``peer
            access, link unknown``, ``link unknown``, ``network, through the host``, ``CUDA tensors through the host``. Empty before their first collective.
    """

    rank: int
    host: str = ""
    pid: int = 0
    device: str = ""
    state: str = ""
    cell: str = ""
    rss: int = 0
    pss: int = 0
    cpu: float | None = None
    threads: int = 0
    plane: str = ""
    pending: tuple[PendingNow, ...] = ()
    servers: tuple[ServerNow, ...] = ()
    device_memory: int = 0
    links: Links = field(default_factory=dict)

    def __repr__(self) -> str:
        values = (
            (f.name, getattr(self, f.name), {} if f.name == "links" else f.default) for f in fields(self)
        )
        shown = ", ".join(f"{name}={value!r}" for name, value, default in values if value != default)
        return f"{type(self).__name__}({shown})"


def rank_status(rank: int, host: str, pid: int, reply: Status) -> RankStatus:
    """Return the status of a rank on this host, in this process, as its reply has it."""
    return RankStatus(
        rank,
        host,
        pid,
        reply.device,
        reply.state,
        reply.cell,
        reply.rss,
        reply.pss,
        reply.cpu,
        reply.threads,
        reply.plane,
        reply.pending,
        reply.servers,
        reply.device_memory,
        reply.links,
    )


SIGNAL = signal.SIGWINCH
"""Ignored by default, so that it does no harm if the handler is not there (any more)."""

NAME = "hvdlab-stack"
"""The file's name, as ``/proc/<pid>/fd`` shows it."""


def offer_dumps() -> None:
    """Have :data:`SIGNAL` dump the main thread's stack from now on."""
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    # The pool's process truncates the file before each dump; appending then begins at its start.
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(SIGNAL, fd, all_threads=False)
