"""A pool that outlives its notebook: how it is kept, found again, and ended by a process that never used it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hvdlab._version import __version__
from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.handover import server_of, take_over
from hvdlab.collectives.coordinator.launch import Launch
from hvdlab.collectives.coordinator.listeners import Listeners
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.errors import StartError
from hvdlab.kernel_ext.forked import PROGRAM_NAME
from hvdlab.kernel_ext.held import HeldCoordinator
from hvdlab.kernel_ext.prestart import Base
from hvdlab.kernel_ext.registry import Kept, Process, Registry
from hvdlab.launch.forkserver.client import ForkServer
from hvdlab.launch.processes import describe_signal, exit_status, open_process, readable

ANSWER_WITHIN = 5.0
"""Seconds that a coordinator has to hand over its socket."""
END_WITHIN = 5.0
"""Seconds that a coordinator has to end by itself."""


class AttachedCoordinator:
    """The process of a coordinator that another process has started. Attributes are those of ``CoordinatorProcess``.

    Attributes:
        replaced: Whether it is another coordinator than the pool's file names: that one died while no process used the pool.
    """

    tls_address = None
    certificate = None

    def __init__(self, kept: Kept) -> None:
        self.address, self.directory = kept.address, Path(kept.directory)
        self.token, self.client_token = kept.token, kept.client_token
        pid = server_of(self.directory, ANSWER_WITHIN)
        first = Process.of(pid) if pid else kept.coordinator
        self.replaced = first != kept.coordinator
        self._first = first.pid
        self._process = open_process(first.pid, first.started)
        self._successor: CoordinatorProcess | None = None
        self._launch: Launch | None = None
        self._listeners: Listeners | None = None
        with contextlib.suppress(OSError):  # then it can't have a successor
            self._launch, listener = take_over(self.directory, ANSWER_WITHIN)
            self._listeners = Listeners(self.directory, "", listener)

    @property
    def pid(self) -> int:
        return self._first if self._successor is None else self._successor.pid

    def ending(self) -> str:
        """How the coordinator ended, as far as that can be known; empty as long as it runs."""
        if self._successor is not None:
            return self._successor.ending()
        if self._process >= 0 and not readable(self._process, 0):
            return ""
        status = exit_status(self._process, self.pid) if self._process >= 0 else None
        if status is None:
            return "its exit status is unknown"
        code = os.waitstatus_to_exitcode(status)
        return describe_signal(-code) if code < 0 else f"exit status {code}"

    def respawn(self, timeout: float = 10) -> None:
        """Kill what is left of this coordinator, and start a successor. Raises ``StartError``."""
        if self._successor is not None:
            self._successor.respawn(timeout)
            return
        if self._launch is None or self._listeners is None:
            raise StartError("it did not hand over what a successor needs")
        self._end(((signal.SIGKILL, END_WITHIN),))
        self._successor = CoordinatorProcess.succeed(self._launch, self._listeners, timeout)

    def release(self) -> None:
        """Leave the coordinator to itself. Idempotent."""
        descriptor, self._process = self._process, -1
        if descriptor >= 0:
            os.close(descriptor)
        if self._successor is not None:
            self._successor.release()
        elif self._listeners is not None:
            self._listeners.close()

    def close(self) -> None:
        """End the coordinator and remove what it may have left. Idempotent."""
        if self._successor is not None:
            self._successor.close()
        elif self._listeners is not None:
            self._listeners.close()  # first, or else ranks that lose the connection would wait for a successor
        self._end(((signal.SIGTERM, END_WITHIN), (signal.SIGKILL, END_WITHIN)))
        self.release()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _end(self, signals: Sequence[tuple[signal.Signals, float]]) -> None:
        if self._process < 0:
            return
        for number, seconds in signals:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)
            if readable(self._process, seconds):
                break
        with contextlib.suppress(ChildProcessError):  # this very process may have started it
            os.waitpid(self._first, os.WNOHANG)


class Keeping:
    """The registry's entry of a pool that this process uses.

    Attributes:
        kept: What the entry says.
    """

    def __init__(self, registry: Registry, kept: Kept) -> None:
        self._registry, self.kept = registry, kept

    @property
    def name(self) -> str:
        return self.kept.name

    @property
    def size(self) -> int:
        """Number of ranks, as the entry says."""
        return self.kept.size

    @property
    def plane(self) -> str:
        """The data plane that the user asked for."""
        return self.kept.plane

    @property
    def ports(self) -> tuple[str, int]:
        """``MASTER_ADDR`` and ``MASTER_PORT`` of its ranks."""
        return self.kept.ports

    @classmethod
    def begin(
        cls, base: Base, name: str, *, size: int, plane: str, ports: tuple[str, int], deadline: Deadline
    ) -> Keeping:
        """Have the fork server keep a pool when this process ends. Raises ``StartError``."""
        path = str(base.coordinator.directory / "warm")
        base.fork_server.keep(path, deadline)
        kept = Kept(
            name=name,
            size=size,
            plane=plane,
            started=time.time(),
            address=base.coordinator.address,
            token=base.coordinator.token,
            client_token=base.coordinator.client_token,
            directory=str(base.coordinator.directory),
            coordinator=Process.of(base.coordinator.pid),
            warm=Process.of(base.fork_server.pid),
            path=path,
            ports=ports,
            owner=Process.of(os.getpid()),
            place=_here(),
            version=__version__,
        )
        registry = Registry()
        registry.write(kept)
        return cls(registry, kept)

    @classmethod
    def claim(cls, name: str) -> Keeping:
        """Become the owner of a pool. Raises ``InvalidRequestError`` if there is none, or another process uses it."""
        registry = Registry()
        return cls(registry, registry.claim(name, _here()))

    def connect(self, deadline: Deadline) -> Base:
        """Connect to what the pool stands on. Raises ``StartError``; then the pool has no owner any more."""
        if self.kept.version != __version__:
            self.release()
            raise StartError(
                f"the pool `{self.name}` runs hvdlab {self.kept.version}, which hvdlab {__version__} can't talk to; attach "
                f"with that version, or end the pool by `hvdlab pools stop {self.name}`"
            )
        coordinator: AttachedCoordinator | None = None
        try:
            # The fork server first: until a process attaches, it is the one that replaces a coordinator that dies.
            warm = ForkServer.attach(self.kept.path, PROGRAM_NAME, deadline)
            try:
                coordinator = AttachedCoordinator(self.kept)
                client = _connect(self.kept, deadline)
            except BaseException:
                warm.detach()
                raise
        except BaseException:
            if coordinator is not None:
                coordinator.release()
            self.release()
            raise
        return Base(warm, coordinator, client)

    def update(
        self,
        coordinator: CoordinatorProcess | AttachedCoordinator | HeldCoordinator,
        fork_server: ForkServer,
        size: int,
    ) -> None:
        """Write changed processes, or a changed size, into the entry."""
        kept = msgspec.structs.replace(
            self.kept, coordinator=Process.of(coordinator.pid), warm=Process.of(fork_server.pid), size=size
        )
        if kept != self.kept:
            self.kept = kept
            self._registry.write(kept)

    def release(self) -> None:
        """Note that the pool has no owner any more."""
        self._registry.release(self.kept)

    def forget(self) -> None:
        """Remove the entry: the pool ends."""
        self._registry.remove(self.name)


def _connect(kept: Kept, deadline: Deadline) -> Client:
    """A client of a pool's coordinator, which knows its ranks: a successor of one that died hears from them first."""
    client = Client.connect(kept.address, kept.client_token, timeout=deadline.remaining() or 10)
    try:
        client.wait_for(lambda world: not world.restoring, deadline.remaining())
    except BaseException:
        client.close()
        raise
    return client


def _here() -> str:
    """The working directory as text that can be shown: a path need not be UTF-8."""
    return os.fsencode(os.getcwd()).decode("utf-8", "backslashreplace")


def stop(name: str) -> None:
    """End a kept pool that no process uses.

    Raises:
        InvalidRequestError: There is none of that name, or a process uses it.
    """
    keeping = Keeping.claim(name)
    coordinator = AttachedCoordinator(keeping.kept)
    try:
        warm = ForkServer.attach(keeping.kept.path, PROGRAM_NAME, Deadline(END_WITHIN))
    except StartError:  # the fork server does not listen: kill it, and its ranks end with it
        if keeping.kept.warm.lives:
            os.kill(keeping.kept.warm.pid, signal.SIGKILL)
    else:
        warm.close()
    coordinator.close()
    keeping.forget()
