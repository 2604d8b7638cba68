"""Small blocking collectives that ranks of one host agree on in shared memory, and all that departs from it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from queue import SimpleQueue
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.client import Client
from hvdlab.collectives.engine import coordinator_bypass
from hvdlab.collectives.engine.entries import Handle
from hvdlab.collectives.engine.process_set_view import BoardReduction
from hvdlab.collectives.engine.requests import Limit, Request
from hvdlab.collectives.errors import (
    AbortedError,
    CauseKind,
    InvalidRequestError,
    MismatchError,
)
from hvdlab.collectives.tracing.record_format import Span, decode
from hvdlab.collectives.types import SUM, DType, OpKind
from hvdlab.numpy.adapter import BINDING as NUMPY
from support.engine_probe import EngineProbe
from support.patience import PATIENCE
from support.ranks.resident import RankFailed, Ranks, meet, resident_ranks
from support.threads import in_threads

three = resident_ranks(3)


def agreed() -> int:
    """Return how many requests this rank has had on the world's board."""
    member = EngineProbe(context.engine()).locked.state.sets[0].board_member
    assert member is not None
    number: int = member.board.number
    return number


def total(value: float, name: str | None = None, count: int = 4) -> float:
    result = hvd.allreduce(np.full(count, value, np.float32), name, op=hvd.Sum)
    assert (result == result[0]).all()
    return float(result[0])


# -- agreed -----------------------------------------------------------------------------------------------------------


def without_the_coordinator(pid: int) -> list[float]:
    meet()
    rank = context.engine().rank
    if rank == 0:
        os.kill(pid, signal.SIGSTOP)
    try:
        found = [total(step + rank) for step in range(100)]
        hvd.barrier()
        return [found[-1], float(hvd.broadcast(np.full(2, rank, np.float32), 2)[0])]
    finally:
        if rank == 0:
            os.kill(pid, signal.SIGCONT)


def test_the_coordinator_is_not_asked() -> None:
    with Ranks(3) as ranks:
        # These cannot wait for a message, since a stopped coordinator receives none.
        found = ranks.run(without_the_coordinator, ranks.coordinator.pid, timeout=PATIENCE)
    assert found == [[3 * 99 + 3.0, 2.0]] * 3


def alone_without_the_coordinator(pid: int) -> list[float]:
    os.kill(pid, signal.SIGSTOP)
    try:
        found = [total(float(step)) for step in range(100)]
        hvd.barrier()
        large = np.full(1 << 20, 5.0, np.float32)
        return [found[-1], float(hvd.broadcast(np.full(2, 7.0), 0)[0]), float(hvd.allreduce(large)[-1])]
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_single_rank_waits_for_no_coordinator() -> None:
    with Ranks(1) as ranks:
        found = ranks.run(alone_without_the_coordinator, ranks.coordinator.pid, timeout=PATIENCE)
    assert found == [[99.0, 7.0, 5.0]]


def same_bits() -> int:
    """Every type and operator, on the board and through the coordinator."""
    wait_long_at_boards()  # however slow the machine is
    chance = np.random.default_rng(context.engine().rank)
    before = agreed()
    for dtype, op, factors, shape in product(
        ("f2", "f4", "f8", "u1", "i1", "i2", "i4", "i8", "?"),
        (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product),
        ((1.0, 1.0), (0.5, 3.0)),
        ((), (5,), (3, 7)),
    ):
        if dtype == "?" and (op in (hvd.Average, hvd.Product) or factors != (1.0, 1.0)):
            continue
        x = (chance.random(shape) * 9).astype(dtype)
        options: dict[str, Any] = {"op": op, "prescale_factor": factors[0], "postscale_factor": factors[1]}
        try:
            one = hvd.synchronize(hvd.allreduce_async(x, "x", **options))
        except Exception as refused:  # noqa: BLE001  # any refusal must be the same in both ways
            with pytest.raises(type(refused)):
                hvd.allreduce(x, "x", **options)
            continue
        other = hvd.allreduce(x, "x", **options)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), (dtype, op, factors, shape)
    return agreed() - before


