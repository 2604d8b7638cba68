"""Stores of several workers on real ranks: dist_sync, dist_device_sync, horovod, byteps."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hvdlab import kvstore
from hvdlab.collectives import context
from hvdlab.collectives.errors import AbortedError
from hvdlab.kvstore import KVStoreError, RowSparse
from support.engine_probe import EngineProbe
from support.interrupting import press_ctrl_c, when_this_thread_waits
from support.patience import PATIENCE
from support.ranks.resident import Ranks, meet, resident_ranks


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as started:
        yield started


own_ranks = resident_ranks(3, scope="function")


# -- on the ranks -----------------------------------------------------------------------------------------------------

SYNC = ("dist_sync", "dist", "dist_device_sync")


def full(value: float, *shape: int, dtype: str = "float32") -> Any:
    return np.full(shape or (3,), value, dtype)


def pulled(kv: Any, key: Any) -> Any:
    out = full(np.nan)
    kv.pull(key, out=out)
    assert len(set(out.tolist())) == 1
    return out[0]


def rounds() -> None:
    for name in SYNC:
        kv = kvstore.create(name)
        n, rank = kv.num_workers, kv.rank
        assert (kv.type, kv.local_rank, kv.servers()) == (name, rank, [])
        kv.init("a", full(rank + 7.0))
        assert pulled(kv, "a") == 7  # rank 0's, on all
        mine = [full(rank + 1.0), full(10.0)]
        kv.push("a", mine)
        mine[0][:] = -1
        assert pulled(kv, "a") == n * (n + 1) / 2 + 10 * n
        for number in (1, 2, 3):
            kv.push("a", full(number))
        assert pulled(kv, "a") == 3 * n
        out = full(0)
        kv.pushpull("a", full(rank), out=out)
        assert out[0] == n * (n - 1) / 2
        values = [full(1), full(1)]
        kv.pushpull("a", values)
        assert [v.tolist() for v in values] == [[2.0 * n] * 3] * 2
        kv.broadcast("b", full(rank + 2.0), out=(outs := [full(0), full(0, dtype="float64")]))
        assert [o.tolist() for o in outs] == [[2] * 3] * 2
        kv.barrier()


def any_order() -> None:
    kv = kvstore.create("dist_sync")
    keys = list(range(5))
    kv.init(keys, [full(0)] * 5)
    order = keys if kv.rank % 2 else keys[::-1]
    for round_ in range(3):
        for key in order:
            kv.push(key, full(key + round_))
    for key in order:
        assert pulled(kv, key) == (key + 2) * kv.num_workers


def two_stores() -> None:
    first, second = kvstore.create("dist_sync"), kvstore.create("dist_sync")
    for number, kv in enumerate((first, second)):
        kv.init("w", full(number))
    order = (first, second) if first.rank % 2 else (second, first)
    for kv in order:
        kv.push("w", full(5 if kv is first else 6))
    assert (pulled(first, "w"), pulled(second, "w")) == (5 * first.num_workers, 6 * first.num_workers)


def many_types() -> None:
    kv = kvstore.create("dist_sync")
    for dtype in ("float16", "float32", "float64", "int32", "int64"):
        kv.init(dtype, full(1, dtype=dtype))
        kv.push(dtype, full(3, dtype=dtype))
        out = full(0, dtype=dtype)
        kv.pull(dtype, out=out)
        assert out.tolist() == [3 * kv.num_workers] * 3
    kv.init("scalar", np.array(2, np.float32))
    kv.push("scalar", np.ones((), np.float32))
    kv.pull("scalar", out=(out := np.zeros(())))
    assert out == kv.num_workers
    kv.init("empty", full(0, 0, 2))
    kv.push("empty", full(0, 0, 2))
    kv.pull("empty", out=full(0, 0, 2))


def with_optimizer(name: str, settings: dict[str, Any], dtype: str) -> list[float]:
    """Train on the workers' summed gradients; the same in one process is the reference."""
    rng = np.random.default_rng(1)
    dist, local = kvstore.create("dist_sync"), kvstore.create("device")
    n, rank = dist.num_workers, dist.rank
    optimizer = kvstore.optimizer.create(name, **settings)
    dist.set_optimizer(optimizer)
    local.set_optimizer(kvstore.optimizer.create(name, **settings))
    optimizer.lr = 1e9  # the store has a copy
    start = rng.standard_normal(50).astype(dtype)
    dist.init(0, start + rank)
    local.init(0, start)
    for _ in range(5):
        gradients = [rng.integers(-8, 8, 50).astype(dtype) / 8 for _ in range(n)]
        weights, expected = np.empty(50, dtype), np.empty(50, dtype)
        dist.pushpull(0, gradients[rank], out=weights)
        local.pushpull(0, gradients, out=expected)
        assert weights.tobytes() == expected.tobytes()
    assert dist.is_capable("optimizer")
    with tempfile.TemporaryDirectory() as folder:
        states = os.path.join(folder, "states")
        dist.push(0, gradients[rank])  # it is in the states, although nothing has pulled it
        dist.save_optimizer_states(states, dump_optimizer=True)
        dist.pull(0, out=weights)
        resumed = kvstore.create("dist_sync")
        resumed.set_optimizer(name)
        resumed.init(0, weights)
        resumed.load_optimizer_states(states)
    for kv in (dist, resumed):
        kv.pushpull(0, gradients[rank], out=(weights if kv is dist else expected))
    assert weights.tobytes() == expected.tobytes()
    return [float(weight) for weight in weights]


