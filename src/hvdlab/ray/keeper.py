"""Pools that are kept on a Ray cluster: how they are begun, found, and used by one notebook at a time.

A kept pool stands on an actor, which outlives the notebook; the pool ends with it.

::

    notebook ── orders; events by long polls ──▶ PoolActor (detached) ── owns ──▶ actors ── agents ──▶ ranks
        └────────────── TLS ──────────────▶ coordinator (its child) ◀── TLS ──────

It is on the cluster's head node and reserves no CPU there. It owns the ranks' actors, so that Ray ends them with it however it
ends; the coordinator is its child, and ends with it as well. So no part of the pool has to be searched for on the cluster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvdlab._version import __version__
from hvdlab.collectives.client import Client, CoordinatorLostError
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.settings import WorldEnvironment, free_port
from hvdlab.collectives.system import HostPosition
from hvdlab.launch.kept import (
    Access,
    Effect,
    Event,
    JobExpired,
    KeepRequest,
    KeptJob,
    Lease,
    LeaseEnded,
    LeaseGranted,
    LeaseOwner,
    LeaseRefused,
    LeaseReleased,
    LeaseRenewed,
    LeaseRequested,
    LeaseTick,
    free_name,
    in_use,
    no_such_pool,
)
from hvdlab.launch.processes import open_process, readable
from hvdlab.launch.starter import Ended, Program, RankObserver, Started, Waiting
from hvdlab.ray.launcher import UNUSED_FOR, LaunchEnvironment, RayStarter, connect
from hvdlab.ray.strategy import death_reason, imported

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
class ClaimGranted:
    """The answer to a claim that is granted: the lease's number, and the number of the first event that follows."""

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
        launch_environment: Directory and variables that the ranks get from the notebook that began it.
        unused_for: Seconds without a notebook after which it ends.
    """

    def __init__(
        self, request: KeepRequest, launch_environment: LaunchEnvironment, unused_for: float
    ) -> None:
        ray = imported()
        self._request, self._started = request, time.time()
        #: Guards all state of the pool. Notified when an event has come, the lease has changed or the pool
        #: ends.
        self._changed = threading.Condition()
        #: Which notebook uses the pool.
        self._lease = Lease(LEASE, unused_for, time.monotonic())
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
            environ=launch_environment.variables,
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
        self._starter = RayStarter(ranks, self, launch_environment)
        threading.Thread(target=self._keep_time, name="hvdlab-lease", daemon=True).start()
        threading.Thread(target=self._keep_coordinator, name="hvdlab-coordinator", daemon=True).start()

    # -- notebooks ------------------------------------------------------------------------------------------------

    def describe(self) -> KeptJob:
        """Return its line in a list of pools."""
        with self._changed:
            # A notebook whose lease is over by now must not be listed as the owner.
            self._step(LeaseTick())
            owner = self._lease.owner
            return KeptJob(
                self._request.name, self._size, self._request.plane, "ray", self._started, owner, __version__
            )

    def claim(self, owner: LeaseOwner, ended: int = 0) -> ClaimGranted | LeaseRefused:
        """Let this process use the pool; see :class:`~hvdlab.launch.kept.LeaseRequested`."""
        with self._changed:
            answer = self._step(LeaseRequested(owner, ended))
            if not isinstance(answer, LeaseGranted):
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
            return ClaimGranted(answer.number, access, self._incarnation, self._first)

    def events(self, number: int, seen: int) -> list[Started | Ended] | None:
        """Wait a while for events of ranks from this number on, and return them. ``None``: the caller has lost the pool."""
        with self._changed:
            self._step(LeaseRenewed(number))
            if not self._lease.holds(number):
                return None
            taken = max(0, seen - self._first)
            self._first, self._events = self._first + taken, self._events[taken:]
            self._changed.wait_for(lambda: self._events or not self._lease.holds(number), POLL)
            # The lease runs from the end of this poll: the notebook sends the next one after its answer.
            self._step(LeaseRenewed(number))
            return list(self._events) if self._lease.holds(number) else None

    def start(self, number: int, ranks: Sequence[int], size: int) -> None:
        """Start these ranks of a pool of this size."""
        with self._changed:
            if self._lease.holds(number) and not self._closing:
                self._size = size
                self._starter.start(ranks, size)

    def signal(self, number: int, rank: int, which: int) -> None:
        """Send a signal to a rank."""
        with self._changed:
            if self._lease.holds(number):
                self._starter.signal(rank, which)

    def resized(self, number: int, size: int) -> None:
        """Record how many ranks the pool has."""
        with self._changed:
            if self._lease.holds(number):
                self._size = size

    def coordinator_ended(self, incarnation: int) -> str:
        """Return how the coordinator of this incarnation has ended; empty if it lives. It has a moment to end."""
        with self._changed:
            # A notebook loses its connection before the thread of this actor has seen the end of the
            # coordinator's process.
            self._changed.wait_for(lambda: self._incarnation > incarnation, _END_WITHIN)
            return self._ending if self._incarnation > incarnation else self._coordinator.ending()

    def replace_coordinator(self, number: int, incarnation: int, timeout: float) -> int:
        """Have another coordinator than that of this incarnation. Returns the incarnation that there is now.

        Raises:
            StartError: No other one starts, or the caller has lost the pool.
        """
        with self._changed:
            # The incarnation alone does not tell: it may still be current when the next owner uses the pool.
            if not self._lease.holds(number):
                raise StartError("this process uses the pool no more")
            if self._incarnation <= incarnation:
                self._respawn(timeout)
            return self._incarnation

    def detach(self, number: int) -> None:
        """Release the pool, which the notebook uses no more."""
        with self._changed:
            self._step(LeaseReleased(number))

    def end_ranks(self, number: int, timeout: float) -> None:
        """End the ranks; those that have the order to leave get so many seconds for it."""
        with self._changed:
            if not self._lease.holds(number):
                return
            self._closing = True
        # Without the lock: the starter reports the ends of ranks through handle(), which needs it.
        self._starter.close(timeout)

    def end(self, number: int) -> None:
        """End all of it, this actor last."""
        with self._changed:
            if not self._lease.holds(number):
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
            # Without a notebook no event is kept: the next claim gets the outcome of all of them in its
            # access.
            if self._lease.owner is not None:
                self._events.append(event)
            self._changed.notify_all()

    # -- its own threads ------------------------------------------------------------------------------------------

    def _step(self, event: Event) -> Effect | None:
        """Feed an event to the lease, and carry out its effects. Returns the answer to a claim. The lock is held."""
        answer: Effect | None = None
        for effect in self._lease.handle(event, time.monotonic()):
            match effect:
                case LeaseEnded():
                    self._first, self._events = self._first + len(self._events), []
                    if self._closing:  # the notebook has ended while it ended the pool
                        self._begin_end()
                    else:
                        self._begin_reporting_unowned()
                case JobExpired():
                    self._begin_end()
                case _:
                    answer = effect
        self._changed.notify_all()
        return answer

    def _keep_time(self) -> None:
        """Let time pass for the lease."""
        with self._changed:
            while not self._over:
                # Each step of the lease notifies, so that this waits for the new time.
                self._changed.wait(max(0.0, self._lease.next_at - time.monotonic()))
                self._step(LeaseTick())

    def _keep_coordinator(self) -> None:
        """Replace the coordinator whenever it ends: ranks wait for a successor."""
        while True:
            with self._changed:
                if self._is_over():
                    return
                pid, incarnation = self._coordinator.pid, self._incarnation
            # Without the lock, as this waits for the whole life of the coordinator. If it was reaped
            # meanwhile, it can't be opened: that is its end, too.
            with contextlib.suppress(ProcessLookupError):
                process = os.pidfd_open(pid)
                try:
                    readable(process, None)
                finally:
                    os.close(process)
            with self._changed:
                # A notebook may have been faster, by replace_coordinator().
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
        unowned = self._lease.owner is None
        # A notebook sends the successor the ranks to wait for; without one their number has to do.
        self._coordinator.respawn(timeout, len(self._living) if unowned else None)
        self._ending, self._replaced = ending, unowned
        self._incarnation += 1
        if unowned:  # ranks may not have learnt it from the one that has ended
            self._begin_reporting_unowned()
        self._changed.notify_all()

    def _begin_reporting_unowned(self) -> None:
        """Start a thread that reports to ranks that the pool has no owner. The caller holds the lock."""
        ranks = tuple(self._living)
        threading.Thread(
            target=self._report_unowned, args=(ranks,), name="hvdlab-unowned", daemon=True
        ).start()

    def _report_unowned(self, ranks: Sequence[int]) -> None:
        """Report to ranks that no notebook reads their output: they must not wait for one."""
        topic, body = self._request.unowned
        with contextlib.suppress(CoordinatorLostError, StartError, TimeoutError):
            client = Client.connect(self._coordinator.address, self._coordinator.client_token)
            with contextlib.closing(client):
                client.wait_for(lambda world: not world.restoring, RESPAWN_WITHIN)
                with (
                    self._changed
                ):  # a notebook that comes now gets its answer later, and reports itself to them after this
                    if self._lease.owner is None:
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


_ANSWER_WITHIN = 10.0
"""Seconds that the actor of a pool has for an answer."""
_MORE = 15.0
"""Seconds that an answer may take beyond the time that the actor itself was given."""


class RayKeeper:
    """Keeper of the pools of the launcher ``ray`` in detached actors of the cluster that this process is connected to, or can find."""

    def reachable(self) -> bool:
        """Return whether this process is connected to a cluster, or ``RAY_ADDRESS`` names one."""
        ray = sys.modules.get("ray")
        return bool(os.environ.get("RAY_ADDRESS")) or (ray is not None and ray.is_initialized())

    def all(self) -> list[KeptJob]:
        """Return the pools of the cluster. Raises ``StartError`` if there is no cluster."""
        ray = connect()
        asked = {}
        for entry in ray.util.list_named_actors(all_namespaces=True):
            if entry["namespace"] == NAMESPACE:
                with contextlib.suppress(ValueError):  # it has ended since it was listed
                    asked[entry["name"]] = _call(ray.get_actor(entry["name"], NAMESPACE).describe)
        # ray.wait() raises ValueError for an empty list.
        ready, _ = (
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_WITHIN)
            if asked
            else ([], [])
        )
        found = []
        for answer in ready:
            with contextlib.suppress(ray.exceptions.RayError):  # it is just ending
                found.append(ray.get(answer))
        return sorted(found, key=lambda job: job.name)

    def begin(self, request: KeepRequest, timeout: float) -> RayAttachedPool:
        """Begin a pool without ranks. Raises the same errors as :meth:`hvdlab.launch.kept.JobKeeper.begin`."""
        ray = connect()
        request = replace(request, name=free_name(request.name, {job.name for job in self.all()}))
        unused_for = float(str(request.options.get("unused_for", UNUSED_FOR)))
        options = {
            "name": request.name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "num_cpus": 0,
            "resources": {"node:__internal_head__": 0.001},
        }
        actor_class = ray.remote(concurrency_groups=GROUPS)(PoolActor)
        try:
            actor = actor_class.options(**options).remote(request, LaunchEnvironment.here(), unused_for)
        except ValueError as error:
            raise InvalidRequestError(
                f"there is a pool `{request.name}` on the cluster by now ({error})"
            ) from error
        try:
            answer = _answer(_call(actor.claim, request.owner), timeout)
        # A detached actor that is not claimed would stay on the cluster without a user until `unused_for`
        # is over.
        except BaseException:
            if ray.is_initialized():
                ray.kill(actor)
            raise
        assert isinstance(answer, ClaimGranted)
        return RayAttachedPool(actor, _answer(_call(actor.describe), _ANSWER_WITHIN), answer)

    def claim(self, name: str, owner: LeaseOwner) -> RayAttachedPool:
        """Use a pool. Raises the same errors as :meth:`hvdlab.launch.kept.JobKeeper.claim`."""
        ray = connect()
        try:
            actor = ray.get_actor(name, NAMESPACE)
        except ValueError as error:
            raise InvalidRequestError(no_such_pool(name, [job.name for job in self.all()])) from error
        job: KeptJob = _answer(_call(actor.describe), _ANSWER_WITHIN)
        if job.version != __version__:
            raise StartError(
                f"the pool `{name}` runs hvdlab {job.version}, which hvdlab {__version__} can't talk to; attach with that version"
            )
        answer = _answer(_call(actor.claim, owner), _ANSWER_WITHIN)
        if isinstance(answer, LeaseRefused) and _has_ended(answer.owner, owner.host):
            answer = _answer(_call(actor.claim, owner, answer.number), _ANSWER_WITHIN)
        if isinstance(answer, LeaseRefused):
            raise InvalidRequestError(
                f"{in_use(name, str(answer.owner))}; if that has ended on another host, the pool is free {LEASE:g} s later"
            )
        return RayAttachedPool(actor, job, answer)


class RayAttachedPool:
    """A pool on the cluster that this process uses: a :class:`~hvdlab.launch.kept.AttachedJob`.

    A thread asks the pool's actor for events, which is also this process's sign of life.

    Args:
        actor: The pool's actor.
        job: The actor's description of its job.
        granted: Its answer to the claim.
    """

    def __init__(self, actor: Any, job: KeptJob, granted: ClaimGranted) -> None:
        self.job: KeptJob = job
        self.access: Access = granted.access
        #: Why this process uses the pool no more; empty while it does. The thread of :meth:`follow` stores
        #: it.
        self.lost = ""
        self._actor, self._number, self._incarnation = actor, granted.number, granted.incarnation
        #: Number of the next event to ask for. The actor keeps each event until a later one is asked for.
        self._next_event = granted.next_event
        #: Set once this process gives the pool up itself, so that the actor's end is no loss.
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def starter(self) -> PoolActorStarter:
        """Return the starter of single ranks."""
        return PoolActorStarter(self._actor, self._number)

    def follow(self, ranks: RankObserver, lost: Callable[[str], None]) -> None:
        """Report the ranks' events, and once that the pool is lost."""
        self._thread = threading.Thread(
            target=self._run, args=(ranks, lost), name="hvdlab-kept-ray", daemon=True
        )
        self._thread.start()

    def coordinator_ended(self) -> str:
        """Return how the coordinator ended; empty if it runs. Raises ``StartError`` if the actor is gone."""
        return str(_answer(_call(self._actor.coordinator_ended, self._incarnation), _ANSWER_WITHIN))

    def replace_coordinator(self, timeout: float) -> None:
        """Have another coordinator. Raises ``StartError``."""
        replaced = _call(self._actor.replace_coordinator, self._number, self._incarnation, timeout)
        self._incarnation = int(_answer(replaced, timeout + _MORE))

    def resized(self, size: int) -> None:
        """Record how many ranks the pool has."""
        with contextlib.suppress(StartError):  # it has ended: that is reported
            _order(self._actor.resized, self._number, size)

    def detach(self) -> None:
        """Release the pool, which stays."""
        if not self._over.is_set() and not self.lost:
            # Before the call: its effect can reach the thread before its answer arrives here.
            self._over.set()
            with contextlib.suppress(StartError):
                _answer(_call(self._actor.detach, self._number), _ANSWER_WITHIN)
        self._join()

    def end(self) -> None:
        """End the pool: its ranks, its coordinator, its actor."""
        if not self._over.is_set() and not self.lost:
            # Before the call, as in detach().
            self._over.set()
            with contextlib.suppress(StartError):  # that the actor ended is the answer
                _answer(_call(self._actor.end, self._number), _MORE)
            if (ray := imported()).is_initialized():
                ray.kill(self._actor)
        self._join()

    def _join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, ranks: RankObserver, lost: Callable[[str], None]) -> None:
        ray = imported()
        living = dict(self.access.living)
        while not self._over.is_set():
            try:
                asked = _sent(self._actor.events, "events", (self._number, self._next_event))
                events = ray.get(asked)
            except Exception as error:  # noqa: BLE001  # the actor has ended, or Ray was shut down
                if not self._over.is_set():
                    self.lost = f"its actor on Ray is gone ({death_reason(error)})"
                    # The actor can report no end any more, and their processes end with it.
                    for rank, pid in living.items():
                        ranks.handle(Ended(rank, pid, self.lost))
                    lost(self.lost)
                return
            if events is None:
                if not self._over.is_set():
                    self.lost = (
                        f"this process gave no sign of life for {LEASE:g} s, or another one has taken the pool; "
                        f"`%hvd_pool attach {self.job.name}` goes on with it if it is free"
                    )
                    lost(self.lost)
                return
            for event in events:
                self._next_event += 1
                living.pop(event.rank, None)
                if isinstance(event, Started):
                    living[event.rank] = event.pid
                ranks.handle(event)


