"""The cases that run inside workers: each does one collective, checks it against numpy and returns a checksum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conformance.planes import inputs
from conformance.planes.actor import CollectiveActor
from hvdlab.collectives.planes.base import storage_type
from hvdlab.collectives.types import AVERAGE, SUM, DType, ReduceOp, Reduction


def allreduce(
    actor: CollectiveActor,
    counts: Sequence[int],
    dtype: DType,
    reduction: Reduction = SUM,
    in_place: bool = False,
    seed: int = 0,
) -> int:
    """Reduce a fused list of buffers of ``counts`` elements; return the checksum of the results."""
    parts = [
        [inputs.values(seed + i, m, count, dtype) for m in range(actor.size)]
        for i, count in enumerate(counts)
    ]
    mine = [p[actor.index].copy() for p in parts]
    outs = actor.allreduce(mine, dtype, reduction, in_place)
    for i, (part, out) in enumerate(zip(parts, outs, strict=True)):
        expected = inputs.reduced(part, dtype, reduction)
        inputs.assert_reduced(out, expected, dtype, f"tensor {i} of {counts}")
        assert in_place == (out is mine[i])
        if not in_place:
            assert np.array_equal(mine[i], part[actor.index], equal_nan=dtype in (DType.F32, DType.F64))
    return inputs.digest(outs)


def allgather(actor: CollectiveActor, counts: Sequence[int], dtype: DType, seed: int = 0) -> int:
    parts = [inputs.values(seed, m, counts[m], dtype) for m in range(actor.size)]
    out = actor.allgather(parts[actor.index].copy(), counts, dtype)
    assert np.array_equal(out, np.concatenate(parts))
    return inputs.digest([out])


def broadcast(actor: CollectiveActor, count: int, dtype: DType, root: int, seed: int = 0) -> int:
    expected = inputs.values(seed, root, count, dtype)
    buffer = inputs.values(seed, actor.index, count, dtype)
    actor.broadcast(buffer, root, dtype)
    wrong = np.flatnonzero(buffer != expected)
    assert not len(wrong), (
        f"root {root}, {dtype.name}[{count}]: {len(wrong)} elements differ, {wrong[0]} to {wrong[-1]}; "
        f"{np.count_nonzero(buffer == inputs.values(seed, actor.index, count, dtype))} are this member's own; "
        f"{buffer[wrong[:4]]} for {expected[wrong[:4]]}"
    )
    return inputs.digest([buffer])


def reducescatter(
    actor: CollectiveActor,
    counts: Sequence[int],
    dtype: DType,
    reduction: Reduction = SUM,
    seed: int = 0,
) -> None:
    parts = [inputs.values(seed, m, sum(counts), dtype) for m in range(actor.size)]
    out = actor.reducescatter(parts[actor.index].copy(), counts, dtype, reduction)
    start = sum(counts[: actor.index])
    expected = inputs.reduced(parts, dtype, reduction)[start : start + counts[actor.index]]
    assert len(out) == counts[actor.index]
    inputs.assert_reduced(out, expected, dtype, f"slice {actor.index} of {counts}")


def extremes(actor: CollectiveActor, dtype: DType, count: int) -> int:
    """Averages of integers whose sum does not fit into their type, nor any of whose digits into float64's."""
    info = np.iinfo(storage_type(dtype))
    low, high = int(info.min), int(info.max)
    table = [
        [high, low, (low, high)[m % 2], high - m, low + m, -(m % 2) if low else m] for m in range(actor.size)
    ]
    mine = np.resize(np.array(table[actor.index], storage_type(dtype)), count)
    sums = [sum(row[i] for row in table) for i in range(len(table[0]))]
    averages = [abs(total) // actor.size * (1 if total > 0 else -1) for total in sums]
    expected = np.resize(np.array(averages, storage_type(dtype)), count)
    (out,) = actor.allreduce([mine], dtype, AVERAGE, False)
    inputs.assert_reduced(out, expected, dtype, "average")
    counts = even_split(count, actor.size)
    start = sum(counts[: actor.index])
    scattered = actor.reducescatter(mine, counts, dtype, AVERAGE)
    inputs.assert_reduced(scattered, expected[start : start + counts[actor.index]], dtype, "its slice")
    if dtype is not DType.I64:  # a sum that is divided comes to the same
        (divided,) = actor.allreduce(
            [mine], dtype, Reduction(ReduceOp.SUM, postscale=1.0 / actor.size), False
        )
        whole = np.resize(np.array([int(total * (1.0 / actor.size)) for total in sums]), count)
        inputs.assert_reduced(divided, whole.astype(storage_type(dtype)), dtype, "sum that is divided")
    return inputs.digest([out])


def alltoall(actor: CollectiveActor, table: Sequence[Sequence[int]], dtype: DType, seed: int = 0) -> None:
    """``table[i][j]`` elements go from member i to member j."""
    sends = [inputs.values(seed, m, sum(table[m]), dtype) for m in range(actor.size)]
    received = [row[actor.index] for row in table]
    out = actor.alltoall(sends[actor.index].copy(), table[actor.index], received, dtype)
    pieces = []
    for member, row in enumerate(table):
        start = sum(row[: actor.index])
        pieces.append(sends[member][start : start + row[actor.index]])
    assert np.array_equal(out, np.concatenate(pieces))


def messages(actor: CollectiveActor, count: int, dtype: DType, seed: int = 0) -> None:
    """Send from each member to each other; the sent data stays unchanged."""
    for source in range(actor.size):
        for target in range(actor.size):
            if source == target or actor.index not in (source, target):
                continue
            sent = inputs.values(seed + target, source, count, dtype)
            buffer = sent.copy() if actor.index == source else inputs.values(seed, target, count, dtype)
            if actor.index == source:
                buffer.flags.writeable = False
            actor.message(buffer, source, target, dtype)
            assert np.array_equal(buffer, sent), f"from {source} to {target}: {buffer[:4]} for {sent[:4]}"


def barrier(actor: CollectiveActor) -> None:
    actor.barrier()


def halves(actor: CollectiveActor, dtype: DType) -> int:
    """Sums that only come out right if halves are added in float32 and rounded once, and special values."""
    big, small = (2048.0, 1.0) if dtype is DType.F16 else (256.0, 1.0)
    mine = np.full(64, big if actor.index == 0 else small, np.float64)
    mine[1:4] = (np.nan, np.inf, -np.inf) if actor.index == 0 else (1.0, 1.0, 1.0)
    mine[4] = 0.0
    buffer = inputs.from_float64(mine, dtype)
    (out,) = actor.allreduce([buffer], dtype, SUM, False)
    exact = np.full(64, big + (actor.size - 1) * small, np.float64)
    exact[4] = 0.0
    expected = inputs.to_float64(inputs.from_float64(exact, dtype), dtype)
    got = inputs.to_float64(out, dtype)
    assert np.isnan(got[1])
    assert got[2] == np.inf
    assert got[3] == -np.inf
    assert np.array_equal(got[4:], expected[4:]), (got[4:8], expected[4:8])
    return inputs.digest([out])


def mixture(actor: CollectiveActor, seed: int, rounds: int) -> int:
    """Run a random sequence of all operations and sizes, the same on every member, without a pause in between."""
    rng = np.random.default_rng(seed)
    total = 0
    for step in range(rounds):
        kind = int(rng.integers(6))
        dtype = (DType.F32, DType.I64, DType.U8, DType.F64)[int(rng.integers(4))]
        count = int(2 ** rng.uniform(0, 17)) - 1
        ragged = [int(c) for c in rng.integers(0, count + 2, actor.size)]
        root = int(rng.integers(actor.size))
        if kind == 0:
            total ^= allreduce(actor, [count, 3, count // 2], dtype, in_place=bool(count % 2), seed=step)
        elif kind == 1:
            total ^= allgather(actor, ragged, dtype, seed=step)
        elif kind == 2:
            total ^= broadcast(actor, count, dtype, root, seed=step)
        elif kind == 3:
            reducescatter(actor, ragged if actor.planned else even_split(count, actor.size), dtype, seed=step)
        elif kind == 4:
            alltoall(
                actor, [[int(c) for c in rng.integers(0, 999, actor.size)] for _ in ragged], dtype, seed=step
            )
        else:
            actor.barrier()
    return total


def even_split(count: int, size: int) -> list[int]:
    """Horovod's rule: the first members get one more."""
    return [count // size + (i < count % size) for i in range(size)]
