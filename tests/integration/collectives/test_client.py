"""The notebook's client against a real coordinator."""

from __future__ import annotations

import errno
import os
import queue
import select
import signal
import socket
import threading
from collections.abc import Iterable, Iterator
from typing import NoReturn, TypeVar

import pytest

from hvdlab.collectives.client import Client, ClientConnection, CoordinatorLostError, Membership, Stall
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import decode_to_peer
from hvdlab.collectives.protocol.endpoint import Endpoint
from hvdlab.collectives.protocol.handshake import connect
from hvdlab.collectives.time_limits import Deadline
from support.patience import GONE, HOUR, PATIENCE

M = TypeVar("M", bound=m.Message)


@pytest.fixture
def coordinator() -> Iterator[CoordinatorProcess]:
    with CoordinatorProcess.start(stall_seconds=HOUR, timeout=PATIENCE) as process:
        yield process


@pytest.fixture
def client(coordinator: CoordinatorProcess) -> Iterator[Client]:
    with Client.connect(coordinator.address, coordinator.client_token) as client:
        yield client


def join(coordinator: CoordinatorProcess, rank: int, *, tracked: bool = False) -> Endpoint:
    hello = m.Hello(
        m.PROTOCOL_VERSION, coordinator.token, "rank", rank, "h", os.getpid(), planes=("gloo",), cells_tracked=tracked
    )  # fmt: skip
    return connect(coordinator.address, hello, deadline=Deadline(PATIENCE))[0]


def wait_for(endpoint: Endpoint, kind: type[M]) -> M:
    while True:
        assert select.select([endpoint], [], [], PATIENCE)[0], f"no {kind.__name__} comes"
        found = [decode_to_peer(payload) for payload in endpoint.receive()]
        for message in found:
            if isinstance(message, kind):
                return message


def test_membership_follows_the_ranks(coordinator: CoordinatorProcess, client: Client) -> None:
    assert client.membership() == Membership()
    client.expect([0, 1])
    ranks = [join(coordinator, rank) for rank in (0, 1)]
    membership = client.wait_for(lambda now: now.complete, PATIENCE)
    assert membership.ranks == (0, 1)
    assert membership.members[0].pid == os.getpid()
    ranks[1].close()
    membership = client.wait_for(lambda now: bool(now.deaths), PATIENCE)
    assert membership.missing == (1,)
    client.rank_lost(1, os.getpid(), "killed by SIGKILL")
    client.flush()
    assert client.membership().deaths[0].reason == "killed by SIGKILL"
    ranks[0].close()


def test_answers_after_their_limit_are_not_kept(client: Client) -> None:
    held, goes_on = threading.Event(), threading.Event()

    def hold(membership: Membership) -> None:
        held.set()
        assert goes_on.wait(PATIENCE)

    # The client's thread takes no answer meanwhile.
    client.on_membership(hold)
    try:
        assert held.wait(PATIENCE)
        with pytest.raises(TimeoutError):
            client.flush(0.0)
        with pytest.raises(TimeoutError):
            client.story(timeout=0.0)
    finally:
        goes_on.set()
    client.flush()  # its answer comes after theirs
    assert (client._pongs, client._stories) == (set(), {})


def test_callbacks_get_the_present_membership_and_each_new_one(
    coordinator: CoordinatorProcess, client: Client
) -> None:
    seen: queue.SimpleQueue[tuple[Membership, threading.Thread]] = queue.SimpleQueue()
    client.on_membership(lambda membership: seen.put((membership, threading.current_thread())))
    assert seen.get(timeout=PATIENCE)[0] == Membership()
    client.expect([3])
    membership, thread = seen.get(timeout=PATIENCE)
    assert membership.expected == (3,)
    assert thread is not threading.current_thread()


