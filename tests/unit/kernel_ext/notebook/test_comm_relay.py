"""Relay of messages between comms of ranks and the page, without a kernel, ranks or a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import comm
import pytest

from hvdlab.collectives.client import Client, CoordinatorLostError
from hvdlab.kernel_ext.notebook.comm_relay import CommRelay, WidgetStates
from hvdlab.kernel_ext.wire.channel import COMM, CommMessage, decode_comm, encode_comm


class FakeClient:
    """Connection whose coordinator a test takes away and gives back."""

    def __init__(self) -> None:
        self.lost = False
        self.posted: list[tuple[CommMessage, tuple[int, ...]]] = []
        self.from_rank: Callable[[int, bytes], None] = lambda rank, body: None
        self.reconnected: Callable[[object], None] = lambda membership: None

    def on_mail(self, topic: str, callback: Callable[[int, bytes], None]) -> None:
        assert topic == COMM
        self.from_rank = callback

    def on_reconnected(self, callback: Callable[[object], None]) -> None:
        self.reconnected = callback

    def post(self, topic: str, body: bytes, to: Sequence[int]) -> None:
        if self.lost:
            raise CoordinatorLostError("the coordinator is lost")
        self.posted.append((decode_comm(body), tuple(to)))

    def reconnect(self) -> None:
        self.lost = False
        self.reconnected(None)

    @property
    def values(self) -> list[tuple[int, tuple[int, ...]]]:
        """The values of the updates that came through, each with the ranks that it was for."""
        return [(message.data["state"]["value"], to) for message, to in self.posted]


class FakeComms:
    """Comms of the kernel, and the page: it acts as soon as a comm is open there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        manager = comm.base_comm.CommManager()  # it has no annotations
        page = self

        class PageComm(comm.base_comm.BaseComm):
            def publish_msg(self, msg_type: str, data: Any = None, *more: Any, **keys: Any) -> None:
                page.published.append((msg_type, data))
                if msg_type == "comm_open":
                    page.opened()

        monkeypatch.setattr(comm, "create_comm", PageComm)
        monkeypatch.setattr(comm, "get_comm_manager", lambda: manager)
        self.published: list[tuple[str, Any]] = []
        self.opened: Callable[[], None] = lambda: None
        self._manager: Any = manager

    def page_sends(self, kind: str, data: dict[str, Any], name: str = "a") -> None:
        """Have the page send a message of a comm."""
        message = {"content": {"comm_id": name, "data": data}, "metadata": {}, "buffers": []}
        getattr(self._manager, kind)(None, None, message)

    def page_sets(self, value: int) -> None:
        """Have the page change the value of the widget."""
        self.page_sends("comm_msg", {"method": "update", "state": {"value": value}})


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> WidgetStates:
    found = WidgetStates()
    monkeypatch.setattr(found, "_serve", lambda: None)
    return found


@pytest.fixture
def comms(client: FakeClient, states: WidgetStates, monkeypatch: pytest.MonkeyPatch) -> FakeComms:
    kernel = SimpleNamespace(session=None, iopub_socket=None, get_parent=lambda channel: {})
    shell: Any = SimpleNamespace(kernel=kernel)
    CommRelay(cast(Client, client), shell, states)
    return FakeComms(monkeypatch)


def rank_opens(client: FakeClient, rank: int = 3) -> None:
    """Have a rank open a widget's comm."""
    opened = CommMessage("comm_open", "a", {"state": {"value": 0}}, {}, (), "jupyter.widget", None)
    client.from_rank(rank, encode_comm(opened))


def test_pages_updates_reach_rank_after_coordinators_return(
    client: FakeClient, comms: FakeComms, states: WidgetStates
) -> None:
    rank_opens(client)
    comms.page_sets(1)
    client.lost = True
    comms.page_sets(2)
    comms.page_sets(3)
    assert states.add_to({}, [], [])[0]["a"]["state"] == {"value": 3}
    # The connection works again some moments before the client reports it.
    client.lost = False
    comms.page_sets(4)
    client.reconnect()
    comms.page_sets(5)
    assert client.values == [(value, (3,)) for value in (1, 2, 3, 4, 5)]


def test_updates_are_kept_on_if_next_coordinator_is_lost_too(client: FakeClient, comms: FakeComms) -> None:
    rank_opens(client)
    client.lost = True
    comms.page_sets(1)
    client.reconnected(None)
    comms.page_sets(2)
    client.reconnect()
    client.reconnect()
    assert client.values == [(1, (3,)), (2, (3,))]


def test_page_that_answers_at_once_is_heard(
    client: FakeClient, comms: FakeComms, states: WidgetStates
) -> None:
    comms.opened = lambda: comms.page_sets(1)
    rank_opens(client)
    assert client.values == [(1, (3,))]
    assert states.add_to({}, [], [])[0]["a"]["state"] == {"value": 1}


def test_nothing_stays_of_comm_that_page_closes_at_once(
    client: FakeClient, comms: FakeComms, states: WidgetStates
) -> None:
    comms.opened = lambda: comms.page_sends("comm_close", {})
    rank_opens(client)
    assert [message.kind for message, _ in client.posted] == ["comm_close"]
    assert states.add_to({}, [], []) == ({}, [], [])
    client.from_rank(3, encode_comm(CommMessage("comm_msg", "a", {"late": True}, {}, ())))
    assert "comm_msg" not in [kind for kind, _ in comms.published]
