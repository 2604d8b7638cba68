"""A start that waits for others, such as a batch system's queue, without processes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from hvdlab.collectives.errors import StartError
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.notebook.rank_lifecycle import RankLifecycle
from hvdlab.kernel_ext.notebook.rank_states import AgentReady
from hvdlab.launch.hosts import parse_hosts
from hvdlab.launch.starter import Ended, Started
from support.patience import PATIENCE


class Coordinator:
    """Coordinator that receives a group's messages, and sends none."""

    def on_mail(self, topic: str, callback: Any) -> None: ...

    def expect(self, ranks: Sequence[int]) -> None: ...

    def post(self, topic: str, body: bytes, ranks: Sequence[int]) -> None: ...

    def rank_lost(self, rank: int, pid: int, reason: str) -> None: ...


class Queue:
    """Starter whose ranks wait for room; a thread of the test's lets them go on."""

    def __init__(self, group: RankLifecycle) -> None:
        self.group = group

    def start(self, ranks: Sequence[int], size: int) -> None:
        self.group.set_launch_wait("asking for room")

    def signal(self, rank: int, number: int) -> None: ...


class Unobserved:
    """`LifecycleObserver` that does nothing."""

    def rank_ready(self, rank: int) -> None: ...

    def rank_lost(self, rank: int, reason: str) -> None: ...

    def rank_left(self, rank: int, died: str) -> None: ...


@pytest.fixture
def group() -> RankLifecycle:
    group = RankLifecycle(Coordinator(), Unobserved())  # type: ignore[arg-type]  # stands in for a Client
    group.set_starter(Queue(group))  # type: ignore[arg-type]
    return group


def over() -> Deadline:
    """Return a time limit that has passed already, as after hours in a queue."""
    times = iter((0.0, *[PATIENCE] * 100))
    return Deadline(PATIENCE, clock=lambda: next(times))


def test_the_time_limit_begins_when_the_wait_is_over(group: RankLifecycle) -> None:
    said: list[str] = []

    def begin() -> None:
        group.set_launch_wait("")
        group.handle(Started(0, 7))
        group.handle(AgentReady(0))

    def heard(text: str) -> None:
        said.append(text)
        if text == "asking for room":
            group.set_launch_wait("job 7 is PENDING")
        else:
            thread.start()

    thread = threading.Thread(target=begin)
    group.set_ranks([0], over(), progress=heard)
    thread.join()
    assert said == ["asking for room", "job 7 is PENDING"]
    assert group.ready() == (0,)


def test_a_wait_that_ends_without_room_says_why(group: RankLifecycle) -> None:
    def heard(text: str) -> None:
        group.set_launch_wait("")
        group.handle(Ended(0, 0, "the job was cancelled"))

    with pytest.raises(StartError, match="rank 0 could not be started: the job was cancelled"):
        group.set_ranks([0], over(), progress=heard)
    assert group.members.wanted == ()


def test_an_interrupt_of_the_wait_ends_it(group: RankLifecycle) -> None:
    def heard(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.set_ranks([0], over(), progress=heard)
    assert group.members.wanted == ()


class Failing(Queue):
    """Starter whose start raises an error as long as there is one; its ranks are ready at once."""

    error: BaseException | None = None

    def __init__(self, group: RankLifecycle) -> None:
        super().__init__(group)
        self.killed: list[int] = []

    def start(self, ranks: Sequence[int], size: int) -> None:
        if self.error is not None:
            raise self.error
        for rank in ranks:
            self.group.handle(Started(rank, 100 + rank))
            self.group.handle(AgentReady(rank))

    def place(self, rank: int, size: int) -> None: ...

    def signal(self, rank: int, number: int) -> None:
        self.killed.append(rank)


@pytest.mark.parametrize("error", [FileNotFoundError("no directory"), KeyboardInterrupt()])
def test_rank_whose_start_raises_an_error_can_be_started_again(
    group: RankLifecycle, error: BaseException
) -> None:
    starter = Failing(group)
    group.set_starter(starter)  # type: ignore[arg-type]
    group.set_ranks([0], Deadline(PATIENCE))
    group.handle(Ended(0, 100, "killed by SIGKILL"))
    starter.error = error
    with pytest.raises(type(error)):
        group.set_ranks([0], Deadline(PATIENCE), replace_lost=True)
    assert (group.members.wanted, group.members.lost) == ((0,), (0,))
    with pytest.raises(type(error)):
        group.set_ranks([0, 1], Deadline(PATIENCE))
    assert (group.members.wanted, group.members.get(1)) == ((0,), None)
    assert starter.killed == [0, 1]  # it may have started them before the error
    starter.error = None
    group.set_ranks([0, 1], Deadline(PATIENCE), replace_lost=True)
    assert group.ready() == (0, 1)


def test_ranks_that_outlive_sigkill_are_named_by_the_error(group: RankLifecycle) -> None:
    group.set_starter(Failing(group))  # type: ignore[arg-type]  # its signals end no rank
    group.set_ranks([0, 1, 2], Deadline(PATIENCE))
    group.handle(Ended(1, 101, "killed by SIGKILL"))
    with pytest.raises(StartError, match="ranks 0,2 did not end within"):
        group.end([0, 1, 2], over())
    assert group.ready() == (0, 2)


@pytest.mark.parametrize("hosts", ["", "a:1,b:2"])
@pytest.mark.parametrize(
    ("started", "ranks", "where", "what"),
    [
        ((), "ranks 0-2", " on a, b", "could not be started"),
        ((0,), "ranks 1,2", " on b", "could not be started"),
        ((0, 2), "rank 1", " on b", "could not be started"),
        ((0, 1, 2), "ranks 1,2", " on b", "did not answer"),
    ],
)
def test_ranks_that_do_not_come_are_named_with_their_hosts(
    hosts: str, started: tuple[int, ...], ranks: str, where: str, what: str
) -> None:
    group = RankLifecycle(
        Coordinator(),  # type: ignore[arg-type]  # stands in for a Client
        Unobserved(),
        hosts=parse_hosts(hosts) if hosts else (),
    )

    class Hangs(Queue):
        def start(self, ranks: Sequence[int], size: int) -> None:
            for rank in started:
                group.handle(Started(rank, 100 + rank))
            if 0 in started:
                group.handle(AgentReady(0))

    group.set_starter(Hangs(group))  # type: ignore[arg-type]
    with pytest.raises(StartError) as error:
        group.set_ranks([0, 1, 2], over())
    named = ranks + (where if hosts else "")
    assert str(error.value) == f"{named} {what} within {PATIENCE:g} s; give a longer timeout"
