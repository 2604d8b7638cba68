"""hvdlab's stores where MXNet makes its own: Gluon's trainer and MXNet's optimizers run on them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlab import kvstore
from ranks import Ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mxnet as mx

    import hvdlab.mxnet as hvd

SETTINGS = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}


@pytest.fixture
def installed() -> Iterator[None]:
    hvd.install_kvstore()
    yield
    hvd.uninstall_kvstore()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        started.run(start_servers, timeout=100)
        yield started


def start_servers() -> None:
    """They live as long as the ranks, so they have to come before the first test."""
    kvstore.create("dist_async")


def net(contexts: list[Any]) -> Any:
    made = mx.gluon.nn.Sequential(prefix="net_")
    with made.name_scope():
        made.add(mx.gluon.nn.Dense(8, activation="relu", in_units=5), mx.gluon.nn.Dense(4, in_units=8))
    made.initialize(ctx=contexts)
    rng = np.random.default_rng(7)
    for _, parameter in sorted(made.collect_params().items()):
        parameter.set_data(mx.nd.array(rng.standard_normal(parameter.shape) / 3))
    return made


def data() -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((8, 5)).astype("f4"), rng.standard_normal((8, 4)).astype("f4")) for _ in range(4)
    ]


def train(
    store: Any, contexts: list[Any], share: slice = slice(None), **options: Any
) -> tuple[list[Any], Any]:
    model = net(contexts)
    trainer = mx.gluon.Trainer(model.collect_params(), "sgd", SETTINGS, kvstore=store, **options)
    for x, y in data():
        parts = [
            (mx.nd.array(px, ctx=c), mx.nd.array(py, ctx=c))
            for px, py, c in zip(
                np.split(x[share], len(contexts)), np.split(y[share], len(contexts)), contexts, strict=True
            )
        ]
        with mx.autograd.record():
            losses = [mx.gluon.loss.L2Loss()(model(px), py) for px, py in parts]
        mx.autograd.backward(losses)
        trainer.step(len(x))
    weights = [p.data(contexts[0]).asnumpy() for _, p in sorted(model.collect_params().items())]
    return weights, trainer


@pytest.mark.parametrize(
    "options", [{}, {"update_on_kvstore": False}, {"compression_params": {"type": "2bit", "threshold": 0.01}}]
)
def test_gluon_trains_to_the_same_bits_as_on_mxnets_stores(installed: None, options: dict[str, Any]) -> None:
    contexts = [mx.cpu(i) for i in range(4)]
    names = ("device",) if "compression_params" in options else ("local", "device")
    for name in names:
        ours, trainer = train(name, contexts, **options)
        assert isinstance(trainer._kvstore, kvstore.KVStore)
        assert isinstance(trainer._kvstore, mx.kvstore.KVStore)
        hvd.uninstall_kvstore()
        theirs, trainer = train(name, contexts, **options)
        assert not isinstance(trainer._kvstore, kvstore.KVStore)
        hvd.install_kvstore()
        assert [a.tobytes() for a in ours] == [b.tobytes() for b in theirs]


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # MXNet's
def test_states_go_from_mxnets_stores_to_ours(tmp_path: Path) -> None:
    path = str(tmp_path / "states")
    gradients = np.random.default_rng(1).standard_normal((4, 3)).astype("f4")
    theirs = mx.kv.create("local")
    theirs.set_optimizer(mx.optimizer.create("adam", learning_rate=0.1))
    hvd.install_kvstore()
    ours = mx.kv.create("local")
    hvd.uninstall_kvstore()
    ours.set_optimizer(mx.optimizer.create("adam"))
    theirs.init(0, mx.nd.zeros((3,)))
    for gradient in gradients[:2]:
        theirs.push(0, mx.nd.array(gradient))
    theirs.save_optimizer_states(path, dump_optimizer=True)
    start = mx.nd.empty((3,))
    theirs.pull(0, out=start)
    ours.init(0, start)
    ours.load_optimizer_states(path)
    results = []
    for kv in (theirs, ours):
        for gradient in gradients[2:]:
            kv.push(0, mx.nd.array(gradient))
        out = mx.nd.empty((3,))
        kv.pull(0, out=out)
        results.append(out.asnumpy().tobytes())
    assert results[0] == results[1]
    ours.save_optimizer_states(path)
    theirs.load_optimizer_states(path)


def test_names_that_mxnet_would_make_a_local_store_of(installed: None) -> None:
    with pytest.raises(ValueError, match="'dist_magic'"):
        mx.kv.create("dist_magic")
    with pytest.raises(TypeError, match="name must be a string"):
        mx.kv.create(3)
    assert mx.kv.create("teststore").type == "teststore"
    kv = mx.kv.create("local")
    with pytest.raises(TypeError, match="row_sparse"):
        kv.init("w", mx.nd.sparse.zeros("row_sparse", (2, 2)))


def distributed() -> list[bytes]:
    hvd.init()
    hvd.install_kvstore()
    rank, n = hvd.rank(), hvd.size()
    contexts = [mx.cpu(0)]
    weights, trainer = train("dist_sync", contexts, slice(rank, None, n))
    assert isinstance(trainer._kvstore, kvstore.KVStore)
    assert trainer._update_on_kvstore
    one, _ = train(None, contexts)
    for mine, theirs in zip(weights, one, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    kv = mx.kv.create("dist_sync")
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0, multi_precision=True))
    kv.init("h", mx.nd.ones((1,), dtype="float16"))
    out = mx.nd.empty((1,), dtype="float16")
    for _ in range(4):
        kv.pushpull("h", mx.nd.array([2.0**-13], dtype="float16"), out=out)
    assert out.asnumpy()[0] == np.float16(1 - 4 * n * 2.0**-13)
    return [weight.tobytes() for weight in weights]


def test_gluon_trains_on_dist_sync(ranks: Ranks) -> None:
    first, second = ranks.run(distributed, timeout=100)
    assert first == second


def trained_on_servers(name: str) -> list[list[list[float]]]:
    """Gluon on a store with servers, one worker after the other; and alone on MXNet's arithmetic, on the same gradients."""
    hvd.init()
    hvd.install_kvstore()
    rng = np.random.default_rng(3)
    store = mx.kv.create("dist_async")
    assert isinstance(store, mx.kvstore.KVStore)
    optimizer = mx.optimizer.create(name, learning_rate=0.1, wd=0.01)
    optimizer.set_lr_mult({1: 0.5})
    with pytest.raises(kvstore.KVStoreError, match="not MXNet's RMSProp"):
        store.set_optimizer(mx.optimizer.create("rmsprop"))
    store.set_optimizer(optimizer)
    updater = mx.optimizer.get_updater(mx.optimizer.create(name, learning_rate=0.1, wd=0.01))
    updater.optimizer.set_lr_mult({1: 0.5})
    weights = [mx.nd.array(rng.standard_normal((5, 3))) for _ in range(2)]
    outs = [mx.nd.zeros((5, 3)) for _ in range(2)]
    store.init([0, 1], weights)
    for _ in range(3):
        for turn in range(store.num_workers):
            gradients = [mx.nd.array(rng.standard_normal((5, 3))) for _ in range(2)]
            if turn == store.rank:
                store.push([0, 1], gradients)
                store.pull([0, 1], out=outs)
            store._barrier()
            for key in (0, 1):
                updater(key, gradients[key], weights[key])
    store.pull([0, 1], out=outs)
    store._barrier()
    return [[array.asnumpy().tolist() for array in arrays] for arrays in (outs, weights)]


def test_mxnets_optimizers_on_servers_give_mxnets_bits(ranks: Ranks) -> None:
    for name in ("sgd", "adam", "test"):
        for ours, theirs in ranks.run(trained_on_servers, name, timeout=100):
            assert ours == theirs


def gluon_on_servers() -> float:
    hvd.init()
    hvd.install_kvstore()
    weights, trainer = train("dist_async", [mx.cpu(0)], slice(hvd.rank(), None, hvd.size()))
    assert trainer._update_on_kvstore
    assert all(np.isfinite(weight).all() for weight in weights)
    trainer._kvstore._barrier()
    return float(sum(np.abs(weight).sum() for weight in weights))


def test_gluon_trains_on_dist_async(ranks: Ranks) -> None:
    assert all(ranks.run(gluon_on_servers, timeout=100))
