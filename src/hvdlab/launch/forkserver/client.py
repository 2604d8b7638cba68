"""The pool's side of the fork server: starting it, its orders and reports, and a successor when it dies.

The :class:`ReplayLog` has the messages that a successor needs: orders without an answer, and the children that live. From the death of a
fork server until its successor has adopted them, :class:`OrphanWatcher` watches these children.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import IO

import msgspec

from hvdlab.collectives.errors import ProtocolError, StartError
from hvdlab.collectives.protocol.endpoint import ConnectionLost, Endpoint
from hvdlab.collectives.system import require_own_peer
from hvdlab.collectives.time_limits import Deadline
from hvdlab.launch.forkserver.death_pipe import DeathPipe
from hvdlab.launch.forkserver.messages import (
    CONTROLLER,
    Adopt,
    Children,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    ForkServerMessage,
    FromServer,
    Guard,
    Keep,
    Kept,
    Loaded,
    Shutdown,
    Signal,
    SuccessorRefused,
    decode_from_server,
    encode,
)
from hvdlab.launch.processes import describe_signal, exit_status, open_process, peak_memory, readable

Listener = Callable[[FromServer], None]

AT_ONCE = 3
"""This many successors in a row are started at once, even if none of them finished its imports …"""
TRIES = 8
"""… and this many in a row at most, with pauses that begin with :data:`PAUSE` seconds and double each time."""
PAUSE = 1.0
"""Seconds before the first successor that is not started at once."""
STAY_WITHIN = 20.0
"""Seconds that :meth:`ForkServer.detach` waits for a successor that is to stay: an interpreter starts in them on a busy host."""


class ForkServer:
    """A running fork server, and the thread that reads its messages.

    The fork server ends when :meth:`close` is called and, with all its children, when this process ends in any way, unless it
    was asked to stay (:meth:`keep`). When it dies its children live on: :meth:`respawn` starts a successor for them.
    """

    def __init__(
        self, handle: ServerHandle, death_pipe: DeathPipe | None, environ: Mapping[str, str], program: str
    ) -> None:
        self._handle, self._death_pipe, self._environ = handle, death_pipe, dict(environ)
        self._program = program
        #: Guards all state below. Reentrant: :meth:`keep` holds it while it calls :meth:`send`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        #: Receives messages about children; until :meth:`listen`, they wait in ``_early``.
        self._listener: Listener | None = None
        self._on_lost: Callable[[str], None] | None = None
        self._early: list[FromServer] = []
        #: The answers of this fork server: its imports are done; it stays, or refuses to; another process has
        #: it (its id).
        self._loaded: Loaded | None = None
        self._kept: Kept | None = None
        self._refused = 0
        self._replay_log = ReplayLog()
        self._orphan_watcher = OrphanWatcher()
        #: Why the fork server is gone; ``None`` while it lives. Hopeless: no successor will follow.
        self._lost: str | None = None
        self._hopeless = False
        #: Fork servers in a row that could not be started, or died before their imports were done.
        self._failures = 0
        #: Whether :meth:`close` or :meth:`detach` was called, and whether the reading thread has to return.
        self._closing = self._leaving = False
        #: Wakes the reading thread when bytes wait to be written, or it has to return.
        self._wakeup, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._thread = self._begin(handle)
        except BaseException:
            os.close(self._wakeup)
            os.close(self._wakeup_write)
            raise

    @classmethod
    def start(cls, program: str, environ: Mapping[str, str] | None = None) -> ForkServer:
        """Start a fork server and return at once; it imports in the meantime.

        Args:
            program: Its children's program, as ``module:attribute`` of a
                :class:`~hvdlab.launch.forkserver.program.ForkedProgram`.
            environ: Its environment; by default this process's. ``HVDLAB_PRELOAD`` in it lists the modules to import.

        Raises:
            StartError: The process could not be started.
        """
        environ = dict(os.environ if environ is None else environ)
        with contextlib.ExitStack() as undo:
            death_pipe = DeathPipe.make()
            undo.callback(death_pipe.close)
            handle = ServerHandle.start(environ, death_pipe, program)
            undo.callback(handle.end)
            server = cls(handle, death_pipe, environ, program)
            undo.pop_all()
            return server

    @classmethod
    def attach(cls, path: str, program: str, deadline: Deadline) -> ForkServer:
        """Take over a fork server that was kept at ``path`` (:meth:`keep`), with its children.

        The listener gets the ends of children in the meantime.

        Raises:
            StartError: There is none, or another process has it.
        """
        handle = ServerHandle.find(path, deadline)
        try:
            self = cls(handle, None, os.environ, program)
        except BaseException:
            handle.release()
            raise
        try:
            with self._lock:
                self._changed.wait_for(
                    lambda: self._death_pipe or self._refused or self._lost, deadline.remaining()
                )
                if self._death_pipe is not None:
                    self._replay_log.record_order(Keep(path))
                    self._kept = Kept(path)  # it has stayed already
                    return self
                why = (
                    f"process {self._refused} has it" if self._refused else self._lost or "it does not answer"
                )
        except BaseException:
            # Also after Ctrl-C: the reading thread would keep the connection, and the fork server refuse every other process.
            self.detach()
            raise
        self.detach()
        raise StartError(f"the pool at {path} can't be attached to: {why}")

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self._handle.pid

    @property
    def lost(self) -> str | None:
        """Return why the fork server is gone; None as long as it is not."""
        return self._lost

    def children(self) -> dict[int, Forked]:
        """Return number to child, for the children that live as far as this process knows."""
        with self._lock:
            return dict(self._replay_log.children)

    def guarded(self) -> tuple[str, ...]:
        """Return the files that the fork server removes at its end."""
        with self._lock:
            return self._replay_log.guarded

    def listen(self, listener: Listener, on_lost: Callable[[str], None]) -> None:
        """Have every message about children given to ``listener``, on the reading thread; it must not block.

        ``on_lost`` is called with the reason when the process has ended without having been asked to. It may call
        :meth:`respawn`.
        """
        while True:
            with self._lock:
                early, self._early = self._early, []
                if not early:
                    # Only now: the reading thread gives the listener a newer message as soon as it knows it.
                    self._listener, self._on_lost = listener, on_lost
                    lost = self._lost
                    break
            # Without the lock: the reading thread goes on meanwhile, and keeps newer messages for the next turn of this loop.
            for message in early:
                listener(message)
        if lost is not None:
            on_lost(lost)

    def wait_loaded(self, deadline: Deadline) -> Loaded:
        """Wait until the fork server's imports are done. Ctrl-C breaks the wait.

        Raises:
            StartError: The fork server ended before, or the time is over.
        """
        with self._lock:
            deadline.wait_for(self._changed, lambda: self._loaded or self._lost)
            if self._lost is not None:
                raise StartError(f"the fork server has ended: {self._lost}")
            if self._loaded is not None:
                return self._loaded
        raise StartError(
            f"the fork server has not finished its imports after {deadline.seconds:g} s; "
            "give a longer timeout, or set HVDLAB_PRELOAD to the modules that it should import"
        )

    # -- requests -------------------------------------------------------------------------------------------------

    def send(self, message: ForkServerMessage) -> None:
        """Send a message. Any thread.

        If the fork server has died, its successor gets the message.

        Raises:
            StartError: This was closed, or the process is gone and has no successor.
        """
        with self._lock:
            if self._closing:
                raise StartError("the fork server was closed")
            if self._hopeless:
                raise StartError(f"the fork server is gone: {self._lost}")
            # Before the write: if the fork server dies in between, its successor gets the message.
            self._replay_log.record_order(message)
            if self._lost is None:
                self._write(message)

    def keep(self, path: str, deadline: Deadline) -> None:
        """Have the fork server stay, with its children, when this process ends; a later process can :meth:`attach` at ``path``.

        Args:
            path: Where it makes a socket, in a directory that no other user may enter.

        Raises:
            StartError: It could not make the socket, or did not answer in time.
        """
        with self._lock:
            self._kept = None
            # After `_kept` is cleared: the wait would otherwise end with the answer to an earlier order.
            self.send(Keep(path))
            deadline.wait_for(self._changed, lambda: self._kept)
            why = self._why_not_kept()
            if not why:
                return
            self._replay_log.drop_keep()
        raise StartError(f"the pool can't be kept at {path}: {why}")

    def _why_not_kept(self) -> str:
        if self._kept is None:
            return self._lost or "no answer"
        return self._kept.error

    def respawn(self) -> None:
        """Start a successor for the children of a dead fork server. Any thread; idempotent.

        The successor supervises the children at once, and can fork when it has imported (:meth:`wait_loaded`). This
        returns at once, or after a pause if several in a row could not be started or died early; :meth:`close` ends
        the pause.

        Raises:
            StartError: :data:`TRIES` successors in a row could not be started or died early, or this was closed.
        """
        while not self._respawned():
            pass

    def _respawned(self) -> bool:
        """Try once. Returns whether there is a living fork server."""
        with self._lock:
            pause = PAUSE * 2 ** (self._failures - AT_ONCE) if self._failures >= AT_ONCE else 0.0
            self._changed.wait_for(lambda: self._closing, pause)
            # The wait has released the lock: close() may have been called meanwhile, or another thread have
            # started a successor.
            if self._closing:
                raise StartError("the fork server was closed")
            if self._lost is None:
                return True
            if self._failures >= TRIES:
                self._hopeless = True
                self._changed.notify_all()
                raise StartError(f"{self._failures} in a row were of no use, the last one: {self._lost}")
            assert self._death_pipe is not None
            handle: ServerHandle | None = None
            try:
                handle = ServerHandle.start(self._environ, self._death_pipe, self._program)
                # Before the orders: a successor whose messages are not read must not fork. Its thread waits for the lock.
                thread = self._begin(handle)
            except (StartError, OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                if handle is not None:
                    handle.end()
                self._failures, self._lost = self._failures + 1, str(error)
                return False
            self._handle.release()
            self._handle, self._thread, self._lost, self._hopeless = handle, thread, None, False
            # Under the lock: messages of send() must come after these.
            for message in self._replay_log.replay():
                self._write(message)
            return True

    def _write(self, message: ForkServerMessage) -> None:
        with contextlib.suppress(ConnectionLost):  # the reading thread notices, too
            if not self._handle.endpoint.send_frame(encode(message)):
                self._wake()

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self, grace: float = 1.0, timeout: float = 5.0) -> None:
        """End the fork server and its children: by SIGTERM, after ``grace`` seconds by SIGKILL. Idempotent."""
        if not self._claim():
            return
        if self._lost is None:
            self._write(Shutdown(grace))
            if not self._handle.has_ended(grace + timeout):
                self._handle.kill()
                self._handle.has_ended(None)
        # Before they lose their death pipe: no descriptor can be had of a process that has ended.
        self._orphan_watcher.watch(self._replay_log.children.values())
        if self._lost is not None:
            self._orphan_watcher.terminate(grace)
        self._release()  # with the death pipe, so children that are left end now
        self._orphan_watcher.release(timeout)

    def detach(self) -> None:
        """Release the fork server; it stays if it was asked to (:meth:`keep`). Idempotent.

        If it has died, this waits up to :data:`STAY_WITHIN` seconds until its successor stays.
        """
        self._wait_staying()
        if self._claim():
            self._orphan_watcher.release()
            self._release()

    def _wait_staying(self) -> None:
        """Wait until a fork server that is to stay does so: without one, its children would end with this process."""
        with self._lock:
            # The callback starts the successor, on the reading thread, so that thread can't wait for it.
            mended = self._on_lost is not None and threading.current_thread() is not self._thread
            if mended and self._replay_log.keeps:
                self._changed.wait_for(lambda: self._closing or self._hopeless or self._stays(), STAY_WITHIN)

    def _stays(self) -> bool:
        """Return whether the fork server has answered that it stays, and lives. The reading thread may not know of its end yet."""
        return self._lost is None and self._kept is not None and not self._handle.has_ended(0)

    def _claim(self) -> bool:
        """Return whether the caller is the one that ends this."""
        with self._lock:
            claimed, self._closing = not self._closing, True
            self._changed.notify_all()
            return claimed

    def _release(self) -> None:
        self._leaving = True
        self._wake()
        # A callback of the reading thread, which can't join itself, may have closed this.
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._handle.release()
        if self._death_pipe is not None:
            self._death_pipe.close()
        os.close(self._wakeup)
        os.close(self._wakeup_write)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wakeup_write, b"\0")

    # -- the reading thread ---------------------------------------------------------------------------------------

    def _begin(self, handle: ServerHandle) -> threading.Thread:
        """Start to read the messages of a fork server. Raises ``OSError`` or ``RuntimeError`` if no descriptor or thread is left."""
        # Here: on the reading thread no caller would get the error.
        selector = selectors.DefaultSelector()
        try:
            selector.register(handle.endpoint, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            thread = threading.Thread(
                target=self._run, args=(handle, selector), name="hvdlab-forkserver", daemon=True
            )
            thread.start()
        except BaseException:
            selector.close()
            raise
        return thread

    def _run(self, handle: ServerHandle, selector: selectors.BaseSelector) -> None:
        with selector:
            try:
                while not self._leaving:
                    self._step(handle, selector)
                return
            except ConnectionLost as error:
                reason = str(error)
            except ProtocolError as error:
                # It is unknown where the next message begins. A successor can adopt the children.
                handle.kill()
                reason = str(error)
        self._has_ended(handle, reason)

    def _step(self, handle: ServerHandle, selector: selectors.BaseSelector) -> None:
        endpoint = handle.endpoint
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if endpoint.backlog else 0)
        if selector.get_key(endpoint).events != wanted:
            selector.modify(endpoint, wanted)
        for key, _ in selector.select():
            # A callback may have closed this: the other descriptors of the round may be those of other files by now.
            if self._leaving:
                return
            if key.fileobj == self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 64)
                continue
            if endpoint.backlog:
                endpoint.flush()
            for payload in endpoint.receive():
                self._take(decode_from_server(payload), endpoint)

    def _take(self, message: FromServer, endpoint: Endpoint) -> None:
        with self._lock:
            self._replay_log.record_report(message)
            match message:
                case Loaded():
                    self._loaded, self._failures = message, 0
                    self._orphan_watcher.release()  # the fork server looks after them now
                case Kept():
                    self._kept = message
                case Children():
                    self._death_pipe = DeathPipe(endpoint.take_descriptor())
                case SuccessorRefused(pid):
                    self._refused = pid
                case Exited():
                    message = self._orphan_watcher.complete(message)
            self._changed.notify_all()
            if isinstance(message, Loaded | Kept | Children | SuccessorRefused):
                return
            listener = self._listener
            if listener is None:
                self._early.append(message)
                return
        listener(message)

    def _has_ended(self, handle: ServerHandle, error: str) -> None:
        if self._closing or self._refused:
            self._note_end("it was closed")
            return
        reason = handle.why_ended(error)
        with self._lock:
            # First: the end of a child that ends before it is watched stays unknown.
            self._orphan_watcher.watch(self._replay_log.children.values())
            ended = self._replay_log.record_death()
            # Before `_loaded` is cleared: only a fork server that did not get through its imports counts as a failure.
            self._failures += self._loaded is None
            self._loaded = self._kept = None
            self._note_end(reason)
            listener, on_lost = self._listener, self._on_lost
            if listener is None:
                self._early += ended
        if listener is not None:
            for message in ended:
                listener(message)
        if on_lost is not None and not self._closing:
            on_lost(reason)

    def _note_end(self, reason: str) -> None:
        with self._lock:
            self._lost = reason
            self._changed.notify_all()


ORDER_TRIES = 3
"""After this many fork servers have died over the order for a child, the next one does not get it."""


class ReplayLog:
    """Log of a fork server's children and orders, from which its successor gets its first messages.

    Attributes:
        children: Number to child, for the children that live.
    """

    def __init__(self) -> None:
        self.children: dict[int, Forked] = {}
        #: Orders for children without an answer, and how many fork servers have died over each.
        self._orders: dict[int, Fork] = {}
        self._tries: dict[int, int] = {}
        #: SIGTERM and SIGKILL for living children. A successor sends them again: the dead one may have died
        #: before it did.
        self._ends: dict[int, Signal] = {}
        #: The last orders of these kinds, which a successor gets again.
        self._guard: Guard | None = None
        self._keep: Keep | None = None

    def record_order(self, message: ForkServerMessage) -> None:
        """Record an order to the fork server."""
        match message:
            case Fork(number):
                self._orders[number], self._tries[number] = message, 0
            # Only signals that may come twice: the fork server may have sent it before it died.
            case Signal(number, wanted) if number in self.children and wanted in (
                signal.SIGTERM,
                signal.SIGKILL,
            ):
                self._ends[number] = message
            case Adopt(children):
                self.children.update({child.number: child for child in children})
            case Guard():
                self._guard = message
            case Keep():
                self._keep = message

    @property
    def guarded(self) -> tuple[str, ...]:
        """Return the files that the fork server removes at its end."""
        return self._guard.paths if self._guard is not None else ()

    @property
    def keeps(self) -> bool:
        """Return whether the fork server is to stay when this process ends."""
        return self._keep is not None

    def drop_keep(self) -> None:
        """Drop the last :class:`Keep`, which failed."""
        self._keep = None

    def record_report(self, message: FromServer) -> None:
        """Record a message of the fork server."""
        match message:
            case Forked(number):
                self._orders.pop(number, None)
                self.children[number] = message
            case ForkFailed(number):
                self._orders.pop(number, None)
            case Exited(number, pid):
                child = self.children.get(number)
                if child is not None and child.pid == pid:
                    del self.children[number]
                    self._ends.pop(number, None)
            case Children(children, guarded):
                self.children = {child.number: child for child in children}
                self._guard = Guard(guarded)

    def record_death(self) -> list[FromServer]:
        """Record the fork server's death. Returns the messages that it would have sent about processes that ended with it."""
        ended: list[FromServer] = []
        for number, order in list(self._orders.items()):
            self._tries[number] += 1
            if number == CONTROLLER or self._tries[number] >= ORDER_TRIES:
                del self._orders[order.number]
                ended.append(ForkFailed(number, "the process that was to fork it died"))
        controller = self.children.pop(CONTROLLER, None)  # it ends with the fork server
        if controller is not None:
            ended.append(Exited(CONTROLLER, controller.pid, -1, 0, 0))
        return ended

    def replay(self) -> list[ForkServerMessage]:
        """Return the first messages to the successor."""
        settings = [message for message in (self._keep, self._guard) if message is not None]
        adopt = Adopt(tuple(self.children.values()))
        # The children first: the signals name them by number, which the successor has to know by then.
        return [adopt, *settings, *self._orders.values(), *self._ends.values()]


