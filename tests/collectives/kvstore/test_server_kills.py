"""Parameter servers and workers that are killed at random instants while workers push: every push is applied once."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from hvdlab import kvstore
from hvdlab.collectives.errors import AbortedError
from ranks import Ranks

KEYS = {"one": (1,), "small": (70, 70), "large": (300_000,)}

_kv: Any = None


def begin(name: str) -> None:
    global _kv
    _kv = kvstore.create(name)
    _kv.set_optimizer("test")
    _kv.init([*KEYS, "stop"], [np.zeros(shape) for shape in [*KEYS.values(), (1,)]])


def stopped() -> bool:
    flag = np.zeros(1)
    _kv.pull("stop", out=flag)
    return bool(flag[0])


def push_until_stopped(seed: int) -> int:
    """Rounds of pushes that were made; each adds one to every element."""
    chance, rounds = random.Random(seed), 0
    ones = [np.ones(shape) for shape in KEYS.values()]
    outs = [np.zeros(shape) for shape in KEYS.values()]
    while not stopped():
        if chance.random() < 0.5:
            _kv.push(list(KEYS), ones)
        else:
            _kv.pushpull(list(KEYS), ones, out=outs)
            for out in outs:
                assert (out == out.flat[0]).all()
                assert out.flat[0] > rounds  # one's own are in it
        rounds += 1
    return rounds


def kill_servers(seed: int, count: int) -> list[int]:
    """Kill the server again and again, each time a random moment after it was there."""
    chance, pids = random.Random(seed), []
    for _ in range(count):
        pids.append(_kv.servers()[0].pid)
        time.sleep(chance.random() ** 2 * 0.03)
        os.kill(pids[-1], signal.SIGKILL)
    stop()
    return pids


def stop() -> None:
    _kv.push("stop", np.ones(1))
    stopped()


def values() -> list[float]:
    found = []
    for key, shape in KEYS.items():
        out = np.zeros(shape)
        _kv.pull(key, out=out)
        assert (out == out.flat[0]).all()
        found.append(float(out.flat[0]))
    return found


@pytest.mark.parametrize("count", [5, pytest.param(150, marks=pytest.mark.soak)])
def test_pushes_around_killed_servers_are_applied_once(count: int) -> None:
    with Ranks(3) as ranks:
        ranks.run(begin, "dist_async")
        pushing = ranks.start(push_until_stopped, ranks=[0, 1], per_rank=[(1,), (2,)])
        (pids,) = ranks.start(kill_servers, count, count, ranks=[2]).results(600)
        rounds = pushing.results(60)
        assert len(set(pids)) == count
        assert ranks.run(values) == [[sum(rounds)] * len(KEYS)] * 3


def rounds_until_someone_dies() -> int:
    """Rounds of a synchronous store that were completed, as far as this worker knows."""
    ones = [np.ones(shape) for shape in KEYS.values()]
    outs = [np.zeros(shape) for shape in KEYS.values()]
    rounds = 0
    while True:
        try:
            _kv.pushpull(list(KEYS), ones, out=outs)
        except AbortedError as error:
            assert error.cause.ranks == (2,)  # noqa: PT017  (other errors are not expected)
            return rounds
        rounds += 1


@pytest.mark.parametrize("count", [2, pytest.param(60, marks=pytest.mark.soak)])
def test_a_killed_worker_hurts_no_value(count: int) -> None:
    for seed in range(count):
        chance, asynchronous = random.Random(seed), seed % 2 == 0
        with Ranks(4, env={"HVDLAB_KV_UPDATE": "servers"}) as ranks:
            ranks.run(begin, "dist_async" if asynchronous else "dist_sync")
            if asynchronous:
                pushing = ranks.start(push_until_stopped, ranks=[0, 1, 2], per_rank=[(seed,)] * 3)
            else:
                pushing = ranks.start(rounds_until_someone_dies)
            threading.Event().wait(chance.random() * 0.1)  # a random instant: nothing is waited for
            ranks.kill(2)
            pushing.numbers.remove(2)
            if asynchronous:
                ranks.run(stop, ranks=[3])
            rounds = pushing.results(60)
            found = ranks.run(values, ranks=[0, 1, 3])
            assert found == [found[0]] * 3
            if asynchronous:  # the dead worker may have pushed some keys once more than the others
                assert max(found[0]) - min(found[0]) <= 1
                assert min(found[0]) >= sum(rounds)
            else:  # some keys of the last round may have been completed
                assert all(value / 4 - min(rounds) in (0, 1) for value in found[0])
