"""Failures of single collectives and of groups, interrupts, and that the group works afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conformance.bindings.conftest import World
from conformance.bindings.harness import BindingUnderTest, Problems, binding
from conformance.bindings.test_arguments import ones, works
from hvdlab.bindings.handles import FAILURES
from hvdlab.collectives import context
from hvdlab.collectives.errors import AbortedError, DuplicateNameError, MismatchError
from hvdlab.collectives.types import DType
from support.interrupting import press_ctrl_c, when_this_thread_waits
from support.patience import PATIENCE

MISMATCHES = ("shape", "dtype", "operator", "root", "row", "kind", "group", "in place", "async")


def mismatch(name: str, which: str) -> list[str]:
    under_test, problems = binding(name), Problems()
    hvd = under_test.hvd
    odd = int(hvd.rank() == 1)
    mine = ones(under_test, 3)
    kind = DType.I32 if odd else DType.F32
    calls: dict[str, Callable[[], Any]] = {
        "shape": lambda: hvd.allreduce(ones(under_test, 3 + odd), name="loss"),
        "dtype": lambda: hvd.allreduce(ones(under_test, 3, dtype=kind), name="loss"),
        "operator": lambda: hvd.allreduce(mine, name="loss", op=hvd.Max if odd else hvd.Sum),
        "root": lambda: hvd.broadcast(mine, odd, name="loss"),
        "row": lambda: hvd.allgather(ones(under_test, 3, 1 + odd), name="loss"),
        "kind": lambda: (hvd.allreduce if odd else hvd.allgather)(mine, name="loss"),
        "group": lambda: hvd.grouped_allreduce([mine, ones(under_test, 2 + odd), mine], name="loss"),
        "in place": lambda: hvd.allreduce_(ones(under_test, 3 + odd), name="loss"),
        "async": lambda: hvd.synchronize(hvd.allreduce_async(ones(under_test, 3 + odd), name="loss")),
    }
    try:
        calls[which]()
    except MismatchError as error:
        for part in ("`loss", "test_failures.py:", "rank 1", "the ranks disagree"):
            problems.expect(part in str(error), f"{part!r} is not in {error}")
        hvd_error = getattr(hvd, "HorovodInternalError", RuntimeError)
        problems.expect(isinstance(error, hvd_error), "not Horovod's error")
    else:
        problems.append("nothing was raised")
    problems.expect(under_test.values(mine).tolist() == [1.0] * 3 or which == "root", "an input was changed")
    problems.expect(works(under_test), "afterwards")
    return problems


@pytest.mark.parametrize("which", MISMATCHES)
def test_disagreement_is_an_error_on_all_ranks(three: World, which: str) -> None:
    if which in binding(three.name).lacks:
        pytest.skip(f"{three.name} has no form {which}")
    three.check(mismatch, which)


def failed_group(name: str) -> list[str]:
    """Asynchronous groups of which one tensor fails: every handle ends, and no tensor is written to afterwards."""
    under_test, problems = binding(name), Problems()
    hvd = under_test.hvd
    odd = int(hvd.rank() == 1)

    def group(form: str, base: str, wrong: bool) -> Any:
        tensors = [ones(under_test, 4) for _ in range(5)]
        tensors[2] = ones(under_test, 2 + odd * wrong)
        return tensors, getattr(hvd, f"grouped_allreduce_{form}")(tensors, op=hvd.Sum, name=base)

    for form in ("async", "async_"):
        _, good = group(form, f"{form} good", False)
        tensors, bad = group(form, f"{form} bad", True)
        with problems.refused(form, MismatchError, "the ranks disagree"):
            hvd.synchronize(bad)
        problems.expect(hvd.poll(bad), "a failed handle is done")
        with problems.refused("asked again", MismatchError, "the ranks disagree"):
            hvd.synchronize(bad)
        before = [under_test.values(tensor).tolist() for tensor in tensors]
        problems.expect(works(under_test), "afterwards")
        sums = [under_test.values(output)[0] for output in hvd.synchronize(good)]
        problems.expect(sums == [hvd.size()] * 5, f"the group beside it: {sums}")
        after = [under_test.values(tensor).tolist() for tensor in tensors]
        problems.expect(before == after, "written to after the handle was done")
    return problems


def test_a_group_fails_as_a_whole_and_only_itself(three: World) -> None:
    _needs_handles(three)
    three.check(failed_group)


def _needs_handles(world: World) -> None:
    if "async" in binding(world.name).lacks:
        pytest.skip(f"{world.name} has no handles")


def duplicate(name: str) -> list[str]:
    under_test, problems = binding(name), Problems()
    hvd = under_test.hvd
    works(under_test)
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(ones(under_test, 1), name="twice")
        with problems.refused("twice", DuplicateNameError, "`twice` was submitted at test_failures.py:"):
            hvd.allreduce_async(ones(under_test, 1), name="twice")
        try:
            hvd.synchronize(handle)
        except FAILURES as error:
            problems.expect("twice" in str(error), error)
        else:
            problems.append("the first one: nothing was raised")
    problems.expect(works(under_test), "afterwards")
    return problems


def missing(name: str) -> list[str]:
    """Ranks that wait for different collectives."""
    under_test, problems = binding(name), Problems()
    hvd = under_test.hvd
    if hvd.rank() == 0:
        handle = hvd.grouped_allreduce_async_([ones(under_test, 1), ones(under_test, 2)], name="lonely")
        for _ in range(2):  # the same answer each time
            with problems.refused("lonely", AbortedError, "lonely"):
                hvd.synchronize(handle)
    else:
        with problems.refused("other", AbortedError, "other"):
            hvd.broadcast_(ones(under_test, 2), 0, name="other")
    problems.expect(works(under_test), "afterwards")
    return problems


@pytest.mark.parametrize("function", [duplicate, missing], ids=lambda function: function.__name__)
def test_what_can_not_complete(three: World, function: Any) -> None:
    _needs_handles(three)
    three.check(function)


# -- interrupts -------------------------------------------------------------------------------------------------------

INTERRUPTED: dict[str, Callable[[BindingUnderTest], Any]] = {
    "sync": lambda b: b.hvd.allreduce(ones(b, 3), name="interrupted"),
    "in place": lambda b: b.hvd.allreduce_(ones(b, 3), name="interrupted"),
    "async": lambda b: b.hvd.synchronize(b.hvd.allgather_async(ones(b, 3), name="interrupted")),
    "grouped": lambda b: b.hvd.grouped_allreduce([ones(b, 3), ones(b)], name="interrupted"),
}


"""Seconds for what takes none, on a machine that has other work."""

_both_wait = threading.Event()
"""On rank 0: rank 1's part has reached the coordinator."""


