"""Broadcasts of parameters, optimizer state and objects, and the allgather of objects."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hvdlab.torch as hvd
from hvdlab.collectives.errors import AbortedError, InvalidRequestError, MismatchError
from hvdlab.torch.functions import transfer_optimizer_state
from support.ranks.resident import RankFailed, Ranks


def model(rank: int) -> nn.Sequential:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))


# -- parameters -------------------------------------------------------------------------------------------------------

GIVEN: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda net: net.state_dict(),
    "named_parameters": lambda net: list(net.named_parameters()),
    "generator": lambda net: net.named_parameters(),
    "parameters": lambda net: list(net.parameters()),
    "not tensors": lambda net: {**net.state_dict(), "_extra_state": {"a": 1}, "nothing": None},
}


def _broadcast_parameters(given: str, root: int) -> dict[str, torch.Tensor]:
    net: Any = model(hvd.rank())
    net[1].num_batches_tracked += hvd.rank()
    net[0].to(memory_format=torch.channels_last)
    places = [p.data_ptr() for p in net.parameters()]
    hvd.broadcast_parameters(GIVEN[given](net), root_rank=root)
    assert [p.data_ptr() for p in net.parameters()] == places
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    return {key: value.clone() for key, value in net.state_dict().items()}


def _broadcast_unlike(root: int) -> list[float]:
    last = torch.full((1 << 20,), float(hvd.rank()))
    tensors = {"a": torch.ones(1 + hvd.rank()), "b": last}
    with pytest.raises(MismatchError, match=r"parameter\.a"):
        hvd.broadcast_parameters(tensors, root)
    found = [float(last.min()), float(last.max())]
    hvd.barrier()
    return found


def test_nothing_is_written_after_an_error(two_ranks: Ranks) -> None:
    """The broadcast of the second tensor has ended when the first one's error is raised."""
    assert two_ranks.run(_broadcast_unlike, 1) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("given", GIVEN)
def test_broadcast_parameters(ranks: Ranks, given: str) -> None:
    root = ranks.size - 1
    expected = dict(model(root).named_parameters())
    for outcome in ranks.run(_broadcast_parameters, given, root):
        assert all(torch.equal(outcome[name], parameter) for name, parameter in expected.items())
        if given in ("state_dict", "not tensors"):
            assert outcome["1.num_batches_tracked"] == root


@pytest.mark.parametrize("params", [torch.ones(2), 3, "weights"])
def test_what_is_no_parameters_is_refused(world_of_one: None, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="state_dict"):
        hvd.broadcast_parameters(params, root_rank=0)


# -- optimizer state --------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda ps: torch.optim.Adam(ps, 0.1, amsgrad=True),
    "tensor lr": lambda ps: torch.optim.Adam(ps, torch.tensor(0.1)),
    "adadelta": lambda ps: torch.optim.Adadelta(ps),
    "adagrad": lambda ps: torch.optim.Adagrad(ps),
    "rprop": lambda ps: torch.optim.Rprop(ps),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.5, centered=True),
    "asgd": lambda ps: torch.optim.ASGD(ps),
    "nadam": lambda ps: torch.optim.NAdam(ps),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, max_iter=3),
}


