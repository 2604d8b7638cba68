"""The fork server's shell: its sockets, pipes, signals, forks. :class:`ForkServerState` decides on actions.

While the main thread imports, the shell runs on a thread of its own, so that a successor looks after the
ranks of its predecessor at once. Only when that thread has ended is anything forked: a fork copies one thread.

While no notebook is attached to a kept pool, :class:`DetachedSupervisor` replaces its coordinator, as a notebook would. It holds the
coordinator's listening socket from the moment the pool is kept, so that ranks which lose the coordinator wait there
instead of leaving.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from hvdlab.collectives.coordinator.process import CoordinatorLaunch, CoordinatorProcess, Listeners
from hvdlab.collectives.errors import ProtocolError, StartError
from hvdlab.collectives.failover.supervisor import server_of, take_over
from hvdlab.collectives.protocol.endpoint import ConnectionLost, Endpoint
from hvdlab.collectives.system import living_children, raise_on_hangup, require_own_peer
from hvdlab.launch.forkserver.children import READ_SIZE, ChildRole, ChildTable, fork, why_not
from hvdlab.launch.forkserver.death_pipe import wake_on_hangup
from hvdlab.launch.forkserver.messages import (
    CONTROLLER,
    Children,
    Fork,
    Forked,
    ForkServerMessage,
    Loaded,
    SuccessorRefused,
    decode_to_server,
    encode,
)
from hvdlab.launch.forkserver.program import ForkedProgram, load_later
from hvdlab.launch.forkserver.server_state import (
    Effect,
    Event,
    Exit,
    ForkChild,
    ForkReturned,
    ForkServerState,
    ForkServerTick,
    Imported,
    Kill,
    Listen,
    ListenReturned,
    NotifyController,
    PoolFound,
    PoolLost,
    PoolRequested,
    SendToPool,
    WatchProcess,
)
from hvdlab.launch.processes import readable

PULSE = 0
"""Standard input: a pipe whose other end only the pool's process holds."""


