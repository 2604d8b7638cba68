"""Runs one suite of collective cases over every data plane, in processes that stay alive between cases.

How to add a plane
------------------
1. Add a :class:`PlaneUnderTest` to ``PLANES`` in ``conformance/planes/planes_under_test.py``: the plane's class as
   ``module:Class``, the group sizes to test, and, if the processes can't simply be spawned (MPI), a launcher.
2. No more: the tests of this directory are parametrised over ``PLANES``. A plane whose ``unavailable()`` gives
   a reason is skipped with it. Operations that a plane can't do by its nature are listed in ``lacks``.

How it works
------------
:class:`WorkerGroup` starts ``conformance/planes/worker.py`` once per member; each connects to the group's Unix socket and
sends its index. ``group.configure()`` begins a generation: every worker gets a ``PlaneContext`` (with a fresh memfd if the
plane needs one, and a key-value store served by the parent) and connects a new plane. ``group.run("module:function",
**params)`` calls ``function(actor, **params)`` in all workers at once and returns the results by index; an exception
in any worker is raised in the test, with the worker's traceback. ``group.outcomes(...)`` returns results and
exceptions side by side instead. A call that takes longer than its timeout kills the group and raises
:class:`WorkersHung` with the Python stacks of all workers.

A launcher is ``launcher(size, socket_path, environment) -> list of Popen-like``. The worker finds its index in
``--index``, or in the variables that MPI launchers set (``PMI_RANK``, ``OMPI_COMM_WORLD_RANK``).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, Protocol

from conformance.planes.store import StoreServer
from support.ranks import forked as forked_workers
from support.ranks.resident import Process

TESTS = Path(__file__).resolve().parents[2]
WORKER = TESTS / "conformance/planes/worker.py"
CALL_TIMEOUT = 60.0  # seconds after which the group is killed as hung
CONFIGURE_TIMEOUT = 60.0
"""Seconds for connecting; the first time every worker imports what its plane stands on."""
START_TIMEOUT = 120.0  # seconds until all workers have connected
END_TIMEOUT = 40.0
"""Seconds for the interpreter of a worker to end, with torch and MPI loaded, on a busy machine."""
OTHERS_TIMEOUT = 3.0
"""Seconds that the others get to answer after one worker raised."""

Launcher = Callable[[int, str, Mapping[str, str]], "Sequence[Process]"]


def fork_with(modules: tuple[str, ...]) -> Launcher:
    """Return a launcher that forks each member from a process that has imported ``modules``."""

    def launch(size: int, path: str, environment: Mapping[str, str]) -> Sequence[Process]:
        return [
            forked_workers.fork(
                "conformance.planes.worker",
                ["--socket", path, "--index", str(i), "--size", str(size)],
                environment,
                modules=modules,
            )
            for i in range(size)
        ]

    return launch


WITH_TORCH = fork_with(forked_workers.WITH_TORCH)
LIGHT = fork_with(forked_workers.LIGHT)


class Service(Protocol):
    """Something beside the workers that a group needs as long as it lives.

    Attributes:
        environment: Variables that describe it to the workers.
    """

    environment: Mapping[str, str]

    def expect(self, members: Sequence[int]) -> None:
        """The next generation is to consist of these workers."""

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class PlaneUnderTest:
    """A plane and how to test it.

    Attributes:
        name: Shown in test ids.
        target: ``module:Class`` of the plane.
        sizes: Group sizes.
        launcher: Starts the workers.
        memory: Bytes of the memfd for a context of ``size`` members, or ``None`` if the plane needs none.
        options: ``PlaneContext.options``.
        lacks: Abilities that the plane does not have: ``abort`` (end a waiting operation), ``survive`` (go on after a
            member's death with the processes that are left), ``ragged`` (reducescatter by any counts but Horovod's
            rule), ``messages`` (from one member to another: those of a device's tensors are the host plane's).
        environment: Extra variables of the workers.
        actor: ``module:function`` that makes the actor from ``target`` and the context, for targets that are no plane.
        service: Starts what a group of this size needs beside its workers.
        every: Of the cases of a test (:mod:`conformance.planes.matrix`) only every so-manieth runs at each size: the sums of their
            parameters' positions are dealt out to the sizes in turn. So each case runs at some size, and each value of
            each parameter (operation, dtype, …) at each size where it meets enough values of another one. Tests with
            fewer cases than this run in full.
        normally: As ``every``, but only in a normal run: ``make soak`` runs all.
        library: The plane stands on a library whose first use opens descriptors for the life of the process; they
            are no leak of the plane.
        hosts: A letter for each worker: those with the same one are on one host. All are on one if it is empty.
        missing: Returns why the plane can't be tested here, where the plane itself only finds out inside its launcher.
    """

    name: str
    target: str
    sizes: tuple[int, ...] = (1, 2, 3, 4)
    launcher: Launcher = WITH_TORCH
    memory: Callable[[int, Mapping[str, str]], int] | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    lacks: frozenset[str] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)
    library: bool = False
    missing: Callable[[], str | None] | None = None
    actor: str = "conformance.planes.actor:plane_actor"
    service: Callable[[int], Service] | None = None
    every: int = 1
    normally: int = 1
    hosts: str = ""

    def host(self, worker: int) -> str:
        """Return host key of a worker."""
        return f"host-{self.hosts[worker]}" if self.hosts else "here"

    def unavailable(self) -> str | None:
        """Return why it can't be tested here: the plane's own answer, asked in a process of its own."""
        if self.missing is not None:
            return self.missing()
        module, _, cls = self.target.partition(":")
        code = f"import {module} as m; print(m.{cls}.unavailable() or '', end='')"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, **self.environment},
        )  # fmt: skip
        return done.stdout or None if done.returncode == 0 else done.stderr[-2000:]


@dataclass(frozen=True)
class Failure:
    """An exception in a worker. ``error`` is the exception itself if it could be sent, otherwise ``None``."""

    kind: str
    text: str
    traceback: str
    error: BaseException | None = None


@dataclass(frozen=True)
class Died:
    """A worker's connection ended during a call."""

    returncode: int | None


