"""Sparse COO tensors: their allreduce, and their use as gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hvdlab.torch as hvd
from support.ranks.resident import Ranks


def sparse(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return two entries at one place, and one at a place that only this rank has; rank 1 has no entries."""
    if rank == 1:
        return torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.long), torch.empty(0, 2, dtype=dtype), (6, 2), check_invariants=True
        )
    values = torch.tensor([[1.0, 2], [3, 4], [5, 6]]).to(dtype) * (rank + 1)
    return torch.sparse_coo_tensor(torch.tensor([[0, 0, 2 + rank]]), values, (6, 2), check_invariants=True)


def _reduce(op: Any, dtype: torch.dtype) -> list[tuple[torch.Tensor, bool, bool]]:
    given = sparse(hvd.rank(), dtype)
    called = hvd.sparse_allreduce_async(given, "called", op)
    waited = hvd.sparse_allreduce_async(given, name="waited", op=op)
    outputs = [called(), hvd.synchronize(waited), hvd.allreduce(given, op=op), called()]
    assert hvd.poll(called)
    return [(o.to_dense(), o.is_coalesced(), o.dtype is dtype) for o in outputs]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=lambda op: op.name)
def test_sums_and_averages(four_ranks: Ranks, op: Any, dtype: torch.dtype) -> None:
    total = torch.stack([sparse(rank).to_dense() for rank in range(4)]).sum(0)
    expected = (total if op is hvd.Sum else total / 4).to(dtype)
    for outcome in four_ranks.run(_reduce, op, dtype):
        for dense, coalesced, same in outcome:
            assert torch.equal(dense, expected)
            assert coalesced
            assert same


def _many_halves(dtype: torch.dtype) -> torch.Tensor:
    value = 256.0 if hvd.rank() == 0 else 0.625
    one = torch.sparse_coo_tensor(
        torch.tensor([[0]]), torch.tensor([value], dtype=dtype), (1,), check_invariants=True
    )
    return hvd.allreduce(one, op=hvd.Sum).to_dense()


def test_halves_are_rounded_once(four_ranks: Ranks) -> None:
    for outcome in four_ranks.run(_many_halves, torch.bfloat16):
        assert outcome.tolist() == [258.0]  # rounded after each addition, 256 + 0.625 would stay 256


def _large_integers(dtype: torch.dtype) -> list[int]:
    info = torch.iinfo(dtype)
    values = torch.tensor([info.max, info.min, -1 if hvd.rank() else 0], dtype=dtype)
    one = torch.sparse_coo_tensor(torch.arange(3).view(1, 3), values, (3,), check_invariants=True)
    averaged: list[int] = hvd.allreduce(one).to_dense().tolist()
    return averaged


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64])
def test_averages_of_integers_do_not_overflow(four_ranks: Ranks, dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    assert four_ranks.run(_large_integers, dtype) == [[info.max, info.min, 0]] * 4


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Embedding(6, 3, sparse=True)
        self.second = nn.Embedding(4, 3, sparse=True)
        self.head = nn.Linear(3, 2)

    def forward(self, rows: torch.Tensor, both: bool) -> torch.Tensor:
        hidden = self.first(rows)
        if both:
            hidden = hidden + self.second(rows % 4)
        result: torch.Tensor = self.head(hidden).pow(2).sum()
        return result


OPTIONS: dict[str, dict[str, Any]] = {
    "each": {},
    "groups": {"groups": 2},
    "one group": {"groups": 1},
    "dense": {"sparse_as_dense": True, "groups": 2},
    "compressed dense": {"sparse_as_dense": True, "compression": hvd.Compression.fp16},
}


def train(net: Tables, optimizer: torch.optim.Optimizer, ranks: list[int]) -> list[torch.Tensor]:
    """Train; in the second step only rank 0 uses the second table."""
    for step in range(3):
        optimizer.zero_grad()
        for rank in ranks:
            loss = net(torch.tensor([rank, 5, step]), step != 1 or rank == 0)
            (loss / len(ranks)).backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def _train(option: str) -> tuple[list[torch.Tensor], list[bool]]:
    net = Tables()
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(sgd, net.named_parameters(), **OPTIONS[option])
    values = train(net, optimizer, [hvd.rank()])
    return values, [p.grad is not None and p.grad.is_sparse for p in net.parameters()]


@pytest.mark.parametrize("option", OPTIONS)
def test_sparse_gradients(two_ranks: Ranks, option: str) -> None:
    net = Tables()
    expected = train(net, torch.optim.SGD(net.parameters(), 0.1), [0, 1])
    tolerance = 5e-3 if "compressed" in option else 1e-6
    for values, are_sparse in two_ranks.run(_train, option):
        for ours, reference in zip(values, expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)
        assert are_sparse == [True] * 2 + [False] * 2


def _train_sparse_adam(as_dense: bool) -> tuple[list[torch.Tensor], list[int]]:
    table = nn.Embedding.from_pretrained(torch.ones(6, 3), freeze=False, sparse=True)
    adam = torch.optim.SparseAdam(table.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(adam, table.named_parameters(), sparse_as_dense=as_dense)
    entries = []
    for step in range(3):
        if step != 1 or hvd.rank() == 0:  # in step 1, rank 1 has no gradient
            table(torch.tensor([hvd.rank(), 4])).sum().backward()
        optimizer.step()
        assert table.weight.grad is not None
        entries.append(table.weight.grad.coalesce().indices().shape[1])
        optimizer.zero_grad()
    return [table.weight.detach().clone()], entries


def test_an_optimizer_that_takes_sparse_gradients_only(two_ranks: Ranks) -> None:
    gathered = two_ranks.run(_train_sparse_adam, False)
    reduced = two_ranks.run(_train_sparse_adam, True)
    for (values,), entries in reduced:
        torch.testing.assert_close(values, gathered[0][0][0])
        assert torch.equal(values, reduced[0][0][0]), "ranks differ"
        assert torch.equal(values[[2, 3, 5]], torch.ones(3, 3))
        assert entries == [3, 2, 3]
