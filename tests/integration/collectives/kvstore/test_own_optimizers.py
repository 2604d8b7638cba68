"""Optimizers of the user's own on parameter servers, which import them by the names of their modules."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab import kvstore
from hvdlab.kvstore import KVStoreError
from support.ranks.resident import Ranks

MODULE = """
import os, sys
import numpy as np
from hvdlab import kvstore

print("a server's starter reads its stdout")
os.write(1, b"which this must not disturb\\\\n")


@kvstore.optimizer.register
class SignStep(kvstore.optimizer.Optimizer):
    def __init__(self, decay=0.5, **kwargs):
        super().__init__(**kwargs)
        self.decay = decay

    def create_state(self, index, weight):
        return np.zeros_like(weight)

    def update(self, index, weight, grad, state):
        self._update_count(index)
        state *= self.decay
        state += grad
        weight -= self._get_lr(index) * np.sign(state) * self._index_update_count[index]
        print("updated", index)
        if np.isnan(grad).any():
            raise ValueError("no number")
"""

NOT_ON_SERVERS = (
    """
import sys

if "hvdlab.collectives.kvstore.servers" in sys.orig_argv:
    raise OSError("not on this machine")
"""
    + MODULE
)


def imported(directory: str) -> Any:
    if directory not in sys.path:
        sys.path.insert(0, directory)  # as that of a script is
    return importlib.import_module("sign_steps")


def full(value: float) -> Any:
    return np.full(5, value, np.float32)


def trained_around_a_kill(directory: str) -> None:
    module = imported(directory)
    kv, alone = kvstore.create("dist_async"), kvstore.create("local")
    for store in (kv, alone):
        store.set_optimizer(module.SignStep(decay=0.25, learning_rate=0.5))
        store.init("w", np.linspace(-1, 1, 5, dtype=np.float32))
    out, expected = full(0), full(0)
    for number in range(9):
        gradient = np.sin(np.arange(5, dtype=np.float32) * number)
        alone.pushpull("w", gradient, out=expected)
        if kv.rank == 0:
            kv.pushpull("w", gradient, out=out)
            if number == 4:
                os.kill(kv.servers()[0].pid, signal.SIGKILL)
        if number == 5:
            kv.set_learning_rate(0.125)
            alone.set_learning_rate(0.125)
    if kv.rank == 0:
        with pytest.raises(KVStoreError, match=r"key 'w'.*ValueError: no number"):
            kv.pushpull("w", full(np.nan))
    hvd.barrier()
    kv.pull("w", out=out)
    assert out.tobytes() == expected.tobytes()


def others_are_refused(directory: str) -> None:
    imported(directory)

    @kvstore.optimizer.register
    class Elsewhere(kvstore.optimizer.Optimizer):
        """Its module is this one, which servers don't import."""

    kv = kvstore.create("dist_async")
    for wrong in (Elsewhere(), "elsewhere", lambda key, grad, weight: None):
        with pytest.raises(KVStoreError, match="HVDLAB_KV_OPTIMIZERS"):
            kv.set_optimizer(wrong)
    kv.set_optimizer("test")


def is_not_there(directory: str) -> None:
    """Check that the error comes on all workers, with the reason, and another optimizer can be set then."""
    module = imported(directory)
    kv = kvstore.create("dist_async")
    with pytest.raises(
        KVStoreError, match=r"'signstep'.*import sign_steps failed.*OSError: not on this machine"
    ):
        kv.set_optimizer(module.SignStep())
    kv.set_optimizer("test")
    kv.init("w", full(1))
    kv.pushpull("w", full(kv.rank + 1), out=(out := full(0)))
    kv.barrier()
    kv.pull("w", out=out)
    assert out[0] == 1 + 3


@pytest.mark.parametrize(
    ("functions", "text"),
    [((trained_around_a_kill, others_are_refused), MODULE), ((is_not_there,), NOT_ON_SERVERS)],
    ids=["imported", "not imported"],
)
def test_on_ranks(tmp_path: Path, functions: Any, text: str) -> None:
    (tmp_path / "sign_steps.py").write_text(text)
    with Ranks(2, env={"HVDLAB_KV_OPTIMIZERS": "sign_steps"}) as ranks:
        for function in functions:
            ranks.run(function, str(tmp_path))


POISON = """
import os
import numpy as np
from hvdlab import kvstore


@kvstore.optimizer.register
class Poison(kvstore.optimizer.Optimizer):
    def create_state(self, index, weight):
        if weight.ndim == 2:
            raise ValueError("Poison has vectors only")
        return None

    def update(self, index, weight, grad, state):
        if np.isinf(grad).any():
            os._exit(9)
        weight += grad
"""


def a_request_ends_each_server(directory: str) -> None:
    """Check that it fails after some servers; other requests, of this worker and of others, are carried out."""
    sys.path.insert(0, directory)
    kv = kvstore.create("dist_async")
    kv.set_optimizer(importlib.import_module("poison").Poison())
    kv.init(["w", "sound"], [full(1), full(1)])
    first = kv.servers()[0].pid
    out = full(0)
    if kv.rank == 0:
        with pytest.raises(KVStoreError, match=ENDED):
            kv.pushpull("w", full(np.inf), out=out)
    kv.barrier()
    kv.pushpull("sound", full(1), out=out)
    kv.barrier()
    kv.pull(["w", "sound"], out=[weight := full(0), out])
    assert (weight[0], out[0]) == (1, 1 + kv.num_workers)
    assert kv.servers()[0].pid != first


ENDED = r"ended each time it carried out this request \(Push of key 'w'\), \d times by now.*stderr"


def requests_that_raise(directory: str) -> None:
    """Check that they are answered with an error, and the server goes on."""
    sys.path.insert(0, directory)
    kv = kvstore.create("dist_async")
    kv.set_optimizer(importlib.import_module("poison").Poison())
    kv.init("w", full(1))
    pid = kv.servers()[0].pid
    for _ in range(2):
        with pytest.raises(KVStoreError, match="Poison has vectors only"):
            kv.init("matrix", np.ones((2, 2), np.float32))
    for begin in (-1, None):
        poison = kvstore.optimizer.SGD()
        poison.begin_num_update = begin  # type: ignore[assignment]  # None is what must be refused
        with pytest.raises(KVStoreError, match="begin_num_update"):
            kv.set_optimizer(poison)
    kv.set_optimizer(kvstore.optimizer.SGD(learning_rate=1.0))
    kv.barrier()
    kv.pushpull("w", full(1), out=full(0))
    assert kv.servers()[0].pid == pid


@pytest.mark.parametrize(
    "function", [requests_that_raise, a_request_ends_each_server], ids=["raises", "ends"]
)
def test_a_request_that_servers_can_not_carry_out(tmp_path: Path, function: Any) -> None:
    (tmp_path / "poison.py").write_text(POISON)
    with Ranks(2, env={"HVDLAB_KV_OPTIMIZERS": "poison"}) as ranks:
        ranks.run(function, str(tmp_path), timeout=90)