class ServerShell:
    """Shell that runs the fork server until the pool asks it to end or is gone. Made on the main thread.

    Args:
        link: Connection to the pool's process.
        death_pipe: The writing end of the pipe that children depend on.
        program: The children's program.
    """

    def __init__(self, link: PoolLink, death_pipe: int, program: ForkedProgram) -> None:
        self._link = link
        self._death_pipe = death_pipe
        #: The socket for a successor of the pool's process, if this process is to stay.
        self._listener: PoolListener | None = None
        #: Supervises the coordinator while no pool's process does.
        self._detached: DetachedSupervisor | None = None
        self._state = ForkServerState()
        #: The fork server's own process: a forked child that fails must end, and compares with this.
        self._pid = os.getpid()
        #: Whether the main thread still imports. It clears this itself; until then nothing is forked.
        self._importing = True
        self._program = program
        self._later = deque(program.later)
        #: Modules that training will import, until a rank is forked, which would have to share its core with these imports.
        self._training: deque[str] = deque()
        #: Events that effects have caused; they are handled before all others.
        self._answers: list[Event] = []
        #: Pipe to each child that waits until the pool knows of it, by process id.
        self._unannounced: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._child_table = ChildTable(self._selector, program)
        self._wakeup, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._reap)
        self._watch_pool()
        # No warning: a full pipe wakes the loop as well, and reap() does not count the signals.
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _do_nothing)

    def run(self, imports: Callable[[], Loaded]) -> ChildRole | None:
        """Import and serve. Returns ``None`` when the process has to exit, and in a forked child its role."""
        # An import may hold the interpreter for seconds: until it is done, the kernel ends this process with the pool's.
        raise_on_hangup(PULSE)
        beside = threading.Thread(target=self._serve_beside, name="hvdlab-forkserver", daemon=True)
        beside.start()
        loaded = imports()
        self._training.extend(self._program.for_training())
        # The flag before the byte: the other thread looks at the flag after the byte has woken it.
        self._importing = False
        os.write(self._wakeup_write, b"\0")
        beside.join()
        wake_on_hangup(PULSE)
        outcome = self._serve(Imported(loaded))
        if isinstance(outcome, Exit):
            self._finish(outcome)
            return None
        return outcome

    def _serve_beside(self) -> None:
        try:
            outcome = self._serve()
            if isinstance(outcome, Exit):
                self._finish(outcome)
                os._exit(0)  # the main thread can't be asked
        except BaseException:  # noqa: BLE001  (the end of the process; its last words say why)
            traceback.print_exc()
            os._exit(1)

    def _serve(self, *first: Event) -> ChildRole | Exit | None:
        """Serve to the end; returns ``None`` if called during the imports and these are done."""
        events, importing = deque[Event](first), self._importing
        while True:
            while events:
                outcome = self._handle(events.popleft())
                if outcome is not None:
                    return outcome
                # Answers, such as to a fork, are handled before events that happened meanwhile.
                events.extendleft(reversed(self._answers))
                self._answers.clear()
            # Only between events: one that was read is never left behind.
            if importing and not self._importing:
                return None
            events.extend(self._wait())

    def _handle(self, event: Event) -> ChildRole | Exit | None:
        """Handle an event. A request that fails is answered if it can be, and logged; the children go on in any case.

        Only this process may go on: an exception in a forked child must end that.
        """
        try:
            return self._perform(self._state.handle(event, time.monotonic()))
        except Exception as error:
            if not isinstance(event, PoolRequested) or os.getpid() != self._pid:
                raise  # a successor adopts the ranks, which is safer than a table that has missed an end
            print(f"hvdlab: the fork server failed at {type(event.message).__name__}:", file=sys.stderr)
            traceback.print_exc()
            if isinstance(event.message, Fork):
                self._answers.append(
                    ForkReturned(event.message.number, error=f"the fork server failed: {error!r}")
                )
            return None

    # -- waiting --------------------------------------------------------------------------------------------------

    def _wait(self) -> list[Event]:
        self._watch_backlog()
        ready = self._selector.select(self._timeout())
        if not ready and not self._importing and (waiting := self._later or self._training):
            # One module, and only when nothing else is to be done: a fork must not wait for more than one import.
            load_later(waiting.popleft())
            return []
        events: list[Event] = []
        for key, _ in ready:
            events += key.data()
        if self._child_table.next_memory_sample() == 0.0:
            self._child_table.sample_memory()
        tick = self._state.next_tick()
        # Last: events until now, such as ends of children, come before the limit that has passed.
        if tick is not None and time.monotonic() >= tick:
            events.append(ForkServerTick())
        return events

    def _timeout(self) -> float | None:
        if (self._later or self._training) and not self._importing:
            return 0
        tick = self._state.next_tick()
        waits = [
            self._child_table.next_memory_sample(),
            None if tick is None else max(0.0, tick - time.monotonic()),
        ]
        return min((wait for wait in waits if wait is not None), default=None)

    def _watch_backlog(self) -> None:
        """Watch for writability while something waits."""
        endpoint = self._link.endpoint
        if endpoint.closed:
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if endpoint.backlog else 0)
        if self._selector.get_key(endpoint).events != wanted:
            self._selector.modify(endpoint, wanted, self._read_pool)

    def _ignore(self, source: object) -> None:
        """Watch a source no longer, if it was watched."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)  # type: ignore[arg-type]  # whatever was registered

    # -- the pool's process ---------------------------------------------------------------------------------------

    def _watch_pool(self) -> None:
        link = self._link
        self._selector.register(link.endpoint, selectors.EVENT_READ, self._read_pool)
        for sign in link.signs:
            self._selector.register(sign, selectors.EVENT_READ, lambda: self._has_hung_up(link))

    def _has_hung_up(self, link: PoolLink) -> list[Event]:
        # Another process can have connected in the same round, before this event: its connection must not be closed for it.
        return self._pool_lost() if link is self._link else []

    def _read_pool(self) -> list[Event]:
        endpoint = self._link.endpoint
        try:
            if endpoint.backlog:
                endpoint.flush()
            return [PoolRequested(decode_to_server(payload)) for payload in endpoint.receive()]
        except ConnectionLost:
            return self._pool_lost()
        except ProtocolError as error:
            print(
                f"hvdlab: the fork server closes its connection to the pool, which sent {error}",
                file=sys.stderr,
            )
            return self._pool_lost()

    def _pool_lost(self) -> list[Event]:
        # The connection and each of the signs report the same loss, perhaps in one round of the selector. It is handled once.
        if self._link.endpoint.closed:
            return []
        for source in (self._link.endpoint, *self._link.signs):
            self._ignore(source)
        self._link.close()
        if self._detached is not None and self._ranks():
            self._detached.begin(self._ranks())
            self._watch_coordinator()
        return [PoolLost()]

    def _listen(self, path: str) -> None:
        error = ""
        # The old listener first: at the same path, the probe of the new one would find it in use, and
        # bind() would fail.
        if self._listener is not None:
            self._ignore(self._listener.sock)
            self._listener.close()
            self._listener = None
        try:
            if self._detached is not None:
                self._leave_coordinator()
                self._detached.release()
                self._detached = None
            if path:
                self._listener = PoolListener(path)
                self._detached = DetachedSupervisor(Path(path).parent)
                self._selector.register(self._listener.sock, selectors.EVENT_READ, self._open_door)
                # Only once the socket exists: during the imports, the kernel ends this process with the
                # pool's until then. SIGCONT stays requested: this process may be stopped when it is kept no longer.
                wake_on_hangup(PULSE)
        except OSError as failure:
            error = failure.strerror or str(failure)
        self._answers.append(ListenReturned(path, error))

    def _open_door(self) -> list[Event]:
        """Handle the connection of a process that asks to become the pool's."""
        found = self._listener.accept() if self._listener is not None else None
        if found is None:
            return []
        link = PoolLink(*found)
        if self._link.alive or not self._state.kept:
            with contextlib.suppress(ConnectionLost):
                link.endpoint.send_frame(encode(SuccessorRefused(self._link.pid)))
            link.close()
            return []
        # First: if the old link is open, this starts a coordinator where none lives. The new process needs
        # one.
        lost = self._pool_lost()
        self._leave_coordinator()
        self._link = link
        self._watch_pool()
        return [*lost, PoolFound()]

    # -- the coordinator of a kept pool that no process uses ------------------------------------------------------

    def _ranks(self) -> int:
        """Return one more than the highest rank that lives."""
        return max(self._state.children(), default=-1) + 1

    def _watch_coordinator(self) -> None:
        if self._detached is not None and self._detached.process >= 0:
            self._selector.register(self._detached.process, selectors.EVENT_READ, self._coordinator_ended)

    def _coordinator_ended(self) -> list[Event]:
        if self._detached is not None and self._detached.has_ended():
            self._ignore(self._detached.process)
            if self._state.kept and self._ranks():
                self._detached.replace(self._ranks())
                self._watch_coordinator()
        return []

    def _leave_coordinator(self) -> None:
        """Leave the coordinator to another process from now on."""
        if self._detached is not None:
            # First: if the coordinator has just died and its event waits in this round, a successor is
            # started here. The next owner of the pool expects one at the socket.
            self._coordinator_ended()
            if self._detached.process >= 0:
                self._ignore(self._detached.process)
            self._detached.end()

    # -- effects --------------------------------------------------------------------------------------------------

    def _send(self, message: ForkServerMessage) -> None:
        # A new process of the pool gets the writing end along with the children: they live as long as
        # either of the two holds it.
        descriptor = self._death_pipe if isinstance(message, Children) else -1
        with contextlib.suppress(ConnectionLost):
            self._link.endpoint.send_frame(encode(message), descriptor)
        # Also after a loss: a kept pool's next process learns of the child by `Children`, and otherwise
        # _stop() ends it like the rest.
        if isinstance(message, Forked):
            # The pool knows of the child now, so the child can live; see :attr:`ChildRole.leave_to_live`.
            announced = self._unannounced.pop(message.pid)
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                os.write(announced, b"!")
            os.close(announced)

    def _perform(self, effects: Sequence[Effect]) -> ChildRole | Exit | None:
        for effect in effects:
            match effect:
                case SendToPool(message):
                    self._send(message)
                case Kill(pid, number, group):
                    self._child_table.kill(pid, number, group)
                case NotifyController(rank, joined):
                    self._child_table.notify_controller(b"%s%d\n" % (b"+" if joined else b"-", rank))
                case WatchProcess(child):
                    self._answers += self._child_table.adopt(child)
                case Listen(path):
                    self._listen(path)
                case ForkChild(order):
                    role = self._fork(order)
                    if role is not None:
                        return role
                case Exit():
                    return effect
        return None

    def _fork(self, order: Fork) -> ChildRole | None:
        try:
            outcome = fork(order, self._program, self._death_pipe, self._close_in_child)
        except OSError as error:
            self._answers.append(ForkReturned(order.number, error=why_not(error)))
            return None
        if isinstance(outcome, ChildRole):
            return outcome
        if order.number != CONTROLLER:
            self._training.clear()
        self._child_table.add(outcome.child)
        self._unannounced[outcome.record.pid] = outcome.announced
        self._answers.append(ForkReturned(order.number, outcome.record))
        return None

    # -- ends -----------------------------------------------------------------------------------------------------

    def _close_in_child(self) -> None:
        """Close the parent's descriptors in a child, without notice to the other sides, and handle signals as usual."""
        # First: the pipe is shared with the parent, which the child's signals would wake.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Nothing is unregistered: the child shares the epoll object, so that would end the parent's watch.
        self._selector.close()
        self._link.close_in_child()
        if self._listener is not None:
            self._listener.close_in_child()
        if self._detached is not None:
            self._detached.release()
        # The pipes of siblings that wait, too: with a copy of the writing end here, a sibling would not see
        # that the fork server died.
        for descriptor in (self._wakeup, self._wakeup_write, *self._unannounced.values()):
            os.close(descriptor)
        self._child_table.close_in_child()

    def _reap(self) -> list[Event]:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup, READ_SIZE)
        if self._importing:
            # Every child is one that a package has started while it is imported, on the main thread, which waits for it
            # itself. The rest of them is reaped at the end of the imports: run() writes to this pipe then.
            return []
        return self._child_table.reap()

    def _finish(self, exit_: Exit) -> None:
        if self._listener is not None:
            self._listener.close()
        for path in exit_.paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
        # Adopted orphans of ranks, in process groups of their own.
        with contextlib.suppress(OSError):
            for pid in living_children():
                # The coordinator ends by itself, after the last rank.
                if self._detached is None or pid != self._detached.successor:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        if self._detached is not None:
            self._detached.release()
        self._link.close()


