"""Ranks of a fork server and a coordinator, without a pool around them."""

from __future__ import annotations

import itertools
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence

import psutil

from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.settings import WorldEnvironment, rank_environment
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.forkserver.program import PROGRAM_NAME
from hvdlab.kernel_ext.wire.cells import CellDone, RunCell
from hvdlab.kernel_ext.wire.channel import READY
from hvdlab.kernel_ext.wire.codec import TO_POOL, TO_RANK, decode_to_pool, encode
from hvdlab.launch.forkserver.client import ForkServer
from hvdlab.launch.forkserver.messages import Exited, Fork, ForkFailed, FromServer
from support.patience import GONE, PATIENCE


class ForkedRanks:
    """Started by :meth:`fork`; ended by :meth:`close`, which asserts that none is left.

    Attributes:
        news: The fork server's reports.
        losses: Why fork servers died. Each gets a successor, unless ``rebuild`` is off.
    """

    def __init__(self, warm: ForkServer | None = None, coordinator: CoordinatorProcess | None = None) -> None:
        self.coordinator = coordinator or CoordinatorProcess.start(timeout=PATIENCE)
        self.client = Client.connect(self.coordinator.address, self.coordinator.client_token)
        self.changed = threading.Condition()
        self.news: list[FromServer] = []
        self.losses: list[str] = []
        self.ready: list[int] = []
        self.done: dict[str, CellDone] = {}
        self.rebuild = True
        self._cells = itertools.count()
        self._pids: set[int] = set()
        self.client.on_mail(READY, lambda rank, body: self._note(self.ready, rank))
        self.client.on_mail(TO_POOL, self._answered)
        self.warm = warm or ForkServer.start(PROGRAM_NAME, {**os.environ, "HVDLAB_PRELOAD": ""})
        self.warm.listen(lambda message: self._note(self.news, message), self._lost)

    # -- callbacks ------------------------------------------------------------------------------------------------

    def _note(self, where: list[object] | list[int] | list[FromServer] | list[str], what: object) -> None:
        with self.changed:
            where.append(what)  # type: ignore[arg-type]  # the caller's list is of its kind
            self.changed.notify_all()

    def _lost(self, reason: str) -> None:
        if self.rebuild:
            self.warm.respawn()
        self._note(self.losses, reason)

    def _answered(self, rank: int, body: bytes) -> None:
        answer = decode_to_pool(body)
        if isinstance(answer, CellDone):
            with self.changed:
                self.done[answer.cell] = answer
                self.changed.notify_all()

    # -- acts of tests --------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE), (self.news, self.losses)

    def fork(self, ranks: Sequence[int], *, expect: Sequence[int] = ()) -> None:
        """Fork these ranks, and wait until they take cells and their processes are known."""
        world = WorldEnvironment(self.coordinator.address, self.coordinator.token)
        self.client.expect(tuple(expect or ranks))
        before = len(self.ready)
        for rank in ranks:
            environment = rank_environment(os.environ, world, rank, len(expect or ranks))
            self.warm.send(Fork.of(rank, environment, os.getcwd(), sys.path))
        # A rank takes cells by another connection: that news can come before that of its process.
        self.wait(
            lambda: (
                (len(self.ready) >= before + len(ranks) and set(ranks) <= self.warm.children().keys())
                or bool(self.failures())
            )
        )
        assert not self.failures()
        self._pids |= {child.pid for child in self.warm.children().values()}

    def failures(self) -> list[str]:
        return [message.text for message in self.news if isinstance(message, ForkFailed)]

    def pid(self, rank: int) -> int:
        return self.warm.children()[rank].pid

    def start(self, rank: int, source: str) -> str:
        """Run a cell; returns its name."""
        cell = f"cell{next(self._cells)}"
        self.client.cell_started(cell, [rank])
        self.client.post(TO_RANK, encode(RunCell(cell, "[1]", source)), [rank])
        return cell

    def run(self, rank: int, source: str) -> str:
        """Run a cell, and return the representation of its value."""
        cell = self.start(rank, source)
        self.wait(lambda: cell in self.done)
        assert self.done[cell].error is None, self.done[cell].error
        return self.done[cell].value_repr

    def end_of(self, rank: int) -> Exited:
        """Return how the rank ended, once it has."""

        def ends() -> list[Exited]:
            return [
                message for message in self.news if isinstance(message, Exited) and message.number == rank
            ]

        self.wait(lambda: bool(ends()))
        return ends()[-1]

    def close(self) -> None:
        self.warm.close()
        self.client.close()
        self.coordinator.close()
        assert living(self._pids) == []


def living(pids: set[int], timeout: float = GONE) -> list[int]:
    """Return those of these processes that are still there after a while. The end of others must not have been
    requested."""
    deadline = time.monotonic() + timeout
    while left := [pid for pid in pids if _lives(pid)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.02)
    return []


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def loaded(warm: ForkServer) -> None:
    """Wait until it can fork."""
    warm.wait_loaded(Deadline(PATIENCE))


def allow_files(pid: int, more: int) -> None:
    """Let this process open so many more descriptors."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    first_too_many = next(itertools.islice((n for n in itertools.count() if n not in taken), more, None))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(hard, first_too_many), hard))
