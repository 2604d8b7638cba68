"""torch's ways to train on process groups, each against one process with the batches of all ranks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hvdlab.torch.c10d  # noqa: F401  (makes the backend known)
from support.ranks.resident import Ranks

SIZE = 4
Made = tuple[nn.Module, torch.optim.Optimizer]


def _begin() -> None:
    dist.init_process_group("hvdlab")


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    imports = [
        "hvdlab.torch",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.distributed.pipelining",
    ]
    with Ranks(SIZE, init=False, imports=imports) as ranks:
        ranks.run(_begin, timeout=60)
        yield ranks


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.1)


def _replicated() -> Made:
    model = nn.parallel.DistributedDataParallel(_model())
    return model, _adam(model)


def _zero() -> Made:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(_model())
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)


def _sharded(*shape: int) -> Callable[[], Made]:
    def make() -> Made:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        names = ("replicate", "shard")[-len(shape) :]
        mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=names), _model()
        for module in (model[0], model[2], model):  # type: ignore[index]
            fully_shard(module, mesh=mesh)
        return model, _adam(model)

    return make


def _fsdp1() -> Made:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(_model(), device_id=torch.device("cpu"), use_orig_params=True)
    return model, _adam(model)


def _parallel() -> Made:
    """Return layers that are divided among pairs of ranks, and whose replicas are sharded over the pairs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "layer"))
    model = parallelize_module(_model(), mesh["layer"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return model, _adam(model)


#: Ways to train, and how many ranks share one batch.
WAYS: dict[str, tuple[Callable[[], Made], int]] = {
    "DDP": (_replicated, 1),
    "ZeroRedundancyOptimizer": (_zero, 1),
    "fully_shard": (_sharded(SIZE), 1),
    "HSDP": (_sharded(2, SIZE // 2), 1),
    "FSDP1": (_fsdp1, 1),
    "tensor parallel and fully_shard": (_parallel, 2),
}


def _full(model: nn.Module) -> list[torch.Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    whole = (
        FullyShardedDataParallel.summon_full_params(model)
        if isinstance(model, FullyShardedDataParallel)
        else contextlib.nullcontext()
    )
    with whole:
        return [
            (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
            for each in model.parameters()
        ]


def _trained() -> list[str]:
    """Return the ways whose parameters in the end differ from those of one process."""
    rank, wrong = dist.get_rank(), []
    generator = torch.Generator().manual_seed(1)
    xs, ys = torch.randn(4 * SIZE, 8, generator=generator), torch.randn(4 * SIZE, 4, generator=generator)
    alone = _model()
    for name, (model, optimizer), shared in (
        ("", (alone, _adam(alone)), SIZE),
        *((name, make(), shared) for name, (make, shared) in WAYS.items()),
    ):
        rows = slice(4 * shared * (rank // shared), 4 * shared * (rank // shared + 1))
        for _ in range(3):
            optimizer.zero_grad()
            (model(xs[rows]) - ys[rows]).square().mean().backward()
            optimizer.step()
        for one, other in zip(alone.parameters(), _full(model), strict=True):
            if not torch.allclose(one, other, atol=1e-4, rtol=1e-3):
                wrong.append(f"{name}: {(one - other).abs().max()}")
    return wrong


def test_every_way_to_train_is_one_process_with_all_batches(world: Ranks) -> None:
    assert world.run(_trained, timeout=180) == [[]] * SIZE


def _joined() -> None:
    """Rank r has r + 1 batches; ranks without a further batch take part with zeros."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(2)
    batches = torch.randn(SIZE, SIZE, 4, 8, generator=generator)  # for each step and rank
    alone, model = _model(), nn.parallel.DistributedDataParallel(_model())
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (alone, model)]
    with model.join():
        for step in range(rank + 1):
            optimizers[1].zero_grad()
            model(batches[step, rank]).square().mean().backward()
            optimizers[1].step()
    for step in range(SIZE):
        optimizers[0].zero_grad()
        for each in range(step, SIZE):
            (alone(batches[step, each]).square().mean() / SIZE).backward()
        optimizers[0].step()
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def _tensors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    generator = torch.Generator().manual_seed(3)
    left, right = torch.randn(6, 5, generator=generator), torch.randn(5, 7, generator=generator)  # uneven
    for placements in (
        [Shard(0), Shard(1)],
        [Shard(1), Replicate()],
        [Replicate(), Shard(0)],
        [Shard(0), Shard(0)],
    ):
        one = distribute_tensor(left, mesh, placements)
        other = distribute_tensor(right, mesh, [Shard(0), Replicate()])
        product = one @ other
        assert isinstance(product, DTensor)
        torch.testing.assert_close(product.full_tensor(), left @ right)
        for again in ([Replicate(), Shard(1)], [Shard(1), Shard(0)]):
            torch.testing.assert_close(one.redistribute(mesh, again).full_tensor(), left)
    partial = one.from_local(torch.ones(3), mesh, [Partial(), Replicate()])
    assert partial.full_tensor().tolist() == [2.0] * 3


def _saved(path: str) -> None:
    """Save a sharded model and its optimizer, and load them into ones that are sharded in another way."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float) -> None:
        optimizer.zero_grad()
        model(torch.full((2, 8), scale * (dist.get_rank() + 1))).square().mean().backward()
        optimizer.step()

    after: list[list[torch.Tensor]] = []
    for make in (_sharded(SIZE), _sharded(2, SIZE // 2)):
        model, optimizer = make()
        step(model, optimizer, 1.0)
        state: dict[str, Any] = dict(
            zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)
        )
        if not after:
            step(model, optimizer, 2.0)
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            save(state, checkpoint_id=path)
        else:
            load(state, checkpoint_id=path)
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
        step(model, optimizer, 3.0)  # the result depends on the optimizer's state, too
        after.append(_full(model))
    for one, other in zip(*after, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def _piped() -> None:
    """Train a pipeline with a layer on each rank: ranks send the activations and gradients of micro-batches as
    messages."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, device = dist.get_rank(), torch.device("cpu")
    torch.manual_seed(4)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(SIZE)]
    alone = nn.Sequential(*(copy.deepcopy(layer) for layer in layers))
    inputs, targets = torch.randn(8, 8), torch.randn(8, 8)
    own = layers[rank]
    schedule = ScheduleGPipe(
        PipelineStage(own, rank, SIZE, device), n_microbatches=4, loss_fn=nn.functional.mse_loss
    )
    losses: list[torch.Tensor] = []
    for _ in range(2):
        own.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        elif rank == SIZE - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
    nn.functional.mse_loss(alone(inputs), targets).backward()
    for one, other in zip(alone[rank].parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4)


def _skips_a_layer() -> list[str]:
    """Return the ranks' error when rank 1 broadcasts while the others gather the last layer."""
    from hvdlab.collectives.errors import MismatchError

    model, _ = _sharded(SIZE)()
    model(torch.zeros(2, 8))
    told = []
    try:
        if dist.get_rank() == 1:
            dist.broadcast(torch.zeros(3), 0)
        else:
            model[2](torch.zeros(2, 16))  # type: ignore[index]
    except MismatchError as error:
        told.append(str(error).split(":")[0])
    dist.barrier()
    return told


def test_errors_name_the_module_whose_shards_are_gathered(world: Ranks) -> None:
    told = world.run(_skips_a_layer, timeout=60)
    for rank, (text,) in enumerate(told):
        if rank == 1:
            assert text.startswith("`broadcast #")
        else:
            assert text.startswith("`all_gather #")
            assert text.endswith(" for 2`")


def test_a_pipeline_of_layers_is_one_process(world: Ranks) -> None:
    world.run(_piped, timeout=60)


def test_uneven_batches_tensors_and_checkpoints(world: Ranks, tmp_path: Path) -> None:
    world.run(_joined, timeout=60)
    world.run(_tensors, timeout=60)
    world.run(_saved, str(tmp_path / "checkpoint"), timeout=60)
