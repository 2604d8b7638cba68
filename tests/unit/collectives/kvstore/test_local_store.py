"""Stores of one process: values, errors, updaters, sparse rows, compression, saved states."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab import kvstore
from hvdlab.collectives.kvstore import optimizer_state
from hvdlab.collectives.kvstore.local_store import GradientCompression
from hvdlab.collectives.kvstore.optimizer_state import OptimizerSpec, ScheduleSpec, _mode_of
from hvdlab.collectives.kvstore.optimizers import portable, restored
from hvdlab.kvstore import KVStoreError, RowSparse

LOCAL = ("local", "device")


def ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def pulled(kv: Any, key: Any, *shape: int) -> Any:
    out = np.full(shape, np.nan, np.float32)
    kv.pull(key, out=out)
    return out.tolist()


@pytest.mark.parametrize("name", LOCAL)
def test_a_push_assigns_its_sum(name: str) -> None:
    kv = kvstore.create(name)
    first = ones(2) * 7
    kv.init(3, first)
    first[:] = 0
    assert pulled(kv, 3, 2) == [7, 7]
    kv.push(3, [ones(2)] * 4)
    assert pulled(kv, 3, 2) == [4, 4]
    for number in (1, 2, 3):
        kv.push(3, ones(2) * number)
    assert pulled(kv, 3, 2) == [3, 3]
    kv.push([3, 3], [ones(2), ones(2) * 100])
    out = ones(2)
    kv.pushpull(3, ones(2) * 5, out=out)
    assert out.tolist() == [5, 5]
    values = [ones(2), ones(2) * 2]
    kv.pushpull(3, values)
    assert [value.tolist() for value in values] == [[3, 3]] * 2
    values[0][:] = 9
    assert pulled(kv, 3, 2) == [3, 3]


def test_the_orders_of_summation() -> None:
    big, small = np.float32(2**24), np.float32(1)
    arrays = [np.full(40_000, value, np.float32) for value in (big, small, small, small, small)]
    results = {}
    for name in LOCAL:
        kv = kvstore.create(name)
        kv.init("w", arrays[0])
        kv.push("w", arrays)
        results[name] = pulled(kv, "w", 40_000)
    assert results["device"] == [2.0**24] * 40_000  # each 1 is lost
    assert results["local"] == [2.0**24 + 4] * 40_000  # the four are added before


def test_an_updater_is_called_once_for_each_key_with_the_sum() -> None:
    kv = kvstore.create()
    kv.init([5, 2], [ones(1) * 4] * 2)
    calls: list[Any] = []

    def update(key: Any, received: Any, stored: Any) -> None:
        calls.append((key, received.tolist()))
        stored += 2 * received

    kv._set_updater(update)
    kv.push([5, 2, 5], [ones(1), ones(1), ones(1) * 3])
    assert calls == [(2, [1]), (5, [4])]
    assert (pulled(kv, 5, 1), pulled(kv, 2, 1)) == ([12], [6])
    kv._set_updater(None)
    kv.push(5, ones(1))
    assert pulled(kv, 5, 1) == [1]


def test_what_an_updater_raises_reaches_the_push_and_changes_nothing() -> None:
    kv = kvstore.create()
    kv.init([1, 2], [ones(2), ones(2)])

    def update(key: int, received: Any, stored: Any) -> None:
        stored += received
        if key == 2:
            raise ZeroDivisionError("no")

    kv._set_updater(update)
    with pytest.raises(ZeroDivisionError, match="no"):
        kv.push([1, 2], [ones(2), ones(2)])
    assert (pulled(kv, 1, 2), pulled(kv, 2, 2)) == ([1, 1], [1, 1])
    kv.push(1, ones(2))
    assert pulled(kv, 1, 2) == [2, 2]


def filled() -> Any:
    kv = kvstore.create()
    kv.init([3, 4], [ones(2, 2), ones(3)])
    return kv


REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("init", (3, ones(1)), KVStoreError, "duplicate init of key 3"),
    ("init", ([8, 8], [ones(1), ones(1)]), KVStoreError, "duplicate init of key 8"),
    ("init", ("a", ones(1)), KVStoreError, "Mixed key types are not allowed"),
    ("init", (1.5, ones(1)), AssertionError, "unexpected type for keys: <class 'float'>"),
    ("init", (None, ones(1)), AssertionError, "unexpected type for keys"),
    ("init", (np.int64(5), ones(1)), AssertionError, "unexpected type for keys"),
    ("init", (2**31, ones(1)), ValueError, "32 bits"),
    ("init", ([5, "a"], [ones(1), ones(1)]), AssertionError, "inconsistent types of keys"),
    ("init", ([5, 6], [ones(1)]), AssertionError, "2 keys"),
    ("init", (5, 1.0), TypeError, "key 5 is a float"),
    ("init", (5, [1.0, 2.0]), AssertionError, "key 5 is a float"),
    ("init", (5, "text"), TypeError, "key 5 is a str"),
    ("init", (5, np.array([None])), TypeError, "object"),
    ("push", (9, ones(1)), KVStoreError, "key 9 has not been inited"),
    ("push", (9, [ones(1), ones(1)]), KVStoreError, "key 9 has not been inited"),
    ("push", (3, ones(4)), KVStoreError, r"key 3 has shape \(2, 2\).*\(4,\)"),
    ("push", (3, [ones(2, 2), np.ones((2, 2))]), KVStoreError, "float32, float64"),
    ("pull", (3, ones(4)), KVStoreError, r"key 3 has shape \(2, 2\).*\(4,\)"),
    ("pull", (9, ones(1)), KVStoreError, "key 9 has not been inited"),
    ("pull", (3,), AssertionError, "out"),
    ("pushpull", (3, ones(2, 2) * 5, ones(4)), KVStoreError, r"\(4,\)"),
    ("broadcast", (3, ones(1), ones(1)), KVStoreError, "duplicate init"),
    ("broadcast", (7, ones(1), None), TypeError, "out"),
    ("broadcast", (7, ones(1), ones(2)), KVStoreError, r"\(2,\)"),
    ("row_sparse_pull", (3, RowSparse([], [], (2, 2)), 0, ones(1)), KVStoreError, "key 3 is dense"),
    ("set_gradient_compression", ({"type": "2bit"},), KVStoreError, "not supported for this type"),
    ("set_optimizer", (3,), TypeError, "no optimizer"),
    ("set_optimizer", ("sgdd",), ValueError, "adagrad, adam, nag, rmsprop, sgd, test"),
    ("is_capable", ("magic",), ValueError, "Unknown capability: magic"),
    ("save_optimizer_states", ("x",), AssertionError, "Cannot save states"),
    ("load_optimizer_states", ("x",), AssertionError, "Cannot load states"),
]


def test_what_is_refused_leaves_the_store_as_it_was() -> None:
    kv = filled()
    for method, arguments, error, text in REFUSED:
        with pytest.raises(error, match=text):
            getattr(kv, method)(*arguments)
        assert (pulled(kv, 3, 2, 2), pulled(kv, 4, 3)) == ([[1, 1]] * 2, [1, 1, 1]), (method, text)
    kv.init(8, ones(1))
    named = kvstore.create()
    named.init("a", ones(1))
    with pytest.raises(KVStoreError, match=r"key zz doesn't exist. Did you init\?") as caught:
        named.push("zz", ones(1))
    assert caught.value.key == "zz"
    with pytest.raises(TypeError, match="read-only"):
        kv.pull(8, out=np.broadcast_to(np.float32(1), (1,)))


def test_results_have_the_type_of_the_output() -> None:
    kv = kvstore.create()
    kv.init(1, np.array([1000.5, -1.5]))
    out = np.zeros(2, np.int32)
    kv.pull(1, out=out)
    assert out.tolist() == [1000, -1]
    buffer = bytearray(2 * 8)
    kv.pull(1, out=memoryview(buffer).cast("d"))
    assert np.frombuffer(buffer).tolist() == [1000.5, -1.5]
    strided = np.zeros((2, 2), np.float32)
    kv.push(1, np.arange(4.0)[::2])
    kv.pull(1, out=strided[:, 1])
    assert strided.tolist() == [[0, 0], [0, 2]]


def test_names_and_capabilities() -> None:
    for name in ("local", "LOCAL_update_cpu", "local_allreduce_cpu", "device", "local_allreduce_device"):
        kv = kvstore.create(name)
        assert (kv.type, kv.rank, kv.num_workers, kv.local_rank, kv.servers()) == (name.lower(), 0, 1, 0, [])
        assert kv.is_capable("OPTIMIZER")
        kv.barrier()
        kv._barrier()
        kv._send_command_to_servers(0, "")
    with pytest.raises(TypeError, match="name must be a string"):
        kvstore.create(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'dist_magic'.*byteps.*dist_sync.*local"):
        kvstore.create("dist_magic")
    with pytest.raises(KVStoreError, match="USE_NCCL=1"):
        kvstore.create("nccl")


def test_registered_classes_are_created_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore.KVStoreBase, "kv_registry", dict(kvstore.KVStoreBase.kv_registry))

    @kvstore.KVStoreBase.register
    class Mine(kvstore.KVStoreBase):
        pass

    assert type(kvstore.create("MINE")) is Mine
    with pytest.warns(UserWarning, match="replaces the store 'mine'"):
        kvstore.KVStoreBase.register(type("mine", (), {}))
    with pytest.raises(AssertionError, match="only classes"):
        kvstore.KVStoreBase.register(Mine())  # type: ignore[type-var]
    for call in (
        lambda: Mine().pushpull(1, 2),
        lambda: Mine().broadcast(1, 2, 3),
        lambda: Mine().type,
        lambda: Mine.is_capable("optimizer"),
    ):
        with pytest.raises(NotImplementedError):
            call()


def test_the_test_store() -> None:
    kv = kvstore.create("teststore")
    outs = [ones(2), ones(2)]
    for number in (2, 3):
        kv.broadcast("a", ones(2) * number, outs)
        assert [out.tolist() for out in outs] == [[number] * 2] * 2
    kv.pushpull("a", outs)
    assert [out.tolist() for out in outs] == [[6, 6]] * 2
    kv.pushpull("a", outs, out=(out := ones(2)))
    assert (out.tolist(), kv.type, kv.rank, kv.num_workers) == ([12, 12], "teststore", 0, 1)
    assert not kv.is_capable("optimizer")
    with pytest.raises(ValueError, match="Unknown capability"):
        kv.is_capable("x")
    with pytest.raises(NotImplementedError):
        kv.set_optimizer("sgd")


# -- row-sparse arrays ------------------------------------------------------------------------------------------------


def rows(count: int, indices: list[int], value: float = 1.0) -> RowSparse:
    return RowSparse(np.full((len(indices), 2), value, np.float32), indices, (count, 2))


def test_row_sparse_values_are_summed_over_all_rows_and_pulled_by_row() -> None:
    kv = kvstore.create()
    kv.init("w", rows(4, [2, 0]))
    out = rows(4, [])
    kv.push("w", [rows(4, [1]), rows(4, [1, 3], 3)])
    kv.row_sparse_pull("w", out=out, row_ids=np.array([[3, 2], [2, 1]]))
    assert (out.indices.tolist(), out.data.tolist()) == ([1, 2, 3], [[4, 4], [0, 0], [3, 3]])
    outs = [rows(4, []), rows(4, [])]
    kv.row_sparse_pull("w", out=outs, row_ids=[np.array([1]), np.array([3.0])])
    assert [o.todense().sum() for o in outs] == [8, 6]
    with pytest.raises(KVStoreError, match=r"'w': row 4 is out of range: the array has rows 0 to 3"):
        kv.row_sparse_pull("w", out=out, row_ids=np.array([0, 4]))
    with pytest.raises(AssertionError, match="2 row_ids were given for 1"):
        kv.row_sparse_pull("w", out=out, row_ids=[np.array([1]), np.array([1])])
    assert out.indices.tolist() == [1, 2, 3]


def test_rows_of_several_keys_are_pulled_into_lists_of_lists() -> None:
    kv = kvstore.create()
    values = {
        name: RowSparse(np.arange(10.0).reshape(5, 2) + n, range(5), (5, 2)) for n, name in enumerate("ab")
    }
    kv.init(list(values), list(values.values()))
    outs = [[rows(5, []), rows(5, [])], [rows(5, [])]]
    numbers = [[np.array([4]), np.array([0, 2])], [np.array([3])]]
    kv.row_sparse_pull(["a", "b"], out=outs, row_ids=numbers)
    assert [[out.indices.tolist() for out in group] for group in outs] == [[[4], [0, 2]], [[3]]]
    assert outs[0][1].data.tolist() == [[0, 1], [4, 5]]
    assert outs[1][0].data.tolist() == [[7, 8]]
    for wrong in (
        [[np.array([4])], [np.array([0]), np.array([1])]],
        [numbers[0]],
        [np.array([4]), numbers[1]],
    ):
        with pytest.raises(AssertionError):
            kv.row_sparse_pull(["a", "b"], out=outs, row_ids=wrong)


class OfFramework(RuntimeError):
    """Error of a framework."""


class SpecialError(KVStoreError):
    """Error of a kind of its own."""


def test_errors_of_stores_are_the_frameworks_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVStoreError, "_framework", None)
    KVStoreError.count_as(OfFramework)
    kv = filled()
    with pytest.raises(OfFramework, match="Mixed key types") as raised:
        kv.pull("another kind", out=ones(1))
    assert isinstance(raised.value, KVStoreError)
    assert (type(raised.value).__name__, raised.value.key) == ("KVStoreError", "another kind")
    special = SpecialError("gone")
    assert isinstance(special, SpecialError)
    assert isinstance(special, OfFramework)
    sent = pickle.dumps(raised.value)
    assert isinstance(pickle.loads(sent), OfFramework)  # noqa: S301  (our own)
    monkeypatch.setattr(KVStoreError, "_framework", None)
    found = pickle.loads(sent)  # noqa: S301  (our own)
    assert (type(found), str(found), found.key) == (KVStoreError, str(raised.value), "another kind")


def test_pull_leaves_sparse_outputs_alone_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    kv = kvstore.create()
    kv.init("w", rows(4, [2]))
    out = rows(4, [0])
    with caplog.at_level("WARNING", "hvdlab"):
        kv.pull("w", out=out)
        kv.pull("w", out=out)
    assert (out.indices.tolist(), len(caplog.records)) == ([0], 1)
    kv.pull("w", out=out, ignore_sparse=False)
    assert out.indices.tolist() == [2]


def test_dense_outputs_of_row_sparse_values_are_filled(caplog: pytest.LogCaptureFixture) -> None:
    kv = kvstore.create()
    kv.init(["w", "d"], [rows(3, [2]), ones(3, 2)])
    filled = [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    for ignore_sparse in (True, False):
        outs = [np.full((3, 2), np.nan) for _ in range(3)]
        kv.pull(["w", "d"], out=[[outs[0], rows(3, [0]), outs[1]], outs[2]], ignore_sparse=ignore_sparse)
        assert [out.tolist() for out in outs] == [filled, filled, [[1.0, 1.0]] * 3]
    out = np.full((3, 2), np.nan)
    kv.broadcast("b", rows(3, [2]), out=out)
    assert out.tolist() == filled
    caplog.clear()
    kv.pushpull("w", rows(3, [0], 5), out=out)
    assert out.tolist() == [[5.0, 5.0], [0.0, 0.0], [0.0, 0.0]]
    assert not caplog.records


def test_a_row_sparse_weight_takes_a_dense_gradient() -> None:
    kv = kvstore.create()
    kv.set_optimizer(kvstore.optimizer.SGD(learning_rate=1.0))
    kv.init("w", rows(3, [0, 1, 2], 4))
    out = np.full((3, 2), np.nan)
    kv.pushpull("w", [ones(3, 2), ones(3, 2)], out=out)
    assert out.tolist() == [[2.0, 2.0]] * 3


def test_a_row_sparse_array_is_checked() -> None:
    for indices, text in (([0, 0], "twice"), ([4, 0], "row 4 is out of range"), ([0.5, 0], "row 0.5")):
        with pytest.raises(ValueError, match=text):
            RowSparse(np.ones((2, 2)), indices, (4, 2))
    with pytest.raises(ValueError, match="1 rows of an array"):
        RowSparse(np.ones((2, 2)), [1], (4, 2))


# -- compression ------------------------------------------------------------------------------------------------------


def test_residuals_are_kept_for_each_place_in_the_list() -> None:
    kv = kvstore.create("device")
    kv.set_gradient_compression({"type": "2bit", "threshold": "0.5", "more": 1})
    kv.init(1, np.zeros(4, np.float32))
    gradient = np.array([0.6, -0.6, 0.2, 0.5], np.float32)
    for expected in ([1, -1, 0, 1], [1, -1, 0, 1], [1, -1, 1, 1]):
        kv.push(1, [gradient, gradient])
        assert pulled(kv, 1, 4) == expected
    kv.init(2, np.zeros(2))
    with pytest.raises(KVStoreError, match="float32 arrays only; key 2"):
        kv.push(2, np.zeros(2))


def test_one_bit_is_plus_or_minus_one() -> None:
    kv = kvstore.create("device")
    kv.set_gradient_compression({"type": "1bit", "threshold": 0})
    kv.init(1, np.zeros(3, np.float32))
    gradient = np.array([0.0, 0.5, -3], np.float32)
    for expected in ([-1, 1, -1], [1, -1, -1]):  # of the residuals [0, .5, -3], then [1, 0, -5]
        kv.push(1, gradient)
        assert pulled(kv, 1, 3) == expected


def test_compressed_push_whose_updater_raises_leaves_no_rest() -> None:
    kv = kvstore.create("device")
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    keys, fails, received = ["a", "b"], [False, True, False], dict[str, list[float]]()
    kv.init(keys, [np.zeros(1, np.float32)] * 2)

    def update(key: str, gradient: Any, stored: Any) -> None:
        if key == "b" and fails.pop(0):
            raise ValueError("not now")
        received[key] = gradient.tolist()

    kv.set_optimizer(update)
    gradients = [np.full(1, 0.2, np.float32)] * 2
    kv.push(keys, gradients)
    with pytest.raises(ValueError, match="not now"):
        kv.push(keys, gradients)
    kv.push(keys, gradients)
    # Two pushes of 0.2 do not reach the threshold.
    assert received == {"a": [0.0], "b": [0.0]}


@pytest.mark.parametrize(
    ("params", "error"),
    [
        (3, AssertionError),
        ({"threshold": 1}, KVStoreError),
        ({"type": "3bit"}, KVStoreError),
        ({"type": "2bit", "threshold": 0}, KVStoreError),
        ({"type": "2bit", "threshold": "nan"}, KVStoreError),
        ({"type": "2bit", "threshold": "x"}, KVStoreError),
    ],
)
def test_wrong_compression_is_refused(params: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        kvstore.create("device").set_gradient_compression(params)


@given(st.lists(st.sampled_from([-0.25, 0.0, 0.25]), max_size=70), st.sampled_from(["2bit", "1bit"]))
def test_packed_values_are_unpacked(values: list[float], kind: str) -> None:
    compression = GradientCompression(kind, 0.25)
    sent = np.array(values, np.float32)
    if kind == "1bit":
        sent = np.where(sent > 0, np.float32(1), np.float32(-1))
    packed = compression.pack(sent)
    assert packed.size == -(-len(values) // (16 if kind == "2bit" else 32)) * 4
    assert compression.unpack(packed, len(values)).tolist() == sent.tolist()


def test_the_first_value_is_in_the_top_bits() -> None:
    packed = GradientCompression("2bit").pack(np.array([0.5, -0.5, 0, 0.5], np.float32))
    assert packed.tolist() == [0b11_10_00_11, 0, 0, 0]


# -- saved states -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_training_goes_on_exactly_from_saved_states(tmp_path: Path, name: str) -> None:
    file = str(tmp_path / "states")
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((6, 3, 2)).astype(np.float32)
    settings: dict[str, Any] = {"learning_rate": 0.1, "wd": 0.01}
    if name == "sgd":
        settings["momentum"] = 0.9
    whole, first, second = (kvstore.create() for _ in range(3))
    whole.set_optimizer(kvstore.optimizer.create(name, **settings))
    first.set_optimizer(kvstore.optimizer.create(name, **settings))
    second.set_optimizer(kvstore.optimizer.create(name))
    for kv in (whole, first):
        kv.init("w", ones(3, 2))
    for gradient in gradients[:3]:
        whole.push("w", gradient)
        first.push("w", gradient)
    first._updater.optimizer.set_lr_mult({"w": 0.5})
    whole._updater.optimizer.set_lr_mult({"w": 0.5})
    first.save_optimizer_states(file, dump_optimizer=True)
    second.init("w", np.array(pulled(first, "w", 3, 2), np.float32))
    second.load_optimizer_states(file)
    for gradient in gradients[3:]:
        whole.push("w", gradient)
        second.push("w", gradient)
    assert pulled(second, "w", 3, 2) == pulled(whole, "w", 3, 2)


def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    kv = kvstore.create()
    kv.set_optimizer(kvstore.optimizer.create("sgd", momentum=0.9))
    kv.init(1, ones(2))
    kv.push(1, ones(2))
    good = kv._updater.get_states(dump_optimizer=True)
    path = tmp_path / "states"
    before = kv._updater.states[1].tolist()
    for data in (
        b"",
        b"\x80\x04.",
        good[:-1],
        good + b"x",
        good.replace(b"f4", b"f8"),
        good.replace(b"sgd", b"odd"),
    ):
        path.write_bytes(data)
        with pytest.raises(KVStoreError):
            kv.load_optimizer_states(str(path))
    assert kv._updater.states[1].tolist() == before


def test_a_failed_save_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = kvstore.create()
    kv.set_optimizer(kvstore.optimizer.create("sgd", momentum=0.9))
    kv.init(1, ones(200_000))
    kv.push(1, ones(200_000))
    path = tmp_path / "states"
    kv.save_optimizer_states(str(path))
    path.chmod(0o640)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(OSError, match="too large"):
            kv.save_optimizer_states(str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    kv.push(1, ones(200_000))
    (tmp_path / "link").symlink_to(path)
    kv.save_optimizer_states(str(tmp_path / "link"))
    assert path.read_bytes() != before
    assert path.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "link").is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "states"]


SGDS = portable(kvstore.optimizer.SGD()).settings
FACTORS = vars(kvstore.lr_scheduler.FactorScheduler(2))


@pytest.mark.parametrize(
    ("settings", "schedule"),
    [
        ({}, None),
        ({**SGDS, "lr": "abc"}, None),
        ({**SGDS, "lr": None}, None),
        ({**SGDS, "momentum": "0.9"}, None),
        ({**SGDS, "update": 3}, None),
        ({**SGDS, "create_state": "x"}, None),
        ({**SGDS, "lr_scheduler": "x"}, None),
        ({**SGDS, "lr_mult": 2.0}, None),
        ({**SGDS, "lr_mult": [("w", "x")]}, None),
        ({**SGDS, "_index_update_count": [(1, 0.5)]}, None),
        ({name: SGDS[name] for name in SGDS if name != "momentum"}, None),
        (SGDS, ("FactorScheduler", {})),
        (SGDS, ("FactorScheduler", {**FACTORS, "step": 0})),
        (SGDS, ("FactorScheduler", {**FACTORS, "base_lr": "x"})),
        (SGDS, ("FactorScheduler", {**FACTORS, "_decayed": 1})),
    ],
)
def test_settings_that_make_no_optimizer_change_nothing(tmp_path: Path, settings: Any, schedule: Any) -> None:
    kv = kvstore.create()
    kv.set_optimizer(kvstore.optimizer.create("sgd", momentum=0.9))
    kv.init(1, ones(2))
    kv.push(1, ones(2))
    optimizer, before = kv._updater.optimizer, kv._updater.states[1].tolist()
    spec = OptimizerSpec("sgd", settings, None if schedule is None else ScheduleSpec(*schedule))
    path = tmp_path / "states"
    path.write_bytes(optimizer_state.encode({1: np.zeros(2, np.float32)}, spec))
    with pytest.raises(KVStoreError, match=r"settings|step="):
        kv.load_optimizer_states(str(path))
    assert kv._updater.optimizer is optimizer
    assert kv._updater.states[1].tolist() == before
    kv.push(1, ones(2))


def test_an_optimizer_whose_rate_a_schedule_gives_needs_none_of_its_own() -> None:
    optimizer = restored(OptimizerSpec("sgd", {**SGDS, "lr": None}, ScheduleSpec("FactorScheduler", FACTORS)))
    assert optimizer.lr is None
    assert optimizer.lr_scheduler is not None


def test_a_scheduler_whose_rate_stays_skips_updates_that_count_as_done() -> None:
    scheduler = kvstore.lr_scheduler.FactorScheduler(3, 0.5, base_lr=1.0, stop_factor_lr=0.25)
    assert scheduler((1 << 62) + 1) == 0.25
    step_by_step = kvstore.lr_scheduler.FactorScheduler(3, 0.5, base_lr=1.0, stop_factor_lr=0.25)
    for update in range(1, 30):
        step_by_step(update)
    at_once = kvstore.lr_scheduler.FactorScheduler(3, 0.5, base_lr=1.0, stop_factor_lr=0.25)
    at_once(29)
    assert vars(at_once) == vars(step_by_step)


# -- optimizers -------------------------------------------------------------------------------------------------------


def test_learning_rates_and_decay_by_key() -> None:
    optimizer = kvstore.optimizer.SGD(learning_rate=1.0, wd=0.5, param_idx2name={0: "a_weight", 1: "a_bias"})
    optimizer.set_lr_mult({"a_bias": 2.0, 5: 3.0})
    assert [optimizer._get_lr(i) for i in (0, 1, 5, 7)] == [1, 2, 3, 1]
    assert [optimizer._get_wd(i) for i in (0, 1, 7)] == [0.5, 0, 0.5]
    scheduled = kvstore.optimizer.SGD(lr_scheduler=lambda updates: 1 / updates, begin_num_update=1)
    weight = ones(1)
    kvstore.optimizer.get_updater(scheduled)("k", ones(1), weight)
    assert weight.tolist() == [0.5]
    with pytest.raises(UserWarning, match="lr_scheduler"):
        scheduled.set_learning_rate(1)
    with pytest.warns(UserWarning, match="registered again"):
        kvstore.optimizer.register(kvstore.optimizer.SGD)


def trained(name: str, weight: Any, gradients: Any, **settings: Any) -> Any:
    """Return a weight after some updates, in double precision: how MXNet's are rounded is compared beside it."""
    updater = kvstore.optimizer.get_updater(kvstore.optimizer.create(name, **settings))
    weight = weight.copy()
    for gradient in gradients:
        updater(0, gradient.copy(), weight)
    return weight


