"""Callbacks of handles: once for each collective or group, when all of it is finished, with any outcome."""

from __future__ import annotations

import logging
import threading
from typing import Any

from conformance.bindings.conftest import World
from conformance.bindings.harness import Problems, binding
from conformance.bindings.test_arguments import ones, works
from conformance.bindings.test_failures import _needs_handles, after
from hvdlab.collectives.errors import AbortedError, InvalidRequestError, MismatchError
from support.interrupting import press_ctrl_c, when_this_thread_waits

LARGE = 1 << 16
"""Elements of a tensor that does not travel with its announcement."""


class Calls:
    """Callback that keeps the handle's result at the time of the call."""

    def __init__(self) -> None:
        self.outcomes: list[Any] = []
        self.threads: list[threading.Thread] = []
        self._called = threading.Semaphore(0)

    def __call__(self, handle: Any) -> None:
        self.threads.append(threading.current_thread())
        try:
            self.outcomes.append((handle.done(), handle.wait()))
        except Exception as error:  # noqa: BLE001  # the test looks at it
            self.outcomes.append((handle.done(), type(error)))
        self._called.release()

    def wait(self) -> Any:
        """Return the outcome, once it has been called."""
        assert self._called.acquire(timeout=20), "the callback was not called"
        return self.outcomes[-1]


def finished(name: str) -> list[str]:
    """Single collectives in every form, of tensors that travel with messages and of those that do not."""
    under_test, problems = binding(name), Problems()
    hvd = under_test.hvd
    total = float(hvd.size())

    def value(tensor: Any) -> float:
        return float(under_test.values(tensor)[-1])

    for count in (3, LARGE):
        for form in ("async", "async_"):
            case = f"{form} {count}"
            tensor, calls = ones(under_test, count), Calls()
            handle = getattr(hvd, f"allreduce_{form}")(tensor, op=hvd.Sum, name=case)
            handle.add_done_callback(calls)
            done, result = calls.wait()  # no other thread waits for it
            problems.expect(done and value(result) == total, f"{case}: {result}")
            problems.expect(hvd.synchronize(handle) is result, f"{case}: the same result")
            problems.expect(form == "async" or result is tensor, f"{case}: in place")
            late = Calls()
            handle.add_done_callback(late)
            problems.expect(late.threads == [threading.current_thread()], f"{case}: at once when it is done")
            problems.expect(late.outcomes[0][1] is result, f"{case}: late")
            beside = Calls()
            handle = getattr(hvd, f"allreduce_{form}")(ones(under_test, count), op=hvd.Sum, name=case)
            handle.add_done_callback(beside)
            result = hvd.synchronize(handle)  # this thread waits, and perhaps executes
            problems.expect(beside.wait()[1] is result, f"{case}: beside a wait")
            problems.expect(
                [len(each.outcomes) for each in (calls, late, beside)] == [1] * 3, f"{case}: once"
            )
    for kind, arguments in (("allgather", {}), ("broadcast", {"root_rank": 0}), ("alltoall", {})):
        calls = Calls()
        handle = getattr(hvd, f"{kind}_async")(ones(under_test, hvd.size()), name=kind, **arguments)
        handle.add_done_callback(calls)
        problems.expect(calls.wait() == (True, hvd.synchronize(handle)), kind)
    return problems


def test_it_is_called_when_the_collective_is_finished(world: World) -> None:
    _needs_handles(world)
    world.check(finished)


def grouped(name: str) -> list[str]:
    """A group's callback comes once, and when the last tensor is finished."""
    under_test, problems = binding(name), Problems()
    hvd = under_test.hvd
    tensors = [ones(under_test, count) for count in (2, LARGE, 5)]
    calls, order = Calls(), []
    handle = hvd.grouped_allreduce_async(tensors, op=hvd.Sum, name="group")
    handle.add_done_callback(lambda handle: order.append("first"))
    handle.add_done_callback(lambda handle: order.append("second"))
    handle.add_done_callback(calls)
    done, outputs = calls.wait()
    problems.expect(done, "all of them are done")
    problems.expect(
        [float(under_test.values(output)[-1]) for output in outputs] == [hvd.size()] * 3, "outputs"
    )
    problems.expect(order == ["first", "second"], order)
    empty = Calls()
    hvd.grouped_allreduce_async([], name="empty").add_done_callback(empty)
    problems.expect(empty.outcomes == [(True, [])], f"an empty group: {empty.outcomes}")
    problems.expect(works(under_test), "afterwards")
    problems.expect((len(calls.outcomes), len(order)) == (1, 2), "once")
    return problems


def test_a_group_has_one_end(world: World) -> None:
    _needs_handles(world)
    world.check(grouped)


