"""Messages with lists of ranks: short on the wire, whole on both sides of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import decode_to_peer, encode
from hvdlab.collectives.protocol.member_lists import KnownMembers, SentMembers, pack, unpack


def member(rank: int, pid: int = 100) -> m.Member:
    return m.Member(rank, f"node{rank // 4}", pid, "10.0.0.1", ("shm", "gloo"))


def configure(*members: m.Member) -> m.Configure:
    return m.Configure(0, 3, members, "gloo", {"a": "b"})


class Wire:
    """Connection between the two sides."""

    def __init__(self, sent: SentMembers) -> None:
        self.sent, self.known, self.told, self.bytes = sent, KnownMembers(), 0, 0

    def carry(self, message: m.Message) -> m.Message:
        self.sent.add(message)
        short, self.told = self.sent.shorten(message, self.told)
        frame = encode(short)
        self.bytes = len(frame)
        return self.known.restore(decode_to_peer(frame[4:]))


@given(st.lists(st.integers(0, 2**31 - 1)) | st.sets(st.integers(0, 40)).map(sorted))
def test_lists_of_ranks_come_back_as_they_were(ranks: list[int]) -> None:
    assert unpack(pack(ranks)) == tuple(ranks)


@pytest.mark.parametrize(
    ("ranks", "packed"),
    [
        ((), ()),
        ((0,), (0,)),
        ((0, 1), (0, -1)),
        ((3, 4, 5, 7, 9, 10), (3, -5, 7, 9, -10)),
        ((2, 1, 0), (2, 1, 0)),
        ((5, 5, 6), (5, 5, -6)),
    ],
)
def test_neighbours_are_one_run(ranks: tuple[int, ...], packed: tuple[int, ...]) -> None:
    assert pack(ranks) == packed


def test_a_run_without_a_beginning_is_refused() -> None:
    with pytest.raises(ProtocolError, match="without its first"):
        unpack((-3,))


def test_a_death_is_told_in_few_bytes() -> None:
    members = tuple(member(rank) for rank in range(2000))
    wire = Wire(SentMembers())
    assert wire.carry(configure(*members)) == configure(*members)
    assert wire.bytes > 50_000
    left = members[:700] + members[701:]
    assert wire.carry(configure(*left)) == configure(*left)
    assert wire.bytes < 100
    ranks = tuple(one.rank for one in left)
    world = m.World(tuple(range(2000)), left, (m.Death(700, 1, 2.0, "killed"),), 4, formed=ranks)
    assert wire.carry(world) == world
    assert wire.bytes < 150
    pending = (m.AbortedCollective(0, "loss", ranks, (700,), ("line 1",) * 1000 + ("line 2",) * 999, (3, 4)),)
    abort = m.Abort(0, 3, "rank_died", (700,), "rank 700 died", "", pending)
    assert wire.carry(abort) == abort
    assert wire.bytes < 100


@given(st.lists(st.sampled_from(["", "a", "b"])))
def test_call_sites_come_back_as_they_were(sites: list[str]) -> None:
    pending = (m.AbortedCollective(0, "loss", (0, 1, 2), (), tuple(sites)),)
    abort = m.Abort(0, 1, "interrupted", (), "", "", pending)
    assert Wire(SentMembers()).carry(abort) == abort


def test_whoever_comes_later_is_told_of_all() -> None:
    sent = SentMembers()
    first, second = Wire(sent), Wire(sent)
    for message in (configure(member(0)), configure(member(0), member(1)), configure(member(1))):
        assert first.carry(message) == message
    assert second.carry(configure(member(0), member(1))) == configure(member(0), member(1))


def test_one_that_takes_the_place_of_another_is_described_anew() -> None:
    wire = Wire(SentMembers())
    wire.carry(configure(member(0), member(1)))
    assert wire.carry(configure(member(0), member(1, pid=7))) == configure(member(0), member(1, pid=7))


def test_an_abort_tells_of_nobody() -> None:
    """A rank that came up since is described with the next message that has members."""
    sent = SentMembers()
    one, other = Wire(sent), Wire(sent)
    one.carry(configure(member(0), member(1)))
    abort = m.Abort(0, 1, "interrupted", (0,), "", "")
    assert other.carry(abort) == abort
    assert other.carry(configure(member(1))) == configure(member(1))


def test_a_member_of_which_nothing_was_said_is_refused() -> None:
    with pytest.raises(ProtocolError, match="rank 3"):
        KnownMembers().restore(m.Configure(0, 1, (), "gloo", {}, listed=(3,)))


def test_a_whole_message_stays_as_it_is() -> None:
    message = configure(member(0))
    assert KnownMembers().restore(message) == message


Step = tuple[int, bool, frozenset[int], int]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.frozensets(st.integers(0, 5)), st.integers(0, 2)))
)
def test_whatever_is_sent_to_whom_arrives_whole(steps: list[Step]) -> None:
    sent = SentMembers()
    wires = [Wire(sent) for _ in range(3)]
    for to, is_world, ranks, pid in steps:
        members = tuple(member(rank, pid) for rank in sorted(ranks))
        numbers = tuple(sorted(ranks))
        message = m.World(numbers, members, (), 1, numbers) if is_world else configure(*members)
        assert wires[to].carry(message) == message