def with_function() -> None:
    kv = kvstore.create("dist_sync")
    kv.set_optimizer(raising_at_seven)
    kv.init("a", full(1))
    kv.push("a", full(2))
    n = kv.num_workers
    assert pulled(kv, "a") == 1 + 2 * n
    kv._set_updater(lambda key, received, stored: 1 / 0)  # is this process's alone
    kv.push("a", full(7))
    with pytest.raises(ZeroDivisionError):
        kv.pull("a", out=full(0))
    assert pulled(kv, "a") == 1 + 2 * n
    kv.push("a", full(1))
    assert pulled(kv, "a") == 1 + 3 * n


def raising_at_seven(key: str, gradient: Any, weight: Any) -> None:
    weight += gradient
    if gradient[0] % 7 == 0:
        raise ZeroDivisionError


def function_that_fails_on_one_worker() -> None:
    """Its weights are behind the others' from then on, which must not go on silently."""
    kv = kvstore.create("dist_sync")
    failing = [kv.rank == 1]

    def update(key: str, gradient: Any, weight: Any) -> None:
        if failing[0] and key == "a":
            failing[0] = False
            raise ZeroDivisionError
        weight += gradient

    kv.set_optimizer(update)
    kv.init(["a", "b"], [full(1), full(1)])
    with pytest.raises(ZeroDivisionError) if kv.rank == 1 else contextlib.nullcontext():
        kv.pushpull("a", full(1))
    with pytest.raises(AbortedError, match=r"kv\.\d+\.a` .*`kv\.\d+\.a \(failed updates: 1\)`"):
        kv.pushpull("a", full(1))
    meet()
    kv.push("b", full(1))
    assert pulled(kv, "b") == 1 + kv.num_workers


def compressed() -> None:
    kv = kvstore.create("dist_sync")
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.init(1, np.zeros(4, np.float32))
    n = kv.num_workers
    gradient = np.array([0.3, -0.3, 0.1, 0.25], np.float32)
    out = np.empty(4, np.float32)
    for expected in ([0.5, -0.5, 0, 0.5], [0.5, -0.5, 0, 0.5]):
        kv.pushpull(1, [gradient, gradient], out=out)  # summed before they are compressed
        assert out.tolist() == [n * value for value in expected]
    with pytest.raises(KVStoreError, match="float32 arrays only"):
        kv.push(1, np.zeros(4))
    kv.pushpull(1, np.zeros(4, np.float32), out=out)


