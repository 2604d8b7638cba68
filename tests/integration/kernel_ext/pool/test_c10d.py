"""``torch.distributed`` in a pool: groups that outlive cells, and steps that fail, each followed by a good one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hvdlab.kernel_ext.notebook.cells import cell_state
from hvdlab.kernel_ext.notebook.pool import Pool
from support.patience import PATIENCE
from support.pool_recorder import Recorder

StartPool = Callable[..., Pool]

SETUP = """
import torch, torch.distributed as dist
from torch import nn
import hvdlab.torch.c10d
dist.init_process_group("hvdlab")
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
FAILS_BEFORE = """
import torch.distributed as dist

import hvdlab.torch as hvd
hvd.init()
if hvd.rank() == 1:
    raise ValueError("no data")
dist.init_process_group("hvdlab")
"""
ABSENT = """
import torch.distributed as dist
import hvdlab.torch as hvd
hvd.init()
print("in", flush=True)
while hvd.rank() == 1: pass
dist.init_process_group("hvdlab")
"""
DEFAULT = """
import os
os.environ["HVDLAB_C10D"] = "1"
dist.destroy_process_group()
dist.init_process_group()
tensor = torch.ones(1)
dist.all_reduce(tensor)
assert dist.get_backend() == "hvdlab" and tensor.item() == size
dist.destroy_process_group()
del os.environ["HVDLAB_C10D"]
"""
MEMBERS = """
if rank == {}:
    pass
else:
    pair = dist.new_group([r for r in range(size) if r != {}], use_local_synchronization=True)
    t = torch.ones(1); dist.all_reduce(t, group=pair); assert t.item() == size - 1
"""


LOSES_A_RANK = """
import os, signal, time
import torch, torch.distributed as dist
import hvdlab.torch as hvd
hvd.init()
dist.init_process_group("hvdlab")
dist.all_reduce(torch.ones(1))
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while hvd.size() == 3:
    time.sleep(0.01)
raised = []
for _ in range(2):
    total = torch.ones(1)
    try:
        dist.all_reduce(total)
    except RuntimeError as error:
        raised.append(str(error))
        dist.destroy_process_group()
        dist.init_process_group("hvdlab")
pair = dist.new_group([0, 1])  # numbers of the default group, in which no one is missing
sent, message = torch.full((1,), float(hvd.rank())), torch.full((1,), 7.0 + hvd.rank())
dist.broadcast(sent, 1, group=pair)
dist.send(message, 0) if dist.get_rank() else dist.recv(message, 1)
parts = [torch.zeros(1), torch.zeros(1)]
dist.all_gather(parts, torch.full((1,), float(hvd.rank())), group=pair)
len(raised), total.item(), hvd.rank(), dist.get_rank(), sent.item(), message.item(), torch.cat(parts).tolist()
"""


def test_a_cell_makes_its_group_again_after_the_loss_of_a_rank(start_pool: StartPool) -> None:
    """Its own error stands for the loss, which the next collective does not raise again. The group has no gap in its numbers, though the world has one."""
    pool = start_pool(3)
    results = pool.run(LOSES_A_RANK)
    assert results.deaths.keys() == {1}
    assert results.errors == {}
    assert results[0] == (1, 2.0, 0, 0, 2.0, 9.0, [0.0, 2.0])
    assert results[2] == (1, 2.0, 2, 1, 2.0, 9.0, [0.0, 2.0])


BEGINS = "import os, signal\nimport torch, torch.distributed as dist\nimport hvdlab.torch as hvd\nhvd.init()"
BY_NUMBER = """
dist.init_process_group("hvdlab")
rank, size = dist.get_rank(), dist.get_world_size()

def one(value):
    return torch.full((1,), float(value))

gathered, exchanged, scattered, reduced = [one(0) for _ in range(size)], [one(0) for _ in range(size)], one(0), one(0)
dist.all_gather(gathered, one(rank))
dist.all_to_all(exchanged, [one(10 * rank + other) for other in range(size)])
dist.scatter(scattered, [one(other) for other in range(size)] if rank == 1 else None, src=1)
dist.reduce_scatter(reduced, [one(other) for other in range(size)])
rank == hvd.rank(), torch.cat(gathered).tolist(), torch.cat(exchanged).tolist(), scattered.item(), reduced.item()
"""


ASKS = """
import os, signal, time
import torch, torch.distributed as dist
import hvdlab.torch as hvd
from hvdlab.collectives.errors import AbortedError
hvd.init()
dist.init_process_group("hvdlab")
rank = hvd.rank()
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
while hvd.size() == 4:
    time.sleep(0.01)
raised, total = [], torch.ones(1)
while rank == 2 and not os.path.exists("made"):  # its control thread registers the pair
    time.sleep(0.01)
try:
    hvd.barrier()
except AbortedError as error:
    raised.append(error.rank)
if rank < 2:
    dist.all_reduce(total, group=dist.new_group([0, 1], use_local_synchronization=True))
    open("made", "w").close()
hvd.barrier()
raised, total.item()
"""


