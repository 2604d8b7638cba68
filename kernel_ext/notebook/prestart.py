"""Everything of a pool that does not depend on the number of ranks, started before the first cell asks for it."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import importlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.forkserver.program import PROGRAM_NAME
from hvdlab.kernel_ext.notebook.ipyparallel.cluster import load_ipyparallel
from hvdlab.launch.forkserver.client import ForkServer


def end_uninterrupted(end: Callable[[], object]) -> None:
    """Call a function that ends something in many steps. Ctrl-C ends the wait for it, and leaves no step undone.

    Args:
        end: The function. Where Ctrl-C could break it, another thread calls it.

    Raises:
        KeyboardInterrupt: The user has interrupted; the other thread goes on.
    """
    # Other threads are never interrupted; a callback's thread must not wait for one that may join it.
    if threading.current_thread() is not threading.main_thread():
        end()
        return
    errors: list[BaseException] = []

    def call() -> None:
        try:
            end()
        except BaseException as error:  # noqa: BLE001  # raised below, on the thread whose work this is
            errors.append(error)

    # No daemon: the interpreter waits for it.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(call,), name="hvdlab-end")
    try:
        thread.start()
    except RuntimeError:  # no thread is left, or the interpreter ends
        end()
        return
    thread.join()
    if errors:
        raise errors[0]


class PoolCoordinator(Protocol):
    """Coordinator of a pool: a child of this process, or one that another process started, here or on a cluster."""

    @property
    def pid(self) -> int:
        """Return its process on this host; 0 if it runs elsewhere."""
        ...

    @property
    def address(self) -> str:
        """Return the address of this host's ranks and clients."""
        ...

    @property
    def tls_address(self) -> str | None:
        """Return the address of other hosts' ranks; None if there is none."""
        ...

    @property
    def certificate(self) -> str | None:
        """Return the certificate of :attr:`tls_address`; None without one."""
        ...

    @property
    def token(self) -> str:
        """Return the secret that ranks connect with."""
        ...

    @property
    def client_token(self) -> str:
        """Return the secret that clients connect with."""
        ...

    @property
    def directory(self) -> Path:
        """Return a directory of this host that goes with the coordinator."""
        ...

    def ending(self) -> str:
        """Return how it ended; empty as long as it runs."""
        ...

    def respawn(self, timeout: float = ...) -> None:
        """Start a successor. Raises ``StartError``."""

    def release(self) -> None:
        """Close the handles; the coordinator stays. Idempotent."""

    def close(self) -> None:
        """End the coordinator. Idempotent."""


@dataclass(slots=True)
class PoolProcesses:
    """The processes and the connection that a pool stands on. The pool that takes them closes them."""

    fork_server: ForkServer
    coordinator: PoolCoordinator
    client: Client

    def detach(self) -> None:
        """Close the handles; all processes stay, as those of a kept pool do."""
        self.fork_server.detach()
        self.client.close()
        self.coordinator.release()

    def end_local(self) -> None:
        """End the fork server of this host; a launcher keeps the coordinator."""
        self.fork_server.close()
        self.client.close()
        self.coordinator.release()

    def end_all(self) -> None:
        """End all processes, the fork server with its ranks first: they must not see their coordinator disappear."""
        self.fork_server.close()
        self.client.close()
        self.coordinator.close()


class Prestart:
    """Start of :class:`PoolProcesses` ahead of their pool. Made by :meth:`begin`; given to one pool, or closed."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._lock = threading.Lock()
        self._processes: PoolProcesses | None = None
        self._error: BaseException | None = None
        # Whether a pool has the processes, or `close` has ended them.
        self._taken = False
        # Set once `_processes` or `_error` is there.
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._prepare, name="hvdlab-prewarm", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @classmethod
    def begin(cls, *, preload: bool = True) -> Prestart:
        """Start the fork server, and a thread that starts the rest; returns at once.

        Args:
            preload: Whether the fork server imports the modules that ranks share; it forks no ranks otherwise.

        Raises:
            StartError: The fork server could not be started.
        """
        return cls(
            ForkServer.start(PROGRAM_NAME, os.environ if preload else {**os.environ, "HVDLAB_PRELOAD": ""})
        )

    def take(self, deadline: Deadline) -> PoolProcesses:
        """Wait for the :class:`PoolProcesses` and take it over.

        Raises:
            StartError: It could not be made, or not in time; nothing is left behind.
            KeyboardInterrupt: The user has interrupted; nothing is left behind.
        """
        try:
            came = self._done.wait(deadline.remaining())
        except BaseException:
            self.close()  # the caller may have no other reference to this
            raise
        if not came:
            self.close()
            raise StartError(f"the coordinator did not start within {deadline.seconds:g} s")
        with self._lock:
            # `close` can run meanwhile, as the interpreter ends: the processes belong to the call that comes first.
            if self._error is not None or self._processes is None or self._taken:
                error = self._error
            else:
                self._taken = True
                atexit.unregister(self.close)
                return self._processes
        self.close()
        if isinstance(error, StartError):
            raise error
        raise StartError(f"the coordinator could not be started: {error or 'it was closed'}") from error

    def close(self) -> None:
        """End the processes that were started, unless a pool has taken them. Idempotent."""
        atexit.unregister(self.close)
        with self._lock:
            if self._taken:
                return
            self._taken = True
        end_uninterrupted(self._end)

    def _end(self) -> None:
        self._fork_server.close()
        self._thread.join()
        # After the join: the thread may have made them only now.
        if self._processes is not None:
            self._processes.end_all()

    def _prepare(self) -> None:
        try:
            coordinator = CoordinatorProcess.start(keep=True)
            try:
                client = Client.connect(coordinator.address, coordinator.client_token)
            except BaseException:
                coordinator.close()
                raise
            self._processes = PoolProcesses(self._fork_server, coordinator, client)
        except BaseException as error:  # noqa: BLE001  (raised by take(), on the thread that starts the pool)
            self._error = error
        finally:
            self._done.set()
        # The modules of the first cell and, later, of the cluster: slow, and here they delay no cell. If an import fails, the
        # code that needs the module gets the error; some (concurrent.futures) raise RuntimeError while the interpreter ends.
        with contextlib.suppress(ImportError, RuntimeError):
            importlib.import_module("hvdlab.kernel_ext.notebook.pool")
            load_ipyparallel()
