"""Everything of a pool that does not depend on the number of ranks, started before the first cell asks for it."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.forkserver.program import PROGRAM_NAME
from hvdlab.kernel_ext.launchers.loading import load_ipyparallel
from hvdlab.launch.forkserver.client import ForkServer

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.kept_pools import AttachedCoordinator, LauncherKeptCoordinator


@dataclass(slots=True)
class PoolProcesses:
    """The processes and the connection that a pool stands on. The pool that takes them closes them."""

    fork_server: ForkServer
    coordinator: CoordinatorProcess | AttachedCoordinator | LauncherKeptCoordinator
    client: Client

    def leave(self) -> None:
        """Let go of all three; the fork server and the coordinator were asked to stay, and do."""
        self.fork_server.detach()
        self.client.close()
        self.coordinator.release()

    def release(self) -> None:
        """End what runs on this host, and let go of a coordinator that its launcher keeps."""
        self.fork_server.close()
        self.client.close()
        self.coordinator.release()

    def close(self) -> None:
        """End all three, the fork server with its ranks first: they should not see their coordinator go."""
        self.fork_server.close()
        self.client.close()
        self.coordinator.close()


class Prestart:
    """A :class:`PoolProcesses` in the making. Made by :meth:`begin`; given to one pool, or closed."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._lock = threading.Lock()
        self._base: PoolProcesses | None = None
        self._error: BaseException | None = None
        self._taken = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._prepare, name="hvdlab-prewarm", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @classmethod
    def begin(cls, *, preload: bool = True) -> Prestart:
        """Start the fork server, and a thread that starts the rest; returns at once.

        Args:
            preload: Whether the fork server imports what ranks share; it forks no ranks otherwise.

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
        """
        if not self._done.wait(deadline.remaining()):
            self.close()
            raise StartError(f"the coordinator did not start within {deadline.seconds:g} s")
        with self._lock:
            if self._error is not None or self._base is None or self._taken:
                error = self._error
            else:
                self._taken = True
                atexit.unregister(self.close)
                return self._base
        self.close()
        if isinstance(error, StartError):
            raise error
        raise StartError(f"the coordinator could not be started: {error or 'it was closed'}") from error

    def close(self) -> None:
        """End what was started, unless a pool has taken it. Idempotent."""
        atexit.unregister(self.close)
        with self._lock:
            if self._taken:
                return
            self._taken = True
        self._fork_server.close()
        self._thread.join()
        if self._base is not None:
            self._base.close()

    def _prepare(self) -> None:
        try:
            coordinator = CoordinatorProcess.start(keep=True)
            try:
                client = Client.connect(coordinator.address, coordinator.client_token)
            except BaseException:
                coordinator.close()
                raise
            self._base = PoolProcesses(self._fork_server, coordinator, client)
        except BaseException as error:  # noqa: BLE001  (raised by take(), on the thread that wants the pool)
            self._error = error
        finally:
            self._done.set()
        # What the first cell and, later, the cluster will import: slow, and here it delays no cell. If an import fails, the
        # code that needs the module gets the error; some (concurrent.futures) raise RuntimeError while the interpreter ends.
        with contextlib.suppress(ImportError, RuntimeError):
            importlib.import_module("hvdlab.kernel_ext.notebook.pool")
            load_ipyparallel()
