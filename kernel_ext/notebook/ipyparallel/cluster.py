"""A pool's ``ipyparallel.Cluster``: its controller, its engine set, and the one thread that its coroutines run on.

The first use brings it up, by ``IpyparallelCluster.cluster`` or ``IpyparallelCluster.wait_up``: it listens on ports and takes memory, which a pool
that only runs cells does without. Ranks register one after the other, so that a cell that comes in between finds the others free.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from hvdlab.collectives.errors import HvdlabError, StartError
from hvdlab.collectives.time_limits import Deadline
from hvdlab.launch.forkserver.client import ForkServer
from hvdlab.launch.forkserver.messages import (
    CONTROLLER,
    LAUNCHER,
    Adopt,
    ControllerUp,
    Exited,
    Forked,
    ForkFailed,
    FromServer,
    Guard,
    ReportEngine,
    Signal,
)
from hvdlab.launch.processes import describe, start_time
from hvdlab.launch.starter import Starter

if TYPE_CHECKING:
    from ipyparallel import Cluster  # type: ignore[import-untyped]  # has no types

    from hvdlab.kernel_ext.notebook.ipyparallel.fork_launchers import (
        ForkControllerLauncher,
        ForkEngineSetLauncher,
    )

T = TypeVar("T")

START_WITHIN = 40.0
"""Seconds that a controller has to start."""
END_WITHIN = 5.0
"""Seconds that a killed controller has to end."""
PAUSES = (0.0, 0.3, 1.0)
"""Seconds to wait before each further attempt, if another program took a port after the controller had chosen it."""

TRIES = 3
"""Requests to a rank to register with one controller, at most."""

log = logging.getLogger(__name__)
# ipyparallel's reports are for users that configure logging, not for the notebook.
log.addHandler(logging.NullHandler())

# Two threads must not begin to import ipyparallel at different ends of its import cycle.
_importing = threading.Lock()


def load_ipyparallel() -> None:
    """Import ipyparallel whole. Call it before any import of a part of it. Raises ``ImportError``."""
    with _importing:
        importlib.import_module("ipyparallel")


class ClusterOwner(Protocol):
    """Owner of a cluster. Any thread calls it; it must not block."""

    def rank_pids(self) -> Mapping[int, int]:
        """Return rank to process id of the ranks that live."""
        ...

    def set_controller(self, connection: str) -> None:
        """Have ranks register with a controller that is up.

        Args:
            connection: Its connection information for engines (JSON); empty when it has died.
        """
        ...

    def controller_lost(self, line: str) -> None:
        """Report to the user, in this line, that a controller that was up has died."""
        ...


class IpyparallelCluster:
    """Cluster of ipyparallel beside a pool.

    Args:
        fork_server: Forks the controller.
        owner: Has the ranks, and learns of each controller.
    """

    def __init__(self, fork_server: ForkServer, owner: ClusterOwner) -> None:
        self._fork_server, self._owner = fork_server, owner
        self._starter: Starter | None = None
        # The cluster that an earlier process left, if it kept this pool.
        self._earlier = Predecessor.of(fork_server)
        # The controller that is up; None while there is none, or one is only being started.
        self._serving: ForkControllerLauncher | None = None
        # The start that is under way, or was last.
        self._starting: asyncio.Task[Any] | None = None
        # Guards `_up` and `_closed`: every thread uses them.
        self._lock = threading.Lock()
        self._cluster: Cluster | None = None
        # The ranks, in the form in which ipyparallel has them.
        self._engines: ForkEngineSetLauncher | None = None
        # The outcome of the last start: connection information for engines. None before, and after a controller's death.
        self._up: Future[str] | None = None
        self._loop = asyncio.new_event_loop()
        # Files that are removed when the pool ends.
        self._guarded: tuple[str, ...] = ()
        # Whether this is closed, and whether a later process takes the controller over.
        self._closed = self._left = False
        self._thread = threading.Thread(target=self._run, name="hvdlab-ipyparallel", daemon=True)
        self._thread.start()

    # -- any thread -----------------------------------------------------------------------------------------------

    def set_starter(self, starter: Starter) -> None:
        """Have ``starter`` send the signals that ipyparallel sends to ranks. Call it once, before the cluster is brought up."""
        self._starter = starter

    @property
    def cluster(self) -> Cluster:
        """Return the cluster, which is brought up first if it is not. Does not wait for engines to register."""
        self.wait_up(Deadline(60))
        assert self._cluster is not None
        return self._cluster

    def bring_up(self) -> Future[str]:
        """Begin to bring the cluster up, if that was not done yet. The result is the engines' connection information."""
        with self._lock:
            if self._up is None:
                self._up = asyncio.run_coroutine_threadsafe(self._start(), self._loop)
                self._up.add_done_callback(_log_failure)
            return self._up

    def _bring_up_again(self) -> Future[str]:
        with self._lock:
            up = self._up
            if up is not None and up.done() and (up.cancelled() or up.exception() is not None):
                self._up = None
        return self.bring_up()

    def wait_up(self, deadline: Deadline) -> str:
        """Bring the cluster up and wait for it, also if that has failed before. Ctrl-C breaks the wait.

        Returns the engines' connection information.

        Raises:
            StartError: The controller did not start.
        """
        try:
            return self._bring_up_again().result(deadline.remaining())
        except (RuntimeError, OSError, TimeoutError) as error:
            raise StartError(
                f"ipyparallel's controller could not be started: {error or 'it took too long'}"
            ) from error

    def on_forkserver_event(self, event: FromServer) -> None:
        """Take a message of the fork server about the controller, or about a rank. Fork server's reading thread."""
        controller = None if self._cluster is None else self._cluster.controller
        if controller is not None:
            match event:
                case Forked(number, pid) if number == CONTROLLER:
                    controller.was_forked(pid)
                case ForkFailed(number, text) if number == CONTROLLER:
                    controller.was_forked(RuntimeError(text))
                case ControllerUp():
                    controller.is_up()
                case Exited(number) if number == CONTROLLER:
                    controller.has_ended(event)
                    with_server = self._fork_server.lost is not None
                    self._call_soon(self._controller_ended, controller, event, with_server)
        if isinstance(event, Exited) and event.number == CONTROLLER and self._earlier is not None:
            self._earlier.has_ended()
        self.ranks_changed()

    def rank_joined(self, rank: int) -> None:
        """Have the controller announce a rank, which has registered and listens."""
        self._fork_server.send(ReportEngine(rank, True))

    def rank_gone(self, rank: int) -> None:
        """Have the controller forget a rank that the fork server did not fork, and that has ended."""
        with contextlib.suppress(StartError):  # the pool is being closed
            self._fork_server.send(ReportEngine(rank, False))
        self.ranks_changed()

    def ranks_changed(self) -> None:
        """Update the engine set: a rank has started or ended."""
        self._call_soon(self._update_engines)

    def _call_soon(self, call: Callable[..., None], *arguments: object) -> None:
        with self._lock:  # not while the loop is being closed
            if not self._closed:
                self._loop.call_soon_threadsafe(call, *arguments)

    def call(self, coroutine: Coroutine[Any, Any, T], deadline: Deadline) -> T:
        """Run a coroutine on the cluster's thread and wait for it. Ctrl-C breaks the wait."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(deadline.remaining())

    def close(self, *, keep: bool = False) -> None:
        """End the controller and the engines that the cluster started itself, and the thread. Idempotent.

        Args:
            keep: Leave all that to a later process that takes the pool over; only the thread ends.
        """
        with self._lock:
            if self._closed:
                return
            self._closed, self._left = True, keep
        # After `_closed` is set: `_call_soon` schedules nothing more on a loop that is about to close.
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # -- the cluster's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._leave() if self._left else self._stop())
        except (HvdlabError, OSError, TimeoutError) as error:
            log.warning("ipyparallel's cluster could not be stopped in order: %s", error)
        finally:
            self._loop.close()
            for path in () if self._left else self._guarded:
                Path(path).unlink(missing_ok=True)

    def new_cluster(self, **options: Any) -> Cluster:
        """Make the cluster object. The cluster's thread."""
        load_ipyparallel()
        from ipyparallel import Cluster

        from hvdlab.kernel_ext.notebook.ipyparallel.fork_launchers import (
            ForkControllerLauncher,
            ForkEngineSetLauncher,
            keys_file,
        )

        options = {"engine_launcher_class": ForkEngineSetLauncher, **options}
        if self._earlier is not None:
            options.update(self._earlier.identity)
        self._cluster = Cluster(
            controller_launcher_class=ForkControllerLauncher,
            send_engines_connection_env=False,
            # The pool ends the controller; that of a kept pool goes on when this process ends.
            shutdown_atexit=False,
            parent=None,
            log=log,
            **options,
        )
        security = Path(self._cluster.profile_dir) / "security"
        names = [f"ipcontroller-{self._cluster.cluster_id}-{kind}.json" for kind in ("client", "engine")]
        keys = keys_file(self._cluster.profile_dir, self._cluster.cluster_id)
        self.remove_files_on_exit(
            self._cluster.cluster_file, *(str(security / name) for name in names), str(keys)
        )
        return self._cluster

    def remove_files_on_exit(self, *paths: str) -> None:
        """Have the fork server remove these files when the pool ends, also if this process is killed."""
        self._guarded += paths
        self._fork_server.send(Guard(self._guarded))

    def watch_launcher(self, pid: int) -> None:
        """Have the fork server end this program, which started the ranks, when the pool ends, also if this process is killed."""
        self._fork_server.send(Adopt((Forked(LAUNCHER, pid, start_time(pid)),)))

    async def _start(self) -> str:
        self._starting = asyncio.current_task()
        if self._earlier is not None and self._cluster is None:
            await self._earlier.end(self._fork_server)
        cluster = self._cluster or self.new_cluster()
        ours = not cluster.engines
        information = await self._start_controller(cluster)
        if ours:
            await self._take_over_ranks(cluster)
        if self._serving is None:  # it has died meanwhile
            raise RuntimeError("ipyparallel's controller ended as soon as it was up")
        self._owner.set_controller(information)
        return information

    async def _start_controller(self, cluster: Cluster) -> str:
        """Return the connection information for engines of a controller that was started."""
        pauses = iter(PAUSES)
        while True:
            cluster.delay = 0
            try:
                async with asyncio.timeout(START_WITHIN):
                    return await self._start_once(cluster)
            except (HvdlabError, RuntimeError, OSError, TimeoutError) as error:
                failed = cluster.controller
                if failed is None:
                    raise
                await failed.surely_gone(END_WITHIN)
                pause = next(pauses, None) if failed.ports_taken else None
                if pause is None or self._fork_server.lost is not None:
                    raise
                log.info("ipyparallel's controller is started again: %s", error)
            await asyncio.sleep(pause)

    async def _start_once(self, cluster: Cluster) -> str:
        cluster.controller = None  # one that has died, or could not be started
        await cluster.start_controller(fork_server=self._fork_server)
        controller: ForkControllerLauncher = cluster.controller
        information = json.dumps((await controller.get_connection_info())["engine"])
        if controller.ended.done():
            raise RuntimeError(f"ipyparallel's controller ended: {describe(controller.ended.result())}")
        self._serving = controller  # from now on `_controller_ended` handles its end
        return information

    def _controller_ended(self, controller: ForkControllerLauncher, end: Exited, with_server: bool) -> None:
        """Report that a controller that was up has died. The next use of the cluster starts another one.

        A controller that is only being started is left to ``_start``.
        """
        cluster = self._cluster
        if cluster is None or controller is not self._serving or self._closed:
            return
        with self._lock:
            # First of all: a caller that uses the cluster from now on gets the next controller.
            self._up = None
        self._serving = None
        self._owner.set_controller("")
        controller.notify_stop({"exit_code": end.code, "pid": end.pid, "identifier": controller.identifier})
        cluster.controller = None
        why = "with the process that ranks are forked from" if with_server else f"({describe(end)})"
        self._owner.controller_lost(
            f"ipyparallel's controller ended {why}; cells are not affected, the next use of `pool.cluster` starts "
            "another controller, and clients of ipyparallel have to be made again"
        )

    async def _take_over_ranks(self, cluster: Cluster) -> None:
        pids = {str(rank): pid for rank, pid in self._owner.rank_pids().items()}
        name = await cluster.start_engines(len(pids), starter=self._starter, pids=pids)
        self._engines = cluster.engines[name]

    def _update_engines(self) -> None:
        cluster, engines = self._cluster, self._engines
        if cluster is None or engines is None or engines.state == "after":
            return
        engines.update(self._owner.rank_pids())
        if not self._closed:
            cluster.update_cluster_file()

    async def _leave(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait((self._starting,))

    async def _stop(self) -> None:
        await self._leave()
        cluster = self._cluster
        if cluster is None:
            return
        if self._fork_server.lost is not None:
            return  # everything has ended with it
        if self._engines is not None:
            self._engines.notify_stop({"exit_code": 0, "identifier": self._engines.identifier})
            # `stop_cluster` stops all engine sets that it knows, and `stop` of this one would end the ranks.
            cluster.engines.clear()
        await cluster.stop_cluster()


def _log_failure(up: Future[str]) -> None:
    """Log why the start failed. The pool works without the controller; a caller that asks for the cluster gets the error."""
    if not up.cancelled() and up.exception() is not None:
        log.warning("ipyparallel's controller could not be started: %s", up.exception())


class Predecessor:
    """Cluster that an earlier process left with a kept pool. The next one takes over its name, and its keys, which the ranks know.

    Args:
        identity: Its ``cluster_id`` and ``profile_dir``.
    """

    def __init__(self, identity: dict[str, str]) -> None:
        self.identity = identity
        self._gone: Future[None] = Future()

    @classmethod
    def of(cls, fork_server: ForkServer) -> Self | None:
        """Return the predecessor that this fork server has or had a controller of; None if there is none."""
        for path in map(Path, fork_server.guarded()):
            if path.name.startswith("cluster-"):
                with contextlib.suppress(OSError, ValueError, KeyError):  # it is gone, or half written
                    cluster = json.loads(path.read_text())["cluster"]
                    return cls({name: cluster[name] for name in ("cluster_id", "profile_dir")})
        return None

    def has_ended(self) -> None:
        """Note that the fork server has reaped the predecessor's controller. Any thread."""
        if not self._gone.done():
            self._gone.set_result(None)

    async def end(self, fork_server: ForkServer) -> None:
        """Kill the predecessor's controller, if it lives, and wait for its end."""
        if CONTROLLER in fork_server.children():
            fork_server.send(Signal(CONTROLLER, signal.SIGKILL))
            await asyncio.wrap_future(self._gone)


class RegisteringRanks(Protocol):
    """Ranks that register as engines. Any thread calls it; it must not block."""

    def request_engine(self, rank: int, request: str) -> None:
        """Send a rank the request to register."""
        ...

    def engine_failed(self, rank: int, why: str) -> None:
        """Take note of a rank that could not register, and gets no further request."""
        ...


class EngineRegistration:
    """Registration of ranks as engines of ipyparallel: a few at a time, each up to ``TRIES`` times.

    A request or an answer can be lost with a coordinator, come twice, or come too late to count. So each request has a number,
    which the answer to it repeats; only the answer to a rank's last request counts.

    Args:
        ranks: Reaches the ranks.
        at_once: Number of ranks that register at the same time; by default one for each four cores.
    """

    def __init__(self, ranks: RegisteringRanks, at_once: int | None = None) -> None:
        self._link = ranks
        self._at_once = at_once or max(1, (os.cpu_count() or 1) // 4)
        self._lock = threading.Lock()
        # The controller's connection information; empty while there is none.
        self._connection = ""
        # Ranks that are ready: they are in `_waiting`, `_under_way` or `_joined`, or have failed too often.
        self._ranks: set[int] = set()
        # Ranks that have no request yet, in the order in which they get one.
        self._waiting: deque[int] = deque()
        # Rank to its last request, until the answer comes.
        self._under_way: dict[int, str] = {}
        self._joined: set[int] = set()
        # Requests to each rank for this controller.
        self._tries: Counter[int] = Counter()
        # Not from zero: an earlier process may have asked the ranks of a kept pool.
        self._series, self._requests = os.urandom(8).hex(), 0

    @property
    def joined(self) -> frozenset[int]:
        """Return the ranks that are engines of ipyparallel."""
        with self._lock:
            return frozenset(self._joined)

    def set_connection(self, connection: str) -> None:
        """Have all ranks register with the controller that is up now, also those that were engines of an earlier one.

        Args:
            connection: The controller's connection information for engines; empty if there is no controller any more.
        """
        with self._lock:
            self._connection = connection
            self._waiting = deque(sorted(self._ranks))
            self._joined.clear()
            self._under_way.clear()
            self._tries.clear()
        self._next()

    def add(self, ranks: Iterable[int]) -> None:
        """Have these ranks register: they are ready."""
        with self._lock:
            new = [rank for rank in ranks if rank not in self._ranks]
            self._ranks.update(new)
            self._waiting.extend(new)
        self._next()

    def resend_pending(self) -> None:
        """Repeat the requests that have no answer yet: they, or the answers, may be lost."""
        with self._lock:
            chosen = sorted(self._under_way.items())
        for rank, request in chosen:  # without the lock, which an answer on another thread takes
            self._link.request_engine(rank, request)

    def resolve(self, rank: int, answer: str) -> bool:
        """Take a rank's answer to its request. Returns whether the rank is an engine now; False if the answer does not count."""
        number, _, failure = answer.partition("\n")
        with self._lock:
            if self._under_way.get(rank, "").partition("\n")[0] != number:
                return False
            del self._under_way[rank]
            last = self._tries[rank] >= TRIES
            if not failure:
                self._joined.add(rank)
            elif not last:
                self._waiting.append(rank)
        self._next()
        if failure and last:
            self._link.engine_failed(rank, failure)
        return not failure

    def remove(self, rank: int) -> None:
        """Forget a rank that has ended."""
        with self._lock:
            self._under_way.pop(rank, None)
            self._joined.discard(rank)
            self._ranks.discard(rank)
            # A `Counter` raises no KeyError here, for a rank that never had a request.
            del self._tries[rank]
            if rank in self._waiting:
                self._waiting.remove(rank)
        self._next()

    def _next(self) -> None:
        with self._lock:
            chosen: list[tuple[int, str]] = []
            while self._connection and self._waiting and len(self._under_way) < self._at_once:
                rank = self._waiting.popleft()
                self._requests += 1
                self._tries[rank] += 1
                self._under_way[rank] = f"{self._series}-{self._requests}\n{self._connection}"
                chosen.append((rank, self._under_way[rank]))
        for rank, request in chosen:
            self._link.request_engine(rank, request)
