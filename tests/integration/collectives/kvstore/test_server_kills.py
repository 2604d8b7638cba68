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
from support.ranks.resident import Ranks

KEYS = {"one": (1,), "small": (70, 70), "large": (300_000,)}

_kv: Any = None
_killed: set[int] = set()
"""Servers that this rank has killed."""


def begin() -> None:
    global _kv
    _kv = kvstore.create("dist_async")
    _kv.set_optimizer("test")
    _kv.init([*KEYS, "stop"], [np.zeros(shape) for shape in [*KEYS.values(), (1,)]])


def stopped() -> bool:
    flag = np.zeros(1)
    _kv.pull("stop", out=flag)
    return bool(flag[0])


def push_until_stopped(seed: int) -> int:
    """Return rounds of pushes that were made; each adds one to every element."""
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
        ranks.run(begin)
        pushing = ranks.start(push_until_stopped, ranks=[0, 1], per_rank=[(1,), (2,)])
        (pids,) = ranks.start(kill_servers, count, count, ranks=[2]).results(600)
        rounds = pushing.results(60)
        assert len(set(pids)) == count
        assert ranks.run(values) == [[sum(rounds)] * len(KEYS)] * 3


@pytest.mark.parametrize("count", [1, pytest.param(30, marks=pytest.mark.soak)])
def test_a_killed_worker_hurts_no_value(count: int) -> None:
    for seed in range(count):
        chance = random.Random(seed)
        with Ranks(4) as ranks:
            ranks.run(begin)
            pushing = ranks.start(push_until_stopped, ranks=[0, 1, 2], per_rank=[(seed,)] * 3)
            threading.Event().wait(chance.random() * 0.1)  # a random instant: nothing is waited for
            ranks.kill(2)
            pushing.numbers.remove(2)
            ranks.run(stop, ranks=[3])
            rounds = pushing.results(60)
            found = ranks.run(values, ranks=[0, 1, 3])
            assert found == [found[0]] * 3
            # The dead worker may have pushed some keys once more than the others.
            assert max(found[0]) - min(found[0]) <= 1
            assert min(found[0]) >= sum(rounds)


# -- a campaign: servers and workers ------------------------------------------------------------------------------------

PARTS = {"one": (5, 1), "small": (5, 900), "large": (5, 20_000)}
"""Row r of each value counts what rank r has pushed. ``large`` is in parts on two servers."""


class Progress:
    """Operations that each worker has begun and those that it knows to be applied, in a file: it outlives the worker.

    Args:
        path: Of the file.
        size: Number of workers.
    """

    def __init__(self, path: str, size: int) -> None:
        self.begun, self.done, self.flags = np.memmap(path, np.int64, "r+", shape=(3, size))


def begin_rows() -> None:
    global _kv
    _kv = kvstore.create("dist_async")
    _kv.set_optimizer("test")
    _kv.init(list(PARTS), [np.zeros(shape) for shape in PARTS.values()])


def pull_rows() -> list[Any]:
    outs = [np.zeros(shape) for shape in PARTS.values()]
    _kv.pull(list(PARTS), out=outs)
    return outs


def own_row(rank: int) -> list[Any]:
    found = [np.zeros(shape) for shape in PARTS.values()]
    for each in found:
        each[rank] = 1
    return found


def server_killer(seed: int, count: int, flags: Any) -> threading.Thread:
    """Return a thread that kills ``count`` servers, each a random moment after this worker was connected to it."""
    chance = random.Random(seed)

    def kill() -> None:
        for _ in range(count):
            link = chance.choice(_kv._links)
            while (pid := link.pid) in _killed:
                time.sleep(0.001)  # there is no event for a server's return
            time.sleep(chance.random() ** 2 * 0.3)
            os.kill(pid, signal.SIGKILL)
            _killed.add(pid)
            flags[0] += 1

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def push_rows(rank: int, seed: int, path: str, kills: int) -> None:
    """Push to an asynchronous store until ``flags[1]`` is set; one's own pushes are in each value, each once."""
    chance, progress = random.Random(seed), Progress(path, 5)
    killer = server_killer(seed, kills, progress.flags) if kills else None
    ones, before = own_row(rank), pull_rows()
    while not progress.flags[1] or (killer is not None and killer.is_alive()):
        progress.begun[rank] += 1
        _kv.push(list(PARTS), ones)
        if chance.random() < 0.5:
            before = check_rows(rank, before, progress)
    check_rows(rank, before, progress)


def check_rows(rank: int, before: list[Any], progress: Progress) -> list[Any]:
    now = pull_rows()
    for key, old, new in zip(PARTS, before, now, strict=True):
        assert (new >= old).all(), key
        assert (new[rank] == progress.begun[rank]).all(), (key, rank, new[rank].min(), new[rank].max())
        assert (new <= np.asarray(progress.begun)[:, None]).all(), key
    progress.done[rank] = progress.begun[rank]
    return now


def kill_while_pushing(ranks: Ranks, seed: int, path: str, victims: list[int], kills: int) -> None:
    chance = random.Random(seed)
    pushing = ranks.start(push_rows, per_rank=[(rank, seed, path, kills * (rank == 0)) for rank in range(5)])
    for victim in victims:
        threading.Event().wait(chance.random() * 0.5)  # a random instant: nothing is waited for
        ranks.kill(victim)
        pushing.numbers.remove(victim)
    Progress(path, 5).flags[1] = 1
    pushing.results(120)


@pytest.mark.parametrize(
    ("episodes", "servers", "workers"),
    [
        (1, 3, 1),
        pytest.param(17, 12, 3, marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
    ],
)
def test_kills_of_servers_and_workers_lose_no_push_and_repeat_none(
    tmp_path: Any, episodes: int, servers: int, workers: int
) -> None:
    env = {"HVDLAB_KV_SERVERS": "2", "MXNET_KVSTORE_BIGARRAY_BOUND": "50000"}
    pushes = killed = 0
    for seed in range(episodes):
        chance = random.Random(seed)
        path = str(tmp_path / f"progress{seed}")
        np.zeros((3, 5), np.int64).tofile(path)
        victims = chance.sample(range(1, 5), workers)
        with Ranks(5, env=env) as ranks:
            ranks.run(begin_rows)
            kill_while_pushing(ranks, seed, path, victims, servers)
            survivors = [rank for rank in range(5) if rank not in victims]
            found = ranks.run(pull_rows, ranks=survivors)
        progress = Progress(path, 5)
        assert progress.flags[0] == servers
        killed += servers + workers
        begun, done = np.asarray(progress.begun)[:, None], np.asarray(progress.done)[:, None]
        pushes += int(begun.sum())
        for arrays in found:
            for value, same in zip(arrays, found[0], strict=True):
                assert np.array_equal(value, same)
                assert ((done <= value) & (value <= begun)).all()
                assert (value[survivors] == begun[survivors]).all()
        print(f"episode {seed}: {killed} kills, {pushes} pushes, none lost, none applied twice", flush=True)
