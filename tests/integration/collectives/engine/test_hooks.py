"""Completion hooks: called once for every request that was accepted, with any outcome, and never under a lock."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.engine.entries import Handle
from hvdlab.collectives.engine.requests import Request, Result
from hvdlab.collectives.errors import AbortedError, CauseKind, DuplicateNameError, MismatchError
from hvdlab.collectives.planes.base import host_view
from hvdlab.collectives.types import SUM, DType, OpKind
from support.patience import PATIENCE
from support.ranks.resident import Ranks, resident_ranks

LARGE = 1 << 16
"""Elements of a tensor that does not travel with its announcement."""


two = resident_ranks(2, scope="function")
three = resident_ranks(3, scope="function")


# -- on the ranks -------------------------------------------------------------------------------------------------


class Calls:
    """Hook that counts its calls, and keeps their arguments."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[Result | None, Exception | None]] = []
        self.threads: list[str] = []
        self._called = threading.Semaphore(0)

    def __call__(self, result: Result | None, error: Exception | None, /) -> None:
        self.outcomes.append((result, error))
        self.threads.append(threading.current_thread().name)
        self._called.release()

    def wait(self, times: int = 1) -> None:
        for _ in range(times):
            assert self._called.acquire(timeout=PATIENCE), "the hook was not called"


def request(name: str, hook: Any = None, count: int = 4, value: float = 1.0) -> Request:
    return Request(
        OpKind.ALLREDUCE, name, np.full(count, value, np.float32), None, DType.F32, SUM, on_done=hook
    )


def settled(*calls: Calls) -> list[int]:
    """Return how often hooks were called, once the engine's threads have done their remaining work."""
    engine, there = context.engine(), threading.Event()
    engine.on_mail(f"settled {id(there)}", lambda sender, body: there.set())
    for _ in range(2):
        there.clear()
        engine.post(f"settled {id(there)}", b"", to=[engine.rank])
        assert there.wait(PATIENCE)
    return [len(each.outcomes) for each in calls]


def without_waiting(count: int) -> tuple[float, bool, list[int]]:
    calls = Calls()
    handle = context.engine().submit(request("x", calls, count))
    calls.wait()
    result = handle.wait()
    assert calls.outcomes[0] == (result, None)
    assert isinstance(result.output, np.ndarray)
    return float(result.output[-1]), calls.threads[0].startswith("hvdlab-"), settled(calls)


def by_the_caller(count: int) -> tuple[float, bool, list[int]]:
    """The main thread waits, reads the order and executes it itself."""
    calls = Calls()
    result = context.engine().run(request("x", calls, count))
    calls.wait()
    assert calls.outcomes[0][0] is result
    assert isinstance(result.output, np.ndarray)
    return float(result.output[-1]), calls.threads[0].startswith("hvdlab-"), settled(calls)


def many(count: int) -> list[int]:
    """Fused and alone, waited for and not."""
    calls = [Calls() for _ in range(count)]
    engine = context.engine()
    handles = engine.submit_group([request(f"g{i}", each, 10 * i + 1) for i, each in enumerate(calls)])
    handles[0].wait()
    for each in calls:
        each.wait()
    return settled(*calls)


def no_data(kind: str) -> tuple[int, list[int]]:
    """A process set moves no data, and a barrier has no tensor."""
    calls = Calls()
    if kind == "process set":
        asked = Request(OpKind.ADD_PROCESS_SET, "add", ranks=(0,), on_done=calls)
    else:
        asked = Request(OpKind.BARRIER, "barrier", on_done=calls)
    result = context.engine().run(asked)
    calls.wait()
    assert calls.outcomes == [(result, None)]
    return result.process_set, settled(calls)


def disagree() -> tuple[str, list[int]]:
    calls = Calls()
    engine = context.engine()
    handle = engine.submit(request("bad", calls, 4 + engine.rank))
    with pytest.raises(MismatchError) as told:
        handle.wait()
    calls.wait()
    assert calls.outcomes[0] == (None, told.value)
    return type(calls.outcomes[0][1]).__name__, settled(calls)


def pair() -> int:
    return context.engine().add_process_set((0, 1))


