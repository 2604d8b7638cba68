"""Values of every collective on real ranks, against the same arithmetic in one process."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch

import hvdlab.torch as hvd
from ranks import Ranks

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
SHAPES = [(), (0,), (1,), (17,), (3, 0, 2), (5, 3)]


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a rank's contribution: small whole numbers, so that every dtype holds sums and products exactly."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def all_of(size: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [tensor_of(rank, shape, dtype) for rank in range(size)]


def equal(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


# -- allreduce --------------------------------------------------------------------------------------------------------

REFERENCE = {
    hvd.Sum: lambda ts: reduce(torch.add, ts),
    hvd.Min: lambda ts: reduce(torch.minimum, ts),
    hvd.Max: lambda ts: reduce(torch.maximum, ts),
    hvd.Product: lambda ts: reduce(torch.mul, ts),
}


def _allreduce(shape: tuple[int, ...], dtype: torch.dtype) -> dict[int, list[torch.Tensor]]:
    outcome = {}
    for op in REFERENCE:
        given = tensor_of(hvd.rank(), shape, dtype)
        before = given.clone()
        output = hvd.allreduce(given, op=op)
        assert equal(given, before)
        in_place = given.clone()
        assert hvd.allreduce_(in_place, op=op) is in_place
        handle = hvd.allreduce_async(given, op=op)
        started = given.clone()
        handle_ = hvd.allreduce_async_(started, op=op)
        assert hvd.synchronize(handle_) is started
        outcome[int(op)] = [output, in_place, hvd.synchronize(handle), started]
    return outcome


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allreduce_of_every_dtype_and_operator(ranks: Ranks, dtype: torch.dtype) -> None:
    for outcome in ranks.run(_allreduce, (5, 3), dtype):
        for op, outputs in outcome.items():
            expected = REFERENCE[op](all_of(ranks.size, (5, 3), dtype))
            assert all(equal(output, expected) for output in outputs), (op, outputs, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_allreduce_of_every_shape(ranks: Ranks, shape: tuple[int, ...]) -> None:
    for outcome in ranks.run(_allreduce, shape, torch.float32):
        for op, outputs in outcome.items():
            expected = REFERENCE[op](all_of(ranks.size, shape))
            assert all(equal(output, expected) for output in outputs)


def _allreduce_bool() -> list[list[bool]]:
    given = torch.tensor([False, hvd.rank() == 0, True])
    return [hvd.allreduce(given, op=hvd.Min).tolist(), hvd.allreduce(given, op=hvd.Max).tolist()]


def test_allreduce_of_bool_is_all_and_any(ranks: Ranks) -> None:
    only_rank_0 = ranks.size == 1
    for outcome in ranks.run(_allreduce_bool):
        assert outcome == [[False, only_rank_0, True], [False, True, True]]


def _average() -> dict[str, torch.Tensor]:
    rank = hvd.rank()
    given = tensor_of(rank, (6,), torch.float64)
    return {
        "default": hvd.allreduce(given),
        "integers": hvd.allreduce(tensor_of(rank, (6,), torch.int32)),
        "scaled": hvd.allreduce(given, prescale_factor=0.5, postscale_factor=4.0),
        "scaled sum": hvd.allreduce(given, op=hvd.Sum, prescale_factor=3.0),
    }


def test_average_and_scale_factors(ranks: Ranks) -> None:
    total = reduce(torch.add, all_of(ranks.size, (6,), torch.float64))
    whole = reduce(torch.add, all_of(ranks.size, (6,), torch.int32))
    for outcome in ranks.run(_average):
        assert torch.allclose(outcome["default"], total / ranks.size)
        assert equal(outcome["integers"], (whole.double() / ranks.size).to(torch.int32))
        assert torch.allclose(outcome["scaled"], total / ranks.size * 2)
        assert torch.allclose(outcome["scaled sum"], total * 3)


def _not_contiguous() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    base = tensor_of(hvd.rank(), (4, 6))
    view = base.t()
    output = hvd.allreduce(view, op=hvd.Sum)
    spared = base[:, 1::2].clone()
    columns = base[:, ::2]
    returned = hvd.allreduce_(columns, op=hvd.Sum)
    return output, returned.contiguous(), base, returned is columns and torch.equal(base[:, 1::2], spared)


def test_tensors_that_are_not_contiguous(ranks: Ranks) -> None:
    total = reduce(torch.add, all_of(ranks.size, (4, 6)))
    for output, returned, base, in_place in ranks.run(_not_contiguous):
        assert equal(output, total.t().contiguous())
        assert equal(returned, total[:, ::2].contiguous())
        assert torch.equal(base[:, ::2], total[:, ::2])
        assert in_place


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


# -- groups -----------------------------------------------------------------------------------------------------------


def _grouped() -> dict[str, list[torch.Tensor]]:
    rank = hvd.rank()
    given = [tensor_of(rank, (3,)), tensor_of(rank, (2, 2), torch.int64), tensor_of(rank, (), torch.bfloat16)]
    in_place = [t.clone() for t in given]
    started = [t.clone() for t in given]
    returned = hvd.grouped_allreduce_(in_place, op=hvd.Sum)
    assert all(a is b for a, b in zip(returned, in_place, strict=True))
    return {
        "allreduce": hvd.grouped_allreduce(given, op=hvd.Sum),
        "allreduce_": in_place,
        "allreduce_async": hvd.synchronize(hvd.grouped_allreduce_async(given, op=hvd.Sum, name="group")),
        "allreduce_async_": hvd.synchronize(hvd.grouped_allreduce_async_(started, op=hvd.Sum)),
        "compressed": hvd.grouped_allreduce(given, op=hvd.Sum, compression=hvd.Compression.fp16),
    }


def test_grouped_allreduce(ranks: Ranks) -> None:
    shapes = [((3,), torch.float32), ((2, 2), torch.int64), ((), torch.bfloat16)]
    expected = [reduce(torch.add, all_of(ranks.size, *shape)) for shape in shapes]
    for outcome in ranks.run(_grouped):
        for form, outputs in outcome.items():
            assert all(equal(a, b) for a, b in zip(outputs, expected, strict=True)), form


def _empty_groups() -> list[Any]:
    return [
        hvd.grouped_allreduce([]),
        hvd.grouped_allgather([]),
        hvd.synchronize(hvd.grouped_reducescatter_async([])),
    ]


def test_an_empty_group_is_an_empty_list(ranks: Ranks) -> None:
    assert ranks.run(_empty_groups) == [[[], [], []]] * ranks.size


# -- allgather, broadcast ---------------------------------------------------------------------------------------------


def _allgather(dtype: torch.dtype) -> list[torch.Tensor]:
    rank = hvd.rank()
    given = tensor_of(rank, (rank, 3), dtype)  # rank 0 has no rows
    return [
        hvd.allgather(given),
        hvd.synchronize(hvd.allgather_async(given, name="ragged")),
        hvd.allgather(tensor_of(rank, (2,), dtype)),
        hvd.allgather(tensor_of(rank, (3, 2), dtype).t()),
        *hvd.grouped_allgather([given, tensor_of(rank, (1, 2), dtype)]),
        *hvd.synchronize(hvd.grouped_allgather_async([given, tensor_of(rank, (1, 2), dtype)], name="pair")),
    ]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
def test_allgather(ranks: Ranks, dtype: torch.dtype) -> None:
    everyone = range(ranks.size)
    ragged = torch.cat([tensor_of(rank, (rank, 3), dtype) for rank in everyone])
    pair = torch.cat(all_of(ranks.size, (1, 2), dtype))
    flat = torch.cat(all_of(ranks.size, (2,), dtype))
    turned = torch.cat([t.t() for t in all_of(ranks.size, (3, 2), dtype)])
    for outcome in ranks.run(_allgather, dtype):
        expected = [ragged, ragged, flat, turned, ragged, pair, ragged, pair]
        assert all(equal(a, b) for a, b in zip(outcome, expected, strict=True))


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


def _broadcast(root: int, dtype: torch.dtype) -> list[torch.Tensor]:
    rank = hvd.rank()
    given = tensor_of(rank, (3, 2), dtype)
    before = given.clone()
    output = hvd.broadcast(given, root)
    started = hvd.synchronize(hvd.broadcast_async(given, root, name="b"))
    assert equal(given, before)
    assert output.data_ptr() != given.data_ptr()
    in_place = given.clone()
    assert hvd.broadcast_(in_place, root) is in_place
    turned = tensor_of(rank, (2, 3), dtype).t()
    assert hvd.synchronize(hvd.broadcast_async_(turned, root)) is turned
    return [output, started, in_place, turned.contiguous(), hvd.broadcast(tensor_of(rank, (), dtype), root)]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
def test_broadcast(ranks: Ranks, dtype: torch.dtype) -> None:
    root = ranks.size - 1
    expected = [tensor_of(root, (3, 2), dtype)] * 3
    expected += [tensor_of(root, (2, 3), dtype).t(), tensor_of(root, (), dtype)]
    for outcome in ranks.run(_broadcast, root, dtype):
        assert all(equal(a, b) for a, b in zip(outcome, expected, strict=True))


# -- reducescatter, alltoall, barrier ---------------------------------------------------------------------------------


def _reducescatter() -> list[torch.Tensor]:
    rank = hvd.rank()
    given = tensor_of(rank, (7, 2), torch.float64)
    return [
        hvd.reducescatter(given),
        hvd.reducescatter(given, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25),
        hvd.synchronize(hvd.reducescatter_async(given, op=hvd.Max, name="max")),
        hvd.reducescatter(given, op=hvd.Sum, compression=hvd.Compression.fp16),
        *hvd.grouped_reducescatter([given, tensor_of(rank, (1,))], op=hvd.Sum),
        *hvd.synchronize(hvd.grouped_reducescatter_async([given, tensor_of(rank, (0, 4))], op=hvd.Sum)),
    ]


def rows_of(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    base, more = divmod(tensor.shape[0], size)
    return tensor.split([base + (r < more) for r in range(size)])[rank]


def test_reducescatter(ranks: Ranks) -> None:
    size = ranks.size
    given = all_of(size, (7, 2), torch.float64)
    total, largest = reduce(torch.add, given), reduce(torch.maximum, given)
    single, empty = reduce(torch.add, all_of(size, (1,))), torch.empty(0, 4)
    expected = [total / size, total / 2, largest, total, total, single, total, empty]
    for rank, outcome in enumerate(ranks.run(_reducescatter)):
        for output, whole in zip(outcome, expected, strict=True):
            assert output.dtype == whole.dtype
            assert torch.allclose(output, rows_of(whole, rank, size))


def _alltoall(dtype: torch.dtype) -> list[Any]:
    rank, size = hvd.rank(), hvd.size()
    even = tensor_of(rank, (2 * size, 3), dtype)
    splits = [(rank + i) % 3 for i in range(size)]
    ragged = tensor_of(rank, (sum(splits), 2), dtype)
    return [
        hvd.alltoall(even),
        hvd.alltoall(ragged, splits=splits),
        hvd.alltoall(ragged, splits=torch.tensor(splits, dtype=torch.int32)),
        hvd.synchronize(hvd.alltoall_async(even, name="even")),
    ]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
def test_alltoall(ranks: Ranks, dtype: torch.dtype) -> None:
    size = ranks.size
    splits = [[(rank + i) % 3 for i in range(size)] for rank in range(size)]
    for me, (even, listed, as_tensor, pair) in enumerate(ranks.run(_alltoall, dtype)):
        whole = torch.cat([t.split(2)[me] for t in all_of(size, (2 * size, 3), dtype)])
        pieces = [tensor_of(r, (sum(splits[r]), 2), dtype).split(splits[r])[me] for r in range(size)]
        received = torch.tensor([splits[r][me] for r in range(size)], dtype=torch.int32)
        assert equal(even, whole)
        assert equal(pair[0], whole)
        assert pair[1].tolist() == [2] * size
        for output, counts in (listed, as_tensor):
            assert equal(output, torch.cat(pieces))
            assert equal(counts, received)


def _barrier() -> None:
    hvd.barrier()
    hvd.barrier(process_set=hvd.global_process_set)


def test_barrier(ranks: Ranks) -> None:
    assert ranks.run(_barrier) == [None] * ranks.size


# -- sparse -----------------------------------------------------------------------------------------------------------


def _sparse() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rank = hvd.rank()
    entries = torch.tensor([[0, rank + 1], [1, 2]])
    given = torch.sparse_coo_tensor(entries, torch.tensor([1.0, 2.0]), (6, 3), check_invariants=True)
    rows = torch.sparse_coo_tensor([[rank]], torch.ones(1, 4), (6, 4), check_invariants=True)
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