def failed(name: str) -> list[str]:
    """One tensor of a group fails, and so does a single collective."""
    under_test, problems = binding(name), Problems()
    hvd = under_test.hvd
    odd = int(hvd.rank() == 1)
    for form in ("async", "async_"):
        tensors = [ones(under_test, 4) for _ in range(3)]
        tensors[1] = ones(under_test, 2 + odd)
        calls = Calls()
        handle = getattr(hvd, f"grouped_allreduce_{form}")(tensors, name=f"group {form}")
        handle.add_done_callback(calls)
        problems.expect(calls.wait() == (True, MismatchError), f"{form}: {calls.outcomes}")
        with problems.refused(form, MismatchError, "the ranks disagree"):
            hvd.synchronize(handle)
        late = Calls()
        handle.add_done_callback(late)
        problems.expect(late.outcomes == [(True, MismatchError)], f"{form}, late: {late.outcomes}")
    single = Calls()
    hvd.allreduce_async(ones(under_test, 2 + odd), name="single").add_done_callback(single)
    problems.expect(single.wait() == (True, MismatchError), f"single: {single.outcomes}")
    problems.expect(works(under_test), "afterwards")
    problems.expect((len(calls.outcomes), len(single.outcomes)) == (1, 1), "once")
    return problems


def test_it_is_called_when_the_collective_fails(three: World) -> None:
    _needs_handles(three)
    three.check(failed)


def aborted(name: str) -> list[str]:
    """Wait on rank 0 for a collective that the others do not call."""
    under_test, problems = binding(name), Problems()
    hvd = under_test.hvd
    if hvd.rank() == 0:
        calls = Calls()
        tensors = [ones(under_test, 1), ones(under_test, 2)]
        hvd.grouped_allreduce_async_(tensors, name="lonely").add_done_callback(calls)
        with problems.refused("another", AbortedError, "another"):
            hvd.allreduce(ones(under_test, 1), name="another")
        problems.expect(calls.wait() == (True, AbortedError), calls.outcomes)
    else:
        with problems.refused("other", AbortedError, "other"):
            hvd.broadcast_(ones(under_test, 2), 0, name="other")
    problems.expect(works(under_test), "afterwards")
    return problems


def test_it_is_called_when_the_collective_is_aborted(three: World) -> None:
    _needs_handles(three)
    three.check(aborted)


def interrupted(name: str) -> list[str]:
    under_test, problems = binding(name), Problems()
    hvd, calls = under_test.hvd, Calls()
    handle = hvd.grouped_allreduce_async([ones(under_test, 3), ones(under_test)], name="interrupted")
    handle.add_done_callback(calls)
    interrupt = when_this_thread_waits(press_ctrl_c)
    try:
        hvd.synchronize(handle)
    except KeyboardInterrupt:
        problems.expect(calls.wait() == (True, AbortedError), calls.outcomes)
    else:
        problems.append("nothing was raised")
    interrupt.join()
    problems.expect(len(calls.outcomes) == 1, "once")
    return problems


def test_it_is_called_when_the_wait_is_interrupted(three: World) -> None:
    _needs_handles(three)
    assert three.ranks.run(interrupted, three.name, ranks=[0]) == [[]]
    three.ranks.catch_up()
    assert three.ranks.run(after, three.name) == [True] * 3


def inside(name: str) -> list[str]:
    """Check the calls that a callback may and may not make, and the handling of its exceptions."""
    under_test, problems = binding(name), Problems()
    hvd, records, later, calls = under_test.hvd, [], [], Calls()
    logger, handler = logging.getLogger("hvdlab"), logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    there = threading.Event()

    def submits(handle: Any) -> None:
        later.append(hvd.allreduce_async(ones(under_test, 2), op=hvd.Sum, name="later"))
        try:
            if threading.current_thread() is not threading.main_thread():
                hvd.allreduce(ones(under_test, 2), name="waits")
        except InvalidRequestError as error:
            problems.expect("must neither wait" in str(error), error)
        there.set()

    def fails(handle: Any) -> None:
        raise ZeroDivisionError

    logger.addHandler(handler)
    try:
        first = hvd.allreduce_async(ones(under_test, 2), op=hvd.Sum, name="first")
        for callback in (fails, submits, calls):
            first.add_done_callback(callback)
        calls.wait()
    finally:
        logger.removeHandler(handler)
    problems.expect(there.is_set(), "the callback after one that failed")
    problems.expect(float(under_test.values(hvd.synchronize(later[0]))[0]) == hvd.size(), "submitted inside")
    problems.expect(len(records) == 1 and "the collective itself did not" in records[0], records)
    problems.expect(works(under_test), "afterwards")
    return problems


def test_what_may_be_done_inside(world: World) -> None:
    _needs_handles(world)
    world.check(inside)
