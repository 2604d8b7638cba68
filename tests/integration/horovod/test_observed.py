"""Observations of a script written for Horovod, on two ranks: results, and which errors it can catch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import hvdlab.torch as hvd
from support.ranks.resident import Ranks, resident_ranks

ones = torch.ones
model = torch.nn.Linear(2, 1)

pair = resident_ranks(2, imports=["hvdlab.torch"])


def distributed(**arguments: Any) -> Any:
    # Made here: the first optimizer imports torch's compiler, for which each process that collects tests would pay.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(optimizer, **{"named_parameters": model.named_parameters(), **arguments})


WRONG_HERE = {
    # Errors of this rank alone, and the types that catch them.
    "hvd.allreduce(ones(2), average=True, op=hvd.Sum)": ValueError,
    "hvd.allreduce(ones(2), op=77)": ValueError,
    "hvd.allreduce(ones(2), op='sum')": ValueError,
    "hvd.allreduce([1.0, 2.0])": ValueError,
    "hvd.allreduce(ones(2).numpy())": ValueError,
    "hvd.allreduce(None)": ValueError,
    "hvd.allreduce(ones(2, dtype=torch.complex64))": NotImplementedError,
    "hvd.allreduce(ones(2), process_set=None)": ValueError,
    "hvd.allreduce(ones(2), process_set=hvd.ProcessSet([0]))": ValueError,
    "hvd.broadcast(ones(2), 9)": ValueError,
    "hvd.broadcast(ones(2), -1)": ValueError,
    "hvd.broadcast(ones(2), None)": ValueError,
    "hvd.broadcast_(ones(2), 2)": RuntimeError,
    "hvd.alltoall(ones(3))": ValueError,
    "hvd.alltoall(ones(4), splits=torch.tensor([1, 1]))": ValueError,
    "hvd.alltoall(ones(4), splits=torch.tensor([4]))": ValueError,
    "hvd.alltoall(ones(4), splits=torch.tensor([5, -1]))": ValueError,
    "hvd.alltoall(ones(4), splits=torch.tensor([2.0, 2.0]))": ValueError,
    "hvd.alltoall(torch.tensor(1.0))": ValueError,
    "hvd.reducescatter(torch.tensor(1.0))": ValueError,
    "hvd.reducescatter(ones(4), op=hvd.Adasum)": NotImplementedError,
    "hvd.grouped_allreduce(ones(3))": ValueError,
    "hvd.synchronize(12345)": ValueError,
    "hvd.poll(None)": ValueError,
    "hvd.add_process_set([])": ValueError,
    "hvd.add_process_set([0, 9])": ValueError,
    "hvd.add_process_set([0, 1])": ValueError,
    "hvd.remove_process_set([0])": ValueError,
    "hvd.broadcast_parameters(None, 0)": ValueError,
    "distributed(named_parameters=[('a', model.weight), ('a', model.bias)])": ValueError,
    "distributed(named_parameters=[('a', model.weight)])": ValueError,
    "distributed(named_parameters=list(model.parameters()))": ValueError,
    "distributed(op=hvd.Sum, gradient_predivide_factor=2.0)": ValueError,
    "distributed(groups='x')": ValueError,
    "distributed(groups=-1)": ValueError,
    "distributed(backward_passes_per_step=0)": ValueError,
    "hvd.sparse_allreduce_async(ones(2), 'dense', hvd.Sum)": RuntimeError,
    "hvd.start_timeline('/nonexistent/timeline.json')": OSError,
}
DISAGREEMENTS = (
    "hvd.allreduce(ones(2 + hvd.rank()))",
    "hvd.allreduce(ones(2, dtype=torch.float64 if hvd.rank() else torch.float32))",
    "hvd.broadcast(ones(2), hvd.rank())",
    "hvd.allgather(ones(2, 2) if hvd.rank() else ones(2))",
    "hvd.allgather(ones(2, 2 + hvd.rank()))",
    "hvd.alltoall(ones(2, 2 + hvd.rank()))",
    "hvd.reducescatter(ones(2, 2 + hvd.rank()))",
    "hvd.grouped_allreduce([ones(1)] * (1 + hvd.rank()), name='group')",
)
RESULTS = {
    "hvd.allreduce(ones(2) * (hvd.rank() + 1)).tolist()": [[1.5, 1.5]] * 2,
    "hvd.allreduce(ones(2), op=hvd.Sum).tolist()": [[2.0, 2.0]] * 2,
    "hvd.allreduce(ones(2), compression=hvd.Compression.fp16).dtype == torch.float32": [True, True],
    "hvd.allgather(torch.arange(1.0 + hvd.rank())).tolist()": [[0.0, 0.0, 1.0]] * 2,
    "hvd.alltoall(torch.arange(4.0)).tolist()": [[0.0, 1.0] * 2, [2.0, 3.0] * 2],
    "[part.tolist() for part in hvd.alltoall(torch.arange(4), splits=torch.tensor([1, 3]))]": [
        [[0, 0], [1, 1]],
        [[1, 2, 3, 1, 2, 3], [3, 3]],
    ],
    "hvd.reducescatter(ones(5)).shape[0]": [3, 2],
    "hvd.grouped_allreduce([])": [[], []],
    "type(hvd.grouped_allreduce([ones(1), ones(2)])).__name__": ["list", "list"],
    "hvd.broadcast_object({'a': hvd.rank()})": [{"a": 0}] * 2,
    "hvd.allgather_object(hvd.rank())": [[0, 1]] * 2,
    "hvd.join() in (0, 1)": [True, True],
    "hvd.barrier()": [None, None],
    "hvd.remove_process_set(hvd.global_process_set)": [False, False],
    "hvd.is_homogeneous()": [True, True],
    "hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), 'called', hvd.Sum)().to_dense().tolist()": [
        [[2.0, 0.0], [0.0, 2.0]]
    ]
    * 2,
    "[hvd.allreduce_(given := ones(2), op=hvd.Sum) is given, given.tolist()]": [[True, [2.0, 2.0]]] * 2,
    "hvd.synchronize(hvd.broadcast_async_(given := ones(2), 1)) is given": [True, True],
}


def _evaluate(expression: str) -> Any:
    found = eval(expression)
    hvd.barrier()
    return found


def _error_of(expression: str) -> tuple[list[str], str]:
    """Return names of the error's classes, and its text."""
    try:
        eval(expression)
    except Exception as error:  # noqa: BLE001  (the test looks at it)
        hvd.barrier()
        return [cls.__name__ for cls in type(error).__mro__], str(error)
    raise AssertionError(f"{expression} raised nothing")


