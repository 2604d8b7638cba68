"""Views that are opened before there are ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("anywidget")


from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.magics.notebook_pool import NotebookPool
from hvdlab.widgets.views import add_awaiting, metrics, ranks, recording_of, remove_awaiting, timeline, trace
from support.timeline_traces import steps


class Client:
    def __init__(self) -> None:
        self.recording: Recording | None = None

    def adopt(self, recording: Recording) -> None:
        self.recording = recording


def test_they_show_the_ranks_that_come(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    pool: Any = SimpleNamespace(client=client, broken="", state="idle", size=2, news=list, lost={}, name="")
    pool.stop = lambda: setattr(pool, "state", "stopped")
    shell: Any = SimpleNamespace()
    session = NotebookPool(shell)
    monkeypatch.setattr(session, "start_pool", lambda **_: pool)
    add_awaiting(session.next_recording)
    try:
        views = [timeline(), metrics(), ranks()]
        assert "no collectives were recorded yet" in repr(views[0])
        assert "waiting for ranks" in repr(views[2])
        with pytest.raises(InvalidRequestError, match="no ranks are running"):
            trace()
        session.pool_for(2)
        recording = client.recording
        assert recording is not None
        assert all(view.recording is recording for view in views)
        for rank, batch in steps(2, 20):
            recording.feed(rank, batch)
        assert "2 ranks" in repr(views[0])
        for view in views:
            view.close()
        # The next pool gets a recording of its own.
        assert recording_of(coming=True) is not recording
    finally:
        remove_awaiting(session.next_recording)
        session.close()
