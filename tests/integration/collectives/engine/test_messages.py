"""Messages of one rank to another, between real ranks: a failure of one concerns these two, until a generation has to
end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.engine.entries import Handle
from hvdlab.collectives.engine.requests import Limit, PendingCollective, Request
from hvdlab.collectives.errors import AbortedError, CauseKind, InvalidRequestError, MismatchError
from hvdlab.collectives.planes.registry import PeerPlanes
from hvdlab.collectives.types import DType, OpKind
from support.patience import PATIENCE, without_heartbeat
from support.ranks.resident import RankGone, Ranks, meet

LARGE = 1 << 22


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    without_heartbeat(monkeypatch)
    with Ranks(3) as ranks:
        yield ranks


def submit(source: int, target: int, values: Any, tag: int = 0) -> Handle:
    engine = context.engine()
    array = np.asarray(values, np.float32)
    output = array if engine.rank == target else None
    request = Request(
        OpKind.SENDRECV,
        f"{source}>{target}.{tag}",
        input=array,
        output=output,
        dtype=DType.F32,
        root=source,
        ranks=(source, target),
        channel=str(tag),
        anonymous=True,
    )
    return engine.submit(request)


def submit_from_any(buffer: Any, tag: int = 0) -> Handle:
    engine = context.engine()
    request = Request(
        OpKind.SENDRECV,
        f"any>{engine.rank}.{tag}",
        input=buffer,
        output=buffer,
        dtype=DType.F32,
        ranks=(engine.rank,),
        channel=str(tag),
        anonymous=True,
    )
    return engine.submit(request)


def exchange(count: int) -> list[float]:
    """Send this rank's number to the next one, twice; return the messages of the previous one."""
    engine = context.engine()
    rank, size = engine.rank, len(engine.ranks())
    before, after = (rank - 1) % size, (rank + 1) % size
    buffers = [np.zeros(count, np.float32) for _ in range(2)]
    works = [submit(rank, after, np.full(count, rank + 10.0 * i)) for i in range(2)]
    works += [submit(before, rank, buffer) for buffer in buffers]
    for work in works:
        work.wait(PATIENCE)
    assert all((buffer == buffer[:1]).all() for buffer in buffers)
    return [float(buffer[0]) for buffer in buffers]


def test_a_ring_of_small_and_large_ones(three: Ranks) -> None:
    for count in (1, 100_000):
        assert three.run(exchange, count) == [[2.0, 12.0], [0.0, 10.0], [1.0, 11.0]]


def collect(count: int) -> list[tuple[int, float]]:
    """Rank 0 receives two messages of each other rank, in any order of arrival; return each rank's messages."""
    engine = context.engine()
    if engine.rank:
        for i in range(2):
            submit(engine.rank, 0, np.full(count, engine.rank + 10.0 * i)).wait(PATIENCE)
        return []
    buffers = [np.zeros(count, np.float32) for _ in range(4)]
    works = [submit_from_any(buffer) for buffer in buffers]
    sources = [work.wait(PATIENCE).source for work in works]
    assert all((buffer == buffer[:1]).all() for buffer in buffers)
    return [(source, float(buffer[0])) for source, buffer in zip(sources, buffers, strict=True)]


def test_small_and_large_ones_from_any_rank(three: Ranks) -> None:
    for count in (1, 100_000):
        found = three.run(collect, count)[0]
        assert [each for each in found if each[0] == 1] == [(1, 1.0), (1, 11.0)]
        assert [each for each in found if each[0] == 2] == [(2, 2.0), (2, 12.0)]


def give_up_one_from_any() -> list[Any]:
    """Give up on rank 0 a receive from any rank; the next one gets the late message, and the generation goes on."""
    engine = context.engine()
    if engine.rank:
        hvd.barrier()
        if engine.rank == 2:
            submit(2, 0, [7.0], tag=4).wait(PATIENCE)
        return []
    before = engine.generation()
    with pytest.raises(AbortedError, match=r"sendrecv .*no message came") as caught:
        submit_from_any(np.zeros(1, np.float32), tag=4).wait_or_withdraw(Limit(0.05, "no message came"))
    assert (caught.value.cause.kind, caught.value.pending.missing) == (CauseKind.TIMEOUT, (1, 2))
    hvd.barrier()
    late = np.zeros(1, np.float32)
    source = submit_from_any(late, tag=4).wait(PATIENCE).source
    assert engine.generation() == before
    return [source, float(late[0])]


def test_one_from_any_rank_that_takes_too_long_is_given_up_alone(three: Ranks) -> None:
    assert three.run(give_up_one_from_any) == [[2, 7.0], [], []]


def die_before_sending() -> None:
    """Rank 2 ends once rank 0 waits for any rank."""
    engine = context.engine()
    if engine.rank == 2:
        submit(0, 2, np.zeros(1)).wait(PATIENCE)
        os.kill(os.getpid(), signal.SIGKILL)
    if engine.rank == 0:
        received = submit_from_any(np.zeros(1, np.float32))
        submit(0, 2, np.zeros(1))
        with pytest.raises(AbortedError) as caught:
            received.wait(PATIENCE)
        assert (caught.value.cause.kind, caught.value.cause.ranks) == (CauseKind.RANK_DIED, (2,))


