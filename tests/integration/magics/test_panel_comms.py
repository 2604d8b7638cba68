"""Which pools a notebook can show, and the state that it saves of them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.kernel_ext.notebook import registry
from hvdlab.magics.panel_comms import NotebookPanelBackend, load_panel
from support.timeline_traces import steps


class Client:
    def __init__(self, recording: Recording) -> None:
        self.recording = recording


class Pool:
    def __init__(self, recording: Recording, state: str = "idle", name: str = "") -> None:
        self.client, self.state, self.name, self.size = Client(recording), state, name, 2


@pytest.fixture
def recording() -> Recording:
    found = Recording()
    for rank, batch in steps(2, 3):
        found.feed(rank, batch)
    return found


@pytest.fixture
def session() -> Any:
    return SimpleNamespace(pool_unchecked=None, shell=SimpleNamespace(user_ns={}), watchers=[])


@pytest.fixture
def desk(session: Any) -> Iterator[NotebookPanelBackend]:
    one = NotebookPanelBackend(session)
    yield one
    one.close()


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_the_own_pool_is_shown_also_after_its_end(
    desk: NotebookPanelBackend, session: Any, recording: Recording
) -> None:
    assert desk.recording("") is None
    session.pool_unchecked = Pool(recording)
    assert desk.recording("") is recording
    session.pool_unchecked.state = "stopped"
    assert desk.recording("") is recording
    session.pool_unchecked = None
    assert desk.recording("") is recording


def test_unknown_pools_are_named(desk: NotebookPanelBackend) -> None:
    for name in ("variable:nets", "kept:night", "else"):
        with pytest.raises(InvalidRequestError, match=name.split(":")[-1]):
            desk.recording(name)


def test_a_kept_pool_is_watched_over_a_connection_that_is_closed_at_the_end(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = CoordinatorProcess.start(size=1)
    kept = SimpleNamespace(
        name="night", size=4, address=coordinator.address, client_token=coordinator.client_token
    )
    monkeypatch.setattr(registry.KeptPoolRegistry, "all", lambda self: [kept])
    monkeypatch.setattr(registry.KeptPoolRegistry, "get", lambda self, name: kept)
    try:
        desk = NotebookPanelBackend(session)
        assert {"id": "kept:night", "kind": "kept", "name": "night", "size": 4} in desk.pools()
        watched = desk.recording("kept:night")
        assert watched is not None
        assert desk.recording("kept:night") is watched
        assert not watched.closed
        desk.close()
        assert watched.closed
    finally:
        coordinator.close()


def test_saving_writes_what_was_recorded(
    desk: NotebookPanelBackend, session: Any, recording: Recording
) -> None:
    with pytest.raises(InvalidRequestError, match="no ranks"):
        desk.run_command("save", {"pool": ""})
    session.pool_unchecked = Pool(recording, state="stopped")
    desk._last = lambda: recording  # type: ignore[assignment]  # as if it had been shown
    answer = desk.run_command("save", {"pool": ""})
    path = Path(answer["path"])
    assert (answer["name"], answer["size"]) == (path.name, path.stat().st_size)
    assert path.parent == Path.cwd()
    with gzip.open(path) as file:
        assert len(json.load(file)) > recording.count
    with pytest.raises(InvalidRequestError, match="sing"):
        desk.run_command("sing", {})


def test_a_shell_that_is_no_kernel_has_no_comms(session: Any) -> None:
    assert load_panel(session) is None
    assert session.watchers == []
