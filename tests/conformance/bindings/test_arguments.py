"""Names, groups, process sets, wrong arguments with their texts, signatures and docstrings."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from conformance.bindings.conftest import World
from conformance.bindings.harness import BINDINGS, ONLY_IN_RANKS, BindingUnderTest, Problems, binding
from hvdlab.collectives.errors import InvalidRequestError, NotInitializedError, UnsupportedError
from hvdlab.collectives.types import DType

_REDUCTION = ("average", "name", "compression", "op", "prescale_factor", "postscale_factor", "process_set")
_SCATTER = ("name", "compression", "op", "process_set", "prescale_factor", "postscale_factor")
ARGUMENTS = {
    "allreduce": _REDUCTION,
    "allgather": ("name", "process_set"),
    "broadcast": ("root_rank", "name", "process_set"),
    "reducescatter": _SCATTER,
    "alltoall": ("splits", "name", "process_set"),
}
"""What may stand behind the tensor. ``compression`` is for the forms that wait and give new tensors."""

FORMS = {
    "allreduce": ("", "_", "_async", "_async_", "grouped", "grouped_", "grouped_async", "grouped_async_"),
    "allgather": ("", "_async", "grouped", "grouped_async"),
    "broadcast": ("", "_", "_async", "_async_"),
    "reducescatter": ("", "_async", "grouped", "grouped_async"),
    "alltoall": ("", "_async"),
}
COLLECTIVES = [
    (f"grouped_{kind}{form.removeprefix('grouped')}" if form.startswith("grouped") else kind + form, kind)
    for kind, forms in FORMS.items()
    for form in forms
]


def ones(under_test: BindingUnderTest, *shape: int, dtype: DType = DType.F32) -> Any:
    return under_test.tensor(np.ones(shape), dtype)


def works(under_test: BindingUnderTest) -> bool:
    """Whether all ranks, called alike, get the sum of ones."""
    hvd = under_test.hvd
    return bool(under_test.values(hvd.allreduce(ones(under_test), op=hvd.Sum)) == hvd.size())


# -- names and groups -------------------------------------------------------------------------------------------------


def names(name: str) -> list[str]:
    under_test, problems = binding(name), Problems()
    hvd = under_test.hvd
    for kind in ("allreduce", "allgather", "reducescatter"):
        problems.expect(getattr(hvd, f"grouped_{kind}")([]) == [], f"empty group of {kind}")
    if "async" in under_test.lacks:
        return problems
    named = [f"t{i}" for i in range(6)]

    def sums(handles: list[Any]) -> list[float]:
        return [float(under_test.values(hvd.synchronize(handle))[0]) for handle in handles]

    def start(number: int, of: str | None = None) -> Any:
        return hvd.allreduce_async(under_test.tensor(np.full(3, number), DType.F32), name=of, op=hvd.Sum)

    expected = [float(i * hvd.size()) for i in range(6)]
    order = named if hvd.rank() % 2 == 0 else named[::-1]
    by_name = {of: start(int(of[1:]), of) for of in order}
    problems.expect(sums([by_name[of] for of in named]) == expected, "named, in any order")
    handles = [start(i) for i in range(6)]
    problems.expect(sums(handles) == expected, "anonymous, in order")
    problems.expect(all(hvd.poll(handle) for handle in handles), "poll after synchronize")
    problems.expect(hvd.synchronize(handles[0]) is hvd.synchronize(handles[0]), "synchronize twice")
    for kind in ("allreduce", "allgather", "reducescatter"):
        problems.expect(
            hvd.synchronize(getattr(hvd, f"grouped_{kind}_async")([])) == [], f"empty group of {kind}"
        )
    kept = [hvd.allreduce_async(ones(under_test, 1000), op=hvd.Sum) for _ in range(20)]
    problems.expect(sums(kept) == [float(hvd.size())] * 20, "tensors that only the handle keeps")
    return problems


def objects(name: str) -> list[str]:
    under_test, problems = binding(name), Problems()
    hvd = under_test.hvd
    mine = {"rank": hvd.rank(), "text": "x" * 1000 * hvd.rank()}
    every = hvd.allgather_object(mine)
    problems.expect([each["rank"] for each in every] == list(range(hvd.size())), every)
    for root in range(hvd.size()):
        found = hvd.broadcast_object(mine, root, name="an object")
        problems.expect(found["rank"] == root and len(found["text"]) == 1000 * root, found)
        problems.expect((found is mine) == (root == hvd.rank()), "the root keeps its own")
    return problems


def process_sets(name: str) -> list[str]:
    under_test, problems = binding(name), Problems()
    hvd = under_test.hvd
    rank = hvd.rank()
    some = hvd.add_process_set([0, 2])
    if rank == 1:
        calls: dict[str, Callable[[], object]] = {
            "allreduce": lambda: hvd.allreduce(ones(under_test), process_set=some),
            "grouped": lambda: hvd.grouped_allreduce([ones(under_test)], process_set=some),
        }
        for case, call in calls.items():
            with problems.refused(case, InvalidRequestError, "process set"):
                call()
    else:
        with problems.of("in a set"):
            mine = under_test.tensor(np.full(2, rank), DType.F32)
            values = under_test.values(hvd.allreduce(mine, op=hvd.Sum, process_set=some))
            problems.expect(values.tolist() == [2.0, 2.0], values)
            gathered = hvd.allgather(mine, process_set=some)
            problems.expect(under_test.values(gathered).tolist() == [0, 0, 2, 2], "gathered")
            if "async" not in under_test.lacks:
                handle = hvd.allgather_async(mine, process_set=some)
                problems.expect(
                    under_test.values(hvd.synchronize(handle)).tolist() == [0, 0, 2, 2], "gathered async"
                )
            values = under_test.values(hvd.broadcast(mine, 2, process_set=some))
            problems.expect(values.tolist() == [2.0, 2.0], "the root is a rank of the world")
            output = hvd.grouped_reducescatter([mine], op=hvd.Sum, process_set=some)[0]
            problems.expect(under_test.values(output).tolist() == [2.0], "scattered")
            problems.expect(
                hvd.broadcast_object(rank, 2, process_set=some) == 2, "object from the set's last"
            )
        with problems.refused("root outside", InvalidRequestError, "root 1 is not in process set"):
            hvd.broadcast(ones(under_test), 1, process_set=some)
    hvd.remove_process_set(some)
    with problems.refused("removed", InvalidRequestError, "is not registered; call hvd.add_process_set(...)"):
        hvd.allreduce(ones(under_test), process_set=some)
    problems.expect(works(under_test), "afterwards")
    return problems


@pytest.mark.parametrize("function", [names, objects], ids=lambda function: function.__name__)
def test_arguments(world: World, function: Any) -> None:
    world.check(function)


def test_process_sets(three: World) -> None:
    three.check(process_sets)


# -- refusals ---------------------------------------------------------------------------------------------------------

Case = tuple[Callable[[], Any], type[Exception], str]


def refusals(under_test: BindingUnderTest) -> dict[str, Case]:
    """Return calls with a wrong argument, the class of the error, and its text or a part of it."""
    hvd, one = under_test.hvd, ones(under_test, 3)
    whole = ones(under_test, 3, dtype=DType.I32)
    listed = "A grouped collective takes a list of tensors, not one tensor."
    operators = "give hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max or hvd.Product."
    cases: dict[str, Case] = {
        "op": (lambda: hvd.allreduce(one, op=17), InvalidRequestError, f"op=17 is no reduction operator; {operators}"),
        "op to scatter": (lambda: hvd.reducescatter(one, op=17), InvalidRequestError, "op=17 is no"),
        "adasum of integers": (lambda: hvd.allreduce(whole, op=hvd.Adasum), UnsupportedError, "floating-point tensors, not int32"),
        "adasum in parts": (lambda: hvd.reducescatter(one, op=hvd.Adasum), UnsupportedError, "depends on the whole tensor"),
        "bool sum": (
            lambda: hvd.allreduce_async(under_test.tensor(np.ones(2), DType.BOOL), op=hvd.Sum),
            UnsupportedError,
            "allreduce of bool tensors can't sum; use Min (true where all ranks are true) or Max",
        ),
        "one tensor to gather": (lambda: hvd.grouped_allgather(one), InvalidRequestError, listed),
        "one tensor to reduce": (lambda: hvd.grouped_allreduce_async(one), InvalidRequestError, listed),
        "one tensor in place": (lambda: hvd.grouped_allreduce_(one), InvalidRequestError, listed),
        "one tensor to scatter": (lambda: hvd.grouped_reducescatter_async(one), InvalidRequestError, listed),
        "half a group": (
            lambda: hvd.grouped_allreduce([one, under_test.tensor(np.ones(2), DType.BOOL)], op=hvd.Sum),
            UnsupportedError,
            "bool",
        ),
        "splits": (
            lambda: hvd.alltoall(one, splits=[1.5]),
            InvalidRequestError,
            "splits= takes a one-dimensional tensor or a list of integers, not [1.5].",
        ),
        "negative splits": (
            lambda: hvd.alltoall_async(one, splits=[-1]),
            InvalidRequestError,
            "splits= counts rows, which can't be negative: [-1].",
        ),
        "sum of splits": (lambda: hvd.alltoall(one, splits=[9] * hvd.size()), InvalidRequestError, "add up to 3 rows"),
        "root": (lambda: hvd.broadcast(one, 99), InvalidRequestError, "root 99 is not in process set 0; its ranks are"),
        "root in place": (lambda: hvd.broadcast_async_(one, 99), InvalidRequestError, "root 99 is not in"),
        "root type": (
            lambda: hvd.broadcast(one, "0"),
            InvalidRequestError,
            "root_rank takes the number of a rank, not '0'.",
        ),
        "object's root": (lambda: hvd.broadcast_object(1, 99), InvalidRequestError, "root 99 is not in"),
        "process set": (
            lambda: hvd.allreduce(one, process_set="all"),
            InvalidRequestError,
            "process_set= takes a hvd.ProcessSet, not str.",
        ),
        "unregistered set": (
            lambda: hvd.allgather(one, process_set=hvd.ProcessSet([0])),
            InvalidRequestError,
            "is not registered; call hvd.add_process_set(...) with it on every rank first.",
        ),
        "handle": (
            lambda: hvd.synchronize(3),
            InvalidRequestError,
            "Expected the handle that an *_async function returned, not int.",
        ),
        "polled handle": (lambda: hvd.poll(None), InvalidRequestError, "not NoneType."),
    }  # fmt: skip
    if "async" in under_test.lacks:
        asynchronous = ["bool sum", "one tensor to reduce", "one tensor in place", "one tensor to scatter"]
        asynchronous += ["negative splits", "root in place", "handle", "polled handle"]
        for case in asynchronous:
            del cases[case]
    if "adasum" in under_test.lacks:
        del cases["adasum of integers"]
    wrong, text = under_test.not_a_tensor
    for form in ("allreduce", "allgather_async", "reducescatter", "alltoall"):
        if not hasattr(hvd, form):
            continue
        kind = InvalidRequestError if "takes" in text else UnsupportedError
        cases[f"no tensor: {form}"] = (partial(getattr(hvd, form), wrong), kind, text)
    for case, (tensor, way_out) in under_test.unsupported().items():
        cases[case] = (partial(hvd.allgather, tensor), UnsupportedError, way_out)
    if not under_test.scalars_are_rows:
        for form in ("reducescatter", "reducescatter_async", "alltoall", "alltoall_async"):
            if not hasattr(hvd, form):
                continue
            kind_name = form.removesuffix("_async")
            cases[f"0-d {form}"] = (
                partial(getattr(hvd, form), ones(under_test)),
                InvalidRequestError,
                f"{kind_name} splits dimension 0, which a 0-d tensor does not have.",
            )
    if "average" not in under_test.lacks:
        cases["average and op"] = (
            lambda: hvd.allreduce(one, average=True, op=hvd.Sum),
            InvalidRequestError,
            "op= replaces average=; give only op=.",
        )
    return cases


def refused(name: str) -> list[str]:
    under_test, problems = binding(name), Problems()
    for case, (call, kind, text) in refusals(under_test).items():
        with problems.refused(case, kind, text):
            call()
        problems.expect(works(under_test), f"{case}: something was sent")
    return problems


def test_wrong_arguments_are_refused_and_nothing_is_sent(world: World) -> None:
    world.check(refused)


def average(name: str) -> list[str]:
    under_test, problems = binding(name), Problems()
    hvd = under_test.hvd
    mine = under_test.tensor(np.array(hvd.rank()), DType.F32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mean = hvd.allreduce(mine, average=True)
        total = hvd.grouped_allreduce([mine], average=False)[0]
    sum_of_ranks = hvd.size() * (hvd.size() - 1) / 2
    problems.expect(float(under_test.values(mean)) == sum_of_ranks / hvd.size(), mean)
    problems.expect(float(under_test.values(total)) == sum_of_ranks, total)
    at = [(w.category, w.filename) for w in caught]
    problems.expect(at == [(DeprecationWarning, __file__)] * 2, f"warnings: {at}")
    return problems


def test_average_is_deprecated(three: World) -> None:
    if "average" in binding(three.name).lacks:
        pytest.skip(f"{three.name} has no average=")
    three.check(average)


# -- without ranks ----------------------------------------------------------------------------------------------------


HERE = [name for name in BINDINGS if name not in ONLY_IN_RANKS]
"""Bindings that this process may import."""


@pytest.mark.parametrize("name", HERE)
def test_nothing_works_before_init(name: str) -> None:
    nothing_works(binding(name))


def nothing_works(under_test: BindingUnderTest) -> None:
    """Check that every collective and query reports that ``init()`` was not called."""
    hvd = under_test.hvd
    for call in (
        lambda: hvd.allreduce(ones(under_test)),
        lambda: hvd.grouped_allgather([ones(under_test, 1)]),
        lambda: hvd.broadcast(ones(under_test), 0),
        lambda: hvd.allgather_object(1),
        lambda: hvd.broadcast_object(1),
        hvd.rank,
    ):
        with pytest.raises(NotInitializedError, match=r"before hvd\.init\(\)"):
            call()


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize(("function", "kind"), COLLECTIVES, ids=[function for function, _ in COLLECTIVES])
def test_signatures_and_docstrings(name: str, function: str, kind: str) -> None:
    """Horovod's arguments, in its order, but for those that the binding lacks; each explained."""
    under_test = binding(name)
    call = getattr(under_test.hvd, function)
    tensors = "tensors" if function.startswith("grouped_") else "tensor"
    lacks = set(under_test.lacks)
    if function.endswith(("_", "_async")):
        lacks.add("compression")
    expected = [tensors, *(argument for argument in ARGUMENTS[kind] if argument not in lacks)]
    parameters = list(inspect.signature(call).parameters)
    assert sorted(parameters) == sorted(expected)
    if name != "numpy":  # whose order is older: scale factors stand before the process set
        assert parameters == expected
    text = call.__doc__
    for section in (*(f"\n    {parameter}: " for parameter in parameters), "\nReturns:\n", "\nRaises:\n"):
        assert text.count(section) == 1, section
    assert "After a failed collective" in text
