"""Ranks that train with torch on one GPU which they share: effects of torch's streams, allocator and autograd, and
faults on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hvdlab.collectives.errors import AbortedError, InvalidRequestError
from support.interrupting import press_ctrl_c, when_this_thread_waits
from support.patience import PATIENCE
from support.ranks.resident import Ranks

SIZE = 8
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def torch_with_cuda(real_gpu: None) -> None:
    if torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")


@pytest.fixture(scope="module")
def eight(torch_with_cuda: None) -> Iterator[Ranks]:
    with Ranks(SIZE, imports=["hvdlab.torch"]) as ranks:
        yield ranks


@pytest.fixture
def three(torch_with_cuda: None) -> Iterator[Ranks]:
    with Ranks(3, imports=["hvdlab.torch"]) as ranks:
        yield ranks


# -- on the ranks -----------------------------------------------------------------------------------------------------


def hvd() -> Any:
    import hvdlab.torch

    return hvdlab.torch


def plane() -> tuple[bool, tuple[str, ...]]:
    from hvdlab.collectives import context

    total()
    return hvd().cuda_built(), context.engine().device_planes()


def links() -> dict[str, tuple[int, ...]]:
    from hvdlab.collectives import context

    return dict(context.engine().links())


def total(count: int = 100_000) -> float:
    return float(hvd().allreduce(torch.ones(count, device=GPU), op=hvd().Sum)[-1])


def behind_a_stream() -> float:
    """Check that results of a side stream are there when the collective reads them, without the user's help."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        slow = torch.randn(4096, 4096, device=GPU)
        for _ in range(20):
            slow = torch.tanh(slow @ slow)
        value = torch.full((1000,), 2.0, device=GPU) + 0.0 * slow[0, :1000]
        summed = hvd().allreduce(value, op=hvd().Sum)
        return float(summed.sum())


def many_shapes(seed: int) -> bool:
    """Outputs that the engine's thread allocates, used and freed on a side stream."""
    rng = torch.Generator().manual_seed(seed)
    side = torch.cuda.Stream()
    rank, size = hvd().rank(), hvd().size()
    with torch.cuda.stream(side):
        for _ in range(50):
            rows = int(torch.randint(1, 2000, (1,), generator=rng))
            gathered = hvd().allgather(torch.full((rows, 3), float(rank), device=GPU))
            expected = torch.arange(size, device=GPU, dtype=torch.float32).repeat_interleave(rows)
            if not torch.equal(gathered[:, 1], expected):
                return False
    return True


def trained(amp: bool) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(GPU)
    hvd().broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd().DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), named_parameters=model.named_parameters()
    )
    scaler = torch.amp.GradScaler("cuda", enabled=amp)
    torch.manual_seed(hvd().rank())
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", enabled=amp):
            loss = model(torch.randn(16, 8, device=GPU)).square().mean()
        scaler.scale(loss).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    return [float(p.sum()) for p in model.parameters()]


def normalized() -> tuple[float, float]:
    layer = hvd().SyncBatchNorm(4).to(GPU)
    torch.manual_seed(hvd().rank())
    batch = torch.randn(16, 4, device=GPU, requires_grad=True)
    layer(batch).square().sum().backward()
    return float(layer.running_mean.sum()), float(layer.running_var.sum())


def captured() -> str:
    graph, value = torch.cuda.CUDAGraph(), torch.ones(10, device=GPU)
    try:
        with torch.cuda.graph(graph):
            hvd().allreduce_(value)
    except InvalidRequestError as error:
        return str(error)
    return ""


def share_of_memory(fraction: float) -> bool:
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        torch.empty(torch.cuda.mem_get_info()[1], dtype=torch.uint8, device=GPU)
    except torch.cuda.OutOfMemoryError:
        found: bool = total() == hvd().size()
        return found
    return False


def kept() -> None:
    global mine
    mine = torch.full((10,), 7.0, device=GPU)


def of_mine() -> float:
    return float(mine.sum())


def illegal_access() -> None:
    if hvd().rank() == 1:
        torch.ones(3, device=GPU)[
            torch.tensor([10**9], device=GPU)
        ]  # a kernel asserts, and the context is gone
    hvd().allreduce(torch.ones(1000, device=GPU), name="after the fault")


def waiting() -> None:
    if hvd().rank() != 0:
        hvd().allreduce(torch.ones(100_000, device=GPU), name="waits for rank 0")


def interrupted() -> None:
    handle = hvd().allreduce_async(torch.ones(100_000, device=GPU), name="waits for rank 0")
    interrupt = when_this_thread_waits(press_ctrl_c) if hvd().rank() == 1 else None
    try:
        hvd().synchronize(handle)
    finally:
        if interrupt is not None:
            interrupt.join()


def in_sets_by_turns() -> list[float]:
    """Check that two process sets with the same ranks have the same memory open, and close it when it was freed."""
    from hvdlab.collectives import context

    pair = hvd().add_process_set(hvd().ProcessSet([0, 1]))
    sets = [pair, hvd().global_process_set]
    found = []
    for turn in range(6):
        value = torch.full((3_000_000 + turn * 1_000_000,), float(turn), device=GPU)
        for each in sets:
            if hvd().rank() in each.ranks:
                found.append(float(hvd().allreduce(value, op=hvd().Sum, process_set=each)[-1]))
                assert context.engine().device_planes(each.process_set_id) == ("cuda/ipc, checked",)
        del value
        torch.cuda.empty_cache()
    hvd().remove_process_set(pair)
    return found


