"""The server with real sockets: strangers, garbage, silence, peers that do not read."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from hvdlab.collectives.coordinator import event_history, liveness
from hvdlab.collectives.coordinator.connections import OPEN, Connection, Connections
from hvdlab.collectives.coordinator.events import Event, PeerLost, Received
from hvdlab.collectives.coordinator.process import CoordinatorOptions, ServerOptions
from hvdlab.collectives.coordinator.server import CoordinatorServer, UnsoundStateError
from hvdlab.collectives.coordinator.state import RANK_HANDLERS, CoordinatorState
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.event_loop import READ
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import HELLO_LIMIT, decode_to_peer, encode
from hvdlab.collectives.protocol.endpoint import ConnectionLost, Endpoint, new_certificate, server_context
from hvdlab.collectives.protocol.handshake import connect
from hvdlab.collectives.time_limits import Deadline
from hvdlab.collectives.tracing.record_format import HEADER
from support.logged_lines import LoggedLines
from support.patience import HOUR, PATIENCE

TOKEN, CLIENT_TOKEN = "secret", "another"
HIGHEST_DESCRIPTOR = 2**31 - 1
M = TypeVar("M", bound=m.Message)


class Running:
    """Server on a thread of this process."""

    def __init__(
        self,
        path: Path,
        *,
        tls: bool = False,
        client_token: str = CLIENT_TOKEN,
        **options: float,
    ) -> None:
        self.logged = LoggedLines()
        state = CoordinatorOptions(size=2)
        settings = ServerOptions(TOKEN, client_token, state=state, **options)  # type: ignore[arg-type]  # tests give the right ones
        self.server = CoordinatorServer(settings, log=self.logged.log)
        self.address = f"unix:{path}/s"
        self.certificate: str | None = None
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{path}/s")
        listener.listen()
        self.server.listen(listener)
        self.tls_address = ""
        if tls:
            self.certificate, key = new_certificate("127.0.0.1")
            context = server_context(path, self.certificate, key)
            remote = socket.create_server(("127.0.0.1", 0))
            self.server.listen(remote, context)
            self.tls_address = f"tls:127.0.0.1:{remote.getsockname()[1]}"
        reader, self._stop = os.pipe()
        self._reader = reader
        self.server.stop_when_readable(reader)
        self.thread = threading.Thread(target=self.server.serve)
        self.thread.start()

    def close(self) -> None:
        os.write(self._stop, b"x")
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        os.close(self._stop)
        os.close(self._reader)

    def socket(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(10)
        sock.connect(self.address.removeprefix("unix:"))
        return sock


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Running] = []

    def begin(**options: object) -> Running:
        running.append(Running(tmp_path, **options))  # type: ignore[arg-type]  # tests give the right ones
        return running[-1]

    yield begin
    for server in running:
        server.close()


class Peer:
    """One side of a connection, for tests that talk by hand."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.seen: list[m.Message] = []

    def wait_for(self, kind: type[M]) -> M:
        while True:
            for position, message in enumerate(self.seen):
                if isinstance(message, kind):
                    return self.seen.pop(position)  # type: ignore[return-value]  # it is a kind
            assert select.select([self.endpoint], [], [], 10)[0], (
                f"no {kind.__name__} comes, only {self.seen}"
            )
            self.seen += [decode_to_peer(payload) for payload in self.endpoint.receive()]


def join(running: Running, rank: int, *, token: str = TOKEN, tls: bool = False, **fields: object) -> Peer:
    given: dict[str, object] = {"host": "h", "pid": os.getpid(), "planes": ("shm", "gloo")} | fields
    hello = m.Hello(m.PROTOCOL_VERSION, token, "rank", rank, **given)  # type: ignore[arg-type]  # tests give the right ones
    address = running.tls_address if tls else running.address
    endpoint, _ = connect(address, hello, certificate=running.certificate, deadline=Deadline(PATIENCE))
    return Peer(endpoint)


def still_works(running: Running) -> None:
    """Check that two ranks can join and execute an operation, undisturbed by the events before."""
    peers = [join(running, rank) for rank in (0, 1)]
    definition = m.Definition(0, m.Signature(0, "x", 8, 1, (1,)), "")
    for peer in peers:
        generation = peer.wait_for(m.Configure).generation
        peer.endpoint.send(m.Announce(0, generation, (0,), (definition,)))
    for peer in peers:
        assert peer.wait_for(m.Execute).batches == (m.Batch((0,)),)
        peer.endpoint.close()


