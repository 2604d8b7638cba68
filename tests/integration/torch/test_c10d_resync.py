"""``agree(model, optimizer)`` after a step that some ranks have taken and others have not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.torch.c10d import agree
from hvdlab.torch.c10d.resync import Agreement, _ReplicaDigest, choose_sources
from support.ranks.resident import Ranks

SIZE = 4
Optimizer = Callable[..., torch.optim.Optimizer]


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    with Ranks(SIZE, init=False, imports=["hvdlab.torch", "torch.distributed.fsdp"]) as ranks:
        ranks.run(_begin, timeout=60)
        yield ranks


def _begin() -> None:
    dist.init_process_group("hvdlab")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.1)


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, *, without: tuple[int, ...] = ()) -> None:
    """Take one step with equal gradients on all ranks; the ranks in ``without`` stop before the optimizer's step."""
    optimizer.zero_grad()
    torch.manual_seed(1)
    model(torch.randn(4, 8)).square().mean().backward()
    if dist.get_rank() not in without:
        optimizer.step()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [
        *model.parameters(),
        *(v for s in optimizer.state.values() for v in s.values() if v is not None),
    ]
    return [getattr(tensor, "_local_tensor", tensor).detach().clone() for tensor in tensors]


def _undisturbed(make: Callable[[], nn.Module], optimizer: Optimizer, steps: int) -> list[torch.Tensor]:
    model = make()
    updating = optimizer(model)
    for _ in range(steps):
        _step(model, updating)
    return _state(model, updating)


def _wrapped() -> nn.Module:
    return nn.parallel.DistributedDataParallel(_model())


def _sharded(*shape: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")[-len(shape) :]
    mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=names), _model()
    for module in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(module, mesh=mesh)
    return model


def _hybrid() -> nn.Module:
    return _sharded(2, 2)


MODELS: dict[str, Callable[[], nn.Module]] = {"DDP": _wrapped, "HSDP": _hybrid}
OPTIMIZERS: dict[str, Optimizer] = {"Adam": _adam, "momentum": _momentum}


def _brought(wrap: str, update: str, without: tuple[int, ...], taken: int) -> tuple[str, bool, Agreement]:
    """Return the text of ``agree`` after some ranks missed a step, and whether all is then as if none had, also after a
    further step."""
    make, optimizer = MODELS[wrap], OPTIMIZERS[update]
    model = make()
    updating = optimizer(model)
    for number in range(taken):
        _step(model, updating, without=without if number == taken - 1 else ())
    found = agree(model, updating)
    again = agree(model, updating)
    alike = repr(again) == "the ranks agree"
    _step(model, updating)
    mine = _state(model, updating)
    expected = _undisturbed(make, optimizer, taken + 1)
    return repr(found), alike and all(map(torch.equal, mine, expected)) and len(mine) == len(expected), found


@pytest.mark.parametrize("taken", [1, 3])
@pytest.mark.parametrize(
    ("wrap", "update", "without", "said"),
    [
        ("DDP", "Adam", (), "the ranks agree"),
        ("DDP", "Adam", (0,), "rank 0 was 1 step behind; rank 0 has the values of rank 1 now"),
        (
            "DDP",
            "Adam",
            (0, 1, 3),
            "ranks 0,1,3 were 1 step behind; ranks 0,1,3 have the values of rank 2 now",
        ),
        ("DDP", "momentum", (1,), "rank 1 has the values of rank 0 now"),
        (
            "HSDP",
            "Adam",
            (2, 3),
            "rank 2 was 1 step behind; rank 2 has the values of rank 0 now; rank 3 was 1",
        ),
        ("HSDP", "Adam", (0,), "rank 0 was 1 step behind; rank 0 has the values of rank 2 now"),
    ],
)
def test_ranks_that_are_behind_get_the_values_of_one_that_is_ahead(
    world: Ranks, wrap: str, update: str, without: tuple[int, ...], said: str, taken: int
) -> None:
    told = world.run(_brought, wrap, update, without, taken, timeout=120)
    assert len({text for text, _, _ in told}) == 1
    assert said in told[0][0], told[0][0]
    assert all(alike for _, alike, _ in told), told


def _shards_without_a_replica() -> str:
    model = _sharded(SIZE)
    optimizer = _adam(model)
    _step(model, optimizer)
    _step(model, optimizer, without=(1, 2))
    before = _state(model, optimizer)
    with pytest.raises(InvalidRequestError) as caught:
        agree(model, optimizer)
    assert all(map(torch.equal, before, _state(model, optimizer)))
    return str(caught.value)


