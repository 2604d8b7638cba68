"""Each operation with each dtype and operator on hvdlab and on Gloo, on the same ranks: where Gloo works, all bits are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvdlab.torch.c10d  # noqa: F401  (makes the backend known)
from support.ranks.resident import Ranks

Tensors = list[torch.Tensor]
Group = Any
OPS = dist.ReduceOp
OPERATORS = {
    "sum": OPS.SUM, "avg": OPS.AVG, "product": OPS.PRODUCT, "min": OPS.MIN, "max": OPS.MAX, "band": OPS.BAND, "bor": OPS.BOR,
    "bxor": OPS.BXOR,
}  # fmt: skip
DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32,
)  # fmt: skip

_GROUPS: dict[str, Group] = {}


def _begin() -> None:
    dist.init_process_group("hvdlab")
    _GROUPS["gloo"] = dist.new_group(backend="gloo")


@pytest.fixture(scope="module", params=[2, 4])
def world(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, init=False, imports=["hvdlab.torch"]) as ranks:
        ranks.run(_begin, timeout=60)
        yield ranks


def values(rank: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers whose sums and products every dtype holds exactly, so that the order of the ranks makes no
    difference."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 3, shape, generator=generator).to(dtype)


# -- operations that reduce -------------------------------------------------------------------------------------------


def _all_reduce(group: Group, rank: int, size: int, dtype: torch.dtype, op: Any) -> Tensors:
    tensor = values(rank, 3, 2, dtype=dtype)
    dist.all_reduce(tensor, op, group)
    return [tensor]


def _reduce(group: Group, rank: int, size: int, dtype: torch.dtype, op: Any) -> Tensors:
    tensor = values(rank, 3, dtype=dtype)
    dist.reduce(tensor, size - 1, op, group)
    return [tensor] if rank == size - 1 else []  # undefined on other ranks


def _reduce_scatter(group: Group, rank: int, size: int, dtype: torch.dtype, op: Any) -> Tensors:
    output, whole = values(rank, 3, dtype=dtype), values(rank, 2, dtype=dtype)
    dist.reduce_scatter(output, [values(rank + 7 * i, 3, dtype=dtype) for i in range(size)], op, group)
    dist.reduce_scatter_tensor(whole, values(rank, 2 * size, dtype=dtype), op, group)
    return [output, whole]


# -- operations that move ---------------------------------------------------------------------------------------------


def _broadcast(group: Group, rank: int, size: int, dtype: torch.dtype) -> Tensors:
    tensors = [values(rank, 2, 3, dtype=dtype).t() for _ in range(size)]
    for root, tensor in enumerate(tensors):
        dist.broadcast(tensor, root, group)
    return tensors


def _all_gather(group: Group, rank: int, size: int, dtype: torch.dtype) -> Tensors:
    given = values(rank, 2, 3, dtype=dtype)
    outputs, whole = (
        [values(9, 2, 3, dtype=dtype) for _ in range(size)],
        values(9, 2 * size, 3, dtype=dtype),
    )
    dist.all_gather(outputs, given, group)
    dist.all_gather_into_tensor(whole, given, group)
    return [*outputs, whole]


def _gather(group: Group, rank: int, size: int, dtype: torch.dtype) -> Tensors:
    outputs = [values(9, 3, dtype=dtype) for _ in range(size)] if rank == 1 else None
    dist.gather(values(rank, 3, dtype=dtype), outputs, 1, group)
    return outputs or []


def _scatter(group: Group, rank: int, size: int, dtype: torch.dtype) -> Tensors:
    output = values(9, 3, dtype=dtype)
    given = [values(20 + i, 3, dtype=dtype) for i in range(size)] if rank == 1 else None
    dist.scatter(output, given, 1, group)
    return [output]


def _all_to_all(group: Group, rank: int, size: int, dtype: torch.dtype) -> Tensors:
    even = values(9, 2 * size, dtype=dtype)
    dist.all_to_all_single(even, values(rank, 2 * size, dtype=dtype), group=group)
    sends, receives = ([1 + (rank + each) % 2 for each in range(size)] for _ in range(2))
    uneven = values(9, sum(receives), 2, dtype=dtype)
    dist.all_to_all_single(uneven, values(rank, sum(sends), 2, dtype=dtype), receives, sends, group)
    return [even, uneven]


def _messages(group: Group, rank: int, size: int, dtype: torch.dtype) -> Tensors:
    ring, pair = values(9, 4, dtype=dtype), values(9, 2, dtype=dtype)
    works = [
        dist.isend(values(rank, 4, dtype=dtype), (rank + 1) % size, group, tag=3),
        dist.irecv(ring, (rank - 1) % size, group, tag=3),
    ]
    for work in works:
        assert work is not None
        work.wait()
    if rank == 0:
        for _ in range(size - 1):
            dist.recv(values(9, 2, dtype=dtype), group=group)
    else:
        dist.send(pair, 0, group)
    return [ring]


REDUCING = {"all_reduce": _all_reduce, "reduce": _reduce, "reduce_scatter": _reduce_scatter}
MOVING = {
    "broadcast": _broadcast, "all_gather": _all_gather, "gather": _gather, "scatter": _scatter, "all_to_all": _all_to_all,
    "messages": _messages,
}  # fmt: skip


def _cases() -> Iterator[tuple[str, Callable[[Group, int, int], Tensors]]]:
    for dtype in DTYPES:
        for name, moves in MOVING.items():
            yield f"{name} {dtype}", lambda *args, f=moves, d=dtype: f(*args, d)
        for name, reduces in REDUCING.items():
            for word, op in OPERATORS.items():
                yield f"{name} {word} {dtype}", lambda *args, f=reduces, d=dtype, o=op: f(*args, d, o)


def _outcome(
    case: Callable[[Group, int, int], Tensors], group: Group, rank: int, size: int
) -> Tensors | Exception:
    try:
        return case(group, rank, size)
    except Exception as error:  # noqa: BLE001  (the test compares whether both raise)
        return error


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes to compare, since NaN is not equal to itself and torch can't compare some formats. Gloo sums
    bools to 2 and more."""
    found = tensor.reshape(-1).view(torch.uint8)
    return found.ne(0) if tensor.dtype is torch.bool else found


def _compared() -> tuple[int, list[str]]:
    """Return the number of cases in which Gloo works, and those of them in which hvdlab's result differs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    count, wrong = 0, []
    for name, case in _cases():
        reference = _outcome(case, _GROUPS["gloo"], rank, size)
        ours = _outcome(case, dist.group.WORLD, rank, size)
        if isinstance(reference, Exception):
            continue
        count += 1
        if isinstance(ours, Exception):
            wrong.append(f"{name}: {ours}")
        elif not all(torch.equal(_bits(a), _bits(b)) for a, b in zip(reference, ours, strict=True)):
            wrong.append(f"{name}: {ours}, and Gloo {reference}")
    return count, wrong


def test_whatever_gloo_does_is_done_alike(world: Ranks) -> None:
    outcomes = world.run(_compared, timeout=240)
    assert [wrong for _, wrong in outcomes] == [[]] * world.size
    counts = {count for count, _ in outcomes}
    assert len(counts) == 1, "the ranks went through other cases"
    assert min(counts) > 150, "Gloo can do more than this"
