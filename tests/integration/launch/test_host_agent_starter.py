"""Orders to the agents of hosts, recorded by an agent that only listens."""

from __future__ import annotations

import errno
import os
import random
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from queue import SimpleQueue
from types import SimpleNamespace
from typing import IO, Any, cast, get_args

import pytest

from hvdlab.collectives.errors import StartError
from hvdlab.collectives.protocol.codec import FrameDecoder, encode_frame
from hvdlab.collectives.settings import WorldEnvironment
from hvdlab.launch.host_agent import wire
from hvdlab.launch.host_agent.connection import AgentLink
from hvdlab.launch.host_agent.starter import ExecStarter
from hvdlab.launch.hosts import LOCALHOST, Host
from hvdlab.launch.starter import Ended, LaunchRequest, Started
from support.effort import examples
from support.fuzz.protocol import make, run, spoil
from support.patience import PATIENCE


class Listener:
    """Connection to an agent that reads its orders and reports nothing."""

    def __init__(self) -> None:
        self.inbox, self._reports = os.pipe()
        self._orders, self.outbox = os.pipe()
        self._decoder = FrameDecoder()
        self._lost = False
        self._lock = threading.Lock()
        self._orders_read: list[wire.ToAgent] = []
        os.write(self._reports, wire.GREETING)

    def first_order(self) -> wire.Start:
        """Waits for it."""
        frames: list[Any] = []
        while not frames:
            frames = list(self._decoder.feed(os.read(self._orders, 1 << 16)))
        order = wire.decode_to_agent(frames[0])
        assert isinstance(order, wire.Start)
        return order

    def next_order(self) -> wire.ToAgent:
        """Wait for an order, the next one."""
        while not self._orders_read:
            frames = self._decoder.feed(os.read(self._orders, 1 << 16))
            self._orders_read += map(wire.decode_to_agent, frames)
        return self._orders_read.pop(0)

    def report(self, *reports: wire.AgentMessage) -> None:
        """Report to the starter."""
        os.write(self._reports, b"".join(map(wire.encode, reports)))

    def lose(self) -> None:
        """Lose the agent. The test and the starter's thread can do so at once."""
        with self._lock:
            lost, self._lost = self._lost, True
        if not lost:
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
    """Connector that reaches hosts whose agents only listen."""

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
def transport() -> Listeners:
    return Listeners()


@pytest.fixture
def ended() -> SimpleQueue[Ended]:
    return SimpleQueue()


@pytest.fixture
def starter(transport: Listeners, ended: SimpleQueue[Ended]) -> Iterator[ExecStarter]:
    request = LaunchRequest(WorldEnvironment("tls:10.0.0.1:1", "token"), cast(Any, None), module="m")
    found = ExecStarter(
        request, SimpleNamespace(handle=ended.put), (Host("far", 4),), transport=transport, python="python"
    )
    yield found
    found.close(0.0)


def test_ranks_that_come_back_one_by_one_share_the_cores_with_those_to_come(
    starter: ExecStarter, transport: Listeners, ended: SimpleQueue[Ended]
) -> None:
    starter.start_on("far", (0, 1, 2, 3), 4)
    assert transport.connected[0].first_order().threads == 4
    transport.connected[0].lose()
    assert {ended.get(timeout=PATIENCE).rank for _ in range(4)} == {0, 1, 2, 3}
    starter.start_on("far", (2,), 4)
    assert transport.connected[1].first_order().threads == 4


def test_an_agent_that_was_started_beforehand_is_the_first_of_its_host(
    monkeypatch: pytest.MonkeyPatch, transport: Listeners, ended: SimpleQueue[Ended]
) -> None:
    beforehand, next_one = Listener(), Listener()

    def start_next(host: str, python: str, *, stdin: bool, errors: IO[bytes]) -> AgentLink:
        errors.close()
        return AgentLink(host, next_one)

    monkeypatch.setattr(transport, "is_here", lambda host: host == LOCALHOST)
    monkeypatch.setattr(AgentLink, "local", start_next)
    request = LaunchRequest(WorldEnvironment("tls:10.0.0.1:1", "token"), cast(Any, None), module="m")
    starter = ExecStarter(
        request,
        SimpleNamespace(handle=ended.put),
        (Host("far", 1), Host(LOCALHOST, 1)),
        transport=transport,
        python="python",
        agent=AgentLink(LOCALHOST, beforehand),
    )
    starter.start((0, 1), 2)
    assert transport.connected[0].first_order().coordinator == "tls:10.0.0.1:1"
    assert isinstance(beforehand.next_order(), wire.Start)
    order = beforehand.next_order()
    assert isinstance(order, wire.Spawn)
    assert [spec.rank for spec in order.ranks] == [1]
    beforehand.lose()
    assert ended.get(timeout=PATIENCE).rank == 1
    starter.start_on(LOCALHOST, (1,), 2)
    assert isinstance(next_one.next_order(), wire.Start)
    starter.close(0.0)


