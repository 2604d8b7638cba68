"""Messages to a notebook, one by one."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlab.kernel_ext.notebook.output.merge import Cleared, LineMerger, LiveLines, MergingSink, Shown, Text
from hvdlab.kernel_ext.wire.cells import Display, Stream
from hvdlab.magics.notebook_pool import CellImportDisplay
from hvdlab.magics.screens import (
    MESSAGE_CHARACTERS,
    DisplayIds,
    NotebookScreen,
    RateLimiter,
    TerminalScreen,
    wire_size,
)
from support.fakes.notebook_recorder import Clock, Recorder


def screen(ranks: int = 3) -> tuple[NotebookScreen, Recorder, Clock]:
    recorder, clock = Recorder(), Clock()
    return NotebookScreen(recorder, range(ranks), "c", clock), recorder, clock


def html(text: str, **kwargs: Any) -> Display:
    return Display({"text/html": text}, {}, **kwargs)


def test_a_figure_stands_under_its_rank() -> None:
    notebook, recorder, _ = screen()
    notebook.show(Shown((1,), html("<b>")))
    label, figure = recorder.sent
    assert "rank 1" in label[2]["text/html"]
    assert figure[2] == {"text/html": "<b>"}


def test_ranks_do_not_stand_above_nothing() -> None:
    notebook, recorder, _ = screen()
    nothing = '<pre style="white-space: pre">\n<span></span></pre>\n'
    notebook.show(Shown((0, 1), Display({"text/plain": "\n", "text/html": nothing}, {})))
    assert recorder.sent == []
    # An output with an id can be filled later, and one that is no text can be visible.
    notebook.show(Shown((0, 1), Display({"text/plain": "", "text/html": nothing}, {}, display_id="x")))
    notebook.show(Shown((1,), html("<pre><img src='x'></pre>")))
    notebook.show(Shown((2,), Display({"text/plain": "", "image/png": "aaaa"}, {})))
    assert len(recorder.sent) == 6


def test_one_rank_alone_needs_no_label() -> None:
    notebook, recorder, _ = screen(1)
    notebook.show(Shown((0,), html("<b>")))
    notebook.show(Shown((0,), Display({"text/plain": "x"}, {})))
    assert [m[2] for m in recorder.sent] == [{"text/html": "<b>"}, {"text/plain": "x"}]


def test_plain_text_is_labelled_like_a_line() -> None:
    notebook, recorder, _ = screen()
    notebook.show(Shown((0, 2), Display({"text/plain": "a\nb"}, {})))
    assert recorder.sent[0][2] == {"text/plain": "[0,2] a\n[0,2] b"}


def test_updates_find_the_display_of_their_rank() -> None:
    notebook, recorder, _ = screen()
    for rank in (0, 1):
        notebook.show(Shown((rank,), html(f"first {rank}", display_id="x")))
    notebook.show(Shown((1,), html("second 1", display_id="x", update=True)))
    shown = [data["text/html"] for area, data in recorder.areas().items() if not area.endswith("label")]
    assert shown == ["first 0", "second 1"]


def test_a_later_cell_updates_what_each_rank_has_shown_before() -> None:
    known, recorder, clock = DisplayIds(), Recorder(), Clock()
    first = NotebookScreen(recorder, range(2), "c", clock, known=known)
    for rank in (0, 1):
        first.show(Shown((rank,), html(f"first {rank}", display_id="x")))
    first.finish()
    second = NotebookScreen(recorder, range(2), "d", clock, known=known)
    second.show(Shown((1,), html("second 1", display_id="x", update=True)))
    shown = [data["text/html"] for area, data in recorder.areas().items() if not area.endswith("label")]
    assert shown == ["first 0", "second 1"]
    first.clear(Cleared((0, 1), False))
    assert known.get(1, "x") is None


def test_a_plot_redrawn_by_one_rank_stays_in_its_place() -> None:
    notebook, recorder, _ = screen()
    notebook.show(Shown((0,), html("of rank 0")))
    for step in range(3):
        notebook.clear(Cleared((1,), True))
        notebook.show(Shown((1,), html(f"step {step}")))
    notebook.finish()
    shown = [data["text/html"] for area, data in recorder.areas().items() if not area.endswith("label")]
    assert shown == ["of rank 0", "step 2"]
    assert ("clear", True) not in recorder.sent


def test_what_a_rank_cleared_and_did_not_show_again_disappears() -> None:
    notebook, recorder, _ = screen()
    notebook.show(Shown((1,), html("one")))
    notebook.clear(Cleared((1,), True))
    notebook.finish()
    assert [
        data.get("text/html") for area, data in recorder.areas().items() if not area.endswith("label")
    ] == [""]


def test_a_clear_of_all_ranks_clears_the_cell() -> None:
    notebook, recorder, _ = screen()
    notebook.clear(Cleared((0, 1, 2), True))
    assert recorder.sent == [("clear", True)]


def test_live_lines_have_one_area_that_is_empty_at_last() -> None:
    notebook, recorder, _ = screen()
    notebook.live(LiveLines((((0, 1), "50%"), ((2,), "40%"))))
    notebook.live(LiveLines((((0, 1, 2), "90%"),)))
    assert recorder.areas() == {"hvdlab-c-live": {"text/plain": "[0-2] 90%"}}
    notebook.live(LiveLines(()))
    assert recorder.areas() == {"hvdlab-c-live": {"text/plain": "", "text/html": ""}}


def test_what_a_cell_waits_for_is_told_in_place_and_next_time_below() -> None:
    notebook, recorder, _ = screen()
    notebook.status("", final=True)
    assert recorder.sent == []
    for seconds in (10, 11):
        notebook.status(f"waits {seconds} s", final=False)
    notebook.status("went on", final=True)
    assert recorder.areas() == {"hvdlab-c-status-0": {"text/plain": "went on"}}
    notebook.write(Text("stdout", "step 2\n"))
    notebook.status("waits again", final=False)
    assert recorder.areas()["hvdlab-c-status-0"]["text/plain"] == ""
    assert recorder.areas()["hvdlab-c-status-1"] == {"text/plain": "waits again"}
    notebook.status("", final=True)
    assert recorder.areas()["hvdlab-c-status-1"]["text/plain"] == ""


class Terminal(io.StringIO):
    """Tty that keeps the contents of its screen."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        lines, at = [""], 0
        for part in re.split(r"(\r|\n|\x1b\[K|\x1b\[1A)", self.getvalue()):
            if part == "\n":
                at += 1
                lines += [""] * (at == len(lines))
            elif part == "\x1b[1A":
                at -= 1
            elif part == "\x1b[K":
                lines[at] = ""
            elif part != "\r":
                lines[at] += part
        return [line for line in lines if line]