class OrphanWatcher:
    """Watcher of orphaned children. Holds a descriptor of each, which shows how it ended even long afterwards, and the memory that it had."""

    def __init__(self) -> None:
        #: A process descriptor and the peak of memory in bytes for each, by process id. The peak is read
        #: while it lives.
        self._descriptors: dict[int, int] = {}
        self._peaks: dict[int, int] = {}

    def watch(self, children: Iterable[Forked]) -> None:
        """Hold those of these that live."""
        for child in tuple(
            children
        ):  # a copy: the reading thread takes a child out of the replay log when it has ended
            if child.pid in self._descriptors:
                continue
            with contextlib.suppress(OSError):  # no descriptor left: its end will be unknown
                descriptor = open_process(child.pid, child.started)
                if descriptor >= 0:
                    self._descriptors[child.pid] = descriptor
                    self._peaks[child.pid] = peak_memory(child.pid)

    def complete(self, end: Exited) -> Exited:
        """Return the same end, completed by facts known here: how the rank ended, and the memory that it had."""
        if not end.max_rss and (peak := self._peaks.get(end.pid)):
            end = msgspec.structs.replace(end, max_rss=peak, seen=True)
        descriptor = self._descriptors.get(end.pid)
        if descriptor is None or end.code != -1 or end.signal:
            return end
        status = exit_status(descriptor, end.pid)
        if status is None:
            return end
        code = os.waitstatus_to_exitcode(status)
        return msgspec.structs.replace(end, code=max(code, -1), signal=max(-code, 0))

    def terminate(self, grace: float) -> None:
        """Send SIGTERM to all, and wait this many seconds for their end."""
        for descriptor in self._descriptors.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        self._wait(Deadline(grace))

    def release(self, timeout: float = 0.0) -> None:
        """Wait this many seconds for their end, and hold them no longer."""
        self._wait(Deadline(timeout))
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._peaks.clear()

    def _wait(self, deadline: Deadline) -> None:
        for descriptor in self._descriptors.values():
            readable(descriptor, deadline.remaining())


