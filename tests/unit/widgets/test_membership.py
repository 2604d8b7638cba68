"""Membership as views show it, and the effects of their buttons, without a browser."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import pytest

pytest.importorskip("anywidget")

import hvdlab
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.types import LEAVES
from hvdlab.kernel_ext.notebook.elastic import Bounds, MembershipChange
from hvdlab.kernel_ext.notebook.membership import ElasticState
from hvdlab.widgets import rank_tables as widget_module
from hvdlab.widgets.panel import Panel
from hvdlab.widgets.pool_membership import (
    MembershipActions,
    MembershipNews,
    headline,
    member_rows,
    membership_html,
    membership_message,
    membership_text,
)
from hvdlab.widgets.rank_tables import MembershipWidget
from support.patience import PATIENCE


class FakePool:
    """Ranks that are only numbers."""

    replaceable = True

    def __init__(self, size: int = 4) -> None:
        self.states = dict.fromkeys(range(size), "ready")
        self.state = "idle"
        self.history: list[MembershipChange] = []
        self.called: list[str] = []
        self.listeners: list[Callable[[], None]] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def elastic(self) -> ElasticState:
        if self.state == "stopped":
            raise InvalidRequestError("the pool has been stopped")
        cells = [("[7]", Bounds(1, 8), tuple(self.states))]
        awaited = tuple(rank for rank, text in self.states.items() if text.startswith("lost"))
        return ElasticState(3, cells, dict(self.states), awaited, {}, tuple(self.history), (1,))

    def on_membership_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        self.listeners.append(callback)
        return lambda: self.listeners.remove(callback)

    def change(self, rank: int, what: str, why: str) -> None:
        self.history.append(MembershipChange(rank, what, why, "host<1>#ab", 77, 1000.0 + len(self.history)))
        for listener in self.listeners:
            listener()

    def _act(self, what: str) -> None:
        self.called.append(what)
        assert self.go_on.wait(PATIENCE)

    def resize(self, np: int) -> None:
        self._act(f"resize {np}")
        if np > 8:
            raise StartError("no room for rank 8")

    def repair(self) -> tuple[int, ...]:
        self._act("repair")
        return (2,)

    def restart(self, ranks: Sequence[int] | None = None) -> None:
        self._act(f"restart {ranks}")

    def sync(self, ranks: Sequence[int] | None = None) -> str:
        self._act("sync")
        return "rank 1 has what rank 0 knows"


class Answers:
    """Answers of actions, in order."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.all: list[dict[str, Any]] = []

    def __call__(self, answer: dict[str, Any]) -> None:
        with self.changed:
            self.all.append(answer)
            self.changed.notify_all()

    def wait(self, count: int = 1) -> list[dict[str, Any]]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.all) >= count, PATIENCE)
            return self.all


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


def do(pool: FakePool, **content: Any) -> dict[str, Any]:
    """Press a button and wait for its answer."""
    answers = Answers()
    MembershipActions(pool, Recording()).begin(content, answers)
    (answer,) = answers.wait()
    return answer


# -- effects of buttons -----------------------------------------------------------------------------------------------


def test_actions_say_what_they_did(pool: FakePool) -> None:
    assert do(pool, what="resize", np=6, ends=[]) == {"text": "the pool has 6 ranks"}
    assert do(pool, what="resize", np=1, ends=[1, 2, 3]) == {"text": "the pool has 1 rank"}
    assert do(pool, what="repair") == {"text": "rank 2 is back, with empty memory"}
    assert do(pool, what="restart", ranks=[3, 1], ends=[1, 3]) == {
        "text": "ranks 1,3 started again, with empty memory"
    }
    assert do(pool, what="sync") == {"text": "rank 1 has what rank 0 knows"}
    assert pool.called == ["resize 6", "resize 1", "repair", "restart [1, 3]", "sync"]


def test_no_rank_ends_that_the_user_was_not_asked_about(pool: FakePool) -> None:
    for content in (
        {"what": "resize", "np": 2, "ends": [3]},
        {"what": "resize", "np": 2},
        {"what": "restart", "ranks": [2], "ends": []},
    ):
        answer = do(pool, **content)
        assert answer["error"].startswith("nothing was done: rank"), answer
        assert "2" in answer["error"]
    pool.states[2] = "lost: killed"
    assert "error" not in do(pool, what="resize", np=2, ends=[3])
    assert pool.called == ["resize 2"]


