"""Results of every operation in every form, compared with the same arithmetic in numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from conformance.bindings.conftest import World
from conformance.bindings.harness import BindingUnderTest, Problems, Values, binding, values_of
from hvdlab.collectives.types import DType, ReduceOp

SHAPES = [(), (0,), (1,), (17,), (3, 0, 2), (5, 3), (70_000,)]  # the last one goes over the data plane
ROUNDING = {DType.BF16: 2.0**-8, DType.F16: 2.0**-11}
"""Relative error of a number that was rounded once."""
Make = Callable[[], list[Any]]

REFERENCES: dict[ReduceOp, Callable[..., Values]] = {
    ReduceOp.SUM: np.add.reduce,
    ReduceOp.MIN: np.minimum.reduce,
    ReduceOp.MAX: np.maximum.reduce,
    ReduceOp.PRODUCT: np.multiply.reduce,
    ReduceOp.AVERAGE: lambda each: np.mean(each, axis=0),
}


def forms(
    hvd: Any, kind: str, make: Make, *arguments: Any, **keywords: Any
) -> Iterator[tuple[str, list[Any]]]:
    """Yield each form of a collective with its result for the tensors that ``make`` makes."""
    given = make()
    call, start = getattr(hvd, kind), getattr(hvd, f"{kind}_async", None)
    yield "sync", [call(tensor, *arguments, **keywords) for tensor in given]
    if start is not None:
        handles = [start(tensor, *arguments, **keywords) for tensor in given]
        yield "async", [hvd.synchronize(handle) for handle in handles]
    if hasattr(hvd, f"grouped_{kind}"):
        yield "grouped", getattr(hvd, f"grouped_{kind}")(given, *arguments, **keywords)
    if hasattr(hvd, f"grouped_{kind}_async"):
        handle = getattr(hvd, f"grouped_{kind}_async")(iter(given), *arguments, name="group", **keywords)
        yield "grouped async", hvd.synchronize(handle)
    yield "untouched", given


def forms_in_place(
    hvd: Any, kind: str, make: Make, *arguments: Any, **keywords: Any
) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield each form in place, with its result and its argument."""
    given = make()
    yield "in place", [getattr(hvd, f"{kind}_")(t, *arguments, **keywords) for t in given], given
    if hasattr(hvd, f"grouped_{kind}_"):
        given = make()
        yield "grouped in place", getattr(hvd, f"grouped_{kind}_")(given, *arguments, **keywords), given
    if not hasattr(hvd, f"{kind}_async_"):
        return
    given = make()
    handles = [getattr(hvd, f"{kind}_async_")(t, *arguments, **keywords) for t in given]
    yield "async in place", [hvd.synchronize(handle) for handle in reversed(handles)][::-1], given
    if hasattr(hvd, f"grouped_{kind}_async_"):
        given = make()
        handle = getattr(hvd, f"grouped_{kind}_async_")(given, *arguments, **keywords)
        yield "grouped async in place", hvd.synchronize(handle), given


def compare(
    problems: Problems,
    under_test: BindingUnderTest,
    case: object,
    outputs: list[Any],
    expected: list[Values],
    dtypes: list[DType],
) -> None:
    """Outputs must have these values, shapes and element types."""
    problems.expect(len(outputs) == len(expected), f"{case}: {len(outputs)} outputs")
    for output, values, dtype in zip(outputs, expected, dtypes, strict=False):
        found = under_test.values(output)
        rounding = ROUNDING.get(dtype, 1e-6)
        same = found.shape == values.shape and np.allclose(found, values, rtol=rounding, atol=0)
        problems.expect(same, f"{case} of {dtype.label}{list(values.shape)}: {found} is not {values}")
        problems.expect(under_test.dtype(output) is dtype, f"{case}: {under_test.dtype(output)} for {dtype}")


