"""Consumers of a rank's events end whole, also where Ctrl-C ends the wait for the last events."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from hvdlab.collectives import context
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.telemetry import MetricExports, Subscription
from hvdlab.collectives.metrics.export import Point
from support.engine_probe import EngineProbe


class Nowhere:
    """Exporter that drops all points."""

    def write(self, points: Sequence[Point]) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def engine() -> Iterator[Engine]:
    yield context.init()
    context.shutdown()


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def test_timeline_is_complete_after_an_interrupted_stop(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.start_timeline(tmp_path / "trace.json")
    with monkeypatch.context() as patch:
        patch.setattr(Subscription, "wait_for_events", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.stop_timeline()
    json.loads((tmp_path / "trace.json").read_text())
    assert EngineProbe(engine).handlers.callbacks.event_sinks == []
    assert "hvdlab-timeline" not in [thread.name for thread in threading.enumerate()]


def test_timeline_that_was_interrupted_at_its_start_can_be_stopped(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Subscription, "add", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.start_timeline(tmp_path / "trace.json")
    engine.stop_timeline()
    assert "hvdlab-timeline" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("all_ranks", [False, True])
def test_export_ends_after_an_interrupted_close(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, all_ranks: bool
) -> None:
    before = threading.active_count()
    export = engine.exports.add(Nowhere(), (), all_ranks)
    with monkeypatch.context() as patch:
        patch.setattr(MetricExports, "_flush", interrupt)
        with pytest.raises(KeyboardInterrupt):
            export.close()
    callbacks = EngineProbe(engine).handlers.callbacks
    assert callbacks.event_sinks == callbacks.own_event_sinks == []
    assert threading.active_count() == before