def refused() -> None:
    kv = kvstore.create("dist_sync")
    kv.init("a", full(1))
    refusals: tuple[tuple[Callable[[], object], type[Exception], str], ...] = (
        (lambda: kv.init("a", full(1)), KVStoreError, "duplicate init of key a"),
        (lambda: kv.init(3, full(1)), KVStoreError, "Mixed key types"),
        (lambda: kv.push("b", full(1)), KVStoreError, "key b doesn't exist"),
        (lambda: kv.pull("b", out=full(1)), KVStoreError, "key b doesn't exist"),
        (lambda: kv.push("a", full(1, 5)), KVStoreError, r"key 'a' has shape \(3,\)"),
        (lambda: kv.pull("a", out=full(1, 5)), KVStoreError, r"key 'a' has shape \(3,\)"),
        (lambda: kv.pull("a", out=full(1), ignore_sparse=False), KVStoreError, "row_sparse_pull"),
        (
            lambda: kv.push("a", RowSparse(np.zeros((0,), "f4"), [], (3,))),
            KVStoreError,
            "'a' is dense, but was given a row-sparse",
        ),
        (lambda: kv.pushpull("a", RowSparse(np.zeros((0,)), [], (3,))), KVStoreError, "'a'.*row_sparse_pull"),
        (
            lambda: kv.row_sparse_pull("a", RowSparse(np.zeros((0,)), [], (3,)), row_ids=full(1)),
            KVStoreError,
            "key 'a' is dense",
        ),
    )
    for call, error, text in refusals:
        with pytest.raises(error, match=text):
            call()
        assert pulled(kv, "a") == 1


def one_pushes_another_shape() -> None:
    """Check that the worker that does so is refused, and the others' pull gives the reason; the store continues."""
    kv = kvstore.create("dist_sync")
    kv.init("w", full(1))
    if kv.rank == 0:
        with pytest.raises(KVStoreError, match=r"key 'w' has shape \(3,\), but .* \(4,\)"):
            kv.push("w", full(1, 4))
    else:
        kv.push("w", full(1))
        with pytest.raises(KVStoreError, match="disagree about key 'w'"):
            kv.pull("w", out=full(0))
    assert pulled(kv, "w") == 1
    with pytest.raises(
        KVStoreError, match=r"output has \(4,\)" if kv.rank == 1 else "disagree about key 'w'"
    ):
        kv.pushpull("w", full(3), out=full(0, 4 if kv.rank == 1 else 3))
    assert pulled(kv, "w") == 1
    kv.push("w", full(2))
    assert pulled(kv, "w") == 2 * kv.num_workers


def other_shapes_at_init() -> None:
    kv = kvstore.create("dist_sync")
    with (
        pytest.raises(KVStoreError, match="disagree about key 'w'")
        if kv.num_workers > 1
        else contextlib.nullcontext()
    ):
        kv.init("w", full(1, 3 + kv.rank))
    if kv.num_workers > 1:
        kv.init("w", full(1))
    kv.push("w", full(2))
    assert pulled(kv, "w") == 2 * kv.num_workers


