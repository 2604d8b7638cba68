"""A restarted worker takes part in a store that the others have had before: it gets the store from one of them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from hvdlab import kvstore
from hvdlab.collectives import context
from hvdlab.kvstore import KVStoreError
from support.ranks.resident import Ranks

SHAPES = {"a": (3,), "b": (50,)}
SETTINGS: dict[str, Any] = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}
ROUNDS = 3
_kv: Any = None


# -- on the ranks -----------------------------------------------------------------------------------------------------


def begin(name: str) -> None:
    global _kv
    _kv = kvstore.create(name)
    _kv.set_optimizer(kvstore.optimizer.SGD(**SETTINGS))
    _kv.init(list(SHAPES), [np.ones(shape, np.float32) for shape in SHAPES.values()])
    train()
    with pytest.raises(TypeError, match="a store can't be copied"):
        copy.deepcopy(_kv)


def train() -> None:
    """A cell: workers that had no part in a round that failed learn at its begin that another process is rank 2 now."""
    engine = context.engine()
    engine.begin_cell("a cell")
    for _ in range(ROUNDS):
        _kv.push(list(SHAPES), [np.ones(shape, np.float32) for shape in SHAPES.values()])
        weights()
    _kv.barrier()
    engine.end_cell("a cell")


def weights() -> list[bytes]:
    outs = [np.empty(shape, np.float32) for shape in SHAPES.values()]
    _kv.pull(list(SHAPES), out=outs)
    return [out.tobytes() for out in outs]


def give() -> bytes:
    return pickle.dumps(_kv)


def join() -> None:
    context.init()


def take(data: bytes) -> list[bytes]:
    """As ``%hvd_pool sync`` does."""
    global _kv
    _kv = pickle.loads(data)  # noqa: S301  (another rank's)
    assert (_kv.rank, _kv.num_workers) == (2, 3)
    found = weights()  # at once
    _kv = pickle.loads(data)  # noqa: S301  (brought again; the one before is given up)
    return found


def refuse_to_give() -> None:
    """Check that pickling is refused: while a push waits for the others, the store differs from theirs."""
    _kv.push("a", np.ones(SHAPES["a"], np.float32))
    with pytest.raises(KVStoreError, match="a push of key 'a' is on its way"):
        pickle.dumps(_kv)


# -- tests ------------------------------------------------------------------------------------------------------------


def expected(*, rounds: int, synchronous: bool) -> list[bytes]:
    store = kvstore.create("local")
    store.set_optimizer(kvstore.optimizer.SGD(**SETTINGS))
    found = []
    for key, shape in SHAPES.items():
        store.init(key, np.ones(shape, np.float32))
        for _ in range(rounds if synchronous else 3 * rounds):
            store.push(key, np.full(shape, 3 if synchronous else 1, np.float32))
        out = np.empty(shape, np.float32)
        store.pull(key, out=out)
        found.append(out.tobytes())
    return found


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dist_sync", {}),
        ("dist_async", {}),
        ("dist_async", {"HVDLAB_KV_SERVERS": "2", "MXNET_KVSTORE_BIGARRAY_BOUND": "20"}),
    ],
    ids=["synchronous", "asynchronous", "two servers"],
)
def test_a_store_goes_on_with_a_worker_that_was_started_anew(name: str, settings: dict[str, str]) -> None:
    synchronous = name == "dist_sync"
    with Ranks(3, env=settings) as ranks:
        ranks.run(begin, name, timeout=100)
        ranks.kill(2)
        ranks.respawn(2)
        ranks.run(join, ranks=[2], timeout=60)
        (data,) = ranks.run(give, ranks=[0])
        before = expected(rounds=ROUNDS, synchronous=synchronous)
        assert ranks.run(take, data, ranks=[2], timeout=60) == [before]
        assert ranks.run(weights, ranks=[0, 1]) == [before] * 2
        ranks.run(train, timeout=60)
        assert ranks.run(weights) == [expected(rounds=2 * ROUNDS, synchronous=synchronous)] * 3
        if synchronous:
            ranks.run(refuse_to_give, ranks=[0])