@pytest.mark.parametrize(
    "content",
    [
        {"what": "resize", "np": 0},
        {"what": "resize", "np": True},
        {"what": "resize", "np": "4"},
        {"what": "restart", "ranks": []},
        {"what": "restart", "ranks": "all"},
        {"what": "restart", "ranks": [0, "1"]},
        {"what": "stop"},
        {},
    ],
    ids=str,
)
def test_nonsense_is_refused(pool: FakePool, content: dict[str, Any]) -> None:
    assert set(do(pool, **content)) == {"error"}
    assert pool.called == []


def test_what_fails_is_said(pool: FakePool) -> None:
    assert do(pool, what="resize", np=9, ends=[]) == {"error": "no room for rank 8"}
    pool.state = "stopped"
    assert "stopped" in do(pool, what="repair")["error"]


def test_one_thing_is_done_at_a_time(pool: FakePool) -> None:
    changed: list[str] = []

    class Notified(Recording):
        def notify(self) -> None:
            changed.append(actions.busy)

    actions = MembershipActions(pool, Notified())
    first, second = Answers(), Answers()
    pool.go_on.clear()
    actions.begin({"what": "restart", "ranks": [0], "ends": [0]}, first)
    actions.begin({"what": "repair"}, second)
    assert second.all == [{"error": "wait until this is done: restart of rank 0"}]
    pool.go_on.set()
    first.wait()
    actions.begin({"what": "repair"}, second)
    assert "is back" in second.wait(2)[1]["text"]
    assert changed[:2] == ["restart of rank 0", ""]


def test_action_without_thread_is_refused_and_next_one_done(
    pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    actions, answers = MembershipActions(pool, Recording()), Answers()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", fail)
        actions.begin({"what": "repair"}, answers)
    assert answers.all == [{"error": "no thread can be started: can't start new thread"}]
    actions.begin({"what": "repair"}, answers)
    assert "is back" in answers.wait(2)[1]["text"]


# -- display ----------------------------------------------------------------------------------------------------------


def test_texts_of_other_hosts_are_only_texts(pool: FakePool) -> None:
    pool.change(1, "died", "<b>killed</b>\x1b[31m")
    pool.states[1] = "lost: <b>killed</b>\x1b[31m"
    state = pool.elastic()
    assert "<b>" not in membership_html(state, 20)
    assert "host&lt;1&gt;" in membership_html(state, 20)
    assert "\x1b" not in membership_text(state, 20) + str(membership_message(state))
    (change,) = membership_message(state)["history"]
    assert (change["rank"], change["what"], change["host"], change["pid"]) == (1, "died", "host<1>", 77)
    lost = membership_message(state)["members"][1]
    assert lost["state"] == "lost"
    assert "killed" in lost["reason"]


def test_news_come_when_something_has_changed(pool: FakePool) -> None:
    recording = Recording()
    actions = MembershipActions(pool, recording)
    news = MembershipNews(pool, actions, recording)
    first = news.next_message()
    assert first is not None
    assert [one["state"] for one in first["members"]] == ["here"] * 4
    assert news.next_message() is None
    version = recording.version
    pool.states[2] = "lost: killed"
    pool.change(2, "died", "killed")
    assert recording.version > version  # waiting threads check at once
    second = news.next_message()
    assert second is not None
    assert second["history"][-1]["what"] == "died"
    news.forget()
    again = news.next_message()
    assert again is not None
    assert again["history"] == second["history"]
    pool.state = "stopped"
    pool.change(0, "left", "")
    last = news.next_message()
    assert last is not None
    assert (last["ended"], last["members"]) == (True, again["members"])
    news.close()
    assert pool.listeners == []


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widget_module, "MEMBERSHIP_INTERVAL", 0.01)


def until(condition: Callable[[], object]) -> None:
    """Wait for something that a thread of a view does after news."""
    done = threading.Event()
    for _ in range(int(PATIENCE * 100)):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("it did not happen")


