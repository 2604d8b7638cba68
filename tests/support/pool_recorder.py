"""A sink that keeps a cell's output, for tests that wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from hvdlab.kernel_ext.notebook.cells.sink import OutputSink
from hvdlab.kernel_ext.wire.cells import CellDone, Chunk, Stream


class Recorder(OutputSink):
    """Sink that keeps a cell's output.

    Attributes:
        text: Rank to its output.
        notes: Lines about the run.
        waits: Texts about what the run waits for, each in place of the one before.
        started: Set with each output.
    """

    def __init__(self) -> None:
        self.text: dict[int, str] = {}
        self.notes: list[str] = []
        self.waits: list[str] = []
        self.started = threading.Event()
        self._changed = threading.Condition()

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        said = "".join(chunk.text for chunk in chunks if isinstance(chunk, Stream))
        with self._changed:
            self.text[rank] = self.text.get(rank, "") + said
            self._changed.notify_all()
        self.started.set()

    def wait_for(self, text: str, ranks: Sequence[int], timeout: float = 30) -> None:
        """Wait until each of these ranks has written this."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: all(text in self.text.get(rank, "") for rank in ranks), timeout
            )

    def wait_until(self, condition: Callable[[], bool], timeout: float = 30) -> None:
        """Wait until this holds of the output and the notes."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout), (self.text, self.notes)

    def done(self, rank: int, done: CellDone | None) -> None:
        pass

    def note(self, text: str, *, warning: bool = False) -> None:
        with self._changed:
            self.notes.append(text)
            self._changed.notify_all()

    def status(self, text: str, *, final: bool) -> None:
        with self._changed:
            self.waits.append(text)
            self._changed.notify_all()
        super().status(text, final=final)

    def wait_for_wait(self, text: str, timeout: float = 30) -> None:
        """Wait for a text about what the run waits for that has this in it: the first one may name fewer ranks."""
        with self._changed:
            found = self._changed.wait_for(lambda: any(text in wait for wait in self.waits), timeout)
            assert found, self.waits

    def wait_for_note(self, text: str, timeout: float = 30) -> None:
        """Wait for a note that has this in it."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(text in note for note in self.notes), timeout)
