"""Ranks that wait until an engine has free slots for them: the part of a starter that Slurm, Dask, Ray and Spark share.

::

    ordered ──▶ waiting ── slot: claimed ──▶ placed: the engine's own starter has the rank
                   └────── a signal, the starter's end, no slot: withdrawn ──▶ reported as ended, without a process

A rank leaves *waiting* once, under the lock: whichever thread claims or withdraws it is the only one that starts it or reports its end.
"""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

from hvdlab.launch.starter import ENDED_WITH_JOB, ENDING_SIGNALS, Ended, RankObserver, require_running

THREADS_END_WITHIN = 10.0
"""Seconds that each thread has to end after the starter was closed: it may wait for an answer of the engine."""


class QueueingStarter(ABC):
    """A :class:`~hvdlab.launch.starter.Starter` of ranks that wait for free slots.

    A subclass asks its engine for slots in :meth:`_request_slots`, and claims ranks once some are free. It claims and starts them under
    the lock, so that a signal finds each rank either waiting or placed.

    Args:
        ranks: Observer that gets the ranks' events.
        engine: Name of the engine, for the reasons of ends.
    """

    def __init__(self, ranks: RankObserver, engine: str) -> None:
        self._ranks, self._engine = ranks, engine
        self._changed = threading.Condition()
        #: Ranks that wait, each with the size of the job that it was ordered for. With the threads, guarded by the condition's lock.
        self._waiting: dict[int, int] = {}
        self._threads: list[threading.Thread] = []
        #: Set once no rank may be ordered or placed any more.
        self._closing = threading.Event()

    # -- for subclasses -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _request_slots(self, ranks: Sequence[int], size: int, host: str) -> None:
        """Have waiting ranks placed as soon as slots are free; does not wait for them.

        Args:
            ranks: The ranks, which wait.
            size: Size of the job.
            host: Where they must run, or empty.

        Raises:
            StartError: The engine can't be asked.
            InvalidRequestError: There will never be slots for them. In either case they wait no more, and no end is reported.
        """

    @abstractmethod
    def _signal_placed(self, rank: int, number: int) -> None:
        """Send a signal to a rank that was placed; does nothing if it has ended."""

    @abstractmethod
    def _close_placed(self, timeout: float) -> None:
        """Wait ``timeout`` seconds for placed ranks that are leaving, then end the rest. Idempotent."""

    def _release_slots(self) -> None:
        """Give back to the engine the slots that were requested from it, when no rank waits any more. Idempotent."""
        return

    def _claim(self, ranks: Iterable[int]) -> dict[int, int]:
        """Remove ranks from the waiting ones.

        Returns:
            Those that waited, each with the size of its job. The caller starts them, or reports their ends.
        """
        with self._changed:
            return {rank: self._waiting.pop(rank) for rank in ranks if rank in self._waiting}

    def _withdraw(self, ranks: Iterable[int], reason: str) -> bool:
        """Report the end of those among the ranks that still wait: they are not started. Returns whether there were any."""
        withdrawn = self._claim(ranks)
        for rank in withdrawn:
            self._ranks.handle(Ended(rank, 0, reason))
        return bool(withdrawn)

    def _run_thread(self, target: Callable[[], None], name: str) -> None:
        """Run a thread that :meth:`close` joins."""
        thread = self._make_thread(target, f"hvdlab-{name}")
        with self._changed:
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]
            # Under the lock: close() joins all threads of the list, and one that was not started can't be
            # joined.
            thread.start()

    def _make_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Return a thread of the kind that the engine's calls need."""
        return threading.Thread(target=target, name=name, daemon=True)

    # -- any thread ---------------------------------------------------------------------------------------------------

    def start(self, ranks: Sequence[int], size: int) -> None:
        """Have ranks started as soon as slots are free for them.

        Raises:
            InvalidRequestError: This was closed, or there will never be slots for so many.
            StartError: The engine can't be asked for slots.
        """
        self._order(ranks, size, "")

    def _order(self, ranks: Sequence[int], size: int, host: str) -> None:
        with self._changed:
            require_running(self._closing.is_set())
            # Before the request: a thread of the engine can find slots before that returns.
            self._waiting |= dict.fromkeys(ranks, size)
        try:
            self._request_slots(ranks, size, host)
        except BaseException:
            self._claim(ranks)
            raise

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank. One that still waits is withdrawn by a signal that ends ranks, and gets no other."""
        if number in ENDING_SIGNALS:
            name = signal.Signals(number).name
            if self._withdraw([rank], f"it was ended by {name} before {self._engine} had room for it"):
                return
        self._signal_placed(rank, number)

    def close(self, timeout: float) -> None:
        """Wait ``timeout`` seconds for ranks that are leaving, end the rest, withdraw ranks that wait. Idempotent."""
        self._close_placed(timeout)
        with self._changed:
            self._closing.set()
            threads, waiting = list(self._threads), list(self._waiting)
        self._withdraw(waiting, ENDED_WITH_JOB)
        self._close_placed(0.0)  # ranks that got slots before this was closing
        self._release_slots()
        # After the release, which ends the thread of SlurmStarter: that waits for further ends of ranks.
        for thread in threads:
            thread.join(THREADS_END_WITHIN)


def by_size(waiting: Mapping[int, int]) -> dict[int, list[int]]:
    """Return the ranks of each size of a job.

    >>> by_size({0: 2, 1: 2, 2: 3})
    {2: [0, 1], 3: [2]}
    """
    found: dict[int, list[int]] = {}
    for rank, size in waiting.items():
        found.setdefault(size, []).append(rank)
    return found