def test_nesterov_adagrad_and_rmsprop_follow_their_formulas() -> None:
    rng = np.random.default_rng(0)
    start, gradients = rng.standard_normal(20_000), rng.standard_normal((3, 20_000))
    lr, wd, scale, bound = 0.1, 0.01, 0.5, 0.4
    settings = {"learning_rate": lr, "wd": wd, "rescale_grad": scale, "clip_gradient": bound}
    nag, plain, adagrad, rmsprop, centered = (start.copy() for _ in range(5))
    v, h, n, c, m, d = (np.zeros(20_000) for _ in range(6))
    for gradient in gradients:
        clipped = np.clip(scale * gradient, -bound, bound)
        v = 0.9 * v
        nag, before = nag - v + 1.9 * (v - lr * (clipped + wd * nag)), v
        v = before - lr * (clipped + wd * nag)
        plain = plain - lr * wd * plain - lr * clipped
        h = h + clipped**2
        adagrad = adagrad - lr * (clipped / np.sqrt(h + 1e-7) + wd * adagrad)
        g = np.clip(scale * gradient + wd * rmsprop, -bound, bound)
        n = 0.1 * g**2 + 0.9 * n
        rmsprop = np.clip(rmsprop - lr * g / np.sqrt(n + 1e-8), -1.5, 1.5)
        g = np.clip(scale * gradient + wd * centered, -bound, bound)
        c, m = 0.1 * g**2 + 0.9 * c, 0.1 * g + 0.9 * m
        d = 0.7 * d - lr * g / np.sqrt(c - m**2 + 1e-8)
        centered = centered + d
    for expected, found in (
        (nag, trained("nag", start, gradients, momentum=0.9, **settings)),
        (plain, trained("nag", start, gradients, **settings)),
        (adagrad, trained("adagrad", start, gradients, **settings)),
        (rmsprop, trained("rmsprop", start, gradients, clip_weights=1.5, **settings)),
        (centered, trained("rmsprop", start, gradients, centered=True, gamma2=0.7, **settings)),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["nag", "adagrad"])
