"""Kept pools as the process that uses them sees them, and those whose processes live on a cluster (today: Ray).

Those of this host are in :mod:`hvdlab.kernel_ext.keeping`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.engine.hosts import host_key
from hvdlab.collectives.environment import World
from hvdlab.collectives.errors import StartError
from hvdlab.kernel_ext.payloads import TO_RANK, Owner, encode
from hvdlab.kernel_ext.prestart import Base, Prestart
from hvdlab.launch import registry
from hvdlab.launch.kept import HeldJob, KeepRequest
from hvdlab.launch.processes import start_time
from hvdlab.launch.starter import Ended, RankObserver, Starter
from hvdlab.launch.tenancy import Tenant


class HeldCoordinator:
    """The coordinator of such a pool, which runs elsewhere. Attributes are those of ``CoordinatorProcess``.

    Args:
        job: The pool.
        near: A coordinator of this host, which has no ranks: its directory takes what cells write, and is removed with it, also if this
            process is killed.
    """

    pid = 0
    """No process of this host."""

    def __init__(self, job: HeldJob, near: CoordinatorProcess) -> None:
        self._job, self._near = job, near
        world = job.access.world
        self.address = self.tls_address = world.coordinator
        self.certificate = world.certificate
        self.token, self.client_token = world.token, job.access.client_token
        self.directory: Path = near.directory

    def ending(self) -> str:
        """How the coordinator ended; empty as long as it runs."""
        if self._job.lost:
            return self._job.lost
        try:
            return self._job.coordinator_ended()
        except StartError as error:
            return str(error)

    def respawn(self, timeout: float = 10) -> None:
        """Have a successor, unless there is one. Raises ``StartError``."""
        if self._job.lost:
            raise StartError(self._job.lost)
        self._job.replace_coordinator(timeout)

    def release(self) -> None:
        """Leave the coordinator to itself. Idempotent."""
        self._near.close()

    def close(self) -> None:
        """End the pool, which the coordinator belongs to. Idempotent."""
        self._job.end()
        self._near.close()


class KeptPool(Protocol):
    """A kept pool, while this process uses it.

    Attributes:
        near: Whether this host's fork server forked the ranks, and stays with them and the coordinator.
    """

    near: bool

    @property
    def name(self) -> str:
        """The name that users know the pool by."""
        ...

    @property
    def plane(self) -> str:
        """The data plane that the user asked for."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks when this process began to use the pool, or as it was noted since."""
        ...

    @property
    def ports(self) -> tuple[str, int]:
        """``MASTER_ADDR`` and ``MASTER_PORT`` of its ranks."""
        ...

    @property
    def lost(self) -> str:
        """Why this process uses the pool no more although it did not let go of it; empty as long as it does."""
        ...

    def connect(self, deadline: Deadline) -> Base:
        """Connect to the pool. Raises ``StartError``; the pool has no new process and no connection then."""
        ...

    def replaced(self, base: Base) -> bool:
        """Return whether the coordinator was replaced while no process used the pool."""
        ...

    def living(self, base: Base) -> Mapping[int, int]:
        """Return rank to process id of the ranks that lived when this process connected."""
        ...

    def ended(self) -> Mapping[int, Ended]:
        """Return how the other ranks ended, as far as that is known."""
        ...

    def starter(self) -> Starter | None:
        """Return the object that starts and ends ranks; ``None`` if that is the launcher's own."""
        ...

    def follow(self, ranks: RankObserver, lost: Callable[[str], None]) -> None:
        """Report what happens to ranks from now on, and why the pool is lost to this process if it is."""
        ...

    def update(self, base: Base, size: int) -> None:
        """Note the pool's processes and the number of its ranks for the process that attaches later."""
        ...

    def disconnect(self, base: Base) -> None:
        """Close the connections, and end the processes of this host that do not belong to the pool."""
        ...

    def release(self) -> None:
        """Use the pool no more; it stays."""
        ...

    def forget(self) -> None:
        """Note that the pool has ended."""
        ...


