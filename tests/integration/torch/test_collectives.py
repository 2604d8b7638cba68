"""Collectives of tensors that only torch has, or whose form only torch has. ``conformance/bindings/test_values.py`` has the values of all."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch

import hvdlab.torch as hvd
from support.ranks.resident import Ranks


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a rank's contribution: small whole numbers, so that every dtype holds sums and products exactly."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def all_of(size: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [tensor_of(rank, shape, dtype) for rank in range(size)]


def equal(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def _large() -> tuple[bool, float]:
    given = torch.full((40 << 20,), float(hvd.rank() + 1))  # 160 MiB: neither fused nor within a slot
    address = given.data_ptr()
    output = hvd.allreduce_(given, op=hvd.Sum)
    return output.data_ptr() == address and bool((output == output[0]).all()), output[-1].item()


def test_a_tensor_larger_than_any_buffer(two_ranks: Ranks) -> None:
    assert two_ranks.run(_large, timeout=60) == [(True, 3.0)] * 2


def _compressed() -> tuple[torch.Tensor, torch.Tensor]:
    return (
        hvd.allreduce(
            tensor_of(hvd.rank(), (9,), torch.float64), op=hvd.Sum, compression=hvd.Compression.fp16
        ),
        hvd.allreduce(tensor_of(hvd.rank(), (9,), torch.int32), op=hvd.Sum, compression=hvd.Compression.fp16),
    )


def test_compression_keeps_the_dtype(ranks: Ranks) -> None:
    for floats, integers in ranks.run(_compressed):
        assert equal(floats, reduce(torch.add, all_of(ranks.size, (9,), torch.float64)))
        assert equal(integers, reduce(torch.add, all_of(ranks.size, (9,), torch.int32)))


def _in_any_order() -> list[torch.Tensor]:
    names = [f"t{i}" for i in range(6)]
    order = names if hvd.rank() % 2 == 0 else names[::-1]
    handles = {n: hvd.allreduce_async(torch.full((3,), float(n[1:])), name=n, op=hvd.Sum) for n in order}
    return [hvd.synchronize(handles[n]) for n in names]


def test_named_tensors_may_be_submitted_in_any_order(ranks: Ranks) -> None:
    for outcome in ranks.run(_in_any_order):
        assert [t.tolist() for t in outcome] == [[float(i * ranks.size)] * 3 for i in range(6)]


def _anonymous() -> list[float]:
    handles = [hvd.allreduce_async(torch.tensor(float(i)), op=hvd.Sum) for i in range(5)]
    results = [hvd.synchronize(handle).item() for handle in handles]
    assert all(hvd.poll(handle) for handle in handles)
    return results


def test_anonymous_tensors_are_matched_in_order(ranks: Ranks) -> None:
    assert ranks.run(_anonymous) == [[float(i * ranks.size) for i in range(5)]] * ranks.size


def _forgotten_tensors() -> list[float]:
    handles = [hvd.allreduce_async_(torch.full((1000,), 1.0), op=hvd.Sum) for _ in range(20)]
    handles += [hvd.allreduce_async(torch.full((1000,), 1.0), op=hvd.Sum) for _ in range(20)]
    for _ in range(40):
        torch.full((1000,), 7.0)  # would reuse the tensors' memory if it were freed
    return [hvd.synchronize(handle).sum().item() for handle in handles]


def test_handles_keep_their_tensors_alive(ranks: Ranks) -> None:
    assert ranks.run(_forgotten_tensors) == [[1000.0 * ranks.size] * 40] * ranks.size


def _without_gradients() -> list[float]:
    with torch.inference_mode():
        made_inside = torch.ones(2)
        hvd.allreduce_(made_inside, op=hvd.Sum)
        turned = hvd.allreduce_(torch.ones(2, 2).t()[:1], op=hvd.Sum)
        gathered = hvd.allgather(torch.ones(1, dtype=torch.bfloat16))
    parameter = torch.nn.Parameter(torch.ones(2))
    hvd.allreduce_(parameter, op=hvd.Sum)
    return [made_inside.sum().item(), turned.sum().item(), gathered.sum().item(), parameter.sum().item()]


def test_inference_mode_and_parameters(ranks: Ranks) -> None:
    n = ranks.size
    assert ranks.run(_without_gradients) == [[2.0 * n, 2.0 * n, float(n), 2.0 * n]] * n


def _empty_groups() -> list[Any]:
    return [
        hvd.grouped_allreduce([]),
        hvd.grouped_allgather([]),
        hvd.synchronize(hvd.grouped_reducescatter_async([])),
    ]


def test_an_empty_group_is_an_empty_list(ranks: Ranks) -> None:
    assert ranks.run(_empty_groups) == [[[], [], []]] * ranks.size


def _large_integers(dtype: torch.dtype) -> list[list[int]]:
    info = torch.iinfo(dtype)
    given = torch.tensor([info.max, info.min, info.max // 2 + 1], dtype=dtype)
    several = given.repeat(2000)
    outcomes = [
        hvd.allreduce(given),
        hvd.allreduce_(several.clone())[-3:],
        hvd.grouped_allreduce([given, several])[1][:3],
        hvd.grouped_allreduce([given] * 2)[1],
        hvd.reducescatter(several)[:3],
        hvd.allreduce(given, process_set=hvd.global_process_set),
    ]
    if dtype is not torch.int64:
        outcomes.append(hvd.allreduce(given, op=hvd.Sum, postscale_factor=1.0 / hvd.size()))
    return [outcome.tolist() for outcome in outcomes]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_the_average_of_equal_integers_is_that_integer(ranks: Ranks, dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    for outcome in ranks.run(_large_integers, dtype):
        for averages in outcome:
            assert sorted(averages) == sorted([info.max, info.min, info.max // 2 + 1])


def _bools() -> list[list[bool]]:
    mine = torch.arange(hvd.size()) == hvd.rank()
    root = hvd.size() - 1
    gathered, sent, exchanged = hvd.allgather(mine), hvd.broadcast(mine, root), hvd.alltoall(mine)
    assert isinstance(exchanged, torch.Tensor)
    return [gathered.tolist(), sent.tolist(), exchanged.tolist()]


def test_bools_are_gathered_broadcast_and_exchanged(ranks: Ranks) -> None:
    everyone = range(ranks.size)
    gathered = [rank == i for rank in everyone for i in everyone]
    from_last = [i == ranks.size - 1 for i in everyone]
    for rank, outcome in enumerate(ranks.run(_bools)):
        assert outcome == [gathered, from_last, [sender == rank for sender in everyone]]


def _scaled_and_compressed() -> list[torch.Tensor]:
    given = tensor_of(hvd.rank(), (4 * hvd.size(), 2), torch.float64)
    return [
        hvd.reducescatter(given, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25),
        hvd.reducescatter(given, op=hvd.Sum, compression=hvd.Compression.fp16),
        *hvd.grouped_allreduce([given], op=hvd.Sum, compression=hvd.Compression.fp16),
    ]


def test_reducescatter_and_groups_are_scaled_and_compressed(ranks: Ranks) -> None:
    total = reduce(torch.add, all_of(ranks.size, (4 * ranks.size, 2), torch.float64))
    for rank, (scaled, scattered, grouped) in enumerate(ranks.run(_scaled_and_compressed)):
        own = total[4 * rank : 4 * (rank + 1)]
        assert equal(scaled, own / 2)
        assert equal(scattered, own)
        assert equal(grouped, total)


def _barrier() -> None:
    hvd.barrier()
    hvd.barrier(process_set=hvd.global_process_set)


def test_barrier(ranks: Ranks) -> None:
    assert ranks.run(_barrier) == [None] * ranks.size


def _sparse() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rank = hvd.rank()
    entries = torch.tensor([[0, rank + 1], [1, 2]])
    given = torch.sparse_coo_tensor(entries, torch.tensor([1.0, 2.0]), (6, 3), check_invariants=True)
    rows = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1, 4), (6, 4), check_invariants=True)
    return (
        hvd.allreduce(given, op=hvd.Sum).to_dense(),
        hvd.synchronize(hvd.sparse_allreduce_async(given, "sparse", hvd.Average)).to_dense(),
        hvd.allreduce(rows, op=hvd.Sum, postscale_factor=3.0).to_dense(),
    )


def test_sparse_allreduce(ranks: Ranks) -> None:
    total, rows = torch.zeros(6, 3), torch.zeros(6, 4)
    for rank in range(ranks.size):
        total[0, 1] += 1.0
        total[rank + 1, 2] += 2.0
        rows[rank] = 3.0
    for summed, averaged, embedded in ranks.run(_sparse):
        assert equal(summed, total)
        assert torch.allclose(averaged, total / ranks.size)
        assert equal(embedded, rows)