def test_shards_without_a_replica_are_refused(world: Ranks) -> None:
    said = world.run(_shards_without_a_replica, timeout=60)
    text = (
        "rank 1 is at step 1 and ranks 0,3 at step 2, and no rank that is ahead has the shards of this one: "
        "load the last checkpoint on all ranks."
    )
    assert said == [text] * SIZE


class _FailsOnce(nn.Module):
    """Layer that raises on rank 1, in the middle of a pass."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.fails, self._backward = False, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.fails and dist.get_rank() == 1):
            return x
        if not self._backward:
            raise ValueError("bad batch")

        def fail(gradient: torch.Tensor) -> None:
            raise ValueError("bad batch")

        x.register_hook(fail)
        return x


def _made(wrap: str, backward: bool) -> tuple[nn.Module, _FailsOnce, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    failing = _FailsOnce(backward)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), failing, nn.Linear(16, 4))
    if wrap == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        for module in (model[0], model[2], model):  # type: ignore[index]
            fully_shard(module)
    return model, failing, _adam(model)


#: The definitions that the cells use.
DEFINITIONS: tuple[Callable[..., object], ...] = (_adam, _step, _state, _FailsOnce, _made)
PRELUDE = "\n\n".join(
    [
        "import torch, torch.distributed as dist\nfrom torch import nn\nfrom hvdlab.torch.c10d import agree\n",
        *map(inspect.getsource, DEFINITIONS),
        'dist.init_process_group("hvdlab")',
    ]
)
FAILS = """
model, failing, optimizer = _made({wrap!r}, {backward})
_step(model, optimizer)
failing.fails = True
_step(model, optimizer)
"""
GOES_ON = """
failing.fails = False
found = agree(model, optimizer)
for _ in range(2):
    _step(model, optimizer)
other, _, updating = _made({wrap!r}, {backward})
for _ in range(3):
    _step(other, updating)
repr(found), all(map(torch.equal, _state(model, optimizer), _state(other, updating)))
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool.start(SIZE) as started:
        assert not started.run(PRELUDE).errors
        yield started


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("wrap", ["DDP", "fully_shard"])
def test_the_same_wrapped_model_trains_on_after_a_cell_that_failed_within_it(
    pool: Pool, wrap: str, backward: bool
) -> None:
    for _ in range(4):  # among the passes is the one in which DDP reorders its buckets, on some ranks only
        failed = pool.run(FAILS.format(wrap=wrap, backward=backward)).errors
        assert failed.keys() == set(range(SIZE))
        assert failed[1].evalue == "bad batch"
        assert all("rank 1 failed: ValueError: bad batch" in failed[rank].evalue for rank in (0, 2, 3)), (
            failed
        )
        went_on = pool.run(GOES_ON.format(wrap=wrap, backward=backward))
        assert not went_on.errors
        assert list(went_on) == [("the ranks agree", True)] * SIZE


def _digest_of(steps: int | None, place: int = 0, **digests: str) -> _ReplicaDigest:
    return _ReplicaDigest(((place,),), ("w",), {name: text.encode() for name, text in digests.items()}, steps)


def test_without_a_count_of_steps_the_majority_decides() -> None:
    replicas = [
        _digest_of(None, w="a"),
        _digest_of(None, w="b"),
        _digest_of(None, w="b"),
        _digest_of(None, w="a"),
    ]
    assert choose_sources(replicas).sources == {1: 0, 2: 0}
    assert choose_sources(replicas[:3]).sources == {0: 1}
    assert choose_sources(replicas[:1] * 3).sources == {}


def test_models_of_other_parameters_are_refused_by_their_names() -> None:
    other = _ReplicaDigest(((0,),), ("w", "bias"), {"w": b"a", "bias": b"b"}, 1)
    with pytest.raises(InvalidRequestError, match="rank 1 has a parameter `bias`, and rank 0 has not"):
        choose_sources([_digest_of(1, w="a"), other])


def test_a_rank_without_an_optimizers_state_gets_it() -> None:
    replicas = [
        _digest_of(0, w="a"),
        _ReplicaDigest(((0,),), ("w",), {"w": b"b", "optimizer: w.step": b"1"}, 1),
    ]
    found = choose_sources(replicas)
    assert (found.sources, found.tensors) == ({0: 1}, ("w", "optimizer: w.step"))
