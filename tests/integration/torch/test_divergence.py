"""``hvd.watch_divergence()`` on models that begin to differ."""

from __future__ import annotations

import pytest
import torch

import hvdlab.torch as hvd
from hvdlab.bindings.monitoring import DivergenceError
from hvdlab.collectives.errors import InvalidRequestError
from support.ranks.resident import Ranks


def train(steps: int, every: int, parts_at: int = 0, by_optimizer: bool = False, seed: int = 0) -> str:
    """Train; after step ``parts_at`` the last rank's model is changed. Returns the error's text."""
    torch.manual_seed(seed)
    if hvd.rank() == 0:  # a model that other ranks have not watched
        hvd.watch_divergence(torch.nn.Linear(2, 1)).close()
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    watch = hvd.watch_divergence(model, every, optimizer=optimizer if by_optimizer else None)
    try:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            model(torch.randn(5, 4) + hvd.rank()).sum().backward()
            optimizer.step()
            if step == parts_at and hvd.rank() == hvd.size() - 1:
                last = model[2]
                assert isinstance(last, torch.nn.Linear)
                last.bias.data[0] += 1e-6
        watch.check()
    except DivergenceError as error:
        return f"{error} at {error.step}"
    finally:
        watch.close()
    return f"alike, {watch.checks} comparisons"


def unlike_from_the_beginning() -> str:
    return train(3, 100, seed=hvd.rank())


def test_models_that_are_trained_alike_stay_alike(two_ranks: Ranks) -> None:
    assert set(two_ranks.run(train, 5, 2)) == {"alike, 4 comparisons"}
    assert set(two_ranks.run(train, 5, 2, 0, True)) == {"alike, 3 comparisons"}


@pytest.mark.parametrize("by_optimizer", [False, True])
def test_the_step_at_which_they_part_is_named(four_ranks: Ranks, by_optimizer: bool) -> None:
    (text,) = set(four_ranks.run(train, 30, 10, 13, by_optimizer))
    since = 14 if by_optimizer else 13  # the change came after the hook of step 13
    assert text.startswith(
        f"the ranks' models differ in `2.bias`, since step {since}: ranks 0-2 agree and rank 3"
    )
    assert text.endswith(" at 20")


def test_every_step_can_be_compared(two_ranks: Ranks) -> None:
    (text,) = set(two_ranks.run(train, 30, 1, 7))
    assert "`2.bias`, noticed after step 7: all of ranks 0,1 have models of their own" in text
    assert text.endswith(" at 7")


def test_a_forgotten_broadcast_is_found_before_the_first_step(two_ranks: Ranks) -> None:
    (text,) = set(two_ranks.run(unlike_from_the_beginning))
    assert (
        "before the first step; hvd.broadcast_parameters(), with Keras hvd.broadcast_variables(), makes them alike"
        in text
    )


def test_arguments(world_of_one: None) -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(InvalidRequestError, match="Module, not a int"):
        hvd.watch_divergence(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="from 1, not 0"):
        hvd.watch_divergence(model, 0)
    first, second = hvd.watch_divergence(model), hvd.watch_divergence(model)
    model(torch.ones(1, 1))
    for change, step in ((False, 0), (True, 1), (False, 1)):  # a call that changes nothing counts no step
        with torch.no_grad():
            if change:
                model.weight += 1
        model(torch.ones(1, 1))
        assert (first.step, second.step) == (0, step)
    model.eval()
    model(torch.ones(1, 1))
    assert "DivergenceWatch of Linear, 1 steps, 1 comparisons" in repr(second)
    assert model.state_dict().keys() == {"weight", "bias"}
