"""The plane `cuda/nccl` on a real GPU with NCCL itself: the suite of planes, and ranks that train.

All members share one GPU. NCCL lets them if it takes each for a host of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from conformance.planes import test_failures as failures
from conformance.planes.conftest import group, matrix  # noqa: F401  # fixtures
from conformance.planes.harness import PlaneUnderTest, WorkerGroup
from conformance.planes.matrix import Matrix
from conformance.planes.test_planes import *
from hvdlab.collectives.errors import AbortedError
from hvdlab.collectives.types import DType
from support.interrupting import press_ctrl_c, when_this_thread_waits
from support.patience import PATIENCE
from support.ranks import forked as forked_workers
from support.ranks.resident import Process, Ranks

SIZE = 3
THIS_MACHINE = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def apart(size: int, path: str, environment: Mapping[str, str]) -> Sequence[Process]:
    """Start the members, each as a host of its own for NCCL."""
    return [
        forked_workers.fork(
            "conformance.planes.worker",
            ["--socket", path, "--index", str(i), "--size", str(size)],
            {**environment, **THIS_MACHINE, "NCCL_HOSTID": f"member-{i}"},
            modules=forked_workers.LIGHT,
        )
        for i in range(size)
    ]


NCCL = PlaneUnderTest(
    "nccl",
    "hvdlab.collectives.planes.gpu.nccl_plane:NcclPlane",
    sizes=(1, SIZE),
    actor="conformance.planes.cuda_actor:real_nccl_actor",
    lacks=frozenset({"messages"}),
    launcher=apart,
    every=4,
    library=True,  # the driver and NCCL keep descriptors for the life of the process
)


@pytest.fixture(scope="module", autouse=True)
def real_nccl(real_gpu: None) -> None:
    if reason := NCCL.unavailable():
        pytest.skip(reason)


@pytest.fixture(scope="module", params=NCCL.sizes)
def resident_group(real_nccl: None, request: pytest.FixtureRequest) -> Iterator[WorkerGroup]:
    members = WorkerGroup(NCCL, request.param)
    yield members
    members.close()


@pytest.fixture
def mortal_group(real_nccl: None) -> Iterator[WorkerGroup]:
    """Yield three members, of which one may be killed while the others wait for it on the GPU."""
    members = WorkerGroup(NCCL, SIZE)
    try:
        members.configure()
        yield members
        members.close()
    finally:
        members.kill()


# -- members ------------------------------------------------------------------------------------------------------------


def test_an_abort_ends_a_wait(group: WorkerGroup, matrix: Matrix) -> None:  # noqa: F811
    if group.size > 1:
        failures.test_abort_ends_a_wait(group, matrix)


def test_an_abort_ends_whatever_runs(group: WorkerGroup, matrix: Matrix) -> None:  # noqa: F811
    if group.size > 1:
        failures.test_abort_ends_whatever_runs(group, matrix)


def test_nothing_starts_after_an_abort(group: WorkerGroup) -> None:  # noqa: F811
    failures.test_nothing_starts_after_an_abort(group)


@pytest.mark.parametrize("what", ["allreduce-large", "alltoall"])
def test_survivors_of_a_killed_member_go_on(mortal_group: WorkerGroup, what: str) -> None:
    failures.test_survivors_of_a_killed_member_go_on(mortal_group, what)


def test_halves_are_rounded_once(group: WorkerGroup) -> None:  # noqa: F811
    for dtype in (DType.F16, DType.BF16):
        same(group.run("conformance.planes.rounding_cases:sums", dtype=dtype, counts=[40, 3, 5000]))


def test_a_tensor_of_several_blocks_comes_out_right(group: WorkerGroup) -> None:  # noqa: F811
    counts = [(1 << 25) + 12_345]  # 64 MiB, and a bit
    same(group.run("conformance.planes.cases:allreduce", counts=counts, dtype=DType.F16, in_place=True))


# -- ranks --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three(real_nccl: None) -> Iterator[Ranks]:
    torch = pytest.importorskip("torch")
    if torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    environment = {**THIS_MACHINE, "HVDLAB_CUDA_PLANE": "nccl"}
    with Ranks(SIZE, env=environment, imports=["hvdlab.torch"]) as ranks:
        ranks.run(as_a_host_of_its_own, timeout=60)
        yield ranks


def hvd() -> Any:
    import hvdlab.torch

    return hvdlab.torch


def as_a_host_of_its_own() -> None:
    os.environ["NCCL_HOSTID"] = f"rank-{hvd().rank()}"


def plane() -> tuple[bool, str]:
    from hvdlab.collectives import context

    return hvd().nccl_built(), context.engine().device_plane(0, "cuda")


def trained() -> list[float]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).cuda()
    hvd().broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd().DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), named_parameters=model.named_parameters()
    )
    torch.manual_seed(hvd().rank())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 8, device="cuda")).square().mean().backward()
        optimizer.step()
    return [float(parameter.sum()) for parameter in model.parameters()]


def behind_a_stream() -> float:
    """Check that results of a side stream are there when the collective reads them."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        slow = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            slow = torch.tanh(slow @ slow)
        value = torch.full((1000,), 2.0, device="cuda") + 0.0 * slow[0, :1000]
        return float(hvd().allreduce(value, op=hvd().Sum).sum())


def kept() -> None:
    import torch

    global mine
    mine = torch.full((10,), 7.0, device="cuda")


def of_mine() -> float:
    return float(mine.sum())


def total() -> float:
    import torch

    return float(hvd().allreduce(torch.ones(100_000, device="cuda"), op=hvd().Sum)[-1])


def interrupted() -> None:
    import torch

    handle = hvd().allreduce_async(torch.ones(100_000, device="cuda"), name="waits for rank 0")
    interrupt = when_this_thread_waits(press_ctrl_c) if hvd().rank() == 1 else None
    try:
        hvd().synchronize(handle)
    finally:
        if interrupt is not None:
            interrupt.join()


def waiting() -> None:
    import torch

    if hvd().rank() != 0:
        hvd().allreduce(torch.ones(100_000, device="cuda"), name="waits for rank 0")


mine: Any


def test_ranks_train_by_nccl(three: Ranks) -> None:
    assert three.run(plane, timeout=60) == [(True, "cuda/nccl")] * SIZE
    found = three.run(trained, timeout=60)
    assert found == [found[0]] * SIZE


def test_a_collective_is_ordered_behind_the_stream_of_its_thread(three: Ranks) -> None:
    assert three.run(behind_a_stream, timeout=60) == [2000.0 * SIZE] * SIZE


def test_an_interrupt_ends_a_collective_and_memory_stays(three: Ranks) -> None:
    three.run(kept, timeout=60)
    three.run(total, timeout=60)
    outcomes = three.outcomes(interrupted, ranks=[1, 2], timeout=60)
    assert [type(outcome) for outcome in outcomes] == [KeyboardInterrupt, AbortedError]
    three.catch_up()
    assert three.run(total, timeout=60) == [float(SIZE)] * SIZE
    assert three.run(of_mine, timeout=60) == [70.0] * SIZE


def test_survivors_of_a_dead_rank_go_on(three: Ranks) -> None:
    """The last test with these ranks: one of them dies."""
    three.run(kept, timeout=60)
    running = three.start(waiting, ranks=[1, 2])
    three.kill(0)
    assert all(isinstance(outcome, AbortedError) for outcome in running.outcomes(PATIENCE))
    assert three.run(of_mine, ranks=[1, 2], timeout=60) == [70.0, 70.0]
    assert three.run(total, ranks=[1, 2], timeout=60) == [2.0, 2.0]