class WorkerFailed(AssertionError):
    """At least one worker raised or died; the text has the first traceback and one line for each other."""

    def __init__(self, function: str, outcomes: list[Any]) -> None:
        self.outcomes = outcomes
        bad = [(i, o) for i, o in enumerate(outcomes) if isinstance(o, Failure | Died)]
        lines = [
            f"worker {i}: {o.kind}: {o.text}" if isinstance(o, Failure) else f"worker {i}: {o}"
            for i, o in bad
        ]
        trace = next((o.traceback for _, o in bad if isinstance(o, Failure)), "")
        super().__init__(f"{function}\n" + "\n".join(lines) + "\n" + trace)


class WorkersHung(AssertionError):
    """A call did not end in time; the group was killed. The text has every worker's stacks."""


class WorkerGroup:
    """Resident workers of one plane and size. Not thread-safe."""

    def __init__(self, plane: PlaneUnderTest, size: int) -> None:
        self.plane, self.size = plane, size
        self._begin()

    def _begin(self) -> None:
        size = self.size
        self.generation = 0
        self.clean = False
        self.closed = False
        self._processes: Sequence[Process] = []
        self._directory = Path(tempfile.mkdtemp(prefix="conf-"))
        self._store = StoreServer(str(self._directory / "store"))
        self._service: Service | None = None
        self._connections: list[Connection | None] = [None] * size
        self._pids = [0] * size
        try:
            self._start()
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        path = str(self._directory / "control")
        if self.plane.service is not None:
            self._service = self.plane.service(self.size)
        environment = {
            **os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            "HVDLAB_CONFORMANCE_STORE": str(self._directory / "store"),
            "HVDLAB_CONFORMANCE_DUMPS": str(self._directory), **self.plane.environment,
            **(self._service.environment if self._service else {}),
        }  # fmt: skip
        with Listener(path, family="AF_UNIX", backlog=self.size) as listener:
            self._processes = self.plane.launcher(self.size, path, environment)
            deadline = time.monotonic() + START_TIMEOUT
            for _ in range(self.size):
                self._await_newcomer(listener, deadline)
                connection = listener.accept()
                index, pid = connection.recv()
                self._connections[index], self._pids[index] = connection, pid

    def _await_newcomer(self, listener: Listener, deadline: float) -> None:
        """Return when a worker is connecting; raise if a process ended instead, or none came in time."""
        listening = listener._listener._socket  # type: ignore[attr-defined]  # not offered publicly
        endings = {os.pidfd_open(p.pid): p for p in self._processes}
        try:
            ready = wait([listening, *endings], max(0.0, deadline - time.monotonic()))
        finally:
            for fd in endings:
                os.close(fd)
        if listening not in ready:
            codes = [p.poll() for p in self._processes]
            raise AssertionError(f"{self.plane.name}: workers did not start; exit codes {codes}")

    def pid(self, index: int) -> int:
        return self._pids[index]

    @property
    def living(self) -> list[int]:
        return [i for i, c in enumerate(self._connections) if c is not None]

    def configure(self, members: list[int] | None = None, timeout: float = CONFIGURE_TIMEOUT) -> None:
        """Begin a generation: a new plane on all living workers, or on ``members`` (worker indices, in that order)."""
        members = self.living if members is None else members
        self.generation += 1
        if self._service is not None:
            self._service.expect(members)
        size = self.plane.memory and self.plane.memory(len(members), self.plane.options)
        fd = os.memfd_create("hvdlab-conformance") if size is not None else -1
        try:
            if fd >= 0:
                os.ftruncate(fd, size or 0)
            for position, worker in enumerate(members):
                spec = {
                    "actor": self.plane.actor, "target": self.plane.target, "generation": self.generation, "index": position, "size": len(members),
                    "ranks": tuple(members), "options": dict(self.plane.options), "memory": fd >= 0, "library": self.plane.library,
                    "hosts": tuple(self.plane.host(m) for m in members),
                }  # fmt: skip
                connection = self._connections[worker]
                assert connection is not None, f"worker {worker} is dead"
                connection.send(("configure", spec))
                if fd >= 0:
                    _send_fd(connection, fd)
        finally:
            if fd >= 0:
                os.close(fd)
        outcomes = self._collect(members, timeout, "configure")
        if any(isinstance(o, Failure | Died) for o in outcomes):
            raise WorkerFailed("configure", outcomes)
        self.clean = True

    def outcomes(
        self, function: str, *, timeout: float = CALL_TIMEOUT, only: list[int] | None = None, **params: Any
    ) -> list[Any]:
        """Call ``function(actor, **params)`` in all living workers (or ``only`` these); result, Failure or Died each."""
        workers = self.living if only is None else only
        for worker in workers:
            connection = self._connections[worker]
            assert connection is not None, f"worker {worker} is dead"
            connection.send(("call", function, params))
        outcomes = self._collect(workers, timeout, function)
        if any(isinstance(o, Failure | Died) for o in outcomes):
            self.clean = False
        return outcomes

    def run(self, function: str, *, timeout: float = CALL_TIMEOUT, **params: Any) -> list[Any]:
        """Like :meth:`outcomes`, but raise :class:`WorkerFailed` if any worker failed."""
        outcomes = self.outcomes(function, timeout=timeout, **params)
        if any(isinstance(o, Failure | Died) for o in outcomes):
            raise WorkerFailed(f"{function}({params})", outcomes)
        return outcomes

    def _collect(self, workers: list[int], timeout: float, what: str) -> list[Any]:
        deadline = time.monotonic() + timeout
        outcomes: dict[int, Any] = {}
        while len(outcomes) < len(workers):
            waiting = {self._connections[w]: w for w in workers if w not in outcomes}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))  # type: ignore[arg-type]  # no None here
            if not ready:
                stuck = sorted(waiting.values())
                failures = [
                    f"worker {w}: {o.traceback}" for w, o in outcomes.items() if isinstance(o, Failure)
                ]
                text = "\n".join([f"{what}: no answer from workers {stuck}", *failures, self._dump(stuck)])
                self.kill()
                raise WorkersHung(text)
            for connection in ready:
                worker = waiting[connection]  # type: ignore[index]  # only our own connections are waited for
                outcomes[worker] = self._receive(worker)
                if isinstance(outcomes[worker], Failure):
                    # The others may wait for the one that failed.
                    deadline = min(deadline, time.monotonic() + OTHERS_TIMEOUT)
        return [outcomes[w] for w in workers]

    def _receive(self, worker: int) -> Any:
        connection = self._connections[worker]
        assert connection is not None
        try:
            kind, payload = connection.recv()
        except (EOFError, ConnectionResetError):
            connection.close()
            self._connections[worker] = None
            return Died(self._returncode(worker))
        return payload if kind == "result" else Failure(**payload)

    def _returncode(self, worker: int) -> int | None:
        process = next((p for p in self._processes if p.pid == self._pids[worker]), None)
        return process.wait(5) if process else None

    def _dump(self, workers: list[int]) -> str:
        """Ask each worker for the Python stacks of its threads (SIGUSR1, faulthandler)."""
        texts = []
        for worker in workers:
            if self._connections[worker] is None:
                continue
            os.kill(self._pids[worker], signal.SIGUSR1)
            dump = self._directory / f"dump-{worker}"
            deadline = time.monotonic() + 2
            while time.monotonic() < deadline and not dump.read_text().rstrip().endswith("<module>"):
                time.sleep(0.01)
            texts.append(f"--- worker {worker}\n{dump.read_text()}")
        return "\n".join(texts)

    def close(self) -> None:
        """End the workers in the ordinary way and wait for them; raises if one left a thread or a descriptor."""
        if self.closed:
            return
        workers = self.living
        try:
            for worker in workers:
                connection = self._connections[worker]
                assert connection is not None
                connection.send(("close", None))
            outcomes = self._collect(workers, CALL_TIMEOUT, "close")
            for process in self._processes:
                process.wait(END_TIMEOUT)
        finally:
            self.kill()
        reports = [f"worker {w} left behind: {o}" for w, o in zip(workers, outcomes, strict=True) if o]
        if reports:
            raise AssertionError("\n".join(reports))

    def renew(self) -> None:
        """Kill them, and start others."""
        self.kill()
        self._begin()

    def kill(self) -> None:
        """SIGKILL the remaining workers and release all resources. Idempotent."""
        if self.closed:
            return
        self.closed = True
        try:
            for process in self._processes:
                process.kill()
                process.wait(END_TIMEOUT)
            # Under a launcher such as mpiexec the workers are no children of ours.
            children = {p.pid for p in self._processes}
            for pid, connection in zip(self._pids, self._connections, strict=True):
                if connection is not None and pid not in children:
                    _kill_quietly(pid)
        finally:
            self._release()

    def _release(self) -> None:
        for connection in self._connections:
            if connection is not None:
                connection.close()
        self._connections = [None] * self.size
        self._store.close()
        if self._service is not None:
            self._service.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _kill_quietly(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has ended by itself
        return


def _send_fd(connection: Connection, fd: int) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as channel:
        socket.send_fds(channel, [b"F"], [fd])