def row_sparse(name: str | None) -> None:
    """Check that row-sparse pushes give one process's result for all workers' arrays, which are small integers."""
    dist, local = kvstore.create("dist_sync"), kvstore.create("local")
    n, rank = dist.num_workers, dist.rank
    if name is not None:
        for kv in (dist, local):
            kv.set_optimizer(kvstore.optimizer.create(name, learning_rate=0.5, wd=0.25))
    start = np.arange(40, dtype=np.float32).reshape(10, 4)
    dist.init("w", RowSparse(start + rank, np.arange(10), (10, 4)))
    local.init("w", RowSparse(start, np.arange(10), (10, 4)))
    rng = np.random.default_rng(3)
    every = np.arange(10)
    for number in range(4):
        # In the last round a worker has no row at all.
        counts = [0 if number == 3 and r == 0 else int(rng.integers(1, 6)) for r in range(n) for _ in (0, 1)]
        given = [
            RowSparse(rng.integers(-3, 4, (c, 4)).astype("f4"), rng.choice(10, c, replace=False), (10, 4))
            for c in counts
        ]
        dist.push("w", given[2 * rank : 2 * rank + 2])
        local.push("w", given)
        outs = [RowSparse(np.zeros((0, 4), "f4"), [], (10, 4)) for _ in (dist, local)]
        for kv, out in zip((dist, local), outs, strict=True):
            kv.row_sparse_pull("w", out=out, row_ids=every)
        assert outs[0].data.tobytes() == outs[1].data.tobytes()
        dense = np.full((2, 10, 4), np.nan, "f4")
        dist.pull("w", out=list(dense))
        assert dense.tobytes() == outs[0].data.tobytes() * 2
    kept = RowSparse(np.ones((1, 4), "f4"), [7], (10, 4))
    dist.pull("w", out=kept)
    assert kept.indices.tolist() == [7]
    dist.broadcast("b", RowSparse(start + rank, np.arange(10), (10, 4)), out=dense[0])
    assert dense[0].tolist() == start.tolist()
    with pytest.raises(KVStoreError, match="'w' is row-sparse, but was given a dense"):
        dist.push("w", start)
    with pytest.raises(KVStoreError, match="row 10 is out of range"):
        dist.row_sparse_pull("w", out=outs[0], row_ids=np.array([10]))


def horovod() -> None:
    kv = kvstore.create("horovod")
    n, rank = kv.num_workers, kv.rank
    assert (kv.type, kv.local_rank, type(kv)) == ("horovod", rank, kvstore.Horovod)
    value, out = full(rank + 1.0), full(0)
    for _ in range(2):
        kv.broadcast("1", value, out)
        assert (out[0], value[0]) == (1, rank + 1)
    kv.pushpull(2, value, out=out)
    assert (out[0], value[0]) == (n * (n + 1) / 2, rank + 1)
    kv.pushpull("2", value)
    assert value[0] == n * (n + 1) / 2
    several = [full(1), full(2, 2, 2)]
    kv.pushpull("3", several)
    assert [float(v.flat[0]) for v in several] == [n, 2 * n]
    outs = [full(0), full(0)]
    kv.pushpull(["4", "5"], [full(3), full(4)], out=outs)
    assert [o[0] for o in outs] == [3 * n, 4 * n]
    kv.broadcast("6", value, outs)
    assert not kv.is_capable("optimizer")
    assert (kv.set_optimizer("sgd"), kv.save_optimizer_states("x"), kv.load_optimizer_states("x")) == (
        None,
    ) * 3
    for name in ("init", "push", "pull", "row_sparse_pull", "set_gradient_compression"):
        assert not hasattr(kv, name)
    with pytest.raises(KVStoreError, match="'7' has shape"):
        kv.pushpull("7", full(1), out=full(1, 2))
    with pytest.raises(AssertionError, match="2 values"):
        kv.pushpull("7", [full(1), full(1)], out=full(1))
    with pytest.raises(TypeError, match="out"):
        kv.broadcast("7", full(1), None)
    if n > 1:
        with pytest.raises(KVStoreError, match="disagree about key '8'"):
            kv.pushpull("8", full(1, rank + 1))


