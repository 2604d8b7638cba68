"""``torch.compile`` around DDP, inside of it, and around functional collectives, against one process with all batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hvdlab.torch.c10d  # noqa: F401  (makes the backend known)
from support.ranks.resident import Ranks

SIZE = 2


def _begin() -> None:
    dist.init_process_group("hvdlab")


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    with Ranks(SIZE, init=False, imports=["hvdlab.torch", "torch._dynamo"]) as ranks:
        ranks.run(_begin, timeout=60)
        yield ranks


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _around() -> Any:
    # Dynamo cuts the graph where DDP's buckets end, so that DDP can reduce them while the rest is computed.
    return torch.compile(nn.parallel.DistributedDataParallel(_model()), backend="eager")


def _inside() -> Any:
    return nn.parallel.DistributedDataParallel(torch.compile(_model(), backend="eager"))


def _trained() -> list[str]:
    """Return the ways to compile whose results differ from one process with the batches of all ranks."""
    rank, wrong = dist.get_rank(), []
    generator = torch.Generator().manual_seed(1)
    xs, ys = (
        torch.randn(3, 4 * SIZE, 8, generator=generator),
        torch.randn(3, 4 * SIZE, 4, generator=generator),
    )
    alone = _model()
    makers: dict[str, tuple[Callable[[], Any], slice]] = {
        "": (lambda: alone, slice(None)),
        "around": (_around, slice(4 * rank, 4 * rank + 4)),
        "inside": (_inside, slice(4 * rank, 4 * rank + 4)),
    }
    for name, (make, rows) in makers.items():
        model = make()
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        # The hook that counts steps must neither break the graph nor make torch compile it again for each step.
        step = torch.compile(optimizer.step, backend="eager") if name else optimizer.step
        for x, y in zip(xs, ys, strict=True):
            optimizer.zero_grad()
            (model(x[rows]) - y[rows]).square().mean().backward()
            step()
        for one, other in zip(alone.parameters(), model.parameters(), strict=True):
            if not torch.allclose(one, other, atol=1e-4, rtol=1e-3):
                wrong.append(f"{name}: {(one - other).abs().max()}")
    return wrong


def _functional() -> list[float]:
    from torch.distributed import _functional_collectives as collectives

    def total(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = collectives.all_reduce(x * 2, "sum", dist.group.WORLD)
        return found + 1

    compiled = torch.compile(total, backend="eager", fullgraph=True)
    found: list[float] = compiled(torch.full((2,), float(dist.get_rank() + 1))).tolist()
    return found


def test_compiled_models_train_as_one_process(world: Ranks) -> None:
    assert world.run(_trained, timeout=180) == [[]] * SIZE


def test_functional_collectives_are_compiled_in_one_graph(world: Ranks) -> None:
    assert world.run(_functional, timeout=60) == [[7.0, 7.0]] * SIZE
