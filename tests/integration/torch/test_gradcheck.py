"""Gradients of collectives against central differences, on real ranks: every element of every rank is nudged in turn.

The differences are those of the sum of the ranks' losses. By Horovod's conventions, gradients of allgather and broadcast are those
of the losses' mean, and the reducescatter of a sum or an average multiplies them by the number of ranks (see ``factor``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import hvdlab.torch as hvd
from support.ranks.resident import Ranks

Tensors = list[torch.Tensor]
Call = Callable[..., Sequence[Any]]
"""Takes tensors and a dict of keyword arguments, and returns tensors. mypy takes no lambda with defaults where the parameters are typed."""
STEP = 1e-6  # of the central difference
SCALES: dict[str, Any] = {"prescale_factor": 0.5, "postscale_factor": -3.0}
OPERATORS = {
    "average": hvd.Average, "sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product, "adasum": hvd.Adasum,
}  # fmt: skip

CALLS: dict[str, Call] = {
    **{f"allreduce {n}": lambda ts, kw, op=op: [hvd.allreduce(ts[0], op=op, **kw)] for n, op in OPERATORS.items()},
    **{
        f"scaled allreduce {n}": lambda ts, kw, op=op: [hvd.allreduce(ts[0], op=op, **SCALES, **kw)]
        for n, op in OPERATORS.items()
    },
    **{
        f"grouped_allreduce {n}": lambda ts, kw, op=op: hvd.grouped_allreduce(ts, op=op, name="g", **SCALES, **kw)
        for n, op in OPERATORS.items()
    },
    **{
        f"reducescatter {n}": lambda ts, kw, op=op: [hvd.reducescatter(ts[0], op=op, **SCALES, **kw)]
        for n, op in OPERATORS.items()
        if n != "adasum"
    },
    "grouped_reducescatter sum": lambda ts, kw: hvd.grouped_reducescatter(ts, op=hvd.Sum, **SCALES, **kw),
    "grouped_reducescatter max": lambda ts, kw: hvd.grouped_reducescatter(ts, op=hvd.Max, name="m", **kw),
    "allgather": lambda ts, kw: [hvd.allgather(ts[0], **kw)],
    "allgather ragged": lambda ts, kw: [hvd.allgather(ts[0], name="ragged", **kw)],
    "grouped_allgather": lambda ts, kw: hvd.grouped_allgather(ts, **kw),
    "broadcast": lambda ts, kw: [hvd.broadcast(ts[0], 2 if hvd.size() > 2 else 1, **kw)],
    "alltoall": lambda ts, kw: [hvd.alltoall(ts[0], **kw)],
    "alltoall ragged": lambda ts, kw: [hvd.alltoall(ts[0], splits=splits(kw), name="splits", **kw)[0]],
}  # fmt: skip
RAGGED = ("allgather ragged", "grouped_allgather")


def members(kw: dict[str, Any]) -> int:
    return kw["process_set"].size() if kw else hvd.size()


def position(kw: dict[str, Any]) -> int:
    return kw["process_set"].rank() if kw else hvd.rank()


def splits(kw: dict[str, Any]) -> list[int]:
    return [(position(kw) + 2 * i) % 3 for i in range(members(kw))]


def factor(case: str, size: int) -> float:
    """Return Horovod's gradient, divided by the derivative of the sum of losses."""
    if "allgather" in case or case == "broadcast":
        return 1 / size
    return size if "reducescatter" in case and case.rpartition(" ")[2] in ("sum", "average") else 1.0


def inputs(case: str, kw: dict[str, Any]) -> Tensors:
    generator = torch.Generator().manual_seed(position(kw))
    rows = 1 + position(kw) if case in RAGGED else members(kw) if "alltoall" in case else 3
    if case == "alltoall ragged":
        rows = sum(splits(kw))
    shapes: list[tuple[int, ...]] = [(rows, 2), (rows,)]
    if "grouped_allreduce" in case:
        shapes.append(())
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in (shapes if "grouped" in case else shapes[:1])
    ]


