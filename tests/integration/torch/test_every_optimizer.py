"""Every class of ``torch.optim``: its state is broadcast in any form, and it trains distributed."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlab.torch as hvd
from support.ranks.resident import Ranks

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
VARIANTS: dict[str, dict[str, Any]] = {
    "SGD momentum": {"momentum": 0.9, "nesterov": True},
    "SGD fused": {"momentum": 0.9, "fused": True},
    "Adam amsgrad": {"amsgrad": True},
    "AdamW foreach": {"foreach": True},
    "AdamW fused": {"fused": True, "amsgrad": True},
    "RMSprop centered": {"momentum": 0.5, "centered": True},
    "NAdam decoupled": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "RAdam decoupled": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "Adagrad fused": {"fused": True},
    "LBFGS short": {"max_iter": 2, "history_size": 3},
    "Adafactor weighted": {"weight_decay": 0.1},
}
CASES = [*KINDS, *VARIANTS]


class Net(nn.Module):
    """Network of matrices only, since Muon accepts no other shapes; with sparse gradients for optimizers that take no
    others."""

    def __init__(self, seed: int, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(5, 4, sparse=sparse)
        self.head = None if sparse else nn.Linear(4, 3, bias=False)
        self.double()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.table(rows)
        result: torch.Tensor = (hidden if self.head is None else self.head(hidden)).pow(2).mean()
        return result


def made(case: str, seed: int) -> tuple[Net, torch.optim.Optimizer]:
    name = case.partition(" ")[0]
    net = Net(seed, name == "SparseAdam")
    return net, KINDS[name](net.parameters(), lr=0.05, **VARIANTS.get(case, {}))


def take_step(net: Net, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(rows)
        loss.backward()
        return loss.detach()

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def values(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(type(one) is type(other) and one == other)


def _broadcast(case: str, steps: list[int]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    rank = hvd.rank()
    net, optimizer = made(case, seed=rank)
    for step in range(steps[rank]):
        take_step(net, optimizer, torch.tensor([step, rank + 1]))
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * (1 + rank) if rank else group["lr"]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    state = copy.deepcopy(optimizer.state_dict())
    for step in range(2):
        take_step(net, optimizer, torch.tensor([step, 3]))
    return state, values(net)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("steps", [(2, 0), (0, 2), (1, 3)], ids=["only root", "only others", "both"])
def test_state_is_the_root_s(two_ranks: Ranks, case: str, steps: tuple[int, int]) -> None:
    net, optimizer = made(case, seed=0)
    for step in range(steps[0]):
        take_step(net, optimizer, torch.tensor([step, 1]))
    expected = optimizer.state_dict()
    outcomes = two_ranks.run(_broadcast, case, list(steps))
    for state, trained in outcomes:
        assert same(state, expected)
        assert all(torch.equal(a, b) for a, b in zip(trained, outcomes[0][1], strict=True))


def train(case: str, ranks: list[int], wrap: Callable[..., Any]) -> list[torch.Tensor]:
    net, plain = made(case, seed=0)
    optimizer = wrap(plain, net.named_parameters())
    for step in range(3):
        take_step(net, optimizer, torch.tensor([row for rank in ranks for row in (step, rank + 3)]))
    return values(net)


def _train(case: str) -> list[torch.Tensor]:
    return train(case, [hvd.rank()], hvd.DistributedOptimizer)


@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_process(two_ranks: Ranks, case: str) -> None:
    expected = train(case, [0, 1], lambda plain, names: plain)
    outcomes = two_ranks.run(_train, case)
    for outcome in outcomes:
        for ours, first, reference in zip(outcome, outcomes[0], expected, strict=True):
            assert torch.equal(ours, first), "ranks differ"
            # Muon computes in bfloat16; LBFGS chooses the length of its step by each rank's own loss.
            tolerance = 2e-2 if case == "Muon" else 1e-8
            torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)