@pytest.mark.parametrize("expression", WRONG_HERE)
def test_wrong_arguments(pair: Ranks, expression: str) -> None:
    if "start_timeline" in expression and os.path.exists("/nonexistent"):
        pytest.skip("it exists")
    for classes, text in pair.run(_error_of, expression):
        assert WRONG_HERE[expression].__name__ in classes, (classes, text)
        assert "CollectiveError" not in classes
        assert text


@pytest.mark.parametrize("expression", DISAGREEMENTS)
def test_ranks_that_disagree_get_horovod_s_error(pair: Ranks, expression: str) -> None:
    for classes, text in pair.run(_error_of, expression):
        assert hvd.HorovodInternalError.__name__ in classes
        assert "RuntimeError" in classes
        assert "the ranks disagree" in text


@pytest.mark.parametrize("expression", RESULTS)
def test_results(pair: Ranks, expression: str) -> None:
    assert pair.run(_evaluate, expression) == RESULTS[expression]


def _same_name_twice() -> tuple[Any, ...] | None:
    second: Any = None
    if hvd.rank() == 0:
        first = hvd.allreduce_async(ones(2), name="same")
        try:
            hvd.allreduce_async(ones(2), name="same")
        except ValueError as error:
            second = error
    hvd.barrier()  # rank 1 takes part only now, so the first one was in flight
    if hvd.rank() == 1:
        first = hvd.allreduce_async(ones(2), name="same")
    with pytest.raises(ValueError, match="same"):
        hvd.synchronize(first)
    hvd.barrier()
    return second and (isinstance(second, RuntimeError), "in flight" in str(second))


def test_a_name_that_is_in_flight_twice(pair: Ranks) -> None:
    assert pair.run(_same_name_twice) == [(True, True), None]