class ServerHandle:
    """A fork server, and the connection to it.

    Attributes:
        endpoint: The connection.
        pid: Its process id.
    """

    def __init__(
        self,
        sock: socket.socket,
        pid: int,
        log: IO[bytes] | None,
        process: subprocess.Popen[bytes] | None = None,
        pulse: DeathPipe | None = None,
    ) -> None:
        # Only a fork server that was found sends a descriptor, the death pipe's; one that is started here
        # inherits it.
        self.endpoint = Endpoint(sock, descriptors=process is None)
        self.pid = pid
        self._log, self._process, self._pulse = log, process, pulse
        self._pidfd = os.pidfd_open(pid)

    @classmethod
    def start(cls, environ: Mapping[str, str], death_pipe: DeathPipe, program: str) -> ServerHandle:
        """Start a fork server. Raises ``StartError``."""
        try:
            return cls._start(environ, death_pipe, program)
        except OSError as error:
            raise StartError(f"the fork server could not be started: {error.strerror or error}") from error

    @classmethod
    def _start(cls, environ: Mapping[str, str], death_pipe: DeathPipe, program: str) -> ServerHandle:
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as copies:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            # A copy of the far end here would keep the connection open after the death of the fork server.
            copies.callback(theirs.close)
            log: IO[bytes] = undo.enter_context(tempfile.TemporaryFile())
            # When this process ends, the pipe's writing end is closed: so the fork server learns of it, even while it imports.
            reader, pulse = DeathPipe.with_reader()
            copies.callback(os.close, reader)
            undo.callback(pulse.close)
            process = subprocess.Popen(
                # -P: modules in the working directory must not shadow those that the fork server needs.
                [
                    *(sys.executable, "-P", "-m", "hvdlab.launch.forkserver"),
                    *(str(number) for number in (theirs.fileno(), os.getpid(), death_pipe.descriptor)),
                    program,
                ],
                stdin=reader,
                stdout=log,
                stderr=log,
                env=dict(environ),
                pass_fds=(theirs.fileno(), death_pipe.descriptor),
                start_new_session=True,
            )
            undo.callback(process.wait)
            undo.callback(process.kill)
            handle = cls(ours, process.pid, log, process, pulse)
            undo.pop_all()
            return handle

    @classmethod
    def find(cls, path: str, deadline: Deadline) -> ServerHandle:
        """Connect to a fork server that was kept. Raises ``StartError`` if there is none."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(deadline.remaining())
            sock.connect(path)
            pid = require_own_peer(sock)
            return cls(sock, pid, _log_of(pid))
        except OSError as error:
            sock.close()
            raise StartError(f"no pool waits at {path}: {error.strerror or error}") from error

    def has_ended(self, timeout: float | None) -> bool:
        """Wait for the fork server's end. Returns whether it has ended."""
        return readable(self._pidfd, timeout)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def end(self) -> None:
        """Kill a fork server that has no children, and release it."""
        self.kill()
        self.has_ended(1.0)  # so that `release` sees its end, and leaves no zombie
        self.release()

    def why_ended(self, otherwise: str) -> str:
        """Return how the fork server ended, with its last words; ``otherwise`` if that is unknown."""
        # The kernel closes the connection of a dying process before it can be waited for.
        if not self.has_ended(1.0):
            return otherwise
        if self._process is not None:
            code: int | None = self._process.wait()
        else:
            status = exit_status(self._pidfd, self.pid)
            code = None if status is None else os.waitstatus_to_exitcode(status)
        how = otherwise if code is None else describe_signal(-code) if code < 0 else f"exit code {code}"
        log_tail = self._log_tail()
        return f"{how}; its last words were:\n{log_tail}" if log_tail else how

    def _log_tail(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 8192))
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return "\n".join(lines[-20:])

    def release(self) -> None:
        """Release the fork server, whether it has ended or stays. Idempotent."""
        self.endpoint.close()
        if self._process is not None and self._process.poll() is None:
            self._process.returncode = 0  # it stays on purpose; Popen would warn
        if self._process is None:
            with contextlib.suppress(ChildProcessError):  # unless this very process started it once
                os.waitpid(self.pid, os.WNOHANG)
        if self._pulse is not None:
            self._pulse.close()
        if self._log is not None:
            self._log.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _log_of(pid: int) -> IO[bytes] | None:
    """Return the file that another process's standard error is written to; None if it can't be opened."""
    try:
        return open(f"/proc/{pid}/fd/2", "rb")
    except OSError:
        return None