def _do_nothing(number: int, frame: object) -> None:
    """Do nothing: any handler lets the signal arrive at the wake-up descriptor."""


ANSWER_WITHIN = 1.0
"""Seconds that a coordinator has to hand over its socket."""
START_WITHIN = 20.0
"""Seconds that a successor has to come up."""
START_TRIES = 3
"""How many successors are tried if they fail to come up."""
UNKNOWN = 16
"""Number of incarnations that are left free for coordinators which the notebook has started without a report to this process."""


class DetachedSupervisor:
    """Supervisor of the coordinator that has this directory.

    Attributes:
        process: A descriptor that becomes readable when the coordinator ends, while this process supervises it; otherwise -1.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        #: Start data and listening sockets for a successor, as the coordinator has handed them out last.
        self._launch: CoordinatorLaunch | None = None
        self._listeners: Listeners | None = None
        #: The coordinator that was started here, if any.
        self._successor: CoordinatorProcess | None = None
        #: A descriptor of the last coordinator whose process this has found, or -1.
        self._known = -1
        self.process = -1
        self._replace_descriptor(server_of(self._directory, ANSWER_WITHIN))
        self._learn()

    @property
    def successor(self) -> int:
        """Return the process of the coordinator that was started here; 0 if there is none."""
        return self._successor.pid if self._successor is not None else 0

    def begin(self, ranks: int) -> None:
        """Supervise the coordinator from now on. If it has ended, a successor is started first.

        Args:
            ranks: How many ranks a successor has to wait for.
        """
        pid = server_of(self._directory, ANSWER_WITHIN)
        # Without an answer the newest number is unknown: the notebook may have started coordinators since the last one.
        if not self._learn() and self._launch is not None:
            self._launch = msgspec.structs.replace(
                self._launch, incarnation=self._launch.incarnation + UNKNOWN
            )
        if pid:
            self._watch(pid)
        elif self._known >= 0 and not readable(self._known, 0):
            # No answer is no proof of its end: its socket's file may have been removed, or it is too busy to accept. A second
            # coordinator at the same listening socket would get the next notebook, while the ranks stay with the first one.
            self.process = os.dup(self._known)
        else:
            self.replace(ranks)

    def replace(self, ranks: int) -> None:
        """Start a successor of an ended coordinator. If that fails, the ranks end after a while."""
        self.end()
        if self._launch is None or self._listeners is None:
            return
        for _ in range(START_TRIES):
            launch = msgspec.structs.replace(self._launch, size=ranks)
            # A failed attempt uses its number up: ranks may have met that coordinator, and would take another one of the
            # same number for it.
            self._launch = msgspec.structs.replace(launch, incarnation=launch.incarnation + 1)
            try:
                self._successor = CoordinatorProcess.succeed(launch, self._listeners, START_WITHIN)
            except StartError as error:
                print(f"no other coordinator could be started: {error}", file=sys.stderr, flush=True)
                continue
            self._watch(self._successor.pid)
            return

    def end(self) -> None:
        """Leave the coordinator to another process from now on."""
        descriptor, self.process = self.process, -1
        if descriptor >= 0:
            os.close(descriptor)

    def release(self) -> None:
        """Close everything, in a forked child or at the end. A successor that was started here lives on by itself."""
        self.end()
        self._replace_descriptor(0)
        if self._listeners is not None:
            self._listeners.close()
        if self._successor is not None:
            self._successor.release(0)

    def _watch(self, pid: int) -> None:
        self._replace_descriptor(pid)
        if self._known >= 0:
            # A copy: `_known` is replaced whenever the coordinator is found again, while the selector
            # watches this one until end().
            self.process = os.dup(self._known)

    def _replace_descriptor(self, pid: int) -> None:
        """Keep a descriptor of this process in place of the one before; of none if ``pid`` is 0."""
        descriptor, self._known = self._known, -1
        if descriptor >= 0:
            os.close(descriptor)
        if pid:
            with contextlib.suppress(OSError):  # it has ended
                self._known = os.pidfd_open(pid)

    def _learn(self) -> bool:
        """Ask the coordinator for the start data of a successor. Returns whether it has answered."""
        try:
            launch, listener = take_over(self._directory, ANSWER_WITHIN)
        except OSError:
            return False
        before = self._listeners
        self._launch, self._listeners = launch, Listeners(self._directory, "", listener)
        if before is not None:
            before.close()
        return True

    def has_ended(self) -> bool:
        """Return whether the supervised coordinator has ended."""
        return self.process >= 0 and readable(self.process, 0)


class PoolLink:
    """Connection, with other signs that the process at its far end has ended.

    Args:
        sock: The connection.
        pid: The pool's process.
        pulse: A pipe whose other end only the pool's process holds, or -1.
    """

    def __init__(self, sock: socket.socket, pid: int, pulse: int = -1) -> None:
        self.pid = pid
        self._sock = sock
        self.endpoint = Endpoint(sock)
        self.signs = [pulse] if pulse >= 0 else []
        # The pipe alone would miss the pool's end while a forked child of the pool's process keeps a copy of it.
        with contextlib.suppress(OSError):
            self.signs.append(os.pidfd_open(pid))

    @property
    def alive(self) -> bool:
        """Return whether the pool's process lives and has not hung up."""
        if self.endpoint.closed:
            return False
        hangup = select.poll()
        # Without flags: a hang-up is reported, bytes that wait are not.
        hangup.register(self._sock, 0)
        for sign in self.signs:
            hangup.register(sign, select.POLLIN)
        return not hangup.poll(0)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.endpoint.close()
        self._close_signs()

    def close_in_child(self) -> None:
        """Close it in a forked child, without shutting the connection down for the other side."""
        if not self.endpoint.closed:
            os.close(self._sock.detach())
        self._close_signs()

    def _close_signs(self) -> None:
        signs, self.signs = self.signs, []
        for descriptor in signs:
            os.close(descriptor)


