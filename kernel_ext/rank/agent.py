"""The agent of a rank: takes the pool's mail, runs cells on the main thread, answers what it can while they run."""

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
from hvdlab.collectives.planes.links import planes_text
from hvdlab.kernel_ext.rank import completion, output, status, sync, values
from hvdlab.kernel_ext.rank.cell_executor import CellExecutor
from hvdlab.kernel_ext.rank.cell_source import CellCompiler
from hvdlab.kernel_ext.rank.debug_server import DebugServer
from hvdlab.kernel_ext.rank.errors import describe
from hvdlab.kernel_ext.rank.examining import QUESTIONS, CompareServer
from hvdlab.kernel_ext.rank.interrupts import InterruptDelivery
from hvdlab.kernel_ext.rank.output import ExitFlush, OutputQueue
from hvdlab.kernel_ext.rank.pipes import FdCapture
from hvdlab.kernel_ext.rank.shell_setup import ShellSetup
from hvdlab.kernel_ext.rank.stdin import RankStdin
from hvdlab.kernel_ext.rank.values import IncomingTransfers, OutgoingTransfers
from hvdlab.kernel_ext.rank.variable_view import LOOKS, VariableViewer
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
from hvdlab.kernel_ext.wire.channel import COMM, Payload
from hvdlab.kernel_ext.wire.codec import TO_POOL, TO_RANK, ToPool, ToRank, decode_to_rank, encode
from hvdlab.kernel_ext.wire.comms import CommMessage
from hvdlab.kernel_ext.wire.comms import decode as decode_comm
from hvdlab.kernel_ext.wire.compare import OpenComparison
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
    WriteChunk,
)


