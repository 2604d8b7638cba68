"""Jobs that a launcher keeps itself when the process that started them ends, on the resources of their ranks.

A :class:`JobKeeper` is found by the launcher's name (:func:`hvdlab.launch.registry.keeper`). It begins a job, lists those that there are, and
lets one process at a time use each: that has an :class:`AttachedJob`.

No process of the job can watch the process that uses it: it has a lease (:class:`Lease`, no I/O), which each of its calls renews.
A process that makes no call for the lease's length has lost the job, even if it lives: another one may have it then. A job without an
owner ends after a time limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.settings import WorldEnvironment
from hvdlab.collectives.text import visible
from hvdlab.launch.starter import Ended, RankObserver, Starter

_LONGEST = 300
"""Characters of a text of an owner that are shown at most."""

# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaseOwner:
    """The process that uses a kept job.

    Attributes:
        pid, started: Its number, and when it started in clock ticks since the boot of its host.
        host: Key that distinguishes its host from others.
        place: Its working directory, which shows which notebook it is.
    """

    pid: int
    started: int
    host: str
    place: str

    def __str__(self) -> str:
        host, place = self.host.partition("#")[0], visible(self.place, _LONGEST)
        return f"process {self.pid} on {visible(host, _LONGEST)} in {place}"


@dataclass(frozen=True, slots=True)
class LeaseRequested:
    """Event: a process asks to use the job. It has seen that the process of the lease ``ended`` has ended, if that is not 0."""

    owner: LeaseOwner
    ended: int = 0


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """Event: the owner of the lease with this number has given a sign of life."""

    number: int


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """Event: the owner of the lease with this number uses the job no more."""

    number: int


@dataclass(frozen=True, slots=True)
class LeaseTick:
    """Event: time has passed without another event."""


Event = LeaseRequested | LeaseRenewed | LeaseReleased | LeaseTick

# -- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """Effect: the request is granted; the lease has this number."""

    number: int


@dataclass(frozen=True, slots=True)
class LeaseRefused:
    """Effect: another process has the job, by the lease with this number."""

    number: int
    owner: LeaseOwner


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """Effect: the job has no owner any more: ranks must wait for none."""


@dataclass(frozen=True, slots=True)
class JobExpired:
    """Effect: the job had no owner for so long that it ends."""


Effect = LeaseGranted | LeaseRefused | LeaseEnded | JobExpired


class Lease:
    """The leases of one job, one after the other. The job has no owner at first.

    Args:
        duration: Seconds without a sign of life after which a lease is over.
        unused_for: Seconds without an owner after which the job ends. The first owner has at least ``duration`` to
            come: the process that starts a job may be slow.
        now: The time, as in all events.

    Attributes:
        owner: The process that uses the job; ``None`` if none does.
    """

    def __init__(self, duration: float, unused_for: float, now: float) -> None:
        self._duration, self._unused_for = duration, unused_for
        #: The number of the last lease; when the owner's last sign of life came, or the lease ended.
        self._number, self._since = 0, now
        self.owner: LeaseOwner | None = None

    def holds(self, number: int) -> bool:
        """Return whether the lease with this number goes on."""
        return self.owner is not None and number == self._number

    @property
    def next_at(self) -> float:
        """Return when :class:`LeaseTick` has an effect, unless something happens before."""
        if self.owner is not None:
            return self._since + self._duration
        return self._since + (self._unused_for if self._number else max(self._duration, self._unused_for))

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle an event and return its effects."""
        # First: a request after the lease's end must find no owner.
        effects = self._pass_time(now)
        match event:
            case LeaseRequested(owner, ended):
                effects += self._request(owner, ended, now)
            case LeaseRenewed(number) if self.holds(number):
                self._since = now
            case LeaseReleased(number) if self.holds(number):
                self.owner, self._since = None, now
                effects.append(LeaseEnded())
        return effects

    def _request(self, owner: LeaseOwner, ended: int, now: float) -> list[Effect]:
        # A process that has seen the owner's process end need not wait for the lease's end.
        if self.owner is not None and ended != self._number:
            return [LeaseRefused(self._number, self.owner)]
        self.owner, self._since = owner, now
        self._number += 1
        return [LeaseGranted(self._number)]

    def _pass_time(self, now: float) -> list[Effect]:
        if now < self.next_at:
            return []
        if self.owner is None:
            return [JobExpired()]
        self.owner, self._since = None, now
        return [LeaseEnded()]


