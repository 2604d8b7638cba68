"""The actor that a kept pool stands on: it outlives the notebook, and the pool ends with it.

::

    notebook ── orders; events by long polls ──▶ PoolActor (detached) ── owns ──▶ actors ── agents ──▶ ranks
        └────────────── TLS ──────────────▶ coordinator (its child) ◀── TLS ─────────────────────────────┘

It is on the cluster's head node and reserves no CPU there. It owns the ranks' actors, so that Ray ends them with it however it
ends; the coordinator is its child, and ends with it as well. So no part of the pool has to be searched for on the cluster.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdlab._version import __version__
from hvdlab.collectives.client import Client, CoordinatorLostError
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.settings import WorldEnvironment, free_port
from hvdlab.launch.kept import Access, KeepRequest, KeptJob
from hvdlab.launch.processes import readable
from hvdlab.launch.starter import Ended, Program, Started, Waiting
from hvdlab.launch.tenancy import (
    Abandoned,
    Admitted,
    Claimed,
    Effect,
    Event,
    Heard,
    LeaseRefused,
    LeaseReleased,
    LeaseTick,
    Tenancy,
    Tenant,
    Vacant,
)
from hvdlab.ray.launcher import RayStarter, Surroundings
from hvdlab.ray.strategy import imported

NAMESPACE = "hvdlab-pools"
"""Ray's namespace of all kept pools."""
GROUPS = {"orders": 1, "events": 4, "calls": 4}
"""Threads of the actor: orders keep their order, and long polls hold up nothing else."""
LEASE = 30.0
"""Seconds without a sign of life after which a notebook has lost the pool."""
POLL = 5.0
"""Seconds after which a long poll is answered although nothing has happened: the next one is the notebook's sign of life."""
RESPAWN_WITHIN = 20.0
"""Seconds that a coordinator's successor has to come up."""
LEAVE_WITHIN = 3.0
"""Seconds that ranks have to leave when the pool ends without a notebook."""
_END_WITHIN = 1.0
"""Seconds that the coordinator's process has to end after its connections."""


@dataclass(frozen=True, slots=True)
class Entered:
    """The answer to a claim that is granted: the tenancy's number, and the number of the first event that follows."""

    number: int
    access: Access
    incarnation: int
    next_event: int


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Request for the pool's ranks; see :class:`~hvdlab.launch.starter.StartRequest`."""

    world: WorldEnvironment
    module: str
    options: Mapping[str, object]
    forked: str = ""
    program: Program | None = None


