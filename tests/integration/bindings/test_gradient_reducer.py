"""Gradients of a framework with hooks are reduced during its backward pass, on real ranks."""

from __future__ import annotations

import contextlib
from unittest import mock

import numpy as np
import pytest

from hvdlab.bindings import gradient_reducer
from hvdlab.bindings.compression import Compressor, NoneCompressor
from hvdlab.bindings.gradient_reducer import GradientReducer, ReductionSettings, bucketed
from hvdlab.collectives import context
from hvdlab.collectives.errors import DuplicateNameError, MismatchError
from hvdlab.collectives.process_sets import global_process_set
from hvdlab.collectives.types import ReduceOp
from hvdlab.numpy.adapter import BINDING, Array
from support.fakes.framework import FakeGradients, Parameter
from support.ranks.resident import Ranks, resident_ranks

Reducer = GradientReducer[Parameter, Array]


two = resident_ranks(2, imports=["hvdlab.numpy"])


class Doubled(Compressor):
    """Sends twice the value in half the bits."""

    @staticmethod
    def compress(tensor: Array) -> tuple[Array, object]:
        return (2 * tensor).astype("float16"), tensor.dtype

    @staticmethod
    def decompress(tensor: Array, ctx: object) -> Array:
        return tensor.astype(ctx) / 2  # type: ignore[call-overload, no-any-return]


def made(
    sizes: list[int],
    passes: int = 1,
    *,
    groups: int = 0,
    compression: type[Compressor] = NoneCompressor,
    predivide: float = 1.0,
    prefix: str = "p",
) -> tuple[FakeGradients, Reducer, list[Parameter]]:
    framework = FakeGradients()
    settings = ReductionSettings(compression, ReduceOp.AVERAGE, predivide, False, global_process_set)
    reducer: Reducer = GradientReducer(BINDING, framework, settings, passes)
    parameters = [Parameter(size) for size in sizes]
    names = {parameter: f"{prefix}{number}" for number, parameter in enumerate(parameters)}
    for name, members in bucketed(parameters, names, groups, lambda value: isinstance(value, Parameter)):
        reducer.watch(name, members)
    return framework, reducer, parameters


def gradients(parameters: list[Parameter]) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def each_way() -> list[object]:
    rank = context.engine().rank
    seen: list[object] = []
    for options in ({}, {"groups": 1}, {"compression": Doubled}, {"predivide": 4.0}):
        framework, reducer, parameters = made([2, 1, 1], **options)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = None
            given = {parameters[0]: rank + 1.0, parameters[1]: 10.0 * rank}
            if rank == 1:  # the other rank's backward pass does not reach it
                given[parameters[2]] = 8.0
            framework.run_backward(given)
            assert reducer.in_progress
            reducer.synchronize()
            assert (reducer.settled, reducer.in_progress) == (True, False)
            seen.append(gradients(parameters))
    return seen


def test_gradients_are_averaged_alone_in_groups_compressed_and_predivided(two: Ranks) -> None:
    assert two.run(each_way) == [[[[1.5, 1.5], [5.0], [4.0]]] * 8] * 2


def in_turns() -> tuple[list[int], list[list[float] | None]]:
    """Return how many allreduces were under way after each backward pass of two."""
    framework, reducer, parameters = made([1, 1], passes=2)
    submitted = []
    for _ in range(2):
        framework.run_backward(dict.fromkeys(parameters, 1.0))
        submitted.append(sum(bucket.work is not None for bucket in reducer._buckets))
    reducer.synchronize()
    return submitted, gradients(parameters)


def test_allreduces_start_in_the_last_backward_pass_of_a_step(two: Ranks) -> None:
    assert two.run(in_turns) == [([0, 2], [[2.0], [2.0]])] * 2


def after_a_mismatch() -> list[list[float] | None]:
    rank = context.engine().rank
    framework, reducer, parameters = made([1 + rank, 1], prefix="m")
    framework.run_backward(dict.fromkeys(parameters, 1.0))
    with pytest.raises(MismatchError):
        reducer.synchronize()
    assert (reducer.settled, reducer.in_progress) == (False, False)
    framework, reducer, parameters = made([1, 1], prefix="m")
    framework.run_backward(dict.fromkeys(parameters, float(rank)))
    reducer.synchronize()
    return gradients(parameters)


