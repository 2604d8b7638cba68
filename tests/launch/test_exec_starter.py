"""What the agents of hosts are ordered to do, by an agent that only listens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from queue import SimpleQueue
from types import SimpleNamespace
from typing import IO, Any, cast

import pytest

from hvdlab.collectives.environment import World
from hvdlab.collectives.protocol.frames import FrameDecoder
from hvdlab.launch.exec_agent import wire
from hvdlab.launch.exec_agent.starter import ExecStarter
from hvdlab.launch.hosts import Host
from hvdlab.launch.starter import Ended, LaunchRequest
from patience import PATIENCE


class Listener:
    """A connection to an agent that reads its orders and reports nothing."""

    def __init__(self) -> None:
        self.inbox, self._reports = os.pipe()
        self._orders, self.outbox = os.pipe()
        self._decoder = FrameDecoder()
        self._lost = False

    def first_order(self) -> wire.Start:
        """Waits for it."""
        frames: list[Any] = []
        while not frames:
            frames = list(self._decoder.feed(os.read(self._orders, 1 << 16)))
        order = wire.decode_to_agent(frames[0])
        assert isinstance(order, wire.Start)
        return order

    def lose(self) -> None:
        """The agent is gone."""
        if not self._lost:
            self._lost = True
            os.close(self._reports)

    def end_text(self, host: str, greeted: bool) -> str:
        return f"the agent of {host} is gone"

    def hang_up(self) -> None:
        """It has nothing to end."""

    def kill(self) -> None:
        self.lose()

    def close(self, timeout: float) -> None:
        self.lose()
        for descriptor in (self.inbox, self._orders, self.outbox):
            os.close(descriptor)


class Listeners:
    """Reaches hosts whose agents only listen."""

    def __init__(self) -> None:
        self.connected: list[Listener] = []

    def is_here(self, host: str) -> bool:
        return False

    def connect(self, host: str, python: str, errors: IO[bytes] | None) -> Listener:
        if errors is not None:
            errors.close()
        self.connected.append(Listener())
        return self.connected[-1]

    def machine(self, host: str) -> str:
        return host

    def variables(self, host: str) -> Mapping[str, str]:
        return {}


@pytest.fixture
def reach() -> Listeners:
    return Listeners()


@pytest.fixture
def ended() -> SimpleQueue[Ended]:
    return SimpleQueue()


@pytest.fixture
def starter(reach: Listeners, ended: SimpleQueue[Ended]) -> Iterator[ExecStarter]:
    request = LaunchRequest(World("tls:10.0.0.1:1", "token"), cast(Any, None), module="m")
    found = ExecStarter(
        request, SimpleNamespace(handle=ended.put), (Host("far", 4),), reach=reach, python="python"
    )
    yield found
    found.close(0.0)


def test_ranks_that_come_back_one_by_one_share_the_cores_with_those_to_come(
    starter: ExecStarter, reach: Listeners, ended: SimpleQueue[Ended]
) -> None:
    starter.start_on("far", (0, 1, 2, 3), 4)
    assert reach.connected[0].first_order().threads == 4
    reach.connected[0].lose()
    assert {ended.get(timeout=PATIENCE).rank for _ in range(4)} == {0, 1, 2, 3}
    starter.start_on("far", (2,), 4)
    assert reach.connected[1].first_order().threads == 4


def test_all_ranks_that_a_host_will_have_share_its_cores(starter: ExecStarter, reach: Listeners) -> None:
    starter.start((0,), 4)
    assert reach.connected[0].first_order().threads == 4
