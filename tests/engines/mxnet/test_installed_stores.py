"""hvdlab's stores where MXNet makes its own: Gluon's trainer and MXNet's optimizers run on them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlab import kvstore
from support.ranks.resident import Ranks

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
    """Start the servers. They live as long as the ranks, so they have to come before the first test."""
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


def test_the_learning_rate_of_mxnets_optimizer_is_set(installed: None) -> None:
    kv = mx.kv.create("local")
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0, momentum=0.5))
    kv.init(0, mx.nd.zeros((1,)))
    out = mx.nd.empty((1,))
    kv.push(0, -mx.nd.ones((1,)))
    kv.set_learning_rate(0.5)
    kv.pushpull(0, -mx.nd.ones((1,)), out=out)
    assert out.asnumpy().tolist() == [1 + 0.5 * 1 + 0.5]


def test_errors_of_stores_are_mxnets(installed: None) -> None:
    kv, rows = mx.kv.create("local"), mx.nd.sparse.zeros("row_sparse", (2, 2))
    kv.init(["dense", "rows"], [mx.nd.ones((2, 2)), rows])
    calls: list[Callable[[], Any]] = [
        lambda: kv.pull(3, out=mx.nd.ones((2, 2))),
        lambda: kv.push("unknown", mx.nd.ones((2, 2))),
        lambda: kv.row_sparse_pull("dense", out=rows, row_ids=mx.nd.array([1])),
        lambda: kv.row_sparse_pull("rows", out=mx.nd.ones((2, 2)), row_ids=mx.nd.array([1])),
        lambda: kv.set_gradient_compression({"type": "2bit"}),
    ]
    for call in calls:
        with pytest.raises(mx.MXNetError) as ours:
            call()
        assert isinstance(ours.value, kvstore.KVStoreError)


def test_names_that_mxnet_would_make_a_local_store_of(installed: None) -> None:
    with pytest.raises(ValueError, match="'dist_magic'"):
        mx.kv.create("dist_magic")
    with pytest.raises(TypeError, match="name must be a string"):
        mx.kv.create(3)
    assert mx.kv.create("teststore").type == "teststore"


def row_sparse_store(name: str, optimizer: Any) -> list[Any]:
    """Return the values pulled from a store of MXNet's arrays while it is trained by rows."""
    kv, rng, shape = mx.kv.create(name), np.random.default_rng(9), (9, 3)

    def rows(numbers: Any) -> Any:
        data = rng.standard_normal((len(numbers), 3)).astype("f4")
        return mx.nd.sparse.row_sparse_array((data, numbers), shape=shape)

    if optimizer is not None:
        kv.set_optimizer(optimizer)
    kv.init("w", rows(np.arange(9)))
    seen: list[Any] = []
    out = mx.nd.sparse.zeros("row_sparse", shape)
    for _ in range(5):
        kv.push("w", [rows(np.sort(rng.choice(9, int(rng.integers(1, 5)), replace=False))) for _ in range(3)])
        kv.row_sparse_pull("w", out=out, row_ids=mx.nd.array(rng.integers(0, 9, (2, 3))))
        seen += [out.indices.asnumpy().tolist(), out.data.asnumpy().tobytes()]
    kv.pull("w", out=out, ignore_sparse=False)
    return [*seen, out.asnumpy().tobytes()]


@pytest.mark.filterwarnings("ignore")  # MXNet's
def test_row_sparse_arrays_of_mxnet_give_mxnets_bits() -> None:
    for name, optimizer, settings in (
        ("local", None, {}),
        ("device", "sgd", {"learning_rate": 0.1}),
        ("local", "sgd", {"momentum": 0.9, "wd": 0.1}),
        ("local", "adam", {}),
        ("local", "sgd", {"momentum": 0.9, "lazy_update": False}),
        ("local", "rmsprop", {}),
    ):
        results = []
        for install in (hvd.install_kvstore, hvd.uninstall_kvstore):
            install()
            made = None if optimizer is None else mx.optimizer.create(optimizer, **settings)
            results.append(row_sparse_store(name, made))
        assert results[0] == results[1], (name, optimizer, settings)


def embedded(
    store: str, contexts: list[Any], share: slice = slice(None), *, sparse_weight: bool = False
) -> Any:
    """Return the weight of an embedding with gradients by row, after training."""
    weight = mx.gluon.Parameter(
        "weight", shape=(11, 2), grad_stype="row_sparse", stype="row_sparse" if sparse_weight else "default"
    )
    start = np.random.default_rng(5).standard_normal((11, 2)).astype("f4")
    weight.initialize(init=mx.init.Constant(mx.nd.array(start)), ctx=contexts)
    # Looking at rows sets the store up, and the batch's size can't come after that.
    settings = {"learning_rate": 0.1, "momentum": 0.9, "rescale_grad": 1 / 8}
    trainer = mx.gluon.Trainer([weight], "sgd", settings, kvstore=store)
    rng = np.random.default_rng(6)
    for _ in range(4):
        parts = np.split(rng.integers(0, 11, 8)[share], len(contexts))
        with mx.autograd.record():
            losses = []
            for part, context in zip(parts, contexts, strict=True):
                ids = mx.nd.array(part, ctx=context)
                value = weight.row_sparse_data(ids) if sparse_weight else weight.data(context)
                found = mx.nd.Embedding(ids, value, input_dim=11, output_dim=2, sparse_grad=True)
                losses.append((found * found).sum())
        mx.autograd.backward(losses)
        trainer.step(1)
    if sparse_weight:
        return weight.row_sparse_data(mx.nd.arange(11, ctx=contexts[0])).asnumpy()
    return weight.data(contexts[0]).asnumpy()


