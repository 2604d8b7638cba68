"""Messages about cells: their start, output and end, and the prompts for input that they make."""

from __future__ import annotations

from typing import Any

import msgspec

from hvdlab.kernel_ext.wire.channel import Payload, RankReply, RankRequest


class RunCell(Payload, frozen=True):
    """Run a cell.

    Attributes:
        cell: Unique id of this run.
        label: The name that users know it by, such as ``[7]``.
        source: Python source without the magic line; the rank compiles it as if ``line_offset`` blank lines were before it,
            so that line numbers are those that the notebook shows.
        line_offset: Number of lines of the notebook's cell above the source (the magic line).
        want_value: Send the last expression's value, pickled, if it is no larger than ``value_limit`` bytes.
        store_history: Whether the cell is one of a notebook's: its source becomes ``In[n]``, its value ``_`` and ``Out[n]``.
        file: The file by which the frontend's debugger knows the whole cell.
        at_least: Ranks that elastic training needs in this cell; 0 in a cell that is not elastic.
        at_most: Ranks that the pool may have while an elastic cell runs; None for no limit. It is for the pool, and for the process
            that takes the pool over.
        joins: Whether other ranks have been running it for a while: this one enters the world first.
        announced: Whether the coordinator was sent that this rank gets the cell, before the cell itself.
        discards: Earlier cells of which the pool has everything, as in :class:`DiscardCell`.
    """

    cell: str
    label: str
    source: str
    line_offset: int = 0
    want_value: bool = True
    value_limit: int = 1 << 20
    store_history: bool = False
    file: str = ""
    at_least: int = 0
    at_most: int | None = None
    joins: bool = False
    announced: bool = False
    discards: tuple[str, ...] = ()


ACK_BYTES = 1 << 20
"""Bytes of a cell's output that the pool takes from a rank between two acknowledgements. A rank may not wait for more: the pool
never acknowledges fewer, and would be waiting for the rank."""


class Acknowledge(Payload, frozen=True):
    """The pool has taken ``taken`` bytes of output of this cell so far; the rank may have a window more in flight."""

    cell: str
    taken: int


class AcknowledgeLate(Payload, frozen=True):
    """The pool has taken ``taken`` bytes of this rank's output after the ends of cells; the rank can have a window more in flight."""

    taken: int


class ResendFrom(Payload, frozen=True):
    """The pool may have missed mail: a coordinator died, or this pool has only now come to these ranks.

    Every cell of this rank that the pool waits for is listed, as ``(cell, received, taken)``: bytes of output that
    have arrived, and those of them that the pool has taken, as in :class:`Acknowledge`. The rank retransmits all that follows
    ``received``, the cell's :class:`CellDone` too if there is one, and forgets all other cells.
    """

    cells: tuple[tuple[str, int, int], ...]


class JoinedCell(Payload, frozen=True):
    """This rank has entered a cell that the pool sent it to join, with the variables of the others."""

    cell: str


class DiscardCell(Payload, frozen=True):
    """The pool has everything of this cell."""

    cell: str


class SetOwner(Payload, frozen=True):
    """This process uses the kept pool from now on; no process does if ``pid`` is 0.

    ``started`` is when it started, in clock ticks since the boot. If it is ``near``, it runs on the rank's host, and the rank sees its end;
    otherwise the pool's keeper sends this message again when the process has ended.
    """

    pid: int
    started: int
    near: bool = True


class ListRetainedCells(RankRequest, frozen=True):
    """Ask which cells the rank has of the process that had the pool before: :class:`RetainedCells`."""


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
    """Output of a rank since its last one.

    ``total`` counts all bytes of this cell, this one's included, ``before`` those of the messages before it: the pool
    sees from them whether one is missing, or comes a second time. The count is the rank's, which covers its crash ring: a change
    of the stream may count, too.
    """

    cell: str
    chunks: tuple[Chunk, ...]
    total: int = 0
    before: int = 0


class Late(Payload, frozen=True):
    """Output of a thread, task or subprocess of a cell after the cell's end.

    ``total`` counts all bytes that this rank has sent so, of whichever cells, this message's included. They have a window of
    their own, see :class:`AcknowledgeLate`.
    """

    cell: str
    chunks: tuple[Chunk, ...]
    total: int = 0