def test_a_step_after_one_that_failed_begins_anew(two: Ranks) -> None:
    assert two.run(after_a_mismatch) == [[[0.5], [0.5]]] * 2


def dropped() -> list[list[float] | None]:
    """A step is given up after its allreduces began; the next one's have the same names."""
    framework, reducer, parameters = made([1, 1], prefix="d")
    framework.run_backward(dict.fromkeys(parameters, 1.0))
    reducer.drop()
    for parameter in parameters:
        parameter.grad = None
    framework.run_backward(dict.fromkeys(parameters, float(context.engine().rank)))
    reducer.synchronize()
    return gradients(parameters)


def test_a_step_that_is_dropped_leaves_nothing_in_flight(two: Ranks) -> None:
    assert two.run(dropped) == [[[0.5], [0.5]]] * 2


def dropped_between_turns(failed: bool) -> tuple[int, list[float]]:
    """A step is given up in the middle of a backward pass, in which one rank has had a turn and the other has not."""
    rank, engine = context.engine().rank, context.engine()
    framework, reducer, (first, second) = made([1, 1], prefix="t")
    with contextlib.suppress(ZeroDivisionError), framework.backward():
        first.grad = np.ones(1, np.float32)
        first.hooks[0](first)
        assert all(bucket.work is None for bucket in reducer._buckets), "there was no turn yet"
        if rank == 0 and not failed:
            reducer._batcher.flush()
            assert reducer._buckets[0].work is not None
        raise ZeroDivisionError
    engine.failed_cells += failed
    with mock.patch.object(reducer, "_start", wraps=reducer._start) as start:
        reducer.drop()
    assert not reducer.in_progress
    framework.run_backward(dict.fromkeys((first, second), float(rank)))
    reducer.synchronize()
    return start.call_count, [
        float(parameter.grad[0]) for parameter in (first, second) if parameter.grad is not None
    ]


def test_a_step_that_is_dropped_leaves_no_rank_waiting_that_has_had_another_turn(two: Ranks) -> None:
    assert two.run(dropped_between_turns, False) == [(0, [1.5, 0.5]), (1, [1.5, 0.5])]


def test_what_a_failed_cell_has_not_submitted_is_not_submitted_by_the_next(two: Ranks) -> None:
    assert two.run(dropped_between_turns, True) == [(0, [1.5, 0.5])] * 2


def submitted_in_turns() -> list[str]:
    """Return the submissions by the end of each hook, where a turn takes two gradients."""
    framework, reducer, parameters = made([1] * 5, prefix="turn")
    seen = []
    with mock.patch.object(gradient_reducer, "ENOUGH_BYTES", 8), framework.backward():
        for parameter in parameters:
            parameter.grad = np.ones(1, np.float32)
            parameter.hooks[0](parameter)
            seen.append("".join(str(bucket.work is not None)[0] for bucket in reducer._buckets))
    seen.append("".join(str(bucket.work is not None)[0] for bucket in reducer._buckets))
    reducer.synchronize()
    return seen


def test_gradients_are_submitted_in_turns(two: Ranks) -> None:
    assert two.run(submitted_in_turns) == [["FFFFF", "TTFFF", "TTFFF", "TTTTF", "TTTTF", "TTTTT"]] * 2


def used_twice() -> str:
    if context.engine().rank != 0:
        return ""
    first, mine, one = made([1], prefix="same")
    second, _, other = made([1], prefix="same")
    first.run_backward({one[0]: 1.0})  # the other rank has none, so this stays in flight
    with pytest.raises(DuplicateNameError) as caught:
        second.run_backward({other[0]: 1.0})
    with pytest.raises(DuplicateNameError):
        mine.synchronize()
    return str(caught.value)


def test_two_reducers_with_the_same_names_are_told_so_in_the_frameworks_words(two: Ranks) -> None:
    text, _ = two.run(used_twice)
    assert "name your optimizers." in text
