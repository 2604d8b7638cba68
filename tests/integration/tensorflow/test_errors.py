"""Failures and interrupts of operations: functions and sessions raise hvdlab's own errors, and the next operation works."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.bindings.harness import binding
from conformance.bindings.test_arguments import nothing_works
from hvdlab.collectives import context
from hvdlab.collectives.errors import AbortedError, MismatchError, UnsupportedError
from support.patience import PATIENCE
from support.ranks.resident import Ranks

"""Limit in seconds of waits that take next to no time on an idle machine."""


def _modules() -> tuple[Any, Any]:
    import tensorflow as tf

    import hvdlab.tensorflow as hvd

    return tf, hvd


def works() -> None:
    tf, hvd = _modules()
    assert (
        float(tf.function(lambda: hvd.allreduce(tf.constant(1.0), op=hvd.Sum), autograph=False)())
        == hvd.size()
    )


def disagreement() -> None:
    tf, hvd = _modules()
    odd = hvd.rank()

    def run() -> Any:
        return hvd.allreduce(tf.ones(3 + odd), name="loss")

    def in_session() -> Any:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            return session.run(run())

    called_back = tf.function(lambda: tf.py_function(run, [], tf.float32))
    for call in (run, tf.function(run), tf.function(run, autograph=False), in_session, called_back):
        with pytest.raises(
            MismatchError, match=r"`loss`: the ranks disagree. rank 0 \(test_errors.py:"
        ) as caught:
            call()
        error = caught.value
        assert isinstance(error, tf.errors.FailedPreconditionError)
        assert isinstance(error, hvd.HorovodInternalError)
        assert len(error.groups) == 2
        assert "Graph execution error" not in str(error)
        again = pickle.loads(pickle.dumps(error))  # noqa: S301
        assert (type(again), str(again)) == (type(error), str(error))
        works()
    with pytest.raises(tf.errors.FailedPreconditionError, match="the ranks disagree"):
        list(tf.data.Dataset.range(1).map(lambda i: run()))
    works()


def refusals() -> None:
    tf, hvd = _modules()
    compiled = tf.function(lambda x: hvd.allreduce(x), jit_compile=True)
    with pytest.raises(UnsupportedError, match="without jit_compile=True"):
        compiled(tf.ones(2))
    with pytest.raises(tf.errors.InvalidArgumentError, match="root 9 is not in process set 0"):
        tf.function(lambda: hvd.broadcast(tf.ones(2), 9))()
    with pytest.raises(UnsupportedError, match=r"bool tensors can't sum"):
        tf.function(lambda: hvd.allreduce(tf.constant([True]), op=hvd.Sum))()
    with pytest.raises(NotImplementedError, match="IndexedSlices can be averaged and summed"):
        hvd.allreduce(tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0])), op=hvd.Adasum)
    with pytest.raises(NotImplementedError, match="takes dense tensors"):
        hvd.reducescatter(tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0])))
    with pytest.raises(ValueError, match="op= replaces average="):
        hvd.allreduce(tf.ones(1), average=True, op=hvd.Sum)
    with pytest.raises(tf.errors.InvalidArgumentError, match="There is no process set 77"):
        tf.function(lambda: hvd.size_op(77))()
    with pytest.raises(RuntimeError, match=r"give the variables to hvd.broadcast_variables"):
        hvd.broadcast_global_variables(0)
    works()


def without_threads() -> None:
    """Check that where no thread can be started, a kernel fails before the core gets its memory."""
    tf, hvd = _modules()
    from hvdlab.tensorflow import interrupts

    while interrupts._collectives._reporter is not None:  # it ends by itself soon after the last collective
        time.sleep(0.01)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    function = tf.function(lambda: hvd.allreduce(tf.ones(3), name="threadless"), autograph=False)
    function.get_concrete_function()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            function()
    assert not interrupts._collectives.sets()
    assert function().numpy().tolist() == [1, 1, 1]
    works()


@pytest.mark.parametrize(
    "function", [disagreement, refusals, without_threads], ids=lambda function: function.__name__
)
def test_what_fails_on_all_ranks(two: Ranks, function: Callable[[], None]) -> None:
    two.run(function, timeout=PATIENCE)


# -- interrupts -------------------------------------------------------------------------------------------------------


def waits(how: str, press: bool) -> str:
    """Wait in C++ for a collective that the other rank does not call; with ``press``, interrupt this rank meanwhile."""
    tf, hvd = _modules()
    from hvdlab.tensorflow import interrupts

    interrupts.begin()
    name = f"lonely{hvd.rank()}"

    def interrupt() -> None:
        while not interrupts._collectives.sets():
            time.sleep(0.001)
        if press:
            os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    try:
        if how == "session":
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                session.run(hvd.allreduce(tf.ones(3), name=name))
        else:
            tf.function(lambda: hvd.allreduce(tf.ones(3), name=name), autograph=False)()
    except (KeyboardInterrupt, AbortedError) as error:
        return type(error).__name__
    finally:
        watcher.join()
    return "nothing was raised"


@pytest.mark.parametrize("how", ["function", "session"])
def test_an_interrupt_ends_an_operation_on_all_ranks(two: Ranks, how: str) -> None:
    one = two.start(waits, how, False, ranks=[1])
    outcomes = two.run(waits, how, True, ranks=[0], timeout=PATIENCE)
    assert outcomes + one.outcomes(PATIENCE) == ["KeyboardInterrupt", "AbortedError"]
    two.catch_up()
    two.run(works)


def interrupted_start(place: str) -> tuple[str, list[str]]:
    """Return the error of a kernel whose start Ctrl-C interrupts once the core has its tensors, and the collectives then in flight."""
    tf, hvd = _modules()
    from hvdlab.bindings.handles import Handle
    from hvdlab.tensorflow import interrupts

    holder, name = {"watched": (interrupts, "started"), "added": (Handle, "add_done_callback")}[place]
    usual, calls = getattr(holder, name), list[str]()

    def strike(*arguments: Any) -> None:
        calls.append(place)
        usual(*arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt

    function = tf.function(lambda: hvd.allreduce(tf.ones(3), name="struck"), autograph=False)
    function.get_concrete_function()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder, name, strike)
        with pytest.raises((KeyboardInterrupt, AbortedError)) as caught:
            function()
    return caught.type.__name__, [each.name for each in context.engine().pending()]


@pytest.mark.parametrize("place", ["watched", "added"])
def test_interrupted_start_of_a_kernel_leaves_nothing_in_flight(two: Ranks, place: str) -> None:
    # TensorFlow has the memory back when the error is raised.
    assert two.run(interrupted_start, place, ranks=[0], timeout=PATIENCE) == [("KeyboardInterrupt", [])]
    two.catch_up()
    two.run(works)


def test_ranks_that_wait_for_different_operations_are_found(two: Ranks) -> None:
    assert two.run(waits, "function", False, timeout=PATIENCE) == ["AbortedError", "AbortedError"]
    two.catch_up()
    two.run(works)


# -- ranks that are lost ----------------------------------------------------------------------------------------------


def left_alone(called: Path) -> str:
    """Rank 1 dies once rank 0 waits in the collective: if it died earlier, rank 0 would run it alone."""
    tf, hvd = _modules()
    if hvd.rank() == 1:
        while not called.exists():
            time.sleep(0.001)
        os._exit(3)
    from hvdlab.tensorflow import interrupts

    interrupts.begin()

    def watch() -> None:
        while not interrupts._collectives.sets():
            time.sleep(0.001)
        called.touch()

    threading.Thread(target=watch).start()
    with pytest.raises(hvd.HorovodInternalError) as caught:
        tf.function(lambda: hvd.allreduce(tf.ones(3), name="left"), autograph=False)()
    assert isinstance(caught.value, tf.errors.UnknownError)
    works()
    return str(caught.value)


def before_init() -> None:
    under_test = binding("tensorflow")
    nothing_works(under_test)
    tf, hvd = _modules()
    for call in (hvd.size_op, tf.function(hvd.rank_op), tf.function(lambda: hvd.allreduce(tf.ones(1)))):
        with pytest.raises(ValueError, match=r"before hvd\.init\(\)"):
            call()


def test_a_rank_that_dies_ends_an_operation(tmp_path: Path) -> None:
    with Ranks(2, init=False, imports=["hvdlab.tensorflow"]) as ranks:
        ranks.run(before_init)
        ranks.run(_init)
        outcomes = ranks.outcomes(left_alone, tmp_path / "called", timeout=PATIENCE)
        assert isinstance(outcomes[0], str), outcomes
        assert "rank 1" in outcomes[0], outcomes
        assert "`left`" in outcomes[0]


def _init() -> None:
    _, hvd = _modules()
    hvd.init()
