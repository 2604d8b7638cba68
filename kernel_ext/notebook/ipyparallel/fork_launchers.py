"""ipyparallel's view of a fork server's children: launchers for the controller and for the set of engines.

The pool forks its ranks itself, before there is a ``Cluster``, since a rank does not need ipyparallel to be ready. The
engine set's launcher takes over the ranks that are there, and serves ipyparallel's requests to signal or stop them.

The controller, its clients and its engines know each other by a pair of CurveZMQ keys. Without them, ZeroMQ's ports take
subscriptions from any process that reaches them, also from those of other users of this host. The public key lies in the
controller's connection files, which only their user can read. All controllers of a cluster have the same pair: the sockets of
an engine live as long as the engine, and know one key.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq
from ipyparallel.cluster.launcher import (  # type: ignore[import-untyped]  # has no types
    EngineLauncher,
    LocalControllerLauncher,
    NotRunning,
)
from traitlets import Any as AnyTrait
from traitlets import Dict

from hvdlab.collectives import system
from hvdlab.launch.forkserver.messages import CONTROLLER, PORTS_TAKEN, Exited, Fork, Signal
from hvdlab.launch.processes import describe


class ForkControllerLauncher(LocalControllerLauncher):  # type: ignore[misc]  # ipyparallel is untyped
    """Lets the fork server fork the controller.

    Attributes:
        fork_server: The fork server.
        forked, listening, ended: The pool completes them when the fork server reports these events.
    """

    # How the cluster's file names it, for other processes to import.
    entrypoint_name = f"{__name__}.ForkControllerLauncher"

    fork_server: Any = AnyTrait()

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.forked: Future[int] = Future()
        self.listening: Future[None] = Future()
        self.ended: Future[Exited] = Future()

    @property
    def keys_file(self) -> Path:
        """Return the file with the keys of all controllers of this cluster."""
        return keys_file(self.profile_dir, self.cluster_id)

    async def start(self) -> None:
        """Have the fork server fork the controller; returns when it has a process id."""
        assert self.fork_server is not None
        environment = {**os.environ, **self.get_env(), **curve_environment(self.keys_file)}
        argv = (*self.cluster_args, *self.controller_args, "--usethreads", "--log-level=WARN")
        self.fork_server.send(Fork.of(CONTROLLER, environment, os.getcwd(), sys.path, argv))
        self.pid = await outcome_of(self.forked)
        try:
            self.process = psutil.Process(self.pid)
        except psutil.NoSuchProcess:
            raise RuntimeError("ipyparallel's controller ended as soon as it was forked") from None
        self.notify_start(self.pid)

    async def get_connection_info(self, timeout: float | None = None) -> Any:
        """Wait until the controller listens, and read its connection files."""
        if self.fork_server is not None:
            limit = self.connection_info_timeout if timeout is None else timeout
            await asyncio.wait_for(outcome_of(self.listening), limit if limit >= 0 else None)
        return await super().get_connection_info(timeout)

    async def stop(self) -> None:
        """End the controller: by SIGTERM, and by SIGKILL if it takes too long."""
        if self.fork_server is None:  # found by its file, in another process
            await super().stop()
            return
        if not self.ended.done():
            self.fork_server.send(Signal(CONTROLLER, signal.SIGTERM))
            try:
                # Shielded: a wait that times out cancels its future, and with it `ended`, which `has_ended`
                # could not complete then.
                await asyncio.wait_for(
                    asyncio.shield(asyncio.wrap_future(self.ended)), self.stop_seconds_until_kill
                )
            except TimeoutError:
                self.fork_server.send(Signal(CONTROLLER, signal.SIGKILL))
                await asyncio.wait_for(asyncio.wrap_future(self.ended), self.stop_seconds_until_kill)
        self.notify_stop(
            {"exit_code": self.ended.result().code, "pid": self.pid, "identifier": self.identifier}
        )

    def get_output(self, remove: bool = False) -> str:
        """Return the controller's last words, if it has ended."""
        return self.ended.result().tail if self.ended.done() else ""

    def was_forked(self, outcome: int | Exception) -> None:
        """Complete ``forked`` with the controller's process id, or with the error if it could not be forked. Any thread."""
        _complete(self.forked, outcome)

    def is_up(self) -> None:
        """Complete ``listening``: the controller listens. Any thread."""
        _complete(self.listening, None)

    def has_ended(self, event: Exited) -> None:
        """Complete all futures: the fork server has reaped the controller. Any thread."""
        why = RuntimeError(f"ipyparallel's controller ended: {describe(event)}\n{event.tail}".rstrip())
        _complete(self.forked, why)
        _complete(self.listening, why)
        _complete(self.ended, event)

    @property
    def ports_taken(self) -> bool:
        """Return whether the controller has ended because it could not have its ports."""
        return self.ended.done() and self.ended.result().code == PORTS_TAKEN

    async def surely_gone(self, seconds: float) -> None:
        """End the controller at once, if it has not ended. Raises ``TimeoutError`` if it lives after ``seconds``."""
        if self.ended.done() or not self.forked.done() or self.forked.exception() is not None:
            return
        self.fork_server.send(Signal(CONTROLLER, signal.SIGKILL))
        await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self.ended)), seconds)