@pytest.mark.usefixtures("quick")
def test_a_widget_waits_for_the_pool_and_follows_it(pool: FakePool) -> None:
    recording, found = Recording(), list[FakePool]()
    widget = MembershipWidget(recording, lambda: found[0] if found else None)
    try:
        assert widget.membership == {}
        assert "waiting for ranks" in repr(widget)
        found.append(pool)
        recording.notify()
        until(lambda: widget.membership)
        pool.change(3, "left", "the pool was resized")
        until(lambda: len(widget.membership["history"]) == 1)
        assert "the pool was resized" in repr(widget)
    finally:
        widget.close()
    assert pool.listeners == []


@pytest.mark.usefixtures("quick")
def test_a_pool_that_ends_just_after_a_look_is_shown_as_ended(pool: FakePool) -> None:
    recording = Recording()
    widget = MembershipWidget(recording, lambda: pool)
    try:
        pool.change(3, "left", "the pool was resized")
        until(lambda: widget.membership["history"])
        pool.state = "stopped"
        recording.close()
        until(lambda: widget.membership["ended"])
        until(lambda: not widget._thread.is_alive())
    finally:
        widget.close()


def test_a_rank_that_was_let_go_is_there_until_it_has_left(pool: FakePool) -> None:
    pool.states[3] = LEAVES
    state = pool.elastic()
    assert headline(state).startswith(
        "3 of 3 ranks are there, rank 3 leaves at the next commit; cell [7] trains on"
    )
    members = membership_message(state)["members"]
    assert [member["state"] for member in members] == ["here", "here", "here", "leaving"]
    assert member_rows(state)[3][3] == LEAVES


def test_it_needs_a_pool() -> None:
    with pytest.raises(TypeError, match="a pool is needed here, not Recording"):
        hvdlab.membership(Recording())


# -- the panel --------------------------------------------------------------------------------------------------------


class Desk:
    def __init__(self, pool: FakePool | None) -> None:
        self.recorded, self.pool = Recording(), pool

    def recording(self, pool: str) -> Recording:
        return self.recorded

    def changeable(self, pool: str) -> FakePool | None:
        return self.pool

    def pools(self) -> list[dict[str, Any]]:
        return []

    def run_command(self, what: str, content: Any) -> dict[str, Any]:
        raise AssertionError(what)


HELLO = {"type": "hello", "pool": "", "recording": "", "since": 0, "rows": False}


def test_a_panel_gets_the_same_and_changes_the_same(pool: FakePool) -> None:
    answers = Answers()
    panel = Panel(lambda message, buffers: answers(message), Desk(pool))
    try:
        panel.receive(HELLO)
        until(lambda: any("membership" in one for one in answers.all))
        panel.receive({"type": "change", "pool": "", "request": "r1", "what": "resize", "np": 5, "ends": []})
        until(lambda: {"type": "answer", "request": "r1", "text": "the pool has 5 ranks"} in answers.all)
    finally:
        panel.close()
    assert pool.listeners == []


def test_a_pool_that_is_only_watched_is_not_changed() -> None:
    answers = Answers()
    panel = Panel(lambda message, buffers: answers(message), Desk(None))
    try:
        panel.receive(HELLO)
        panel.receive({"type": "change", "pool": "", "request": "r1", "what": "repair"})
        refusals = [one for one in answers.all if one.get("request") == "r1"]
        assert "can only be changed where they were started" in refusals[0]["error"]
    finally:
        panel.close()


def test_an_action_that_fails_in_any_way_is_answered() -> None:
    pool, replies = FakePool(), list[dict[str, Any]]()
    actions = MembershipActions(pool, Recording())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakePool, "elastic", lambda self: 1 // 0)
        actions.begin({"what": "repair"}, replies.append)
    assert replies == [{"error": "integer division or modulo by zero"}]
    assert actions.busy == ""


def test_an_action_is_answered_even_if_its_news_cannot_be_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    replies, raised = SimpleQueue[dict[str, Any]](), SimpleQueue[Any]()
    monkeypatch.setattr(threading, "excepthook", raised.put)

    class FailingRecording(Recording):
        def notify(self) -> None:
            if threading.current_thread() is not threading.main_thread():
                raise ZeroDivisionError("made to fail")

    actions = MembershipActions(FakePool(), FailingRecording())
    actions.begin({"what": "repair"}, replies.put)
    assert "text" in replies.get(timeout=PATIENCE)
    assert raised.get(timeout=PATIENCE).exc_type is ZeroDivisionError
