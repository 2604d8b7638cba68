"""``python -m hvdlab.launch.host_agent.agent``: starts and watches the ranks of one host, for a launcher here or elsewhere.

It receives orders on standard input and reports on standard output. When its input ends, however the launcher
ended, it ends its ranks with everything they started. It has one thread, so that it can fork children safely; with a
fork server (:class:`ForkedRanks`), which forks them in its place, another thread listens to that. A zygote
(:mod:`~hvdlab.launch.host_agent.zygote`) forks programs that become the agent's own children.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hvdlab.collectives.errors import ProtocolError, StartError
from hvdlab.collectives.protocol.codec import FrameDecoder
from hvdlab.collectives.settings import data_plane_address, host_directory_variable, thread_counts
from hvdlab.collectives.system import adopt_orphans, interface_address, living_children
from hvdlab.launch.forkserver.messages import Exited, Fork, Forked, ForkFailed, FromServer, Signal
from hvdlab.launch.host_agent import wire
from hvdlab.launch.host_agent.rank_process import Child, SpawnError, spawn
from hvdlab.launch.processes import describe, detail

if TYPE_CHECKING:
    from hvdlab.launch.host_agent.zygote import Zygote


CLOSING = 5.0
"""Seconds that a fork server has to end, in addition to those of its ranks."""


class ForkedRanks:
    """The fork server, as the agent's one thread sees it.

    The fork server has the agent's environment, and ends with the agent, however that ends, and the ranks with it. If
    the fork server dies alone, another one takes its place around the ranks.

    Args:
        program: The ranks' program, as ``module:attribute``.

    Attributes:
        descriptor: Readable when there is something in :meth:`reports`, or :attr:`lost` has changed.
        lost: Why there is no fork server any more, once it is lost; otherwise empty.

    Raises:
        StartError: The fork server can't be started.
    """

    def __init__(self, program: str) -> None:
        self.descriptor, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.lost = ""
        #: Reports for the agent's loop, which the fork server's thread appends.
        self._reports: deque[wire.AgentMessage] = deque()
        #: Ranks whose fork was ordered and not reported yet; guarded by the lock.
        self._pending: set[int] = set()
        #: Whether a rank was forked; guarded by the lock.
        self._useful = False
        self._lock = threading.Lock()
        # Here, since most agents have no fork server, and each starts faster without the modules that speak to one.
        from hvdlab.launch.forkserver.client import ForkServer

        self._server = ForkServer.start(program)
        self._server.listen(self._hear, self._server_lost)

    @property
    def pid(self) -> int:
        """Return the fork server's process."""
        return self._server.pid

    def fork(self, spec: wire.RankSpec) -> None:
        """Have a rank forked, in the agent's working directory and environment, once the imports are done."""
        directory = os.getcwd()
        path = (directory, *sys.path)  # as for `python -m`
        with self._lock:
            # Before the order: its answer can come on the other thread at once.
            self._pending.add(spec.rank)
        try:
            order = Fork.of(spec.rank, {**os.environ, **spec.environment}, directory, path)
            self._server.send(order)
        except StartError as error:
            self._not_started(spec.rank, str(error))

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank, if it lives."""
        with contextlib.suppress(StartError):
            self._server.send(Signal(rank, number))

    def reports(self) -> Iterator[wire.AgentMessage]:
        """Yield the fork server's reports since the last call."""
        with contextlib.suppress(BlockingIOError):
            # The bytes before the reports: one that is appended after the loop has a byte of its own, which wakes the agent again.
            os.read(self.descriptor, 4096)
        while self._reports:
            yield self._reports.popleft()

    def close(self, grace: float) -> None:
        """End the fork server and its ranks, which get ``grace`` seconds to end by themselves."""
        self._server.close(grace, CLOSING)

    # -- the thread that listens to the fork server -----------------------------------------------------------------

    def _report(self, message: wire.AgentMessage) -> None:
        self._reports.append(message)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, which wakes the agent as well
            os.write(self._writer, b"\0")

    def _hear(self, event: FromServer) -> None:
        match event:
            case Forked(rank, pid):
                with self._lock:
                    self._pending.discard(rank)
                    self._useful = True
                self._report(wire.RankStarted(rank, pid))
            case ForkFailed(rank, text):
                self._not_started(rank, f"it could not be forked: {text}")
            case Exited(rank, _, code, number):
                said = (describe(event), event.tail, detail(event), event.left)
                self._report(wire.RankExited(rank, code, number, *said))

    def _not_started(self, rank: int, text: str) -> None:
        with self._lock:
            self._pending.discard(rank)
        self._report(wire.RankNotStarted(rank, 1, text))

    def _server_lost(self, reason: str) -> None:
        with self._lock:
            useful = self._useful
        if not useful:  # most likely it crashed in an import, and so would another one
            self._give_up(reason)
            return
        try:
            self._server.respawn()
        except StartError as error:
            self._give_up(f"{reason}; no other one starts: {error}")
        self._wake()  # the agent has left it to this thread to reap the fork server, and goes on reaping once it is woken

    def _give_up(self, reason: str) -> None:
        with self._lock:
            pending, self._pending = self._pending, set()
        for rank in sorted(pending):
            self._report(wire.RankNotStarted(rank, 1, f"the fork server of its host ended: {reason}"))
        # Last: the agent ends when it sees this, and has all reports by then.
        self.lost = reason
        self._wake()