def after_loss(pair: int) -> tuple[bool, str, list[int]]:
    """Submit from a hook, when the world has lost rank 2 and nothing was pending there."""
    engine, chained, calls = context.engine(), Calls(), []

    def submit_next(result: Result | None, error: Exception | None) -> None:
        calls.append(engine.submit(request("next", chained)))

    while engine.size > 2:  # no event on this thread
        time.sleep(0.01)
    first = request("first", submit_next)
    first.process_set = pair
    engine.submit(first)
    engine.flush()
    chained.wait()
    with pytest.raises(AbortedError) as raised:
        engine.run(request("own"))
    return chained.outcomes[0][1] is None, raised.value.cause.kind.value, settled(chained)


def withdrawn() -> tuple[str, list[int]]:
    calls = Calls()
    engine = context.engine()
    if engine.rank == 0:
        engine.submit(request("alone", calls))
        engine.flush()
        engine.withdraw("rank 0 gave up")
        calls.wait()
        error = calls.outcomes[0][1]
        assert isinstance(error, AbortedError)
        return error.cause.kind.value, settled(calls)
    return CauseKind.WITHDRAWN.value, [1]


def refused_in_a_group() -> list[int]:
    """Check that of those before the one that is refused each is withdrawn; the one that was refused has only
    raised."""
    first, twin = Calls(), Calls()
    with pytest.raises(DuplicateNameError):
        context.engine().submit_group([request("a", first), request("a", twin)])
    first.wait()
    error = first.outcomes[0][1]
    assert isinstance(error, Exception)
    return settled(first, twin)