def test_rows_without_a_gradient_stay(name: str) -> None:
    start, rows = np.ones((5, 2)), kvstore.RowSparse(np.full((2, 2), 0.5), np.array([1, 3]), (5, 2))
    updater = kvstore.optimizer.get_updater(kvstore.optimizer.create(name, learning_rate=0.1))
    found = start.copy()
    updater(0, rows, found)
    dense = trained(name, start, [rows.todense()], learning_rate=0.1)
    assert found.tolist() == dense.tolist()
    assert (found[[0, 2, 4]] == 1).all()
    assert (found[[1, 3]] < 1).all()


@pytest.mark.parametrize(("name", "settings"), [("nag", {"momentum": 0.9}), ("adagrad", {"wd": 0.1})])
def test_rows_that_an_optimizer_has_no_formula_for(name: str, settings: dict[str, Any]) -> None:
    kv = kvstore.create()
    kv.set_optimizer(kvstore.optimizer.create(name, **settings))
    kv.init("w", ones(5, 2))
    with pytest.raises(KVStoreError, match=r"row-sparse gradient.* of key 'w'"):
        kv.push("w", kvstore.RowSparse(ones(1, 2), np.array([1]), (5, 2)))
    assert pulled(kv, "w", 5, 2) == [[1.0, 1.0]] * 5
    kv.push("w", ones(5, 2))
    assert pulled(kv, "w", 5, 2)[0][0] < 1