class RankAgent:
    """The agent of one rank. It is made on the rank's main thread, and works in the loop of that thread.

    Args:
        shell: The InteractiveShell that cells run in.
        loop: The loop of the main thread.
        engine: The rank's collective engine, connected.
        leave: Called when the pool wants this rank to go, after its cell; by default it stops the loop.
        fds: Redirected file descriptors, if the agent captures output below Python.
        unsent: Shared memory in which the process that forked this one finds unsent output if this one is killed.
    """

    def __init__(
        self,
        shell: Any,
        loop: asyncio.AbstractEventLoop,
        engine: Engine,
        *,
        leave: Callable[[], None] | None = None,
        fds: FdCapture | None = None,
        unsent: CrashRing | None = None,
    ) -> None:
        self._shell = shell
        self._loop = loop
        self._engine = engine
        self._leave = leave or loop.stop
        self._fds = fds
        self._gate = InterruptDelivery(loop, engine)
        self._capture = OutputQueue(engine.post, fds=fds, ranks=lambda: engine.size, unsent=unsent)
        self._last_words = ExitFlush(self._capture, engine)
        self._compiler = CellCompiler()
        self._prompting = RankStdin(
            engine, lambda mail: self._reply(mail), self._capture.flush, lambda: self._gate.interrupted
        )
        self._capture.on_absence = lambda: self._prompting.attended(False)
        self._setup = ShellSetup(shell, self._capture, self._compiler, fds, self._prompting)
        self._debug = DebugServer(engine.post, self._call_soon, lambda: self._compiler.files, self._paused)
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
        self._comms = RankComms(engine.post, self._capture.widgets)
        self._delivering: set[asyncio.Task[None]] = set()
        self._jobs: deque[ToRank] = deque()
        self._job: ToRank | None = None
        self._lending, self._parcels = OutgoingTransfers(loop), IncomingTransfers()
        self._examining = CompareServer(
            shell, loop, lambda: engine.rank, lambda: engine.local_size, lambda answer: self._reply(answer)
        )
        self._looker = VariableViewer(shell, lambda: self._cell, lambda answer: self._reply(answer))
        #: What another rank knew, until this one has begun the cell that it is needed for.
        self._lesson: sync.PendingSnapshot | None = None
        #: The cell that this rank has entered last while others ran it.
        self._entered = ""
        self._arrived = asyncio.Event()
        self._turn = asyncio.Lock()
        self._leaving = False
        self._state = "idle"
        self._cell = ""
        self._device = "cpu"
        self._worker: asyncio.Task[None] | None = None
        self._unfollow: Callable[[], None] = lambda: None

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take over the shell's output and the pool's mail. Main thread, before or while the loop runs."""
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
        self._engine.on_mail(TO_RANK, self._on_mail)

    def close(self) -> None:
        """Send what is left, and give the shell, the streams and SIGINT back. Main thread; the engine stays open."""
        if self._worker is not None:
            self._leaving, self._leave = True, lambda: None
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

    def _answer_failure(self, question: ToRank, error: Exception) -> None:
        """Tell the pool that its question failed here. It waits for an answer, for ever where a value may take any time."""
        ticket = getattr(question, "ticket", None)
        if ticket is not None:
            self._reply(Acked(ticket, f"hvdlab failed in this rank: {type(error).__name__}: {error}"))

    def _carry_out(self, mail: ToRank) -> None:
        if isinstance(mail, Acknowledge):
            self._capture.credit(mail.cell, mail.taken)
        elif isinstance(mail, AcknowledgeLate):
            # Also while the rank leaves: the main thread may wait for it, in a task between cells, and no interrupt ends that.
            self._capture.credit_late(mail.taken)
        elif self._leaving:
            return
        elif isinstance(mail, DiscardCell):
            self._capture.settled(mail.cell)
            self._prompting.settled(mail.cell)
        elif isinstance(mail, ResendFrom):
            if any(cell == self._entered for cell, *_ in mail.cells):
                self._reply(JoinedCell(self._entered))  # before the cell's end, which may be sent again now
            self._capture.resync(mail.cells)
            self._prompting.ask_again()
        elif isinstance(mail, SetOwner):
            self._capture.owned(mail.pid, mail.started, mail.near)
            self._prompting.attended(bool(mail.pid))
            self._debug.abandon()
        elif isinstance(mail, PromptReply):
            self._prompting.answered(mail)
        elif isinstance(mail, ListRetainedCells):
            self._reply(
                RetainedCells(mail.ticket, self._capture.sent.held(), self._capture.sent.ended_with_notebook)
            )
        elif isinstance(mail, AskStatus):
            self._reply(self._status(mail.ticket))
        elif isinstance(mail, AskStack):
            self._reply(self._stack(mail.ticket))
        elif isinstance(mail, AskNames):
            self._reply(completion.user_names(self._shell, mail.ticket))
        elif isinstance(mail, TakeSnapshot):
            threading.Thread(
                target=self._tell_known, args=(mail.ticket,), name="hvdlab-known", daemon=True
            ).start()
        elif isinstance(mail, ReadChunk):
            self._reply(self._lending.piece(mail))
        elif isinstance(mail, WriteChunk):
            self._reply(self._parcels.put(mail))
        elif isinstance(mail, ReleaseTransfer):
            self._lending.give_back(mail.lot)
            self._parcels.drop(mail.lot)
            self._examining.release(mail.lot)
        elif isinstance(mail, QUESTIONS):
            self._examining.ask(mail)
        elif isinstance(mail, LOOKS):
            self._looker.ask(mail)
        elif isinstance(mail, (Complete, Inspect)) and (self._cell or self._jobs):
            self._look_aside(mail)
        elif isinstance(mail, RunCell):
            self._expect(mail)
        else:
            self._ask(mail)

    def _expect(self, cell: RunCell) -> None:
        """Take a cell. It may come twice: a pool that may have missed mail sends again what it waits for."""
        if self._capture.sent.expect(cell.cell, cell.label, cell if cell.at_least else None):
            self._gate.expect()
            self._enqueue(cell)

    def _ask(self, question: ToRank) -> None:
        """Take a question, which may come twice: repeat an answer that is still lent, don't queue what is queued or runs."""
        ticket = getattr(question, "ticket", None)
        if ticket is not None:
            answer = self._lending.again(ticket) or self._examining.again(ticket)
            if answer is not None:
                self._reply(answer)
                return
        if all(getattr(job, "ticket", None) != ticket for job in (self._job, *self._jobs)):
            self._enqueue(question)

    def _look_aside(self, question: Complete | Inspect) -> None:
        def look() -> None:
            self._reply(completion.while_busy(self._shell, question))

        threading.Thread(target=look, name="hvdlab-looking", daemon=True).start()

    def _tell_known(self, ticket: int) -> None:
        """Send what this rank knows, for a rank that joins its cell. Asked again, it sends the answer whose parts are lent."""
        if (given := self._lending.again(ticket)) is not None:
            self._reply(given)
            return
        answer, parts = sync.known(self._shell, ticket)
        if parts:
            self._lending.lend_aside(answer, parts)
        self._reply(answer)

    def _enqueue(self, job: ToRank) -> None:
        self._jobs.append(job)
        self._call_soon(self._arrived.set)

    def _paused(self, yes: bool) -> None:
        """Tell the engine that the debugger has stopped this rank, or let it go on: its timers stand still meanwhile."""
        patience = getattr(self._engine, "pause" if yes else "resume", None)
        if patience is not None:
            patience("stopped by the debugger")

    def _on_interrupt(self) -> None:
        self._gate.request()
        self._prompting.interrupted()
        self._debug.interrupted(self._gate.request)

    def _on_leave(self, reason: str) -> None:
        self._leaving = True
        self._lending.give_back()
        self._examining.release()
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
            state=self._state,
            cell=self._cell,
            device=self._device,
            plane=planes_text((self._engine.plane_text(), *self._engine.device_planes()), {}),
            pending=status.pending_now(self._engine.pending()),
            servers=status.servers_now(self._engine),
            links=status.links_now(self._engine),
        )

    def _stack(self, ticket: int) -> ToPool:
        frames = status.cell_stack(self.main_thread, self._gate.suspended_in) if self._cell else ()
        return Stack(
            ticket,
            self._cell,
            frames,
            status.pending_now(self._engine.pending()),
            self._engine.paused,
        )

    # -- main thread --------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._jobs and not self._leaving:
                job = self._job = self._jobs.popleft()
                async with self._turn:
                    await self._do(job)
                self._job = None
            if self._leaving:
                self._leave()
                return

    def _on_comm(self, body: bytes) -> None:
        """Deliver a message of a widget's view in the frontend, after what runs, in the order in which messages came."""
        task = self._loop.create_task(self._deliver(decode_comm(body)))
        self._delivering.add(task)
        task.add_done_callback(self._delivering.discard)

    async def _deliver(self, message: CommMessage) -> None:
        async with self._turn:
            self._comms.deliver(message)

    def _do(self, job: ToRank) -> Awaitable[None]:
        return self._run_cell(job) if isinstance(job, RunCell) else self._answer_or_fail(job)

    async def _run_cell(self, request: RunCell) -> None:
        self._cell, self._state = request.cell, "running"
        if not request.joins:
            self._lesson = None  # the cell that the lesson was for has ended; other ranks know more by now
        try:
            await self._runner.run(request, self._enter if request.joins else None)
        except Exception as error:  # noqa: BLE001  # a fault of ours ends the cell, with its traceback, but not the rank
            described = describe(self._shell, error, time.monotonic_ns(), before_exec=False)
            self._capture.finish(CellDone(request.cell, described, 0.0))
        finally:
            self._device = status.current_device()
            self._cell, self._state = "", "idle"

    async def _answer_or_fail(self, question: ToRank) -> None:
        """Answer a question; a fault of ours must not end the task that runs the cells."""
        try:
            await self._answer(question)
        except Exception as error:  # noqa: BLE001  # shown with its traceback
            self._answer_failure(question, error)
            self._loop.call_exception_handler(
                {"message": "hvdlab could not answer the notebook", "exception": error}
            )

    async def _answer(self, job: ToRank) -> None:
        if isinstance(job, PushValue):
            self._reply(values.push(self._shell, job, self._parcels.take))
        elif isinstance(job, PullValue):
            if self._lending.given_up(job.ticket):
                return
            answer, parts = values.pull(self._shell, job)
            if self._lending.given_up(job.ticket):
                return
            if parts:
                self._lending.lend(answer, parts)
            self._reply(answer)
            if parts:
                await self._lending.returned(answer.ticket)
        elif isinstance(job, LoadSnapshot):
            self._learn(job)
        elif isinstance(job, OpenComparison):
            await self._examining.run(job)
        elif isinstance(job, Complete):
            self._reply(completion.complete(self._shell, job))
        elif isinstance(job, Inspect):
            self._reply(completion.inspect(self._shell, job))
        elif isinstance(job, EvaluateExpressions):
            self._reply(completion.express(self._shell, job))

    def _learn(self, request: LoadSnapshot) -> None:
        try:
            parts = [memoryview(part) for part in self._parcels.take(request.lot)]
        except KeyError:
            self._reply(SnapshotLoaded(request.ticket, error="it did not arrive", missing=True))
            return
        self._lesson = sync.PendingSnapshot(parts)
        self._reply(self._lesson.prepare(self._shell, request.ticket))

    def _enter(self) -> None:
        """Before a cell that other ranks have been running: wait until they let this rank in, then bind what they know."""
        context.init()
        lesson, self._lesson = self._lesson, None
        if lesson is not None:
            lesson.take(self._shell)
        self._entered = self._cell
        self._reply(JoinedCell(self._cell))

    @property
    def main_thread(self) -> int:
        """Identifier of the thread that cells run on."""
        return threading.main_thread().ident or 0