def loss(outputs: Sequence[torch.Tensor], kw: dict[str, Any]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(90 + position(kw))
    terms = [
        (torch.randn(o.shape, generator=generator, dtype=torch.float64) * (o + o * o)).sum() for o in outputs
    ]
    return torch.stack(terms).sum()


def _check(case: str, ranks: list[int] | None) -> tuple[int, list[str]]:
    kw: dict[str, Any] = {} if ranks is None else {"process_set": hvd.add_process_set(ranks)}
    checked = _check_members(case, kw) if ranks is None or hvd.rank() in ranks else (0, [])
    if ranks is not None:
        hvd.remove_process_set(kw["process_set"])
    return checked


def _check_members(case: str, kw: dict[str, Any]) -> tuple[int, list[str]]:
    """Return the number of elements that were checked, and texts on those that are wrong."""
    given = inputs(case, kw)
    value = loss(CALLS[case](given, kw), kw)
    value.backward()
    elements = [tensor.detach().reshape(-1) for tensor in given]
    counts = hvd.allgather(torch.tensor([sum(len(e) for e in elements)]), **kw).tolist()
    places = [(tensor, i) for tensor, flat in enumerate(elements) for i in range(len(flat))]
    checked, wrong = 0, []
    for nudged, count in enumerate(counts):
        for number in range(count):
            totals = []
            for step in (STEP, -2 * STEP, STEP):  # to x + STEP, to x - STEP, and back to x
                if nudged == position(kw):
                    tensor, i = places[number]
                    elements[tensor][i] += step
                with torch.no_grad():
                    totals.append(hvd.allreduce(loss(CALLS[case](given, kw), kw), op=hvd.Sum, **kw).item())
            if nudged == position(kw):
                gradient = given[tensor].grad
                ours = float("nan") if gradient is None else gradient.reshape(-1)[i].item()
                numerical = (totals[0] - totals[1]) / (2 * STEP) * factor(case, members(kw))
                if ours != pytest.approx(numerical, rel=1e-5, abs=1e-6):
                    wrong.append(f"tensor {tensor} element {i}: {ours}, by differences {numerical}")
                checked += 1
    return checked, wrong


@pytest.mark.parametrize("case", CALLS)
def test_gradients_are_the_slopes(two_ranks: Ranks, case: str) -> None:
    for checked, wrong in two_ranks.run(_check, case, None):
        assert checked
        assert not wrong


@pytest.mark.parametrize("case", CALLS)
def test_gradients_in_a_process_set(four_ranks: Ranks, case: str) -> None:
    outcomes = four_ranks.run(_check, case, [0, 2, 3])
    assert [checked > 0 for checked, _ in outcomes] == [True, False, True, True]
    assert not any(wrong for _, wrong in outcomes)


def _second(op: str) -> tuple[list[float], list[float]]:
    """Return the second derivative of the sum over ranks of ``reduced ** 2`` along a direction: by autograd, and by
    differences."""
    generator = torch.Generator().manual_seed(hvd.rank())
    x, direction = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    x.requires_grad_()

    def gradient(at: torch.Tensor, again: bool) -> torch.Tensor:
        value = hvd.allreduce(at, op=OPERATORS[op], prescale_factor=0.7).pow(2).sum()
        return torch.autograd.grad(value, at, create_graph=again)[0]

    (second,) = torch.autograd.grad((gradient(x, True) * direction).sum(), x)
    # The Hessian is symmetric: its product with the direction is the gradient's change along the direction.
    up = gradient((x.detach() + STEP * direction).requires_grad_(), False)
    down = gradient((x.detach() - STEP * direction).requires_grad_(), False)
    return second.tolist(), ((up - down) / (2 * STEP)).tolist()


@pytest.mark.parametrize("op", OPERATORS)
def test_second_derivatives(two_ranks: Ranks, op: str) -> None:
    for ours, numerical in two_ranks.run(_second, op):
        assert ours == pytest.approx(numerical, rel=1e-5, abs=1e-6)


def _ties() -> tuple[list[float], list[float]]:
    tied = torch.tensor([2.0, float(hvd.rank())], requires_grad=True)
    hvd.allreduce(tied, op=hvd.Max).sum().backward()
    zeros = torch.tensor([0.0, float(hvd.rank())], requires_grad=True)
    hvd.allreduce(zeros, op=hvd.Product).sum().backward()
    assert tied.grad is not None
    assert zeros.grad is not None
    return tied.grad.tolist(), zeros.grad.tolist()


def test_ties_share_the_gradient_and_zeros_have_one(two_ranks: Ranks) -> None:
    assert two_ranks.run(_ties) == [([1.0, 0.0], [0.0, 2.0]), ([1.0, 2.0], [0.0, 0.0])]
