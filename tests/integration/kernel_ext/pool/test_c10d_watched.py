"""Watched groups in a pool: faults of one rank, each followed by a good step of the same model on the same group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hvdlab.kernel_ext.notebook.cells import cell_state
from hvdlab.kernel_ext.notebook.pool import Pool
from support.patience import HOUR, PATIENCE
from support.pool_recorder import Recorder

StartPool = Callable[..., Pool]

SETUP = """
import os, torch, torch.distributed as dist
from torch import nn
from hvdlab.torch.c10d import WatchOptions
dist.init_process_group("hvdlab", pg_options=WatchOptions("watched", "gloo", 0.3))
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)

def step():
    optimizer.zero_grad()
    model(torch.full((2, 8), float(rank))).square().mean().backward()
    optimizer.step()
"""
GOOD = """
step()
sums = [parameter.detach().sum() for parameter in model.parameters()]
found = [[torch.zeros(()) for _ in range(size)] for _ in sums]
for each, mine in zip(found, sums):
    dist.all_gather(each, mine)
all(torch.equal(each[0], other) for each in found for other in each)
"""
FAULTS = (
    ("if rank: dist.all_reduce(torch.ones(2))", "AbortedError", "rank 0 finished its cell without it"),
    ("if rank: step()", "AbortedError", "rank 0 finished its cell without it"),
    (
        "if rank: step()\nelse: raise ValueError('bad batch')",
        "AbortedError",
        "rank 0 failed: ValueError: bad batch",
    ),
    (
        "if rank: dist.all_reduce(torch.ones(2))\nelse: dist.broadcast(torch.ones(2), 0)",
        "MismatchError",
        "the ranks disagree",
    ),
)
WAITS = ("dist.all_reduce(torch.ones(2))", "step()")
"""Waits in Python, and in DDP's C++."""


@pytest.fixture(params=[2, 4])
def pool(
    request: pytest.FixtureRequest, start_pool: StartPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Pool:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("HVDLAB_PRELOAD", "torch._dynamo,hvdlab.torch.c10d")
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "1")
    # Otherwise the pool would interrupt a rank that comes late to the call in which the others have failed.
    monkeypatch.setattr(cell_state, "GRACE", PATIENCE)
    started = start_pool(request.param, timeout=2 * PATIENCE)
    assert started.run(SETUP).errors == {}
    return started


def good(pool: Pool, what: str) -> None:
    assert list(pool.run(GOOD)) == [True] * pool.size, what


def test_a_fault_of_one_rank_is_followed_by_a_good_step_on_the_same_model(pool: Pool) -> None:
    good(pool, "first")
    others = range(1, pool.size)
    for wrong, kind, told in FAULTS:
        errors = pool.run(wrong).errors
        assert set(others) <= errors.keys(), (wrong, errors)
        assert any(told in errors[rank].evalue for rank in others), errors
        for rank in others:
            # A rank that calls after the others have disagreed gets an AbortedError with the text of their error.
            late = errors[rank].ename == "AbortedError" and f" failed: {kind}: " in errors[rank].evalue
            assert late or errors[rank].ename == kind, (wrong, errors)
            assert errors[rank].evalue.startswith(("all_reduce #", "`all_reduce #")), errors[rank].evalue
            assert " of group default_pg" in errors[rank].evalue
            assert not any("running the callback" in line for line in errors[rank].traceback)
        good(pool, wrong)


LAUNCHES_BEFORE = (
    "if rank: dist.all_reduce(torch.ones(2), group=patient)\nelse: raise ValueError('bad batch')"
)
LAUNCHES_AFTER = """
import time, threading
from hvdlab.collectives import context
def say_when_it_has_ended():
    while context.engine().runs_cell: time.sleep(0.01)
    open('ended', 'w').close()
if rank == 0:
    threading.Thread(target=say_when_it_has_ended).start()
    raise ValueError('bad batch')
while not os.path.exists('ended'): time.sleep(0.01)
dist.all_reduce(torch.ones(2), group=patient)
"""


def test_a_cell_that_fails_on_one_rank_ends_the_waits_of_the_others_before_they_are_late(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cell_state, "GRACE", HOUR)  # otherwise the pool would interrupt them
    pool.run(f"os.chdir({str(tmp_path)!r})")
    made = pool.run(f"patient = dist.new_group(pg_options=WatchOptions('watched', 'gloo', {HOUR}))")
    assert made.errors == {}
    others = range(1, pool.size)
    for cell in (LAUNCHES_BEFORE, LAUNCHES_AFTER):
        errors = pool.run(cell, timeout=PATIENCE).errors
        assert errors[0].ename == "ValueError", cell
        assert {rank: errors[rank].ename for rank in others} == dict.fromkeys(others, "AbortedError"), cell
        assert any("rank 0 failed: ValueError: bad batch" in errors[rank].evalue for rank in others), errors
        assert pool.run("dist.all_reduce(torch.ones(2), group=patient)", timeout=PATIENCE).errors == {}, cell


def test_an_interrupt_ends_a_wait(pool: Pool) -> None:
    good(pool, "first")  # the ranks' models are alike before that: DDP orders its buckets in the first step
    for wait in WAITS:
        said = Recorder()
        run = pool.start_run(f"print('in', flush=True)\nwhile rank == 0: pass\n{wait}", out=said)
        said.wait_for_note("waited", PATIENCE)
        run.interrupt()
        errors = run.wait(PATIENCE).errors
        assert errors.keys() == set(range(pool.size)), wait
        assert errors[0].ename == "KeyboardInterrupt", wait
        good(pool, wait)


def test_a_rank_that_dies_is_named_and_the_group_is_made_anew_with_its_replacement(pool: Pool) -> None:
    for end in ("os.kill(os.getpid(), 9)", "os._exit(3)"):
        errors = pool.run(f"if rank == 1: {end}\nstep()").errors
        for rank in {*range(pool.size)} - {1}:
            assert errors[rank].ename == "AbortedError", (end, errors)
            assert "rank 1 died: " in errors[rank].evalue, end
        pool.repair()
        lost = pool.run("dist.barrier()", ranks=[0]).errors
        assert "has lost ranks since it was made" in lost[0].evalue, end
        assert {rank: error.evalue for rank, error in pool.run(SETUP).errors.items()} == {}, end
        good(pool, end)


def test_a_resized_pool_makes_the_group_anew(pool: Pool) -> None:
    size = pool.size
    for other in (size + 1, size):
        pool.resize(other)
        anew = Recorder()
        assert pool.run(SETUP, out=anew).errors == {}
        assert f"has other ranks now, and is made anew with {other}" in anew.text[0]
        good(pool, f"{other} ranks")


ENDED = """
tensor = torch.ones(2)
if rank == 1:
    work = dist.all_reduce(tensor, async_op=True)  # and the cell ends
else:
    while rank == 2 and not dist.group.WORLD._generation.wanted: pass
    dist.all_reduce(tensor)
"""


def test_a_rank_whose_cell_ended_behind_its_launch_is_not_missing(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("HVDLAB_PRELOAD", "torch._dynamo,hvdlab.torch.c10d")
    pool = start_pool(3, timeout=2 * PATIENCE)
    assert pool.run(SETUP).errors == {}
    assert {rank: error.evalue for rank, error in pool.run(ENDED).errors.items()} == {}
    assert list(pool.run("work.wait() if rank == 1 else None\ntensor[0].item()")) == [3.0] * 3
    good(pool, "ended")