@pytest.mark.parametrize("together", [True, False])
def test_a_cell_is_known_before_mail_that_is_sent_with_it_or_after_it_arrives(
    coordinator: CoordinatorProcess, client: Client, together: bool
) -> None:
    client.expect([0, 1])
    ranks = [join(coordinator, rank, tracked=True) for rank in (0, 1)]
    client.wait_for(lambda now: now.complete, PATIENCE)
    definition = m.Definition(0, m.Signature(0, "x", 8, 1, (1,)), "")
    for number in range(50):
        mail = "cell", b"", [0, 1]
        client.cell_started(str(number), [0, 1], mail=[mail] if together else ())
        if not together:
            client.post(*mail)
        for rank in ranks:
            wait_for(rank, m.Mail)
            rank.send(m.Announce(0, 1, (0,), (definition,)))  # before its CellBegin: none is taken for idle
        for rank in ranks:
            assert isinstance(wait_for(rank, m.Execute | m.Abort), m.Execute)  # type: ignore[arg-type]  # for isinstance
            rank.send(m.CellEnd(str(number)))
    for rank in ranks:
        rank.close()


def test_mail_interrupts_and_events(coordinator: CoordinatorProcess, client: Client) -> None:
    client.expect([0])
    rank = join(coordinator, 0)
    client.wait_for(lambda now: now.complete, PATIENCE)
    mail: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    events: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    client.on_mail("topic", lambda sender, body: mail.put((sender, body)))
    rank.send(m.Events(b"early"))
    rank.send(m.Post("topic", b"from the rank"))
    rank.send(m.Post("other", b"nobody listens"))
    assert mail.get(timeout=PATIENCE) == (0, b"from the rank")
    client.on_events(lambda number, batch: events.put((number, batch)))
    assert events.get(timeout=PATIENCE) == (0, b"early")
    rank.send(m.Events(b"late"))
    assert events.get(timeout=PATIENCE) == (0, b"late")
    client.post("topic", b"from the client", [0])
    assert wait_for(rank, m.Mail) == m.Mail("topic", -1, b"from the client")
    client.interrupt([0])
    wait_for(rank, m.Interrupt)
    rank.close()


def test_a_story_has_the_decisions_about_a_rank(coordinator: CoordinatorProcess, client: Client) -> None:
    client.expect([0, 1])
    ranks = [join(coordinator, rank) for rank in (0, 1)]
    client.wait_for(lambda membership: membership.complete, PATIENCE)
    client.rank_lost(1, os.getpid(), "killed by SIGKILL")
    abort = wait_for(ranks[0], m.Abort)
    told = client.story(rank=1, timeout=PATIENCE)
    died = [decision for decision in told if decision.kind == "died"][-1]
    assert died.facts["reason"] == "killed by SIGKILL"
    (aborted, *_) = client.story(1, decision=abort.decision, timeout=PATIENCE)[::-1]
    assert (aborted.kind, aborted.cause) == ("aborted", died.number)
    for endpoint in ranks:
        endpoint.close()


def test_stalls_are_reported() -> None:
    stalls: queue.SimpleQueue[Stall] = queue.SimpleQueue()
    with (
        CoordinatorProcess.start(stall_seconds=0.2, timeout=PATIENCE) as coordinator,
        Client.connect(coordinator.address, coordinator.client_token) as client,
    ):
        client.on_stall(stalls.put)
        client.expect([0, 1])
        ranks = [join(coordinator, rank) for rank in (0, 1)]
        wait_for(ranks[0], m.Configure)
        ranks[0].send(
            m.Announce(0, 1, (0,), (m.Definition(0, m.Signature(0, "slow", 8, 1, (1,)), "line 1"),))
        )
        stall = stalls.get(timeout=PATIENCE)
        assert (stall.name, stall.waited, stall.missing, stall.sites) == ("slow", (0,), (1,), ("line 1",))
        for rank in ranks:
            rank.close()


def test_large_mail_goes_through(coordinator: CoordinatorProcess, client: Client) -> None:
    client.expect([0])
    rank = join(coordinator, 0)
    client.wait_for(lambda now: now.complete, PATIENCE)
    body = os.urandom(20_000_000)
    client.post("t", body, [0])
    assert wait_for(rank, m.Mail).body == body
    rank.close()


