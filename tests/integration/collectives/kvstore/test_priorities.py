"""``BytePS.pushpull_async``: sums in parts, of which the most urgent goes first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hvdlab import kvstore
from hvdlab.collectives import context
from hvdlab.collectives.errors import AbortedError
from hvdlab.kvstore import KVStoreError
from support.ranks.resident import Ranks

PARTS_OF = 64
"""Bytes: 16 numbers of float32."""


@pytest.fixture(scope="module", params=[1, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    # So little credit that each sum waits for the report of the one before.
    with Ranks(
        request.param, env={"BYTEPS_PARTITION_BYTES": str(PARTS_OF), "HVDLAB_SCHEDULING_CREDIT": "1"}
    ) as started:
        yield started


# -- on the ranks -----------------------------------------------------------------------------------------------------


def sums() -> None:
    kv: Any = kvstore.create("byteps")
    n, rank = kv.num_workers, kv.rank
    shapes = [(), (0,), (1,), (16,), (17,), (5, 13), (3, 4, 50)]
    values = [
        np.full(shape, rank + 1.0, dtype) for shape in shapes for dtype in ("float32", "int64", "float16")
    ]
    order = range(len(values)) if rank % 2 else reversed(range(len(values)))  # workers need not agree on it
    flying = {key: kv.pushpull_async(key, values[key], priority=-key) for key in order}
    for key, sum_ in flying.items():
        sum_.wait()
        sum_.wait()
        assert sum_.done()
        assert sum_.key == key
        np.testing.assert_array_equal(values[key], np.full_like(values[key], n * (n + 1) / 2))


def outputs_are_written_by_the_wait() -> None:
    kv: Any = kvstore.create("byteps")
    n, rank = kv.num_workers, kv.rank
    value = np.arange(100, dtype=np.float32).reshape(10, 10)
    outs = [np.zeros((10, 10), np.float32), np.zeros((10, 10), np.float32)[:, ::-1]]
    flying = [kv.pushpull_async("x", [value], out=outs) for _ in range(3)]
    pushed = value.copy()
    value[:] = np.nan  # the pushed array may be overwritten
    done = np.zeros(1, np.float32)
    while done[0] < n:  # the sum is the same on all ranks: they leave together
        done[:] = flying[-1].done()
        kv.pushpull("meanwhile", done)
    assert not np.any(outs)
    for one in flying:
        one.wait()
    for out in outs:
        np.testing.assert_array_equal(out, pushed * n)
    assert rank == context.engine().rank


def other_shapes() -> None:
    """Each worker gives another number of parts, or other parts, or only one of them gives parts: an error on all that names the key."""
    kv: Any = kvstore.create("byteps")
    n, rank = kv.num_workers, kv.rank
    shapes = [
        (20 + 20 * rank,),
        (4 + 4 * rank, 40 - 8 * rank),
        (4, 10) if rank else (10, 4),
        (3 + 90 * rank,),
    ]
    for key, shape in enumerate(shapes):
        flying = kv.pushpull_async(key, (value := np.ones(shape, np.float32)))
        if n > 1:
            for _ in range(2):
                with pytest.raises(KVStoreError, match=f"disagree about key {key}:"):
                    flying.wait()
            assert value.min() == value.max() == 1
        kv.pushpull_async(key, (value := np.ones(40, np.float32))).wait()
        assert value[0] == n


def refused() -> None:
    kv: Any = kvstore.create("byteps")
    value = np.ones(3, np.float32)
    for error, arguments in (
        (AssertionError, (["a"], [value])),
        (AssertionError, ("a", [value, value])),
        (KVStoreError, ("a", value, np.ones(4, np.float32))),
        (TypeError, ("a", value, value, 0.5)),
        (ValueError, ("a", value, value, 1 << 31)),
    ):
        with pytest.raises(error):
            kv.pushpull_async(*arguments)
    kv.pushpull_async("a", value, priority=-(1 << 31)).wait()
    assert value[0] == kv.num_workers


FLYING: list[Any] = []
"""In a rank: sums that it has begun."""


def begin() -> None:
    kv: Any = kvstore.create("byteps")
    FLYING.extend(kv.pushpull_async(key, np.ones(100, np.float32), priority=key) for key in range(3))
    context.engine().flush()


def wait_for_the_dead() -> str:
    texts = []
    for one in FLYING:
        with pytest.raises(AbortedError) as caught:
            one.wait()
        texts.append(str(caught.value))
    return texts[0]


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function", [sums, outputs_are_written_by_the_wait, other_shapes, refused], ids=lambda f: f.__name__
)
def test_on_ranks(ranks: Ranks, function: Any) -> None:
    ranks.run(function)


def test_a_worker_that_dies_ends_the_sums_in_flight() -> None:
    with Ranks(3, env={"BYTEPS_PARTITION_BYTES": str(PARTS_OF)}) as own:
        own.start(begin, ranks=[0, 1]).results()
        own.kill(2)
        for text in own.start(wait_for_the_dead, ranks=[0, 1]).results():
            assert "rank 2 died" in text
            assert "kv.byteps.0" in text