def test_ranks_get_one_shared_memory(start: Start) -> None:
    running = start()
    peers = [join(running, rank) for rank in (0, 1)]
    descriptors = []
    for peer in peers:
        configured = peer.wait_for(m.Configure)
        assert (configured.plane, configured.has_memory) == ("shm", True)
        descriptors.append(peer.endpoint.take_descriptor())
    os.pwrite(descriptors[0], b"hello", 4096)
    assert os.pread(descriptors[1], 5, 4096) == b"hello"
    with pytest.raises(PermissionError):
        os.ftruncate(descriptors[0], 10)
    for peer, descriptor in zip(peers, descriptors, strict=True):
        os.close(descriptor)
        peer.endpoint.close()


def test_without_memory_the_ranks_make_their_own(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(name: str, size: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("hvdlab.collectives.coordinator.server.create_memory", no_memory)
    running = start()
    peers = [join(running, rank) for rank in (0, 1)]
    for peer in peers:
        configured = peer.wait_for(m.Configure)
        assert (configured.plane, configured.has_memory) == ("hierarchical", False)
        assert "make it themselves" in configured.options["note"]
        peer.endpoint.close()
    running.logged.wait_for("Too many open files")


def test_server_survives_a_connection_that_cannot_be_watched(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start()
    loop = running.server.connections.loop
    with monkeypatch.context() as patch:

        def refuse(*watched: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(loop, "register", refuse)
        with running.socket() as sock:
            assert sock.recv(1) == b""
    running.logged.wait_for("No space left on device")
    still_works(running)


def test_a_wrong_token_is_refused(start: Start) -> None:
    running = start()
    with pytest.raises(StartError, match="the token is wrong"):
        join(running, 0, token="guess")
    running.logged.wait_for("the token is wrong")
    still_works(running)


def test_what_has_the_environment_of_a_rank_can_post_no_cells(start: Start) -> None:
    running = start()
    for token, role, said in (
        (TOKEN, "client", "that of a rank"),
        (CLIENT_TOKEN, "rank", "that of a client"),
    ):
        hello = m.Hello(m.PROTOCOL_VERSION, token, role, 0, "h", os.getpid(), planes=("gloo",))
        with pytest.raises(StartError, match=said):
            connect(running.address, hello, deadline=Deadline(PATIENCE))
    still_works(running)


def observe(running: Running) -> Peer:
    hello = m.Hello(m.PROTOCOL_VERSION, TOKEN, "observer", pid=os.getpid())
    endpoint, _ = connect(running.address, hello, deadline=Deadline(PATIENCE))
    return Peer(endpoint)


def test_an_observer_learns_who_dies_and_may_ask_for_nothing(start: Start) -> None:
    running = start()
    observer, curious = observe(running), observe(running)
    hello = m.Hello(m.PROTOCOL_VERSION, CLIENT_TOKEN, "observer", pid=os.getpid())
    with pytest.raises(StartError, match="that of a client"):
        connect(running.address, hello, deadline=Deadline(PATIENCE))
    rank = join(running, 0)
    while not (world := observer.wait_for(m.World)).members:
        pass
    assert [member.rank for member in world.members] == [0]
    rank.endpoint.send(m.Post("to whom it concerns", b"", ()))  # mail for clients
    rank.endpoint.close()
    while not (world := observer.wait_for(m.World)).deaths:
        pass
    assert [death.rank for death in world.deaths] == [0]
    assert not observer.seen
    curious.endpoint.send(m.InterruptRanks((0,)))
    running.logged.wait_for("sent a InterruptRanks out of place")
    with pytest.raises((ConnectionLost, AssertionError)):
        curious.wait_for(m.Mail)
    observer.endpoint.send(m.Bye())
    curious.endpoint.close()
    observer.endpoint.close()


def test_a_rank_is_told_of_each_member_once_and_an_observer_whole_messages(start: Start) -> None:
    running = start()
    observer = observe(running)
    peers = [join(running, rank) for rank in (0, 1)]
    first = peers[1].wait_for(m.Configure)
    assert ([member.rank for member in first.members], first.listed) == ([0, 1], (0, -1))
    peers[0].wait_for(m.Configure)
    peers[1].endpoint.close()
    while not (world := peers[0].wait_for(m.World)).deaths:
        pass
    assert (world.members, world.listed) == ((), (0,))
    renewed = peers[0].wait_for(m.Configure)
    assert (renewed.members, renewed.listed) == ((), (0,))
    while not (whole := observer.wait_for(m.World)).deaths:
        pass
    assert ([member.rank for member in whole.members], whole.listed) == ([0], ())
    for peer in (peers[0], observer):
        peer.endpoint.close()


def test_nobody_stays_for_an_observer(start: Start) -> None:
    running = start()
    observer = observe(running)
    observer.wait_for(m.World)
    assert running.server.connections.idle
    rank = join(running, 0)
    rank.wait_for(m.World)
    assert not running.server.connections.idle
    rank.endpoint.close()
    while not observer.wait_for(m.World).deaths:
        pass
    assert running.server.connections.idle
    observer.endpoint.close()


def test_without_a_token_for_clients_there_are_none(start: Start) -> None:
    running = start(client_token="")
    with pytest.raises(StartError, match="the token is wrong"):
        connect(running.address, m.Hello(m.PROTOCOL_VERSION, "", "client"), deadline=Deadline(PATIENCE))


def test_another_version_is_refused(start: Start) -> None:
    running = start()
    with pytest.raises(StartError, match="version 99"):
        connect(running.address, m.Hello(99, TOKEN, "rank", 0), deadline=Deadline(PATIENCE))


def test_a_second_hello_for_a_living_rank_is_refused(start: Start) -> None:
    running = start()
    first = join(running, 0)
    with pytest.raises(StartError, match="rank 0 is already connected"):
        join(running, 0)
    first.endpoint.send(m.Ping(7))
    assert first.wait_for(m.Pong).number == 7
    first.endpoint.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("<I", HELLO_LIMIT + 1),
        struct.pack("<I", 0),
        struct.pack("<I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        encode(m.Ping(1)),
    ],
    ids=["http", "oversized", "empty", "no-msgpack", "no-hello"],
)
def test_a_stranger_who_sends_garbage_is_closed(start: Start, garbage: bytes) -> None:
    running = start()
    with running.socket() as stranger:
        stranger.sendall(garbage)
        assert stranger.recv(100) == b""
    running.logged.wait_for("connection 1 is closed")
    still_works(running)


def test_half_a_frame_and_end_of_file(start: Start) -> None:
    running = start()
    with running.socket() as stranger:
        stranger.sendall(encode(m.Hello(1, TOKEN, "rank", 0))[:-3])
    still_works(running)


def test_a_rank_that_sends_garbage_is_lost(start: Start) -> None:
    running = start()
    peers = [join(running, rank) for rank in (0, 1)]
    peers[1].wait_for(m.Configure)
    peers[0].endpoint.send_frame(struct.pack("<I", 3) + b"\xc1\xc1\xc1")
    abort = peers[1].wait_for(m.Abort)
    assert (abort.kind, abort.ranks) == ("rank_died", (0,))
    for peer in peers:
        peer.endpoint.close()


def test_a_death_is_noted_but_is_no_warning(start: Start) -> None:
    running = start()
    peers = [join(running, rank) for rank in (0, 1)]
    peers[1].wait_for(m.Configure)
    peers[0].endpoint.close()  # as the kernel does for a process that is killed
    peers[1].wait_for(m.Abort)
    running.logged.wait_for("rank 0")
    assert running.logged.lines(logging.WARNING) == []
    peers[1].endpoint.close()


def test_who_sends_bytes_too_slowly_does_not_get_in(start: Start) -> None:
    running = start(hello_timeout=0.1)
    with running.socket() as slow:
        slow.sendall(encode(m.Hello(1, TOKEN, "rank", 0))[:1])
        assert slow.recv(100) == b""  # closed although bytes came
    running.logged.wait_for("no Hello within 0.1 s")
    still_works(running)


def test_a_silent_peer_that_can_not_be_alive_is_lost(start: Start) -> None:
    running = start(tls=True, ping_after=0.05, dead_after=0.2)
    # The silent one last: the group is made as it comes, before it can count as lost.
    other = join(running, 1)
    silent = join(running, 0, tls=True)
    other.wait_for(m.Configure)
    # The ping of the server is not read, as on a machine that has lost its network.
    while not any(isinstance(message, m.Abort) for message in other.seen):
        select.select([other.endpoint], [], [], 10)
        messages = [decode_to_peer(payload) for payload in other.endpoint.receive()]
        other.seen += messages
        for message in messages:
            if isinstance(message, m.Ping):
                other.endpoint.send(m.Pong(message.number))
    assert "no sign of life" in other.wait_for(m.Abort).text
    silent.endpoint.close()
    back = join(running, 0, tls=True, incarnation=0, returns=True)
    assert "the others have gone on without it" in back.wait_for(m.Outdated).text
    running.logged.wait_for("is back after")
    for peer in (back, other):
        peer.endpoint.close()


def test_a_peer_whose_user_looks_around_there_may_be_silent(start: Start) -> None:
    running = start(tls=True, ping_after=0.02, dead_after=HOUR)
    silent = join(running, 0, tls=True)
    silent.endpoint.send(m.Paused("stopped by the debugger"))
    silent.endpoint.send(m.Ping(1))
    silent.wait_for(m.Pong)
    watch, patient = running.server._liveness, running.server.options
    watch._options = replace(patient, dead_after=0.05)  # only while it is known to be paused
    for _ in range(10):  # as many as there are in four times the silence that is allowed
        silent.wait_for(m.Ping)
        silent.seen.clear()
    watch._options = patient
    silent.endpoint.send(m.Resumed())
    silent.endpoint.send(m.Ping(3))
    assert silent.wait_for(m.Pong).number == 3
    silent.endpoint.close()


def test_a_busy_process_of_this_host_is_not_taken_for_dead(start: Start) -> None:
    running = start(ping_after=0.02, dead_after=0.04)
    silent = join(running, 0)
    for _ in range(5):
        silent.wait_for(m.Ping)  # never answered; it is this very process, which runs
    silent.endpoint.send(m.StoreGet(0, 0, "", 0))
    silent.endpoint.send(m.Ping(3))
    assert silent.wait_for(m.Pong).number == 3
    silent.endpoint.close()


Watched = tuple[liveness.Liveness, Connection, Endpoint]


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Return a watch over one peer of another host that was heard at 0 s, and the end of that peer."""
    ours, theirs = socket.socketpair()
    options, log = ServerOptions(TOKEN, ping_after=10.0, dead_after=30.0), logging.getLogger("watched")
    connections = Connections(options, log)
    connection = Connection(ours, 1, 0.0)
    connection.phase, connection.pid = OPEN, 0  # as if it came over the network
    connections.open[1] = connection
    connections.loop.register(connection, READ, connection)
    peer = Endpoint(theirs)
    yield liveness.Liveness(connections, CoordinatorState(options.state), options, log), connection, peer
    peer.close()
    connections.close()


def test_coordinator_that_was_stopped_asks_silent_peers_first(watched: Watched) -> None:
    watch, _, peer = watched
    events: list[Event] = []
    for now in (0.0, 100.0, 110.0):  # it did not run between the first two
        watch.check(now, events)
    assert not events
    assert [type(decode_to_peer(payload)) for payload in peer.receive()] == [m.Ping, m.Ping]
    watch.check(121.0, events)
    assert [type(event) for event in events] == [PeerLost]


def test_ping_before_a_stop_of_the_coordinator_does_not_count(watched: Watched) -> None:
    watch, _, _ = watched
    events: list[Event] = []
    for now in (0.0, 10.0, 100.0, 110.0):
        watch.check(now, events)
    assert not events


def test_answer_that_is_unread_at_the_check_saves_its_peer(watched: Watched) -> None:
    watch, connection, peer = watched
    events: list[Event] = []
    for now in (0.0, 10.0, 20.0):
        watch.check(now, events)
    peer.send(m.Pong(1))
    watch.check(30.0, events)
    assert events == [Received(1, m.Pong(1))]
    assert connection.heard == 30.0


def test_peer_without_a_descriptor_left_is_lost_alone(watched: Watched) -> None:
    watch, connection, _ = watched
    connections = watch._connections
    connections.write(connection, bytes(4_000_000))  # more than the socket takes: the next frame has to wait
    connections.write(connection, b"frame", HIGHEST_DESCRIPTOR)  # dup() fails, as it does with none left
    assert [type(event) for event in connections.lost] == [PeerLost]
    assert not connections.open


def test_server_survives_a_callback_without_descriptors(start: Start) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    running = start()
    running.server.on_alone = fail
    peers = [join(running, rank) for rank in (0, 1)]
    reader, writer = os.pipe()
    running.server.stop_at_end_of(reader, linger=True)
    os.close(writer)
    running.logged.wait_for("Too many open files")
    for peer in peers:
        peer.endpoint.send(m.Ping(1))
        assert peer.wait_for(m.Pong).number == 1
        peer.endpoint.close()
    os.close(reader)


@pytest.mark.parametrize(
    ("state", "script", "pool"), [("R", 1, 1), ("T", 0, 1), ("t", 0, 1), ("Z", 0, 0), ("", 0, 0)]
)
def test_a_stopped_rank_of_a_pool_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch, state: str, script: int, pool: int
) -> None:
    monkeypatch.setattr(liveness, "process_state", lambda pid: state)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = Connection(ours, 1, 0.0)
        assert liveness.may_be_busy(peer) == bool(script)
        peer.tracked = True
        assert liveness.may_be_busy(peer) == bool(pool)


def flood(peer: Peer, count: int) -> None:
    """Send mail of 100 kB to rank 1 so many times; all of it has left when this returns."""
    for _ in range(count):
        peer.endpoint.send(m.Post("t", bytes(100_000), (1,)))
        while peer.endpoint.backlog:
            select.select([], [peer.endpoint], [], 10)
            peer.endpoint.flush()


def test_who_does_not_read_is_dropped(start: Start) -> None:
    running = start(backlog_limit=1_000_000)
    peers = [join(running, rank) for rank in (0, 1)]
    peers[0].wait_for(m.Configure)
    flood(peers[0], 40)
    running.logged.wait_for("does not read what it is sent")
    assert peers[0].wait_for(m.Abort).ranks == (1,)
    for peer in peers:
        peer.endpoint.close()


def test_who_is_dropped_for_a_question_is_told_of_at_once(start: Start) -> None:
    """The one byte too many is the server's own ping, while no peer sends a message."""
    running = start(ping_after=0.1)
    peers = [join(running, rank) for rank in (0, 1)]
    peers[0].wait_for(m.Configure)
    flood(peers[0], 20)
    for _ in range(5):  # until no other message is due
        peers[0].seen.clear()
        peers[0].wait_for(m.Ping)
    connections = running.server.connections
    connections._options = replace(running.server.options, backlog_limit=1)  # from now on
    aborts: list[m.Abort] = []
    for _ in range(50):
        peers[0].wait_for(m.Ping)
        if aborts := [message for message in peers[0].seen if isinstance(message, m.Abort)]:
            break
    assert [abort.ranks for abort in aborts] == [(1,)]
    for peer in peers:
        peer.endpoint.close()


def test_what_was_sent_before_a_goodbye_counts(start: Start) -> None:
    running = start()
    peers = [join(running, rank) for rank in (0, 1)]
    peers[1].wait_for(m.Configure)
    peers[0].endpoint.send(m.Post("last", b"words", (1,)))
    peers[0].endpoint.send(m.Bye())
    peers[0].endpoint.close()
    assert peers[1].wait_for(m.Mail).body == b"words"
    peers[1].endpoint.send(m.Announce(0, 1, (0,), (m.Definition(0, m.Signature(0, "x", 8, 1, (1,)), ""),)))
    assert peers[1].wait_for(m.Abort).kind == "rank_left"
    peers[1].endpoint.close()


@pytest.mark.parametrize("before", [0, 200_000], ids=["alone", "behind many events"])
def test_a_goodbye_that_lies_unread_counts_before_what_the_launcher_says(start: Start, before: int) -> None:
    """A rank that has ended well is not taken for dead, though clients are read first."""
    running = start()
    peers = [join(running, rank) for rank in (0, 1)]
    hello = m.Hello(m.PROTOCOL_VERSION, CLIENT_TOKEN, "client")
    launcher = Peer(connect(running.address, hello, deadline=Deadline(PATIENCE))[0])
    for peer in peers:
        peer.wait_for(m.Configure)
    read, write = os.pipe()
    busy, both_are_there = threading.Event(), threading.Event()

    def be_busy() -> None:
        os.read(read, 1)
        busy.set()
        both_are_there.wait(PATIENCE)

    running.server.watch(read, be_busy)
    os.write(write, b"x")
    assert busy.wait(PATIENCE)
    if before:  # more than one read takes
        peers[0].endpoint.send(m.Post("t", bytes(before), (1,)))
    peers[0].endpoint.send(m.Bye("shutdown"))
    assert not peers[0].endpoint.backlog
    peers[0].endpoint.close()
    launcher.endpoint.send(m.RankLost(0, os.getpid(), "its program has ended"))
    both_are_there.set()
    peers[1].endpoint.send(m.Announce(0, 1, (0,), (m.Definition(0, m.Signature(0, "x", 8, 1, (1,)), ""),)))
    assert peers[1].wait_for(m.Abort).kind == "rank_left"
    for endpoint in (peers[1].endpoint, launcher.endpoint):
        endpoint.close()
    for descriptor in (read, write):
        os.close(descriptor)


def test_tls_carries_the_same_protocol_but_no_memory(start: Start) -> None:
    running = start(tls=True)
    peers = [join(running, 0), join(running, 1, tls=True)]
    for peer in peers:
        configured = peer.wait_for(m.Configure)
        assert (configured.plane, configured.has_memory) == ("hierarchical", False)
    # The ranks make the memory themselves: nothing is lacking, and nothing of it is to be read.
    assert not [line for line in running.logged.lines(logging.WARNING) if "memory" in line]
    large = bytes(1_000_000)
    peers[1].endpoint.send(m.Post("t", large, (0,)))
    while peers[1].endpoint.backlog:
        select.select([], [peers[1].endpoint], [], 10)
        peers[1].endpoint.flush()
    assert peers[0].wait_for(m.Mail).body == large
    peers[0].endpoint.send(m.Post("t", large, (1,)))
    while peers[0].endpoint.backlog:
        select.select([], [peers[0].endpoint], [], 10)
        peers[0].endpoint.flush()
    assert peers[1].wait_for(m.Mail).body == large
    for peer in peers:
        peer.endpoint.close()


def test_only_the_pinned_certificate_is_trusted(start: Start) -> None:
    running = start(tls=True)
    certificate, _ = new_certificate("127.0.0.1")
    hello = m.Hello(1, TOKEN, "rank", 0)
    with pytest.raises(StartError, match="No secure connection"):
        connect(running.tls_address, hello, certificate=certificate, deadline=Deadline(PATIENCE))
    with pytest.raises(StartError, match="HVDLAB_CERT"):
        connect(running.tls_address, hello, deadline=Deadline(PATIENCE))
    with pytest.raises(StartError, match="no PEM certificate"):
        connect(running.tls_address, hello, certificate="nonsense", deadline=Deadline(PATIENCE))


def test_plain_text_on_the_tls_port_disturbs_nobody(start: Start) -> None:
    running = start(tls=True)
    host, port = running.tls_address.removeprefix("tls:").split(":")
    with socket.create_connection((host, int(port)), 10) as stranger:
        stranger.sendall(encode(m.Hello(1, TOKEN, "rank", 0)))
        while stranger.recv(100):
            pass
    running.logged.wait_for("connection 1 is closed")
    still_works(running)


def test_nobody_listens() -> None:
    with pytest.raises(StartError, match="No coordinator answers"):
        connect("unix:/nowhere/at/all", m.Hello(1, TOKEN, "rank", 0), deadline=Deadline(PATIENCE))


def test_someone_else_listens(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{tmp_path}/x")
    listener.listen()

    def answer(text: bytes) -> None:
        sock, _ = listener.accept()
        sock.recv(1000)
        sock.sendall(text)
        sock.close()

    for text in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", encode(m.Ping(1))):
        thread = threading.Thread(target=answer, args=(text,))
        thread.start()
        with pytest.raises(StartError):
            connect(f"unix:{tmp_path}/x", m.Hello(1, TOKEN, "rank", 0), deadline=Deadline(PATIENCE))
        thread.join()
    listener.close()


def test_a_coordinator_that_does_not_answer(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{tmp_path}/x")
    listener.listen()
    with pytest.raises(StartError, match="did not answer within"):
        connect(f"unix:{tmp_path}/x", m.Hello(1, TOKEN, "rank", 0), deadline=Deadline(0.05))
    listener.close()


def test_when_the_server_stops_its_peers_see_the_end(tmp_path: Path) -> None:
    running = Running(tmp_path)
    peer = join(running, 0)
    running.close()
    with pytest.raises(ConnectionLost):
        peer.wait_for(m.Abort)
    peer.endpoint.close()


def test_an_idle_job_wakes_up_for_heartbeats_only(start: Start) -> None:
    running = start(ping_after=60.0)
    assert running.server.timeout() is None
    peers = [join(running, rank) for rank in (0, 1)]
    for peer in peers:
        peer.wait_for(m.Configure)
        peer.endpoint.send(m.Ping(1))
        peer.wait_for(m.Pong)
    timeout = running.server.timeout()
    # Messages sent to the ranks while they connected are due first, once.
    assert timeout is not None
    assert timeout > 59 or running.server.state.next_deadline() is not None
    for peer in peers:
        peer.endpoint.close()


def test_mail_overtakes_events_that_wait(start: Start) -> None:
    running = start()
    hello = m.Hello(m.PROTOCOL_VERSION, CLIENT_TOKEN, "client", pid=os.getpid())
    client = Peer(connect(running.address, hello, deadline=Deadline(PATIENCE))[0])
    rank = join(running, 0)
    client.endpoint.send(m.Subscribe(True))
    client.endpoint.send(m.Ping(1))
    client.wait_for(m.Pong)
    client.seen.clear()
    for number in range(200):
        rank.endpoint.send(m.Events(bytes(64_000)))
        rank.endpoint.send(m.Ping(number))
        rank.wait_for(m.Pong)  # it was taken in
    rank.endpoint.send(m.Post("line", b"hello"))
    client.endpoint.send(m.Ping(2, after_events=True))
    client.wait_for(m.Pong)
    kinds = [type(message) for message in client.seen]
    assert kinds.count(m.RankEvents) == 200
    assert kinds.index(m.Mail) < 150, "only what was on its way already comes before it"
    client.endpoint.close()
    rank.endpoint.close()


def test_a_client_that_reads_no_events_keeps_its_connection(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_history, "LAG_LIMIT", 2 << 20)
    running = start(backlog_limit=4 << 20)
    hello = m.Hello(m.PROTOCOL_VERSION, CLIENT_TOKEN, "client", pid=os.getpid())
    endpoint, _ = connect(running.address, hello, deadline=Deadline(PATIENCE))
    client, rank = Peer(endpoint), join(running, 0)
    client.endpoint.send(m.Subscribe(True))
    client.endpoint.send(m.Ping(1))
    client.wait_for(m.Pong)
    batch, sent = HEADER.pack(b"HVDS", 2, 0, 0, 0, 1000, 0, 0, 0) + bytes(64_000), 200
    for number in range(sent):
        rank.endpoint.send(m.Events(batch))
        rank.endpoint.send(m.Ping(number))
        rank.wait_for(m.Pong)  # it was taken in
    client.endpoint.send(m.Ping(2, after_events=True))
    client.wait_for(m.Pong)
    rank.endpoint.send(m.Events(batch))
    got = sum(isinstance(message, m.RankEvents) for message in client.seen)
    assert 0 < got < sent
    client.seen.clear()
    assert HEADER.unpack_from(client.wait_for(m.RankEvents).batch)[7] == 1000 * (sent - got)
    client.endpoint.close()
    rank.endpoint.close()


def test_a_server_whose_state_is_broken_ends_after_it_has_told_the_sender(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """So that the ranks go on with a successor, and no rank waits for ever."""
    server = CoordinatorServer(ServerOptions(TOKEN, CLIENT_TOKEN, state=CoordinatorOptions(size=2)))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{tmp_path}/s")
    listener.listen()
    server.listen(listener)
    raised: list[BaseException] = []

    def break_state(*arguments: object) -> None:
        server.state.blocked.add(99)
        raise ZeroDivisionError("made to fail")

    def serve() -> None:
        try:
            server.serve()
        except UnsoundStateError as error:
            raised.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RANK_HANDLERS, m.Ping, break_state)
        thread = threading.Thread(target=serve)
        thread.start()
        hello = m.Hello(m.PROTOCOL_VERSION, TOKEN, "rank", 0, "h", os.getpid(), planes=("gloo",))
        endpoint, _ = connect(f"unix:{tmp_path}/s", hello, deadline=Deadline(PATIENCE))
        endpoint.send(m.Ping(1))
        thread.join(PATIENCE)
    assert not thread.is_alive()
    assert server.state.unsound
    assert "the coordinator's state can't be used any more" in str(raised[0])
    log = capfd.readouterr().err
    assert "ZeroDivisionError: made to fail" in log
    assert "in validate_state" in log  # which invariant is broken
    with pytest.raises(ConnectionLost):
        _read_to_the_end(endpoint)
    endpoint.close()


def _read_to_the_end(endpoint: Endpoint) -> None:
    while select.select([endpoint], [], [], PATIENCE)[0]:
        list(endpoint.receive())
