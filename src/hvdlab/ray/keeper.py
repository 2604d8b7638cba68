"""Pools that are kept on a Ray cluster: how they are begun, found, and used by one notebook at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hvdlab._version import __version__
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.system import HostPosition
from hvdlab.launch.kept import Access, KeepRequest, KeptJob, free_name, in_use, none_there
from hvdlab.launch.processes import open_process, readable
from hvdlab.launch.starter import Ended, RankObserver, Started
from hvdlab.launch.tenancy import LeaseRefused, Tenant
from hvdlab.ray.launcher import UNUSED_FOR, Surroundings, connect
from hvdlab.ray.pool_actor import GROUPS, LEASE, NAMESPACE, Entered, PoolActor
from hvdlab.ray.strategy import death_reason, imported

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
        asked = {
            entry["name"]: _call(ray.get_actor(entry["name"], NAMESPACE).describe)
            for entry in ray.util.list_named_actors(all_namespaces=True)
            if entry["namespace"] == NAMESPACE
        }
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

    def begin(self, request: KeepRequest, timeout: float) -> RayHeldPool:
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
            actor = actor_class.options(**options).remote(request, Surroundings.here(), unused_for)
        except ValueError as error:
            raise InvalidRequestError(
                f"there is a pool `{request.name}` on the cluster by now ({error})"
            ) from error
        try:
            answer = _answer(_call(actor.claim, request.tenant), timeout)
        except BaseException:
            if ray.is_initialized():
                ray.kill(actor)
            raise
        assert isinstance(answer, Entered)
        return RayHeldPool(actor, _answer(_call(actor.describe), _ANSWER_WITHIN), answer)

    def claim(self, name: str, tenant: Tenant) -> RayHeldPool:
        """Use a pool. Raises the same errors as :meth:`hvdlab.launch.kept.JobKeeper.claim`."""
        ray = connect()
        try:
            actor = ray.get_actor(name, NAMESPACE)
        except ValueError as error:
            raise InvalidRequestError(none_there(name, [job.name for job in self.all()])) from error
        job: KeptJob = _answer(_call(actor.describe), _ANSWER_WITHIN)
        if job.version != __version__:
            raise StartError(
                f"the pool `{name}` runs hvdlab {job.version}, which hvdlab {__version__} can't talk to; attach with that version"
            )
        answer = _answer(_call(actor.claim, tenant), _ANSWER_WITHIN)
        if isinstance(answer, LeaseRefused) and _has_ended(answer.tenant, tenant.host):
            answer = _answer(_call(actor.claim, tenant, answer.number), _ANSWER_WITHIN)
        if isinstance(answer, LeaseRefused):
            raise InvalidRequestError(
                f"{in_use(name, str(answer.tenant))}; if that has ended on another host, the pool is free {LEASE:g} s later"
            )
        return RayHeldPool(actor, job, answer)


class RayHeldPool:
    """A pool on the cluster that this process uses: a :class:`~hvdlab.launch.kept.HeldJob`.

    A thread asks the pool's actor for events, which is also this process's sign of life.

    Args:
        actor: The pool's actor.
        job: The actor's description of its job.
        entered: Its answer to the claim.
    """

    def __init__(self, actor: Any, job: KeptJob, entered: Entered) -> None:
        self.job: KeptJob = job
        self.access: Access = entered.access
        #: Why this process uses the pool no more; empty while it does. The thread of :meth:`follow` stores
        #: it.
        self.lost = ""
        self._actor, self._number, self._incarnation = actor, entered.number, entered.incarnation
        #: Number of the next event to ask for. The actor keeps each event until a later one is asked for.
        self._next_event = entered.next_event
        #: Set once this process gives the pool up itself, so that the actor's end is no loss.
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def starter(self) -> HeldStarter:
        """Return the starter of single ranks."""
        return HeldStarter(self._actor, self._number)

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
        replaced = _call(self._actor.replace_coordinator, self._incarnation, timeout)
        self._incarnation = int(_answer(replaced, timeout + _MORE))

    def resized(self, size: int) -> None:
        """Record how many ranks the pool has."""
        with contextlib.suppress(StartError):  # it has ended: that is reported
            _order(self._actor.resized, self._number, size)

    def let_go(self) -> None:
        """Use the pool no more; it stays."""
        if not self._over.is_set() and not self.lost:
            # Before the call: its effect can reach the thread before its answer arrives here.
            self._over.set()
            with contextlib.suppress(StartError):
                _answer(_call(self._actor.let_go, self._number), _ANSWER_WITHIN)
        self._join()

    def end(self) -> None:
        """End the pool: its ranks, its coordinator, its actor."""
        if not self._over.is_set() and not self.lost:
            # Before the call, as in let_go().
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


class HeldStarter:
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


def _has_ended(tenant: Tenant, here: str) -> bool:
    """Return whether it was a process of this host, which ``here`` distinguishes from others, and has ended."""
    if tenant.host != here:
        return False
    process = open_process(tenant.pid, tenant.started)
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
