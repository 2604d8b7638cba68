"""The pool's side of the fork server."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections.abc import Callable, Mapping

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.errors import ProtocolError, StartError
from hvdlab.collectives.protocol.endpoint import ConnectionLost, Endpoint
from hvdlab.launch.forkserver.handle import ServerHandle
from hvdlab.launch.forkserver.journal import Journal
from hvdlab.launch.forkserver.lifeline import Lifeline
from hvdlab.launch.forkserver.messages import (
    Children,
    Exited,
    Forked,
    ForkServerMessage,
    FromServer,
    Keep,
    Kept,
    Loaded,
    Refused,
    Shutdown,
    decode_from_server,
    encode,
)
from hvdlab.launch.forkserver.orphans import Orphans

Listener = Callable[[FromServer], None]

AT_ONCE = 3
"""This many successors in a row are started at once, even if none of them finished its imports …"""
TRIES = 8
"""… and this many in a row at most, with pauses that begin with :data:`PAUSE` seconds and double each time."""
PAUSE = 1.0


class ForkServer:
    """A running fork server, and the thread that reads its messages.

    The fork server ends when :meth:`close` is called and, with all its children, when this process ends in any way, unless it
    was asked to stay (:meth:`keep`). When it dies its children live on: :meth:`respawn` starts a successor for them.
    """

    def __init__(
        self, handle: ServerHandle, lifeline: Lifeline | None, environ: Mapping[str, str], program: str
    ) -> None:
        self._handle, self._lifeline, self._environ = handle, lifeline, dict(environ)
        self._program = program
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._listener: Listener | None = None
        self._on_lost: Callable[[str], None] | None = None
        self._early: list[FromServer] = []
        self._loaded: Loaded | None = None
        self._kept: Kept | None = None
        self._refused = 0
        self._journal = Journal()
        self._orphans = Orphans()
        self._lost: str | None = None
        self._hopeless = False
        self._failures = 0
        self._closing = self._leaving = False
        self._wakeup, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = self._begin()

    @classmethod
    def start(cls, program: str, environ: Mapping[str, str] | None = None) -> ForkServer:
        """Start a fork server and return at once; it imports in the meantime.

        Args:
            program: What its children run, as ``module:attribute`` of a
                :class:`~hvdlab.launch.forkserver.program.ForkedProgram`.
            environ: Its environment; by default this process's. ``HVDLAB_PRELOAD`` in it says what to import.

        Raises:
            StartError: The process could not be started.
        """
        environ = dict(os.environ if environ is None else environ)
        lifeline = Lifeline.make()
        try:
            return cls(ServerHandle.start(environ, lifeline, program), lifeline, environ, program)
        except BaseException:
            lifeline.close()
            raise

    @classmethod
    def attach(cls, path: str, program: str, deadline: Deadline) -> ForkServer:
        """Take over a fork server that was kept at ``path`` (:meth:`keep`), with its children.

        The listener gets the ends of children in the meantime.

        Raises:
            StartError: There is none, or another process has it.
        """
        self = cls(ServerHandle.find(path, deadline), None, os.environ, program)
        with self._lock:
            self._changed.wait_for(
                lambda: self._lifeline or self._refused or self._lost, deadline.remaining()
            )
            if self._lifeline is not None:
                self._journal.remember(Keep(path))
                return self
            why = f"process {self._refused} has it" if self._refused else self._lost or "it does not answer"
        self.detach()
        raise StartError(f"the pool at {path} can't be attached to: {why}")

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self._handle.pid

    @property
    def lost(self) -> str | None:
        """Why the fork server is gone; None as long as it is not."""
        return self._lost

    def children(self) -> dict[int, Forked]:
        """Number to child, for the children that live as far as is known here."""
        with self._lock:
            return dict(self._journal.children)

    def guarded(self) -> tuple[str, ...]:
        """The files that the fork server removes at its end."""
        with self._lock:
            return self._journal.guarded

    def listen(self, listener: Listener, on_lost: Callable[[str], None]) -> None:
        """Have every message about children given to ``listener``, on the reading thread; it must not block.

        ``on_lost`` is called with the reason when the process has ended without having been asked to. It may call
        :meth:`respawn`.
        """
        with self._lock:
            early, self._early = self._early, []
            self._listener, self._on_lost = listener, on_lost
            lost = self._lost
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
            self._changed.wait_for(lambda: self._loaded or self._lost, deadline.remaining())
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
            self._journal.remember(message)
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
            self.send(Keep(path))
            self._changed.wait_for(lambda: self._kept, deadline.remaining())
            why = self._why_not_kept()
            if not why:
                return
            self._journal.forget_keeping()
        raise StartError(f"the pool can't be kept at {path}: {why}")

    def _why_not_kept(self) -> str:
        if self._kept is None:
            return self._lost or "no answer"
        return self._kept.error

    def respawn(self) -> None:
        """After the fork server's death: start a successor for its children. Any thread; idempotent.

        The successor looks after the children at once, and can fork when it has imported (:meth:`wait_loaded`). This
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
            if self._closing:
                raise StartError("the fork server was closed")
            if self._lost is None:
                return True
            if self._failures >= TRIES:
                self._hopeless = True
                raise StartError(f"{self._failures} in a row were of no use, the last one: {self._lost}")
            assert self._lifeline is not None
            try:
                handle = ServerHandle.start(self._environ, self._lifeline, self._program)
            except StartError as error:
                self._failures, self._lost = self._failures + 1, str(error)
                return False
            self._handle.release()
            self._handle, self._lost, self._hopeless = handle, None, False
            for message in self._journal.for_successor():
                self._write(message)
            self._thread = self._begin()
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
        self._orphans.watch(self._journal.children.values())
        if self._lost is not None:
            self._orphans.terminate(grace)
        self._let_go()  # also of the lifeline, so children that are left end now
        self._orphans.release(timeout)

    def detach(self) -> None:
        """Let go of the fork server; it stays if it was asked to (:meth:`keep`). Idempotent."""
        if self._claim():
            self._orphans.release()
            self._let_go()

    def _claim(self) -> bool:
        """Whether the caller is the one that ends this."""
        with self._lock:
            claimed, self._closing = not self._closing, True
            self._changed.notify_all()
            return claimed

    def _let_go(self) -> None:
        self._leaving = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._handle.release()
        if self._lifeline is not None:
            self._lifeline.close()
        os.close(self._wakeup)
        os.close(self._wakeup_write)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wakeup_write, b"\0")

    # -- the reading thread ---------------------------------------------------------------------------------------

    def _begin(self) -> threading.Thread:
        thread = threading.Thread(
            target=self._run, args=(self._handle,), name="hvdlab-forkserver", daemon=True
        )
        thread.start()
        return thread

    def _run(self, handle: ServerHandle) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(handle.endpoint, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            try:
                while not self._leaving:
                    self._step(handle, selector)
                return
            except ConnectionLost as error:
                reason = str(error)
            except ProtocolError as error:
                handle.kill()
                reason = str(error)
        self._has_ended(handle, reason)

    def _step(self, handle: ServerHandle, selector: selectors.BaseSelector) -> None:
        endpoint = handle.endpoint
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if endpoint.backlog else 0)
        if selector.get_key(endpoint).events != wanted:
            selector.modify(endpoint, wanted)
        for key, _ in selector.select():
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
            self._journal.heard(message)
            match message:
                case Loaded():
                    self._loaded, self._failures = message, 0
                    self._orphans.release()  # the fork server looks after them now
                case Kept():
                    self._kept = message
                case Children():
                    self._lifeline = Lifeline(endpoint.take_descriptor())
                case Refused(pid):
                    self._refused = pid
                case Exited():
                    message = self._orphans.complete(message)
            self._changed.notify_all()
            if isinstance(message, Loaded | Kept | Children | Refused):
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
            self._orphans.watch(self._journal.children.values())
            ended = self._journal.died()
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