def byteps() -> None:
    kv = kvstore.create("byteps")
    n, rank = kv.num_workers, kv.rank
    assert (kv.type, kv.local_rank, type(kv)) == ("byteps", rank, kvstore.BytePS)
    value = full(rank + 1.0)
    outs = [full(0), full(0)]
    kv.broadcast("1", value, outs)
    assert [o[0] for o in outs] == [1, 1]
    kv.pushpull("1", [value], out=outs)
    assert ([o[0] for o in outs], value[0]) == ([n * (n + 1) / 2] * 2, rank + 1)
    kv.pushpull(3, value)
    assert value[0] == n * (n + 1) / 2
    kv.broadcast(3, (other := full(rank + 5.0)), None)
    assert other[0] == 5
    for key, wrong in ((["a"], [value]), ("a", [value, value]), ("a", [])):
        with pytest.raises(AssertionError):
            kv.pushpull(key, wrong)
    assert not kv.is_capable("anything")
    unsupported: tuple[Callable[[], object], ...] = (
        lambda: kv.set_optimizer("sgd"),
        lambda: kv.save_optimizer_states("x"),
        lambda: kv.load_optimizer_states("x"),
    )
    for call in unsupported:
        with pytest.raises(NotImplementedError):
            call()


def pushes_twice() -> None:
    kv = kvstore.create("dist_sync")
    STORES.append(kv)
    kv.init("w", full(4))
    kv.push("w", full(1))
    kv.pull("w", out=full(0))
    kv.push("w", full(5))  # the last worker never does
    context.engine().flush()


def waits_for_the_dead() -> str:
    (kv,) = STORES
    with pytest.raises(AbortedError) as caught:
        kv.pull("w", out=full(0))
    assert pulled(kv, "w") == 3
    return str(caught.value)


def pushes_once() -> None:
    kv = kvstore.create("dist_sync")
    kv.init("w", full(4))
    kv.push("w", full(1))
    kv.pull("w", out=full(0))


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        rounds,
        any_order,
        two_stores,
        many_types,
        with_function,
        compressed,
        refused,
        other_shapes_at_init,
        horovod,
        byteps,
    ],
    ids=lambda f: f.__name__,
)
def test_on_ranks(ranks: Ranks, function: Any) -> None:
    ranks.run(function)


def test_a_wrong_shape_on_one_worker_is_an_error_on_all(ranks: Ranks) -> None:
    if ranks.size > 1:
        ranks.run(one_pushes_another_shape)


def test_a_function_that_fails_on_one_worker_is_no_silent_difference(ranks: Ranks) -> None:
    if ranks.size > 1:
        ranks.run(function_that_fails_on_one_worker)


def missing_push() -> str:
    """Rank 1 forgets a push, and all meet afterwards."""
    kv = kvstore.create("dist_sync")
    kv.set_optimizer("sgd")
    kv.init("w", full(1))
    if kv.rank != 1:
        kv.push("w", full(1))
    with pytest.raises(AbortedError) as caught:
        kv.barrier() if kv.rank == 1 else kv.pull("w", out=full(0))
    meet()
    out = full(0)
    kv.pushpull("w", full(1), out=out)
    np.testing.assert_allclose(out, 1 - 0.01 * kv.num_workers, rtol=1e-6)
    return str(caught.value)


def test_a_forgotten_push_is_told_on_all_workers_and_the_store_goes_on(ranks: Ranks) -> None:
    if ranks.size > 1:
        for text in ranks.run(missing_push):
            assert "rank 1 in barrier" in text
            assert re.search(r"ranks? 0.* in allreduce `kv\.\d+\.w`", text)


OPTIMIZERS = [
    ("test", {}, "float32"),
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}, "float32"),
    ("sgd", {"learning_rate": 0.1, "clip_gradient": 0.5}, "float64"),
    ("adam", {"wd": 0.01}, "float32"),
]


def test_an_optimizer_gives_the_bits_that_it_gives_in_one_process(ranks: Ranks) -> None:
    for arguments in OPTIMIZERS:
        results = ranks.run(with_optimizer, *arguments)
        assert results == [results[0]] * ranks.size


def test_row_sparse_values(ranks: Ranks) -> None:
    for name in (None, "sgd", "adam"):
        ranks.run(row_sparse, name)


