"""What ranks, peers and files say is shown as text, wherever it is shown."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from hvdlab.collectives.failures import Failure
from hvdlab.collectives.recording import Recording
from hvdlab.collectives.timeline.events import Metric
from hvdlab.collectives.timeline.records import encode
from hvdlab.kernel_ext.inspect.overview import TensorTable
from hvdlab.kernel_ext.inspect.table import Cell, Table
from hvdlab.kernel_ext.output.values import html_of
from hvdlab.kernel_ext.status import RankStatus
from hvdlab.magics.screens.pages import page_html
from hvdlab.magics.status_table import StatusTable
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
