"""Messages that wait for a socket, and their order."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from hvdlab.collectives.protocol.endpoint import Backlog


def drain(backlog: Backlog) -> list[bytes]:
    gone = []
    while (waiting := backlog.next()) is not None:
        gone.append(bytes(waiting[0]))
        backlog.sent(len(waiting[0]))
    return gone


def test_mail_overtakes_events() -> None:
    backlog = Backlog()
    for text, bulk in (("e1", True), ("m1", False), ("e2", True), ("m2", False)):
        backlog.add(memoryview(text.encode()), -1, bulk=bulk)
    assert drain(backlog) == [b"m1", b"m2", b"e1", b"e2"]


def test_nothing_gets_into_a_frame_that_was_begun_or_tried() -> None:
    backlog = Backlog()
    backlog.begin(memoryview(b"rest"), 7)
    backlog.add(memoryview(b"mail"), -1, bulk=False)
    assert backlog.next() == (b"rest", 7)
    backlog.sent(1)
    assert backlog.next() == (b"est", -1), "the descriptor has gone with the first byte"
    backlog.sent(3)
    backlog.add(memoryview(b"event"), -1, bulk=True)
    assert drain(backlog) == [b"mail", b"event"]
    backlog.add(memoryview(b"tried"), -1, bulk=True)
    assert backlog.next() == (b"tried", -1)
    backlog.add(memoryview(b"mail"), -1, bulk=False)
    assert drain(backlog) == [b"tried", b"mail"]


def test_what_is_left_is_forgotten_and_its_descriptors_are_returned() -> None:
    backlog = Backlog()
    for bulk in (True, False):
        backlog.add(memoryview(b"x"), 4 + bulk, bulk=bulk)
    assert backlog.next() == (b"x", 4)
    assert sorted(backlog.clear()) == [4, 5]
    assert (backlog.next(), backlog.nbytes) == (None, 0)


frames = st.tuples(st.booleans(), st.integers(1, 9))


@given(st.lists(st.one_of(frames, st.integers(0, 12)), max_size=60))
def test_each_frame_arrives_whole_and_in_the_order_of_its_kind(steps: list[tuple[bool, int] | int]) -> None:
    backlog, wire = Backlog(), bytearray()
    queues: dict[bool, deque[bytes]] = {False: deque(), True: deque()}
    number = 0
    for step in steps:
        if isinstance(step, int):  # the socket takes so many bytes
            while step and (waiting := backlog.next()) is not None:
                taken = min(step, len(waiting[0]))
                wire += waiting[0][:taken]
                backlog.sent(taken)
                step -= taken
        else:
            bulk, length = step
            number += 1
            frame = bytes([length, number % 256, bulk]) + bytes(length)
            queues[bulk].append(frame)
            backlog.add(memoryview(frame), -1, bulk=bulk)
    assert backlog.nbytes == sum(map(len, (*queues[False], *queues[True]))) - len(wire)
    for piece in drain(backlog):
        wire += piece
    while wire:
        frame = bytes(wire[: 3 + wire[0]])
        del wire[: len(frame)]
        assert frame == queues[bool(frame[2])].popleft()
    assert not queues[False]
    assert not queues[True]