class HeldPool:
    """A :class:`KeptPool` that its launcher keeps. Made by :meth:`begin` and :meth:`claim`.

    Attributes:
        launcher, name, plane: The names of the launcher, the pool and its data plane.
    """

    near = False

    def __init__(self, job: HeldJob) -> None:
        self._job = job
        self.launcher, self.name, self.plane = job.job.launcher, job.job.name, job.job.plane

    @classmethod
    def begin(
        cls,
        launcher: str,
        name: str,
        size: int,
        plane: str,
        module: str,
        options: Mapping[str, object],
        deadline: Deadline,
    ) -> HeldPool:
        """Begin a pool without ranks. Raises ``InvalidRequestError`` for the name, ``StartError`` if it can't be begun."""
        keeper = registry.keeper(launcher)
        assert keeper is not None
        vacant = (TO_RANK, encode(Owner(0, 0)))
        request = KeepRequest(name, size, plane, module, options, vacant, this_process())
        return cls(keeper.begin(request, deadline.remaining() or 60))

    @classmethod
    def claim(cls, name: str, launcher: str) -> HeldPool:
        """Use a pool. Raises ``InvalidRequestError`` if there is none, or another process uses it, ``StartError`` if it does not answer."""
        keeper = registry.keeper(launcher)
        assert keeper is not None
        return cls(keeper.claim(name, this_process()))

    @property
    def world(self) -> World:
        """What its ranks know of it."""
        return self._job.access.world

    @property
    def ports(self) -> tuple[str, int]:
        """``MASTER_ADDR`` and ``MASTER_PORT`` of its ranks."""
        return self.world.master_address, self.world.master_port

    @property
    def lost(self) -> str:
        """Why this process uses the pool no more although it did not let go of it; empty as long as it does."""
        return self._job.lost

    @property
    def size(self) -> int:
        """How many ranks it had when this process began to use it."""
        return self._job.access.size

    def living(self, base: Base) -> Mapping[int, int]:
        """Return rank to process of those that lived then."""
        return self._job.access.living

    def ended(self) -> Mapping[int, Ended]:
        """Return how the others have ended, as far as that is known."""
        return self._job.access.lost

    def replaced(self, base: Base) -> bool:
        """Return whether the coordinator was replaced while no process used the pool."""
        return self._job.access.replaced

    def connect(self, deadline: Deadline, warm: Prestart | None = None) -> Base:
        """Connect to it. Raises ``StartError``; the processes of this host have ended then."""
        base: Base | None = None
        try:
            if warm is None:
                warm = Prestart.begin(preload=False)
            base = warm.take(deadline)
            near, world = base.coordinator, self.world
            assert isinstance(near, CoordinatorProcess)
            base.client.close()
            base.coordinator = HeldCoordinator(self._job, near)
            base.client = Client.connect(
                world.coordinator,
                self._job.access.client_token,
                certificate=world.certificate,
                timeout=deadline.remaining() or 10,
            )
            base.client.wait_for(lambda membership: not membership.restoring, deadline.remaining())
        except BaseException:
            if base is not None:
                base.release()
            raise
        return base

    def starter(self) -> Starter:
        """What starts and ends its ranks."""
        return self._job.starter()

    def follow(self, ranks: RankObserver, lost: Callable[[str], None]) -> None:
        """Report what happens to ranks from now on, and why the pool is lost to this process if it is."""
        self._job.follow(ranks, lost)

    def update(self, base: Base, size: int) -> None:
        """Note how many ranks it has."""
        self._job.resized(size)

    def disconnect(self, base: Base) -> None:
        """End the processes of this host, and close the connections."""
        base.release()

    def release(self) -> None:
        """Use it no more; it stays."""
        self._job.let_go()

    def forget(self) -> None:
        """It has ended."""
        self._job.end()


def this_process() -> Tenant:
    """This process, as a keeper knows it."""
    pid = os.getpid()
    place = os.fsencode(os.getcwd()).decode("utf-8", "backslashreplace")
    return Tenant(pid, start_time(pid), host_key(), place)
