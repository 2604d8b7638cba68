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

from hvdlab import kvstore
from hvdlab.collectives import api
from hvdlab.kvstore import KVStoreError
from ranks import Ranks

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
    api.barrier()
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
    """The error comes on all workers, with the reason, and another optimizer can be set then."""
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
