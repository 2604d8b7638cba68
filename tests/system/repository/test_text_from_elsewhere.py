"""Texts from ranks, peers and files are shown as text, in all places."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import time
import unicodedata
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hvdlab.bindings.monitoring import DivergenceError
from hvdlab.collectives.coordinator.connections import RejectionLog
from hvdlab.collectives.engine.world_view import log_abort
from hvdlab.collectives.errors import (
    AbortedError,
    Cause,
    CauseKind,
    Disagreement,
    DuplicateNameError,
    HvdlabError,
    InvalidRequestError,
    JoinedRanksError,
    KVStoreError,
    MismatchError,
    Pending,
    ProtocolError,
)
from hvdlab.collectives.failures import Failure
from hvdlab.collectives.protocol.messages import Abort
from hvdlab.collectives.text import operator_log, set_up_log
from hvdlab.collectives.tracing import rank_activity
from hvdlab.collectives.tracing.record_format import Members, Metric, Span, encode
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.tracing.trace_file import load_trace, save_recording
from hvdlab.collectives.types import DType, OpKind, Stall
from hvdlab.kernel_ext.notebook import registry
from hvdlab.kernel_ext.notebook.cells.cell_events import (
    CollectiveStalled,
    DoneArrived,
    Note,
    ShowStatus,
    StackArrived,
)
from hvdlab.kernel_ext.notebook.cells.cell_state import CellState
from hvdlab.kernel_ext.notebook.cells.driver import CellHandle
from hvdlab.kernel_ext.notebook.cells.results import CellResults, RankDeath, html_of
from hvdlab.kernel_ext.notebook.cells.sink import NullSink
from hvdlab.kernel_ext.notebook.output.error_report import CellFailed, failure_of
from hvdlab.kernel_ext.notebook.output.stack_text import RankLocations, grouped
from hvdlab.kernel_ext.notebook.stack_probe import NativeStacks
from hvdlab.kernel_ext.notebook.variables.overview import Cell, TensorTable, TextTable, lines_of
from hvdlab.kernel_ext.wire.cells import CellDone, CellError
from hvdlab.kernel_ext.wire.compare import VariableView
from hvdlab.kernel_ext.wire.status import PendingNow, RankStatus, ServerNow, Stack, StackFrame
from hvdlab.launch.processes import ExitStatus, OutputTail
from hvdlab.magics.pool_magics import StatusTable
from hvdlab.runner import check_trace
from hvdlab.runner.cli import main
from hvdlab.runner.events import FailureReport as JobFailure
from hvdlab.runner.output import Writer, failure_lines, stall_line
from hvdlab.runner.run_function import RankFailedError
from hvdlab.torch import monitoring
from hvdlab.widgets import live_view, still_charts, strip
from support.fakes.notebook import FakeLink
from support.logged_lines import LoggedLines

HOSTILE = "<img src=x onerror=alert(1)>\"'><script>alert(2)</script>"


def table(name: str) -> TextTable:
    found = TextTable(("name", "rank"))
    found.add([Cell(name), Cell(name, marked=True)])
    return found


def status(name: str) -> StatusTable:
    row = RankStatus(0, host=name, pid=1, device=name, state=f"lost: {name}", cell="c", plane=name)
    row = replace(row, servers=(ServerNow(0, f"{name}#2", 1, 1, 1, 1),))
    return StatusTable([row], {"c": name})


def measured(name: str) -> Recording:
    recording = Recording()
    recording.feed(0, encode(0, [Metric(name, float(k), k, k * 1_000_000_000) for k in range(9)]))
    return recording


# Sets the title, clears the screen; the same by C1; deletes; a forged line; turns the direction of writing; half a character.
CONTROLS = "g\x1b]0;PWN\x07\x1b[2J\x9b2J\x7f\r\nforged\u2028\u202egpj.exe\ud800"


def traced(name: str, directory: Path) -> Path:
    """Return a foreign trace with a tensor, a line of code and a metric of this name."""
    recording = Recording()
    when = 5_000_000_000
    times = (when, when + 1000, when + 2000, when + 3000)
    span = Span(name, OpKind.ALLREDUCE, DType.F32, 0, 0, 0, 4096, *times, site=name)
    for rank in range(2):
        recording.feed(rank, encode(rank, [Members(0, 0, 2, 0), span, Metric(name, 1.0, None, when)]))
    recording.close()
    return save_recording(recording, directory / "foreign.json")


def summary(name: str, directory: Path) -> str:
    recording = load_trace(traced(name, directory))
    return (
        rank_activity.report_head(recording)
        + rank_activity.report_ranks(recording)
        + rank_activity.report_collectives(recording)
    )


def refusal(name: str, directory: Path) -> str:
    (directory / "no.json").write_text(f'{{"ph": "{name}"\n', encoding="utf-8", errors="replace")
    with pytest.raises(InvalidRequestError) as caught:
        load_trace(directory / "no.json")
    return str(caught.value)


class NoScheduler:
    """Scheduler whose calls never come."""

    def call_at(self, when: float, call: Callable[[], None]) -> None: ...


def turned_away(name: str, directory: Path) -> str:
    got = LoggedLines()
    RejectionLog(got.log, NoScheduler()).add(f"connection 3 is closed: invalid tag {name!s}" * 9000)
    (line,) = got.lines()
    assert len(line) <= 300
    return line


def logged(name: str, directory: Path) -> str:
    log = operator_log("coordinator", level=logging.CRITICAL, journal=str(directory / "log"))
    with closing(log.handlers[-1]):
        log.warning("%s", f"a stranger said {name}")
    (line,) = (directory / "log").read_text(encoding="utf-8").splitlines()
    return line


def kept(name: str) -> str:
    nobody, self = registry.Process(2**30, 1), registry.Process.of(os.getpid())
    pool = registry.KeptPoolEntry(name, 2, name, 0.0, "", "", "", nobody, nobody, "", ("", 0), self, name)
    return registry.table([pool]) + str(registry.user_of(pool))


def whereabouts(name: str) -> str:
    pending = (PendingNow("allreduce", name, name, 1.0),)
    stack = Stack(1, name, (StackFrame(name, name, 1, name),), pending)
    shown = RankLocations({0: stack, 1: msgspec.structs.replace(stack, paused=name)}, {2: name})
    return "\n".join([repr(shown), *shown.lines([0, 1, 2]), *grouped({0: name})])


def looked_at(name: str) -> str:
    return "\n".join(
        [*lines_of(VariableView(1, (name,), names=(name,))), *lines_of(VariableView(1, error=name))]
    )


def errors(name: str) -> str:
    """Return each kind of error, with this text wherever peers, files and names of tensors have a say."""
    waited = Pending("allreduce", name, (0,), (1,), {0: name})
    kinds = [
        HvdlabError(name),
        ProtocolError(name),
        KVStoreError(name, name),
        DuplicateNameError(name, name, name),
        MismatchError(name, 0, [Disagreement((0,), name, name), Disagreement((1,), name, name)]),
        JoinedRanksError(name, 0, (1,), name),
        *(AbortedError(waited, Cause(kind, (1,), name, name)) for kind in CauseKind),
        DivergenceError(3, 2, [(0, 1), (2,)], [name]),
        RankFailedError(name),
    ]
    for kind in kinds:
        # A name can't add lines either; a whole text can have several.
        assert type(kind) in ONE_TEXT or "\nforged" not in str(kind), type(kind)
    return "\n".join(map(str, kinds))


ONE_TEXT = (HvdlabError, ProtocolError, KVStoreError, RankFailedError)


def failed_cell(name: str, *, colours: bool = False) -> str:
    """Return a cell that failed on two ranks in different ways, while a third died."""
    told: dict[str, Any] = {"recorded": (name, name), "wrong": name, "site": name, "why": name}
    own = CellError(name, name, (name, f"{name}: {name}"), 1, **told)
    stopped = CellError("AbortedError", name, (name,), 3, True, name, (7,), **told)
    done = {0: CellDone("c", own, 0.1), 1: CellDone("c", stopped, 0.1)}
    deaths = {2: RankDeath(2, name, 2, name, name)}
    texts = []
    for results in (
        CellResults([0, 1, 2], done, deaths=deaths, unanswered={1: name}),
        CellResults([2], {}, deaths=deaths),
        CellResults([1], {1: done[1]}),
    ):
        failure = failure_of(results, colours=colours)
        assert isinstance(failure, CellFailed)
        texts += [*failure._render_traceback_(), f"{type(failure).__name__}: {failure}"]
    with pytest.raises(IndexError) as caught:
        CellResults([0], done).value(0)
    return "\n".join([*texts, str(caught.value)])


class _Said(NullSink):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str, *, warning: bool = False) -> None:
        self.texts.append(text)

    def status(self, text: str, *, final: bool) -> None:
        self.texts.append(text)

    def output(self, rank: int, chunks: object) -> None: ...
    def done(self, rank: int, done: object) -> None: ...
    def tick(self, now: float) -> float | None:
        return None

    def backlog(self) -> int:
        return 0

    def shorten(self) -> None: ...


def waiting_cell(name: str) -> str:
    """Return the lines below a cell: that ranks wait, news of the pool, and a question."""
    sink = _Said()
    run = CellState("c", range(2), now=time.monotonic(), stall_time=1.0)
    handle = CellHandle(run, sink, FakeLink({}))
    stall = Stall(0, 10.0, int(OpKind.ALLREDUCE), name, (0,), (1,), (name,))
    handle.post(CollectiveStalled(stall))
    for rank, pending in ((0, (PendingNow("allreduce", name, name, 10.0),)), (1, ())):
        handle.post(StackArrived(rank, Stack(0, "c", (StackFrame(name, name, 1, name),), pending)))
    for rank in range(2):
        handle.post(DoneArrived(rank, CellDone("c", None, 0.1)))
    handle.wait()
    for effect in (Note(name), ShowStatus(name)):
        handle._perform(effect)
    return "\n".join([*sink.texts, stall_line(stall)])


def logged_by_ranks(name: str) -> str:
    """Return the logger of ranks, set up as an application finds it that has not configured logging."""
    log = logging.getLogger("hvdlab")
    before, propagates = log.handlers[:], log.propagate
    log.handlers[:], log.propagate = [], False
    try:
        with pytest.MonkeyPatch.context() as patch:
            written = io.StringIO()
            patch.setattr(sys, "stderr", written)
            set_up_log(logging.INFO, hide_time=True)
            log_abort(0, Abort(0, 1, name, (1,), name, name))
            log.error("a peer said %s", name)
            lines = written.getvalue().splitlines()
            assert len(lines) == 2
            try:
                raise ValueError(name)
            except ValueError:
                log.exception("failed")
            return written.getvalue()
    finally:
        log.handlers[:], log.propagate = before, propagates
        log.setLevel(logging.NOTSET)


def checked(name: str, directory: Path) -> str:
    path = directory / f"{name[:9]}.json"
    bad = {"ph": "M", "pid": 1, "tid": 1, "name": name, "args": {}, "cat": name, "ts": 1, "id": name}
    traces = [[bad, bad | {"ph": "e"}, bad | {"ph": name}, bad | {"ph": "i", "s": name}], name]
    with pytest.MonkeyPatch.context() as patch:
        written = io.StringIO()
        patch.setattr(sys, "stdout", written)
        for trace in traces:
            path.write_text(json.dumps(trace))
            assert check_trace.main([str(path)]) == 1
        assert not any(line.startswith("forged") for line in written.getvalue().splitlines())
        return written.getvalue()


def recorded_step(name: str) -> str:
    with monitoring.TorchRecord(None, None, None, 1, 1 << 20) as record:
        record.batch({name: torch.zeros(2)})
        (step,) = record.steps
    assert "\nforged" not in str(step)
    return str(step)


def failed_job(name: str) -> str:
    tail = OutputTail()
    tail.add(name.encode("utf-8", "surrogateescape" if name.isascii() else "backslashreplace"))
    outcome = ExitStatus(1)
    failure = JobFailure(0, outcome, name)
    written = io.StringIO()
    err = Writer(written)
    for line in failure_lines(failure, {0: tail}):
        err.say(line)
    return written.getvalue()


TERMINAL: dict[str, Callable[[str, Path], str]] = {
    "a table": lambda name, _: "\n".join(table(name).lines()),
    "the table of ranks": lambda name, _: repr(status(name)),
    "metrics": lambda name, _: still_charts.as_text(measured(name)),
    "a trace": lambda name, directory: summary(name, directory),
    "a file that is no trace": refusal,
    "a stranger who is turned away": turned_away,
    "the coordinator's log": logged,
    "kept pools": lambda name, _: kept(name),
    "%hvd_where": lambda name, _: whereabouts(name),
    "%hvd_where --native": lambda name, _: repr(NativeStacks({0: (name,), 1: (name, name)})),
    "a value of a rank": lambda name, _: looked_at(name),
    "what failed": lambda name, _: str(Failure("the lanes", name, name)),
    "an error": lambda name, _: errors(name),
    "a failed cell": lambda name, _: failed_cell(name),
    "a cell that waits": lambda name, _: waiting_cell(name),
    "the log of ranks": lambda name, _: logged_by_ranks(name),
    "a trace that is checked": checked,
    "a recorded step": lambda name, _: recorded_step(name),
    "a failed job": lambda name, _: failed_job(name),
}

HTML: dict[str, Callable[[str], str | None]] = {
    "a table": lambda name: table(name).html(name, [name]),
    "the table of ranks": lambda name: status(name)._repr_html_(),
    "no tensors": lambda name: TensorTable({})._repr_html_(),
    "a value": lambda name: html_of([((0,), {"text/plain": name}), ((1,), {"image/png": name})]),
    "a picture": lambda name: html_of([((0,), {"image/svg+xml": name})]),
    "metrics": lambda name: still_charts.as_html(measured(name)),
    "what failed": lambda name: live_view.html_of((Failure(name, name, name),)),
    "a cell's end": strip.summary_html,
}


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.found += [name for name, _ in attrs if name.startswith("on") or name == "href"]


def elements(html: str | None) -> list[str]:
    parser = _Elements()
    parser.feed(html or "")
    return parser.found


@pytest.mark.parametrize("what", HTML)
def test_hostile_text_adds_no_element_to_a_page(what: str) -> None:
    assert elements(HTML[what](HOSTILE)) == elements(HTML[what]("harmless"))


@pytest.mark.parametrize("what", TERMINAL)
def test_no_text_from_elsewhere_gives_a_terminal_orders(what: str, tmp_path: Path) -> None:
    name = CONTROLS if what != "a trace" else CONTROLS.replace("\ud800", "")  # which no trace can hold
    text = TERMINAL[what](name, tmp_path)
    assert obeyed(text) == []
    assert what == "a file that is no trace" or "PWN" in text


def obeyed(text: str) -> list[str]:
    """Return the parts that a terminal obeys instead of showing."""
    return [
        one for one in text if one != "\n" and unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    ]


def test_the_coordinator_s_stderr_is_one_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    operator_log("coordinator").warning("%s", f"a stranger said {CONTROLS}{'x' * 60_000}")
    (line,) = capsys.readouterr().err.splitlines()
    assert obeyed(line) == []
    assert len(line) < 4100


def test_a_foreign_trace_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = traced(CONTROLS.replace("\ud800", ""), tmp_path)
    assert main(["trace", "top", "--once", str(path)]) == 0
    assert main(["trace", "top", str(tmp_path / "\x1b[2J.json")]) == 2
    out, err = capsys.readouterr()
    assert "PWN" in out
    assert obeyed(out + err) == []
