"""Which process uses a job that outlives it, where no process of the job can watch that one: a lease, without I/O.

A tenant's calls are its signs of life. One that makes none for the lease's length has lost the job, even if it lives: another one
may have it then. A job without a tenant ends after a time limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdlab.collectives.text import visible

_LONGEST = 300
"""Characters of a text of a tenant that are shown at most."""

# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tenant:
    """A process that uses a kept job.

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
class Claimed:
    """Event: a process asks to use the job. It has seen that the tenancy ``ended`` is over since its process has ended, if that is not 0."""

    tenant: Tenant
    ended: int = 0


@dataclass(frozen=True, slots=True)
class Heard:
    """Event: a tenancy's process has given a sign of life."""

    number: int


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """Event: a tenancy's process uses the job no more."""

    number: int


@dataclass(frozen=True, slots=True)
class LeaseTick:
    """Event: time has passed without another event."""


Event = Claimed | Heard | LeaseReleased | LeaseTick

# -- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admitted:
    """Effect: the claim is granted, under this number."""

    number: int


@dataclass(frozen=True, slots=True)
class LeaseRefused:
    """Effect: another process has the job, under this number."""

    number: int
    tenant: Tenant


@dataclass(frozen=True, slots=True)
class Vacant:
    """Effect: the job has no tenant any more: ranks must wait for none."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Effect: the job had no tenant for so long that it ends."""


Effect = Admitted | LeaseRefused | Vacant | Abandoned


class Tenancy:
    """The lease of one job, which has no tenant at first.

    Args:
        lease: Seconds without a sign of life after which a tenancy is over.
        unused_for: Seconds without a tenant after which the job ends. The first tenant has at least the length of a lease to
            come: the process that starts a job may be slow.
        now: The time, as in all events.

    Attributes:
        tenant: The process that uses the job; ``None`` if none does.
    """

    def __init__(self, lease: float, unused_for: float, now: float) -> None:
        self._lease, self._unused_for = lease, unused_for
        #: The number of the last tenancy, and when its last sign of life came or the vacancy began.
        self._number, self._since = 0, now
        self.tenant: Tenant | None = None

    def holds(self, number: int) -> bool:
        """Return whether the tenancy of this number goes on."""
        return self.tenant is not None and number == self._number

    @property
    def next_at(self) -> float:
        """Return when :class:`LeaseTick` has an effect, unless something happens before."""
        if self.tenant is not None:
            return self._since + self._lease
        return self._since + (self._unused_for if self._number else max(self._lease, self._unused_for))

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle an event and return its effects."""
        # First: a claim after the lease's end must find no tenant.
        effects = self._pass_time(now)
        match event:
            case Claimed(tenant, ended):
                effects += self._claim(tenant, ended, now)
            case Heard(number) if self.holds(number):
                self._since = now
            case LeaseReleased(number) if self.holds(number):
                self.tenant, self._since = None, now
                effects.append(Vacant())
        return effects

    def _claim(self, tenant: Tenant, ended: int, now: float) -> list[Effect]:
        # A claimant that has seen the tenant's process end need not wait for the lease's end.
        if self.tenant is not None and ended != self._number:
            return [LeaseRefused(self._number, self.tenant)]
        self.tenant, self._since = tenant, now
        self._number += 1
        return [Admitted(self._number)]

    def _pass_time(self, now: float) -> list[Effect]:
        if now < self.next_at:
            return []
        if self.tenant is None:
            return [Abandoned()]
        self.tenant, self._since = None, now
        return [Vacant()]