def test_a_rank_that_others_ask_for_a_group_still_raises_the_loss(
    start_pool: StartPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results = start_pool(4).run(ASKS)
    assert results.errors == {}
    assert [results[rank] for rank in range(3)] == [([3], 2.0), ([3], 2.0), ([3], 1.0)]


NEW_PAIR = """
import torch, torch.distributed as dist
import hvdlab.torch as hvd
hvd.init()
dist.init_process_group("hvdlab")
pair, total = dist.new_group([0, 2]), torch.ones(1)
if dist.get_rank() != 1:
    dist.all_reduce(total, group=pair)
hvd.shutdown()
total.item()
"""


def test_groups_outlive_a_shutdown(start_pool: StartPool) -> None:
    """In a pool the ranks stay in the world, so the default group goes on, and others are made in it."""
    pool = start_pool(3)
    for _ in range(3):
        results = pool.run(NEW_PAIR)
        assert results.errors == {}
        assert [results[rank] for rank in range(3)] == [2.0, 1.0, 2.0]


def test_a_group_counts_as_scripts_do_where_newcomers_come_last(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core has members in the order in which they came then, not by their numbers there."""
    monkeypatch.setenv("HVDLAB_RANK_NUMBERS", "consecutive")
    pool = start_pool(3)
    assert pool.run(BEGINS).errors == {}
    assert pool.run(
        "if hvd.rank() == 0: os.kill(os.getpid(), signal.SIGKILL)\nhvd.barrier()"
    ).deaths.keys() == {0}
    assert pool.repair() == (0,)
    assert pool.run(BEGINS).errors == {}
    results = pool.run(BY_NUMBER)
    assert results.errors == {}
    for number, rank in enumerate((1, 2, 0)):
        exchanged = [float(10 * other + number) for other in range(3)]
        assert results[rank] == (True, [0.0, 1.0, 2.0], exchanged, float(number), 3.0 * number)


def test_failed_steps_are_followed_by_good_ones_on_the_same_model(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("HVDLAB_PRELOAD", "torch._dynamo,hvdlab.torch.c10d")
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "1")
    # Otherwise the pool would interrupt a rank that comes late to the call in which the others have failed.
    monkeypatch.setattr(cell_state, "GRACE", PATIENCE)
    pool = start_pool(3)
    errors = pool.run(FAILS_BEFORE).errors
    assert errors[1].ename == "ValueError"
    for rank in (0, 2):
        assert errors[rank].ename == "AbortedError"
        assert "init_process_group" in errors[rank].evalue
        assert "rank 1 failed: ValueError: no data" in errors[rank].evalue
    waiting = Recorder()
    run = pool.start_run(ABSENT, out=waiting)  # rank 1 never comes
    waiting.wait_for("in", range(3), PATIENCE)
    run.interrupt()
    assert set(run.wait(PATIENCE).errors) == {0, 1, 2}
    assert pool.run(SETUP).errors == {}
    again = Recorder()
    assert pool.run("dist.init_process_group('hvdlab')", out=again).errors == {}
    assert "the default process group of 3 ranks is there already" in again.text[0]
    assert list(again.text) == [0]
    assert list(pool.run(GOOD)) == [True] * 3  # the group outlives its cell
    for wrong, kind, told in (
        ("if rank: dist.all_reduce(torch.ones(2))", "AbortedError", "rank 0 finished its cell without it"),
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
    ):
        results = pool.run(wrong)
        errors = results.errors
        assert {1, 2} <= errors.keys(), errors
        # A late rank can have been notified of the other, which had been stopped.
        assert any(told in errors[rank].evalue for rank in (1, 2)), errors
        for rank in (1, 2):
            assert " of group default_pg" in errors[rank].evalue
            assert kind == errors[rank].ename
            # Also where the error has come through DDP's C++, it is ours, and known whose fault it is.
            assert errors[rank].evalue.startswith(("all_reduce #", "`all_reduce #")), errors[rank].evalue
            assert "\nAt:\n" not in errors[rank].evalue
            assert not any("running the callback" in line for line in errors[rank].traceback)
            assert errors[rank].mismatch or (errors[rank].aborted and results.origin(rank) == {0})
        assert list(pool.run(GOOD)) == [True] * 3, wrong
    for wrong, ranks, told in (
        ("if rank == 0: dist.recv(torch.ones(1))", {0}, "ranks 1,2 finished their cells without it"),
        (
            "if rank == 0: dist.recv(torch.ones(1))\nelif rank: raise ValueError('no message')",
            {0, 1, 2},
            "failed: ValueError: no message",
        ),
        ("dist.recv(torch.ones(1))", {0, 1, 2}, "all wait for each other: ranks 0-2 in recv from any rank"),
        (
            "dist.barrier() if rank else dist.recv(torch.ones(1))",
            {0, 1, 2},
            "rank 0 in recv from any rank `c10d.",
        ),
    ):
        errors = pool.run(wrong).errors
        assert errors.keys() == ranks, errors
        # Where other ranks fail at once, rank 0 may be stopped before it receives.
        early = "failed" in told and errors[0].ename == "KeyboardInterrupt"
        assert early or told in errors[0].evalue
    assert list(pool.run(GOOD)) == [True] * 3
    for absent in (2, 0):  # a rank that is no member need not call anything
        assert pool.run(MEMBERS.format(absent, absent)).errors == {}
    started = Recorder()
    # All but rank 0 wait in C++, without the interpreter's lock.
    run = pool.start_run("print('in', flush=True)\nwhile rank == 0: pass\nstep()", out=started)
    started.wait_for_wait("ranks 1,2 have waited", PATIENCE)
    run.interrupt()
    errors = run.wait(PATIENCE).errors
    assert set(errors) == {0, 1, 2}
    assert not any("running the callback" in line for error in errors.values() for line in error.traceback)
    assert list(pool.run(GOOD)) == [True] * 3
    default = Recorder()
    assert pool.run(DEFAULT, out=default).errors == {}
    assert "this group is hvdlab's in place of Gloo's" in default.text[0]
    assert pool.run(SETUP).errors == {}
    assert set(pool.run("if rank == 1: import os; os.kill(os.getpid(), 9)\ndist.barrier()").errors) >= {0, 2}
    pool.repair()
    lost = pool.run("dist.barrier()", ranks=[0, 2]).errors
    assert all("has lost ranks since it was made" in lost[rank].evalue for rank in (0, 2))
    anew = Recorder()
    assert pool.run(SETUP, out=anew).errors == {}
    assert "of 3 ranks has other ranks now, and is made anew with 3" in anew.text[0]
    assert list(pool.run(GOOD)) == [True] * 3
    # Sets of a rank that was replaced are made again.
    message = "dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1)) if rank == 1 else None"
    assert pool.run(message).errors == {}
    recorded = set(pool.trace()["name"])
    assert {
        f"default_pg.{each}" for each in ("all_reduce", "all_gather", "broadcast", "send", "recv")
    } <= recorded
    assert not any(name.startswith("c10d.") for name in recorded)


BUCKETS = """
from hvdlab.collectives import context
from hvdlab.torch.c10d.submission import Calls
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(
    nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), bucket_cap_mb=1e-4
)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
plain, engine = Calls.begin, context.engine()

def stop_at(bucket):
    "Be in the middle of the backward pass, where DDP calls for this bucket, until the interrupt comes."
    count = 0
    def begin(self, *args, **kwargs):
        nonlocal count
        count += 1
        if count == bucket:
            print("there", flush=True)
            while not engine.interrupt_is_held(): pass
        plain(self, *args, **kwargs)
    Calls.begin = begin
    try:
        step()
    finally:
        Calls.begin = plain

def stop_in_a_future():
    "The same in the search for tensors that a future of C++ begins; the ranks may end this backward pass, so none makes a step."
    extractor = torch._jit_internal._TensorExtractor
    def stop(*args, **kwargs):
        torch._jit_internal._TensorExtractor = extractor
        print("there", flush=True)
        while not engine.interrupt_is_held(): pass
        return extractor(*args, **kwargs)
    torch._jit_internal._TensorExtractor = stop
    try:
        model(torch.full((2, 8), float(rank))).square().mean().backward()
    finally:
        torch._jit_internal._TensorExtractor = extractor
"""


def interrupted(pool: Pool, first: str, second: str) -> None:
    """Interrupt a cell when rank 0 has written "there" in its first statement, and rank 1 in its second one."""
    said = Recorder()
    run = pool.start_run(f"if rank == 0:\n    {first}\nelse:\n    {second}", out=said)
    said.wait_for("there", range(2), PATIENCE)
    run.interrupt()
    names = {rank: error.ename for rank, error in run.wait(PATIENCE).errors.items()}
    assert names == dict.fromkeys((0, 1), "KeyboardInterrupt"), (first, second)


def test_an_interrupt_within_ddps_backward_leaves_the_model_as_it_was(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("HVDLAB_PRELOAD", "hvdlab.torch.c10d")
    pool = start_pool(2)
    assert pool.run(SETUP + BUCKETS).errors == {}
    assert list(pool.run(GOOD)) == [True] * 2
    assert list(pool.run(GOOD)) == [True] * 2  # with the buckets that DDP has reordered
    # A statement may end before the interrupt that was held within it is requested again.
    slowly = (
        "from hvdlab.kernel_ext.rank import interrupts\ninterrupts.FIRST_RETRY = interrupts.LAST_RETRY = "
    )
    assert pool.run(f"{slowly}{PATIENCE}").errors == {}
    interrupted(pool, "stop_in_a_future()", "stop_in_a_future()")
    assert pool.run(f"{slowly}0.005").errors == {}
    assert list(pool.run(GOOD)) == [True] * 2
    cases = (
        ("stop_at(1)", "stop_at(1)"),
        ("stop_at(1)", "stop_at(2)"),
        ("stop_at(2)", "print('there', flush=True)\n    while True: pass"),
        ("stop_in_a_future()", "stop_in_a_future()"),
    )
    for first, second in cases:
        interrupted(pool, first, second)
        assert list(pool.run(GOOD)) == [True] * 2, (first, second)
