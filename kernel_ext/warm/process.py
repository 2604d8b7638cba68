"""The warm process's shell: its sockets, pipes, signals, forks. What to do is decided by the supervisor.

One thread only, so that a fork copies a process in a known state.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hvdlab.collectives.linux import living_children
from hvdlab.collectives.protocol.endpoint import ConnectionLost, Endpoint
from hvdlab.kernel_ext.rank.fds import StdPipes
from hvdlab.kernel_ext.warm.exits import OutOfMemoryCounter
from hvdlab.kernel_ext.warm.messages import CONTROLLER, Fork, Loaded, decode_to_warm, encode
from hvdlab.kernel_ext.warm.preload import load_later
from hvdlab.kernel_ext.warm.supervisor import (
    Asked,
    ChildEnded,
    ChildWrote,
    ControllerListens,
    Do,
    Effect,
    Event,
    Exit,
    ForkReturned,
    Kill,
    PoolLost,
    Send,
    Supervisor,
    TellController,
    Tick,
)

READ_SIZE = 64 * 1024


@dataclass(frozen=True, slots=True)
class Role:
    """What a forked child is to be.

    Attributes:
        order: The pool's order.
        log: Pipe for descriptors 1 and 2 at the start, whose last lines are reported when the child ends.
        pipes: What a rank captures its output with; the warm process reads what is left in them at its end.
        channel: The controller's connection to the warm process, else -1.
        parent: Process id of the warm process.
    """

    order: Fork
    log: int
    pipes: StdPipes
    channel: int
    parent: int


@dataclass(slots=True)
class _Pipes:
    """The warm process's ends of one child's pipes."""

    number: int
    log: int
    unread: tuple[int, int]
    channel: socket.socket | None

    def close(self) -> None:
        """In the warm process or in a child: let go of them without telling the other side."""
        for descriptor in (self.log, *self.unread):
            os.close(descriptor)
        if self.channel is not None:
            os.close(self.channel.detach())


class WarmShell:
    """Runs the warm process until the pool asks it to end or is gone.

    Args:
        sock: Connection to the pool.
        lifeline: A pipe whose other end only the pool's process holds.
        pool: Process id of the pool's process.
        later: Modules to import when there is nothing else to do.
    """

    def __init__(self, sock: socket.socket, lifeline: int, pool: int, later: Sequence[str]) -> None:
        self._sock = sock
        self._endpoint = Endpoint(sock)
        self._supervisor = Supervisor()
        self._later = deque(later)
        self._memory = OutOfMemoryCounter()
        self._pipes: dict[int, _Pipes] = {}
        self._answers: list[Event] = []
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._own = [self._wakeup, self._wakeup_write, lifeline]
        self._selector.register(sock, selectors.EVENT_READ, self._read_pool)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._reap)
        self._selector.register(lifeline, selectors.EVENT_READ, self._pool_lost)
        # The pipe alone would miss the pool's end while a forked child of the pool's process keeps a copy of it.
        with contextlib.suppress(OSError):
            self._own.append(os.pidfd_open(pool))
            self._selector.register(self._own[-1], selectors.EVENT_READ, self._pool_lost)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _do_nothing)

    def run(self, loaded: Loaded) -> Role | None:
        """Serve. Returns ``None`` when the process is to exit, and in a forked child what that is to be."""
        self._perform([Send(loaded)])
        events = deque[Event]()
        while True:
            while events:
                outcome = self._perform(self._supervisor.handle(events.popleft(), time.monotonic()))
                if isinstance(outcome, Role):
                    return outcome
                if outcome is not None:
                    self._finish(outcome)
                    return None
                # What a fork's answer brings about comes before what happened meanwhile.
                events.extendleft(reversed(self._answers))
                self._answers.clear()
            events.extend(self._wait())

    # -- waiting --------------------------------------------------------------------------------------------------

    def _wait(self) -> list[Event]:
        self._watch_backlog()
        ready = self._selector.select(self._timeout())
        if not ready and self._later:
            load_later(self._later.popleft())
            return []
        events: list[Event] = []
        for key, _ in ready:
            events += key.data() if callable(key.data) else self._read_log(*key.data)
        tick = self._supervisor.next_tick()
        if tick is not None and time.monotonic() >= tick:
            events.append(Tick())
        return events

    def _timeout(self) -> float | None:
        if self._later:
            return 0
        tick = self._supervisor.next_tick()
        return None if tick is None else max(0.0, tick - time.monotonic())

    def _watch_backlog(self) -> None:
        """Watch for writability while something waits."""
        if self._endpoint.closed:
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._endpoint.backlog else 0)
        if self._selector.get_key(self._sock).events != wanted:
            self._selector.modify(self._sock, wanted, self._read_pool)

    # -- what comes in --------------------------------------------------------------------------------------------

    def _read_pool(self) -> list[Event]:
        try:
            if self._endpoint.backlog:
                self._endpoint.flush()
            return [Asked(decode_to_warm(payload)) for payload in self._endpoint.receive()]
        except ConnectionLost:
            return self._pool_lost()

    def _pool_lost(self) -> list[Event]:
        watched: list[int | socket.socket] = [self._sock, *self._own[2:]]
        for end in watched:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(end)
        self._endpoint.close()
        return [PoolLost()]

    def _read_log(self, number: int, pipe: int) -> list[Event]:
        pipes = self._pipes.get(number)
        if pipes is None or pipes.log != pipe:
            return []  # the child was reaped a moment ago, and its log was read then
        data = os.read(pipe, READ_SIZE)
        if not data:
            self._selector.unregister(pipe)
            return []
        return [ChildWrote(number, data)]

    def _read_controller(self) -> list[Event]:
        pipes = self._pipes.get(CONTROLLER)
        if pipes is None or pipes.channel is None:
            return []
        try:
            said = pipes.channel.recv(READ_SIZE)
        except ConnectionResetError:  # it ended without having read everything
            said = b""
        if not said:
            self._selector.unregister(pipes.channel)
            return []
        return [ControllerListens()]

    def _reap(self) -> list[Event]:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup, READ_SIZE)
        events: list[Event] = []
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return events
            if found is None:
                return events
            events += self._reap_one(found.si_pid)

    def _reap_one(self, pid: int) -> list[Event]:
        events: list[Event] = []
        number = next((n for n, p in self._supervisor.children().items() if p == pid), None)
        if number is not None:
            # What it left behind in its process group (a data loader's workers) ends with it; as long as it is not
            # reaped, nobody else can get its number.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            events += self._drain(self._pipes.pop(number))
        _, status, usage = os.wait4(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        killed = code == -signal.SIGKILL and self._memory.increased()
        events.append(ChildEnded(pid, max(code, -1), max(-code, 0), usage.ru_maxrss * 1024, killed))
        return events

    def _drain(self, pipes: _Pipes) -> list[Event]:
        """Read a child's last words, and close its pipes."""
        watched: list[int | socket.socket | None] = [pipes.log, pipes.channel]
        for end in watched:
            if end is not None:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(end)
        events: list[Event] = []
        for pipe in (pipes.log, pipes.unread[1]):
            with contextlib.suppress(BlockingIOError):
                while data := os.read(pipe, READ_SIZE):
                    events.append(ChildWrote(pipes.number, data))
        pipes.close()
        return events

    # -- what is done ---------------------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[Effect]) -> Role | Exit | None:
        for effect in effects:
            match effect:
                case Send(message):
                    with contextlib.suppress(ConnectionLost):
                        self._endpoint.send_frame(encode(message))
                case Kill(pid, number, group):
                    with contextlib.suppress(ProcessLookupError):
                        (os.killpg if group else os.kill)(pid, number)
                case TellController(rank, joined):
                    self._tell_controller(b"%s%d\n" % (b"+" if joined else b"-", rank))
                case Do(order):
                    role = self._fork(order)
                    if role is not None:
                        return role
                case Exit():
                    return effect
        return None

    def _tell_controller(self, line: bytes) -> None:
        pipes = self._pipes.get(CONTROLLER)
        if pipes is not None and pipes.channel is not None:
            with contextlib.suppress(OSError):
                pipes.channel.send(line)

    def _fork(self, order: Fork) -> Role | None:
        parent = os.getpid()
        opened: list[int] = []
        channel: tuple[socket.socket, socket.socket] | None = None
        try:
            log, log_child = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            opened += [log, log_child]
            pipes = StdPipes.make()
            opened += [*pipes.out, *pipes.err]
            if order.number == CONTROLLER:
                channel = socket.socketpair()
            gc.freeze()
            pid = os.fork()
        except OSError as error:
            for descriptor in opened:
                os.close(descriptor)
            for end in channel or ():
                end.close()
            self._answers.append(ForkReturned(order.number, error=error.strerror or str(error)))
            return None
        if pid == 0:
            self._forget()
            os.close(log)
            os.set_blocking(log_child, True)
            return Role(order, log_child, pipes, channel[1].detach() if channel else -1, parent)
        for descriptor in (log_child, pipes.out[1], pipes.err[1]):
            os.close(descriptor)
        if channel:
            channel[1].close()
        self._keep(_Pipes(order.number, log, (pipes.out[0], pipes.err[0]), channel[0] if channel else None))
        self._answers.append(ForkReturned(order.number, pid))
        return None

    def _keep(self, pipes: _Pipes) -> None:
        self._pipes[pipes.number] = pipes
        self._selector.register(pipes.log, selectors.EVENT_READ, (pipes.number, pipes.log))
        if pipes.channel is not None:
            self._selector.register(pipes.channel, selectors.EVENT_READ, self._read_controller)

    # -- ends -----------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """In a child: close the parent's descriptors without telling the other sides, and take signals as usual."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        if not self._endpoint.closed:
            os.close(self._sock.detach())
        for descriptor in self._own:
            os.close(descriptor)
        for pipes in self._pipes.values():
            pipes.close()

    def _finish(self, exit_: Exit) -> None:
        for path in exit_.paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
        # Adopted orphans of ranks, in process groups of their own.
        for pid in living_children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._endpoint.close()


def _do_nothing(number: int, frame: object) -> None:
    """A handler, so that the signal arrives at the wake-up descriptor."""
