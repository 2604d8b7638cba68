"""Dispatch of cells to the ranks, and of the ranks' messages to the cells.

Each cell has a :class:`ReceiveWindow`, by which its output has no gaps and no repetitions after a retransmit.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, auto
from functools import partial

import msgspec

from hvdlab.collectives.client import Client, CoordinatorLostError, Stall
from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.system import host_key
from hvdlab.kernel_ext.notebook.cells.cell_events import (
    CollectiveStalled,
    DoneArrived,
    OutputArrived,
    PoolNews,
    PoolReleased,
    PromptAsked,
    PromptCancelled,
    RankDied,
    RanksReleased,
    TakenOver,
)
from hvdlab.kernel_ext.notebook.cells.cell_state import CellState
from hvdlab.kernel_ext.notebook.cells.driver import CellHandle
from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.notebook.cells.sink import OutputSink, Sinks
from hvdlab.kernel_ext.notebook.elastic import Bounds, UnsyncedRanks
from hvdlab.kernel_ext.notebook.output.transcript import ShowLate, TranscriptStore
from hvdlab.kernel_ext.notebook.requests import RankDirectory, RankRequests
from hvdlab.kernel_ext.notebook.stack_probe import CellProbe, StackProbe
from hvdlab.kernel_ext.notebook.stdin import PromptDesk, Prompter
from hvdlab.kernel_ext.wire.cells import (
    NO_NOTEBOOK,
    Acknowledge,
    AcknowledgeLate,
    CellDone,
    CrashOutput,
    DiscardCell,
    JoinedCell,
    Late,
    Output,
    PromptReply,
    PromptRequest,
    PromptWithdrawn,
    ResendFrom,
    RunCell,
)
from hvdlab.kernel_ext.wire.channel import HandlerTable, RankReply
from hvdlab.kernel_ext.wire.codec import TO_POOL, TO_RANK, decode_to_pool, encode


@dataclass(frozen=True, slots=True)
class CellRequest:
    """Request to run a cell on ranks.

    Attributes:
        source: Python source, with IPython's magics and ``!``.
        ranks: The ranks that run it; None for all.
        label: The name that users know the cell by, such as ``[7]``.
        line_offset: Lines of the notebook's cell above ``source``, such as that of its magic.
        out: Sinks of the output; without one nothing is shown, and the output is only kept.
        timeout: Seconds after which the ranks are interrupted; None for no limit.
        want_value: Whether ranks send the value of the last expression.
        store_history: Whether the cell is one of a notebook's: its source becomes ``In[n]``, its value ``_`` and ``Out[n]`` on the ranks.
        file: The name in a frontend's debugger of the cell that ``source`` is the end of.
        prompter: Asks the user when a rank reads input (``input()``, a debugger), if the main thread drives the cell.
        late: Shows output of the cell's threads and tasks after its end, ``late(rank, chunks)``; called on a thread of the
            pool's, and must not block. The output is kept in any case.
        elastic: Limits of the number of ranks of an elastic cell; None if it is not elastic. See :meth:`Pool.run`.
    """

    source: str
    _: KW_ONLY
    ranks: Sequence[int] | None = None
    label: str = ""
    line_offset: int = 0
    out: Sinks = None
    timeout: float | None = None
    want_value: bool = True
    store_history: bool = False
    file: str = ""
    prompter: Prompter | None = None
    late: ShowLate | None = None
    elastic: Bounds | None = None

    def order(self, cell: str) -> RunCell:
        """Return the message that orders ranks to run the cell.

        Args:
            cell: The id of the cell.
        """
        bounds = self.elastic or Bounds(0)
        return RunCell(
            cell,
            self.label,
            self.source,
            self.line_offset,
            self.want_value,
            store_history=self.store_history,
            file=self.file,
            at_least=bounds.at_least,
            at_most=bounds.at_most,
            announced=True,
        )


class MessageFate(Enum):
    """Decision of the pool on a message."""

    TAKE = auto()
    DROP = auto()
    ASK = auto()
    """Drop it, and have the rank retransmit: messages before it are missing."""


@dataclass(slots=True)
class _Part:
    """Progress of a rank's part of the cell.

    Attributes:
        received: Bytes of output that have come.
        taken: Bytes of output that the sink has taken.
        asked: Whether the rank was asked to retransmit, and nothing in order has come since.
        ended: Whether nothing more is expected.
    """

    received: int = 0
    taken: int = 0
    asked: bool = False
    ended: bool = False


class ReceiveWindow:
    """Window over the messages of one cell: accepts each once and in order. No I/O, and no lock."""

    def __init__(self, ranks: Iterable[int], before: Mapping[int, int] | None = None) -> None:
        """Expect these ranks' parts.

        Args:
            ranks: The ranks that have the cell.
            before: Rank to the bytes of its output that came, or were lost, before this object was made.
        """
        self._parts = {rank: _Part() for rank in ranks}
        for rank, size in (before or {}).items():
            if rank in self._parts:
                self._parts[rank] = _Part(size, size)

    def add_ranks(self, ranks: Iterable[int]) -> None:
        """Expect parts of these ranks, too. A rank that had the cell before is a new process: its count begins from zero."""
        self._parts.update({rank: _Part() for rank in ranks})

    @property
    def waiting(self) -> tuple[int, ...]:
        """Return the ranks whose part has not ended."""
        return tuple([rank for rank, part in self._parts.items() if not part.ended])

    @property
    def is_empty(self) -> bool:
        """Return whether all parts have ended, and none had output."""
        return all([part.ended and not part.received for part in self._parts.values()])  # noqa: C419  # as there may be many

    def output(self, rank: int, message: Output) -> MessageFate:
        """Decide on output of a rank."""
        part = self._parts.get(rank)
        if part is None or part.ended:
            return MessageFate.DROP
        if message.before == part.received:
            part.received, part.asked = message.total, False
            return MessageFate.TAKE
        # Two requests to retransmit can overlap, one for a gap and one of `resync`: the
        # second answer repeats messages.
        return MessageFate.DROP if message.before < part.received else self._ask(part)

    def done(self, rank: int, message: CellDone) -> MessageFate:
        """Decide on a rank's report that its cell has ended."""
        part = self._parts.get(rank)
        if part is None or part.ended:
            return MessageFate.DROP
        # Output before it was lost with a connection. An end that is accepted now would close the part, and the
        # rest of its output would be dropped.
        if message.total > part.received:
            return self._ask(part)
        part.ended = True
        return MessageFate.TAKE

    def take_crash_output(self, rank: int, left: CrashOutput) -> tuple[int, CrashOutput] | None:
        """Take the output that a dead rank has left. Returns the number of bytes missing before it, and its part that had not come.

        Returns None if the end of its cell has come. From then on messages still on their way from the rank are repetitions.
        """
        part = self._parts.get(rank)
        if part is None or part.ended:
            return None
        rest = left.after(part.received)
        missing = max(0, rest.before - part.received)
        part.received = max(part.received, rest.total)
        return missing, rest

    def rank_died(self, rank: int) -> None:
        """Expect nothing more from this rank."""
        part = self._parts.get(rank)
        if part is not None:
            part.ended = True

    def acknowledged(self, rank: int, taken: int) -> None:
        """Record that the sink has taken this many bytes of a rank's output."""
        self._parts[rank].taken = taken

    def resend_position(self, rank: int) -> tuple[int, int] | None:
        """Return the bytes received and taken, for the request to send all that follows; None if its part has ended."""
        part = self._parts.get(rank)
        if part is None or part.ended:
            return None
        # The caller asks for all that is missing, so a gap that shows before the answer needs no request of its own.
        part.asked = True
        return part.received, part.taken

    @staticmethod
    def _ask(part: _Part) -> MessageFate:
        """Ask once: messages that were on their way arrive first, and the answer after them."""
        first, part.asked = not part.asked, True
        return MessageFate.ASK if first else MessageFate.DROP


