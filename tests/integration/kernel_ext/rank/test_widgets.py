"""Widgets that take output, by thread; in a pool: ``tests/system/magics/test_late_in_kernel.py``."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import ipywidgets  # type: ignore[import-untyped]
import pytest

from hvdlab.kernel_ext.rank.output import OutputQueue
from hvdlab.kernel_ext.rank.widgets import WidgetOutputs
from support.fakes.posting_engine import PostingEngine


@pytest.fixture
def outputs() -> Iterator[WidgetOutputs]:
    outputs = WidgetOutputs()
    outputs.install()
    yield outputs
    outputs.uninstall()


def texts(widget: ipywidgets.Output) -> str:
    return "".join(output["text"] for output in widget.outputs)


def test_the_innermost_widget_of_the_thread_takes_the_text(outputs: WidgetOutputs) -> None:
    outer, inner = ipywidgets.Output(), ipywidgets.Output()
    with outer:
        assert outputs.write("stdout", "one ")
        with inner:
            assert outputs.write("stdout", "two")
        assert outputs.write("stdout", "three")
        assert outputs.entered == 1
    assert not outputs.write("stdout", "four")
    assert (texts(outer), texts(inner)) == ("one three", "two")
    assert outputs.entered == 0


def test_an_interrupt_leaves_no_widget_behind(outputs: WidgetOutputs) -> None:
    with pytest.raises(KeyboardInterrupt), ipywidgets.Output():
        raise KeyboardInterrupt
    assert outputs.entered == 0
    assert not outputs.write("stdout", "text")


def test_while_a_thread_is_in_a_widget_others_write_into_the_cell(outputs: WidgetOutputs) -> None:
    widget = ipywidgets.Output()
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with widget:
            inside.set()
            leave.wait(60)
            outputs.write("stdout", "of the thread")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert inside.wait(60)
        assert outputs.entered == 1
        assert not outputs.write("stdout", "of the cell")
    finally:
        leave.set()
        thread.join()
    assert texts(widget) == "of the thread"


def test_a_write_asks_no_thread_for_its_widget_while_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = OutputQueue(PostingEngine())
    capture.start()

    def asked(self: WidgetOutputs, name: str, text: str) -> bool:
        raise AssertionError(f"asked about {text}")

    monkeypatch.setattr(WidgetOutputs, "write", asked)
    try:
        capture.write("stdout", "line")
        capture.widgets.entered = 1
        with pytest.raises(AssertionError, match="asked about line"):
            capture.write("stdout", "line")
    finally:
        capture.close()
