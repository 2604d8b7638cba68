"""Output after the end of a cell: the time at which ranks get room for more."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlab.kernel_ext.notebook.cells.driver import BACKLOG
from hvdlab.kernel_ext.notebook.cells.sink import OutputSink
from hvdlab.kernel_ext.wire.cells import CellDone, Chunk, Stream
from hvdlab.magics.cell_view import LateOutputView
from hvdlab.magics.notebook_pool import NotebookPool
from support.patience import PATIENCE


class SlowSink(OutputSink):
    """Sink that holds its output back until it may show it."""

    def __init__(self) -> None:
        self.held = 0
        self.shown: list[str] = []
        self.may = threading.Event()
        self.ticked = threading.Event()

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        for chunk in chunks:
            assert isinstance(chunk, Stream)
            self.held += len(chunk.text)
            self.shown.append(chunk.text)

    def done(self, rank: int, done: CellDone | None) -> None:
        raise AssertionError("the cell has ended already")

    def note(self, text: str, *, warning: bool = False) -> None:
        raise AssertionError(text)

    def tick(self, now: float) -> float | None:
        if self.may.is_set():
            self.held = 0
        self.ticked.set()
        return now + 0.01 if self.held else None

    def backlog(self) -> int:
        return self.held

    def shorten(self) -> None:
        raise AssertionError("the user has not interrupted anything")


class ViewOnSink(LateOutputView):
    """View that shows output on a given sink."""

    def __init__(self, sink: OutputSink, ranks: Sequence[int]) -> None:
        shell: Any = SimpleNamespace()
        super().__init__(NotebookPool(shell), ranks, "stream")
        self._given = sink

    def _make_sink(self) -> OutputSink:
        return self._given


def test_a_rank_may_write_on_once_the_sink_holds_little_back() -> None:
    sink, first, second = SlowSink(), threading.Event(), threading.Event()
    late = ViewOnSink(sink, [0, 1])
    late(0, (Stream("stdout", "a" * BACKLOG),), first.set)
    assert first.wait(PATIENCE)
    late(1, (Stream("stdout", "b"),), second.set)
    for _ in range(3):
        sink.ticked.clear()
        assert sink.ticked.wait(PATIENCE)
    assert not second.is_set()
    sink.may.set()
    assert second.wait(PATIENCE)
    assert "".join(sink.shown) == "a" * BACKLOG + "b"
    thread = late._thread
    if thread is not None:
        thread.join(PATIENCE)
    assert late._thread is None


def test_rank_writes_on_if_no_thread_can_show_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    sink, first, second = SlowSink(), threading.Event(), threading.Event()
    sink.may.set()
    late = ViewOnSink(sink, [0])
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", fail)
        late(0, (Stream("stdout", "a"),), first.set)
    assert first.is_set()
    late(0, (Stream("stdout", "b"),), second.set)
    assert second.wait(PATIENCE)
    assert sink.shown == ["b"]
    thread = late._thread
    if thread is not None:
        thread.join(PATIENCE)