def test_the_result_has_the_same_bits() -> None:
    with Ranks(3) as ranks:
        numbers = ranks.run(same_bits, timeout=PATIENCE)
    assert min(numbers) > 150


def in_place_and_read_only() -> None:
    rank = context.engine().rank
    x = np.full(3, rank, np.float64)
    hvd.allreduce_(x, op=hvd.Sum)
    assert x.tolist() == [3.0] * 3
    sent = np.full(3, rank, np.float64)
    if rank == 1:
        sent.flags.writeable = False
    assert hvd.broadcast(sent, 1).tolist() == [1.0] * 3
    own = np.full(3, rank, np.float64)
    hvd.broadcast_(own, 1)
    assert own.tolist() == [1.0] * 3


def test_results_in_place_and_roots_that_can_t_be_written_to(three: Ranks) -> None:
    three.run(in_place_and_read_only)


def spans() -> list[tuple[str, int, bool]]:
    engine = context.engine()
    meet()
    while not EngineProbe(engine).spans.claim_flush():  # then nothing is sent, and all of it is here
        time.sleep(0.001)
    try:
        engine.recorder.drain()
        for _ in range(20):
            total(1.0, "seen")
        EngineProbe(engine).wait_for_records()
        batches = engine.recorder.drain()
    finally:
        EngineProbe(engine).spans.release_flush()
    found = []
    for batch in batches:
        for event in decode(batch).events:
            if isinstance(event, Span) and event.name == "seen":
                assert event.submitted_ns <= (event.ready_ns or 0) <= (event.finished_ns or 0)
                found.append((event.name, event.sequence, event.ok))
    return sorted(found)  # a thread that executes one may record it after later ones


def flushes() -> tuple[int, list[bool]]:
    """Return how often the user's thread schedules a flush of the records, and the records that the flushes have found
    to send."""
    engine = context.engine()
    dispatcher, spans, user = (
        EngineProbe(engine).handlers,
        EngineProbe(engine).spans,
        threading.current_thread(),
    )
    claim, send_events = spans.claim_flush, dispatcher.send_events
    scheduled, found = 0, list[bool]()

    def claim_and_count() -> bool:
        nonlocal scheduled
        claimed: bool = claim()
        scheduled += claimed and threading.current_thread() is user
        return claimed

    def send_and_count() -> bool:
        found.append(send_events())
        return found[-1]

    meet()
    with (
        patch.object(spans, "claim_flush", claim_and_count),
        patch.object(dispatcher, "send_events", send_and_count),
    ):
        while total(float(len(found) < 5), "busy") > 0:
            pass
        return scheduled, found[:]


def test_while_requests_are_made_no_thread_has_to_schedule_the_flushes(three: Ranks) -> None:
    for scheduled, found in three.run(flushes, timeout=PATIENCE):
        assert found.count(True) >= 4, found
        # The first flush, one after each that found nothing, and now and then one while the control thread has just sent: on a
        # busy machine it may be away before it schedules the next itself.
        assert scheduled < 4 + found.count(False), found


def test_each_is_recorded_under_one_number_on_all_ranks(three: Ranks) -> None:
    one, *others = three.run(spans)
    assert len(one) == len(set(one)) == 20
    assert all(ok for _, _, ok in one)
    assert others == [one] * 2


