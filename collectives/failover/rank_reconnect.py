"""Reconnection of a rank to the coordinator or its successor, on a thread of its own: connecting blocks, and the control thread must not."""

from __future__ import annotations

import contextlib
import socket
import threading
from functools import partial

import msgspec

from hvdlab.collectives.engine.control_thread import Control, ControlHandlers
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.endpoint import ConnectionLost, Endpoint
from hvdlab.collectives.protocol.handshake import NobodyThereError, RefusedError, UnreachableError, connect
from hvdlab.collectives.settings import Settings
from hvdlab.collectives.time_limits import Deadline, RestartLimit

LONGER = 3
"""Factor by which a rank waits longer for a successor than a successor waits for ranks: the successor has to be started first."""
SUCCESSORS = 5
"""Successors that can die before they have answered; after each of them the time to wait for one starts again."""
PAUSE = 0.2
"""Seconds between two attempts, if the first failed although the coordinator's sockets are still kept open."""


class RankReconnect:
    """Thread that connects again when the connection is lost.

    As long as the process that started the coordinator keeps its listening sockets, a connection waits there for the successor;
    once no process keeps them, connecting is refused at once. As long as the coordinator's host does not answer at all, this rank is
    perhaps cut off from it, and waits longer if it can come back then.

    Args:
        settings: Where the coordinator is.
        hello: This rank's introduction, but for the incarnation.
        incarnation: Incarnation of the coordinator that this rank is connected to.
        handlers: Gets the new connection, or gives up if there is none.
        control: Control thread, which continues with the new connection.

    Attributes:
        incarnation: As above, of the latest connection.
    """

    def __init__(
        self,
        settings: Settings,
        hello: m.Hello,
        incarnation: int,
        handlers: ControlHandlers,
        control: Control,
    ) -> None:
        self.incarnation = incarnation
        # The fault that ends this rank's connection to a living coordinator would end the next one as well, and each return costs the
        # others a generation.
        self._returned = RestartLimit()
        self._settings = settings
        self._hello = hello
        self._handlers = handlers
        self._control = control
        #: Set by :meth:`cancel`, for good.
        self._cancelled = threading.Event()
        #: Held by begin() and cancel(): a thread that has started is seen by the latter, and none starts after it.
        self._beginning = threading.Lock()
        #: The socket of the present attempt, which cancel() shuts down.
        self._socket: socket.socket | None = None
        #: The latest thread, which perhaps has ended.
        self._thread: threading.Thread | None = None
        handlers.reconnect = self.begin

    def begin(self, reason: str) -> None:
        """Start the thread that searches for a successor, after the connection was lost. Control thread."""
        if self._thread is not None:
            self._thread.join()  # does not block: that thread has handed its connection over and is about to end
        name = f"hvdlab-reconnect-{self._hello.rank}"
        # A daemon: the interpreter joins all other threads at its exit, and this one can wait long for a successor.
        thread = threading.Thread(target=self._run, args=(reason,), name=name, daemon=True)
        with self._beginning:
            if not self._cancelled.is_set() and self._settings.reattach > 0:
                thread.start()
                self._thread = thread
                return
        self._handlers.give_up(reason)

    def cancel(self, timeout: float) -> None:
        """End all attempts. Idempotent; any thread."""
        with self._beginning:
            self._cancelled.set()
        waiting = self._socket
        if waiting is not None:
            # Not close(): the descriptor's number could belong to another file by the time the other thread uses it.
            with contextlib.suppress(OSError):
                waiting.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(timeout)

    # -- its thread -----------------------------------------------------------------------------------------------

    def _run(self, reason: str) -> None:
        deadline, cut_off = self._deadline(), Deadline(self._settings.cut_off)
        why, died = "no other one has taken its place", 0
        while not self._cancelled.is_set() and not deadline.expired:
            try:
                endpoint, welcome = self._connect(deadline)
            except NobodyThereError:
                why = "no other one takes its place: the process that started it has ended as well, or does not do that"
                break
            except (RefusedError, UnreachableError) as error:
                why = str(error)
                if isinstance(error, RefusedError) and not error.again:
                    break
                if self._may_return() and not cut_off.expired:
                    deadline = self._deadline(cut_off.remaining())
                # The event, not a sleep: cancel() must not have to wait for the end of the pause.
                self._cancelled.wait(min(PAUSE, deadline.remaining() or 0.0))
            except StartError as error:
                why = str(error)
                if not deadline.expired and died < SUCCESSORS:
                    # A successor had come, and has died as well: wait for the next one.
                    died, deadline = died + 1, self._deadline()
                self._cancelled.wait(min(PAUSE, deadline.remaining() or 0.0))
            # A fault of ours, or no memory. Without an answer the rank would hold its submissions for ever.
            except Exception as error:  # noqa: BLE001  (for any error the search is over)
                why = f"the search for it failed ({type(error).__name__}: {error})"
                break
            else:
                # The control thread owns the rank's state. From here on this thread touches neither the endpoint nor the incarnation.
                self._control.call(partial(self._go_on, endpoint, welcome))
                return
            finally:
                # The socket is closed, or the endpoint's: cancel() must not shut it down any more.
                self._socket = None
        self._control.call(lambda: self._handlers.give_up(f"{reason}; {why}"))

    def _may_return(self) -> bool:
        """Return whether this rank can return when the others have continued without it, and has not done so too often.

        It needs a point at which it joins the others again: a restart of training, or the next cell. A script has no such point.
        """
        return (self._settings.cells_tracked or self._handlers.elastic) and not self._returned.reached

    def _deadline(self, at_most: float | None = None) -> Deadline:
        seconds = LONGER * self._settings.reattach
        return Deadline(seconds if at_most is None else min(seconds, at_most))

    def _connect(self, deadline: Deadline) -> tuple[Endpoint, m.Welcome]:
        settings = self._settings
        assert settings.coordinator is not None
        hello = msgspec.structs.replace(self._hello, incarnation=self.incarnation, returns=self._may_return())
        return connect(
            settings.coordinator,
            hello,
            certificate=settings.certificate,
            deadline=deadline,
            dead_after=settings.dead_after,
            opened=self._note,
        )

    def _note(self, sock: socket.socket) -> None:
        self._socket = sock
        # The socket is stored before the flag is read, and cancel() sets the flag before it reads the socket: one of them sees it.
        if self._cancelled.is_set():
            raise StartError("the engine is being closed")

    # -- the control thread ---------------------------------------------------------------------------------------

    def _go_on(self, endpoint: Endpoint, welcome: m.Welcome) -> None:
        if self._cancelled.is_set():
            endpoint.close()
            return
        # The same coordinator: this rank alone had lost its connection. Returns to a successor are no sign of a fault here.
        if self.incarnation == welcome.incarnation:
            self._returned.add()
        # Before the Resume goes out: should the connection be lost at once, the next Hello has to name the coordinator that
        # this rank knew last.
        self.incarnation = welcome.incarnation
        try:
            self._handlers.reconnected(endpoint)
        except ConnectionLost as error:  # the successor is gone as well
            self.begin(str(error))
