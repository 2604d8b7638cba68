"""Gradients of collectives, against differentiating the same arithmetic in one process.

The reference runs all ranks in one graph, with one loss per rank. With Horovod's conventions a rank's gradient is that
of the *sum* of the losses for allreduce and alltoall, and that of their *mean* for allgather and broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

import hvdlab.torch as hvd
from support.ranks.resident import Ranks

Tensors = list[torch.Tensor]


def inputs(rank: int, size: int, case: str) -> Tensors:
    generator = torch.Generator().manual_seed(rank)
    shapes: dict[str, list[tuple[int, ...]]] = {
        "allgather": [(rank + 1, 2)],
        "allgather 0-d": [()],
        "grouped_allgather": [(rank + 1, 2), (3 * rank, 1)],
        "grouped_allreduce": [(3,), (2, 2), ()],
        "grouped_reducescatter": [(5, 2), (size,)],
        "alltoall splits": [(sum((rank + i) % 3 for i in range(size)), 2)],
        "alltoall": [(2 * size, 2)],
    }
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes.get(case, [(5, 2)])
    ]


def weights(rank: int, outputs: Tensors) -> Tensors:
    """The loss of a rank is the sum of its outputs, squared and weighted by these, so that no two gradients are the same."""
    generator = torch.Generator().manual_seed(50 + rank)
    return [torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in outputs]


def loss(rank: int, outputs: Tensors) -> torch.Tensor:
    terms = [(w * o * o).sum() for w, o in zip(weights(rank, outputs), outputs, strict=True)]
    return torch.stack(terms).sum()


ON_RANKS: dict[str, Callable[[Tensors], Any]] = {
    "allreduce average": lambda ts: [hvd.allreduce(ts[0])],
    "allreduce sum": lambda ts: [hvd.allreduce(ts[0], op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)],
    "grouped_allreduce": lambda ts: hvd.grouped_allreduce(ts, name="group"),
    "allgather": lambda ts: [hvd.allgather(ts[0], name="ragged")],
    "allgather 0-d": lambda ts: [hvd.allgather(ts[0])],
    "grouped_allgather": lambda ts: hvd.grouped_allgather(ts),
    "broadcast": lambda ts: [hvd.broadcast(ts[0], 0)],
    "reducescatter average": lambda ts: [hvd.reducescatter(ts[0])],
    "reducescatter sum": lambda ts: [hvd.reducescatter(ts[0], op=hvd.Sum, prescale_factor=0.5)],
    "grouped_reducescatter": lambda ts: hvd.grouped_reducescatter(ts),
    "alltoall": lambda ts: [hvd.alltoall(ts[0])],
    "alltoall splits": lambda ts: [
        hvd.alltoall(ts[0], splits=[(hvd.rank() + i) % 3 for i in range(hvd.size())])[0]
    ],
}


def scattered(tensor: torch.Tensor, size: int) -> Tensors:
    base, more = divmod(tensor.shape[0], size)
    return list(tensor.split([base + (r < more) for r in range(size)]))


def exchanged(ts: Tensors, splits: list[list[int]]) -> Tensors:
    pieces = [t.split(s) for t, s in zip(ts, splits, strict=True)]
    return [torch.cat([p[me] for p in pieces]) for me in range(len(ts))]


def transposed(lists: list[Tensors]) -> list[Tensors]:
    return [list(column) for column in zip(*lists, strict=True)]


def in_one_process(case: str, given: list[Tensors]) -> tuple[list[Tensors], float]:
    """Return outputs of every rank, and the factor by which Horovod's gradient differs from that of the sum of
    losses."""
    size = len(given)
    firsts = [ts[0] for ts in given]
    match case:
        case "allreduce average":
            return [[cast(torch.Tensor, sum(firsts)) / size]] * size, 1.0
        case "allreduce sum":
            return [[cast(torch.Tensor, sum(firsts)) * 1.5]] * size, 1.0
        case "grouped_allreduce":
            return [[torch.stack(column).mean(0) for column in transposed(given)]] * size, 1.0
        case "allgather":
            return [[torch.cat(firsts)]] * size, 1 / size
        case "allgather 0-d":
            return [[torch.stack(firsts)]] * size, 1 / size
        case "grouped_allgather":
            return [[torch.cat(column) for column in transposed(given)]] * size, 1 / size
        case "broadcast":
            return [[firsts[0]]] * size, 1 / size
        case "reducescatter average":  # Horovod leaves out the division by the number of ranks
            return [[t] for t in scattered(torch.stack(firsts).mean(0), size)], float(size)
        case "reducescatter sum":  # and multiplies by it
            return [[t] for t in scattered(torch.stack(firsts).sum(0) * 0.5, size)], float(size)
        case "grouped_reducescatter":
            columns = [scattered(torch.stack(column).mean(0), size) for column in transposed(given)]
            return transposed(columns), float(size)
        case "alltoall":
            return [[t] for t in exchanged(firsts, [[2] * size] * size)], 1.0
        case "alltoall splits":
            splits = [[(rank + i) % 3 for i in range(size)] for rank in range(size)]
            return [[t] for t in exchanged(firsts, splits)], 1.0
    raise AssertionError(case)


def _gradients(case: str) -> tuple[Tensors, Tensors]:
    given = inputs(hvd.rank(), hvd.size(), case)
    outputs = list(ON_RANKS[case](given))
    loss(hvd.rank(), outputs).backward()
    gradients = [t.grad for t in given]
    assert all(g is not None for g in gradients)
    return [o.detach() for o in outputs], [g for g in gradients if g is not None]


@pytest.mark.parametrize("case", ON_RANKS)
def test_outputs_and_gradients(ranks: Ranks, case: str) -> None:
    given = [inputs(rank, ranks.size, case) for rank in range(ranks.size)]
    expected, factor = in_one_process(case, given)
    total = torch.stack([loss(rank, outputs) for rank, outputs in enumerate(expected)]).sum() * factor
    total.backward()
    for rank, (outputs, gradients) in enumerate(ranks.run(_gradients, case)):
        for output, reference in zip(outputs, expected[rank], strict=True):
            assert torch.allclose(output, reference.detach())
        for gradient, tensor in zip(gradients, given[rank], strict=True):
            reference = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            assert gradient.shape == reference.shape
            assert torch.allclose(gradient, reference), (rank, gradient, reference)


GROUPS: dict[str, Callable[[Tensors, Any], Tensors]] = {
    "grouped_allreduce": lambda ts, members: hvd.grouped_allreduce(ts, process_set=members),
    "grouped_allgather": lambda ts, members: hvd.grouped_allgather(ts, process_set=members),
    "grouped_reducescatter": lambda ts, members: hvd.grouped_reducescatter(ts, process_set=members),
    "grouped_allreduce sum": lambda ts, members: hvd.grouped_allreduce(ts, op=hvd.Sum, process_set=members),
    "grouped_reducescatter sum": lambda ts, members: hvd.grouped_reducescatter(
        ts, op=hvd.Sum, process_set=members
    ),
}


def _one_output_after_the_other(
    case: str, ranks: list[int] | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the gradients by a backward pass for each output, and those by one pass for all; nothing on a rank
    outside."""
    members = hvd.global_process_set if ranks is None else hvd.add_process_set(hvd.ProcessSet(ranks))
    pairs = []
    if members.included():
        each, whole = [inputs(hvd.rank(), hvd.size(), case.split()[0]) for _ in range(2)]
        outputs = list(GROUPS[case](each, members))
        for weight, output in zip(weights(hvd.rank(), outputs), outputs, strict=True):
            (weight * output * output).sum().backward()
        loss(hvd.rank(), list(GROUPS[case](whole, members))).backward()
        pairs = [(a.grad, b.grad) for a, b in zip(each, whole, strict=True)]
    if ranks is not None:
        hvd.remove_process_set(members)
    return pairs  # type: ignore[return-value]  # each has a gradient