class PoolListener:
    """A socket at which a successor of the pool's process connects.

    Args:
        path: Where, in a directory that no other user may enter.

    Raises:
        OSError: It can't be made there.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.setblocking(False)
            _clear(path)
            self.sock.bind(path)
            self.sock.listen(8)
            self._spare = os.open(os.devnull, os.O_RDONLY)
        except BaseException:
            self.sock.close()
            raise

    def accept(self) -> tuple[socket.socket, int] | None:
        """Return the connection of a process that has connected, and its id; ``None`` if it is refused, or has gone."""
        try:
            sock, _ = self.sock.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._drop_connection()
            return None
        try:
            return sock, require_own_peer(sock)
        except OSError:  # it is another user's
            sock.close()
            return None

    def _drop_connection(self) -> None:
        """Drop one connection: without a descriptor for it, the listener would stay readable for ever."""
        os.close(self._spare)
        with contextlib.suppress(OSError):
            self.sock.accept()[0].close()
        self._spare = os.open(os.devnull, os.O_RDONLY)

    def close(self) -> None:
        """Remove the socket and stop listening: no process can connect any more."""
        with contextlib.suppress(OSError):
            # Before the socket is closed: once it refuses connections, another process may put its own
            # socket at this path.
            os.unlink(self.path)
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close the descriptors in a forked child."""
        self.sock.close()
        os.close(self._spare)


def _clear(path: str) -> None:
    """Remove the socket of a process that has ended without doing so."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(FileNotFoundError):
        try:
            # Only a socket that nothing listens at refuses. One that accepts is in use: it stays, and the caller's bind() fails.
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