def listens() -> None:
    """Before :func:`waits`, so that rank 0 hears of rank 1's wait however slow it is itself."""
    _both_wait.clear()
    context.engine().on_mail("waits", lambda sender, body: _both_wait.set())


def waits(name: str, form: str) -> str:
    """Wait for a collective that rank 2 does not call; rank 0 is interrupted once ranks 0 and 1 wait."""
    under_test = binding(name)
    watcher = when_this_thread_waits(_interrupt_once_both_wait if under_test.hvd.rank() == 0 else _say_so)
    try:
        INTERRUPTED[form](under_test)
    except (KeyboardInterrupt, AbortedError) as error:
        return type(error).__name__
    finally:
        watcher.join()
    return "nothing was raised"


def _say_so() -> None:
    """Report the wait: the connection keeps the order, so the awaited request reaches the coordinator before this."""
    context.engine().post("waits", b"", to=[0])


def _interrupt_once_both_wait() -> None:
    assert _both_wait.wait(PATIENCE)
    press_ctrl_c()


def after(name: str) -> bool:
    return works(binding(name))


@pytest.mark.parametrize("form", INTERRUPTED)
def test_an_interrupt_frees_all_ranks(three: World, form: str) -> None:
    if form in binding(three.name).lacks:
        pytest.skip(f"{three.name} has no form {form}")
    three.ranks.run(listens)
    outcomes = three.ranks.run(waits, three.name, form, ranks=[0, 1], timeout=2 * PATIENCE)
    assert outcomes == ["KeyboardInterrupt", "AbortedError"]
    three.ranks.catch_up()
    assert three.ranks.run(after, three.name) == [True] * 3


def interrupted_handle(name: str) -> list[str]:
    """Check that a handle whose wait was interrupted stays valid, and gives the reason of its end."""
    under_test, problems = binding(name), Problems()
    hvd = under_test.hvd
    handle = hvd.allreduce_async_(under_test.tensor(np.ones(3), DType.F32), name="kept")
    interrupt = when_this_thread_waits(press_ctrl_c)
    try:
        hvd.synchronize(handle)
    except KeyboardInterrupt:
        with problems.refused("asked again", AbortedError, "kept"):
            hvd.synchronize(handle)
    else:
        problems.append("nothing was raised")
    interrupt.join()
    return problems


def test_a_handle_outlives_the_interrupt_of_its_wait(three: World) -> None:
    _needs_handles(three)
    assert three.ranks.run(interrupted_handle, three.name, ranks=[0]) == [[]]
    three.ranks.catch_up()
    assert three.ranks.run(after, three.name) == [True] * 3