def test_a_callback_that_fails_is_logged_and_concerns_nobody_else(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    seen: queue.SimpleQueue[Membership] = queue.SimpleQueue()

    def fail(membership: Membership) -> None:
        raise ValueError("a user's mistake")

    client.on_membership(fail)
    client.on_membership(seen.put)
    seen.get(timeout=PATIENCE)
    assert "a user's mistake" in caplog.text


def test_waiting_in_a_callback_is_refused(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()

    def wait(membership: Membership) -> None:
        try:
            client.flush()
        finally:
            done.set()

    client.on_membership(wait)
    assert done.wait(PATIENCE)
    client.flush()
    assert "inside a callback" in caplog.text


def test_the_loss_of_the_coordinator_is_told(coordinator: CoordinatorProcess, client: Client) -> None:
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    client.on_lost(reasons.put)
    client.flush()
    coordinator.close()
    assert "lost" in reasons.get(timeout=GONE)
    assert client.closed
    with pytest.raises(CoordinatorLostError):
        client.cell_started("x", [0])
    with pytest.raises(CoordinatorLostError):
        client.wait_for(lambda now: False, PATIENCE)
    client.close()


def test_who_asks_too_late_is_told_of_the_loss_at_once(
    coordinator: CoordinatorProcess, client: Client
) -> None:
    """The coordinator may end between connecting and the first question."""
    coordinator.close()
    client._connection.thread.join(PATIENCE)
    assert client.closed
    reasons: list[str] = []
    client.on_lost(reasons.append)
    assert len(reasons) == 1
    assert "lost" in reasons[0]
    client.close()
    client.on_lost(reasons.append)
    assert len(reasons) == 1


def test_events_may_be_declined_twice(client: Client) -> None:
    """Also by a client that never subscribed; the connection lives."""
    batches: list[bytes] = []
    for _ in range(2):
        client.off_events(lambda rank, batch: batches.append(batch))
    client.flush()
    assert not client.closed


def test_closing_is_no_loss(coordinator: CoordinatorProcess) -> None:
    client = Client.connect(coordinator.address, coordinator.client_token)
    lost: list[str] = []
    client.on_lost(lost.append)
    client.expect([0])
    client.close()
    client.close()
    assert lost == []
    with pytest.raises(CoordinatorLostError):
        client.post("t", b"", [0])
    with Client.connect(coordinator.address, coordinator.client_token) as other:
        assert other.membership().expected == (0,)  # messages just before close() count


def test_close_that_was_interrupted_is_finished_by_the_next(
    coordinator: CoordinatorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    client = Client.connect(coordinator.address, coordinator.client_token)
    with monkeypatch.context() as patch:
        patch.setattr(ClientConnection, "send", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.close()
    client.close(PATIENCE)
    assert "hvdlab-client" not in [thread.name for thread in threading.enumerate()]


def test_waits_have_an_end(client: Client) -> None:
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        client.wait_for(lambda now: False, 0.01)


def test_a_wrong_token(coordinator: CoordinatorProcess) -> None:
    with pytest.raises(StartError, match="token"):
        Client.connect(coordinator.address, "guess")


# -- a successor of the coordinator -----------------------------------------------------------------------------------


@pytest.fixture
def kept() -> Iterator[CoordinatorProcess]:
    with CoordinatorProcess.start(keep=True, timeout=PATIENCE) as process:
        yield process


def same_process(generation: int, ranks: tuple[int, ...]) -> m.KnownSet:
    """Return a world whose ranks are all connections of this process."""
    return m.KnownSet(0, generation, ranks, (os.getpid(),) * len(ranks))


def come_back(
    kept: CoordinatorProcess,
    rank: int,
    alive: tuple[int, ...],
    *,
    known: m.KnownSet | None = None,
    elastic: bool = False,
    incarnation: int = 0,
) -> Endpoint:
    hello = m.Hello(
        m.PROTOCOL_VERSION, kept.token, "rank", rank, "h", os.getpid(), planes=("gloo",), incarnation=incarnation
    )  # fmt: skip
    endpoint, _ = connect(kept.address, hello, deadline=Deadline(PATIENCE))
    endpoint.send(m.Resume((known or same_process(1, alive),), alive, elastic=elastic))
    return endpoint


def test_a_client_goes_on_with_the_successor(kept: CoordinatorProcess) -> None:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    mail: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    again: queue.SimpleQueue[Membership] = queue.SimpleQueue()
    seen: list[Membership] = []
    with Client.connect(kept.address, kept.client_token) as client:
        client.on_lost(lost.put)
        client.on_mail("t", lambda sender, body: mail.put((sender, body)))
        client.on_reconnected(again.put)
        client.expect([0, 1])
        old = [join(kept, rank) for rank in (0, 1)]
        client.wait_for(lambda now: now.complete, PATIENCE)
        client.on_membership(seen.append)
        client.flush()
        process = os.pidfd_open(kept.pid)
        os.kill(kept.pid, signal.SIGKILL)
        assert "lost" in lost.get(timeout=GONE)
        with pytest.raises(CoordinatorLostError):
            client.post("t", b"", [0])
        assert client.membership().ranks == (0, 1), "as it was"
        client.rank_lost(1, os.getpid(), "killed by SIGBUS")
        assert select.select([process], [], [], 10)[0]  # a process ends a moment after its connections
        os.close(process)
        assert kept.ending() == "killed by SIGKILL"
        kept.respawn(PATIENCE)
        assert (kept.ending(), kept.incarnation) == ("", 1)
        new = come_back(kept, 0, (0, 1))
        membership = client.reconnect()
        assert membership.ranks == (0,)
        assert [(death.rank, death.reason) for death in membership.deaths] == [(1, "killed by SIGBUS")]
        assert again.get(timeout=PATIENCE) == membership
        assert client.incarnation == 1
        new.send(m.Post("t", b"hello"))
        assert mail.get(timeout=PATIENCE) == (0, b"hello")
        client.flush()
        assert all(0 in now.ranks for now in seen), "nobody sees ranks on their way as missing"
        for endpoint in (*old, new):
            endpoint.close()


def test_cells_of_a_pool_go_on(kept: CoordinatorProcess) -> None:
    with Client.connect(kept.address, kept.client_token) as client:
        client.expect([0, 1])
        os.kill(kept.pid, signal.SIGKILL)
        kept.respawn(PATIENCE)
        client.reconnect({"cell": [0, 1]}, timeout=PATIENCE)  # no rank was there
        ranks = [join(kept, rank, tracked=True) for rank in (0, 1)]
        configure = wait_for(ranks[0], m.Configure)
        ranks[0].send(m.CellBegin("cell"))
        definition = m.Definition(0, m.Signature(6, "b", 0, 0, ()), "s")
        ranks[0].send(m.Announce(0, configure.generation, (0,), (definition,)))
        assert wait_for(ranks[0], m.Abort).kind == "cell_ended", "the cell was not for newcomers"
        for endpoint in ranks:
            endpoint.close()


def cut(client: Client) -> None:
    """End the connection of a client whose coordinator lives."""
    client._connection._endpoint._sock.shutdown(socket.SHUT_RDWR)


def test_a_client_goes_on_with_the_same_coordinator(coordinator: CoordinatorProcess) -> None:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    events: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    mail: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    with Client.connect(coordinator.address, coordinator.client_token) as client:
        client.on_lost(lost.put)
        client.on_events(lambda number, batch: events.put((number, batch)))
        client.on_mail("t", lambda sender, body: mail.put((sender, body)))
        client.expect([0, 1])
        ranks = [join(coordinator, rank) for rank in (0, 1)]
        generation = client.wait_for(lambda now: now.complete, PATIENCE).generation
        ranks[0].send(m.Events(b"first"))
        assert events.get(timeout=PATIENCE) == (0, b"first")
        cut(client)
        lost.get(timeout=GONE)
        ranks[0].send(m.Events(b"meanwhile"))
        membership = client.reconnect(timeout=PATIENCE)
        assert (membership.ranks, membership.generation) == ((0, 1), generation), (
            "nothing has happened to the ranks"
        )
        assert client.incarnation == 0
        ranks[0].send(m.Events(b"later"))
        assert [events.get(timeout=PATIENCE) for _ in range(2)] == [(0, b"meanwhile"), (0, b"later")]
        ranks[0].send(m.Post("t", b"hello"))
        assert mail.get(timeout=PATIENCE) == (0, b"hello")
        cut(client)
        lost.get(timeout=GONE)
        client.rank_lost(1, os.getpid(), "killed by SIGBUS")
        client.reconnect(timeout=PATIENCE)
        (death,) = client.wait_for(lambda now: bool(now.deaths), PATIENCE).deaths
        assert (death.rank, death.reason) == (1, "killed by SIGBUS")
        client.flush()
        assert events.empty()
        for endpoint in ranks:
            endpoint.close()


def test_a_cell_whose_end_was_lost_with_the_connection_has_ended(coordinator: CoordinatorProcess) -> None:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    with Client.connect(coordinator.address, coordinator.client_token) as client:
        client.on_lost(lost.put)
        client.expect([0, 1])
        ranks = [join(coordinator, rank, tracked=True) for rank in (0, 1)]
        client.wait_for(lambda now: now.complete, PATIENCE)
        generation = wait_for(ranks[0], m.Configure).generation
        client.cell_started("cell", [0, 1])
        client.flush()
        ranks[1].send(m.CellEnd("cell"))
        ranks[1].send(m.Ping(7))
        wait_for(ranks[1], m.Pong)
        cut(client)
        lost.get(timeout=GONE)
        client.reconnect({"cell": [0, 1]}, timeout=PATIENCE)
        client.flush()
        definition = m.Definition(0, m.Signature(6, "b", 0, 0, ()), "s")
        ranks[0].send(m.Announce(0, generation, (0,), (definition,)))
        assert wait_for(ranks[0], m.Abort).kind == "cell_ended", "rank 1 is not waited for"
        for endpoint in ranks:
            endpoint.close()


def begin_again(ranks: Iterable[Endpoint]) -> None:
    """Elastic training comes to a commit on these ranks."""
    for endpoint in ranks:
        endpoint.send(m.Regroup(1, 1, ""))


def lose_coordinator(kept: CoordinatorProcess, lost: queue.SimpleQueue[str]) -> None:
    process = os.pidfd_open(kept.pid)
    os.kill(kept.pid, signal.SIGKILL)
    lost.get(timeout=GONE)
    assert select.select([process], [], [], GONE)[0]
    os.close(process)


@pytest.mark.parametrize("when", ["before it was lost", "while it is lost"])
def test_ranks_that_are_released_leave_at_their_commit_whatever_becomes_of_the_coordinator(
    kept: CoordinatorProcess, when: str
) -> None:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    with Client.connect(kept.address, kept.client_token) as client:
        client.on_lost(lost.put)
        client.expect([0, 1, 2])
        old = [join(kept, rank) for rank in range(3)]
        client.wait_for(lambda now: now.complete, PATIENCE)
        for endpoint in old:
            endpoint.send(m.Elastic(True))
            endpoint.send(m.Ping(1))
            wait_for(endpoint, m.Pong)  # it is known that this rank trains
        if when == "before it was lost":
            client.release([2])
            client.wait_for(lambda now: now.leaving == (2,), PATIENCE)
        lose_coordinator(kept, lost)
        if when == "while it is lost":
            with pytest.raises(CoordinatorLostError):
                client.release([2])
        kept.respawn(PATIENCE)
        new = [come_back(kept, rank, (0, 1, 2), elastic=True) for rank in range(3)]
        client.reconnect(timeout=PATIENCE)
        membership = client.wait_for(lambda now: now.leaving == (2,), PATIENCE)
        assert (membership.expected, membership.deaths) == ((0, 1, 2), ())
        generation = wait_for(new[0], m.Configure).generation
        begin_again(new[:2])
        client.flush()
        assert client.membership().expected == (0, 1, 2), "it may train until its own commit"
        begin_again(new[2:])
        wait_for(new[2], m.Leave)
        wait_for(new[0], m.Regrouped)
        client.wait_for(lambda now: now.expected == (0, 1), PATIENCE)

        # Its process has not ended yet, and the coordinator is lost once more: it is not waited for.
        lose_coordinator(kept, lost)
        kept.respawn(PATIENCE)
        known = same_process(generation + 1, (0, 1))
        newest = [
            come_back(kept, rank, (0, 1, 2), known=known, elastic=True, incarnation=1) for rank in (0, 1)
        ]
        membership = client.reconnect(timeout=PATIENCE)
        assert (membership.expected, membership.ranks, membership.deaths) == ((0, 1), (0, 1), ())
        for endpoint in (*old, *new, *newest):
            endpoint.close()


@pytest.mark.parametrize("said", [True, False])
def test_a_rank_that_is_released_while_only_the_connection_is_lost_leaves_at_its_commit(said: bool) -> None:
    """Also if the client has never reported the ranks, as the launcher of a job of fixed size."""
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    with (
        CoordinatorProcess.start(size=None if said else 2, timeout=PATIENCE) as coordinator,
        Client.connect(coordinator.address, coordinator.client_token) as client,
    ):
        client.on_lost(lost.put)
        if said:
            client.expect([0, 1])
        ranks = [join(coordinator, rank) for rank in (0, 1)]
        client.wait_for(lambda now: now.complete, PATIENCE)
        for endpoint in ranks:
            endpoint.send(m.Elastic(True))
            endpoint.send(m.Ping(1))
            wait_for(endpoint, m.Pong)
        cut(client)
        lost.get(timeout=GONE)
        with pytest.raises(CoordinatorLostError):
            client.release([1])
        client.reconnect(timeout=PATIENCE)
        client.wait_for(lambda now: now.leaving == (1,), PATIENCE)
        begin_again(ranks)
        wait_for(ranks[1], m.Leave)
        for endpoint in ranks:
            endpoint.close()


def test_reconnecting_when_nothing_was_lost(client: Client) -> None:
    with pytest.raises(TimeoutError, match="not lost"):
        client.reconnect(timeout=0.01)
    client.flush()


def test_a_closed_client_does_not_come_back(kept: CoordinatorProcess) -> None:
    client = Client.connect(kept.address, kept.client_token)
    client.close()
    with pytest.raises(CoordinatorLostError, match="closed"):
        client.reconnect()


def test_without_a_successor_there_is_an_error(coordinator: CoordinatorProcess) -> None:
    with Client.connect(coordinator.address, coordinator.client_token) as client:
        coordinator.close()
        with pytest.raises(StartError, match="No coordinator answers"):
            client.reconnect()
    with pytest.raises(InvalidRequestError, match="keep=True"):
        coordinator.respawn(PATIENCE)


def test_client_that_finds_no_descriptor_to_reconnect_stays_lost(
    kept: CoordinatorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "no descriptor left")

    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    with Client.connect(kept.address, kept.client_token) as client:
        client.expect([0, 1])
        client.flush()
        client.on_lost(lost.put)
        process = os.pidfd_open(kept.pid)
        os.kill(kept.pid, signal.SIGKILL)
        lost.get(timeout=GONE)
        assert select.select([process], [], [], GONE)[0]
        os.close(process)
        client.rank_lost(1, 7, "killed by SIGBUS")
        kept.respawn(PATIENCE)
        with monkeypatch.context() as patch:
            patch.setattr("hvdlab.collectives.client.socket.socketpair", refuse)
            with pytest.raises(OSError, match="no descriptor left"):
                client.reconnect()
        with pytest.raises(CoordinatorLostError):
            client.wait_for(lambda now: False, 1.0)
        assert client.incarnation == 0
        assert [(death.rank, death.reason) for death in client.reconnect().deaths] == [
            (1, "killed by SIGBUS")
        ]
        assert client.incarnation == 1


def test_a_stopped_coordinator_is_lost(kept: CoordinatorProcess) -> None:
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    with Client.connect(kept.address, kept.client_token) as client:
        client.on_lost(reasons.put)
        os.kill(kept.pid, signal.SIGSTOP)
        assert "stopped (SIGSTOP)" in reasons.get(timeout=30)
        kept.respawn(PATIENCE)
        client.reconnect()
        client.flush()
