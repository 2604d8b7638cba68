"""Elastic training in a pool: a rank that was lost is repaired while a cell trains, and takes part again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdlab.kernel_ext.notebook.cells.sink import NullSink
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.kernel_ext.wire.cells import Chunk, Stream

StartPool = Callable[..., Pool]

CELL = """
import time, torch
import hvdlab.torch as hvd

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
state = hvd.elastic.TorchState(
    model=model, optimizer=optimizer, sampler=hvd.elastic.ElasticSampler(range(24)), epoch=0, steps_with={}
)

@hvd.elastic.run
def train(state):
    # Goes on until three ranks have been together, were two, and were three for a while again.
    while state.epoch < 3 or sum(state.steps_with.get("3 again", [])) < 12:
        iter(state.sampler)
        for batch in range(len(state.sampler) // 2):
            optimizer.zero_grad()
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            state.sampler.record_batch(batch, 2)
            ranks = len(hvd.allgather_object(hvd.rank(), name="ranks"))
            key = "3 again" if ranks == 3 and "2" in state.steps_with else str(ranks)
            state.steps_with.setdefault(key, []).append(1)
            state.commit()
            if state.steps_with == {"3": [1] * 4}:
                print("ready", flush=True)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
    return hvd.size()

(train(state), state.epoch, state.steps_with.keys(), [p.tolist() for p in model.parameters()])
"""


class Watching(NullSink):
    """Sink that calls back once a rank has written something."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        callback, said = self._callback, [chunk.text for chunk in chunks if isinstance(chunk, Stream)]
        if callback is not None and any("ready" in text for text in said):
            self._callback = None
            callback()


@pytest.fixture(autouse=True)
def with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks need it, and the first optimizer's imports: once is enough."""
    monkeypatch.setenv("HVDLAB_PRELOAD", "torch,torch._dynamo")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lost", [0, 2])
def test_a_repaired_rank_joins_the_training_of_the_others(
    start_pool: StartPool, lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    pool = start_pool(3)
    pids = {status.rank: status.pid for status in pool.status()}
    running = pool.start_run(CELL, out=Watching(lambda: os.kill(pids[lost], signal.SIGKILL)))
    pool.client.wait_for(lambda membership: lost not in membership.ranks, timeout=120)
    assert pool.repair() == (lost,)
    back = pool.run(CELL, ranks=[lost], timeout=120)
    results = running.wait()
    assert back.errors == {}
    survivors = [rank for rank in range(3) if rank != lost]
    assert {rank: results.errors.get(rank) for rank in survivors} == dict.fromkeys(survivors)
    pulled = pool.pull(
        "(hvd.size(), state.epoch, sorted(state.steps_with), [p.tolist() for p in model.parameters()])"
    )
    assert pulled[0][0] == 3
    assert pulled[0][2] == ["2", "3", "3 again"]
    assert [pulled[rank] for rank in range(3)] == [pulled[0]] * 3
    assert {s.pid for s in pool.status() if s.rank in survivors} == {pids[rank] for rank in survivors}


ENDLESS = """
import torch
import hvdlab.torch as hvd

hvd.init()
state = hvd.elastic.TorchState(step=0)

@hvd.elastic.run
def train(state):
    while True:
        state.step += 1
        if state.step == 20:
            print("ready", flush=True)
        if state.step == 30 and hvd.rank() == FAILS:
            raise ZeroDivisionError("of the user")
        hvd.allreduce(torch.ones(2), name="x")
        if state.step % 10 == 0:
            state.commit()

train(state)
"""
AFTERWARDS = "[hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), hvd.size()]"


@pytest.mark.timeout(240)
def test_interrupts_and_errors_end_elastic_training_and_the_pool_goes_on(
    start_pool: StartPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    pool = start_pool(2)
    for interrupted in (None, [1]):
        pool.push(FAILS=-1)
        watching = Watching(lambda interrupted=interrupted: pool.interrupt(interrupted))  # type: ignore[misc]
        results = pool.start_run(ENDLESS, out=watching).wait()
        assert results.errors[1].ename == "KeyboardInterrupt"
        assert results.errors[0].ename in ("KeyboardInterrupt", "AbortedError")
        assert list(pool.run(AFTERWARDS)) == [[2.0, 2]] * 2
    pool.push(FAILS=1)
    results = pool.run(ENDLESS, timeout=60)
    assert {rank: error.ename for rank, error in results.errors.items()} == {
        0: "AbortedError",
        1: "ZeroDivisionError",
    }
    assert list(pool.run(AFTERWARDS)) == [[2.0, 2]] * 2
