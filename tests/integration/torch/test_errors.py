"""Calls that are refused at once, calls that fail on all ranks, and that the group works afterwards."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvdlab.torch as hvd
from hvdlab.collectives.errors import (
    AbortedError,
    DuplicateNameError,
    InvalidRequestError,
    MismatchError,
    NotInitializedError,
    UnsupportedError,
)
from support.ranks.resident import Ranks


def _works() -> float:
    return hvd.allreduce(torch.ones(2), op=hvd.Sum)[0].item()


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "average and op": (
        lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum),
        InvalidRequestError,
        "only op",
    ),
    "unknown op": (lambda: hvd.allreduce(torch.ones(1), op=17), InvalidRequestError, "op=17"),
    "adasum of integers": (
        lambda: hvd.allreduce(torch.ones(1).int(), op=hvd.Adasum),
        UnsupportedError,
        "floating-point",
    ),
    "adasum in parts": (lambda: hvd.reducescatter(torch.ones(9), op=hvd.Adasum), UnsupportedError, "whole"),
    "no tensor": (lambda: hvd.allreduce_async([1.0]), InvalidRequestError, "torch.Tensor, not list"),  # type: ignore[arg-type]  # wrong on purpose
    "list to scatter": (lambda: hvd.reducescatter([1.0]), InvalidRequestError, "torch.Tensor"),  # type: ignore[arg-type]  # wrong on purpose
    "list to reduce": (lambda: hvd.allreduce([1.0]), InvalidRequestError, "torch.Tensor"),  # type: ignore[arg-type]  # wrong on purpose
    "no list to wait for": (
        lambda: hvd.grouped_allgather(torch.ones(2)),  # type: ignore[arg-type]  # wrong on purpose
        InvalidRequestError,
        "list of tensors",
    ),
    "no list": (lambda: hvd.grouped_allreduce_async(torch.ones(2)), InvalidRequestError, "list of tensors"),  # type: ignore[arg-type]  # wrong on purpose
    "complex": (lambda: hvd.allgather(torch.ones(2, dtype=torch.cfloat)), UnsupportedError, "view_as_real"),
    "bool sum": (lambda: hvd.allreduce(torch.ones(2) > 0, op=hvd.Sum), UnsupportedError, "bool"),
    "sparse maximum": (lambda: hvd.allreduce(torch.eye(2).to_sparse(), op=hvd.Max), UnsupportedError, "max"),
    "sparse gather": (lambda: hvd.allgather(torch.eye(2).to_sparse()), UnsupportedError, "to_dense"),
    "scatter of nothing": (lambda: hvd.reducescatter(torch.tensor(1.0)), InvalidRequestError, "0-d"),
    "alltoall of nothing": (lambda: hvd.alltoall(torch.tensor(1.0)), InvalidRequestError, "0-d"),
    "splits": (lambda: hvd.alltoall(torch.ones(3), splits=[1.5]), InvalidRequestError, "integers"),  # type: ignore[list-item]  # wrong on purpose
    "negative splits": (lambda: hvd.alltoall(torch.ones(3), splits=[-1]), InvalidRequestError, "negative"),
    "sum of splits": (
        lambda: hvd.alltoall(torch.ones(3), splits=[9] * hvd.size()),
        InvalidRequestError,
        "splits",
    ),
    "root": (lambda: hvd.broadcast(torch.ones(3), 99), InvalidRequestError, "99"),
    "root type": (lambda: hvd.broadcast(torch.ones(3), "0"), InvalidRequestError, "root_rank"),  # type: ignore[arg-type]  # wrong on purpose
    "process set": (lambda: hvd.allreduce(torch.ones(3), process_set=0), InvalidRequestError, "ProcessSet"),  # type: ignore[arg-type]  # wrong on purpose
    "unregistered set": (
        lambda: hvd.allreduce(torch.ones(3), process_set=hvd.ProcessSet([0])),
        InvalidRequestError,
        "add_process_set",
    ),
    "handle": (lambda: hvd.synchronize(3), InvalidRequestError, "handle"),  # type: ignore[arg-type]  # wrong on purpose
}


def _refused(case: str) -> tuple[type[Exception], str, float]:
    call, kind, _ = REFUSED[case]
    with pytest.raises(kind) as error:
        call()
    return type(error.value), str(error.value), _works()


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused_and_nothing_is_sent(two_ranks: Ranks, case: str) -> None:
    _, kind, text = REFUSED[case]
    for found, message, after in two_ranks.run(_refused, case):
        assert issubclass(found, kind)
        assert issubclass(found, ValueError)
        assert text in message
        assert after == 2.0


def _average_is_deprecated() -> list[Any]:
    mine = torch.tensor(float(hvd.rank()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mean = hvd.allreduce(mine, average=True).item()
        total = hvd.allreduce(mine, average=False).item()
        hvd.synchronize(hvd.grouped_allreduce_async_([mine], average=True))
    told = [w.category is DeprecationWarning and w.filename == __file__ for w in caught]
    return [mean, total, mine.item(), told]


def test_average_argument_still_works(two_ranks: Ranks) -> None:
    assert two_ranks.run(_average_is_deprecated) == [[0.5, 1.0, 0.5, [True] * 3]] * 2


def _mismatch(which: str) -> tuple[str, bool, float]:
    rank = hvd.rank()
    calls: dict[str, Callable[[], Any]] = {
        "shape": lambda: hvd.allreduce(torch.ones(3 + rank), name="loss"),
        "dtype": lambda: hvd.allreduce(torch.ones(3, dtype=[torch.int32, torch.float32][rank]), name="loss"),
        "operator": lambda: hvd.allreduce(torch.ones(3), name="loss", op=[hvd.Sum, hvd.Max][rank]),
        "root": lambda: hvd.broadcast_(torch.ones(3), rank, name="loss"),
        "row": lambda: hvd.allgather(torch.ones(3, 1 + rank), name="loss"),
        "kind": lambda: (hvd.allreduce if rank else hvd.allgather)(torch.ones(3), name="loss"),
        "group": lambda: hvd.grouped_allreduce([torch.ones(3), torch.ones(2 + rank)], name="loss"),
    }
    with pytest.raises(MismatchError) as error:
        calls[which]()
    is_horovod_s = isinstance(error.value, hvd.HorovodInternalError) and isinstance(error.value, RuntimeError)
    return str(error.value), is_horovod_s, _works()


@pytest.mark.parametrize("which", ["shape", "dtype", "operator", "root", "row", "kind", "group"])
def test_disagreement_is_an_error_on_all_ranks_with_their_lines(two_ranks: Ranks, which: str) -> None:
    outcomes = two_ranks.run(_mismatch, which)
    assert len({text for text, _, _ in outcomes}) == 1
    for text, is_horovod_s, after in outcomes:
        assert "`loss" in text
        assert "test_errors.py:" in text
        assert "rank 0" in text
        assert "rank 1" in text
        assert is_horovod_s
        assert after == 2.0


def _inputs_survive() -> bool:
    mine = torch.full((4,), float(hvd.rank()))
    with pytest.raises(MismatchError):
        hvd.allreduce(mine.view(2 + 2 * hvd.rank(), -1), name="survivor")
    return bool((mine == hvd.rank()).all())


def test_inputs_are_untouched_after_an_error(two_ranks: Ranks) -> None:
    assert two_ranks.run(_inputs_survive) == [True, True]


def _duplicate() -> tuple[str, float]:
    hvd.barrier()
    handles = []
    if hvd.rank() == 0:
        handles.append(hvd.allreduce_async(torch.ones(1), name="twice"))
        with pytest.raises(DuplicateNameError) as refused:
            hvd.allreduce_async(torch.ones(1), name="twice")
        text = str(refused.value)
    else:
        text = ""
    for handle in handles:
        with pytest.raises((hvd.HorovodInternalError, DuplicateNameError)):
            hvd.synchronize(handle)
    return text, _works()


def test_a_name_in_flight_twice_is_refused(two_ranks: Ranks) -> None:
    (text, first), (_, second) = two_ranks.run(_duplicate)
    assert "`twice`" in text
    assert text.count("test_errors.py:") == 2
    assert (first, second) == (2.0, 2.0)


def _one_is_missing() -> tuple[str, float]:
    text = ""
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="lonely")
        with pytest.raises(AbortedError) as error:
            hvd.synchronize(handle)
        with pytest.raises(AbortedError):
            hvd.synchronize(handle)  # the same error again
        assert hvd.poll(handle)
        text = str(error.value)
    else:
        with pytest.raises(AbortedError):
            hvd.broadcast(torch.ones(2), 0, name="other")
    return text, _works()


def test_a_deadlock_ends_with_an_error_and_the_group_works(two_ranks: Ranks) -> None:
    (text, first), (_, second) = two_ranks.run(_one_is_missing)
    assert "`lonely`" in text
    assert (first, second) == (2.0, 2.0)


@pytest.mark.parametrize(
    "call",
    [hvd.rank, hvd.size, lambda: hvd.allreduce(torch.ones(1)), hvd.barrier, lambda: hvd.broadcast_object(1)],
)
def test_everything_asks_for_init_first(call: Callable[[], Any]) -> None:
    assert not hvd.is_initialized()
    with pytest.raises(NotInitializedError, match=r"hvd\.init"):
        call()


class _Reducing(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        hvd.allreduce(torch.ones(1))
        return index


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_in_a_process_that_a_rank_forked(world_of_one: None) -> None:
    loader = torch.utils.data.DataLoader(_Reducing(), num_workers=1, multiprocessing_context="fork")
    said = ""
    try:
        list(loader)
    except NotInitializedError as error:
        said = str(error)
    gc.collect()  # close the worker's pipes, which the traceback has kept
    assert "a process that rank 0 has forked" in said
    assert "call collectives in the rank itself" in said
    assert "hvd.init() first" not in said


class _Name(str):
    __slots__ = ()


def _named_by_subclasses() -> list[float]:
    one = torch.ones(2)
    name = np.str_ if hvd.rank() else _Name
    found = [
        hvd.allreduce(one, name=name("w")),
        hvd.synchronize(hvd.allreduce_async(one, name=name("async"))),
        *hvd.grouped_allreduce([one, one], name=name("grouped")),
        hvd.allgather(one, name=name("w"))[:2],
        hvd.broadcast(one, 0, name=name("b")),
        hvd.alltoall(one, name=name("a")),
        hvd.reducescatter(one, name=name("r"))[:1].expand(2),
    ]
    hvd.metric(name("loss"), 1.0)
    assert hvd.broadcast_object(3, 0, name=name("object")) == 3
    return [float(each.sum()) for each in found]


def test_names_may_be_of_a_subclass_of_str(two_ranks: Ranks) -> None:
    assert two_ranks.run(_named_by_subclasses) == [[2.0] * 8] * 2


def test_a_name_that_is_none_is_refused(world_of_one: None) -> None:
    with pytest.raises(InvalidRequestError, match=r"name= takes a text, not 5 \(int\)"):
        hvd.allreduce(torch.ones(1), name=5)  # type: ignore[arg-type]  # the test needs a wrong type


def _not_a_number(count: int, dtype: torch.dtype) -> list[float]:
    given = torch.ones(count, dtype=dtype)
    return [
        hvd.allreduce(given, name="before", prescale_factor=float("nan")).sum().item(),
        hvd.allreduce(given, name="after", op=hvd.Sum, postscale_factor=float("nan")).sum().item(),
        hvd.grouped_allreduce([given] * 2, prescale_factor=float("nan"))[1].sum().item(),
        hvd.reducescatter(given, prescale_factor=float("nan")).sum().item(),
        hvd.allreduce(given, name="before", prescale_factor=1.0).sum().item(),
    ]


@pytest.mark.parametrize("count", [4, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_factor_that_is_not_a_number(two_ranks: Ranks, count: int, dtype: torch.dtype) -> None:
    for outcome in two_ranks.run(_not_a_number, count, dtype):
        assert all(math.isnan(value) for value in outcome[:4])
        assert outcome[4] == count