def keys_file(profile_dir: str, cluster_id: str) -> Path:
    """Return the path of the file with the keys of a cluster's controllers are."""
    return Path(profile_dir) / "security" / f"ipcontroller-{cluster_id}-curve.json"


async def outcome_of(future: Future[Any]) -> Any:
    """Wait for a future that others wait for, too; it goes on if this wait is cancelled.

    The callback looks at its exception: otherwise asyncio would report, at the end of the process, that the exception of a future
    which failed after the wait was never retrieved.
    """
    wrapped = asyncio.wrap_future(future)
    wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(wrapped)


def _complete(future: Future[Any], outcome: Any) -> None:
    """Complete a future, unless it is too late: it is completed already, or was cancelled."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class ForkEngineSetLauncher(EngineLauncher):  # type: ignore[misc]  # ipyparallel is untyped
    """The ranks of a pool that its starter starts one by one.

    Attributes:
        starter: The starter that started them.
        pids: Rank to process id; the pool keeps it up to date.
    """

    entrypoint_name = f"{__name__}.ForkEngineSetLauncher"

    starter: Any = AnyTrait()
    pids: Dict[str, int] = Dict().tag(to_dict=True)

    def __init__(self, work_dir: str = ".", config: Any = None, **kwargs: Any) -> None:
        super().__init__(work_dir=work_dir, config=config, **kwargs)
        self._stopped: Future[None] = Future()

    @classmethod
    def from_dict(cls, d: dict[str, Any], **kwargs: Any) -> ForkEngineSetLauncher:
        """Return the launcher that another process makes from the cluster's file."""
        launcher: ForkEngineSetLauncher = super().from_dict(d, **kwargs)
        launcher.pids = {rank: pid for rank, pid in launcher.pids.items() if psutil.pid_exists(pid)}
        if not launcher.pids:
            raise NotRunning("no rank is left")
        return launcher

    def find_args(self) -> list[str]:
        """Return a name for logs; nothing is executed."""
        return ["hvdlab ranks"]

    def start(self, n: int) -> list[int]:
        """Take over the ranks that the pool has forked."""
        self.n = n
        self.notify_start(list(self.pids.values()))
        return list(self.pids.values())

    def signal(self, sig: int) -> None:
        """Send a signal to every rank."""
        for rank, pid in list(self.pids.items()):
            if self.starter is not None:
                self.starter.signal(int(rank), int(sig))
            else:
                os.kill(pid, sig)

    async def stop(self) -> None:
        """End every rank."""
        self.signal(signal.SIGTERM)
        if self.starter is not None and self.pids:
            await asyncio.wrap_future(self._stopped)
        self.notify_stop({"exit_code": 0, "identifier": self.identifier})

    def update(self, pids: Mapping[int, int]) -> None:
        """Take over the ranks that live now: rank to process id."""
        self.pids = {str(rank): pid for rank, pid in sorted(pids.items())}
        self.n = len(pids)
        if not pids and not self._stopped.done():
            self._stopped.set_result(None)


log = logging.getLogger(__name__)

_LIMIT = 4096


class _Keys(msgspec.Struct, frozen=True):
    public: str
    secret: str


def curve_environment(path: Path) -> dict[str, str]:
    """Return the environment variables that have a controller use the pair of keys in this file, which is made if there is none.

    Raises:
        OSError: The file does not belong to this user alone, or can't be made.
    """
    if not zmq.has("curve"):
        log.warning(
            "this ZeroMQ has no encryption: other users of this host can read what ipyparallel publishes"
        )
        return {}
    keys = _keys(path)
    return {"IPP_ENABLE_CURVE": "1", "IPP_CURVE_PUBLICKEY": keys.public, "IPP_CURVE_SECRETKEY": keys.secret}


def _keys(path: Path) -> _Keys:
    public, secret = zmq.curve_keypair()
    made = _Keys(public.decode(), secret.decode())
    try:
        system.create_private(path, msgspec.json.encode(made).decode())
    except FileExistsError:
        return _read(path)
    return made


def _read(path: Path) -> _Keys:
    # Opened first and checked then: the file at the path could be exchanged between a check and the opening.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} must belong to user {os.geteuid()} alone (mode 0600)")
        try:
            return msgspec.json.decode(file.read(_LIMIT), type=_Keys)
        except msgspec.DecodeError as error:
            raise OSError(f"{path} holds no keys: {error}") from error
