"""``hvd.shutdown()`` and ``hvd.init()`` in one process, again and again, with process sets and optimizers."""

from __future__ import annotations

import pytest
import torch

import hvdlab.torch as hvd
from support.ranks.resident import Ranks, resident_ranks

three = resident_ranks(3, init=False, imports=["hvdlab.torch"])


# -- on the ranks -------------------------------------------------------------------------------------------------


def with_sets(times: int) -> list[tuple[int | None, float]]:
    """In each world: the same process set, given to init(), and one that is added later."""
    given = hvd.ProcessSet([0, 1])
    results: list[tuple[int | None, float]] = []
    for _ in range(times):
        assert given.process_set_id is None
        hvd.init(process_sets=[given])
        added = hvd.add_process_set([1, 2])
        total = -1.0
        for chosen in (given, added):
            if chosen.included():
                total = hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=chosen)[0].item()
        results.append((given.process_set_id, total))
        with pytest.raises(ValueError, match="registered already"):
            hvd.add_process_set([1, 0])
        hvd.shutdown()
        assert added.process_set_id is None
        with pytest.raises(ValueError, match=r"before hvd\.init"):
            hvd.size()
    return results


def train(times: int) -> list[float]:
    """One model, trained in several worlds."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    losses = []
    for _ in range(times):
        hvd.init()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.full((2, 4), float(hvd.rank()))).pow(2).mean()
            loss.backward()
            optimizer.step()
        losses.append(hvd.allreduce(loss.detach()).item())
        hvd.join()
        hvd.shutdown()
    return losses


# -- tests ----------------------------------------------------------------------------------------------------------


def test_process_sets_belong_to_one_world(three: Ranks) -> None:
    results = three.run(with_sets, 5, timeout=60)
    assert results == [[(1, 2.0)] * 5] * 3


def test_a_model_is_trained_in_several_worlds(three: Ranks) -> None:
    first, second, third = three.run(train, 5, timeout=60)
    assert first == second == third
    assert first == sorted(first, reverse=True)
