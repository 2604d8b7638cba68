"""``%hvd_metrics`` in a notebook."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvdlab.collectives.tracing.record_format import Metric, encode
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets import views
from support.fakes.notebook import Notebook


@pytest.fixture
def recording() -> Recording:
    found = Recording()
    found.feed(0, encode(0, [Metric("loss", 0.5, 3, 10**9), Metric("loss", 0.25, 4, 2 * 10**9)]))
    return found


@pytest.fixture
def pool(notebook: Notebook, recording: Recording, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    notebook.run("%hvd_pool start 1")
    monkeypatch.setattr(notebook.pool, "metrics", recording.metrics, raising=False)
    monkeypatch.setattr(notebook.pool, "client", SimpleNamespace(recording=recording), raising=False)
    return notebook


def test_the_numbers_are_a_table(pool: Notebook) -> None:
    table = pool.run("%hvd_metrics table").result
    assert table["value"].tolist() == [0.5, 0.25]
    assert table["step"].tolist() == [3, 4]


def test_without_widgets_it_is_text(pool: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(found: object) -> None:
        raise ModuleNotFoundError("anywidget", name="anywidget")

    monkeypatch.setattr(views, "metrics", missing)
    done = pool.run("%hvd_metrics")
    assert done.result is None
    head, line = done.lines
    assert head == "Metrics: 1 rank, 2 points, 1 s"
    assert line.startswith("loss |█")
    assert line.endswith("▁| 0.25")


def test_charts_are_shown(pool: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(views, "metrics", asked.append)
    pool.run("%hvd_metrics")
    assert asked == [pool.pool]


def test_without_ranks_it_says_so(notebook: Notebook) -> None:
    assert "%hvd_pool start" in notebook.run("%hvd_metrics").usage_error
