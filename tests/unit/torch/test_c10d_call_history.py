"""Finding the rank that has skipped a call, from the lines of two ranks' last calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from hvdlab.torch.c10d import call_history
from hvdlab.torch.c10d.call_history import (
    KEPT,
    CallHistoryMessage,
    CallRecord,
    Drift,
    Histories,
    Shift,
    find_drift,
    find_shift,
)
from support.patience import HOUR, PATIENCE


def said(lines: Sequence[str], first: int = 0) -> CallHistoryMessage:
    """Return calls from these lines, numbered from 1 on in the generation."""
    return CallHistoryMessage(
        "group",
        3,
        first,
        tuple(CallRecord(first + i + 1, "all_reduce", line) for i, line in enumerate(lines)),
    )


def found(own: str, other: str, *, first: int = 0) -> tuple[int, str, str] | None:
    """Return how many calls were skipped, and the first lines that differ."""
    shift = find_shift(said(own.split()), said(other.split()[first:], first))
    return None if shift is None else (shift.skipped, shift.own.site, shift.other.site)


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        ("a b a b a b a b", "a b a a b a b", (1, "b", "a")),
        ("a b c a b c a b c", "a b c a c a b c", (1, "b", "c")),
        ("a a b a a b a a b", "a a b a b a a b", (1, "a", "b")),
        ("a b c a b c a b c a b c", "a b c a b c c a b c", (2, "a", "c")),
        ("a b a a b a b", "a b a b a b a b", (-1, "a", "b")),
    ],
)
def test_the_rank_that_skipped_calls_is_found(own: str, other: str, expected: tuple[int, str, str]) -> None:
    assert found(own, other) == expected


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ("a b a b", "a b a"),  # the other rank has not made this call yet
        ("a b a b", "a b a b"),
        ("r x r x r x", "o x o x o x"),  # a root and another rank, at lines of their own
        ("x r x r x r", "x o x o x o"),
        ("a b a b", "a b b"),  # a single call behind the skipped one proves nothing
        ("", ""),
    ],
)
def test_nothing_is_said_of_what_is_no_shift(own: str, other: str) -> None:
    assert found(own, other) is None


def test_only_what_both_remember_is_compared() -> None:
    lines = ["a" if i % 2 else "b" for i in range(40)]
    other = [*lines[:30], *lines[31:]]
    shift = find_shift(said(lines), said(other[20:], 20))
    assert shift is not None
    assert (shift.skipped, shift.own.number, shift.other.number) == (1, 31, 31)
    assert find_shift(said(lines), said(other[32:], 32)) is None, "when it began is not known any more"
    assert KEPT >= 32


def test_it_is_told_by_both_sides_alike() -> None:
    one, other = CallRecord(4, "all_reduce", "a.py:3"), CallRecord(5, "all_reduce", "a.py:9")
    told = Shift(one, other, 1).sentence(1, 0)
    assert told == (
        "rank 1 skipped a call: where rank 0 called all_reduce #4 (a.py:3), it called all_reduce #5 (a.py:9), and the calls "
        "behind that met the wrong ones"
    )
    assert Shift(other, one, -1).sentence(0, 1) == told
    assert "skipped 3 calls" in Shift(one, other, 3).sentence(1, 0)


def steps(of_calls: Sequence[int], first: int = 0) -> CallHistoryMessage:
    """Return calls from one line, each with the number of steps before it."""
    calls = tuple(CallRecord(first + i + 1, "all_reduce", "line", step) for i, step in enumerate(of_calls))
    return CallHistoryMessage("group", 3, first, calls)


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        ([0, 0, 1, 1, 2, 2], [0, 0, 2, 2, 3, 3], (3, 1)),
        ([0, 1, 3, 4], [0, 1, 2, 3], (3, -1)),
        ([7, 8, 9], [0, 1, 3], (3, 1)),  # one rank has trained before, without the other
        ([0, 1, 2], [0, 2, 4], (2, 1)),
        ([0, 1, 2], [0, 1, 2], None),
        ([0, 1, 2], [5, 6], None),
        ([0, 1, 2, 3], [0, 2, 2, 3], None),  # one rank has a further optimizer, which steps now and then
        ([0, 1, 2, 3], [0, 2, 1, 4], None),
        ([], [1], None),
    ],
)
def test_calls_of_one_line_are_told_apart_by_steps(
    own: list[int], other: list[int], expected: tuple[int, int] | None
) -> None:
    drift = find_drift(steps(own), steps(other))
    assert (None if drift is None else (drift.own.number, drift.ahead)) == expected
    assert find_shift(steps(own), steps(other)) is None


def test_who_is_ahead_is_told_by_both_sides_alike() -> None:
    one, other = CallRecord(4, "all_reduce", "a.py:3", 1), CallRecord(4, "all_reduce", "a.py:3", 2)
    for drift, rank, own in ((Drift(one, other, 1), 1, 0), (Drift(other, one, -1), 0, 1)):
        assert "rank 1 has probably skipped" in drift.sentence(rank, own)
    assert (
        Drift(one, other, 1)
        .sentence(1, 0)
        .startswith(
            "rank 0 made all_reduce #4 (a.py:3) after 1 step of its optimizers, and rank 1 made it after 2 steps"
        )
    )


class Mail:
    """Mail of rank 0's engine, as :class:`Histories` uses it: the mail that it sends waits here."""

    rank, living = 0, (0, 1, 2)

    def __init__(self) -> None:
        self.sent: queue.Queue[tuple[CallHistoryMessage, tuple[int, ...]]] = queue.Queue()
        self.receive: Callable[[int, bytes], None] = lambda sender, body: None

    def on_mail(self, topic: str, receive: Callable[[int, bytes], None]) -> None:
        self.receive = receive

    def post(self, topic: str, body: bytes, to: Sequence[int]) -> None:
        self.sent.put((msgspec.msgpack.decode(body, type=CallHistoryMessage), tuple(to)))

    def answer(self, rank: int, question: CallHistoryMessage, lines: str) -> None:
        """Answer on this rank with calls from these lines."""
        calls = tuple(CallRecord(i + 1, "all_reduce", line) for i, line in enumerate(lines.split()))
        said = msgspec.structs.replace(question, calls=calls, asks=False)
        self.receive(rank, msgspec.msgpack.encode(said))


def test_two_threads_ask_about_one_group_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_history, "PATIENCE", HOUR)  # nothing but the answers ends a wait
    mail: Any = Mail()
    histories = Histories(mail)
    for call in said(["a", "b", "a", "b", "a", "b", "a", "b"]).calls:
        histories.add("group", 3, call)
    found: list[queue.Queue[str]] = [queue.Queue(), queue.Queue()]
    threads, questions = [], []
    for missing, texts in zip(([1], [1, 2]), found, strict=True):
        thread = threading.Thread(
            target=lambda missing, texts: texts.put(histories.explain("group", 3, missing)),
            args=(missing, texts),
            daemon=True,
        )
        thread.start()
        threads.append(thread)
        question, to = mail.sent.get(timeout=PATIENCE)
        assert to == tuple(missing)
        questions.append(question)
    mail.answer(1, questions[0], "a b a b")
    assert found[0].get(timeout=PATIENCE) == ""
    mail.answer(1, questions[1], "a b a b")
    mail.answer(2, questions[1], "a b a a b a b")
    assert found[1].get(timeout=PATIENCE).startswith("rank 2 skipped a call")
    for thread in threads:
        thread.join(PATIENCE)