BACKLOG = 4 << 20
"""If more bytes than this wait for the launcher, the agent does not read the output of ranks, which holds them up."""
GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL when the launcher is gone."""


class Agent:
    """The loop of the process.

    Args:
        orders: Descriptor that the launcher's messages are read from.
        reports: Descriptor that answers are written to.
        stdin: Descriptor that a rank may be given as its standard input, or -1.
    """

    def __init__(self, orders: int, reports: int, stdin: int) -> None:
        self._orders, self._reports, self._stdin = orders, reports, stdin
        self._selector = selectors.DefaultSelector()
        self._decoder = FrameDecoder()
        #: Bytes for the launcher that the pipe has not accepted yet.
        self._out = bytearray(wire.GREETING)
        #: The order with the ranks' command.
        self._start: wire.Start | None = None
        #: Why no rank can be started, while there is no ``_start``.
        self._unprepared = "the launcher has not sent what ranks run"
        #: Living ranks by rank, and by process id.
        self._children: dict[int, Child] = {}
        self._by_pid: dict[int, Child] = {}
        #: Whether the launcher's end is open, and whether reading from ranks is held up for it.
        self._open = True
        self._paused = False
        #: Readable when a signal has arrived, such as at the end of a child.
        self._wakeup = -1
        #: The fork server, if ranks are forked.
        self._forked: ForkedRanks | None = None
        #: The zygote, while one lives; without it each rank starts an interpreter.
        self._zygote: Zygote | None = None
        #: Where parameter servers of this host have their directories, if the job has other hosts.
        self._directory: Path | None = None

    def run(self) -> None:
        """Serve until the launcher is gone, then end the remaining ranks."""
        wakeup = self._wakeup = _catch_signals()
        os.set_blocking(self._reports, False)
        os.set_blocking(self._orders, False)
        self._selector.register(self._orders, selectors.EVENT_READ, self._read_orders)
        self._selector.register(wakeup, selectors.EVENT_READ, lambda: self._woken(wakeup))
        try:
            while self._open:
                self._flush()
                self._pause_reading(len(self._out) > BACKLOG)
                for key, _ in self._selector.select():
                    key.data()
        except BrokenPipeError:
            pass
        finally:
            with contextlib.suppress(BrokenPipeError):
                self._flush()  # the reports on why the agent ends
            self._end_all()

    # -- the launcher -----------------------------------------------------------------------------------------------

    def _send(self, message: wire.AgentMessage) -> None:
        self._out += wire.encode(message)

    def _flush(self) -> None:
        """Write as much as the pipe accepts; watch for room if bytes are left."""
        watched = self._reports in self._selector.get_map()
        with contextlib.suppress(BlockingIOError):
            while self._out:
                del self._out[: os.write(self._reports, self._out[: wire.PIECE])]
        if self._out and not watched:
            self._selector.register(self._reports, selectors.EVENT_WRITE, lambda: None)
        elif not self._out and watched:
            self._selector.unregister(self._reports)

    def _read_orders(self) -> None:
        try:
            data = os.read(self._orders, wire.PIECE)
        except BlockingIOError:
            return
        if not data:
            self._open = False
        try:
            for payload in self._decoder.feed(data):
                self._obey(payload)
        except ProtocolError as error:  # where the next order begins can't be known any more
            print(f"the launcher sent something else than orders: {error}", file=sys.stderr)
            self._open = False

    def _obey(self, payload: bytes | memoryview) -> None:
        """Carry out an order, or report why it can't be; the ranks that run go on in any case."""
        try:
            order = wire.decode_to_agent(payload)
        except ProtocolError as error:
            self._send(wire.OrderFailed(str(error), unread=True))
            return
        match order:
            case wire.Start():
                try:
                    self._prepare(order)
                except Exception as error:  # noqa: BLE001  (an order may have any values; each rank is reported with this)
                    traceback.print_exc()
                    self._start = None
                    self._unprepared = f"its host could not be prepared: {error!r}"
            case wire.Spawn():
                self._spawn(order)
            case wire.SignalRanks(ranks, number) if number in signal.valid_signals():
                self._signal(ranks, number)
            case wire.SignalRanks(ranks, number):
                self._send(
                    wire.OrderFailed(
                        f"ranks {ranks} can't be sent signal {number}: there is none", unread=False
                    )
                )

    def _prepare(self, order: wire.Start) -> None:
        if not (order.command or order.forked):
            raise ValueError("there is no command")
        if order.command and not order.command[0]:
            own = os.fsencode(sys.executable)
            order = msgspec.structs.replace(order, command=(own, *order.command[1:]))
        self._start = order
        for name in order.removed:
            os.environ.pop(name, None)
        os.environb.update(order.environment)
        if order.coordinator.startswith("tls:"):
            os.environ.setdefault("HVDLAB_ADDRESS", _address(order))
            self._make_directory(order.coordinator)
        with contextlib.suppress(OSError):
            os.chdir(order.directory)
        # After the job's variables: a count of threads that the user has set is left alone.
        if order.threads:
            os.environ.update(thread_counts(os.environ, order.threads))
        if order.forked:
            forked = self._forked = ForkedRanks(order.forked)
            self._selector.register(forked.descriptor, selectors.EVENT_READ, lambda: self._hear(forked))
        elif order.preload:
            from hvdlab.launch.host_agent.zygote import Zygote, ZygoteError

            try:
                zygote = self._zygote = Zygote(order)
            except ZygoteError as error:
                print(f"hvdlab: nothing is preloaded: {error}", file=sys.stderr)
                return
            self._selector.register(
                zygote.descriptor, selectors.EVENT_READ, lambda: self._hear_zygote(zygote)
            )

    def _make_directory(self, coordinator: str) -> None:
        from hvdlab.collectives.coordinator.process import private_directory
        from hvdlab.collectives.errors import StartError

        try:
            self._directory = private_directory(None)
        except StartError as error:
            print(
                f"hvdlab: {error}. Parameter servers make their own directories", file=sys.stderr, flush=True
            )
            return
        os.environ.update(host_directory_variable(str(self._directory), coordinator))

    # -- ranks --------------------------------------------------------------------------------------------------------

    def _hear(self, forked: ForkedRanks) -> None:
        """Pass on the fork server's reports; end the agent if the fork server is lost."""
        lost = forked.lost  # read before the reports: if it is set, no report can come after those
        for report in forked.reports():
            self._send(report)
        self._reap_children()  # while an ended fork server was not reaped, waitid() showed no other children
        if lost:
            print("the fork server ended:", *forked.lost.splitlines(), file=sys.stderr)
            self._open = False

    def _spawn(self, order: wire.Spawn) -> None:
        if self._start is None:
            for spec in order.ranks:
                self._send(wire.RankNotStarted(spec.rank, 1, self._unprepared))
            return
        for spec in order.ranks:
            if spec.rank in self._children or (self._zygote is not None and self._zygote.owes(spec.rank)):
                self._send(
                    wire.OrderFailed(f"rank {spec.rank} was ordered again while it runs", unread=False)
                )
                continue
            reads = self._forked is None and spec.rank == self._start.stdin_rank
            self._start_rank(spec, self._stdin if reads else -1)
            if reads and self._stdin >= 0:
                os.close(self._stdin)
                self._stdin = -1

    def _start_rank(self, spec: wire.RankSpec, stdin: int) -> None:
        """Have a rank forked by the fork server or the zygote, or execute the command. Does not close ``stdin``."""
        assert self._start is not None
        try:
            if self._forked is not None:
                self._forked.fork(spec)
            elif self._zygote is not None:
                self._zygote.fork(spec, stdin)
            else:
                self._watch(spawn(self._start, spec, stdin))
        except SpawnError as error:
            self._send(wire.RankNotStarted(spec.rank, error.code, str(error)))
        except Exception as error:  # noqa: BLE001  (one rank's failure must not end the others, which this process watches)
            traceback.print_exc()
            self._send(wire.RankNotStarted(spec.rank, 1, f"it could not be started: {error!r}"))

    def _watch(self, child: Child) -> None:
        self._children[child.rank] = self._by_pid[child.pid] = child
        # While ranks are held up, this one is too: `_pause_reading` reads from all again, and fails at a pipe that is watched.
        if not self._paused:
            self._read_from(child)
        self._send(wire.RankStarted(child.rank, child.pid))

    def _read_from(self, child: Child) -> None:
        for fd in child.pipes:
            self._selector.register(fd, selectors.EVENT_READ, lambda c=child, f=fd: self._read_output(c, f))

    def _hear_zygote(self, zygote: Zygote, *, ended: bool = False) -> None:
        """Handle the zygote's answers; if it has ended, execute the command for the ranks that it did not fork."""
        if zygote is not self._zygote:
            return  # its signal and its connection showed its end in one round, and it is closed since the first of them
        answers = zygote.receive()
        for answer in answers or ():
            match answer:
                case Child():
                    self._watch(answer)
                    if not _is_child(
                        answer.pid
                    ):  # it was killed, and reaped as an orphan, before this process knew of it
                        del self._by_pid[answer.pid]
                        self._reap(answer)
                case wire.Preloaded(failed):
                    for name, text in failed.items():
                        print(f"hvdlab: --preload {name}: {text}", file=sys.stderr)
                case _:
                    self._send(answer)
        if answers is not None and not ended:
            return
        self._selector_drop(zygote.descriptor)
        # Before its ranks are started: `_start_rank` would order them from the zygote again.
        self._zygote = None
        why = zygote.why_ended()
        print(f"hvdlab: ranks start without preloaded modules: their process ended, {why}", file=sys.stderr)
        for spec, stdin in zygote.unborn():
            self._start_rank(spec, stdin)
            os.close(stdin)
        zygote.close()

    def _signal(self, ranks: tuple[int, ...], number: int) -> None:
        for rank in ranks:
            if self._forked is not None:
                self._forked.signal(rank, number)
            if rank in self._children:
                self._children[rank].signal(number)
            elif self._zygote is not None:
                self._zygote.signal(rank, number)

    def _read_output(self, child: Child, fd: int) -> bool:
        """Pass on the output that can be read; returns whether more can follow at once."""
        if fd not in child.pipes:  # closed by another event of the same round
            return False
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self._send(wire.RankOutput(child.rank, child.pipes[fd], data))
            return True
        self._close_output(child, fd)
        return False

    def _close_output(self, child: Child, fd: int) -> None:
        self._selector_drop(fd)
        del child.pipes[fd]  # an event of this pipe can be behind the present one in the same round
        os.close(fd)

    def _selector_drop(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _pause_reading(self, paused: bool) -> None:
        """Stop reading from ranks, or read again."""
        if paused == self._paused:
            return
        self._paused = paused
        for child in self._children.values():
            if not paused:
                self._read_from(child)
                continue
            for fd in child.pipes:
                self._selector_drop(fd)

    def _woken(self, wakeup: int) -> None:
        numbers = os.read(wakeup, 4096)
        if signal.SIGTERM in numbers or signal.SIGHUP in numbers:
            self._open = False
        self._reap_children()

    def _reap_children(self) -> None:
        while (ended := _ended_child()) > 0:
            if self._forked is not None and ended == self._forked.pid:
                return  # the thread that listens to it reaps it, and wakes this one then
            if self._zygote is not None and ended not in self._by_pid:
                # A zygote reports a rank before that can end, and is reaped with its end.
                over = ended == self._zygote.pid
                self._hear_zygote(self._zygote, ended=over)
                if over:
                    continue
            child = self._by_pid.pop(ended, None)
            if child is None:  # an orphan that was adopted
                os.waitpid(ended, 0)
                continue
            self._reap(child)

    def _reap(self, child: Child) -> None:
        child.signal(
            signal.SIGKILL
        )  # the rest of its group; no other process can have its number before it is reaped
        code, number = child.reap()
        del self._children[child.rank]
        for fd in list(child.pipes):
            while self._read_output(child, fd):
                pass
        for fd in list(child.pipes):
            # A pipe that has not ended is kept open by a process that left the rank's group, or is about to die by the
            # signal; the rank's end does not wait for that.
            self._close_output(child, fd)
        for piece in child.result():
            self._send(wire.ResultPiece(child.rank, piece))
        # Last: the launcher forgets the rank with this message, and disowns later ones.
        self._send(wire.RankExited(child.rank, code, number))

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end_all(self) -> None:
        """End the ranks of a lost launcher: SIGTERM, a moment, SIGKILL, also for processes that left their rank's process group."""
        if self._zygote is not None:
            self._zygote.close()
        if self._forked is not None:
            self._forked.close(GRACE)
        self._signal(tuple(self._children), signal.SIGTERM)
        until = time.monotonic() + GRACE
        while self._by_pid and (left := until - time.monotonic()) > 0:
            select.select([self._wakeup], [], [], left)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup, 4096)
            while (ended := _ended_child()) > 0:
                child = self._by_pid.pop(ended, None)
                if child is not None:
                    # Before waitpid(): from then on another group may get this number.
                    child.signal(signal.SIGKILL)
                os.waitpid(ended, 0)
        for child in self._by_pid.values():
            child.signal(signal.SIGKILL)
        # Until none is left: the end of one can leave further orphans to this process.
        while orphans := living_children():
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
        if self._directory is not None:
            from hvdlab.collectives.coordinator.process import remove_directory

            # After the last process that could write there.
            remove_directory(self._directory)


def _address(order: wire.Start) -> str:
    """Return the address of this host at which others reach its ranks."""
    if order.interfaces:
        return interface_address(order.interfaces)
    return data_plane_address(os.environ, order.coordinator)


def _ended_child() -> int:
    """Process id of a child that has ended and was not reaped, or 0."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return found.si_pid if found is not None else 0


def _is_child(pid: int) -> bool:
    """Return whether a process is a child of this one that was not reaped."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _catch_signals() -> int:
    """Return a descriptor that signals can be read from, as bytes."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # Not SIG_IGN for SIGINT, which the ranks would inherit.
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)
    return reader


def main() -> None:
    """Run the agent; ``--stdin FD`` names the descriptor that a rank may be given as its input."""
    stdin = int(sys.argv[2]) if sys.argv[1:2] == ["--stdin"] else -1
    # Copies, which no rank inherits: a rank that outlives the agent must not keep the launcher's pipes
    # open.
    orders, reports = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # nothing but messages may get to the launcher
    os.close(null)
    adopt_orphans()
    Agent(orders, reports, stdin).run()


if __name__ == "__main__":
    main()
