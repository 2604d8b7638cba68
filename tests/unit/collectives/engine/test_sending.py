"""Messages of a rank that leave together, and in order."""

from __future__ import annotations

import socket

from hvdlab.collectives.engine.entries import CompletionHooks
from hvdlab.collectives.engine.locked_state import LockedState
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import encode
from hvdlab.collectives.protocol.endpoint import Endpoint


class SleepingThread:
    """Control thread that has nothing to do."""

    def wake(self) -> None: ...


def test_what_need_not_leave_at_once_leaves_with_the_next_message_in_one_packet() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    endpoint = Endpoint(here)
    locked = LockedState(0, endpoint, thread := SleepingThread(), CompletionHooks(0, thread))
    begin, end, mail = m.CellBegin("c"), m.CellEnd("c", ""), m.Post("topic", b"done", ())
    with there:
        there.setblocking(False)
        locked.change(RankState.begin_cell, "c")
        locked.change(RankState.end_cell, "c", "")
        assert locked.state.has_messages
        locked.update(RankState.queue_message, mail)
        assert there.recv(1 << 16) == encode(begin) + encode(end) + encode(mail)
        assert not locked.state.has_messages
    endpoint.close()
