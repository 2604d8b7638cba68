"""``hvd.join``: training when ranks have different amounts of data."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hvdlab.torch as hvd
from hvdlab.torch import HorovodInternalError
from support.ranks.resident import Ranks, resident_ranks

CLASSES = 3


@pytest.fixture(params=[1, 2, 4])
def some(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, imports=["hvdlab.torch"]) as ranks:
        yield ranks


two = resident_ranks(2, imports=["hvdlab.torch"])


# -- on the ranks -------------------------------------------------------------------------------------------------


def batch_of(rank: int, epoch: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * epoch + number)
    x = torch.randn(5, 4, generator=generator)
    return x, torch.randint(CLASSES, (5,), generator=generator)


def model_of() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 2000), torch.nn.Tanh(), torch.nn.Linear(2000, CLASSES))


def train(epochs: int, groups: int | None) -> tuple[list[int], list[float]]:
    """Rank r has r + 1 batches an epoch. Returns the rank that joined last in each epoch, and the sums of the final parameters."""
    model = model_of()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
        num_groups=groups or 0,
    )
    last = []
    for epoch in range(epochs):
        for number in range(hvd.rank() + 1):
            x, y = batch_of(hvd.rank(), epoch, number)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        last.append(hvd.join())
        # Ranks that joined early have missed steps of the others, so all take the model of the rank that joined last.
        hvd.broadcast_parameters(model.state_dict(), root_rank=last[-1])
        hvd.broadcast_optimizer_state(optimizer, root_rank=last[-1])
    return last, [float(p.detach().double().sum()) for p in model.parameters()]


def alone(size: int, epochs: int) -> list[float]:
    """The same training in one process: gradients of the ranks that have a batch, divided by the number of all ranks."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        for number in range(size):
            optimizer.zero_grad()
            for rank in range(number, size):
                x, y = batch_of(rank, epoch, number)
                (torch.nn.functional.cross_entropy(model(x), y) / size).backward()
            optimizer.step()
    return [float(p.detach().double().sum()) for p in model.parameters()]


def kinds() -> list[str]:
    """Rank 0 joins, and rank 1 tries every kind of collective."""
    if hvd.rank() == 0:
        return [str(hvd.join())]
    told = []
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int32,
        torch.int64,
        torch.uint8,
    ):
        x = torch.full((2, 3), 4).to(dtype)
        assert torch.equal(hvd.allreduce(x, op=hvd.Sum), x), dtype
        assert torch.equal(hvd.allreduce(x, op=hvd.Average), x / 2 if dtype.is_floating_point else x // 2), (
            dtype
        )
        y = x.clone()
        hvd.allreduce_(y, op=hvd.Sum)
        several = hvd.grouped_allreduce([x, torch.ones(70_000, dtype=dtype)], op=hvd.Sum)
        assert torch.equal(several[0], x)
        assert int(several[1].float().sum()) == 70_000
    hvd.barrier()
    x = torch.ones(2, 3)
    for attempt in (
        lambda: hvd.allgather(x), lambda: hvd.broadcast(x, 1), lambda: hvd.alltoall(x),
        lambda: hvd.reducescatter(x, op=hvd.Sum), lambda: hvd.allreduce(x, op=hvd.Min),
        lambda: hvd.grouped_allgather([x, x]), lambda: hvd.broadcast_object({"a": 1}, 1),
        lambda: hvd.synchronize(hvd.allgather_async(x, name="named")),
    ):  # fmt: skip
        with pytest.raises(HorovodInternalError, match="not supported with join") as error:
            attempt()
        assert isinstance(error.value, RuntimeError)
        told.append(str(error.value).split(":")[0])
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 1.0
    return [str(hvd.join()), *told]


def reduce() -> float:
    return hvd.allreduce(torch.ones(4), op=hvd.Sum)[0].item()


def with_gradient() -> list[float]:
    """Check that the backward pass of a collective is a collective, too, while rank 0 has joined."""
    if hvd.rank() == 0:
        hvd.join()
        return []
    x = torch.ones(3, requires_grad=True)
    hvd.allreduce(x * 2, op=hvd.Sum).sum().backward()
    hvd.join()
    assert x.grad is not None
    return x.grad.tolist()


def join_again_and_again(times: int) -> list[int]:
    return [hvd.join() for _ in range(times)]


# -- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [None, 2])
def test_training_on_uneven_data(some: Ranks, groups: int | None) -> None:
    epochs = 3
    results = some.run(train, epochs, groups, timeout=60)
    assert all(last == [some.size - 1] * epochs for last, _ in results)
    expected = alone(some.size, epochs)
    for _, sums in results:
        assert sums == pytest.approx(expected, abs=1e-3)


def test_what_works_with_a_rank_that_has_joined_and_what_does_not(two: Ranks) -> None:
    (last,), (own, *told) = two.run(kinds)
    assert last == own == "1"
    assert len(told) == 8
    assert two.run(reduce) == [2.0, 2.0]


def test_gradients_of_collectives(two: Ranks) -> None:
    assert two.run(with_gradient) == [[], [2.0] * 3]


def test_joining_many_times(two: Ranks) -> None:
    first, second = two.run(join_again_and_again, 200)
    assert first == second
    assert two.run(reduce) == [2.0, 2.0]


def test_alone() -> None:
    with Ranks(1, imports=["hvdlab.torch"]) as ranks:
        assert ranks.run(join_again_and_again, 2) == [[0, 0]]