class PoolActorStarter:
    """A :class:`~hvdlab.launch.starter.Starter` whose ranks are started by the pool's actor."""

    def __init__(self, actor: Any, number: int) -> None:
        self._actor, self._number = actor, number

    def start(self, ranks: Sequence[int], size: int) -> None:
        """Have the actor start these ranks. Raises ``StartError`` if Ray is gone."""
        _order(self._actor.start, self._number, tuple(ranks), size)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to the rank's process group."""
        with contextlib.suppress(StartError):  # the rank ends with the pool
            _order(self._actor.signal, self._number, rank, int(signal.Signals(number)))

    def place(self, rank: int, size: int) -> HostPosition | None:
        """Return ``None``: Ray places ranks."""
        return None

    def close(self, timeout: float) -> None:
        """Wait so long for ranks that got the order to leave, then end the rest. Idempotent."""
        with contextlib.suppress(StartError):
            _answer(_call(self._actor.end_ranks, self._number, timeout), timeout + _MORE)


def _has_ended(owner: LeaseOwner, here: str) -> bool:
    """Return whether it was a process of this host, which ``here`` distinguishes from others, and has ended."""
    if owner.host != here:
        return False
    process = open_process(owner.pid, owner.started)
    if process < 0:
        return True
    try:
        return readable(process, 0)
    finally:
        os.close(process)