class PoolActor:
    """A kept pool. Its methods are called by notebooks through Ray, on threads.

    Args:
        request: The job's launch request.
        surroundings: The ranks' surroundings: parts of the notebook that began it.
        unused_for: Seconds without a notebook after which it ends.
    """

    def __init__(self, request: KeepRequest, surroundings: Surroundings, unused_for: float) -> None:
        ray = imported()
        self._request, self._started = request, time.time()
        #: Guards all state of the pool. Notified when an event has come, the tenancy has changed or the pool
        #: ends.
        self._changed = threading.Condition()
        #: Which notebook uses the pool.
        self._tenancy = Tenancy(LEASE, unused_for, time.monotonic())
        self._size = request.size
        #: Process of each living rank, and the end of each that has ended.
        self._living: dict[int, int] = {}
        self._lost: dict[int, Ended] = {}
        #: Events of ranks that the notebook has not confirmed, and the number of the first of these.
        self._events: list[Started | Ended] = []
        self._first = 0
        #: How many coordinators there were before; how the last one ended; whether it was replaced while no
        #: notebook was there.
        self._incarnation, self._ending, self._replaced = 0, "", False
        #: Whether a notebook has ordered the ranks' end, and whether the pool ends.
        self._closing, self._over = False, False
        address = ray.util.get_node_ip_address()
        self._coordinator = CoordinatorProcess.start(
            keep=True,
            tcp_host=address,
            timeout=RESPAWN_WITHIN,
            environ=surroundings.environment,
        )
        assert self._coordinator.tls_address is not None
        self._world = WorldEnvironment(
            self._coordinator.tls_address,
            self._coordinator.token,
            self._coordinator.certificate,
            request.plane,
            address,
            free_port(),
        )
        ranks = _Ranks(self._world, request.module, request.options)
        self._starter = RayStarter(ranks, self, surroundings)
        threading.Thread(target=self._keep_time, name="hvdlab-tenancy", daemon=True).start()
        threading.Thread(target=self._keep_coordinator, name="hvdlab-coordinator", daemon=True).start()

    # -- notebooks ------------------------------------------------------------------------------------------------

    def describe(self) -> KeptJob:
        """Return its line in a list of pools."""
        with self._changed:
            self._step(LeaseTick())
            tenant = self._tenancy.tenant
            return KeptJob(
                self._request.name, self._size, self._request.plane, "ray", self._started, tenant, __version__
            )

    def claim(self, tenant: Tenant, ended: int = 0) -> Entered | LeaseRefused:
        """Let this process use the pool; see :class:`~hvdlab.launch.tenancy.Claimed`."""
        with self._changed:
            answer = self._step(Claimed(tenant, ended))
            if not isinstance(answer, Admitted):
                assert isinstance(answer, LeaseRefused)
                return answer
            # The access below has the outcome of these events already.
            self._first += len(self._events)
            self._events = []
            replaced, self._replaced = self._replaced, False
            access = Access(
                self._world,
                self._coordinator.client_token,
                self._size,
                dict(self._living),
                dict(self._lost),
                replaced,
            )
            return Entered(answer.number, access, self._incarnation, self._first)

    def events(self, number: int, seen: int) -> list[Started | Ended] | None:
        """Wait a while for events of ranks from this number on, and return them. ``None``: the caller has lost the pool."""
        with self._changed:
            self._step(Heard(number))
            if not self._tenancy.holds(number):
                return None
            taken = max(0, seen - self._first)
            self._first, self._events = self._first + taken, self._events[taken:]
            self._changed.wait_for(lambda: self._events or not self._tenancy.holds(number), POLL)
            # The lease runs from the end of this poll: the notebook sends the next one after its answer.
            self._step(Heard(number))
            return list(self._events) if self._tenancy.holds(number) else None

    def start(self, number: int, ranks: Sequence[int], size: int) -> None:
        """Start these ranks of a pool of this size."""
        with self._changed:
            if self._tenancy.holds(number) and not self._closing:
                self._size = size
                self._starter.start(ranks, size)

    def signal(self, number: int, rank: int, which: int) -> None:
        """Send a signal to a rank."""
        with self._changed:
            if self._tenancy.holds(number):
                self._starter.signal(rank, which)

    def resized(self, number: int, size: int) -> None:
        """Record how many ranks the pool has."""
        with self._changed:
            if self._tenancy.holds(number):
                self._size = size

    def coordinator_ended(self, incarnation: int) -> str:
        """Return how the coordinator of this incarnation has ended; empty if it lives. It has a moment to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._incarnation > incarnation, _END_WITHIN)
            return self._ending if self._incarnation > incarnation else self._coordinator.ending()

    def replace_coordinator(self, incarnation: int, timeout: float) -> int:
        """Have another coordinator than that of this incarnation. Returns the incarnation that there is now."""
        with self._changed:
            if self._incarnation <= incarnation:
                self._respawn(timeout)
            return self._incarnation

    def let_go(self, number: int) -> None:
        """Release the pool, which the notebook uses no more."""
        with self._changed:
            self._step(LeaseReleased(number))

    def end_ranks(self, number: int, timeout: float) -> None:
        """End the ranks; those that have the order to leave get so many seconds for it."""
        with self._changed:
            if not self._tenancy.holds(number):
                return
            self._closing = True
        # Without the lock: the starter reports the ends of ranks through handle(), which needs it.
        self._starter.close(timeout)

    def end(self, number: int) -> None:
        """End all of it, this actor last."""
        with self._changed:
            if not self._tenancy.holds(number):
                return
        self._end(0)

    # -- reports of the starter -----------------------------------------------------------------------------------

    def handle(self, event: Started | Ended | Waiting) -> None:
        """Handle an event of a rank. Any thread."""
        if isinstance(event, Waiting):
            return
        with self._changed:
            if isinstance(event, Started):
                self._living[event.rank] = event.pid
                self._lost.pop(event.rank, None)
            else:
                self._living.pop(event.rank, None)
                self._lost[event.rank] = event
            if self._tenancy.tenant is not None:
                self._events.append(event)
            self._changed.notify_all()

    # -- its own threads ------------------------------------------------------------------------------------------

    def _step(self, event: Event) -> Effect | None:
        """Feed an event to the tenancy, and carry out its effects. Returns the answer to a claim. The lock is held."""
        answer: Effect | None = None
        for effect in self._tenancy.handle(event, time.monotonic()):
            match effect:
                case Vacant():
                    self._first, self._events = self._first + len(self._events), []
                    if self._closing:  # the notebook has ended while it ended the pool
                        self._begin_end()
                    else:
                        self._begin_saying_vacant()
                case Abandoned():
                    self._begin_end()
                case _:
                    answer = effect
        self._changed.notify_all()
        return answer

    def _keep_time(self) -> None:
        """Let time pass for the tenancy."""
        with self._changed:
            while not self._over:
                self._changed.wait(max(0.0, self._tenancy.next_at - time.monotonic()))
                self._step(LeaseTick())

    def _keep_coordinator(self) -> None:
        """Replace the coordinator whenever it ends: ranks wait for a successor."""
        while True:
            with self._changed:
                if self._is_over():
                    return
                pid, incarnation = self._coordinator.pid, self._incarnation
            with contextlib.suppress(ProcessLookupError):
                process = os.pidfd_open(pid)
                try:
                    readable(process, None)
                finally:
                    os.close(process)
            with self._changed:
                if self._incarnation == incarnation and not self._is_over():
                    try:
                        self._respawn(RESPAWN_WITHIN)
                    except StartError:  # it is tried again, as the process that has ended is watched again
                        self._changed.wait(_END_WITHIN)

    def _is_over(self) -> bool:
        return self._over

    def _respawn(self, timeout: float) -> None:
        """Start another coordinator. The lock is held. Raises ``StartError``."""
        ending = self._coordinator.ending() or "it did not answer"
        vacant = self._tenancy.tenant is None
        # A notebook sends the successor the ranks to wait for; without one their number has to do.
        self._coordinator.respawn(timeout, len(self._living) if vacant else None)
        self._ending, self._replaced = ending, vacant
        self._incarnation += 1
        if vacant:  # ranks may not have learnt it from the one that has ended
            self._begin_saying_vacant()
        self._changed.notify_all()

    def _begin_saying_vacant(self) -> None:
        """Start a thread that reports the vacancy. The caller holds the lock."""
        ranks = tuple(self._living)
        threading.Thread(target=self._say_vacant, args=(ranks,), name="hvdlab-vacant", daemon=True).start()

    def _say_vacant(self, ranks: Sequence[int]) -> None:
        """Report to ranks that no notebook reads their output: they must not wait for one."""
        topic, body = self._request.vacant
        with contextlib.suppress(CoordinatorLostError, StartError, TimeoutError):
            client = Client.connect(self._coordinator.address, self._coordinator.client_token)
            with contextlib.closing(client):
                client.wait_for(lambda world: not world.restoring, RESPAWN_WITHIN)
                with (
                    self._changed
                ):  # a notebook that comes now gets its answer later, and reports itself to them after this
                    if self._tenancy.tenant is None:
                        client.post(topic, body, ranks)
                        client.flush(_END_WITHIN, events=False)

    def _begin_end(self) -> None:
        """Start a thread that ends the pool. The caller holds the lock."""
        if not self._over:
            self._over = True
            threading.Thread(target=self._end, args=(LEAVE_WITHIN,), name="hvdlab-end", daemon=True).start()

    def _end(self, timeout: float) -> None:
        ray = imported()
        with self._changed:
            self._over = True
            self._changed.notify_all()
        with (
            contextlib.suppress(CoordinatorLostError, StartError, TimeoutError),
            contextlib.closing(
                Client.connect(self._coordinator.address, self._coordinator.client_token)
            ) as client,
        ):
            client.expect(())
            client.flush(events=False)
        self._starter.close(timeout)
        self._coordinator.close()
        ray.kill(ray.get_runtime_context().current_actor)