@pytest.mark.filterwarnings("ignore")  # MXNet's
def test_gluon_trains_embeddings_to_the_same_bits() -> None:
    contexts = [mx.cpu(0), mx.cpu(1)]
    for name in ("local", "device"):
        for sparse_weight in (False, True):
            hvd.install_kvstore()
            ours = embedded(name, contexts, sparse_weight=sparse_weight)
            hvd.uninstall_kvstore()
            theirs = embedded(name, contexts, sparse_weight=sparse_weight)
            assert ours.tobytes() == theirs.tobytes(), (name, sparse_weight)


def embedded_on_ranks(store: str) -> Any:
    hvd.init()
    hvd.install_kvstore()
    share = slice(hvd.rank(), None, hvd.size())
    return [embedded(store, [mx.cpu(0)], share, sparse_weight=sparse).tolist() for sparse in (False, True)]


@pytest.mark.filterwarnings("ignore")  # MXNet's
def test_gluon_trains_embeddings_on_ranks_as_in_one_process(ranks: Ranks) -> None:
    one = [embedded("device", [mx.cpu(0)], sparse_weight=sparse) for sparse in (False, True)]
    for found in ranks.run(embedded_on_ranks, "dist_sync", timeout=100):
        np.testing.assert_allclose(found, one, rtol=1e-5, atol=1e-6)
    for found in ranks.run(embedded_on_ranks, "dist_async", timeout=100):
        assert np.isfinite(found).all()


def saved_and_loaded(store: str, path: str, contexts: list[Any]) -> None:
    """Check that Gluon's trainer saves its states and loads them again; a sparse weight has some, too."""
    model = net(contexts)
    rows = mx.gluon.Parameter("rows", shape=(4, 2), stype="row_sparse", grad_stype="row_sparse")
    rows.initialize(ctx=contexts)
    parameters = [*model.collect_params().values(), rows]
    trainer = mx.gluon.Trainer(parameters, "sgd", SETTINGS, kvstore=store, update_on_kvstore=True)
    x, ids = mx.nd.ones((2, 5)), mx.nd.array([1, 3])
    for _ in range(2):
        with mx.autograd.record():
            found = mx.nd.Embedding(
                ids, rows.row_sparse_data(ids), input_dim=4, output_dim=2, sparse_grad=True
            )
            loss = model(x).sum() + found.sum()
        loss.backward()
        trainer.step(1, ignore_stale_grad=True)
    trainer.save_states(path)
    before = {key: state.asnumpy().tobytes() for key, state in trainer._kvstore._updater.states.items()}
    assert set(before) == set(range(len(parameters)))
    trainer.load_states(path)
    updater = trainer._kvstore._updater
    assert trainer._optimizer is updater.optimizer
    assert trainer.learning_rate == SETTINGS["learning_rate"]
    updater.set_states(updater.get_states())
    after = {key: state.asnumpy().tobytes() for key, state in updater.states.items()}
    assert after == before


def saved_on_ranks(store: str, folder: str) -> None:
    hvd.init()
    hvd.install_kvstore()
    saved_and_loaded(store, f"{folder}/{hvd.rank()}", [mx.cpu(0)])


@pytest.mark.filterwarnings("ignore")  # MXNet's
def test_gluons_trainer_saves_and_loads_states(installed: None, ranks: Ranks, tmp_path: Path) -> None:
    saved_and_loaded("device", str(tmp_path / "states"), [mx.cpu(0)])
    ranks.run(saved_on_ranks, "dist_sync", str(tmp_path), timeout=100)


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


def scheduler_of(kind: str) -> Any:
    if kind == "cosine":
        return mx.lr_scheduler.CosineScheduler(5, base_lr=0.3, warmup_steps=2)
    used = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.4)
    assert used(3) == 0.2  # its rate has been reduced once
    return used


def trained_on_servers(name: str, scheduler: str = "") -> list[list[list[float]]]:
    """Gluon on a store with servers, one worker after the other; and alone on MXNet's arithmetic, on the same gradients."""

    def made() -> Any:
        if not scheduler:
            return mx.optimizer.create(name, learning_rate=0.1, wd=0.01)
        return mx.optimizer.create(name, lr_scheduler=scheduler_of(scheduler), wd=0.01)

    hvd.init()
    hvd.install_kvstore()
    rng = np.random.default_rng(3)
    store = mx.kv.create("dist_async")
    assert isinstance(store, mx.kvstore.KVStore)
    optimizer = made()
    optimizer.set_lr_mult({1: 0.5})
    with pytest.raises(kvstore.KVStoreError, match="not MXNet's FTML"):
        store.set_optimizer(mx.optimizer.create("ftml"))
    with pytest.raises(kvstore.KVStoreError, match="not a OwnScheduler, which would have to travel as code"):
        store.set_optimizer(mx.optimizer.create("sgd", lr_scheduler=OwnScheduler(2)))
    store.set_optimizer(optimizer)
    updater = mx.optimizer.get_updater(made())
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


class OwnScheduler(mx.lr_scheduler.FactorScheduler):  # type: ignore[misc]  # MXNet has no types
    """Scheduler of a class that servers don't have."""


def test_mxnets_optimizers_on_servers_give_mxnets_bits(ranks: Ranks) -> None:
    for settings in (
        ("sgd",),
        ("nag",),
        ("adam",),
        ("adagrad",),
        ("rmsprop",),
        ("test",),
        ("sgd", "used"),
        ("sgd", "cosine"),
        ("adam", "cosine"),
    ):
        for ours, theirs in ranks.run(trained_on_servers, *settings, timeout=100):
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