def try_all(
    name: str,
    kind: str,
    mine: list[tuple[Values, DType]],
    expected: list[Values],
    *arguments: Any,
    in_place: bool = False,
    pairs: bool = False,
    **keywords: Any,
) -> list[str]:
    """Try every form of a collective on these values of this rank."""
    under_test, problems = binding(name), Problems()
    hvd, dtypes = under_test.hvd, [dtype for _, dtype in mine]

    def make() -> list[Any]:
        return [under_test.tensor(values, dtype) for values, dtype in mine]

    case = f"{kind} {arguments} {keywords}"
    with problems.of(case):
        for form, outputs in forms(hvd, kind, make, *arguments, **keywords):
            if form == "untouched":
                compare(problems, under_test, f"{case}, input", outputs, [v for v, _ in mine], dtypes)
            else:
                taken = [output[0] for output in outputs] if pairs else outputs
                compare(problems, under_test, f"{case}, {form}", taken, expected, dtypes)
        if in_place and "in place" not in under_test.lacks:
            for form, outputs, given in forms_in_place(hvd, kind, make, *arguments, **keywords):
                compare(problems, under_test, f"{case}, {form}", outputs, expected, dtypes)
                same = all(one is other for one, other in zip(outputs, given, strict=True))
                problems.expect(same, f"{case}, {form}: not the given tensors")
    return problems


def numbers(under_test: BindingUnderTest) -> list[DType]:
    return [dtype for dtype in under_test.dtypes if dtype is not DType.BOOL]


# -- on the ranks -----------------------------------------------------------------------------------------------------


def allreduce(name: str, op: ReduceOp) -> list[str]:
    under_test = binding(name)
    rank, size = under_test.hvd.rank(), under_test.hvd.size()
    cases = [((5, 3), dtype) for dtype in numbers(under_test)] + [(shape, DType.F32) for shape in SHAPES]
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        cases.append(((5, 3), DType.BOOL))

    def values(rank: int, number: int, shape: tuple[int, ...], dtype: DType) -> Values:
        drawn = values_of(rank, shape, number)
        return np.minimum(drawn, 1) if dtype is DType.BOOL else drawn

    mine, expected = [], []
    for number, (shape, dtype) in enumerate(cases):
        mine.append((values(rank, number, shape, dtype), dtype))
        result = np.asarray(REFERENCES[op]([values(r, number, shape, dtype) for r in range(size)]))
        expected.append(result if dtype.is_floating else np.trunc(result))
    return try_all(name, "allreduce", mine, expected, op=op, in_place=True)


def scales(name: str) -> list[str]:
    under_test = binding(name)
    rank, size = under_test.hvd.rank(), under_test.hvd.size()
    each = [values_of(r, (6,)) for r in range(size)]
    mine = [(each[rank], DType.F32), (each[rank], DType.F64)]
    summed = np.add.reduce(each)
    factors: dict[str, Any] = {"prescale_factor": 0.5, "postscale_factor": 4.0}
    return [
        *try_all(name, "allreduce", mine, [summed / size] * 2, in_place=True),
        *try_all(name, "allreduce", mine, [summed / size * 2] * 2, in_place=True, **factors),
        *try_all(name, "allreduce", mine, [summed * 2] * 2, op=ReduceOp.SUM, **factors),
    ]


