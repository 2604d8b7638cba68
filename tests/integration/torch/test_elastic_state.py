"""``TorchState``: the state that its handlers save, restore and synchronize."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hvdlab.torch as hvd
from hvdlab.collectives.elastic.state import next_attempt
from hvdlab.torch import elastic
from hvdlab.torch.elastic.state import (
    LoadableStateHandler,
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)
from support.ranks.resident import Ranks


def trained(seed: int, steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after some steps; all values depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + seed)
    for _ in range(steps):
        step(model, optimizer, torch.rand(4, 3, generator=generator))
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().sum().backward()
    optimizer.step()


def contents(state: Any) -> Any:
    return copy.deepcopy((state.model.state_dict(), state.optimizer.state_dict()))


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("world_of_one")
def test_restore_goes_back_any_number_of_times() -> None:
    model, optimizer = trained(0)
    state: Any = elastic.TorchState(model, optimizer, epoch=1)
    for round in range(3):
        state.save()
        saved = contents(state)
        for _ in range(2):
            step(model, optimizer, torch.rand(4, 3))
            state.epoch += 1
            state.restore()
            assert_same(contents(state), saved)
            assert state.epoch == 1 + 10 * round
            assert all(parameter.grad is None for parameter in model.parameters())
        step(model, optimizer, torch.rand(4, 3))
        state.epoch += 10
    assert state.model is model
    assert state.optimizer is optimizer


@pytest.mark.usefixtures("world_of_one")
def test_a_distributed_optimizer_can_go_on_after_a_half_finished_step() -> None:
    model, optimizer = trained(0)
    distributed = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state: Any = elastic.TorchState(model, distributed)
    saved = contents(state)
    model(torch.rand(4, 3)).sum().backward()
    state.restore()
    assert_same(contents(state), saved)
    model(torch.rand(4, 3)).sum().backward()
    state.on_reset()
    step(model, distributed, torch.rand(4, 3))


@pytest.mark.usefixtures("world_of_one")
def test_assigning_replaces_what_is_taken_care_of() -> None:
    state: Any = elastic.TorchState(*trained(0), epoch=0)
    model, optimizer = trained(1)
    state.model, state.optimizer, state.epoch = model, optimizer, 5
    saved = contents(state)
    step(model, optimizer, torch.rand(4, 3))
    state.restore()
    assert state.model is model
    assert_same(contents(state), saved)
    assert state.epoch == 0  # only save() saves a value


@pytest.mark.usefixtures("world_of_one")
def test_a_model_may_come_later() -> None:
    state: Any = elastic.TorchState(epoch=0)
    assert (state.model, state.optimizer) == (None, None)
    state.model, state.optimizer = trained(0)
    saved = contents(state)
    step(state.model, state.optimizer, torch.rand(4, 3))
    state.restore()
    assert_same(contents(state), saved)
    state.sync()
    assert_same(contents(state), saved)


@pytest.mark.usefixtures("world_of_one")
def test_kinds_are_found_by_type() -> None:
    model, optimizer = trained(0)
    other, _ = trained(1)
    state: Any = elastic.TorchState(
        model=model,
        discriminator=other,
        optimizer=optimizer,
        sampler=elastic.ElasticSampler(range(4)),
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1),
        scaler=torch.amp.GradScaler("cpu"),
        batch=3,
    )
    kinds = {name: type(handler) for name, handler in state._handlers.items()}
    assert kinds == {
        "model": ModelStateHandler,
        "discriminator": ModelStateHandler,
        "optimizer": OptimizerStateHandler,
        "sampler": SamplerStateHandler,
        "scheduler": LoadableStateHandler,
        "scaler": LoadableStateHandler,
    }
    optimizer.step()
    state.scheduler.step()
    state.sampler.record_indices([1])
    state.restore()
    assert state.scheduler.last_epoch == 0
    assert state.sampler.processed_indices == set()


class Counter:
    def __init__(self) -> None:
        self.count = 0


class CounterHandler(StateHandler[Counter]):
    def __init__(self, value: Counter) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self.saved = self.value.count

    def restore(self) -> None:
        self.value.count = self.saved

    def sync(self) -> None:
        self.value.count = hvd.broadcast_object(self.value.count, self.root_rank)
        self.save()


@pytest.fixture
def registry() -> Iterator[None]:
    before = get_handler_registry()
    yield
    set_handler_registry(before)


@pytest.mark.usefixtures("world_of_one", "registry")
def test_further_kinds_can_be_taken_care_of() -> None:
    set_handler_registry([*get_handler_registry(), (Counter, CounterHandler)])
    counter = Counter()
    state: Any = elastic.TorchState(counter=counter)
    counter.count = 1
    state.commit()
    counter.count = 2
    state.restore()
    assert (state.counter, counter.count) == (counter, 1)
    state.sync()
    assert counter.count == 1


def test_the_base_handler_leaves_the_rest_to_subclasses() -> None:
    handler: StateHandler[int] = StateHandler(1)
    for method in (handler.save, handler.restore, handler.sync):
        with pytest.raises(NotImplementedError):
            method()
    assert handler.root_rank == 0


# -- over ranks -----------------------------------------------------------------------------------------------------------


def synchronized(ahead: int | None) -> Any:
    """Each rank has a state of its own; rank ``ahead`` has committed once more than the others."""
    hvd.init()
    rank = hvd.rank()
    model, optimizer = trained(rank, steps=2 if rank else 0)
    sampler = elastic.ElasticSampler(range(8), shuffle=False)
    state: Any = elastic.TorchState(
        model, optimizer, sampler=sampler, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2), rank=rank
    )
    state.scheduler.last_epoch = rank
    sampler.record_indices([rank])
    if rank == ahead:
        state.save()
    before = contents(state)
    state.sync()
    first = contents(state), state.rank, state.scheduler.last_epoch, sampler.processed_indices
    step(model, optimizer, torch.rand(4, 3))
    state.rank = -1
    state.restore()
    again = contents(state), state.rank, state.scheduler.last_epoch, sampler.processed_indices
    return before, first, again, state._saves


@pytest.mark.parametrize("ahead", [None, 1, 3])
def test_the_state_of_the_rank_that_is_ahead_wins(four_ranks: Ranks, ahead: int | None) -> None:
    root = ahead or 0
    results = four_ranks.run(synchronized, ahead)
    for _, first, again, saves in results:
        for found in (first, again):
            assert_same(found[0], results[root][0])
            assert found[1:] == (root, root, {0, 1, 2, 3})
        assert saves == next_attempt(0)


def other_epochs() -> Any:
    hvd.init()
    sampler = elastic.ElasticSampler(range(8), shuffle=False)
    state = elastic.TorchState(sampler=sampler)
    sampler.record_indices([hvd.rank()])
    if hvd.rank() == 2:
        sampler.set_epoch(1)
        sampler.record_indices([5])
        state.save()
    state.sync()
    return sampler.epoch, sampler.processed_indices


def test_what_was_processed_in_another_epoch_does_not_count(four_ranks: Ranks) -> None:
    assert four_ranks.run(other_epochs) == [(1, {5})] * 4


def interrupted_by_one() -> Any:
    """Only one rank has received the news: the first rank in one round, another rank in the other."""
    hvd.init()
    raised = []
    state = elastic.TorchState(epoch=0)
    state.sync()
    for teller in (0, 2):
        state.on_reset()
        if hvd.rank() == teller:
            state.on_hosts_updated(10.0 + teller, 2)
        try:
            state.commit()
        except elastic.HostsUpdatedInterrupt as interrupt:
            raised.append((teller, interrupt.skip_sync))
    return raised


def test_all_ranks_are_interrupted_or_none(four_ranks: Ranks) -> None:
    assert four_ranks.run(interrupted_by_one) == [[(0, False), (2, False)]] * 4