def test_start_that_reaches_not_all_hosts_orders_no_rank(
    monkeypatch: pytest.MonkeyPatch, transport: Listeners, ended: SimpleQueue[Ended]
) -> None:
    connect = transport.connect

    def refuse(host: str, python: str, errors: IO[bytes] | None) -> Listener:
        if host == "farther":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "ssh")
        return connect(host, python, errors)

    monkeypatch.setattr(transport, "connect", refuse)
    request = LaunchRequest(WorldEnvironment("tls:10.0.0.1:1", "token"), cast(Any, None), module="m")
    hosts = Host("far", 1), Host("farther", 1)
    starter = ExecStarter(
        request, SimpleNamespace(handle=ended.put), hosts, transport=transport, python="python"
    )
    with pytest.raises(StartError, match="the agent of farther could not be started"):
        starter.start((0, 1), 2)
    starter.start_on("far", (2,), 3)
    (far,) = transport.connected
    assert isinstance(far.next_order(), wire.Start)
    order = far.next_order()
    assert isinstance(order, wire.Spawn)
    assert [spec.rank for spec in order.ranks] == [2]
    starter.close(0.0)
    assert [ended.get(timeout=PATIENCE).rank, ended.empty()] == [2, True]


def test_all_ranks_that_a_host_will_have_share_its_cores(starter: ExecStarter, transport: Listeners) -> None:
    starter.start((0,), 4)
    assert transport.connected[0].first_order().threads == 4


def test_reports_of_ranks_that_an_agent_does_not_have_are_logged_and_the_others_heard(
    starter: ExecStarter,
    transport: Listeners,
    ended: SimpleQueue[Ended | Started],
    capfd: pytest.CaptureFixture[str],
) -> None:
    starter.start((0,), 1)
    (far,) = transport.connected
    far.report(
        wire.RankOutput(7, 1, b"x"),
        wire.ResultPiece(7, b"x"),
        wire.RankExited(7, 0, 0),
        wire.RankStarted(8, 1),
        wire.RankStarted(0, 5),
    )
    assert ended.get(timeout=PATIENCE) == Started(0, 5, "far")
    assert isinstance(far.next_order(), wire.Start)
    assert isinstance(far.next_order(), wire.Spawn)
    starter.signal(0, signal.SIGCONT)  # which wakes the thread, so that it writes both
    assert far.next_order() == wire.SignalRanks((8,), signal.SIGKILL)
    assert "sent RankExited for rank 7, which does not run there" in capfd.readouterr().err


def test_an_order_that_was_not_read_ends_the_ranks_that_wait_and_no_other(
    starter: ExecStarter, transport: Listeners, ended: SimpleQueue[Ended | Started]
) -> None:
    starter.start((0, 1), 2)
    (far,) = transport.connected
    far.report(wire.RankStarted(0, 5), wire.OrderFailed("garbage", unread=True), wire.RankExited(0, 3, 0))
    assert ended.get(timeout=PATIENCE) == Started(0, 5, "far")
    waiting, ran = ended.get(timeout=PATIENCE), ended.get(timeout=PATIENCE)
    assert isinstance(waiting, Ended)
    assert (waiting.rank, waiting.reason) == (1, "the agent of far could not read an order: garbage")
    assert isinstance(ran, Ended)
    assert (ran.rank, ran.code) == (0, 3)