DISCARDS_AT_ONCE = 64
"""Cells that ranks discard with the next cell at most; each further one is discarded at once."""

REPEAT_WITHIN = 1.0
"""Seconds before the loss of a coordinator in which an interrupt may have been lost with it."""


@dataclass(slots=True)
class _DispatchedCell:
    """Cell that is running.

    Attributes:
        order: The message to the ranks; without the source if another process sent it and the cell is not elastic.
        arrivals: Accepts each message of the ranks once and in order.
        handle: Takes the accepted messages as events; the caller waits on it.
        watch: Asks ranks for their stacks.
        elastic: Limits of the number of ranks, if they can come and go while the cell runs.
        joined: Ranks that were sent the cell while others ran it.
        unknown: Whether another process sent the cell and its source is not known here, so that it can't be sent again.
    """

    order: RunCell
    arrivals: ReceiveWindow
    handle: CellHandle
    watch: CellProbe
    elastic: Bounds | None = None
    joined: set[int] = field(default_factory=set)
    unknown: bool = False
    # Mail arrives on the client's thread, the report of a rank's end on the starter's: both feed arrivals and handle, in one order.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def orders(
        self, ranks: Sequence[int], *, announced: bool = True, discards: tuple[str, ...] = ()
    ) -> Iterator[tuple[RunCell, tuple[int, ...]]]:
        """Return the orders to run the cell, each with the ranks that get it: ranks that join enter the world first."""
        order = msgspec.structs.replace(self.order, announced=announced, discards=discards)
        if joining := tuple([rank for rank in ranks if rank in self.joined]):
            yield msgspec.structs.replace(order, joins=True), joining
        if others := tuple([rank for rank in ranks if rank not in self.joined]):
            yield order, others