def test_a_death_ends_a_receive_from_any_rank(three: Ranks) -> None:
    outcomes = three.outcomes(die_before_sending, timeout=PATIENCE)
    assert isinstance(outcomes[2], RankGone)
    assert outcomes[:2] == [None, None]


def give_up_one() -> list[Any]:
    """Rank 0 waits in vain for one message of rank 1, and has another one and a sum in flight, which go on."""
    engine = context.engine()
    if engine.rank:
        hvd.barrier()
        if engine.rank == 1:
            submit(1, 0, [5.0], tag=2).wait()
        found = hvd.allreduce(np.ones(1), op=hvd.Sum, name="sum")
        if engine.rank == 1:
            submit(1, 0, [6.0], tag=1).wait()
        return [float(found[0])]
    kept, late = np.zeros(1, np.float32), np.zeros(1, np.float32)
    other = submit(1, 0, kept, tag=2)
    total = hvd.allreduce_async(np.ones(1), op=hvd.Sum, name="sum")
    before = engine.generation()
    with pytest.raises(AbortedError, match=r"sendrecv .*no message came") as caught:
        submit(1, 0, np.zeros(1, np.float32), tag=1).wait_or_withdraw(Limit(0.05, "no message came"))
    assert caught.value.cause.kind is CauseKind.TIMEOUT
    assert caught.value.pending.missing == (1,)
    hvd.barrier()
    other.wait()
    found = hvd.synchronize(total)
    submit(1, 0, late, tag=1).wait()  # the next one receives the late message
    assert engine.generation() == before
    return [float(kept[0]), float(found[0]), float(late[0])]


def test_one_that_takes_too_long_is_given_up_alone(three: Ranks) -> None:
    assert three.run(give_up_one) == [[5.0, 3.0, 6.0], [3.0], [3.0]]


def disagree() -> str:
    engine = context.engine()
    if engine.rank == 2:
        return ""
    with pytest.raises(MismatchError) as caught:
        submit(0, 1, np.zeros(3 + engine.rank, np.float32)).wait(PATIENCE)
    return str(caught.value)


def refused() -> None:
    engine = context.engine()
    rank = engine.rank
    for wrong, why in (
        ((rank, rank), "can't send to itself"),
        (((rank + 1) % 3, (rank + 2) % 3), f"rank {rank} is neither"),
        ((rank, 7), "rank 7 is not in process set 0"),
    ):
        with pytest.raises(InvalidRequestError, match=why):
            submit(*wrong, np.zeros(1, np.float32))
    other = (rank + 1) % 3
    for ranks, channel, why in (((other,), "c", "in place of"), ((rank,), "", "needs a channel")):
        buffer = np.zeros(1, np.float32)
        request = Request(
            OpKind.SENDRECV, "any", input=buffer, output=buffer, dtype=DType.F32, ranks=ranks, channel=channel
        )
        with pytest.raises(InvalidRequestError, match=why):
            engine.submit(request)


def test_wrong_ones_are_told_to_the_two_and_the_group_goes_on(three: Ranks) -> None:
    texts = three.run(disagree)
    assert "sendrecv float32[3] from rank 0 to rank 1" in texts[0]
    assert texts[0] == texts[1]
    three.run(refused)
    assert three.run(exchange, 3)[0] == [2.0, 12.0]


def die_in_the_middle(source: int, target: int) -> None:
    """The source ends within its part of a message; the target hears of that within its own."""
    rank = context.engine().rank
    if rank not in (source, target):
        return
    values = np.zeros(LARGE, np.float32)
    submit(source, target, values).wait(PATIENCE)
    if rank == source:
        PeerPlanes.send = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    with pytest.raises(AbortedError) as caught:
        submit(source, target, values).wait(PATIENCE)
    assert (caught.value.cause.kind, caught.value.cause.ranks) == (CauseKind.RANK_DIED, (source,))


def as_soon_as_one(wanted: Callable[[PendingCollective], bool], number: int) -> threading.Thread:
    """Send a signal to this process as soon as some collective in flight satisfies the predicate."""
    engine = context.engine()

    def watch() -> None:
        while not any(map(wanted, engine.pending())):
            time.sleep(0.0005)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_a_death_in_the_middle_ends_it_and_the_others_go_on(three: Ranks) -> None:
    outcomes = three.outcomes(die_in_the_middle, 1, 2, timeout=PATIENCE)
    assert isinstance(outcomes[1], RankGone)
    assert [outcomes[0], outcomes[2]] == [None, None]
    three.run(meet, ranks=[0, 2], timeout=PATIENCE)
    assert three.run(send_to_the_other, ranks=[0, 2]) == [4.0, 4.0]


def send_to_the_other() -> float:
    engine = context.engine()
    buffer = np.full(100_000, 4.0 if engine.rank == 0 else 0.0, np.float32)
    submit(0, 2, buffer).wait(PATIENCE)
    return float(buffer[-1])


def be_interrupted() -> None:
    if context.engine().rank:
        return
    ordinary = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = as_soon_as_one(lambda one: True, signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            submit(1, 0, np.zeros(1, np.float32)).wait(PATIENCE)
        thread.join()
    finally:
        signal.signal(signal.SIGINT, ordinary)


def test_an_interrupt_ends_the_wait_for_one(three: Ranks) -> None:
    three.run(be_interrupted, timeout=PATIENCE)
    three.catch_up()
    assert three.run(exchange, 3)[0] == [2.0, 12.0]