def _steps(net: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    def closure() -> Any:  # a tensor, where torch's types want a float
        optimizer.zero_grad()
        loss: torch.Tensor = net(torch.arange(18.0).view(1, 2, 3, 3) / 18).pow(2).sum()
        loss.backward()
        return loss.detach()

    for _ in range(count):
        optimizer.step(closure)


def _broadcast_state(kind: str, steps: list[int], root: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    rank = hvd.rank()
    net = model(rank).eval()
    optimizer = OPTIMIZERS[kind](net.parameters())
    _steps(net, optimizer, steps[rank])
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0 + 0.25 * (rank + 1)
    gradients = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    before = [p.detach().clone() for p in net.parameters()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    hvd.broadcast_parameters(net.state_dict(), root_rank=root)
    if rank == root:
        assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    for old, parameter in zip(gradients, net.parameters(), strict=True):
        if old is not None:
            assert parameter.grad is not None
            assert torch.equal(old, parameter.grad)
    state = optimizer.state_dict()
    _steps(net, optimizer, 2)
    return state, [p.detach().clone() for p in net.parameters()]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(type(one) is type(other) and one == other)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps", [(2, 0), (0, 2), (1, 3)], ids=["only root", "only others", "both"])
def test_state_and_settings_are_the_root_s(two_ranks: Ranks, kind: str, steps: tuple[int, int]) -> None:
    (state, trained), (other_state, other_trained) = two_ranks.run(_broadcast_state, kind, list(steps), 0)
    assert same(state, other_state)
    assert float(state["param_groups"][0]["lr"]) == 0.25
    if steps[0] == 0 and kind != "adagrad":  # Adagrad's constructor makes its state
        assert not state["state"]
    assert all(torch.equal(a, b) for a, b in zip(trained, other_trained, strict=True))


def _broadcast_distributed(root: int) -> tuple[dict[str, Any], bool]:
    net = model(hvd.rank()).eval()
    inner = OPTIMIZERS["adam"](net.parameters())
    if hvd.rank() == root:
        _steps(net, inner, 2)
    optimizer = hvd.DistributedOptimizer(inner, net.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    net(torch.ones(1, 2, 3, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    return optimizer.state_dict(), optimizer.param_groups[0]["lr"] == 0.05


def test_state_of_a_distributed_optimizer(ranks: Ranks) -> None:
    root = ranks.size - 1
    outcomes = ranks.run(_broadcast_distributed, root)
    assert all(scheduled for _, scheduled in outcomes)
    steps = [[entry["step"].item() for entry in state["state"].values()] for state, _ in outcomes]
    assert steps == [[3.0] * 6] * ranks.size


def _gradients_of_a_fresh_one(distributed: bool, with_steps: bool) -> list[float | None]:
    net = model(hvd.rank()).eval()
    net[3].bias.requires_grad_(False)
    optimizer = OPTIMIZERS["momentum"]([p for p in net.parameters() if p is not net[3].weight])
    if with_steps and hvd.rank() == 0:
        _steps(net, optimizer, 1)
        net.zero_grad()
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer)
    net[0].bias.grad = torch.ones(3)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return [None if p.grad is None else hvd.allreduce(p.grad).sum().item() for p in net.parameters()]


@pytest.mark.parametrize("distributed", [False, True])
def test_a_fresh_optimizer_s_parameters_have_gradients(two_ranks: Ranks, distributed: bool) -> None:
    for gradients in two_ranks.run(_gradients_of_a_fresh_one, distributed, False):
        # A gradient that was there stays; frozen parameters, and those of another optimizer, get none.
        assert gradients == [0, 3, 0, 0, None, None]


@pytest.mark.parametrize("distributed", [False, True])
def test_with_state_at_the_root_no_gradient_is_made(two_ranks: Ranks, distributed: bool) -> None:
    for gradients in two_ranks.run(_gradients_of_a_fresh_one, distributed, True):
        assert gradients == [None, 3, None, None, None, None]


def _sparse_gradients_of_a_fresh_one(kind: str) -> tuple[torch.layout, float]:
    embedding = nn.Embedding(6, 2, sparse=True)
    table = nn.Sequential(embedding)
    sparse_only = kind == "SparseAdam"
    optimizer: torch.optim.Optimizer = (
        torch.optim.SparseAdam(table.parameters(), 0.1)
        if sparse_only
        else torch.optim.SGD(table.parameters(), 1)
    )
    optimizer = hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_optimizer_state(optimizer, 0, None if sparse_only else table)
    gradient = embedding.weight.grad
    assert gradient is not None
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    return gradient.layout, gradient.to_dense().sum().item()


@pytest.mark.parametrize("kind", ["SparseAdam", "SGD with the model"])
def test_where_gradients_are_sparse_those_that_are_made_are_too(two_ranks: Ranks, kind: str) -> None:
    for layout, _ in two_ranks.run(_sparse_gradients_of_a_fresh_one, kind):
        assert layout is torch.sparse_coo


def _unlike() -> None:
    net = model(0)
    parameters = list(net.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}] if hvd.rank() else parameters
    hvd.broadcast_optimizer_state(torch.optim.SGD(groups, 0.1), root_rank=0)


def test_optimizers_that_are_not_alike_are_refused(two_ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="made alike") as failure:
        two_ranks.run(_unlike)
    assert isinstance(failure.value.errors[1], InvalidRequestError)


class _Kept:
    """Transfer of the plan alone, of tensors that have no data."""

    _plan: Any

    def plan(self, plan: Any) -> Any:
        self._plan = plan or self._plan
        return self._plan

    def tensors(self, tensors: list[torch.Tensor]) -> None:
        self.last = tensors


def test_tensor_among_settings_is_made_on_the_groups_device() -> None:
    def optimizer_of(rate: Any) -> torch.optim.Optimizer:
        on_host, elsewhere = torch.empty(3), torch.empty(3, device="meta")
        return torch.optim.SGD([{"params": [on_host]}, {"params": [elsewhere], "lr": rate}], 0.1)

    transfer, own = _Kept(), optimizer_of(0.2)
    transfer_optimizer_state(optimizer_of(torch.tensor(0.5, device="meta")), transfer, gives=True)
    transfer_optimizer_state(own, transfer, gives=False)
    host_rate, rate = (group["lr"] for group in own.param_groups)
    assert host_rate == 0.1
    assert rate.is_meta


# -- objects ----------------------------------------------------------------------------------------------------------


def _objects(root: int) -> tuple[Any, Any, list[Any]]:
    rank = hvd.rank()
    mine = {"rank": rank, "text": "x" * 1000 * rank, "function": lambda: rank}
    received = hvd.broadcast_object(mine, root_rank=root)
    assert (received is mine) == (rank == root)
    gathered = hvd.allgather_object([rank] * rank, name="lists")
    nothing = hvd.broadcast_object(None, root, name="none")
    return (received["rank"], len(received["text"]), received["function"]()), nothing, gathered


def test_objects(ranks: Ranks) -> None:
    root = ranks.size - 1
    gathered = [[rank] * rank for rank in range(ranks.size)]
    for outcome in ranks.run(_objects, root):
        assert outcome == ((root, 1000 * root, root), None, gathered)


def _unpicklable() -> int:
    if hvd.rank() == 0:
        with pytest.raises(TypeError, match="pickle"):
            hvd.broadcast_object((number for number in range(3)), root_rank=0)
    meet = hvd.barrier if hvd.rank() == 0 else partial(hvd.broadcast_object, None, 0)
    with pytest.raises(AbortedError):
        meet()
    return len(hvd.allgather_object(0))


def test_an_object_that_cannot_be_pickled_fails_at_the_root(two_ranks: Ranks) -> None:
    assert two_ranks.run(_unpicklable) == [2, 2]
