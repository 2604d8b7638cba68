"""A relay, and relays of relays: what ranks say arrives in order, once, and together where it is equal; and so does the answer."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator_simulation import hello, signature
from effort import examples
from hvdlab.collectives.coordinator.events import PeerConnected, PeerLost, Received, ReceivedTogether
from hvdlab.collectives.coordinator.relays import Relays
from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import decode_from_relay, decode_to_peer, encode_payload
from hvdlab.collectives.protocol.rosters import pack
from hvdlab.collectives.relay.events import (
    CloseConnection,
    Effect,
    Ended,
    Event,
    Heard,
    Opened,
    SendDown,
    SendUp,
    Told,
)
from hvdlab.collectives.relay.events import Tick as RelayTick
from hvdlab.collectives.relay.holding import HOLD
from hvdlab.collectives.relay.state import RelayState

TOP = 1
"""The relay that is connected to the coordinator."""


class Tree:
    """Ranks below relays below one relay, or directly below it, with a queue for each direction of each connection.

    Args:
        leaves: How many ranks each relay below the top has; none at all for one level.
        direct: How many ranks the top relay has itself.
    """

    def __init__(self, leaves: Iterable[int], direct: int) -> None:
        self.now = 0.0
        self.relays: dict[int, RelayState] = {TOP: RelayState()}
        self.above: dict[int, int] = {}  # the relay to which a connection goes
        self.up: dict[int, deque[bytes]] = {}  # by connection: a relay's number, or a rank's
        self.down: dict[int, deque[bytes]] = {}
        self.frames: list[m.From | m.Lost | m.Faulty] = []
        self.root = Relays(itertools.count(1000).__next__)
        self.root.open(TOP)
        self.events: list[object] = []
        self.ranks: list[int] = []
        self.closed: list[int] = []
        numbers = itertools.count(TOP + 1)
        below = [(next(numbers), count) for count in leaves]
        for relay, count in below:
            self.relays[relay] = RelayState()
            self._connect(relay, TOP, relays=True)
            self.ranks += [self._connect(next(numbers), relay) for _ in range(count)]
        self.ranks += [self._connect(next(numbers), TOP) for _ in range(direct)]

    def _connect(self, connection: int, relay: int, *, relays: bool = False) -> int:
        self.above[connection] = relay
        self.up[connection], self.down[connection] = deque(), deque()
        self.handle(relay, Opened(connection, relays))
        return connection

    def handle(self, relay: int, event: Event) -> None:
        for effect in self.relays[relay].handle(event, self.now):
            self._carry_out(relay, effect)

    def _carry_out(self, relay: int, effect: Effect) -> None:
        if isinstance(effect, SendUp):
            payload = encode_payload(effect.message)
            if relay == TOP:
                said = decode_from_relay(payload)
                assert isinstance(said, m.From | m.Lost | m.Faulty)
                self.frames.append(said)
                self.events += self.root.received(TOP, said)
            else:
                self.up[relay].append(payload)
        elif isinstance(effect, SendDown):
            for connection in effect.connections:
                self.down[connection].append(effect.payload)
        else:
            self.closed.append(effect.connection)

    def say(self, rank: int, message: m.Message) -> None:
        self.up[rank].append(encode_payload(message))

    def move(self, connection: int) -> None:
        """What is first on a connection, up or down, arrives."""
        if self.up[connection]:
            self.handle(self.above[connection], Heard(connection, self.up[connection].popleft()))
        elif connection in self.relays and self.down[connection]:
            self.handle(connection, Told(self.down[connection].popleft()))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for relay, state in self.relays.items():
            due = state.next_deadline()
            if due is not None and self.now >= due:
                self.handle(relay, RelayTick())

    def drain(self) -> None:
        """Everything arrives that has been sent, and nothing is held any more."""
        for _ in range(3):
            for connection in list(self.up):
                for _ in range(len(self.up[connection]) + len(self.down[connection])):
                    self.move(connection)
            self.tick(2 * HOLD)
        assert all(state.next_deadline() is None for state in self.relays.values())

    def tell(self, peers: tuple[int, ...], message: m.Message) -> None:
        """The coordinator sends a message to these peers."""
        direct, relayed = self.root.routes(peers)
        assert not direct
        payload = encode_payload(message)
        for numbers in relayed.values():
            self.handle(TOP, Told(encode_payload(m.To(numbers, payload))))

    def kill(self, rank: int) -> None:
        """The connection of a rank ends; what it had sent is still read."""
        while self.up[rank]:
            self.move(rank)
        self.handle(self.above[rank], Ended(rank, "end of file"))

    def close(self, peer: int) -> bool:
        """The coordinator closes a peer. Returns whether it is behind a relay."""
        place = self.root.close(peer)
        if place is not None:
            self.handle(TOP, Told(encode_payload(m.Close((place[1],)))))
        return place is not None

    def introduce(self) -> dict[int, int]:
        """All ranks introduce themselves. Returns their peers."""
        for place, rank in enumerate(self.ranks):
            self.say(rank, hello(place))
        self.drain()
        peers = {e.hello.rank: e.peer for e in self.events if isinstance(e, PeerConnected)}
        assert all(e.relay == TOP for e in self.events if isinstance(e, PeerConnected))
        self.events.clear()
        self.frames.clear()
        return {rank: peers[place] for place, rank in enumerate(self.ranks)}


def announce(*locals: int) -> m.Announce:
    return m.Announce(0, 1, locals)


def told(tree: Tree, rank: int) -> list[m.Message]:
    return [decode_to_peer(payload) for payload in tree.down[rank]]


SAID = [
    announce(1),
    announce(1),
    announce(2),
    m.Blocked(0, 1, 1, 0.5),
    m.Pong(3),
    m.Withdraw(0, 1, "timeout", "late"),
]


@settings(max_examples=examples(150), deadline=None)
@given(
    leaves=st.lists(st.integers(1, 4), max_size=3),
    direct=st.integers(0, 3),
    steps=st.integers(1, 120),
    seed=st.integers(0, 1 << 32),
)
def test_what_each_rank_says_and_is_told_arrives_once_and_in_order(
    leaves: list[int], direct: int, steps: int, seed: int
) -> None:
    chance = random.Random(seed)
    tree = Tree(leaves, direct)
    peers = tree.introduce()
    by_peer = {peer: rank for rank, peer in peers.items()}
    said: dict[int, list[m.Message]] = {rank: [] for rank in tree.ranks}
    sent: dict[int, list[m.Message]] = {rank: [] for rank in tree.ranks}
    living, killed, closed = list(tree.ranks), list[int](), list[int]()
    for step in range(steps if living else 0):
        draw = chance.random()
        if draw < 0.35:
            message = chance.choice(SAID)
            for rank in living if chance.random() < 0.4 else [chance.choice(living)]:
                tree.say(rank, message)
                said[rank].append(message)
        elif draw < 0.84:
            tree.move(chance.choice(list(tree.up)))
        elif draw < 0.93:
            chosen = chance.sample(living, chance.randint(1, len(living)))
            for rank in chosen:
                sent[rank].append(m.StoreValue(step, b""))
            tree.tell(tuple([peers[rank] for rank in chosen]), m.StoreValue(step, b""))
        elif draw < 0.98 or len(living) == 1:
            tree.tick(chance.choice((HOLD / 4, HOLD)))
        else:
            rank = living.pop(chance.randrange(len(living)))
            (killed if chance.random() < 0.5 else closed).append(rank)
            if rank in killed:
                tree.kill(rank)
            else:  # whatever has not come by then never comes
                assert tree.close(peers[rank])
    tree.drain()
    heard: dict[int, list[m.Message]] = {rank: [] for rank in tree.ranks}
    lost: list[int] = []
    for event in tree.events:
        if isinstance(event, PeerLost):
            lost.append(by_peer[event.peer])
            continue
        assert isinstance(event, Received | ReceivedTogether)
        for peer in (event.peer,) if isinstance(event, Received) else event.peers:
            assert by_peer[peer] not in lost
            heard[by_peer[peer]].append(event.message)
    assert {*lost} == {*killed}
    assert {*tree.closed} == {*closed}
    for rank in tree.ranks:
        assert rank in closed or heard[rank] == said[rank]
        received = told(tree, rank)
        assert received == (sent[rank][: len(received)] if rank in killed else sent[rank])


@pytest.mark.parametrize(("leaves", "direct"), [((), 4), ((2, 3), 0), ((1, 2), 1)])
def test_equal_announcements_of_all_ranks_are_one(leaves: tuple[int, ...], direct: int) -> None:
    tree = Tree(leaves, direct)
    peers = tree.introduce()
    for rank in tree.ranks:
        tree.say(rank, announce(1, 2))
    for connection in [*tree.ranks, *tree.relays]:
        if connection in tree.up:
            tree.move(connection)
    (event,) = tree.events
    assert isinstance(event, ReceivedTogether)
    assert {*event.peers} == {*peers.values()}
    assert event.message == announce(1, 2)
    assert len(tree.frames) == 1


def test_an_announcement_waits_for_the_other_ranks_a_millisecond_at_most() -> None:
    tree = Tree((), 2)
    peers = tree.introduce()
    first, second = tree.ranks
    tree.say(first, announce(1))
    tree.move(first)
    assert tree.relays[TOP].next_deadline() == tree.now + HOLD
    tree.tick(HOLD / 2)
    assert not tree.events
    tree.tick(HOLD / 2)
    assert tree.events == [Received(peers[first], announce(1))]
    tree.say(second, announce(1))
    tree.move(second)
    tree.tick(HOLD)
    assert tree.events[1:] == [Received(peers[second], announce(1))]


@pytest.mark.parametrize(
    "message", [m.Withdraw(0, 1, "timeout", ""), m.Blocked(0, 1, 1, 0.5), m.Pong(1), m.Bye(), m.Events(b"")]
)
def test_what_is_no_announcement_goes_at_once_behind_what_is_held_of_its_rank(message: m.FromRank) -> None:
    tree = Tree((), 3)
    peers = tree.introduce()
    for rank in tree.ranks[:2]:
        tree.say(rank, announce(1))
        tree.move(rank)
    tree.say(tree.ranks[2], message)
    tree.move(tree.ranks[2])
    assert tree.events == [Received(peers[tree.ranks[2]], message)], "nothing of this rank was held"
    tree.say(tree.ranks[0], message)
    tree.move(tree.ranks[0])
    both = tuple(peers[rank] for rank in tree.ranks[:2])
    assert tree.events[1:] == [ReceivedTogether(both, announce(1)), Received(both[0], message)]


def test_announcements_in_another_order_are_not_merged() -> None:
    tree = Tree((), 2)
    peers = tree.introduce()
    first, second = tree.ranks
    for rank, local in ((first, 1), (first, 2), (second, 2), (second, 1)):
        tree.say(rank, announce(local))
        tree.move(rank)
    tree.tick(HOLD)
    assert tree.events == [
        Received(peers[first], announce(1)),
        ReceivedTogether((peers[first], peers[second]), announce(2)),
        Received(peers[second], announce(1)),
    ]


@pytest.mark.parametrize("leaves", [(), (2,)])
def test_the_end_of_a_connection_goes_at_once_behind_what_its_rank_had_sent(leaves: tuple[int, ...]) -> None:
    tree = Tree(leaves, 0 if leaves else 2)
    peers = tree.introduce()
    first, second = tree.ranks
    for rank, local in ((first, 1), (second, 1), (second, 2)):
        tree.say(rank, announce(local))
        tree.move(rank)
    tree.handle(tree.above[first], Ended(first, "end of file"))
    for connection in tree.above:
        for _ in range(3):
            tree.move(connection)
    assert tree.events == [
        ReceivedTogether((peers[first], peers[second]), announce(1)),
        PeerLost(peers[first], "end of file"),
        Received(peers[second], announce(2)),
    ], "what is left of all its ranks waits for none that is gone"


@pytest.mark.parametrize("leaves", [(), (2,)])
def test_that_a_rank_broke_the_protocol_is_known_above(leaves: tuple[int, ...]) -> None:
    tree = Tree(leaves, 0 if leaves else 2)
    peers = tree.introduce()
    first, second = tree.ranks
    tree.handle(tree.above[first], Ended(first, "it sent garbage", faulty=True))
    tree.handle(tree.above[second], Ended(second, "end of file"))
    tree.drain()
    assert tree.events == [
        PeerLost(peers[first], "it sent garbage", faulty=True),
        PeerLost(peers[second], "end of file"),
    ]


def test_the_coordinator_closes_connections_behind_relays() -> None:
    tree = Tree((2,), 1)
    peers = tree.introduce()
    leaf, behind, own = tree.above[tree.ranks[0]], tree.ranks[0], tree.ranks[2]
    assert tree.close(peers[behind])
    tree.say(behind, m.Bye())
    tree.move(behind)
    tree.move(leaf)  # on its way when the connection was closed: nothing new for those above
    assert tree.close(peers[own])
    tree.say(own, m.Bye())
    tree.drain()
    assert tree.closed == [own, behind]
    assert tree.events == []
    assert not tree.close(peers[behind])
    tree.say(tree.ranks[1], announce(1))
    tree.drain()
    assert tree.events == [Received(peers[tree.ranks[1]], announce(1))]


def test_no_announcement_waits_for_a_rank_that_was_closed_or_goes_because_of_it() -> None:
    tree = Tree((), 3)
    peers = tree.introduce()
    first, second, third = tree.ranks
    tree.say(third, announce(1))
    tree.move(third)
    tree.close(peers[third])
    for rank in (first, second):
        assert tree.events == []
        tree.say(rank, announce(1))
        tree.move(rank)
    assert tree.events == [ReceivedTogether((peers[first], peers[second]), announce(1))]
    tree.say(first, announce(2))
    tree.move(first)
    tree.close(peers[second])
    assert tree.events[1:] == [Received(peers[first], announce(2))]


def test_the_end_of_a_relay_is_that_of_the_connections_behind_it() -> None:
    tree = Tree((2,), 1)
    peers = tree.introduce()
    audience = tuple(peers.values())
    assert tree.root.routes(audience) == ((), {TOP: (0, -2)})
    leaf = tree.above[tree.ranks[0]]
    tree.handle(TOP, Ended(leaf, "end of file"))
    assert tree.events == [PeerLost(peers[rank], "end of file") for rank in tree.ranks[:2]]
    assert tree.root.lose(TOP, "killed") == [PeerLost(peers[tree.ranks[2]], "killed")]
    assert tree.root.routes(audience) == (audience, {}), "no way leads over a relay that is gone"


def test_the_end_of_a_rank_is_said_once() -> None:
    tree = Tree((2,), 0)
    peers = tree.introduce()
    gone = encode_payload(m.Lost((0,), "end of file"))
    for _ in range(2):
        tree.handle(TOP, Heard(tree.above[tree.ranks[0]], gone))
    assert tree.events == [PeerLost(peers[tree.ranks[0]], "end of file")]


def test_the_frame_for_a_host_names_neighbours_as_a_run() -> None:
    tree = Tree((), 16)
    peers = tree.introduce()
    _, relayed = tree.root.routes(tuple(peers.values()))
    assert relayed == {TOP: (0, -15)}


def test_a_ping_is_answered_for_the_relay_itself() -> None:
    assert RelayState().handle(Told(encode_payload(m.Ping(7))), 0.0) == [SendUp(m.Pong(7))]


@pytest.mark.parametrize(
    "message",
    [m.From((0, 1), encode_payload(hello(0))), m.From((1,), encode_payload(hello(0))), m.From((0,), b"\x90")],
)
def test_the_coordinator_refuses_what_makes_no_sense(message: m.From) -> None:
    root = Relays(itertools.count(1).__next__)
    root.open(TOP)
    with pytest.raises(ProtocolError):
        root.received(TOP, message)


@pytest.mark.parametrize(
    "payload", [b"", b"\xff", encode_payload(m.To((0,), b"x")), encode_payload(hello(0))]
)
def test_a_relay_refuses_what_no_relay_sends(payload: bytes) -> None:
    state = RelayState()
    state.handle(Opened(1, relays=True), 0.0)
    with pytest.raises(ProtocolError):
        state.handle(Heard(1, payload), 0.0)


def test_what_a_rank_says_that_makes_no_sense_ends_at_the_relay() -> None:
    state = RelayState()
    state.handle(Opened(1), 0.0)
    for payload in (b"", b"\xff", encode_payload(announce(1))):
        with pytest.raises(ProtocolError, match="no Hello"):
            state.handle(Heard(1, payload), 0.0)
    state.handle(Heard(1, encode_payload(hello(0))), 0.0)
    for payload in (b"", b"\xff", encode_payload(m.Expect((0,))), encode_payload(m.From((0,), b"x"))):
        with pytest.raises(ProtocolError, match="of a rank"):
            state.handle(Heard(1, payload), 0.0)


def test_numbers_that_are_named_twice_count_once() -> None:
    tree = Tree((2,), 0)
    peers = tree.introduce()
    leaf = tree.above[tree.ranks[0]]
    tree.tell((peers[tree.ranks[0]],), m.StoreValue(1, b""))
    tree.handle(TOP, Told(encode_payload(m.To((0, 0, 1), encode_payload(m.Interrupt())))))
    tree.handle(TOP, Heard(leaf, encode_payload(m.Lost((0, 0, 0), "end of file"))))
    tree.handle(TOP, Told(encode_payload(m.Close((1, 1)))))
    assert [len(payload) > 0 for payload in tree.down[leaf]] == [True] * 3
    assert tree.events == [PeerLost(peers[tree.ranks[0]], "end of file")]


def test_a_rank_that_was_never_heard_of_is_not_told_of() -> None:
    state = RelayState()
    state.handle(Opened(1), 0.0)
    assert state.handle(Ended(1, "end of file"), 0.0) == []
    state.handle(Opened(2), 0.0)
    assert state.handle(Heard(2, encode_payload(hello(0))), 0.0) == [
        SendUp(m.From((0,), encode_payload(hello(0))))
    ]


def test_an_announcement_is_known_by_its_first_bytes() -> None:
    definition = m.Definition(1, signature("a"), "line 1")
    for message in (
        announce(),
        announce(*range(300)),
        m.Announce(1 << 40, 1, (1,), (definition,), ((1,),), b"x"),
    ):
        state = RelayState()
        for connection in (1, 2):
            state.handle(Opened(connection), 0.0)
            state.handle(Heard(connection, encode_payload(hello(connection))), 0.0)
        assert state.handle(Heard(1, encode_payload(message)), 0.0) == []
        assert state.handle(Heard(2, encode_payload(message)), 0.0) == [
            SendUp(m.From(pack((0, 1)), encode_payload(message)))
        ]
        assert state.handle(Ended(3, ""), 0.0) == []
        assert CloseConnection(1) in state.handle(Told(encode_payload(m.Close((0,)))), 0.0)
