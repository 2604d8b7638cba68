"""A pool that outlives its notebook: how it is kept, found again, and ended by somebody who never used it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hvdlab.collectives.client import Client
from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.errors import StartError
from hvdlab.kernel_ext.registry import Kept, Process, Registry
from hvdlab.kernel_ext.warm.ahead import Base
from hvdlab.kernel_ext.warm.client import WarmProcess
from hvdlab.kernel_ext.warm.exits import describe_signal
from hvdlab.kernel_ext.warm.processes import exit_status, open_process, readable

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.process import CoordinatorProcess

END_WITHIN = 5.0
"""Seconds that a coordinator has to end by itself."""


class AttachedCoordinator:
    """The process of a coordinator that another process has started. Attributes are those of ``CoordinatorProcess``."""

    tls_address = None
    certificate = None

    def __init__(self, kept: Kept) -> None:
        self.address, self.token, self.directory = kept.address, kept.token, Path(kept.directory)
        self.pid = kept.coordinator.pid
        self._process = open_process(kept.coordinator.pid, kept.coordinator.started)

    def ending(self) -> str:
        """How it ended, as far as that can be known; empty as long as it runs."""
        if self._process >= 0 and not readable(self._process, 0):
            return ""
        status = exit_status(self._process, self.pid) if self._process >= 0 else None
        if status is None:
            return "its exit status is unknown"
        code = os.waitstatus_to_exitcode(status)
        return describe_signal(-code) if code < 0 else f"exit status {code}"

    def respawn(self, timeout: float = 10) -> None:
        """Raises ``StartError``: its sockets went with it."""
        raise StartError(
            "only the process that started the pool keeps what a successor needs, and that has ended"
        )

    def release(self, timeout: float = 0) -> None:
        """Leave it to itself. Idempotent."""
        descriptor, self._process = self._process, -1
        if descriptor >= 0:
            os.close(descriptor)

    def close(self, timeout: float = END_WITHIN) -> None:
        """End it and remove what it may have left. Idempotent."""
        if self._process >= 0:
            for number, seconds in ((signal.SIGTERM, timeout), (signal.SIGKILL, END_WITHIN)):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._process, number)
                if readable(self._process, seconds):
                    break
            with contextlib.suppress(ChildProcessError):  # this very process may have started it
                os.waitpid(self.pid, os.WNOHANG)
        self.release()
        shutil.rmtree(self.directory, ignore_errors=True)


class Keeping:
    """The entry of a pool that this process uses.

    Attributes:
        kept: What it says.
    """

    def __init__(self, registry: Registry, kept: Kept) -> None:
        self._registry, self.kept = registry, kept

    @property
    def name(self) -> str:
        return self.kept.name

    @classmethod
    def begin(
        cls, base: Base, name: str, *, size: int, plane: str, ports: tuple[str, int], deadline: Deadline
    ) -> Keeping:
        """Have a pool stay when this process ends. Raises ``StartError``."""
        path = str(base.coordinator.directory / "warm")
        base.warm.keep(path, deadline)
        kept = Kept(
            name=name,
            size=size,
            plane=plane,
            started=time.time(),
            address=base.coordinator.address,
            token=base.coordinator.token,
            directory=str(base.coordinator.directory),
            coordinator=Process.of(base.coordinator.pid),
            warm=Process.of(base.warm.pid),
            path=path,
            ports=ports,
            owner=Process.of(os.getpid()),
            place=os.getcwd(),
        )
        registry = Registry()
        registry.write(kept)
        return cls(registry, kept)

    @classmethod
    def claim(cls, name: str) -> Keeping:
        """Become the owner of a pool. Raises ``InvalidRequestError`` if there is none, or somebody uses it."""
        registry = Registry()
        return cls(registry, registry.claim(name, os.getcwd()))

    def connect(self, deadline: Deadline) -> Base:
        """What the pool stands on. Raises ``StartError``; the pool is nobody's then."""
        coordinator = AttachedCoordinator(self.kept)
        try:
            warm = WarmProcess.attach(self.kept.path, deadline)
            try:
                client = Client.connect(
                    self.kept.address, self.kept.token, timeout=deadline.remaining() or 10
                )
            except BaseException:
                warm.detach()
                raise
        except BaseException:
            coordinator.release()
            self.release()
            raise
        return Base(warm, coordinator, client)

    def update(
        self, coordinator: CoordinatorProcess | AttachedCoordinator, warm: WarmProcess, size: int
    ) -> None:
        """Note other processes, and another size."""
        kept = msgspec.structs.replace(
            self.kept, coordinator=Process.of(coordinator.pid), warm=Process.of(warm.pid), size=size
        )
        if kept != self.kept:
            self.kept = kept
            self._registry.write(kept)

    def release(self) -> None:
        """The pool is nobody's now."""
        self._registry.release(self.kept)

    def forget(self) -> None:
        """The pool ends."""
        self._registry.remove(self.name)


def stop(name: str) -> None:
    """End a kept pool that nobody uses.

    Raises:
        InvalidRequestError: There is none of that name, or somebody uses it.
    """
    keeping = Keeping.claim(name)
    coordinator = AttachedCoordinator(keeping.kept)
    try:
        warm = WarmProcess.attach(keeping.kept.path, Deadline(END_WITHIN))
    except StartError:  # it does not listen: with it end its ranks
        if keeping.kept.warm.lives:
            os.kill(keeping.kept.warm.pid, signal.SIGKILL)
    else:
        warm.close()
    coordinator.close()
    keeping.forget()
