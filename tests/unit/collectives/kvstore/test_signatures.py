"""Names and signatures of MXNet's key-value stores, each as in the reference."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from hvdlab import kvstore
from hvdlab.kvstore import optimizer

SUM = "self, key, value, out=None, priority=0"
FIRST = "self, key, value, out, priority=0"
STATES = {
    "save_optimizer_states": "self, fname, dump_optimizer=False",
    "load_optimizer_states": "self, fname",
}
BASE = {
    "broadcast": FIRST,
    "pushpull": SUM,
    "set_optimizer": "self, optimizer",
    "is_capable": "capability",
    **STATES,
}
SIGNATURES: dict[Any, dict[str, str]] = {
    kvstore.KVStoreBase: {**BASE, "register": "klass"},
    kvstore.TestStore: BASE,
    kvstore.Horovod: BASE,
    kvstore.BytePS: {**BASE, "pushpull_async": SUM},
    kvstore.KVStore: {
        **BASE,
        "init": "self, key, value",
        "push": "self, key, value, priority=0",
        "pull": "self, key, out=None, priority=0, ignore_sparse=True",
        "row_sparse_pull": "self, key, out=None, priority=0, row_ids=None",
        "set_gradient_compression": "self, compression_params",
        "_set_updater": "self, updater",
        "_barrier": "self",
        "barrier": "self",
        "_send_command_to_servers": "self, head, body",
        "servers": "self",
    },
    kvstore.KVStoreServer: {"__init__": "self, kvstore", "run": "self"},
    kvstore.RowSparse: {"__init__": "self, data, indices, shape", "todense": "self"},
    optimizer.Updater: {
        "__init__": "self, optimizer",
        "__call__": "self, key, grad, weight",
        "get_states": "self, dump_optimizer=False",
        "set_states": "self, states",
    },
}
PROPERTIES = {
    kvstore.KVStore: ("type", "rank", "num_workers", "local_rank"),
    kvstore.Horovod: ("type", "rank", "num_workers", "local_rank"),
    kvstore.BytePS: ("type", "rank", "num_workers", "local_rank"),
    kvstore.TestStore: ("type", "rank", "num_workers"),
}
SETTINGS = {
    "learning_rate": 0.01,
    "wd": 0.0,
    "rescale_grad": 1.0,
    "clip_gradient": None,
    "lr_scheduler": None,
    "multi_precision": False,
    "begin_num_update": 0,
    "param_dict": None,
}


def signature(function: Any) -> str:
    parameters = inspect.signature(function).parameters.values()
    plain = [str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters]
    return ", ".join(plain)


@pytest.mark.parametrize("klass", SIGNATURES, ids=lambda klass: klass.__name__)
def test_methods_take_what_mxnets_take(klass: Any) -> None:
    wrong = {}
    for name, expected in SIGNATURES[klass].items():
        found = signature(getattr(klass, name))
        if found.removeprefix("self, ") != expected.removeprefix("self, "):
            wrong[name] = found
    assert not wrong


def test_what_stores_say_of_themselves_are_properties() -> None:
    for klass, names in PROPERTIES.items():
        assert all(isinstance(getattr(klass, name), property) for name in names), klass


def test_stores_without_values_have_no_pushes_and_pulls() -> None:
    for klass in (kvstore.Horovod, kvstore.BytePS, kvstore.TestStore):
        assert not {"init", "push", "pull", "row_sparse_pull", "set_gradient_compression"} & set(dir(klass))


def test_optimizers_have_mxnets_arguments_and_defaults() -> None:
    found = inspect.signature(optimizer.Optimizer).parameters
    assert {name: found[name].default for name in SETTINGS} == SETTINGS
    adam = inspect.signature(optimizer.Adam).parameters
    assert [adam[name].default for name in ("learning_rate", "beta1", "beta2", "epsilon")] == [
        1e-3,
        0.9,
        0.999,
        1e-8,
    ]
    assert inspect.signature(optimizer.SGD).parameters["momentum"].default == 0.0
    assert inspect.signature(kvstore.create).parameters["name"].default == "local"