def test_a_report_that_the_observer_fails_at_does_not_end_the_starter(
    transport: Listeners, capfd: pytest.CaptureFixture[str]
) -> None:
    heard: SimpleQueue[Ended | Started] = SimpleQueue()

    def handle(event: Ended | Started) -> None:
        if isinstance(event, Started):
            raise ZeroDivisionError("made to fail")
        heard.put(event)

    request = LaunchRequest(WorldEnvironment("tls:10.0.0.1:1", "token"), cast(Any, None), module="m")
    starter = ExecStarter(
        request, SimpleNamespace(handle=handle), (Host("far", 4),), transport=transport, python="python"
    )
    starter.start((0,), 1)
    transport.connected[0].report(wire.RankStarted(0, 5), wire.RankExited(0, 3, 0))
    found = heard.get(timeout=PATIENCE)
    assert isinstance(found, Ended)
    assert found.code == 3
    starter.close(0.0)
    assert "ZeroDivisionError: made to fail" in capfd.readouterr().err


def test_whatever_an_agent_reports_each_rank_ends_once(
    transport: Listeners, ended: SimpleQueue[Ended | Started]
) -> None:
    def one(chance: random.Random) -> None:
        request = LaunchRequest(WorldEnvironment("tls:10.0.0.1:1", "token"), cast(Any, None), module="m")
        starter = ExecStarter(
            request,
            SimpleNamespace(handle=ended.put),
            (Host("far", 4),),
            transport=transport,
            python="python",
        )
        starter.start((0, 1, 2, 3), 4)
        far = transport.connected[-1]
        reports = []
        for _ in range(chance.randint(1, 20)):
            kind = chance.choice(get_args(wire.FromAgent))
            payload = wire.encode_payload(make(kind, chance, tame=chance.random() < 0.9))
            reports.append(encode_frame((chance.random() < 0.02 and spoil(payload, chance)) or payload))
        os.write(far._reports, b"".join(reports))  # at once: an unreadable report has the connection closed
        far.lose()
        over: list[int] = []
        while len(over) < 4:
            event = ended.get(timeout=PATIENCE)
            over += [event.rank] if isinstance(event, Ended) else []
        starter.close(0.0)
        assert sorted(over) == [0, 1, 2, 3]
        assert ended.empty()

    run(one, examples(100))


def test_a_rank_that_the_observer_starts_at_the_end_of_the_last_one_is_waited_for(
    transport: Listeners,
) -> None:
    heard: SimpleQueue[Ended | Started] = SimpleQueue()
    starter: ExecStarter

    def handle(event: Ended | Started) -> None:
        if isinstance(event, Ended) and event.rank == 0:
            starter.start_on("far", (1,), 2)
        heard.put(event)

    request = LaunchRequest(WorldEnvironment("tls:10.0.0.1:1", "token"), cast(Any, None), module="m")
    starter = ExecStarter(
        request, SimpleNamespace(handle=handle), (Host("far", 4),), transport=transport, python="python"
    )
    starter.start((0,), 1)
    transport.connected[0].report(wire.RankStarted(0, 5), wire.RankExited(0, 3, 0), wire.RankStarted(1, 6))
    assert [type(heard.get(timeout=PATIENCE)) for _ in range(3)] == [Started, Ended, Started]
    assert not starter._idle.is_set()  # close() would not wait for rank 1
    starter.close(0.0)


def test_signal_after_the_close_writes_into_no_other_file(
    monkeypatch: pytest.MonkeyPatch, transport: Listeners, ended: SimpleQueue[Ended]
) -> None:
    pipes: list[tuple[int, int]] = []
    pipe2 = os.pipe2

    def recorded(flags: int) -> tuple[int, int]:
        pipes.append(pipe2(flags))
        return pipes[-1]

    request = LaunchRequest(WorldEnvironment("tls:10.0.0.1:1", "token"), cast(Any, None), module="m")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe2", recorded)
        starter = ExecStarter(
            request,
            SimpleNamespace(handle=ended.put),
            (Host("far", 4),),
            transport=transport,
            python="python",
        )
    with tempfile.TemporaryFile() as file:
        starter.close(0.0)
        for descriptor in pipes[0]:  # the numbers of the closed pipe are reused
            os.dup2(file.fileno(), descriptor)
        starter.signal(0, signal.SIGCONT)
        assert os.fstat(file.fileno()).st_size == 0
        for descriptor in pipes[0]:
            os.close(descriptor)
