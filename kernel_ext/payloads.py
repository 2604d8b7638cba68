"""What the pool and its ranks say to each other, as msgspec structs in the body of mail.

Every struct travels under the topic of its direction: :data:`TO_RANK` from the pool, :data:`TO_POOL` from a rank.
The coordinator relays the bytes without looking at them. No pickle here: :class:`Value` carries a pickle that the
user asked for by pulling, and that is only read by the pool that started the ranks.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol.codec import MALFORMED
from hvdlab.kernel_ext.inspect.messages import (
    AskBlocks,
    AskLeaves,
    AskTensors,
    AskVariables,
    AskView,
    Blocks,
    Compare,
    Compared,
    Examine,
    Examined,
    Gather,
    Leaves,
    Shared,
    Tensors,
    Variables,
    View,
)
from hvdlab.kernel_ext.payload import Payload
from hvdlab.kernel_ext.prompts.messages import Ask, Reply, Unask

TO_RANK = "hvdlab.pool.to_rank"
TO_POOL = "hvdlab.pool.to_pool"


# -- pool to rank -----------------------------------------------------------------------------------------------------


class RunCell(Payload, frozen=True):
    """Run a cell.

    Attributes:
        cell: Unique id of this run.
        label: How users know it, such as ``[7]``.
        source: Python source without the magic line; ``line_offset`` blank lines are to be thought before it, so that
            line numbers are those that the notebook shows.
        line_offset: Number of lines of the notebook's cell above the source (the magic line).
        want_value: Send the last expression's value, pickled, if it is no larger than ``value_limit`` bytes.
        file: What the frontend's debugger calls the whole cell.
    """

    cell: str
    label: str
    source: str
    line_offset: int = 1
    want_value: bool = True
    value_limit: int = 1 << 20
    store_history: bool = True
    file: str = ""


class Credit(Payload, frozen=True):
    """The pool has taken ``taken`` bytes of output of this cell so far; the rank may have a window more in flight."""

    cell: str
    taken: int


class Resync(Payload, frozen=True):
    """The pool may have missed mail: a coordinator died, or this pool has only now come to these ranks.

    Every cell of this rank that the pool waits for is listed, as ``(cell, received, taken)``: bytes of output that
    have arrived, and those of them that the pool has taken, as in :class:`Credit`. What follows ``received`` is to be
    sent again, the cell's :class:`CellDone` too if there is one. What is kept of other cells is no longer wanted.
    """

    cells: tuple[tuple[str, int, int], ...]


class Settled(Payload, frozen=True):
    """The pool has everything of this cell."""

    cell: str


class Owner(Payload, frozen=True):
    """This process, on the rank's host, uses the kept pool from now on; nobody does if ``pid`` is 0.

    ``started`` is when it started, in clock ticks since the boot.
    """

    pid: int
    started: int


class AskCells(Payload, frozen=True):
    """Ask which cells of a pool's process before this one the rank has: :class:`Cells`."""

    ticket: int


class PushValue(Payload, frozen=True):
    """Bind ``names[i]`` to the value pickled in ``pickles[i]``.

    With a ``lot`` one pickle of all values and its buffers were brought before, as :class:`PushPart`.
    """

    ticket: int
    names: tuple[str, ...]
    pickles: tuple[bytes, ...]
    lot: int = 0


class PushPart(Payload, frozen=True):
    """A piece of what a :class:`PushValue` with this ``lot`` will bind: ``data`` of one part at an offset.

    ``sizes`` are the bytes of all parts. The answer is a :class:`Done`; then what is ``shared`` may change.
    """

    ticket: int
    lot: int
    sizes: tuple[int, ...]
    part: int
    offset: int
    data: bytes
    shared: Shared | None = None


class PullValue(Payload, frozen=True):
    """Evaluate each expression and send the values back."""

    ticket: int
    names: tuple[str, ...]


class Fetch(Payload, frozen=True):
    """Ask for a :class:`Piece` of what the :class:`Value` with ticket ``lot`` did not carry.

    ``share`` says that the pool is on the rank's host and can look into its memory.
    """

    ticket: int
    lot: int
    part: int
    offset: int
    length: int
    share: bool = False


class Release(Payload, frozen=True):
    """Nothing of this lot is needed any longer."""

    lot: int


class AskStatus(Payload, frozen=True):
    """Ask for a :class:`Status`."""

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
    """Ask for :class:`Expressed`: expressions of a client, by its names for them."""

    ticket: int
    expressions: dict[str, str]


class AskStack(Payload, frozen=True):
    """Ask for a :class:`Stack`."""

    ticket: int


class AskNames(Payload, frozen=True):
    """Ask for :class:`Names`."""

    ticket: int


# -- rank to pool -----------------------------------------------------------------------------------------------------


