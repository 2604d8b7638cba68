"""Messages of a rank that leave together, and in order."""

from __future__ import annotations

import socket

import pytest

from hvdlab.collectives.engine.entries import CompletionHooks
from hvdlab.collectives.engine.locked_state import LockedState
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.errors import Cause, CauseKind
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import decode_from_rank, encode
from hvdlab.collectives.protocol.endpoint import ConnectionLost, Endpoint


class SleepingThread:
    """Control thread that has nothing to do."""

    def wake(self) -> None: ...


def test_what_need_not_leave_at_once_leaves_with_the_next_message_in_one_packet() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    endpoint = Endpoint(here)
    locked = LockedState(0, endpoint, thread := SleepingThread(), CompletionHooks(0, thread))
    begin, end, mail = m.CellBegin("c"), m.CellEnd("d", ""), m.Post("topic", b"done", ())
    with there:
        there.setblocking(False)
        locked.change(RankState.begin_cell, "c")
        locked.change(RankState.end_cell, "d", "")
        assert locked.state.has_messages
        locked.update(RankState.queue_message, mail)
        assert there.recv(1 << 16) == encode(begin) + encode(end) + encode(mail)
        assert not locked.state.has_messages
    endpoint.close()


def test_the_begin_of_a_cell_is_not_sent_with_its_end() -> None:
    state, mail = RankState(0), m.Post("topic", b"done", ())
    state.begin_cell("c")
    state.end_cell("c", "")
    assert state.take_messages() == [m.CellEnd("c", "")]
    # A message that was queued between the two can be about the cell that runs.
    state.begin_cell("d")
    state.queue_message(mail)
    state.end_cell("d", "")
    assert state.take_messages() == [m.CellBegin("d"), mail, m.CellEnd("d", "")]
    state.begin_cell("e")
    assert state.take_messages() == [m.CellBegin("e")]
    state.end_cell("e", "")
    assert state.take_messages() == [m.CellEnd("e", "")]


def test_messages_after_a_successor_that_died_at_once_wait_for_the_next_one() -> None:
    first, dead, living = (socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3))
    endpoint = Endpoint(first[0])
    locked = LockedState(0, endpoint, thread := SleepingThread(), CompletionHooks(0, thread))
    first[1].close()
    locked.disconnect(Cause(CauseKind.COORDINATOR_LOST, (), "it is gone"))
    dead[1].close()
    with pytest.raises(ConnectionLost):
        locked.reconnect(Endpoint(dead[0]), (0,), ())
    mail = m.Post("topic", b"kept", ())
    locked.update(RankState.queue_message, mail)
    with living[1] as coordinator:
        coordinator.setblocking(False)
        locked.reconnect(Endpoint(living[0]), (0,), ())
        assert locked.flush()
        assert isinstance(decode_from_rank(coordinator.recv(1 << 16)[4:]), m.Resume)
        assert coordinator.recv(1 << 16) == encode(mail)
    endpoint.close()