def layouts(name: str) -> list[str]:
    """Check tensors that are staged; the bytes between the elements of a strided one stay."""
    under_test, problems = binding(name), Problems()
    hvd = under_test.hvd
    rank, size = hvd.rank(), hvd.size()
    each = [values_of(r, (4, 6)) for r in range(size)]
    for layout, given in under_test.layouts(each[rank]).items():
        with problems.of(layout):
            for form, outputs in forms(hvd, "allreduce", partial(list, [given]), op=ReduceOp.SUM):
                wanted = each[rank] if form == "untouched" else np.add.reduce(each)
                compare(problems, under_test, f"{layout}, {form}", outputs, [wanted], [DType.F32])
            gathered = hvd.allgather(given)
            compare(
                problems, under_test, f"{layout} gathered", [gathered], [np.concatenate(each)], [DType.F32]
            )
    if "in place" in under_test.lacks:
        return problems
    for kind, arguments, expected in (
        ("allreduce", (), np.add.reduce(each)),
        ("broadcast", (size - 1,), each[-1]),
    ):
        keywords = {"op": ReduceOp.SUM} if kind == "allreduce" else {}
        for form in ("_", "_async_"):
            for layout, given in under_test.layouts(each[rank]).items():
                with problems.of(f"{kind}{form} {layout}"):
                    result = getattr(hvd, kind + form)(given, *arguments, **keywords)
                    result = hvd.synchronize(result) if form == "_async_" else result
                    problems.expect(result is given, f"{kind}{form} {layout}: not the given tensor")
                    compare(problems, under_test, f"{kind}{form} {layout}", [given], [expected], [DType.F32])
    return problems


def allgather(name: str) -> list[str]:
    under_test = binding(name)
    rank, size = under_test.hvd.rank(), under_test.hvd.size()
    mine, expected = [], []
    for number, dtype in enumerate(numbers(under_test)):
        for rows in (lambda r: (r, 3), lambda r: (2,), lambda r: (r + 1, 0, 2), lambda r: (20_000 + r,)):
            each = [values_of(r, rows(r), number) for r in range(size)]
            mine.append((each[rank], dtype))
            expected.append(np.concatenate(each))
    mine.append((np.array(float(rank)), DType.F32))
    expected.append(np.arange(size, dtype=np.float64))
    return try_all(name, "allgather", mine, expected)


def broadcast(name: str) -> list[str]:
    under_test, problems = binding(name), []
    rank, size = under_test.hvd.rank(), under_test.hvd.size()
    cases = [((5, 3), dtype) for dtype in numbers(under_test)] + [(shape, DType.F32) for shape in SHAPES]
    for root in range(size):
        mine = [(values_of(rank, shape, number), dtype) for number, (shape, dtype) in enumerate(cases)]
        expected = [values_of(root, shape, number) for number, (shape, _) in enumerate(cases)]
        problems += try_all(name, "broadcast", mine, expected, root, in_place=True)
    return problems


def reducescatter(name: str) -> list[str]:
    under_test, problems = binding(name), []
    rank, size = under_test.hvd.rank(), under_test.hvd.size()
    for op, reference in REFERENCES.items():
        mine, expected = [], []
        for number, dtype in enumerate(numbers(under_test)):
            for shape in ((7, 2), (1,), (0, 4), (size * 2, 3)):
                each = [values_of(r, shape, number) for r in range(size)]
                whole = np.asarray(reference(each))
                mine.append((each[rank], dtype))
                part = np.array_split(whole, size)[rank]  # it gives the first ones more, too
                expected.append(part if dtype.is_floating else np.trunc(part))
        problems += try_all(name, "reducescatter", mine, expected, op=op)
    return problems


def alltoall(name: str) -> list[str]:
    under_test, problems = binding(name), Problems()
    hvd = under_test.hvd
    rank, size = hvd.rank(), hvd.size()
    splits = [[(r + to) % 3 for to in range(size)] for r in range(size)]
    for dtype in numbers(under_test):
        each = [values_of(r, (sum(splits[r]), 2)) for r in range(size)]
        pieces = [np.split(each[r], np.cumsum(splits[r])[:-1])[rank] for r in range(size)]
        mine = under_test.tensor(each[rank], dtype)
        with problems.of(f"alltoall of {dtype.label}"):
            for given in (splits[rank], np.array(splits[rank])):
                found = {"sync": hvd.alltoall(mine, given)}
                if "async" not in under_test.lacks:
                    found["async"] = hvd.synchronize(hvd.alltoall_async(mine, given, name="ragged"))
                for form, (output, counts) in found.items():
                    compare(problems, under_test, form, [output], [np.concatenate(pieces)], [dtype])
                    received = [splits[r][rank] for r in range(size)]
                    problems.expect(under_test.counts(counts) == received, f"{form}: {counts}")
            even = [values_of(r, (2 * size, 3)) for r in range(size)]
            whole = np.concatenate([np.split(even[r], size)[rank] for r in range(size)])
            if "async" in under_test.lacks:
                output = hvd.alltoall(under_test.tensor(even[rank], dtype))
                compare(problems, under_test, "even", [output], [whole], [dtype])
                continue
            output, counts = hvd.synchronize(hvd.alltoall_async(under_test.tensor(even[rank], dtype)))
            compare(problems, under_test, "even", [output], [whole], [dtype])
            problems.expect(under_test.counts(counts) == [2] * size, f"even: {counts}")
    return problems