class Stream(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Text of one stream (``stdout`` or ``stderr``), in the order in which it was written on this rank."""

    name: str
    text: str


class Display(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """A display_data (or, with ``update``, update_display_data) message; ``result`` marks the cell's value."""

    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str = ""
    update: bool = False
    result: bool = False


class Clear(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """clear_output."""

    wait: bool = False


Chunk = Stream | Display | Clear


class Output(Payload, frozen=True):
    """What a rank wrote since its last Output.

    ``total`` counts all bytes of this cell, this one's included, ``before`` those of the messages before it: the pool
    sees from them whether one is missing, or comes a second time.
    """

    cell: str
    chunks: tuple[Chunk, ...]
    total: int = 0
    before: int = 0


class CellError(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How a cell failed on a rank.

    Attributes:
        ename: Class name, such as ``ValueError``.
        evalue: Its text.
        traceback: Coloured lines, as IPython renders them, with the cell's own line numbers.
        when: ``time.monotonic_ns()`` of the raise (same host: comparable between ranks), to find the first.
        aborted: True if it only fails because a collective was ended by somebody else (AbortedError).
        collective: The collective it was stopped in, such as ``allreduce `loss```, if aborted.
        culprits: Ranks that the abort names as its cause.
        interrupted: True for KeyboardInterrupt.
        mismatch: True for MismatchError (the same text on all ranks).
        syntax: True if the source did not compile (the same on all ranks).
        cause: What kind of event aborted it (a value of ``CauseKind``), and ``why`` in words, if aborted.
        site: The cell's innermost line, such as ``cell [7] line 4 in step``; empty if it did not get there.
        recorded: The last steps of a training that was recorded, in lines; ``wrong`` the first that was not finite.
    """

    ename: str
    evalue: str
    traceback: tuple[str, ...]
    when: int
    aborted: bool = False
    collective: str = ""
    culprits: tuple[int, ...] = ()
    interrupted: bool = False
    mismatch: bool = False
    syntax: bool = False
    cause: str = ""
    why: str = ""
    site: str = ""
    recorded: tuple[str, ...] = ()
    wrong: str = ""


class CellDone(Payload, frozen=True):
    """The cell ended here; sent after its last Output, whose ``total`` it repeats.

    ``value`` is the pickled last expression if it was asked for and small enough; ``value_note`` says why it is
    missing. ``has_value`` is False when the last statement was no expression or gave None.
    """

    cell: str
    error: CellError | None
    seconds: float
    has_value: bool = False
    value: bytes | None = None
    value_repr: str = ""
    value_note: str = ""
    total: int = 0


class Done(Payload, frozen=True):
    """Answer to PushValue; ``error`` is empty if all is well."""

    ticket: int
    error: str = ""


class Value(Payload, frozen=True):
    """Answer to PullValue: pickles by name, or an error line for the names that could not be sent.

    What is too large for a message has neither, but ``sizes``: the bytes of a pickle and of its buffers, which are
    to be fetched (:class:`Fetch`) and then released (:class:`Release`). Only for a question about one name.
    """

    ticket: int
    pickles: tuple[bytes | None, ...]
    errors: tuple[str, ...]
    sizes: tuple[int, ...] = ()


class Piece(Payload, frozen=True):
    """Answer to Fetch; with neither if the value is not kept any longer. What is shared is valid until the next one."""

    ticket: int
    data: bytes | None
    shared: Shared | None = None


class PendingNow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A collective the rank is in; ``executing`` once all ranks have submitted it."""

    collective: str
    name: str
    site: str
    seconds: float
    executing: bool = False


class Status(Payload, frozen=True):
    """Answer to AskStatus; made by the control thread, so it comes even while the rank is busy.

    Memory in bytes; ``cpu`` in seconds of CPU time used so far.
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


class StackFrame(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where one function stands: ``place`` is ``cell [7]`` or a file's path, ``text`` the line if it is at hand."""

    function: str
    place: str
    line: int
    text: str = ""


class HeldCell(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A cell of which a rank has something that nobody has taken.

    Attributes:
        cell, label: As in :class:`RunCell`.
        before: Bytes of its output that are not there any more.
        dropped: Those of them that nobody has taken: it was too much to be kept.
        running: Whether it has not ended.
    """

    cell: str
    label: str
    before: int
    dropped: int
    running: bool


class Cells(Payload, frozen=True):
    """Answer to :class:`AskCells`, in the order in which they came."""

    ticket: int
    cells: tuple[HeldCell, ...]


class Stack(Payload, frozen=True):
    """Answer to AskStack; made by the control thread, so it comes even while the rank is stuck.

    ``frames`` are the cell's own and what they called, innermost last; empty if no cell is running. ``paused`` says why
    the user looks around there, as it reads after ``rank 3 is``; empty if nobody does.
    """

    ticket: int
    cell: str
    frames: tuple[StackFrame, ...]
    pending: tuple[PendingNow, ...] = ()
    paused: str = ""


class Names(Payload, frozen=True):
    """Answer to AskNames, also from a busy rank: what the user has made there, in that order; modules apart."""

    ticket: int
    variables: tuple[str, ...]
    modules: tuple[str, ...]


ToRank = (
    RunCell
    | Owner
    | AskCells
    | Credit
    | Resync
    | Settled
    | PushValue
    | PushPart
    | PullValue
    | Fetch
    | Release
    | AskStatus
    | Complete
    | Inspect
    | Express
    | AskStack
    | AskNames
    | Reply
    | Examine
    | AskLeaves
    | AskBlocks
    | Gather
    | Compare
    | AskView
    | AskVariables
    | AskTensors
)
ToPool = (
    Output
    | Cells
    | CellDone
    | Done
    | Value
    | Piece
    | Status
    | Completions
    | Inspection
    | Expressed
    | Stack
    | Names
    | Ask
    | Unask
    | Examined
    | Leaves
    | Blocks
    | Compared
    | View
    | Variables
    | Tensors
)

encode = msgspec.msgpack.Encoder().encode

_to_rank: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToRank)
_to_pool: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToPool)


def decode_to_rank(body: bytes) -> Any:
    """What the pool says to a rank, one of ``ToRank``. Raises ``ProtocolError`` if it is malformed."""
    try:
        return _to_rank.decode(body)
    except MALFORMED as error:
        raise ProtocolError(f"no message of a pool: {error}") from error


def decode_to_pool(body: bytes) -> Any:
    """What a rank says to the pool, one of ``ToPool``. Raises ``ProtocolError`` if it is malformed."""
    try:
        return _to_pool.decode(body)
    except MALFORMED as error:
        raise ProtocolError(f"no message of a rank: {error}") from error
