"""What ranks, peers and files say is shown as text, wherever it is shown."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from hvdlab.collectives.coordinator.server import log_to_file, log_to_stderr
from hvdlab.collectives.coordinator.strangers import TurnedAway
from hvdlab.collectives.dtypes import DType, OpKind
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.failures import Failure
from hvdlab.collectives.recording import Recording, report
from hvdlab.collectives.recording.loading import load
from hvdlab.collectives.recording.saving import save
from hvdlab.collectives.timeline.events import Members, Metric, Span
from hvdlab.collectives.timeline.records import encode
from hvdlab.kernel_ext import registry
from hvdlab.kernel_ext.inspect.messages import View
from hvdlab.kernel_ext.inspect.native import NativeStacks
from hvdlab.kernel_ext.inspect.overview import TensorTable
from hvdlab.kernel_ext.inspect.table import Cell, Table
from hvdlab.kernel_ext.inspect.views import told
from hvdlab.kernel_ext.output.places import Whereabouts, grouped
from hvdlab.kernel_ext.output.values import html_of
from hvdlab.kernel_ext.payloads import PendingNow, Stack, StackFrame
from hvdlab.kernel_ext.status import RankStatus
from hvdlab.magics.screens.pages import page_html
from hvdlab.magics.status_table import StatusTable
from hvdlab.runner.command import main
from hvdlab.widgets import metrics_picture, output, strip

HOSTILE = "<img src=x onerror=alert(1)>\"'><script>alert(2)</script>"


def table(name: str) -> Table:
    found = Table(("name", "rank"))
    found.add([Cell(name), Cell(name, marked=True)])
    return found


def status(name: str) -> StatusTable:
    row = RankStatus(0, host=name, pid=1, device=name, state=f"lost: {name}", cell="c", plane=name)
    return StatusTable([row], {"c": name})


def measured(name: str) -> Recording:
    recording = Recording()
    recording.feed(0, encode(0, [Metric(name, float(k), k, k * 1_000_000_000) for k in range(9)]))
    return recording


# Sets the title, clears the screen; the same by C1; deletes; a forged line; turns the direction of writing; half a character.
CONTROLS = "g\x1b]0;PWN\x07\x1b[2J\x9b2J\x7f\r\nforged\u2028\u202egpj.exe\ud800"


def traced(name: str, directory: Path) -> Path:
    """A foreign trace with a tensor, a line of code and a metric of this name."""
    recording = Recording()
    when = 5_000_000_000
    times = (when, when + 1000, when + 2000, when + 3000)
    span = Span(name, OpKind.ALLREDUCE, DType.F32, 0, 0, 0, 4096, *times, site=name)
    for rank in range(2):
        recording.feed(rank, encode(rank, [Members(0, 0, 2, 0), span, Metric(name, 1.0, None, when)]))
    recording.close()
    return save(recording, directory / "foreign.json")


def summary(name: str, directory: Path) -> str:
    recording = load(traced(name, directory))
    return report.head(recording) + report.ranks(recording) + report.collectives(recording)


def refusal(name: str, directory: Path) -> str:
    (directory / "no.json").write_text(f'{{"ph": "{name}"\n', encoding="utf-8", errors="replace")
    with pytest.raises(InvalidRequestError) as caught:
        load(directory / "no.json")
    return str(caught.value)


def turned_away(name: str, directory: Path) -> str:
    lines: list[str] = []
    TurnedAway(lines.append, lambda when, call: None).tell(
        f"connection 3 is closed: invalid tag {name!s}" * 9000
    )
    (line,) = lines
    assert len(line) <= 300
    return line


def logged(name: str, directory: Path) -> str:
    log = log_to_file(str(directory / "log"))
    log(f"a stranger said {name}")
    (line,) = (directory / "log").read_text(encoding="utf-8").splitlines()
    return line


def kept(name: str) -> str:
    nobody, self = registry.Process(2**30, 1), registry.Process.of(os.getpid())
    pool = registry.Kept(name, 2, name, 0.0, "", "", "", nobody, nobody, "", ("", 0), self, name)
    return registry.table([pool]) + str(registry.user_of(pool))


def whereabouts(name: str) -> str:
    pending = (PendingNow("allreduce", name, name, 1.0),)
    stack = Stack(1, name, (StackFrame(name, name, 1, name),), pending)
    shown = Whereabouts({0: stack, 1: msgspec.structs.replace(stack, paused=name)}, {2: name})
    return "\n".join([repr(shown), *shown.lines([0, 1, 2]), *grouped({0: name})])


def looked_at(name: str) -> str:
    return "\n".join([*told(View(1, (name,), names=(name,))), *told(View(1, error=name))])


TERMINAL: dict[str, Callable[[str, Path], str]] = {
    "a table": lambda name, _: "\n".join(table(name).lines()),
    "the table of ranks": lambda name, _: repr(status(name)),
    "metrics": lambda name, _: metrics_picture.as_text(measured(name)),
    "a trace": lambda name, directory: summary(name, directory),
    "a file that is no trace": refusal,
    "a stranger who is turned away": turned_away,
    "the coordinator's log": logged,
    "kept pools": lambda name, _: kept(name),
    "%hvd_where": lambda name, _: whereabouts(name),
    "%hvd_where --native": lambda name, _: repr(NativeStacks({0: (name,), 1: (name, name)})),
    "a value of a rank": lambda name, _: looked_at(name),
    "what failed": lambda name, _: str(Failure("the lanes", name, name)),
}

HTML: dict[str, Callable[[str], str | None]] = {
    "a table": lambda name: table(name).html(name, [name]),
    "the table of ranks": lambda name: status(name)._repr_html_(),
    "no tensors": lambda name: TensorTable({})._repr_html_(),
    "a page of a rank": lambda name: page_html(
        0, [{"text": name, "stream": "stdout"}, {"data": {"text/plain": name}}], opened=True
    ),
    "a value": lambda name: html_of([((0,), {"text/plain": name}), ((1,), {"image/png": name})]),
    "a picture": lambda name: html_of([((0,), {"image/svg+xml": name})]),
    "metrics": lambda name: metrics_picture.as_html(measured(name)),
    "what failed": lambda name: output.html_of((Failure(name, name, name),)),
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
    """What a terminal does not show but do."""
    return [
        one for one in text if one != "\n" and unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    ]


def test_the_coordinator_s_stderr_is_one_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr(f"a stranger said {CONTROLS}{'x' * 60_000}")
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