@pytest.mark.parametrize("case", GROUPS)
@pytest.mark.parametrize("members", [None, [1, 3]], ids=["all", "process set"])
def test_each_output_of_a_group_has_its_own_backward_pass(
    four_ranks: Ranks, case: str, members: list[int] | None
) -> None:
    for rank, pairs in enumerate(four_ranks.run(_one_output_after_the_other, case, members)):
        assert bool(pairs) == (members is None or rank in members)
        for one_by_one, together in pairs:
            assert torch.allclose(one_by_one, together)
            assert together.abs().sum() > 0 or not together.numel()


def _second_derivative() -> float:
    x = torch.tensor(2.0, requires_grad=True)
    (first,) = torch.autograd.grad(hvd.allreduce(x, op=hvd.Sum) ** 3, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    return second.item()


def test_gradients_can_be_differentiated_again(ranks: Ranks) -> None:
    n = ranks.size
    # y = n x; the sum over ranks of dy³/dx is n·3y²·1; once more: n·(n·6y)
    assert ranks.run(_second_derivative) == [pytest.approx(n * n * 6 * (2.0 * n))] * n


def _untouched() -> list[bool]:
    leaf = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        quiet = hvd.allreduce(leaf)
    started = hvd.synchronize(hvd.allreduce_async(leaf))
    plain = hvd.allgather(torch.ones(2))
    counts = hvd.alltoall(torch.ones(hvd.size(), requires_grad=True), splits=[1] * hvd.size())[1]
    whole = hvd.allgather(leaf.detach().long())
    return [t.requires_grad for t in (quiet, started, plain, counts, whole)]


def test_outputs_require_gradients_only_where_they_have_them(two_ranks: Ranks) -> None:
    assert two_ranks.run(_untouched) == [[False] * 5] * 2


def _saved_then_overwritten() -> str:
    weight = torch.ones(3, requires_grad=True)
    squared = (weight * weight).exp()  # exp saves its result
    hvd.allreduce_(squared.detach())
    with pytest.raises(RuntimeError) as error:
        squared.sum().backward()
    return str(error.value)


def test_autograd_notices_what_was_reduced_in_place(two_ranks: Ranks) -> None:
    for text in two_ranks.run(_saved_then_overwritten):
        assert "inplace operation" in text