def scalars(name: str) -> list[str]:
    """Check that where rows are divided a 0-d tensor is one row, or refused."""
    under_test, problems = binding(name), Problems()
    hvd = under_test.hvd
    given = under_test.tensor(np.array(2.0), DType.F32)
    if not under_test.scalars_are_rows:
        return problems  # see the refusals
    with problems.of("0-d"):
        rows = [1] if hvd.rank() == 0 else [0]
        output = hvd.reducescatter(given, op=ReduceOp.SUM)
        problems.expect(list(under_test.values(output).shape) == rows, output)
        if hvd.size() == 1:
            problems.expect(under_test.values(hvd.alltoall(given)[0]).tolist() == [2.0], "alltoall")
    return problems


def gradients(name: str) -> list[str]:
    """Horovod's conventions: see hvdlab.bindings.gradients."""
    under_test, problems = binding(name), Problems()
    hvd = under_test.hvd
    rank, size = hvd.rank(), hvd.size()
    mine = under_test.tensor(values_of(rank, (2, 3)) + rank, DType.F64)

    def weight(of: int, rows: int) -> Values:
        return values_of(of, (rows, 3), 7) + 1

    summed, gathered = (np.add.reduce([weight(r, rows) for r in range(size)]) for rows in (2, 2 * size))
    exchanged = under_test.tensor(values_of(rank, (size, 3)), DType.F64)
    cases: dict[str, tuple[Callable[..., Any], Any, int, Values]] = {
        "sum": (lambda t: hvd.allreduce(t, op=hvd.Sum), mine, 2, summed),
        "average": (lambda t: hvd.allreduce(t, op=hvd.Average), mine, 2, summed / size),
        "broadcast": (lambda t: hvd.broadcast(t, 0), mine, 2, summed / size * (rank == 0)),
        "allgather": (hvd.allgather, mine, 2 * size, gathered[2 * rank : 2 * rank + 2] / size),
        "alltoall": (hvd.alltoall, exchanged, size, np.stack([weight(r, size)[rank] for r in range(size)])),
        "grouped": (lambda t: hvd.grouped_allreduce([t], op=hvd.Sum), mine, 2, summed),
    }
    for case, (function, tensor, rows, expected) in cases.items():
        with problems.of(case):
            (found,) = under_test.gradients(function, [tensor], [weight(rank, rows)])
            problems.expect(np.allclose(found, expected), f"{case}: {found} is not {expected}")
    return problems


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", REFERENCES, ids=lambda op: op.name.lower())
def test_allreduce(world: World, op: ReduceOp) -> None:
    world.check(allreduce, op)


@pytest.mark.parametrize(
    "function",
    [scales, layouts, allgather, broadcast, reducescatter, alltoall, scalars],
    ids=lambda function: function.__name__,
)
def test_values(world: World, function: Any) -> None:
    world.check(function)


def test_gradients(world: World) -> None:
    if "gradients" in binding(world.name).lacks:
        pytest.skip(f"{world.name} does not differentiate")
    world.check(gradients)