def test_gradients_of_another_type_are_refused() -> None:
    kv = kvstore.create()
    kv.set_optimizer("sgd")
    kv.init("w", ones(2))
    with pytest.raises(KVStoreError, match=r"'w' is float32, but its gradient float64"):
        kv.push("w", np.ones(2))


def test_half_precision_without_masters_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        updater = kvstore.optimizer.get_updater(kvstore.optimizer.SGD(multi_precision=True))
        updater(0, np.ones(2, np.float16), np.ones(2, np.float16))
    with pytest.warns(UserWarning, match="multi_precision"):
        kvstore.optimizer.get_updater(kvstore.optimizer.SGD())(
            0, np.ones(2, np.float16), np.ones(2, np.float16)
        )


# -- arrays of torch --------------------------------------------------------------------------------------------------


def test_arrays_of_torch() -> None:
    torch = pytest.importorskip("torch")
    kv = kvstore.create("device")
    kv.init("w", torch.ones(2, 3, requires_grad=True))
    received: list[Any] = []

    def update(key: str, gradient: Any, stored: Any) -> None:
        received.append(type(stored))
        stored.add_(gradient, alpha=2)

    kv.set_optimizer(update)
    kv.push("w", [torch.ones(3, 2).t(), np.ones((2, 3), np.float32)])
    outs = [torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float64, requires_grad=True), np.zeros((2, 3))]
    kv.pull("w", out=outs)
    assert [out.tolist() for out in outs] == [[[5.0] * 3] * 2] * 3
    assert received == [torch.Tensor]
    with pytest.raises(TypeError, match="bfloat16"):
        kv.push("w", torch.ones(2, 3, dtype=torch.bfloat16))


def test_a_new_file_gets_the_permissions_of_the_umask_which_is_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = os.umask(0o027)
    try:
        with monkeypatch.context() as patch:
            patch.delattr(os, "umask")
            assert _mode_of(str(tmp_path / "states")) == 0o640
    finally:
        os.umask(old)


def test_states_are_saved_under_the_longest_name_that_the_disk_takes(tmp_path: Path) -> None:
    path = tmp_path / ("状" * 85)  # 255 bytes in UTF-8
    optimizer_state.write_file(str(path), b"states")
    assert path.read_bytes() == b"states"
    assert os.listdir(tmp_path) == [path.name]