@pytest.mark.parametrize("tty", [True, False])
def test_a_terminal_shows_what_a_cell_waits_for_below_its_output(
    tty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(terminal, "isatty", lambda: tty)
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    shown = TerminalScreen(range(3))
    shown.write(Text("stdout", "step 1\n"))
    for seconds in (10, 11):
        shown.status(f"waits {seconds} s\n  rank 2: cell", final=False)
    shown.write(Text("stdout", "step 2\n"))
    if tty:
        assert terminal.screen() == ["step 1", "step 2", "waits 11 s", "  rank 2: cell"]
    shown.status("went on", final=True)
    shown.finish()
    first = [] if tty else ["waits 10 s", "  rank 2: cell"]
    assert terminal.screen() == ["step 1", *first, "step 2", "went on"]


def test_a_terminal_shows_the_nested_bars_of_the_lowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    shown = TerminalScreen(range(3))
    shown.live(LiveLines((((0, 1), "epoch 1"), ((2,), "epoch 2"), ((0,), "batch 1"), ((1, 2), "batch 2"))))
    assert terminal.screen() == ["[0,1] epoch 1", "[0] batch 1"]
    shown.write(Text("stdout", "step\n"))
    assert terminal.screen() == ["step", "[0,1] epoch 1", "[0] batch 1"]
    shown.live(LiveLines(()))
    assert terminal.screen() == ["step"]


def test_long_text_is_cut_at_line_ends() -> None:
    notebook, recorder, _ = screen()
    line = "x" * 999 + "\n"
    notebook.write(Text("stdout", line * 600))
    parts = [message[1] for message in recorder.sent]
    assert "".join(parts) == line * 600
    assert len(parts) == 3
    assert all(len(p) <= MESSAGE_CHARACTERS and p.endswith("\n") for p in parts)


def drain(notebook: NotebookScreen, clock: Clock) -> None:
    while (due := notebook.tick(clock.now)) is not None:
        assert due > clock.now
        clock.now = due


class Server(Recorder):
    """Server that counts as Jupyter's server does, which drops messages over 3 MB or 3,000 messages in 3 seconds."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock, self._came = clock, list[tuple[float, int]]()

    def stream(self, name: str, text: str) -> None:
        super().stream(name, text)
        self._came.append((self._clock.now, wire_size(text)))
        recent = [size for at, size in self._came if at > self._clock.now - 3]
        assert sum(recent) <= 3_000_000
        assert len(recent) <= 3_000


def test_more_than_a_burst_waits_and_nothing_is_lost() -> None:
    clock = Clock()
    server = Server(clock)
    notebook = NotebookScreen(server, range(3), "c", clock)
    text = ("x" * 99 + "\n") * 100_000
    notebook.write(Text("stdout", text))
    assert 0 < notebook.backlog() < len(text)
    drain(notebook, clock)
    assert "".join(message[1] for message in server.sent) == text
    assert clock.now < 15


def test_a_flood_of_switches_between_streams_needs_few_messages() -> None:
    clock = Clock()
    server = Server(clock)
    notebook = NotebookScreen(server, range(3), "c", clock)
    for i in range(20_000):
        notebook.write(Text("stdout", f"o {i}\n"))
        notebook.write(Text("stderr", f"e {i}\n"))
    drain(notebook, clock)
    for name, letter in (("stdout", "o"), ("stderr", "e")):
        shown = "".join(text for n, text in server.sent if n == name)
        assert shown == "".join(f"{letter} {i}\n" for i in range(20_000))
    assert clock.now < 5
    assert [n for n, _ in server.sent[:4]] == ["stdout", "stderr", "stdout", "stderr"]


def test_after_an_interrupt_only_the_end_of_a_backlog_is_shown() -> None:
    notebook, recorder, clock = screen()
    lines = [f"{i:<98}\n" for i in range(100_000)]
    notebook.write(Text("stdout", "".join(lines)))
    notebook.shorten()
    clock.now = 1.0
    notebook.tick(clock.now)
    notebook.write(Text("stdout", "last\n"))
    notebook.finish()
    drain(notebook, clock)
    assert clock.now < 5.0
    shown = "".join(text for name, text in recorder.sent if name == "stdout").splitlines()
    (told,) = [text for name, text in recorder.sent if name == "stderr"]
    assert told == f"({100_001 - len(shown)} lines are not shown: the cell was interrupted)\n"
    assert shown[-1] == "last"


def test_displays_keep_their_place_among_text_that_waits() -> None:
    notebook, recorder, clock = screen(1)
    text = "x" * 99 + "\n"
    notebook.write(Text("stdout", text * 40_000))
    notebook.write(Text("stderr", "e\n"))
    notebook.show(Shown((0,), html("figure")))
    notebook.write(Text("stdout", "after\n"))
    drain(notebook, clock)
    assert [m[0] for m in recorder.sent[-3:]] == ["stderr", "display", "stdout"]


def test_a_pacer_lets_pass_in_the_end() -> None:
    pacer, now = RateLimiter(0.0), 0.0
    for _ in range(100):
        now = pacer.ready_at(10_000_000, now)
        assert pacer.admit(10_000_000, now)


def test_what_is_held_back_is_shown_before_the_user_is_asked() -> None:
    notebook, recorder, clock = screen(2)
    sink = MergingSink(LineMerger(range(2)), notebook, clock)
    sink.output(1, (Stream("stdout", "only here\n"),))
    sink.tick(clock())
    assert recorder.sent == []
    sink.flush()
    assert recorder.sent == [("stdout", "[1] only here\n")]


def test_only_what_went_wrong_is_on_stderr() -> None:
    notebook, recorder, clock = screen(1)
    sink = MergingSink(LineMerger(range(1)), notebook, clock)
    sink.output(0, (Stream("stdout", "loss: "),))
    sink.note("rank 2 joins at the others' next commit")
    sink.note("rank 2 has left")
    sink.note("rank 1 died", warning=True)
    sink.tick(clock())
    assert recorder.sent == [
        ("stdout", "loss: "),
        ("stdout", "\nrank 2 joins at the others' next commit\n"),
        ("stdout", "rank 2 has left\n"),
        ("stderr", "rank 1 died\n"),
    ]


def test_a_terminal_shows_an_import_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("hvdlab.magics.notebook_pool.get_ipython", lambda: SimpleNamespace(kernel=None))
    with CellImportDisplay().importing("costly.values"):
        assert terminal.screen() == ["importing costly …"]
    assert terminal.screen() == []