DEFAULT = "pool"
"""The name of a job whose user gave none; the next ones are ``pool-2``, ``pool-3``."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class KeepRequest:
    """Request to a keeper to begin a job.

    Attributes:
        name: The name that users know the job by; empty for one that the keeper chooses.
        size, plane: Number of ranks, and the data plane that the user asked for.
        module: The module that a rank runs: ``python -m module``.
        options: The launcher's own options, as :func:`~hvdlab.launch.options.parse` has validated them.
        unowned: Topic and body of the mail by which ranks learn that no process uses the job any more.
        owner: The process that begins it, and uses it.
    """

    name: str
    size: int
    plane: str
    module: str
    options: Mapping[str, object]
    unowned: tuple[str, bytes]
    owner: LeaseOwner


@dataclass(frozen=True, slots=True)
class KeptJob:
    """A job that is kept, as its keeper lists it.

    Attributes:
        name, size, plane: As in :class:`KeepRequest`; the size may have changed.
        launcher: The name of its launcher.
        started: When it was started, in seconds since 1970.
        owner: The process that uses it; ``None`` if none does.
        version: The version of hvdlab that it runs.
    """

    name: str
    size: int
    plane: str
    launcher: str
    started: float
    owner: LeaseOwner | None
    version: str


@dataclass(frozen=True, slots=True)
class Access:
    """Access to a job, for the process that uses it.

    Attributes:
        world: The job as ranks know it; its address is one that other hosts reach.
        client_token: The coordinator's secret for clients.
        size: Number of ranks, lost ones included.
        living: Rank to process of the ranks that live.
        lost: How the others ended, as far as that is known.
        replaced: Whether the coordinator was replaced while no process used the job.
    """

    world: WorldEnvironment
    client_token: str
    size: int
    living: Mapping[int, int] = field(default_factory=dict)
    lost: Mapping[int, Ended] = field(default_factory=dict)
    replaced: bool = False


class AttachedJob(Protocol):
    """A kept job that this process uses.

    Attributes:
        job: The keeper's account of it.
        access: How it was when this process began to use it.
    """

    job: KeptJob
    access: Access

    @property
    def lost(self) -> str:
        """Return why this process uses the job no more although it did not release it; empty as long as it does."""
        ...

    def starter(self) -> Starter:
        """Return the starter of single ranks."""
        ...

    def follow(self, ranks: RankObserver, lost: Callable[[str], None]) -> None:
        """Report the ranks' events from :attr:`access` on; ``lost`` is called once with :attr:`lost`. Call it once."""

    def coordinator_ended(self) -> str:
        """Return how the coordinator ended that this process was connected to; empty if it runs. Raises ``StartError`` if the job is gone."""
        ...

    def replace_coordinator(self, timeout: float) -> None:
        """Have another coordinator, unless the keeper has replaced it already. Raises ``StartError``."""

    def resized(self, size: int) -> None:
        """Record how many ranks the job has now."""

    def detach(self) -> None:
        """Release the job, which stays. Idempotent."""

    def end(self) -> None:
        """End the job, and give back its resources. Idempotent."""


class JobKeeper(Protocol):
    """Keeper of one launcher's jobs."""

    def reachable(self) -> bool:
        """Return whether the place where jobs are kept is known to this process, so that they can be listed without a search."""
        ...

    def all(self) -> list[KeptJob]:
        """Return the jobs that live. Raises ``StartError`` if the place where they are kept can't be reached."""
        ...

    def begin(self, request: KeepRequest, timeout: float) -> AttachedJob:
        """Begin a job without ranks.

        Args:
            request: The job's name and settings.
            timeout: Seconds for the whole start.

        Returns:
            The job, which this process uses.

        Raises:
            InvalidRequestError: There is a job of this name, or it is no name.
            StartError: It can't be begun.
        """
        ...

    def claim(self, name: str, owner: LeaseOwner) -> AttachedJob:
        """Use a job.

        Args:
            name: The job's name.
            owner: The process that uses it from now on.

        Returns:
            The job, which this process uses.

        Raises:
            InvalidRequestError: No job has this name, or another process uses it; the message names the case.
            StartError: It does not answer.
        """
        ...


# -- names ------------------------------------------------------------------------------------------------------------


def free_name(name: str, taken: Collection[str]) -> str:
    """Return this name, or a default one; raises ``InvalidRequestError`` if it is in use or no name."""
    if not name:
        number = 1
        while (name := DEFAULT if number == 1 else f"{DEFAULT}-{number}") in taken:
            number += 1
        return name
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"a pool can't be called {name!r}: names begin with a letter and have letters, digits, `.`, `_` and `-`"
        )
    if name in taken:
        raise InvalidRequestError(
            f"there is a pool `{name}` already; attach to it, stop it, or give another name"
        )
    return name


def no_such_pool(name: str, names: Sequence[str]) -> str:
    """Return a text that no pool has this name, with the names of those that exist."""
    known = ", ".join(f"`{each}`" for each in names)
    return f"there is no pool `{name}`; {f'there is {known}' if known else 'none is kept here'}"


def in_use(name: str, user: str) -> str:
    """Return a text on the process that uses the pool, and the user's remedy."""
    return f"the pool `{name}` is in use by {user}; `%hvd_pool detach` there lets go of it, and so does the end of that process"