class Lines(logging.Handler):
    """Handler that keeps log lines, with the exception."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.came.set()


def failing(kind: str) -> tuple[list[str], str, list[int], float]:
    """A hook raises; the others are called, and the rank goes on."""
    lines = Lines()
    logging.getLogger("hvdlab").addHandler(lines)
    after, engine = Calls(), context.engine()

    def hook(result: Result | None, error: Exception | None, /) -> None:
        if kind == "waits":
            hvd.allreduce(np.ones(4, np.float32), "from the hook", op=hvd.Sum)
        elif kind == "closes":
            engine.close()
        elif kind == "exits":
            raise SystemExit(3)
        else:
            raise ZeroDivisionError("of the hook")

    handles = engine.submit_group([request("fails", hook, LARGE), request("after", after, LARGE)])
    assert handles[0].wait().output is not None  # the collective itself did not fail
    after.wait()
    assert lines.came.wait(PATIENCE)
    counts = settled(after)
    logged = [record for record in lines.records if "fails" in record.getMessage()]
    assert all(record.exc_info is not None for record in logged)
    told = [str(record.exc_info[1]) for record in logged if record.exc_info is not None]
    again = float(hvd.allreduce(np.ones(4, np.float32), "again", op=hvd.Sum)[0])
    return [record.getMessage() for record in logged], told[0] if told else "", counts, again


def exit_in_callbacks() -> float:
    """Callbacks of the control thread call sys.exit(); it handles the messages behind them."""

    def leave(sender: int, body: bytes) -> None:
        raise SystemExit(3)

    engine, there = context.engine(), threading.Event()
    engine.on_mail("exit", leave)
    engine.on_mail("exit", lambda sender, body: there.set())
    engine.post("exit", b"", [engine.rank])
    assert there.wait(PATIENCE)
    return float(hvd.allreduce(np.ones(4, np.float32), "after exit", op=hvd.Sum)[0])


def chained(length: int) -> tuple[float, int]:
    """Each hook submits the next collective."""
    ended = threading.Event()
    values: list[float] = []
    engine = context.engine()

    def hook(result: Result | None, error: Exception | None, /) -> None:
        assert result is not None
        assert isinstance(result.output, np.ndarray)
        values.append(float(result.output[0]))
        if len(values) == length:
            ended.set()
        else:
            engine.submit(request(f"link {len(values)}", hook, value=values[-1]))

    engine.submit(request("link 0", hook))
    assert ended.wait(PATIENCE)
    return values[-1], len(values)


def others_go_on_meanwhile() -> list[float]:
    """Check that while a hook does not return, other threads ask and submit. Only the executor's next work may have to
    wait for it."""
    inside, leave = threading.Event(), threading.Event()
    engine = context.engine()

    def hook(result: Result | None, error: Exception | None, /) -> None:
        inside.set()
        assert leave.wait(PATIENCE)

    handle = engine.submit(request("held", hook, LARGE))
    assert inside.wait(PATIENCE)
    assert handle.done()
    handles: list[Handle] = []

    def work(thread: str) -> None:
        engine.pending()
        handles.extend(engine.submit(request(f"{thread} {name}", None, LARGE)) for name in ("one", "two"))
        assert engine.pending()

    try:
        work("main")
        other = threading.Thread(target=work, args=("other",))
        other.start()
        other.join(PATIENCE)
        assert not other.is_alive()
    finally:
        leave.set()
    outputs = [handle.wait().output for handle in handles]
    return [float(host_view(output)[0]) for output in outputs if output is not None]


WAITED = Calls()


def wait_for_the_other() -> None:
    engine = context.engine()
    engine.submit(request(f"never {engine.rank}", WAITED))
    engine.flush()


def what_came() -> tuple[str, list[int]]:
    WAITED.wait()
    error = WAITED.outcomes[0][1]
    assert isinstance(error, AbortedError)
    return error.cause.kind.value, [len(WAITED.outcomes)]


def what_came_by_closing() -> tuple[str, list[int]]:
    context.shutdown()
    return what_came()


# -- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, LARGE])
@pytest.mark.parametrize("how", ["without_waiting", "by_the_caller"])
def test_it_is_called_once_with_the_result(two: Ranks, how: str, count: int) -> None:
    assert two.run(globals()[how], count) == [(2.0, True, [1])] * 2


def test_each_of_a_group_is_called_once(two: Ranks) -> None:
    assert two.run(many, 50) == [[1] * 50] * 2


@pytest.mark.parametrize("kind", ["process set", "barrier"])
def test_what_moves_no_data_has_a_hook_as_well(two: Ranks, kind: str) -> None:
    (id, counts), other = two.run(no_data, kind)
    assert (id, counts) == other
    assert counts == [1]
    assert (id > 0) == (kind == "process set")


def test_a_mismatch_is_told_as_it_is_raised(two: Ranks) -> None:
    assert two.run(disagree) == [("MismatchError", [1])] * 2


def test_what_is_withdrawn_is_told(two: Ranks) -> None:
    assert two.run(withdrawn) == [("withdrawn", [1])] * 2
    two.catch_up()
    assert two.run(chained, 1) == [(2.0, 1)] * 2


def test_one_that_is_refused_has_only_raised(two: Ranks) -> None:
    assert two.run(refused_in_a_group, ranks=[0]) == [[1, 0]]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("raises", "of the hook"),
        ("exits", "3"),
        ("waits", "must neither wait for a collective"),
        ("closes", "must neither wait for a collective"),
    ],
)
def test_what_it_raises_is_logged_and_harms_nothing(two: Ranks, kind: str, text: str) -> None:
    for lines, told, counts, again in two.run(failing, kind):
        assert len(lines) == 1
        assert "hook of allreduce `fails`" in lines[0]
        assert "test_hooks.py" in lines[0]
        assert text in told
        assert (counts, again) == ([1], 2.0)


def test_it_may_submit_further_collectives(two: Ranks) -> None:
    assert two.run(chained, 20) == [(2.0**20, 20)] * 2


def test_what_it_submits_leaves_a_loss_to_the_program(three: Ranks) -> None:
    """An error that its submission raised would be logged, and the program would go on in the smaller world."""
    (number, *_) = three.run(pair)
    three.kill(2)
    assert three.run(after_loss, number, ranks=[0, 1]) == [(True, "rank_died", [1])] * 2


def test_no_lock_is_held_meanwhile(two: Ranks) -> None:
    assert two.run(others_go_on_meanwhile) == [[2.0] * 4] * 2


def test_a_death_is_told(two: Ranks) -> None:
    two.run(wait_for_the_other, ranks=[0])
    two.kill(1)
    assert two.run(what_came, ranks=[0]) == [("rank_died", [1])]


def test_the_loss_of_the_coordinator_is_told(two: Ranks) -> None:
    two.run(wait_for_the_other)
    two.coordinator.close()
    assert two.run(what_came) == [("coordinator_lost", [1])] * 2


def test_closing_calls_what_is_left(two: Ranks) -> None:
    two.run(wait_for_the_other, ranks=[0])
    ((kind, counts),) = two.run(what_came_by_closing, ranks=[0])
    assert kind in ("rank_left", "shutdown")
    assert counts == [1]


def test_callback_that_exits_does_not_end_the_control_thread(two: Ranks) -> None:
    assert two.run(exit_in_callbacks) == [2.0, 2.0]