def half_precision(multi_precision: bool) -> None:
    kv = kvstore.create("dist_sync")
    kv.set_optimizer(kvstore.optimizer.SGD(learning_rate=1.0, multi_precision=multi_precision))
    kv.init(0, np.ones(1, np.float16))
    out = np.empty(1, np.float16)
    small = np.float16(2**-12)  # half of the least step from 1 in float16
    for number in range(1, 4):
        kv.pushpull(0, np.full(1, -small), out=out)
        master = np.float32(1) + number * kv.num_workers * np.float32(small)
        assert out[0] == np.float16(master)


def half_precision_rows() -> None:
    kv = kvstore.create("dist_sync")
    received: list[str] = []

    class Recording(kvstore.optimizer.SGD):
        def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
            received.extend([str(weight.dtype), str(grad.dtype)])

    kv.set_optimizer(Recording())
    kv.init(0, np.ones((2, 1), np.float16))
    kv.push(0, RowSparse(np.ones((1, 1), np.float16), [1], (2, 1)))
    kv.pull(0, out=np.empty((2, 1), np.float16))
    assert received == ["float32", "float32"]


def test_rows_of_float16_gradients_are_computed_in_float32(own_ranks: Ranks) -> None:
    own_ranks.run(half_precision_rows)


def other_names() -> str:
    kv = kvstore.create("dist_sync")
    with pytest.raises(AbortedError, match="deadlock") as raised:
        kv.init(f"name of {kv.rank}", full(kv.rank))
    return str(raised.value)


def test_keys_that_workers_name_differently_are_refused_on_all(own_ranks: Ranks) -> None:
    for text in own_ranks.run(other_names):
        assert re.search(r"name of [012]", text), text
        assert re.search(r"rank", text), text


def test_float16_weights_have_float32_masters(ranks: Ranks) -> None:
    for multi_precision in (True, False):
        ranks.run(half_precision, multi_precision)


def test_a_dead_worker_ends_what_waits_for_it_by_name(own_ranks: Ranks) -> None:
    last = own_ranks.start(pushes_once, ranks=[2])
    # A push that comes after the death is the first of a round without the dead one, and waits for the others.
    own_ranks.start(pushes_twice, ranks=[0, 1]).results()
    last.results()
    own_ranks.kill(2)
    for text in own_ranks.start(waits_for_the_dead, ranks=[0, 1]).results():
        assert "rank 2" in text


STORES: list[Any] = []


def _generation() -> int:
    number: int = EngineProbe(context.engine()).locked.state.sets[0].generation
    return number


def interrupted_round() -> None:
    """Rank 1 does not push, and the other's pull is interrupted."""
    store = kvstore.create("dist_sync")
    STORES.append(store)
    store.set_optimizer("sgd")
    before = (
        _generation()
    )  # before init(), in which the other rank waits for this one: after it the round can have ended already
    store.init("w", np.zeros(3, np.float32))
    if store.rank == 1:
        until = time.monotonic() + PATIENCE
        while _generation() == before:  # a push before it learns of the end of the round would end with it
            assert time.monotonic() < until
            time.sleep(0.01)
        return
    store.push("w", np.ones(3, np.float32))
    ordinary = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt = when_this_thread_waits(press_ctrl_c)
    try:
        with pytest.raises(KeyboardInterrupt):
            store.pull("w", out=np.zeros(3, np.float32))
    finally:
        interrupt.join()
        signal.signal(signal.SIGINT, ordinary)


def next_round() -> list[float]:
    (store,) = STORES
    store.push("w", np.ones(3, np.float32))
    out = np.zeros(3, np.float32)
    store.pull("w", out=out)
    return [float(value) for value in out]


def test_after_an_interrupt_the_next_round_is_as_any_other() -> None:
    with Ranks(2) as two:
        two.run(interrupted_round)
        # The interrupt itself was the news, and the sum that it ended is in no worker's value.
        first, second = two.run(next_round)
    assert first == second
    assert np.allclose(first, -0.02)