@dataclass(frozen=True, slots=True)
class _DispatchedLink:
    """:class:`CellLink` and :class:`PromptLink` of a cell that a dispatcher has sent."""

    dispatcher: CellDispatcher
    cell: str
    arrivals: ReceiveWindow
    watch: CellProbe

    def acknowledge(self, rank: int, taken: int) -> None:
        self.arrivals.acknowledged(rank, taken)
        self.dispatcher.post(TO_RANK, encode(Acknowledge(self.cell, taken)), [rank])

    def interrupt(self, ranks: tuple[int, ...]) -> None:
        self.dispatcher.interrupt(ranks)

    def request_stacks(self, ranks: tuple[int, ...]) -> None:
        self.watch.request_stacks(ranks)

    def probe_processes(self, ranks: tuple[int, ...]) -> None:
        self.watch.probe_processes(ranks)

    def finished(self, results: CellResults) -> None:
        self.dispatcher.finish(self.cell, results)

    def reply(self, rank: int, reply: PromptReply) -> None:
        self.dispatcher.reply(rank, reply)


class CellDispatcher:
    """Dispatcher of cells to ranks, and of the ranks' messages to the cells.

    Mail can be lost with a coordinator. Between :meth:`connection_lost` and :meth:`resync` no cell is sent. :meth:`resync` has ranks
    retransmit missing messages, and sends once more the messages that ranks have perhaps not got.

    Args:
        client: The connection to the coordinator.
        ranks: The ranks.
        transcripts: Takes output of ranks after the end of a cell.
        stall_time: Seconds after which a line under a cell names the ranks that it waits for; None: never.
        replaceable: Whether single ranks can be started again.
        newcomers: The ranks that came later than others and lack their variables.
        kept: Whether the ranks may outlive this process.

    Attributes:
        interrupt_delay: Seconds from a SIGINT to this process until the ranks are interrupted, for cells that begin from then on.
        first_to_fail: The rank that failed first in the last cell that did not end well; None if there was none.
    """

    _mail = HandlerTable()  # messages of ranks, each with the rank; replies go to the requests

    def __init__(
        self,
        client: Client,
        ranks: RankDirectory,
        transcripts: TranscriptStore,
        *,
        stall_time: float | None = None,
        replaceable: bool = True,
        newcomers: UnsyncedRanks | None = None,
        kept: bool = False,
    ) -> None:
        self.interrupt_delay = 0.0
        self._kept = kept
        #: Cells that have ended and wrote nothing, with the ranks that keep their ends until the next cell comes.
        self._discards: dict[str, frozenset[int]] = {}
        self._newcomers = newcomers or UnsyncedRanks()
        self._client = client
        self._ranks, self._transcripts = ranks, transcripts
        self._lock = threading.Lock()
        self._runs: dict[str, _DispatchedCell] = {}  # cell's id to the cell, until its run is over
        self._order = threading.Lock()  # held while cells are sent, so that all ranks get them in one order
        self._connected = (
            True  # False between `connection_lost` and `resync`: cells are then sent by `resync`
        )
        self._leaving = False  # whether another process takes the cells over
        self._lost_at = 0.0  # time.monotonic() of the last loss of a coordinator
        self._notices: list[str] = []  # lines that no cell has shown
        self._silent = False  # whether the pool is about to end, and lines are dropped
        self._interrupted: dict[int, float] = {}  # when each rank was interrupted last
        self._stall_time, self._replaceable = stall_time, replaceable
        #: Rank that was given up to the id and label of the cell that it may still be in.
        self._abandoned: dict[int, tuple[str, str]] = {}
        self.first_to_fail: int | None = None
        self.requests = RankRequests(self, ranks)
        self.stack_probe = StackProbe(self, self.requests, ranks)
        client.on_mail(TO_POOL, self._take)
        client.on_stall(self._stalled)

    @property
    def active(self) -> bool:
        """Return whether a cell is running."""
        return bool(self._runs)

    @property
    def abandoned(self) -> dict[int, tuple[str, str]]:
        """Return each rank that did not end a cell after an interrupt, with that cell (id and label); it may still be in it."""
        with self._lock:
            return dict(self._abandoned)

    def no_longer_abandoned(self, rank: int, cell: str) -> None:
        """Record that a rank has left a cell that was given up."""
        with self._lock:
            if self._abandoned.get(rank, ("", ""))[0] == cell:
                del self._abandoned[rank]

    def dispatch(self, cell: str, ranks: Sequence[int], request: CellRequest, sink: OutputSink) -> CellHandle:
        """Send a cell to ranks. The caller drives the run: by waiting on the handle, or by having it driven in the background.

        Args:
            cell: The id of the cell.
            ranks: The ranks that run it; all of them live.
            request: The cell.
            sink: Takes the output.
        """
        run = self._begin(request.order(cell), ReceiveWindow(ranks), ranks, request, sink)
        try:
            with self._order:
                self._send(run)
        # KeyboardInterrupt included: the cell is among the runs since `_begin`, and nothing else would take it out again.
        except BaseException:
            self.finish(cell, None)
            raise
        # rank_died() has reported earlier deaths before this run was there.
        self._tell_dead(run)
        return run.handle

    def take_over(
        self,
        cell: str,
        label: str,
        before: Mapping[int, int],
        sink: OutputSink,
        *,
        order: RunCell | None = None,
        joined: Collection[int] = (),
        leaving: tuple[int, ...] = (),
    ) -> CellHandle:
        """Go on with a cell that another process has sent; the next :meth:`resync` has the ranks send its output.

        Args:
            before: Rank to the bytes of its output that will not come, for the ranks that have the cell.
            order: The message to the ranks, if the cell is elastic: ranks can then join and leave it as before.
            joined: Ranks that were sent it while others ran it. They count as newcomers until they have reported that they entered
                it; those that have will report it again.
            leaving: Ranks that leave at the next commit.
        """
        elastic = Bounds(order.at_least, order.at_most) if order is not None else None
        # Before the run is made: its state machine gets the newcomers as they are at that moment.
        if joined:
            self._newcomers.join(cell, joined)
        order = msgspec.structs.replace(order, joins=False) if order is not None else RunCell(cell, label, "")
        request = CellRequest(order.source, label=label, elastic=elastic)
        run = self._begin(order, ReceiveWindow(before, before), tuple(before), request, sink)
        run.joined.update(joined)
        # Ranks report the order of an elastic cell only: of any other one the source died with the
        # process that sent it.
        run.unknown = elastic is None
        if elastic is not None:
            run.handle.post(TakenOver(leaving))
        self._tell_dead(run)
        return run.handle

    def keep_cells_on_ranks(self) -> None:
        """Let ranks retain the output of each cell from now on, also after its end: the next process may still ask for it."""
        self._leaving = True

    def _begin(
        self,
        order: RunCell,
        arrivals: ReceiveWindow,
        ranks: Sequence[int],
        request: CellRequest,
        sink: OutputSink,
    ) -> _DispatchedCell:
        cell, now = order.cell, time.monotonic()
        watch = self.stack_probe.watch()
        link = _DispatchedLink(self, cell, arrivals, watch)
        handle = CellHandle(
            CellState(
                cell,
                ranks,
                label=order.label,
                now=now,
                timeout=request.timeout,
                stall_time=self._stall_time,
                replaceable=self._replaceable,
                newcomers=self._newcomers.all(),
                elastic=request.elastic,
            ),
            sink,
            link,
            desk=PromptDesk(request.prompter, link),
            interrupt_delay=self.interrupt_delay,
        )
        # Only now: the handle needs the link, which needs this watch.
        watch.handle = handle
        run = _DispatchedCell(order, arrivals, handle, watch, request.elastic)
        # Before it is sent: the first output can come at once, on the client's thread.
        with self._lock:
            self._runs[cell] = run
        return run

    def elastic(self) -> dict[str, tuple[Bounds, tuple[int, ...]]]:
        """Return the elastic cells that run: the limits of each one's number of ranks, and the ranks that have not ended it."""
        with self._lock:
            return {
                cell: (run.elastic, run.arrivals.waiting)
                for cell, run in self._runs.items()
                if run.elastic is not None
            }

    def label(self, cell: str) -> str:
        """Return the name that a user knows a running cell by, such as ``cell [7]``; empty if it has ended."""
        with self._lock:
            return run.order.label if (run := self._runs.get(cell)) is not None else ""

    def join(self, cell: str, ranks: tuple[int, ...]) -> bool:
        """Send an elastic cell to ranks that came later and have got the others' variables.

        From then on the coordinator lets these ranks in, at the others' next commit. Returns False if the cell has ended.
        """
        with self._order:
            with self._lock:
                run = self._runs.get(cell)
                if run is None or not run.arrivals.waiting:
                    return False
                # finish() removes the cell under the same lock, so newcomers learn of its end after this.
                self._newcomers.join(cell, ranks)
                # Both under one lock: no mail of these ranks is accepted before the handle expects them.
                with run.lock:
                    run.arrivals.add_ranks(ranks)
                    run.handle.join(ranks)
                run.joined.update(ranks)
            self._send_to(run, ranks)
        self._tell_dead(run, ranks)
        return True

    def ranks_leave_at_commit(self, ranks: tuple[int, ...]) -> None:
        """Report to elastic cells that these ranks leave at the next commit. Call it before the coordinator sends it to the ranks."""
        with self._lock:
            handles = [run.handle for run in self._runs.values() if run.elastic is not None]
        for handle in handles:
            handle.post(RanksReleased(ranks))

    def _tell_dead(self, run: _DispatchedCell, ranks: Sequence[int] | None = None) -> None:
        """Report the death of those that have died since the caller had chosen them."""
        for rank, reason in self._ranks.losses(run.handle.ranks if ranks is None else ranks).items():
            # In one step, as for mail: output that is accepted before the death must not be posted behind it, where it is dropped.
            with run.lock:
                run.arrivals.rank_died(rank)
                run.handle.post(RankDied(rank, reason, time.monotonic_ns()))

    def interrupt(self, ranks: Sequence[int]) -> None:
        """Interrupt the cells of these ranks; if the coordinator is lost, as soon as there is another. Any thread."""
        # Recorded first: if the connection is lost in the middle, `resync` repeats it.
        self._interrupted.update(dict.fromkeys(ranks, time.monotonic()))
        with contextlib.suppress(CoordinatorLostError):
            self._client.interrupt(ranks)

    def drop_delayed_interrupts(self) -> None:
        """Drop the interrupts that are delayed: this process detaches from the ranks, and their cells go on. Any thread."""
        with self._lock:
            handles = [run.handle for run in self._runs.values()]
        for handle in handles:
            handle.post(PoolReleased())

    def post(self, topic: str, body: bytes, ranks: Sequence[int]) -> None:
        """Send mail of a kind that :meth:`resync` sends again: it can be lost with a coordinator. Any thread."""
        with contextlib.suppress(CoordinatorLostError):
            self._client.post(topic, body, ranks)

    def notice(self, text: str) -> None:
        """Show this line to the user: under the cells that run, or before the next cell. Any thread."""
        with self._lock:
            if self._silent:
                return
            # Under the lock: a run that is taken out of these has the line by then, and gives back the lines that it has not shown.
            for run in self._runs.values():
                run.handle.post(PoolNews(text))
            if not self._runs:
                self._notices.append(text)

    def take_notices(self) -> list[str]:
        """Return the lines of :meth:`notice` that no cell has shown. Each is returned once. Any thread."""
        with self._lock:
            notices, self._notices = self._notices, []
        return notices

    def silence(self) -> None:
        """Show no further lines, as the pool is about to end. Any thread."""
        with self._lock:
            self._silent = True

    def reply(self, rank: int, reply: PromptReply) -> None:
        """Send a rank the answer to its question to the user. Any thread."""
        self.post(TO_RANK, encode(reply), [rank])

    def rank_died(
        self, rank: int, reason: str, tail: str = "", detail: str = "", *, left: bool = False
    ) -> None:
        """End a rank's part in all cells. Any thread.

        Args:
            rank: The rank.
            reason: The reason of its end, which reads after its name.
            tail: The end of its standard error.
            detail: More about its end.
            left: Whether it has left by the pool's order.
        """
        # Before the locks, and one time for all cells: `CellResults.root_cause` compares it with the times of errors.
        when = time.monotonic_ns()
        with self._lock:
            self._abandoned.pop(rank, None)
            runs = list(self._runs.values())
        for run in runs:
            if rank in run.handle.ranks:
                with run.lock:
                    run.arrivals.rank_died(rank)
                    run.handle.post(RankDied(rank, reason, when, tail, detail, left))
        self.requests.rank_died(rank)

    def deliver_crash_output(self, rank: int, left: CrashOutput) -> bool:
        """Show output that a rank has left when it ended, and has perhaps not sent; :meth:`rank_died` follows. Any thread.

        Returns whether a running cell waits for this output, and thus shows it.
        """
        with self._lock:
            run = self._runs.get(left.cell)
        if run is None or rank not in run.handle.ranks:
            return False
        with run.lock:
            found = run.arrivals.take_crash_output(rank, left)
            if found is None:
                return False
            missing, rest = found
            missing += sum(size for chunk, size in zip(rest.chunks, rest.sizes, strict=True) if chunk is None)
            if missing:
                run.handle.post(PoolNews(f"{missing} bytes of what rank {rank} wrote were lost with it"))
            chunks = (*(chunk for chunk in rest.chunks if chunk is not None), *rest.rest)
            if chunks:
                run.handle.post(OutputArrived(rank, chunks, rest.total))
        return True

    def _stalled(self, stall: Stall) -> None:
        """Pass the report of a collective that has been waiting for long to the cells. The client's thread."""
        with self._lock:
            handles = [run.handle for run in self._runs.values()]
        for handle in handles:
            # To all cells: the report names ranks and a collective, but no cell. `StallReport` finds out
            # by asking the ranks.
            handle.post(CollectiveStalled(stall))

    # -- another coordinator --------------------------------------------------------------------------------------

    def connection_lost(self) -> None:
        """Stop sending cells, as the coordinator is lost. The client's thread; does not block."""
        self._connected = False
        self._lost_at = time.monotonic()

    def running(self) -> dict[str, tuple[int, ...]]:
        """Return the cells that run, and the ranks that have not ended theirs."""
        with self._lock:
            return {cell: waiting for cell, run in self._runs.items() if (waiting := run.arrivals.waiting)}

    def resync(self, ranks: Sequence[int], running: Mapping[str, Collection[int]]) -> None:
        """Make up for messages that were lost with a connection: send these ranks theirs, and have them retransmit ours.

        Args:
            ranks: The ranks that are connected.
            running: For each cell that the coordinator knows of, the ranks on which it counts as running.

        Raises:
            CoordinatorLostError: The new connection is lost as well.
        """
        with self._order:  # no other cell is sent meanwhile, which an interrupt of these would hit
            with self._lock:
                runs = list(self._runs.values())
            for run in runs:
                self._send_again(run, running)
            self._interrupt_again(runs)
            for rank in ranks:
                self._ask_again(rank)
            # Last: a cell that is begun meanwhile waits for `_order`, and its own thread sends it then. If it was sent above as
            # well, the ranks ignore the second order. If the new connection is lost in here, the next `resync` sends everything.
            self._connected = True
        self.requests.resend_pending()

    def rank_reconnected(self, rank: int) -> None:
        """Make up for messages that were lost between a rank and here: the rank was cut off, and has connected again.

        A cell that the others have begun meanwhile it runs by itself: the coordinator lets it in when they have ended theirs.

        Raises:
            CoordinatorLostError: This process's own connection is lost; :meth:`resync` makes up for it.
        """
        with self._order:
            with self._lock:
                runs = [run for run in self._runs.values() if rank in run.arrivals.waiting]
            # Without `cell_started`: the rank itself reports to the coordinator that it begins a cell, and a cell that the rank has
            # ended must not count as begun again.
            for run in runs if self._connected else ():
                for order, ranks in () if run.unknown else run.orders((rank,), announced=False):
                    self._client.post(TO_RANK, encode(order), ranks)
            self._ask_again(rank)
        self.requests.resend_pending()

    def _send_again(self, run: _DispatchedCell, running: Mapping[str, Collection[int]]) -> None:
        """Send a cell once more; ranks that have it already, or have ended it, ignore that."""
        if waiting := run.arrivals.waiting:
            known = running.get(run.order.cell, ())
            # Of a cell that the coordinator knows, some ranks can have joined since.
            if new := [rank for rank in waiting if rank not in known]:
                self._client.cell_started(run.order.cell, new, label=run.order.label)
            if not run.unknown:
                for order, ranks in run.orders(waiting):
                    self._client.post(TO_RANK, encode(order), ranks)

    def _interrupt_again(self, runs: Sequence[_DispatchedCell]) -> None:
        """Repeat the interrupts that may have been lost with the coordinator.

        This comes before ranks send the ends of their cells; a rank whose cell has ended ignores the interrupt.
        """
        since = self._lost_at - REPEAT_WITHIN
        waiting = {rank for run in runs for rank in run.arrivals.waiting}
        if again := [rank for rank in sorted(waiting) if self._interrupted.get(rank, -math.inf) > since]:
            self._client.interrupt(again)

    def _ask_again(self, rank: int) -> None:
        """Ask a rank to retransmit the missing messages of its cells."""
        with self._lock:
            cells = [
                (cell, *found)
                for cell, run in self._runs.items()
                if (found := run.arrivals.resend_position(rank)) is not None
            ]
        # Also if there is no cell: the rank forgets all that are not listed, such as one whose discard was lost.
        self._client.post(TO_RANK, encode(ResendFrom(tuple(cells))), [rank])

    # -- to the ranks ---------------------------------------------------------------------------------------------

    def _send(self, run: _DispatchedCell) -> None:
        """Send a cell, unless the coordinator is lost: then :meth:`resync` does it."""
        self._send_to(run, run.handle.ranks)

    def _send_to(self, run: _DispatchedCell, ranks: Sequence[int]) -> None:
        if not self._connected:
            return
        with contextlib.suppress(CoordinatorLostError):
            # Over one connection and in this order: the coordinator knows it before any rank can be ahead of the others in a collective.
            orders = run.orders(ranks, discards=self._take_discards(ranks))
            mail = [(TO_RANK, encode(order), those) for order, those in orders]
            self._client.cell_started(run.order.cell, ranks, label=run.order.label, mail=mail)

    def _take_discards(self, ranks: Collection[int]) -> tuple[str, ...]:
        """Return the cells that these ranks can discard with the next one. If its message is lost, :meth:`resync` has them discarded."""
        with self._lock:
            found = tuple(cell for cell, those in self._discards.items() if those.issubset(ranks))
            for cell in found:
                del self._discards[cell]
        return found

    def _discard(self, run: _DispatchedCell, results: CellResults | None) -> None:
        """Have the ranks forget a cell: at once if they keep much of it or may outlive this process, otherwise with their next cell."""
        cell, ranks = run.order.cell, run.handle.ranks
        # Ranks of a kept pool forget it at once: the next notebook must not be shown an end that this one has seen.
        if not self._kept and results is not None and results.ok and not results.has_values:
            with self._lock:
                if run.arrivals.is_empty and len(self._discards) < DISCARDS_AT_ONCE:
                    self._discards[cell] = frozenset(ranks)
                    return
        self.post(TO_RANK, encode(DiscardCell(cell)), ranks)

    def credit_late(self, rank: int, late: Late) -> None:
        """Let a rank write more, as its output after the end of a cell was shown. Any thread."""
        self.post(TO_RANK, encode(AcknowledgeLate(late.total)), [rank])

    def finish(self, cell: str, results: CellResults | None) -> None:
        """Forget a cell whose run is over, and let its ranks discard it. The driving thread.

        Args:
            cell: The cell's id.
            results: Its results; None if it could not be sent.
        """
        with self._lock:
            run = self._runs.pop(cell, None)
            if run is not None and results is not None:
                self._abandoned.update(dict.fromkeys(results.unanswered, (cell, run.order.label)))
        self._newcomers.cell_ended(cell)
        if results is not None and not results.ok:
            self.first_to_fail = _first_to_fail(results)
        if run is not None:
            # After the cell was taken out of the runs: `notice` posts to it no more, so no line comes behind these.
            notices = run.handle.take_undelivered_notices()
            with self._lock:
                self._notices += notices
            run.watch.close()
            gone = set(results.unanswered) if results is not None else set()
            if late := [rank for rank in run.arrivals.waiting if rank not in gone]:
                # These joined just when the others ended, so no handle waits for them.
                self.interrupt(late)
            # The next process asks ranks for the cells that they retain, and goes on with those.
            if not self._leaving:
                self._discard(run, results)

    # -- from the ranks -------------------------------------------------------------------------------------------

    def _take(self, rank: int, body: bytes) -> None:
        try:
            payload = decode_to_pool(body)
        except ProtocolError:
            return  # not from our agent: a user's code can send anything under any topic
        if isinstance(payload, RankReply):
            self.requests.resolve(rank, payload)
        else:
            self._mail.call(self, payload, rank)

    @_mail.handles(Late)
    def _take_late(self, late: Late, rank: int) -> None:
        shown = partial(self.credit_late, rank, late)
        self._transcripts.late(rank, late.cell, late.chunks, shown)

    @_mail.handles(JoinedCell)
    def _take_joined(self, joined: JoinedCell, rank: int) -> None:
        self._newcomers.mark_joined(joined.cell, rank)

    @_mail.handles(PromptWithdrawn)
    def _take_withdrawn(self, withdrawn: PromptWithdrawn, rank: int) -> None:
        run = self._runs.get(withdrawn.cell)
        if run is not None:
            run.handle.post(PromptCancelled(rank, withdrawn.number))

    @_mail.handles(PromptRequest)
    def _take_prompt(self, request: PromptRequest, rank: int) -> None:
        run = self._runs.get(request.cell)
        if run is not None:
            run.handle.post(PromptAsked(rank, request))
        else:
            # The run was given up, but the rank can still be in its cell: without an answer it would
            # wait there for ever.
            self.reply(rank, PromptReply(request.number, "", NO_NOTEBOOK))

    def _arrival(self, rank: int) -> tuple[str, int]:
        """Return the host of a rank and the present time; an empty name if that host has the clock of this process."""
        members = self._client.membership().members
        host = next((member.host for member in members if member.rank == rank), "")
        return ("" if host == host_key() else host), time.monotonic_ns()

    @_mail.handles(Output, CellDone)
    def _take_output(self, payload: Output | CellDone, rank: int) -> None:
        run = self._runs.get(payload.cell)
        if run is None:
            return
        with run.lock:
            if isinstance(payload, Output):
                verdict = run.arrivals.output(rank, payload)
                event: OutputArrived | DoneArrived = OutputArrived(rank, payload.chunks, payload.total)
            else:
                verdict = run.arrivals.done(rank, payload)
                host, when = self._arrival(rank) if payload.error is not None else ("", 0)
                event = DoneArrived(rank, payload, host, when)
            if verdict is MessageFate.TAKE:
                if isinstance(payload, CellDone):
                    # The interrupt was for this cell: `_interrupt_again` must not hit the next one.
                    self._interrupted.pop(rank, None)
                run.handle.post(event)
        # Without the run's lock: `_ask_again` takes the dispatcher's, and `join` takes that one first and then the run's.
        if verdict is MessageFate.ASK:
            with contextlib.suppress(CoordinatorLostError):
                self._ask_again(rank)


def _first_to_fail(results: CellResults) -> int | None:
    """Return the rank that has the error which the others came from; None if no rank has one."""
    cause, errors = results.root_cause, results.errors
    times = results.failure_times()
    by_time = sorted(errors, key=lambda rank: (times[rank], rank))
    ranks = [*(cause.ranks if cause is not None else ()), *by_time]
    return next((rank for rank in ranks if rank in errors), None)
