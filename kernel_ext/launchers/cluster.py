"""A pool's ``ipyparallel.Cluster``: its controller, its engine set, and the one thread that its coroutines run on.

It is brought up when it is first used, by ``Companion.cluster`` or ``Companion.wait_up``: it listens on ports and takes
memory, which a pool whose user only runs cells does without.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hvdlab.collectives.errors import HvdlabError, StartError
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.launchers.loading import load_ipyparallel
from hvdlab.kernel_ext.launchers.predecessor import Predecessor
from hvdlab.launch.forkserver.client import ForkServer
from hvdlab.launch.forkserver.messages import (
    CONTROLLER,
    LAUNCHER,
    Adopt,
    ControllerUp,
    Engine,
    Exited,
    Forked,
    ForkFailed,
    FromServer,
    Guard,
)
from hvdlab.launch.processes import describe, start_time
from hvdlab.launch.starter import Starter

if TYPE_CHECKING:
    from ipyparallel import Cluster  # type: ignore[import-untyped]  # has no types

    from hvdlab.kernel_ext.launchers.fork import ForkControllerLauncher, ForkEngineSetLauncher

T = TypeVar("T")

START_WITHIN = 40.0
"""Seconds that a controller has to start."""
END_WITHIN = 5.0
"""Seconds that a killed controller has to end."""
PAUSES = (0.0, 0.3, 1.0)
"""Seconds to wait before each further attempt, if another program took a port after the controller had chosen it."""

log = logging.getLogger(__name__)
log.addHandler(
    logging.NullHandler()
)  # ipyparallel's news are for users that configure logging, not for the notebook


class Companion:
    """The ipyparallel side of a pool.

    Args:
        fork_server: Forks the controller.
        pids: Gives rank to process id of the ranks that the fork server forked.
        connected: Called with the controller's connection information for engines (JSON) when it is up, and with an empty
            text when it has died. Ranks join each controller. Must not block.
        lost: Called with one line when a controller that was up has died. Must not block.
    """

    def __init__(
        self,
        fork_server: ForkServer,
        pids: Callable[[], Mapping[int, int]],
        connected: Callable[[str], None],
        lost: Callable[[str], None] | None = None,
    ) -> None:
        self._fork_server, self._pids, self._connected = fork_server, pids, connected
        self._lost = lost or log.warning
        self._starter: Starter | None = None
        # The cluster that an earlier process left, if it kept this pool.
        self._earlier = Predecessor.of(fork_server)
        self._serving: ForkControllerLauncher | None = None
        self._starting: asyncio.Task[Any] | None = None
        self._lock = threading.Lock()
        self._cluster: Cluster | None = None
        self._engines: ForkEngineSetLauncher | None = None
        self._up: Future[str] | None = None
        self._loop = asyncio.new_event_loop()
        self._guarded: tuple[str, ...] = ()
        self._closed = self._left = False
        self._thread = threading.Thread(target=self._run, name="hvdlab-ipyparallel", daemon=True)
        self._thread.start()

    # -- any thread -----------------------------------------------------------------------------------------------

    def set_starter(self, starter: Starter) -> None:
        """Have ``starter`` send the signals that ipyparallel sends to ranks. Call it once, before the cluster is brought up."""
        self._starter = starter

    @property
    def cluster(self) -> Cluster:
        """The cluster; brings it up if it is not. Does not wait for engines to register."""
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

    def hear(self, event: FromServer) -> None:
        """A message of the fork server about the controller, or a change of ranks. Fork server's reading thread."""
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
        """A rank has registered and listens: the controller may announce it."""
        self._fork_server.send(Engine(rank, True))

    def rank_gone(self, rank: int) -> None:
        """A rank that the fork server did not fork has ended."""
        with contextlib.suppress(StartError):  # the pool is being closed
            self._fork_server.send(Engine(rank, False))
        self.ranks_changed()

    def ranks_changed(self) -> None:
        """A rank has started or ended."""
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

        from hvdlab.kernel_ext.launchers.fork import (
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
            shutdown_atexit=False,
            parent=None,
            log=log,
            **options,
        )
        security = Path(self._cluster.profile_dir) / "security"
        names = [f"ipcontroller-{self._cluster.cluster_id}-{kind}.json" for kind in ("client", "engine")]
        keys = keys_file(self._cluster.profile_dir, self._cluster.cluster_id)
        self.guard(self._cluster.cluster_file, *(str(security / name) for name in names), str(keys))
        return self._cluster

    def guard(self, *paths: str) -> None:
        """Have the fork server remove these files when the pool ends, in whatever way."""
        self._guarded += paths
        self._fork_server.send(Guard(self._guarded))

    def watch_launcher(self, pid: int) -> None:
        """Have the fork server end this program, which started the ranks, when the pool ends, in whatever way."""
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
        self._connected(information)
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
        self._serving = controller  # its end is `_controller_ended`'s business from now on
        return information

    def _controller_ended(self, controller: ForkControllerLauncher, end: Exited, with_server: bool) -> None:
        """Report that a controller that was up has died. The next use of the cluster starts another one.

        A controller that is only being started is left to ``_start``.
        """
        cluster = self._cluster
        if cluster is None or controller is not self._serving or self._closed:
            return
        with self._lock:
            self._up = (
                None  # first of all: a caller that uses the cluster from now on gets the next controller
            )
        self._serving = None
        self._connected("")
        controller.notify_stop({"exit_code": end.code, "pid": end.pid, "identifier": controller.identifier})
        cluster.controller = None
        why = "with the process that ranks are forked from" if with_server else f"({describe(end)})"
        self._lost(
            f"ipyparallel's controller ended {why}; cells are not affected, the next use of `pool.cluster` starts "
            "another controller, and clients of ipyparallel have to be made again"
        )

    async def _take_over_ranks(self, cluster: Cluster) -> None:
        pids = {str(rank): pid for rank, pid in self._pids().items()}
        name = await cluster.start_engines(len(pids), starter=self._starter, pids=pids)
        self._engines = cluster.engines[name]

    def _update_engines(self) -> None:
        cluster, engines = self._cluster, self._engines
        if cluster is None or engines is None or engines.state == "after":
            return
        engines.update(self._pids())
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
            cluster.engines.clear()
        await cluster.stop_cluster()


def _log_failure(up: Future[str]) -> None:
    """Log why the start failed. The pool works without the controller; a caller that asks for the cluster gets the error."""
    if not up.cancelled() and up.exception() is not None:
        log.warning("ipyparallel's controller could not be started: %s", up.exception())
