"""Output of threads, tasks and subprocesses of ranks after the end of their cell, shown under that cell."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from hvdlab.kernel_ext.notebook.cells.driver import BACKLOG
from hvdlab.kernel_ext.notebook.cells.sink import GuardedSink, OutputSink
from hvdlab.kernel_ext.wire.cells import Chunk


class LateOutput:
    """Gives output to a sink on a thread that exists only while there is something to show.

    Args:
        make: Makes the sink when the first output comes.
        ranks: The ranks that it knows.
    """

    def __init__(self, make: Callable[[], OutputSink], ranks: Sequence[int]) -> None:
        self._make, self._ranks = make, set(ranks)
        self._sink: GuardedSink | None = None
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, tuple[Chunk, ...], Callable[[], None]]] = deque()
        self._thread: threading.Thread | None = None

    def __call__(self, rank: int, chunks: tuple[Chunk, ...], shown: Callable[[], None]) -> None:
        """A rank wrote; ``shown`` is called once the sink can take more. Any thread; does not block."""
        with self._changed:
            self._waiting.append((rank, chunks, shown))
            if self._thread is None:
                self._thread = threading.Thread(target=self._show, name="hvdlab-late-output", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _show(self) -> None:
        if self._sink is None:
            self._sink = GuardedSink(self._make())
        held: list[Callable[[], None]] = []
        while True:
            with self._changed:
                waiting, self._waiting = self._waiting, deque()
            for rank, chunks, shown in waiting:
                if rank not in self._ranks:  # the rank joined while the cell ran
                    self._ranks.add(rank)
                    self._sink.began(rank)
                self._sink.output(rank, chunks)
                held.append(shown)
            at = self._sink.tick(time.monotonic())
            if at is None or self._sink.backlog() <= BACKLOG:
                ready, held = held, []
                for each in ready:
                    each()
            with self._changed:
                if self._waiting:
                    continue
                if at is None:
                    self._thread = None
                    return
                self._changed.wait(max(0.0, at - time.monotonic()))