def passed_by_one() -> tuple[set[str], list[Handle]]:
    """Return the modules of the product that an allreduce passes on the user's thread, and the handles that it makes."""
    coordinator_bypass.PATIENCE = PATIENCE  # however slow the machine is
    x, modules, made = np.ones(1, np.float32), set[str](), list[Handle]()
    create = Handle.__init__

    def count(self: Handle, *arguments: Any) -> None:
        made.append(self)
        create(self, *arguments)

    def record(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("hvdlab."):
            modules.add(name)

    def reduce() -> None:
        hvd.allreduce_(x, "small", op=hvd.Max)

    for _ in range(3):
        reduce()
    with patch.object(Handle, "__init__", count):
        sys.setprofile(record)
        try:
            reduce()
        finally:
            sys.setprofile(None)
    return modules, made


def test_one_that_is_agreed_makes_no_handle_and_passes_few_modules() -> None:
    with Ranks(2) as two:
        for modules, made in two.run(passed_by_one, timeout=PATIENCE):
            assert not made
            assert len(modules) <= 16, sorted(modules)


# -- not agreed -------------------------------------------------------------------------------------------------------


def disagree() -> str:
    try:
        total(1.0, "bad", 4 + context.engine().rank)
    except MismatchError as error:
        return str(error)
    return ""


def test_a_mismatch_is_told_as_ever_and_the_next_one_works(three: Ranks) -> None:
    for _ in range(3):
        for text in three.run(disagree):
            assert "float32[4]" in text
            assert "float32[6]" in text
    assert three.run(total, 1.0) == [3.0] * 3


def one_by_handles(steps: int) -> list[float]:
    found = []
    for step in range(steps):
        if context.engine().rank == step % 3:
            handle = hvd.allreduce_async(np.full(4, step, np.float32), "mixed", op=hvd.Sum)
            found.append(float(hvd.synchronize(handle)[0]))
        else:
            found.append(total(step, "mixed"))
    return found


def test_who_has_a_handle_meets_who_waits(three: Ranks) -> None:
    assert three.run(one_by_handles, 60, timeout=PATIENCE) == [[3.0 * step for step in range(60)]] * 3
    # After so many refusals they leave the board alone for a while; then they agree again.
    before = three.run(agreed)
    assert three.run(many, 3000, timeout=PATIENCE) == [3.0] * 3
    assert all(after > number + 500 for after, number in zip(three.run(agreed), before, strict=True))


def many(count: int) -> float:
    for _ in range(count):
        found = total(1.0)
    return found


def late() -> float:
    if context.engine().rank == 1:
        threading.Event().wait(0.2)  # longer than the others wait at the board
    return total(1.0, "late")


def test_a_late_rank_is_waited_for(three: Ranks) -> None:
    for _ in range(3):
        assert three.run(late) == [3.0] * 3


def cross() -> str:
    names = ["a", "b"] if context.engine().rank else ["b", "a"]
    try:
        for name in names:
            total(1.0, name)
    except AbortedError as error:
        return error.cause.kind
    return ""


def test_another_order_is_a_deadlock_and_told(three: Ranks) -> None:
    assert set(three.run(cross)) == {CauseKind.DEADLOCK}
    three.run(meet)
    assert three.run(total, 1.0) == [3.0] * 3


def with_threads() -> list[float]:
    found: list[float] = []

    def reduce(name: str) -> None:
        for _ in range(30):
            found.append(total(1.0, name))

    threads = [threading.Thread(target=reduce, args=(f"thread {number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_threads_of_a_rank_take_turns(three: Ranks) -> None:
    assert three.run(with_threads, timeout=PATIENCE) == [[3.0] * 90] * 3


def joins() -> float:
    rank = context.engine().rank
    found = [total(1.0, "step") for _ in range(5 + 5 * rank)]
    context.engine().join()
    return found[-1]


def test_who_has_joined_takes_part_with_zeros(three: Ranks) -> None:
    assert three.run(joins, timeout=PATIENCE) == [3.0, 2.0, 1.0]
    assert three.run(total, 1.0) == [3.0] * 3


def sets() -> list[float]:
    engine = context.engine()
    found = []
    for members in ([0, 1], [1, 2], [0, 2], [0, 1]):
        chosen = engine.add_process_set(members)
        if engine.rank in members:
            one = hvd.allreduce(np.ones(2, np.float32), op=hvd.Sum, process_set=chosen)
            found.append(float(one[0]))
        total(1.0)
        engine.remove_process_set(chosen)
    return found


def test_process_sets_have_boards_of_their_own(three: Ranks) -> None:
    one, other, third = three.run(sets)
    assert (one, other, third) == ([2.0] * 3, [2.0] * 3, [2.0] * 2)


# -- on the plane -----------------------------------------------------------------------------------------------------


def wait_long_at_boards() -> None:
    coordinator_bypass.PATIENCE = PATIENCE


def large(steps: int, beside: int) -> tuple[int, int]:
    """Run blocking ones of all sizes, each ``beside``-th with another in flight; a rank with one in flight goes to the
    coordinator.

    Returns:
        How many were agreed on the board, and how many have met on the plane so far.
    """
    rank, before = context.engine().rank, agreed()
    for step in range(steps):
        size = (90_000, 140_000, 300_000)[step % 3]
        x = np.full(size, rank + step, np.float64)
        handle = (
            hvd.allreduce_async(np.full(50_000, step, np.float32), "beside", op=hvd.Sum)
            if step % beside == beside - 1
            else None
        )
        found = hvd.allreduce(x, "large", op=hvd.Sum)
        assert (found == 3 * step + 3.0).all(), (step, found[:3])
        y = np.full(size, rank, np.int32)
        assert (np.asarray(hvd.broadcast(y, step % 3)) == step % 3).all()
        if handle is not None:
            assert (np.asarray(hvd.synchronize(handle)) == 3 * step).all()
    return agreed() - before, plane_operations()


def large_again() -> tuple[list[float], int, int]:
    """Reduce large tensors that were reduced before. Return results, how many requests were checked, and how many differed in the end."""
    rank = context.engine().rank
    x = np.full(1 << 18, rank + 1.0, np.float32)
    member = EngineProbe(context.engine()).locked.state.sets[0].board_member
    assert member is not None
    # Where cores are busy, some go to the coordinator, and are not kept.
    while hvd.allreduce(np.float32(len(member.plane_reductions)), "known", op=hvd.Min) < 3:
        for op in (hvd.Sum, hvd.Average, hvd.Max):
            hvd.allreduce(x, "again", op=op)
    with patch.object(NUMPY, "_request", wraps=NUMPY._request) as checked:
        found = [float(hvd.allreduce(x, "again", op=op)[-1]) for op in (hvd.Sum, hvd.Average, hvd.Max)]
        assert hvd.allreduce_(x, "again", op=hvd.Max) is x
        found += [float(x[0]), float(hvd.allreduce(x.reshape(2, -1), "again", op=hvd.Max)[1, 1])]
        calls = checked.call_count
    try:
        hvd.allreduce(x if rank else x[1:].copy(), "again", op=hvd.Max)
    except MismatchError as error:
        return found, calls, len(error.groups)
    return found, calls, 1


def test_a_large_one_that_comes_again_is_not_checked_again() -> None:
    with Ranks(3) as three:  # others have perhaps left the board for a while, after a mismatch
        # The one request that was checked has another shape.
        assert three.run(large_again) == [([6.0, 2.0, 3.0, 3.0, 3.0], 1, 2)] * 3
        assert three.run(total, 2.0, "small") == [6.0] * 3


def plane_operations() -> int:
    engine = context.engine()
    slots = EngineProbe(engine).executor._slots
    operations: int = slots[0, EngineProbe(engine).locked.generation(0), "cpu"].operations
    return operations


def around_the_capacity() -> list[int]:
    """Return the operations on the plane after each of several requests that are agreed on the board."""
    wait_long_at_boards()  # however slow the machine is
    engine, found = context.engine(), list[int]()
    rank, capacity = engine.rank, EngineProbe(engine).locked.board_capacity(0)
    for dtype, nbytes in (
        (np.float32, capacity),
        (np.float32, capacity + 4),
        (np.float16, 4096),
        (np.float16, 4098),
    ):
        x = np.full(
            (nbytes // np.dtype(dtype).itemsize // 2, 2)
            if nbytes % 8 == 0
            else nbytes // np.dtype(dtype).itemsize,
            rank,
            dtype,
        )
        assert (hvd.allreduce(x, op=hvd.Sum) == 3).all()
        found.append(plane_operations())
    for root in range(3):
        y = np.full(capacity // 8, rank, np.float64)
        assert (np.asarray(hvd.broadcast(y, root)) == root).all()
        assert (y == rank).all()
    assert (
        hvd.allreduce(np.full(3000, 7, np.int32), op=hvd.Average) == 7
    ).all()  # takes much longer than a copy
    return [*found, plane_operations()]


def test_tensors_lie_on_the_board_up_to_its_capacity_and_costly_ones_up_to_a_page() -> None:
    with Ranks(3) as ranks:
        assert ranks.run(around_the_capacity, timeout=PATIENCE) == [[0, 1, 1, 2, 3]] * 3


def test_large_ones_meet_on_the_plane_in_one_order() -> None:
    with Ranks(3) as ranks:
        found = ranks.run(large, 60, 5, timeout=PATIENCE)
        assert len({operations for _, operations in found}) == 1
    with Ranks(3) as ranks:
        ranks.run(wait_long_at_boards)  # however slow the machine is
        assert ranks.run(large, 60, 1000, timeout=PATIENCE) == [(120, 120)] * 3


def of_two_sets(rounds: int) -> None:
    """Rank 1 works in two sets at a time, from two threads."""
    engine = context.engine()
    chosen = [engine.add_process_set(members) for members in ([0, 1], [1, 2])]

    def work(process_set: int, size: int) -> None:
        for step in range(rounds):
            x = np.full(size, step, np.float32)
            assert (hvd.allreduce(x, "x", op=hvd.Sum, process_set=process_set) == 2 * step).all()

    sizes = zip(chosen, (3_000, 200_000), strict=True)
    in_threads([partial(work, *one) for one in sizes if engine.rank in engine.ranks(one[0])])
    for process_set in chosen:
        engine.remove_process_set(process_set)


def test_a_rank_in_two_sets_holds_nobody_up(three: Ranks) -> None:
    three.run(of_two_sets, 40, timeout=PATIENCE)
    assert three.run(total, 1.0) == [3.0] * 3


def reduce_large(value: float) -> float:
    return float(hvd.allreduce(np.full(1 << 20, value, np.float32), "large", op=hvd.Sum)[0])


def reduce_large_until_interrupted() -> float:
    """Run one of many; the last, after an interrupt wherever it came, is another one."""
    try:
        context.engine().post("reducing", b"")
        while True:
            reduce_large(1.0)
    except KeyboardInterrupt:
        return reduce_large(5.0)


def reduce_large_until_seven() -> set[CauseKind]:
    """Continue after the collective that the interrupted rank has given up; return the errors until then."""
    causes: set[CauseKind] = set()
    while True:
        try:
            if reduce_large(1.0) == 7.0:
                return causes
        except AbortedError as error:
            causes.add(error.cause.kind)


def test_an_interrupt_anywhere_in_a_large_one(three: Ranks) -> None:
    reducing: SimpleQueue[int] = SimpleQueue()
    client = Client.connect(three.coordinator.address, three.coordinator.client_token)
    client.on_mail("reducing", lambda sender, body: reducing.put(sender))
    try:
        for pause in (0.0, 0.01, 0.05, 0.1):
            others = three.start(reduce_large_until_seven, ranks=[0, 2])
            one = three.start(reduce_large_until_interrupted, ranks=[1])
            # A rank ignores an interrupt that comes before it has begun.
            reducing.get(timeout=PATIENCE)
            time.sleep(pause)  # wherever it is then
            three.kill(1, signal.SIGINT)
            assert one.results(PATIENCE) == [7.0]
            assert all(causes <= {CauseKind.INTERRUPTED} for causes in others.results(PATIENCE))
            assert three.run(total, 1.0) == [3.0] * 3
    finally:
        client.close()


# -- submitted before it is waited for --------------------------------------------------------------------------------


def reduce_at_once(size: int, beside: bool) -> tuple[float, int]:
    """Submit one, then wait for it. Return its first element, and how many requests the board has had.

    With ``beside`` rank 0 has a barrier in flight, which rank 1 submits afterwards.
    """
    engine, x = context.engine(), np.ones(size, np.float32)
    before = agreed()
    with pytest.MonkeyPatch.context() as patch:
        if not beside:
            patch.setattr(coordinator_bypass, "PATIENCE", PATIENCE)
        other = engine.submit(Request(OpKind.BARRIER, "beside")) if beside and engine.rank == 0 else None
        request = Request(OpKind.ALLREDUCE, "at once", x, x, DType.F32, SUM, anonymous=True)
        engine.submit(request, at_once=True).wait()
        if beside:
            (other or engine.submit(Request(OpKind.BARRIER, "beside"))).wait()
    return float(x[0]), agreed() - before


def test_what_is_waited_for_at_once_is_agreed_on_the_board_unless_there_is_more() -> None:
    with Ranks(2) as two:
        for size in (10, 100_000):
            assert two.run(reduce_at_once, size, False) == [(2.0, 1)] * 2
            # Rank 1 has posted it, and rank 0 declines.
            assert [total for total, _ in two.run(reduce_at_once, size, True)] == [2.0] * 2


def wait_or_withdraw(seconds: float) -> None:
    x = np.ones(10, np.float32)
    request = Request(OpKind.ALLREDUCE, "never", x, x, DType.F32, SUM)
    context.engine().submit(request, at_once=True).wait_or_withdraw(Limit(seconds, "it took too long"))


def test_a_limit_that_passes_at_the_board_is_an_error_on_all(three: Ranks) -> None:
    for seconds in (0.1, 0.7):
        long, short = three.outcomes(wait_within, seconds, ranks=[0, 1])
        for error in (long, short):
            assert isinstance(error, AbortedError)
            assert error.cause.kind == CauseKind.TIMEOUT
            assert "it took too long" in str(error)
        three.run(meet)
        assert three.run(total, 1.0) == [3.0] * 3


def wait_within(seconds: float) -> None:
    """Rank 2 never comes; rank 1 would wait for long."""
    wait_or_withdraw(seconds if context.engine().rank == 0 else 20.0)


# -- ends -------------------------------------------------------------------------------------------------------------


def then_die(rank: int) -> float:
    usual, coordinator_bypass.PATIENCE = (
        coordinator_bypass.PATIENCE,
        PATIENCE,
    )  # otherwise a slow machine has them go to the coordinator
    hvd.barrier()
    coordinator_bypass.PATIENCE = usual
    if context.engine().rank == rank:
        os._exit(3)
    meet()
    return total(1.0, "after")


def test_what_was_agreed_before_a_rank_died_is_over() -> None:
    """Its barrier has ended there, so it ends everywhere."""
    for _ in range(5):
        with Ranks(3) as ranks:
            one, other, gone = ranks.outcomes(then_die, 2)
        assert (one, other) == (2.0, 2.0)
        assert isinstance(gone, Exception)


class Full:
    """Memory that can't be had."""

    def __call__(self, shape: tuple[int, ...]) -> object:
        raise MemoryError("no memory for the result")


def no_memory() -> str:
    from hvdlab.collectives.engine.requests import Request
    from hvdlab.collectives.types import SUM, DType, OpKind

    engine = context.engine()
    x = np.ones(3, np.float32)
    request = Request(OpKind.ALLREDUCE, "x", x, dtype=DType.F32, reduction=SUM)
    if engine.rank == 1:
        request.allocate = Full()  # type: ignore[assignment]  # it does not get so far as to return one
    try:
        engine.run(request)
        total(1.0, "the next")
    except AbortedError as error:
        return f"{error.cause.kind} {error.cause.ranks} {error.cause.text}"
    return ""


def no_memory_without_a_handle() -> str:
    engine = context.engine()
    failing = patch.object(BoardReduction, "reduce", side_effect=MemoryError("no memory for the fold"))
    # Only here: a rank whose board of the next generation is late asks the coordinator, and the others would wait at theirs for as long.
    with patch.object(coordinator_bypass, "PATIENCE", PATIENCE):
        total(1.0, "full", 3)
        try:
            with failing if engine.rank == 1 else nullcontext():
                total(1.0, "full", 3)
                total(1.0, "the next")
        except AbortedError as error:
            return str(error)
    return ""


def test_a_fold_that_fails_ends_the_generation_as_well() -> None:
    with Ranks(3) as ranks:
        for told in ranks.run(no_memory_without_a_handle, timeout=PATIENCE):
            assert "MemoryError: no memory for the fold" in told
        ranks.run(meet)
        assert ranks.run(total, 1.0) == [3.0] * 3


def names_that_are_none() -> None:
    """A name that can't be a key is refused as ever, also where its shape and operator are known."""
    total(1.0)
    for name in ([1], 5):
        with pytest.raises(InvalidRequestError, match="name= takes a text"):
            total(1.0, name)  # type: ignore[arg-type]  # on purpose
    assert total(1.0) == 3.0


def test_a_wrong_name_is_refused(three: Ranks) -> None:
    three.run(names_that_are_none)


def test_a_result_that_can_t_be_computed_ends_the_generation(three: Ranks) -> None:
    for told in three.run(no_memory):
        assert "MemoryError: no memory for the result" in told
    three.run(meet)
    assert three.run(total, 1.0) == [3.0] * 3


def wait_alone(then: Callable[[], None]) -> None:
    """Wait for rank 2, which does not come; another thread does something as soon as this one waits."""

    def act() -> None:
        while not context.engine().pending():
            time.sleep(0.0001)
        then()

    threading.Thread(target=act, daemon=True).start()
    total(1.0, "alone")


def wait_and_say_so() -> None:
    wait_alone(lambda: context.engine().post("waiting", b""))


def wait_until_interrupted(after: float) -> None:
    def interrupt() -> None:
        time.sleep(after)  # wherever it is then
        os.kill(os.getpid(), signal.SIGINT)

    wait_alone(interrupt)


def test_an_interrupt_at_the_board_ends_the_wait_on_all(three: Ranks) -> None:
    waiting: SimpleQueue[int] = SimpleQueue()
    client = Client.connect(three.coordinator.address, three.coordinator.client_token)
    client.on_mail("waiting", lambda sender, body: waiting.put(sender))
    try:
        for pause in (0.0, 0.005, 0.05, 0.3):
            other = three.start(wait_and_say_so, ranks=[1])
            waiting.get(
                timeout=PATIENCE
            )  # otherwise it can come when the generation is over, and wait for ever
            one = three.start(wait_until_interrupted, pause, ranks=[0])
            assert isinstance(one.outcomes(PATIENCE)[0], KeyboardInterrupt)
            (error,) = other.outcomes(PATIENCE)
            assert isinstance(error, AbortedError)
            assert error.cause.kind == CauseKind.INTERRUPTED
            three.run(meet)
            assert three.run(total, 1.0) == [3.0] * 3
    finally:
        client.close()


def test_a_failed_rank_s_error_is_its_own(three: Ranks) -> None:
    with pytest.raises(RankFailed):
        three.run(sets_of_nobody)
    assert three.run(total, 1.0) == [3.0] * 3


def sets_of_nobody() -> None:
    hvd.allreduce(np.ones(2, np.float32), process_set=77)
