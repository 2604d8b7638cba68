"""Ranks that run a program of a user's, with a coordinator and no job around them."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

from conformance.launchers.sites import Site
from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.settings import WorldEnvironment
from hvdlab.launch.options import parse
from hvdlab.launch.starter import Ended, LaunchRequest, Program, Started, Starter, Waiting
from support.patience import PATIENCE


class ProgramRanks:
    """Started by :meth:`run`, ended by :meth:`close`.

    Args:
        site: The launcher, and where its ranks run.

    Attributes:
        launcher: The launcher.
        shows_output_at_once: Whether output comes while a rank runs; otherwise it comes with the end of the rank.
        ends: Ends of ranks as they were reported, each with the output that had come by then, by stream.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self.launcher = site.launcher()
        self.shows_output_at_once = not site.logs
        self.ends: list[tuple[Ended, dict[int, bytes]]] = []
        self._changed = threading.Condition()
        self._output: defaultdict[tuple[int, int], bytes] = defaultdict(bytes)
        self._starter: Starter | None = None
        self._coordinator = CoordinatorProcess.start(
            tcp_host="127.0.0.1" if site.far else None, timeout=PATIENCE
        )
        self._client = Client.connect(self._coordinator.address, self._coordinator.client_token)

    # -- reports of the starter, on any thread --------------------------------------------------------------------

    def handle(self, event: Started | Ended | Waiting) -> None:
        """Record the end of a rank; see :class:`~hvdlab.launch.starter.RankObserver`."""
        with self._changed:
            if isinstance(event, Ended):
                written = {stream: self._output.pop((event.rank, stream), b"") for stream in (1, 2)}
                self.ends.append((event, written))
            self._changed.notify_all()

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Record output; see :class:`~hvdlab.launch.starter.ProgramOutput`."""
        with self._changed:
            self._output[rank, stream] += data
            self._changed.notify_all()

    def returned(self, rank: int, data: bytes) -> None:
        """Check that a program returns nothing."""
        raise AssertionError((rank, data))

    # -- tests ----------------------------------------------------------------------------------------------------

    def run(self, source: str, *, size: int = 2, preload: Sequence[str] = ()) -> Starter:
        """Start ranks that execute this source; returns their starter."""
        return self.execute((sys.executable, "-c", source), size=size, preload=preload)

    def execute(self, command: Sequence[str], *, size: int = 2, preload: Sequence[str] = ()) -> Starter:
        """Start ranks that run this command; returns their starter."""
        coordinator = self._coordinator
        world = WorldEnvironment(
            coordinator.tls_address or coordinator.address,
            coordinator.token,
            certificate=coordinator.certificate if self._site.far else None,
        )
        self._client.expect(tuple(range(size)))
        self._starter = self.launcher.starter(
            LaunchRequest(
                world,
                self._client,
                program=Program(tuple(command), {}, self, preload=tuple(preload)),
                size=size,
                hosts=self._site.hosts,
                options=parse(self._site.name, self.launcher.options(), self._site.options),
            ),
            self,
        )
        self._starter.start(range(size), size)
        return self._starter

    def wait_for_output(self, rank: int, text: bytes, stream: int = 1) -> None:
        """Wait until a living rank has written this."""
        self._wait(lambda: text in self._output[rank, stream])

    def end_of(self, rank: int, which: int = 0) -> tuple[Ended, dict[int, bytes]]:
        """Wait for an end of a rank, the first one by default; returns it with the output that came before it."""

        def ends() -> list[tuple[Ended, dict[int, bytes]]]:
            return [end for end in self.ends if end[0].rank == rank]

        self._wait(lambda: len(ends()) > which)
        return ends()[which]

    def _wait(self, condition: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, 2 * PATIENCE), (self.ends, dict(self._output))

    def close(self) -> None:
        """End the remaining ranks. Idempotent."""
        if self._starter is not None:
            self._starter.close(0.0)
        self._client.close()
        self._coordinator.close()
