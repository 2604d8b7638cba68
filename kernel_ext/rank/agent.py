"""The agent of a rank: takes the pool's mail, runs cells on the main thread, and answers requests while they run where it can."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from hvdlab.collectives import context
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.planes.base import planes_text
from hvdlab.kernel_ext.rank import completion, output, status, sync, values
from hvdlab.kernel_ext.rank.cell_executor import CellExecutor
from hvdlab.kernel_ext.rank.cell_source import CellCompiler
from hvdlab.kernel_ext.rank.compare import CompareServer, ComparisonRequest
from hvdlab.kernel_ext.rank.debugger import DebugServer
from hvdlab.kernel_ext.rank.errors import describe
from hvdlab.kernel_ext.rank.interrupts import InterruptDelivery
from hvdlab.kernel_ext.rank.output import ExitFlush, OutputQueue
from hvdlab.kernel_ext.rank.pipes import FdCapture
from hvdlab.kernel_ext.rank.shell_setup import ShellSetup
from hvdlab.kernel_ext.rank.stdin import RankStdin
from hvdlab.kernel_ext.rank.values import IncomingTransfers, OutgoingTransfers
from hvdlab.kernel_ext.rank.variable_view import VariableViewer, ViewRequest
from hvdlab.kernel_ext.rank.widgets import RankComms
from hvdlab.kernel_ext.wire.cells import (
    Acknowledge,
    AcknowledgeLate,
    CellDone,
    DiscardCell,
    JoinedCell,
    ListRetainedCells,
    PromptReply,
    ResendFrom,
    RetainedCells,
    RunCell,
    SetOwner,
)
from hvdlab.kernel_ext.wire.channel import COMM, CommMessage, HandlerTable, Payload, RankRequest, decode_comm
from hvdlab.kernel_ext.wire.codec import TO_POOL, TO_RANK, ToPool, ToRank, decode_to_rank, encode
from hvdlab.kernel_ext.wire.compare import (
    AskBlocks,
    AskLeaves,
    AskTensors,
    AskVariables,
    AskView,
    Compare,
    Gather,
    OpenComparison,
)
from hvdlab.kernel_ext.wire.crash_ring import CrashRing
from hvdlab.kernel_ext.wire.debug import DEBUG
from hvdlab.kernel_ext.wire.status import (
    AskNames,
    AskStack,
    AskStatus,
    Complete,
    EvaluateExpressions,
    Inspect,
    Stack,
)
from hvdlab.kernel_ext.wire.values import (
    Acked,
    LoadSnapshot,
    PullValue,
    PushValue,
    ReadChunk,
    ReleaseTransfer,
    SnapshotLoaded,
    TakeSnapshot,
    Value,
    WriteChunk,
)


class RankAgent:
    """The agent of one rank. It is made on the rank's main thread, and works in the loop of that thread.

    Args:
        shell: The InteractiveShell that cells run in.
        loop: The loop of the main thread.
        engine: The rank's collective engine, connected.
        fds: Redirected file descriptors, if the agent captures output below Python.
        unsent: Shared memory in which the process that forked this one finds unsent output if this one is killed.
    """

    _control = (
        HandlerTable()
    )  # messages that the control thread handles, also while the main thread runs a cell
    _main = HandlerTable()  # requests that the main thread answers between cells

    def __init__(
        self,
        shell: Any,
        loop: asyncio.AbstractEventLoop,
        engine: Engine,
        *,
        fds: FdCapture | None = None,
        unsent: CrashRing | None = None,
    ) -> None:
        self._shell = shell
        self._loop = loop
        self._engine = engine
        self._fds = fds
        self._gate = InterruptDelivery(loop, engine)
        self._capture = OutputQueue(engine, fds=fds, unsent=unsent)
        self._last_words = ExitFlush(self._capture, engine)
        self._compiler = CellCompiler(shell)
        self._prompting = RankStdin(engine, self._capture, self._gate)
        self._capture.on_absence = lambda: self._prompting.set_owner_present(False)
        self._setup = ShellSetup(shell, self._capture, self._compiler, fds, self._prompting)
        self._debug = DebugServer(engine, loop, self._compiler)
        self._runner = CellExecutor(
            shell,
            engine,
            self._capture,
            self._gate,
            self._compiler,
            self._setup.hook,
            self._debug,
            self._prompting,
        )
        self._setup.preparing = lambda: self._runner.preparing
        self._comms = RankComms(engine, self._capture.widgets)
        #: Callbacks of widgets under way. A loop has only weak references to its tasks.
        self._delivering: set[asyncio.Task[None]] = set()
        #: Work for the main thread, in order; the control thread appends it.
        self._jobs: deque[RunCell | RankRequest] = deque()
        #: The work that the main thread has begun: a request that comes twice must not be queued again.
        self._job: RunCell | RankRequest | None = None
        #: The last answer to a push, or to a pull that needs no transfer: the pool asks again where it was lost with a coordinator.
        self._answered: Acked | Value | None = None
        self._outgoing, self._incoming = OutgoingTransfers(loop), IncomingTransfers()
        self._comparing = CompareServer(shell, loop, engine)
        self._main_status = status.MainThreadStatus()
        self._viewer = VariableViewer(shell, engine, self._main_status)
        #: Variables of another rank, until this one has begun the cell that needs them.
        self._snapshot: sync.PendingSnapshot | None = None
        #: The cell that this rank has entered last while others ran it.
        self._entered = ""
        self._arrived = asyncio.Event()
        #: Guards the shell: one cell, request or callback of a widget uses it at a time.
        self._turn = asyncio.Lock()
        #: Set by the control thread, or by close(); the main thread begins no further job from then on.
        self._leaving = False
        #: Set by close(): the caller may run the loop on, so it is not stopped from then on.
        self._closed = False
        self._worker: asyncio.Task[None] | None = None
        self._unfollow: Callable[[], None] = lambda: None

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take over the shell's output and the pool's mail. Main thread, before or while the loop runs."""
        # hvd.init() in a cell uses this engine, instead of a second connection under the same number.
        context.adopt(self._engine)
        self._unfollow = output.follow_threads()
        self._setup.install()
        self._comms.install()
        self._capture.start()
        self._last_words.install()
        self._gate.install()
        self._worker = self._loop.create_task(self._work())
        self._engine.on_interrupt(self._on_interrupt)
        self._engine.on_leave(self._on_leave)
        self._engine.on_mail(DEBUG, self._debug.on_mail)
        self._engine.on_mail(COMM, lambda sender, body: self._call_soon(lambda: self._on_comm(body)))
        # Last: from here on the control thread hands in cells, which need all of the above.
        self._engine.on_mail(TO_RANK, self._on_mail)

    def close(self) -> None:
        """Send the rest of the output, and give the shell, the streams and SIGINT back. Main thread; the engine stays open."""
        if self._worker is not None:
            self._leaving = self._closed = True
            self._worker.cancel()
            self._worker = None
        self._debug.close()
        self._unfollow()
        self._last_words.uninstall()
        self._capture.close()
        self._gate.uninstall()
        self._comms.uninstall()
        self._setup.uninstall()
        if self._fds is not None:
            self._fds.close()

    @contextlib.asynccontextmanager
    async def foreign(self) -> AsyncIterator[None]:
        """Around code that ipyparallel's requests run in this shell: it waits its turn between cells, and has its own output."""
        async with self._turn:
            self._setup.pause()
            try:
                yield
            finally:
                self._setup.resume()

    # -- control thread -----------------------------------------------------------------------------------------------

    def _on_mail(self, sender: int, body: bytes) -> None:
        try:
            mail = decode_to_rank(body)
        except ProtocolError:
            return  # not from the pool, but from another process that has the token
        try:
            self._carry_out(mail)
        except Exception as error:
            self._answer_failure(mail, error)
            raise  # shown with its traceback by the mailbox

    def _answer_failure(self, mail: ToRank | RankRequest, error: Exception) -> None:
        """Answer a request that failed here with the error: the pool waits, for ever where a value may take any time."""
        if isinstance(mail, RankRequest):
            self._reply(Acked(mail.ticket, f"hvdlab failed in this rank: {type(error).__name__}: {error}"))

    def _carry_out(self, mail: ToRank) -> None:
        # Late output is acknowledged also while the rank leaves: the main thread may wait for it, in a task between cells, and
        # no interrupt ends that.
        if not self._leaving or isinstance(mail, Acknowledge | AcknowledgeLate):
            self._control.call(self, mail)

    @_control.handles(Acknowledge)
    def _acknowledge(self, mail: Acknowledge) -> None:
        self._capture.acknowledge(mail.cell, mail.taken)

    @_control.handles(AcknowledgeLate)
    def _acknowledge_late(self, mail: AcknowledgeLate) -> None:
        self._capture.acknowledge_late(mail.taken)

    @_control.handles(DiscardCell)
    def _discard_cell(self, mail: DiscardCell) -> None:
        self._discard(mail.cell)

    @_control.handles(ResendFrom)
    def _resend(self, mail: ResendFrom) -> None:
        if any(cell == self._entered for cell, *_ in mail.cells):
            self._reply(JoinedCell(self._entered))  # before the cell's end, which may be sent again now
        self._capture.resend(mail.cells)
        self._prompting.ask_again()

    @_control.handles(SetOwner)
    def _set_owner(self, mail: SetOwner) -> None:
        self._capture.set_owner(mail.pid, mail.started, mail.near)
        self._prompting.set_owner_present(bool(mail.pid))
        # A process that was killed has not closed its debug session: threads would stay stopped for ever.
        self._debug.abandon()

    @_control.handles(PromptReply)
    def _answer_prompt(self, mail: PromptReply) -> None:
        self._prompting.answered(mail)

    @_control.handles(ListRetainedCells)
    def _list_retained_cells(self, mail: ListRetainedCells) -> None:
        sent = self._capture.sent
        self._reply(RetainedCells(mail.ticket, sent.retained_cells(), sent.ended_with_notebook))

    @_control.handles(AskStatus)
    def _send_status(self, mail: AskStatus) -> None:
        self._reply(self._status(mail.ticket))

    @_control.handles(AskStack)
    def _send_stack(self, mail: AskStack) -> None:
        self._reply(self._stack(mail.ticket))

    @_control.handles(AskNames)
    def _send_names(self, mail: AskNames) -> None:
        self._reply(completion.user_names(self._shell, mail.ticket))

    @_control.handles(TakeSnapshot)
    def _take_snapshot(self, mail: TakeSnapshot) -> None:
        # On a thread of its own: pickling runs code of the user's and may last, and the control thread has to
        # go on with acknowledgements and interrupts.
        threading.Thread(
            target=self._send_snapshot, args=(mail.ticket,), name="hvdlab-snapshot", daemon=True
        ).start()

    @_control.handles(ReadChunk)
    def _read_chunk(self, mail: ReadChunk) -> None:
        self._reply(self._outgoing.read(mail))

    @_control.handles(WriteChunk)
    def _write_chunk(self, mail: WriteChunk) -> None:
        self._reply(self._incoming.write(mail))

    @_control.handles(ReleaseTransfer)
    def _release_transfer(self, mail: ReleaseTransfer) -> None:
        self._outgoing.release(mail.transfer_id)
        self._incoming.discard(mail.transfer_id)
        self._comparing.release(mail.transfer_id)

    @_control.handles(AskLeaves, AskBlocks, Gather, Compare)
    def _compare(self, mail: ComparisonRequest) -> None:
        self._comparing.ask(mail)

    @_control.handles(AskView, AskVariables, AskTensors)
    def _view_variables(self, mail: ViewRequest) -> None:
        self._viewer.ask(mail)

    @_control.handles(Complete, Inspect)
    def _complete(self, mail: Complete | Inspect) -> None:
        # Behind a cell, queued or running, the answer would come long after the user has typed on.
        if self._main_status.cell or self._jobs:
            self._look_aside(mail)
        else:
            self._queue_request(mail)

    @_control.handles(RunCell)
    def _expect(self, cell: RunCell) -> None:
        """Queue a cell. It can come twice: a pool that has perhaps missed mail sends the cells again for which it waits."""
        for discarded in cell.discards:
            self._discard(discarded)
        if self._capture.sent.register(cell.cell, cell.label, cell if cell.at_least else None):
            # Before the cell is queued: the main thread may begin it at once, and counts it down then.
            self._gate.expect()
            self._enqueue(cell)

    @_control.handles(PushValue, PullValue, LoadSnapshot, OpenComparison, EvaluateExpressions)
    def _queue_request(self, request: RankRequest) -> None:
        """Queue a request for the main thread. It can come twice: repeat its answer if that is kept, otherwise do it once."""
        ticket = request.ticket
        # The queue first, as _work() stores a job before it removes it from there: in one of the two it is found. The answers
        # last: the job may end meanwhile, and has its answer then.
        queued = any(getattr(job, "ticket", None) == ticket for job in (*self._jobs, self._job))
        answer = self._outgoing.cached_reply(ticket) or self._comparing.cached_reply(ticket)
        if answer is not None:
            self._reply(answer)
        elif (answered := self._answered) is not None and answered.ticket == ticket:
            self._reply(answered)
        elif not queued:
            self._enqueue(request)

    def _discard(self, cell: str) -> None:
        """Forget a cell, of which the pool has everything. Control thread."""
        self._capture.discard_cell(cell)
        self._prompting.discard_cell(cell)

    def _look_aside(self, question: Complete | Inspect) -> None:
        def look() -> None:
            self._reply(completion.while_busy(self._shell, question))

        threading.Thread(target=look, name="hvdlab-looking", daemon=True).start()

    def _send_snapshot(self, ticket: int) -> None:
        """Send this rank's variables, for a rank that joins its cell. Asked again, repeat the answer whose transfer is open."""
        if (given := self._outgoing.cached_reply(ticket)) is not None:
            self._reply(given)
            return
        answer, parts = sync.known(self._shell, ticket)
        if parts:
            self._outgoing.offer_while_running(answer, parts)
        self._reply(answer)

    def _enqueue(self, job: RunCell | RankRequest) -> None:
        self._jobs.append(job)
        self._call_soon(self._arrived.set)

    def _on_interrupt(self) -> None:
        self._gate.request()
        self._prompting.interrupted()
        self._debug.interrupted(self._gate.request)

    def _on_leave(self, reason: str) -> None:
        self._leaving = True
        # The main thread may wait for the pool to release a transfer, where no interrupt reaches it.
        self._outgoing.release_all()
        self._comparing.release_all()
        self._gate.request()
        self._call_soon(self._arrived.set)

    def _call_soon(self, callback: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the rank is ending
            self._loop.call_soon_threadsafe(callback)

    def _reply(self, answer: Payload) -> None:
        self._engine.post(TO_POOL, encode(answer))

    def _status(self, ticket: int) -> ToPool:
        return status.make_status(
            ticket,
            state=self._main_status.state,
            cell=self._main_status.cell,
            device=self._main_status.device,
            plane=planes_text((self._engine.plane_text(), *self._engine.device_planes()), {}),
            pending=status.pending_now(self._engine.pending()),
            servers=status.servers_now(self._engine),
            links=status.links_now(self._engine),
        )

    def _stack(self, ticket: int) -> ToPool:
        frames = (
            status.cell_stack(self.main_thread, self._gate.suspended_in) if self._main_status.cell else ()
        )
        return Stack(
            ticket,
            self._main_status.cell,
            frames,
            status.pending_now(self._engine.pending()),
            self._engine.paused,
        )

    # -- main thread --------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            await self._arrived.wait()
            # Before the queue is looked at: a job that is queued after the look sets the event again.
            self._arrived.clear()
            while self._jobs and not self._leaving:
                # Stored before it leaves the queue: a request that comes again in between is in both, instead of in neither.
                job = self._job = self._jobs[0]
                self._jobs.popleft()
                async with self._turn:
                    await self._do(job)
                self._job = None
            if self._leaving:
                if not self._closed:
                    self._leave()
                return

    def _leave(self) -> None:
        """Stop the loop: the pool has let this rank go, and its cell has ended."""
        self._loop.stop()

    def _on_comm(self, body: bytes) -> None:
        """Deliver a message of a widget's view in the frontend, after what runs, in the order in which messages came."""
        task = self._loop.create_task(self._deliver(decode_comm(body)))
        self._delivering.add(task)
        task.add_done_callback(self._delivering.discard)

    async def _deliver(self, message: CommMessage) -> None:
        async with self._turn:
            self._comms.deliver(message)

    def _do(self, job: RunCell | RankRequest) -> Awaitable[None]:
        return self._run_cell(job) if isinstance(job, RunCell) else self._answer_or_fail(job)

    async def _run_cell(self, request: RunCell) -> None:
        self._main_status.cell, self._main_status.state = request.cell, "running"
        if not request.joins:
            self._snapshot = (
                None  # the cell that the snapshot was for has ended; other ranks have changed theirs by now
            )
        try:
            await self._runner.run(request, self._enter if request.joins else None)
        except Exception as error:  # noqa: BLE001  # a fault of ours ends the cell, with its traceback, but not the rank
            # First, as for any cell: other ranks may wait in a collective for this one.
            self._runner.abandon(error)
            described = describe(self._shell, error, time.monotonic_ns(), before_exec=False)
            self._capture.finish(CellDone(request.cell, described, 0.0))
        finally:
            # On this thread: frameworks have a current device for each, and the thread that answers the
            # status is another one.
            self._main_status.device = status.current_device()
            self._main_status.cell, self._main_status.state = "", "idle"

    async def _answer_or_fail(self, request: RankRequest) -> None:
        """Answer a request; a fault of ours must not end the task that runs the cells."""
        try:
            await self._main.call(self, request)
        except Exception as error:  # noqa: BLE001  # shown with its traceback
            self._answer_failure(request, error)
            self._loop.call_exception_handler(
                {"message": "hvdlab could not answer the notebook", "exception": error}
            )

    @_main.handles(PushValue)
    async def _push(self, request: PushValue) -> None:
        self._answer_once(values.push(self._shell, request, self._incoming.pop))

    @_main.handles(PullValue)
    async def _pull(self, request: PullValue) -> None:
        if self._outgoing.is_released(request.ticket):
            return
        answer, parts = values.pull(self._shell, request)
        # Once more: the pool may have released the transfer while the value was put together.
        if self._outgoing.is_released(request.ticket):
            return
        if parts:
            self._outgoing.offer(answer, parts)
            self._reply(answer)
            await self._outgoing.released(answer.ticket)
        else:
            self._answer_once(answer)

    def _answer_once(self, answer: Acked | Value) -> None:
        """Answer, and keep the answer for a repeated request: a second push finds no parts, a second pull may have another value."""
        self._answered = answer
        self._reply(answer)

    @_main.handles(OpenComparison)
    async def _open_comparison(self, request: OpenComparison) -> None:
        await self._comparing.run(request)

    @_main.handles(Complete)
    async def _complete_idle(self, request: Complete) -> None:
        self._reply(completion.complete(self._shell, request))

    @_main.handles(Inspect)
    async def _inspect_idle(self, request: Inspect) -> None:
        self._reply(completion.inspect(self._shell, request))

    @_main.handles(EvaluateExpressions)
    async def _evaluate(self, request: EvaluateExpressions) -> None:
        self._reply(completion.express(self._shell, request))

    @_main.handles(LoadSnapshot)
    async def _load_snapshot(self, request: LoadSnapshot) -> None:
        try:
            parts = [memoryview(part) for part in self._incoming.pop(request.transfer_id)]
        except KeyError:
            # A coordinator that died has taken the parts along: the pool brings them once more.
            self._reply(SnapshotLoaded(request.ticket, error="it did not arrive", missing=True))
            return
        self._snapshot = sync.PendingSnapshot(parts)
        self._reply(self._snapshot.prepare(self._shell, request.ticket))

    def _enter(self) -> None:
        """Before a cell that other ranks have been running: wait until they let this rank in, then bind their variables."""
        context.init()
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.take(self._shell)
        # Before the mail: if that is lost with a coordinator, `_resend` repeats it for this cell.
        self._entered = self._main_status.cell
        self._reply(JoinedCell(self._main_status.cell))

    @property
    def main_thread(self) -> int:
        """Identifier of the thread that cells run on."""
        return threading.main_thread().ident or 0
