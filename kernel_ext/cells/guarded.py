"""A sink whose failure is raised at the end of the run instead of stopping it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from hvdlab.kernel_ext.cells.sink import EndingSink, NullSink, OutputSink, TimedSink, began, settle, status_of
from hvdlab.kernel_ext.wire.cells import CellDone, Chunk

if TYPE_CHECKING:
    from hvdlab.kernel_ext.cells.results import CellResults

T = TypeVar("T")


class GuardedSink:
    """Does what ``sink`` does, until that raises; from then on nothing is shown.

    A run that stopped there would never end: its ranks would wait for room for their output, and the user for the ranks.

    Attributes:
        failure: What the sink raised; None if nothing.
    """

    def __init__(self, sink: OutputSink) -> None:
        self.failure: Exception | None = None
        self._use(sink)

    def _use(self, sink: OutputSink) -> None:
        self._sink = sink
        self._timed = sink if isinstance(sink, TimedSink) else None
        self._status = status_of(sink)

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        self._guard(lambda: self._sink.output(rank, chunks))

    def began(self, rank: int) -> None:
        self._guard(lambda: began(self._sink, rank))

    def done(self, rank: int, done: CellDone | None) -> None:
        self._guard(lambda: self._sink.done(rank, done))

    def note(self, text: str, *, warning: bool = False) -> None:
        self._guard(lambda: self._sink.note(text, warning=warning))

    def status(self, text: str, *, final: bool) -> None:
        self._guard(lambda: self._status(text, final=final))

    def tick(self, now: float) -> float | None:
        timed = self._timed
        return self._guard(lambda: timed.tick(now)) if timed is not None else None

    def backlog(self) -> int:
        timed = self._timed
        return (self._guard(timed.backlog) or 0) if timed is not None else 0

    def hurry(self) -> None:
        if self._timed is not None:
            self._guard(self._timed.hurry)

    def settle(self) -> None:
        self._guard(lambda: settle(self._sink))

    def finished(self, results: CellResults) -> None:
        if isinstance(sink := self._sink, EndingSink):
            self._guard(lambda: sink.finished(results))

    def _guard(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:  # noqa: BLE001  # whatever a caller's sink raises
            self.failure = self.failure or error
            self._use(NullSink())
            return None