def _call(method: Any, *arguments: object) -> Any:
    """Return Ray's reference to the answer of a call. Raises ``StartError`` if Ray is gone."""
    return _sent(method, "calls", arguments)


def _order(method: Any, *arguments: object) -> None:
    """Call a method after the orders that were given before. Raises ``StartError`` if Ray is gone."""
    _sent(method, "orders", arguments)


def _sent(method: Any, group: str, arguments: tuple[object, ...]) -> Any:
    if not imported().is_initialized():  # a call would start a cluster
        raise StartError("the connection to Ray was closed")
    try:
        return method.options(concurrency_group=group).remote(*arguments)
    except Exception as error:
        raise StartError(f"the connection to Ray is lost ({type(error).__name__}: {error})") from error


def _answer(reference: Any, timeout: float) -> Any:
    """Return the result of a call. Raises ``StartError``."""
    ray = imported()
    try:
        return ray.get(reference, timeout=timeout)
    except ray.exceptions.GetTimeoutError as error:
        raise StartError(f"the pool's actor on Ray did not answer within {timeout:g} s") from error
    except ray.exceptions.RayTaskError as error:
        raise StartError(f"the pool's actor on Ray: {error.cause}") from error
    except ray.exceptions.RayError as error:
        raise StartError(f"the pool's actor on Ray has ended: {death_reason(error)}") from error