class CrashOutput(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Output of a rank that has died which it may not have sent; the process that forked it reports this, not by mail.

    Attributes:
        cell: The cell that wrote it.
        before: Bytes of its output before the first of ``chunks``, in the count of :class:`Output`.
        chunks: The output that followed; None is a display that was too large to be kept.
        sizes: The bytes for which each of ``chunks`` counts: its text's, and one before them if the stream changes there.
        rest: The bytes after that in the pipes of the rank's descriptors 1 and 2, which it had not read itself.
    """

    cell: str
    before: int = 0
    chunks: tuple[Chunk | None, ...] = ()
    sizes: tuple[int, ...] = ()
    rest: tuple[Stream, ...] = ()

    @property
    def total(self) -> int:
        """Return the number of bytes of the cell's output up to the end of ``chunks``."""
        return self.before + sum(self.sizes)

    def after(self, received: int) -> CrashOutput:
        """Return the same without the first ``received`` bytes of the cell's output."""
        before, chunks, sizes = self.before, list(self.chunks), list(self.sizes)
        while chunks and before < received:
            chunk, size = chunks[0], sizes[0]
            if before + size <= received or not isinstance(chunk, Stream):
                before += size
                del chunks[0], sizes[0]
                continue
            text = chunk.text.encode()
            mark = max(0, size - len(text))
            raw = text[max(0, received - before - mark) :]
            chunks[0], sizes[0] = Stream(chunk.name, raw.decode("utf-8", "replace")), len(raw)
            before = received
        return CrashOutput(self.cell, before, tuple(chunks), tuple(sizes), self.rest)


class CellError(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How a cell failed on a rank.

    Attributes:
        ename: Class name, such as ``ValueError``.
        evalue: Its text.
        traceback: Coloured lines, as IPython renders them, with the cell's own line numbers.
        when: ``time.monotonic_ns()`` of the raise (same host: comparable between ranks), to find the first.
        aborted: True if the cell only failed because another rank ended a collective (AbortedError).
        collective: The collective it was stopped in, such as ``allreduce `loss```, if aborted.
        culprits: Ranks that the abort names as its cause.
        interrupted: True for KeyboardInterrupt.
        mismatch: True for MismatchError (the same text on all ranks).
        syntax: True if the source did not compile (the same on all ranks).
        cause: The kind of event that aborted it (a value of ``CauseKind``), and ``why`` in words, if aborted.
        site: The cell's innermost line, such as ``cell [7] line 4 in step``; empty if no line of the cell was reached.
        recorded: The last steps of a training that was recorded, in lines; ``wrong`` the first that was not finite.
        decision: Entry of the coordinator's decision log that led to it; 0 if the coordinator did not.
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
    decision: int = 0


class CellDone(Payload, frozen=True):
    """The cell ended here; sent after its last Output, whose ``total`` it repeats.

    ``value`` is the pickled last expression if it was asked for and small enough; ``value_note`` says why it is
    missing, and ``too_large`` whether it was larger than :attr:`RunCell.value_limit`. ``has_value`` is False when the last statement was no expression or gave None.
    """

    cell: str
    error: CellError | None
    seconds: float
    has_value: bool = False
    value: bytes | None = None
    value_repr: str = ""
    value_note: str = ""
    total: int = 0
    too_large: bool = False


class RetainedCell(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A cell of which a rank has something that no process has taken.

    Attributes:
        cell, label: As in :class:`RunCell`.
        before: Bytes of its output that the rank does not have any more.
        dropped: Those of them that no process has taken: they were too much to be kept.
        running: Whether it has not ended.
        order: The message that the rank was sent, if the cell is elastic: ranks that come later have to get it, too.
        interrupted: Whether it has ended by a KeyboardInterrupt.
    """

    cell: str
    label: str
    before: int
    dropped: int
    running: bool
    order: RunCell | None = None
    interrupted: bool = False


class RetainedCells(RankReply, frozen=True):
    """Answer to :class:`ListRetainedCells`: the cells, in the order in which they came.

    Attributes:
        interrupted: The label of the last cell, if its notebook has seen it interrupted and ended right after; else empty.
    """

    cells: tuple[RetainedCell, ...]
    interrupted: str = ""


INPUT, PASSWORD, DEBUGGER = "input", "password", "debugger"
"""Kinds of questions: for a line, a line that is not shown while it is typed, a debugger's command."""

LONGEST_PROMPT = 2000
"""Characters of a prompt that are shown."""

AT_AN_END = "eof"
"""In place of an error's sentence: the user has ended the input."""


class PromptRequest(Payload, frozen=True):
    """A rank waits for a line from the user; sent again if it, or the answer, may have got lost.

    Attributes:
        cell: The id of the cell that asks.
        number: Distinguishes this rank's questions.
        kind: One of :data:`INPUT`, :data:`PASSWORD`, :data:`DEBUGGER`.
        prompt: The text in front of the input.
    """

    cell: str
    number: int
    kind: str
    prompt: str


class PromptWithdrawn(Payload, frozen=True):
    """A rank does not wait for this answer any more."""

    cell: str
    number: int


class PromptReply(Payload, frozen=True):
    """The answer to :class:`PromptRequest` with this number.

    Attributes:
        error: Empty, :data:`AT_AN_END`, or a sentence that says why there is no answer.
    """

    number: int
    text: str
    error: str = ""


NO_NOTEBOOK = "{what} can't ask: no notebook waits for this cell any more"
