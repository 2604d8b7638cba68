"""CuPy's arrays in ``hvdlab.numpy`` on a real GPU, which three ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.ranks.resident import Ranks

SIZE = 3
TYPES = ("float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64")


@pytest.fixture(scope="module")
def three(real_gpu: None) -> Iterator[Ranks]:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    with Ranks(SIZE, imports=["hvdlab.numpy"]) as ranks:
        yield ranks


def hvd() -> Any:
    import hvdlab.numpy

    return hvdlab.numpy


def sums() -> tuple[tuple[str, ...], list[tuple[str, float, bool]]]:
    import cupy  # type: ignore[import-not-found]  # the tests skip without it

    from hvdlab.collectives import context

    found = []
    for kind in TYPES:
        array = cupy.arange(1000).astype(kind) % 7 + hvd().rank()
        total = hvd().allreduce(array, op=hvd().Sum)
        expected = SIZE * (cupy.arange(1000).astype(kind) % 7) + 3
        found.append((str(total.dtype), float(total[5]), bool((total == expected).all())))
    return context.engine().device_planes(), found


def in_place() -> tuple[list[float], list[float], list[float]]:
    """Contiguous, every second column, and a transposed view."""
    import cupy

    whole, wide = cupy.ones(4, cupy.float32), cupy.zeros((3, 8), cupy.float32)
    hvd().allreduce_(whole, op=hvd().Sum)
    wide[:, ::2] = 2.0
    hvd().allreduce_(wide[:, ::2], op=hvd().Sum)
    turned = cupy.arange(6, dtype=cupy.float64).reshape(2, 3).T
    hvd().allreduce_(turned, op=hvd().Sum)
    return whole.tolist(), wide[1].tolist(), turned[:, 1].tolist()


def behind_a_stream() -> float:
    import cupy

    with cupy.cuda.Stream(non_blocking=True):
        slow = cupy.random.rand(3000, 3000)
        for _ in range(10):
            slow = cupy.tanh(slow @ slow)
        value = cupy.full(1000, 2.0) + 0.0 * slow[0, :1000]
        return float(hvd().allreduce(value, op=hvd().Sum).sum())


def moved() -> tuple[list[int], list[int], list[int]]:
    import cupy

    rank = hvd().rank()
    gathered = hvd().allgather(cupy.full(rank + 1, rank, cupy.int32))
    sent = hvd().broadcast(cupy.full(2, rank, cupy.int64), root_rank=1)
    received, _ = hvd().alltoall(cupy.arange(SIZE, dtype=cupy.int32) + 10 * rank, splits=[1] * SIZE)
    return gathered.tolist(), sent.tolist(), received.tolist()


def test_sums_have_the_arrays_type_and_stay_on_the_gpu(three: Ranks) -> None:
    expected = [(kind, 18.0, True) for kind in TYPES]
    assert three.run(sums, timeout=60) == [(("cuda/ipc, checked",), expected)] * SIZE


def test_arrays_are_changed_in_place_whatever_their_layout(three: Ranks) -> None:
    wide = [6.0, 0.0] * 4
    assert three.run(in_place, timeout=60) == [([3.0] * 4, wide, [9.0, 12.0, 15.0])] * SIZE


def test_a_collective_is_ordered_behind_the_arrays_stream(three: Ranks) -> None:
    assert three.run(behind_a_stream, timeout=60) == [2000.0 * SIZE] * SIZE


def test_other_collectives_move_arrays(three: Ranks) -> None:
    for rank, (gathered, sent, received) in enumerate(three.run(moved, timeout=60)):
        assert gathered == [0, 1, 1, 2, 2, 2]
        assert sent == [1, 1]
        assert received == [rank, 10 + rank, 20 + rank]
