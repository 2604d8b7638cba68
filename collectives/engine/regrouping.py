"""A rank's part in elastic training: it stops where the world may change, and begins again with all others."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hvdlab.collectives.engine.locked_state import GuardedState
from hvdlab.collectives.engine.world import WorldView
from hvdlab.collectives.errors import StartError, format_ranks
from hvdlab.collectives.protocol import messages as m


class Regrouping:
    """Tells the coordinator where this rank is in elastic training, and waits for the other ranks.

    Args:
        rank: This rank.
        guarded: Its state.
        world: Its view of the world.
    """

    def __init__(self, rank: int, guarded: GuardedState, world: WorldView) -> None:
        self._rank = rank
        self._guarded = guarded
        self._world = world
        self._ticket = 0
        self._depth = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Training begins: from now on newcomers wait for :meth:`regroup`, and a failure ends all that is submitted.

        Once the world's epoch was aborted, whatever this rank submits fails with the same cause, until it regroups. Other ranks may
        have gone back to their last commit by then, and must not meet what this rank still submits. May be nested.
        """
        with self._lock:
            self._depth += 1
            if self._depth > 1:
                return
        self._guarded.tell(lambda state: state.train(True))

    def end(self) -> None:
        """Training has ended, in whatever way."""
        with self._lock:
            self._depth -= 1
            if self._depth > 0:
                return
        self._guarded.tell(lambda state: state.train(False))

    def stop(self, reason: str = "", at_least: int = 1) -> None:
        """This rank has stopped where the world may change. Collectives in which other ranks wait for it fail, and say why.

        Does not wait; see :meth:`wait`.

        Args:
            reason: What brought this rank here, if it failed; empty otherwise.
            at_least: Ranks that are needed to go on.
        """
        self._ticket += 1
        message = m.Regroup(self._ticket, at_least, reason)
        self._guarded.tell(lambda state: state.regroup(message))

    def wait(self, timeout: float) -> None:
        """After :meth:`stop`, wait until all living ranks have come, newcomers are let in, and there are enough.

        Raises:
            StartError: That did not happen within ``timeout`` seconds, or the coordinator is lost.
            ReleasedError: This rank was let go: the others begin again without it.
        """
        if self._world.wait_regrouped(self._ticket, timeout):
            return
        last = self._world.last
        alive = sorted(member.rank for member in last.members) if last is not None else []
        raise StartError(
            f"rank {self._rank} waited {timeout:g} s to begin again: {format_ranks(alive)} are alive, but there are not "
            "enough of them (HVDLAB_MIN_NP), or some did not come back to their last commit. Raise "
            "HOROVOD_ELASTIC_TIMEOUT, or look at what they do."
        )

    @property
    def training(self) -> bool:
        """Whether this rank is in elastic training."""
        with self._lock:
            return self._depth > 0

    @property
    def leaving(self) -> tuple[int, ...]:
        """Ranks that leave where the world may change."""
        return self._world.leaving

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ranks that wait to be let in."""
        return self._world.waiting

    def watch(self, callback: Callable[[tuple[int, ...], tuple[int, ...]], None]) -> Callable[[], None]:
        """Call ``callback(waiting, leaving)`` on the control thread whenever the world has changed.

        Args:
            callback: Gets the ranks that wait to be let in, and those that leave.

        Returns:
            A function that ends the calls.
        """

        def watcher(world: m.World) -> None:
            callback(world.waiting, world.leaving)

        self._world.watchers.append(watcher)
        return lambda: self._world.watchers.remove(watcher)
