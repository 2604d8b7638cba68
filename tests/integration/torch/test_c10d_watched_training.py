"""Training on watched groups beside one process with the batches of all ranks: with Gloo inside, and with NCCL inside where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hvdlab.torch.c10d import WatchOptions
from support.ranks.resident import Ranks
from support.real_gpu import choose_gpu, why_no_gpu

SIZE, STEPS, BATCH = 2, 6, 4
DEVICE = torch.device("cpu")
"""On a rank: where its model is."""


def _begin(inner: str) -> str:
    """Make the watched group; returns its type."""
    global DEVICE
    if inner == "nccl":
        from hvdlab.collectives import context

        context.init()
        engine = context.engine()
        DEVICE = choose_gpu(engine.local_rank, SIZE)
    dist.init_process_group("hvdlab", pg_options=WatchOptions("watched", inner))
    return type(dist.group.WORLD).__name__


@pytest.fixture(scope="module", params=["gloo", "nccl"])
def world(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    if request.param == "nccl" and (reason := why_no_gpu() or _why_no_nccl()):
        pytest.skip(reason)
    with Ranks(SIZE, init=False, imports=["hvdlab.torch", "torch.distributed.fsdp"]) as ranks:
        assert ranks.run(_begin, request.param, timeout=120) == ["WatchedGroup"] * SIZE
        yield ranks


def _why_no_nccl() -> str:
    return "" if dist.is_nccl_available() else "this torch has no NCCL"


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(DEVICE)


def _replicated() -> nn.Module:
    return nn.parallel.DistributedDataParallel(_model())


def _sharded() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = _model(), init_device_mesh(DEVICE.type, (SIZE,))
    for layer in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    return model


WAYS: dict[str, Callable[[], nn.Module]] = {"DDP": _replicated, "fully_shard": _sharded}


def _losses(way: str) -> tuple[list[float], list[float]]:
    """Train the model of all ranks, and one in this process alone with the batches of all ranks. Returns the losses of both."""
    generator = torch.Generator().manual_seed(1)
    xs, ys = (torch.randn(SIZE * BATCH, n, generator=generator).to(DEVICE) for n in (8, 4))
    own = slice(BATCH * dist.get_rank(), BATCH * (dist.get_rank() + 1))
    found: list[list[float]] = []
    for model, rows in ((WAYS[way](), own), (_model(), slice(None))):
        optimizer, losses = torch.optim.Adam(model.parameters(), 0.05), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = (model(xs[rows]) - ys[rows]).square().mean()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            if rows is own:
                dist.all_reduce(mean)  # a sum: Gloo has no mean
                mean /= SIZE
            losses.append(float(mean))
        found.append(losses)
    return found[0], found[1]


@pytest.mark.parametrize("way", WAYS)
def test_ranks_come_to_the_losses_of_one_process(world: Ranks, way: str) -> None:
    for losses, alone in world.run(_losses, way, timeout=120):
        assert losses == pytest.approx(alone, rel=1e-4)
        assert losses[-1] < 0.8 * losses[0]
