"""Resident rank processes for tests: a coordinator and N processes that run functions of the test module.

::

    def reduce(value):                       # runs on each rank; module level
        return hvd.allreduce(np.full(3, value)).tolist()

    ranks = resident_ranks(2)                # a fixture of the module

    def test_reduce(ranks):
        assert ranks.run(reduce, per_rank=[(1,), (3,)]) == [[2, 2, 2]] * 2

A function is found by its file and qualified name, so it must be at module level (or a static method). Arguments,
results and exceptions are pickled; a rank's exception comes back as itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Literal, Self

import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import AbortedError
from support.patience import PATIENCE
from support.ranks import forked as forked_workers

Process = subprocess.Popen[bytes] | forked_workers.ForkedProcess

MOMENT = 1.0
"""Seconds in which a rank that is not stuck answers after all, or shows its stacks."""


class RankFailed(Exception):
    """A function failed on some ranks; ``errors`` has the exception (``RankGone`` for a lost process) by rank."""

    def __init__(self, errors: dict[int, BaseException], outcomes: list[Any]) -> None:
        self.errors, self.outcomes = errors, outcomes
        super().__init__("; ".join(f"rank {r}: {type(e).__name__}: {e}" for r, e in errors.items()))
        for rank, error in errors.items():
            for where in getattr(error, "__notes__", ()):
                self.add_note(f"on rank {rank}:\n{where}")


class RankGone(Exception):
    """The process of a rank ended before it answered."""


class Running:
    """Function that runs on some ranks."""

    def __init__(self, ranks: Ranks, numbers: Sequence[int]) -> None:
        self._ranks = ranks
        self.numbers = list(numbers)

    def outcomes(self, timeout: float = 30) -> list[Any]:
        """Return result or exception of each rank, in the order of the ranks given."""
        deadline = time.monotonic() + timeout
        found: dict[int, Any] = {}
        connections = {self._ranks.connections[r]: r for r in self.numbers}
        while len(found) < len(self.numbers):
            left = [c for c, r in connections.items() if r not in found]
            ready = wait(left, max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = [r for r in self.numbers if r not in found]
                for rank in missing:
                    # A rank that has died shows no stack; the others' stacks are of use all the same.
                    with contextlib.suppress(ProcessLookupError):
                        self._ranks.processes[rank].send_signal(
                            signal.SIGUSR1
                        )  # it shows where its threads are
                # A machine that stood still lets the time pass for us and for them.
                stood_still = len(wait(left, MOMENT)) == len(left)
                hint = "; they did a moment later: did the whole machine stand still?" if stood_still else ""
                raise TimeoutError(
                    f"ranks {missing} did not answer within {timeout:g} s; others: {found}{hint}"
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = connections[connection]
                try:
                    _ok, value = connection.recv()
                except (EOFError, ConnectionError):
                    value = RankGone(f"rank {rank} ended")
                found[rank] = value
        return [found[r] for r in self.numbers]

    def results(self, timeout: float = 30) -> list[Any]:
        """Return result of each rank; raises ``RankFailed`` if any raised."""
        outcomes = self.outcomes(timeout)
        errors = {r: o for r, o in zip(self.numbers, outcomes, strict=True) if isinstance(o, BaseException)}
        if errors:
            raise RankFailed(errors, outcomes)
        return outcomes


class Ranks:
    """Coordinator and ``size`` rank processes, initialized unless ``init`` is false.

    With ``tls`` they reach the coordinator as ranks of other hosts do. With ``keep`` it can have a successor.
    """

    END_TIMEOUT = 5.0
    """Seconds that a rank gets to end of itself."""

    def __init__(
        self,
        size: int,
        *,
        init: bool = True,
        env: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
        timeout: float = 60,
        tls: bool = False,
        keep: bool = False,
    ) -> None:
        self.size = size
        self._tls, self._keep, self._given = tls, keep, dict(env or {})
        self._imports = list(imports)
        self._begin(_init if init else None, timeout)

    def _begin(self, init: Callable[[], None] | None, timeout: float) -> None:
        self._begun = (init, timeout)
        self.closed = False
        self.processes: list[Process] = []
        self.connections: list[Connection] = []
        self._begin_coordinator()
        try:
            for rank in range(self.size):
                self._spawn(rank)
            if init is not None:
                self.run(init, timeout=timeout)
        except BaseException:
            self.close()
            raise

    def _begin_coordinator(self) -> None:
        self.coordinator = CoordinatorProcess.start(
            size=self.size,
            tcp_host="127.0.0.1" if self._tls else None,
            keep=self._keep,
            timeout=PATIENCE,
        )
        self._env = {
            "HVDLAB_COORDINATOR": self.coordinator.tls_address or self.coordinator.address,
            "HVDLAB_CERT": self.coordinator.certificate or "",
            "HVDLAB_METRICS_INTERVAL": "0",  # so that only the test's own acts are recorded, and sent then
            **self._given,
        }

    def _spawn(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        env = {
            **os.environ,
            "HVDLAB_TOKEN": self.coordinator.token,
            "HVDLAB_RANK": str(rank),
            "HVDLAB_SIZE": str(self.size),
            **forked_workers.FIXED,
            **self._env,
        }
        with ours, theirs:
            process = forked_workers.fork(
                "support.ranks.worker", self._imports, env, fds=[theirs.fileno()], modules=self._modules()
            )
            connection = Connection(os.dup(ours.fileno()))
        if rank < len(self.processes):
            self.processes[rank], self.connections[rank] = process, connection
        else:
            self.processes.append(process)
            self.connections.append(connection)

    def _modules(self) -> tuple[str, ...]:
        if any(name.startswith("hvdlab.torch") for name in self._imports):
            examples = "sklearn.datasets" in self._imports
            return forked_workers.FOR_EXAMPLES if examples else forked_workers.FOR_TRAINING
        if any(name.startswith(("hvdlab.tensorflow", "hvdlab.keras")) for name in self._imports):
            return forked_workers.WITH_TENSORFLOW
        needs_torch = self._env.get("HVDLAB_PLANE") == "gloo" or "torch" in self._imports
        return forked_workers.WITH_TORCH if needs_torch else forked_workers.LIGHT

    def start(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: Sequence[int] | None = None,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
    ) -> Running:
        """Start ``function(*args)`` (or ``*per_rank[i]``) on some ranks, all by default."""
        numbers = range(self.size) if ranks is None else ranks
        file = sys.modules[function.__module__].__file__
        for i, rank in enumerate(numbers):
            own = args if per_rank is None else per_rank[i]
            self.connections[rank].send((file, function.__module__, function.__qualname__, own))
        return Running(self, list(numbers))

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 30, **kwargs: Any) -> list[Any]:
        """Run and return the results; raises ``RankFailed``."""
        return self.start(function, *args, **kwargs).results(timeout)

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout: float = 30, **kwargs: Any
    ) -> list[Any]:
        """Run and return results and exceptions."""
        return self.start(function, *args, **kwargs).outcomes(timeout)

    def catch_up(self) -> None:
        """Wait until the coordinator has handled all messages of ranks, and ranks its answers.

        A rank's submission before it knows of an abort fails with that abort, while others wait for it. Tests that go
        on after an abort come by another way than the coordinator's connections, so no other mechanism orders the two.
        """
        self.run(_hear_from_oneself)
        self.run(_hear_from_oneself)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process of a rank; after SIGKILL also wait for its end."""
        self.processes[rank].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[rank].wait(PATIENCE)

    def respawn(self, rank: int) -> None:
        """Start a new process under an old number (not initialized)."""
        self.connections[rank].close()
        self._spawn(rank)

    def renew(self) -> None:
        """Kill all of them, and start others."""
        for process in self.processes:
            process.kill()
        self.close()
        self._begin(*self._begun)

    def close(self) -> None:
        self.closed = True
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            try:
                process.wait(self.END_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._end_coordinator()

    def _end_coordinator(self) -> None:
        self.coordinator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def meet() -> None:
    """Wait on ranks after an operation was given up until all have heard of it, so that their next submissions meet."""
    while True:
        with contextlib.suppress(AbortedError):
            hvd.barrier()
            return


def _init() -> None:
    from hvdlab.collectives import context

    context.init()


def _hear_from_oneself() -> None:
    """Send mail to this rank, and wait until it is there: the connection keeps the order."""
    from hvdlab.collectives import context

    engine, there = context.engine(), threading.Event()
    engine.on_mail(f"to oneself {id(there)}", lambda sender, body: there.set())
    engine.post(f"to oneself {id(there)}", b"", to=[engine.rank])
    assert there.wait(PATIENCE), "the coordinator does not pass on what a rank says to itself"


def resident_ranks(
    size: int,
    *,
    scope: Literal["function", "class", "module", "package", "session"] = "module",
    **options: Any,
) -> Any:
    """Return a fixture: resident ranks, which the tests of its scope share.

    Args:
        size: Number of ranks.
        scope: The fixture's, as pytest names it.
        options: Those of `Ranks`, such as ``env``, ``imports`` and ``tls``.
    """

    @pytest.fixture(scope=scope)
    def resident() -> Iterator[Ranks]:
        with Ranks(size, **options) as ranks:
            yield ranks

    return resident
