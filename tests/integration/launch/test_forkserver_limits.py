"""The fork server meets the limits of its host: the failure is reported, and starts work again when there is room."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections.abc import Iterator

import pytest

from hvdlab.collectives.errors import StartError
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.forkserver.program import PROGRAM, PROGRAM_NAME
from hvdlab.launch.forkserver import children
from hvdlab.launch.forkserver.client import ForkServer
from hvdlab.launch.forkserver.messages import Exited, Fork, ForkFailed, ReportEngine, Signal, ToServer
from support.effort import examples
from support.fuzz.protocol import make, run
from support.patience import PATIENCE
from support.ranks.fork_server import ForkedRanks, allow_files, loaded

NO_RANK = Fork.of(5, os.environ, "/", ())
"""Ends at once, since it finds nothing to import."""


@pytest.fixture
def ranks() -> Iterator[ForkedRanks]:
    found = ForkedRanks()
    try:
        yield found
    finally:
        found.close()


def test_without_descriptors_nothing_is_forked_and_nothing_breaks(ranks: ForkedRanks) -> None:
    loaded(ranks.warm)
    ranks.fork([0])
    ranks.run(0, "x = 5")
    failures = 0
    for more in range(12):  # at each step of the making of a child
        allow_files(ranks.warm.pid, more)
        before = len(ranks.news)
        ranks.warm.send(NO_RANK)
        ranks.wait(lambda before=before: any(isinstance(m, ForkFailed | Exited) for m in ranks.news[before:]))  # type: ignore[misc]  # a default argument
        failures += isinstance(ranks.news[before], ForkFailed)
        assert len(ranks.warm.children()) == 1
    assert failures >= 4
    assert set(ranks.failures()) == {"Too many open files: too many files are open (`ulimit -n`)"}
    assert isinstance(ranks.news[-1], Exited)
    allow_files(ranks.warm.pid, 0)
    os.kill(ranks.pid(0), signal.SIGKILL)
    assert ranks.end_of(0).signal == signal.SIGKILL
    allow_files(ranks.warm.pid, 1000)
    ranks.news.clear()
    ranks.fork([0])


def test_without_descriptors_a_kept_one_turns_a_successor_away_and_takes_it_later(ranks: ForkedRanks) -> None:
    loaded(ranks.warm)
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        door = f"{directory}/door"
        ranks.warm.keep(door, Deadline(PATIENCE))
        allow_files(ranks.warm.pid, 0)
        with pytest.raises(StartError, match="can't be attached to"):
            ForkServer.attach(door, PROGRAM_NAME, Deadline(PATIENCE))
        allow_files(ranks.warm.pid, 1000)
        with pytest.raises(StartError, match="has it"):
            ForkServer.attach(door, PROGRAM_NAME, Deadline(PATIENCE))
        ranks.warm.close()


@pytest.mark.parametrize(
    ("number", "text"),
    [(11, "no more processes are allowed here"), (12, "no memory left"), (5, "Input/output error")],
)
def test_a_fork_that_fails_leaves_no_descriptor_and_says_what_to_do(
    number: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork() -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fork", fork)
    for child in (0, -1):
        with pytest.raises(OSError, match=os.strerror(number)) as raised:
            children.fork(Fork.of(child, {}, "/", ()), PROGRAM, -1, lambda: None)
        assert text in children.why_not(raised.value)


@pytest.mark.parametrize(
    "request_",
    [Signal(0, 999), Signal(0, 1 << 62), Signal(0, -3, group=True), ReportEngine(1 << 62, joined=True)],
    ids=str,
)
def test_a_request_that_makes_no_sense_leaves_the_ranks_alone(ranks: ForkedRanks, request_: ToServer) -> None:
    ranks.fork([0])
    ranks.run(0, "x = 5")
    server = ranks.warm.pid
    ranks.warm.send(request_)
    ranks.warm.send(NO_RANK)
    ranks.wait(lambda: any(isinstance(m, Exited) and m.number == 5 for m in ranks.news))
    assert ranks.run(0, "x") == "5"
    assert ranks.warm.pid == server
    assert ranks.losses == []


def test_a_fork_that_makes_no_sense_is_answered_and_the_next_one_done(ranks: ForkedRanks) -> None:
    loaded(ranks.warm)
    for environment in ({b"": b"x"}, {b"a=b": b"x"}, {b"a": b"\0"}):
        before = len(ranks.news)
        ranks.warm.send(Fork(5, environment, b"\0", (b"\xff",)))
        ranks.wait(lambda before=before: any(isinstance(m, ForkFailed | Exited) for m in ranks.news[before:]))  # type: ignore[misc]  # a default argument
    ranks.fork([0])
    assert ranks.losses == []


def test_whatever_is_asked_the_fork_server_goes_on(ranks: ForkedRanks) -> None:
    loaded(ranks.warm)

    def one(chance: random.Random) -> None:
        ranks.warm.send(make(chance.choice((Signal, ReportEngine)), chance, tame=chance.random() < 0.5))

    ranks.fork([2])
    ranks.run(2, "x = 5")
    ranks.fork([4], expect=(2, 4))
    run(one, examples(200))
    ranks.warm.send(NO_RANK)
    ranks.wait(lambda: any(isinstance(m, Exited) and m.number == 5 for m in ranks.news))
    assert ranks.run(4, "6 * 7") == "42"
    assert ranks.losses == []
