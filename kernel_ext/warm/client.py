"""The pool's side of the warm process."""

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
from collections.abc import Callable, Mapping
from typing import IO

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.protocol.endpoint import ConnectionLost, Endpoint
from hvdlab.kernel_ext.warm.exits import describe_signal
from hvdlab.kernel_ext.warm.lifeline import Lifeline
from hvdlab.kernel_ext.warm.messages import FromWarm, Loaded, Shutdown, WarmMessage, decode_from_warm, encode

Listener = Callable[[FromWarm], None]


class WarmProcess:
    """A running warm process, and the thread that reads what it tells.

    It ends when :meth:`close` is called and, with all its children, when this process ends in any way.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], sock: socket.socket, log: IO[bytes], lifeline: Lifeline
    ) -> None:
        self._process = process
        self._log = log
        self._lifeline = lifeline
        self._endpoint = Endpoint(sock)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._listener: Listener | None = None
        self._on_lost: Callable[[str], None] | None = None
        self._early: list[FromWarm] = []
        self._loaded: Loaded | None = None
        self._lost: str | None = None
        self._closing = False
        self._wakeup, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="hvdlab-warm", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, environ: Mapping[str, str] | None = None) -> WarmProcess:
        """Start one and return at once; it imports in the meantime.

        Args:
            environ: Its environment; this process's by default. ``HVDLAB_PRELOAD`` says what to import.

        Raises:
            StartError: The process could not be started.
        """
        ours, theirs = socket.socketpair()
        lifeline = Lifeline.make()
        log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (belongs to the object)
        try:
            process = subprocess.Popen(
                # -P: modules in the working directory must not shadow those that the warm process needs.
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "hvdlab.kernel_ext.warm",
                    str(theirs.fileno()),
                    str(os.getpid()),
                    str(lifeline.descriptor),
                ],
                stdin=subprocess.PIPE,  # its end is how the warm process learns of ours while it imports
                stdout=log,
                stderr=log,
                env=dict(os.environ if environ is None else environ),
                pass_fds=(theirs.fileno(), lifeline.descriptor),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            log.close()
            lifeline.close()
            raise StartError(f"the warm process could not be started: {error.strerror or error}") from error
        finally:
            theirs.close()
        return cls(process, ours, log, lifeline)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lost(self) -> str | None:
        """Why it is gone, if it is."""
        return self._lost

    def listen(self, listener: Listener, on_lost: Callable[[str], None]) -> None:
        """Have every message but ``Loaded`` given to ``listener``, on the reading thread; it must not block.

        ``on_lost`` is called once, with the reason, when the process ends without having been asked to.
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
        """Wait until its imports are done. Ctrl-C breaks the wait.

        Raises:
            StartError: It ended before, or the time is over.
        """
        with self._lock:
            self._changed.wait_for(lambda: self._loaded or self._lost, deadline.remaining())
            if self._loaded is not None:
                return self._loaded
            if self._lost is not None:
                raise StartError(f"the warm process ended while it imported: {self._lost}")
        raise StartError(
            f"the warm process has not finished its imports after {deadline.seconds:g} s; "
            "give a longer timeout, or set HVDLAB_PRELOAD to the modules that it should import"
        )

    def send(self, message: WarmMessage) -> None:
        """Send a message. Any thread. Raises ``StartError`` if the process is gone."""
        try:
            complete = self._endpoint.send_frame(encode(message))
        except ConnectionLost as error:
            raise StartError(f"the warm process is gone: {self._lost or error}") from None
        if not complete:
            self._wake()

    def close(self, grace: float = 1.0, timeout: float = 5.0) -> None:
        """End it and its children: first politely, after ``grace`` seconds by SIGKILL. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        with contextlib.suppress(ConnectionLost):
            if not self._endpoint.send_frame(encode(Shutdown(grace))):
                self._wake()
        try:
            self._process.wait(grace + timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children have asked to be killed with it
            self._process.wait()
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._release()

    # -- the reading thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._endpoint, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            try:
                while True:
                    self._step(selector)
            except ConnectionLost as error:
                self._has_ended(str(error))

    def _step(self, selector: selectors.BaseSelector) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._endpoint.backlog else 0)
        if selector.get_key(self._endpoint).events != wanted:
            selector.modify(self._endpoint, wanted)
        for key, _ in selector.select():
            if key.fileobj == self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 64)
                continue
            if self._endpoint.backlog:
                self._endpoint.flush()
            for payload in self._endpoint.receive():
                self._take(decode_from_warm(payload))

    def _take(self, message: FromWarm) -> None:
        with self._lock:
            if isinstance(message, Loaded):
                self._loaded = message
                self._changed.notify_all()
                return
            listener = self._listener
            if listener is None:
                self._early.append(message)
                return
        listener(message)

    def _has_ended(self, error: str) -> None:
        with self._lock:
            asked = self._closing
        reason = "it was closed" if asked else self._why_ended(error)
        with self._lock:
            self._lost = reason
            self._changed.notify_all()
            on_lost = self._on_lost
        if on_lost is not None and not asked:
            on_lost(reason)

    def _why_ended(self, error: str) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return error
        how = describe_signal(-code) if code < 0 else f"exit code {code}"
        said = self._last_words()
        return f"{how}; its last words were:\n{said}" if said else how

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read()[-8192:].decode("utf-8", "replace").strip().splitlines()
        return "\n".join(lines[-20:])

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wakeup_write, b"\0")

    def _release(self) -> None:
        self._endpoint.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._lifeline.close()
        self._log.close()
        os.close(self._wakeup)
        os.close(self._wakeup_write)


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