def by_torch_distributed() -> tuple[str, list[float], list[float]]:
    import torch.distributed as dist

    import hvdlab.torch.c10d  # noqa: F401  # makes the backend known where hvdlab is not installed

    dist.init_process_group("hvdlab")
    rank, size = dist.get_rank(), dist.get_world_size()
    value = torch.full((5,), float(rank), device=GPU)
    dist.all_reduce(value)
    each = [torch.empty(5, device=GPU) for _ in range(size)]
    dist.all_gather(each, torch.full((5,), float(rank), device=GPU))
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100).to(GPU))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 100, device=GPU)).square().mean().backward()
        optimizer.step()
    collected = [float(one[0]) for one in each]
    dist.destroy_process_group()
    return str(value.device), [float(value[0]), *collected], [float(p.sum()) for p in model.parameters()]


mine: torch.Tensor


# -- tests ------------------------------------------------------------------------------------------------------------


def test_eight_ranks_share_a_gpu(eight: Ranks) -> None:
    assert eight.run(plane, timeout=60) == [(True, ("cuda/ipc, checked",))] * SIZE
    assert eight.run(total, timeout=60) == [float(SIZE)] * SIZE
    others = [tuple(rank for rank in range(SIZE) if rank != mine) for mine in range(SIZE)]
    assert eight.run(links, timeout=60) == [{"same GPU": ranks} for ranks in others]


def test_a_collective_is_ordered_behind_the_stream_of_its_thread(eight: Ranks) -> None:
    assert eight.run(behind_a_stream, timeout=60) == [2000.0 * SIZE] * SIZE


def test_memory_of_outputs_is_not_given_out_again_too_early(eight: Ranks) -> None:
    assert eight.run(many_shapes, 5, timeout=60) == [True] * SIZE


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "AMP"])
def test_training_keeps_parameters_equal(eight: Ranks, amp: bool) -> None:
    found = eight.run(trained, amp, timeout=60)
    assert found == [found[0]] * SIZE


def test_batches_are_normalized_over_all_ranks(eight: Ranks) -> None:
    found = eight.run(normalized, timeout=60)
    assert found == [found[0]] * SIZE


def test_a_capture_is_refused(eight: Ranks) -> None:
    assert all("can't be captured" in text for text in eight.run(captured, timeout=60))


def test_a_rank_that_runs_out_of_its_share_goes_on(eight: Ranks) -> None:
    assert eight.run(share_of_memory, 1 / SIZE, timeout=60) == [True] * SIZE


def test_process_sets_share_what_they_have_open(three: Ranks) -> None:
    pairs, all_of_them = [2.0 * turn for turn in range(6)], [3.0 * turn for turn in range(6)]
    mixed = [value for turn in zip(pairs, all_of_them, strict=True) for value in turn]
    assert three.run(in_sets_by_turns, timeout=60) == [mixed, mixed, all_of_them]


def test_torch_distributed_takes_cuda_tensors(three: Ranks) -> None:
    found = three.run(by_torch_distributed, timeout=60)
    assert [device for device, _, _ in found] == ["cuda:0"] * 3
    assert [values for _, values, _ in found] == [[3.0, 0.0, 1.0, 2.0]] * 3
    assert [parameters for _, _, parameters in found] == [found[0][2]] * 3


def test_a_rank_whose_context_is_gone_says_so_and_the_others_keep_theirs(three: Ranks) -> None:
    three.run(kept, timeout=60)
    outcomes = three.outcomes(illegal_access, timeout=60)
    assert all(isinstance(outcome, Exception) for outcome in outcomes)
    assert "CUDA" in str(outcomes[1]) or "GPU" in str(outcomes[1])
    assert three.run(of_mine, ranks=[0, 2], timeout=60) == [70.0, 70.0]


def test_survivors_of_a_rank_whose_memory_they_have_open_keep_theirs(three: Ranks) -> None:
    three.run(kept, timeout=60)
    three.run(total, timeout=60)
    running = three.start(waiting, ranks=[1, 2])
    three.kill(0)
    outcomes = running.outcomes(PATIENCE)
    assert all(isinstance(outcome, AbortedError) for outcome in outcomes)
    assert three.run(of_mine, ranks=[1, 2], timeout=60) == [70.0, 70.0]
    assert three.run(total, ranks=[1, 2], timeout=60) == [2.0, 2.0]


def test_an_interrupt_in_a_collective_ends_it_and_the_next_one_works(three: Ranks) -> None:
    three.run(total, timeout=60)
    outcomes = three.outcomes(interrupted, ranks=[1, 2], timeout=60)
    assert [type(outcome) for outcome in outcomes] == [KeyboardInterrupt, AbortedError]
    three.catch_up()
    assert three.run(total, timeout=60) == [3.0] * 3
