"""Elastic cells: ranks are lost, replaced, added and let go while the cell runs, and take part by themselves."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.kernel_ext.notebook.cells.driver import CellHandle
from hvdlab.kernel_ext.notebook.cells.sink import NullSink
from hvdlab.kernel_ext.notebook.elastic import Bounds
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.kernel_ext.notebook.variables import transfer
from hvdlab.kernel_ext.wire.cells import CellDone, Chunk, Stream
from hvdlab.widgets.recording_feed import rank_rows
from support.patience import PATIENCE
from support.pool_probe import PoolProbe

StartPool = Callable[..., Pool]

SET_UP = """
import collections, torch
import hvdlab.torch as hvd

hvd.init()
def doubled(x):
    return 2 * x

class Counts(collections.Counter):
    pass

model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, sizes=Counts(), stop=0)

@hvd.elastic.run
def train(state):
    said = 0
    ends = hvd.add_process_set([0, 2]) if hvd.size() == 3 else None  # on newcomers, too
    while not state.stop:
        optimizer.zero_grad()
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        hvd.metric("done", state.step, step=state.step)
        state.sizes[hvd.size()] += doubled(1)
        if ends is not None and ends.included():
            assert hvd.allreduce(torch.ones(1), name="ends", op=hvd.Sum, process_set=ends).item() == 2
        state.stop = int(hvd.allreduce(torch.tensor(float(STOP[0])), name="stop", op=hvd.Sum) > 0)
        if said != hvd.size():
            said = hvd.size()
            print("size", said, flush=True)
        state.commit()
    return hvd.size()

STOP = [0]
"""
CELL = """
import signal
signal.signal(signal.SIGUSR1, lambda *_: STOP.__setitem__(0, 1))
size = train(state)
(size, dict(state.sizes), state.step, [p.tolist() for p in model.parameters()])
"""


class Said(NullSink):
    """Ranks' output and messages about the cell; lets a test wait for it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.written: list[tuple[int, str]] = []
        self.notes: list[str] = []
        self.ended: set[int] = set()

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        with self.changed:
            self.written += [(rank, c.text.strip()) for c in chunks if isinstance(c, Stream)]
            self.changed.notify_all()

    def done(self, rank: int, done: CellDone | None) -> None:
        with self.changed:
            self.ended.add(rank)
            self.changed.notify_all()

    def note(self, text: str, *, warning: bool = False) -> None:
        with self.changed:
            self.notes.append(text)
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE), (self.written, self.notes)

    def sizes(self, rank: int) -> list[int]:
        return [int(word) for r, text in self.written if r == rank for word in text.split() if word.isdigit()]


@pytest.fixture(autouse=True)
def with_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HVDLAB_PRELOAD", "torch,torch._dynamo")


def pids(pool: Pool) -> dict[int, int]:
    return {status.rank: status.pid for status in pool.status()}


def start(pool: Pool, said: Said, bounds: Bounds, more: str = "") -> CellHandle:
    assert pool.run(SET_UP + more).ok
    return pool.start_run(CELL, label="[3]", out=said, elastic=bounds)


@pytest.mark.timeout(240)
def test_ranks_come_and_go_while_an_elastic_cell_runs(start_pool: StartPool) -> None:
    pool, said = start_pool(2), Said()
    before, recording = pids(pool), pool.client.recording
    running = start(pool, said, Bounds(2, 3))
    said.wait(lambda: said.sizes(0)[-1:] == [2])

    # It grows: the newcomer has the others' state, and joins at their next commit.
    pool.resize(3)
    said.wait(lambda: said.sizes(2)[-1:] == [3] and said.sizes(0)[-1:] == [3])
    assert pool.newcomers == ()

    # A rank is lost and replaced, the first one: the state is that of the others.
    os.kill(before[0], signal.SIGKILL)
    said.wait(lambda: said.sizes(1)[-1:] == [2] and 0 in pool.lost)
    assert pool.repair() == (0,)
    said.wait(lambda: said.sizes(0)[-1:] == [3] and said.sizes(1)[-1:] == [3])

    # An impossible request is refused by a sentence, and nothing has changed.
    for size, why in (
        (4, "4 ranks are more than --max-np 3 of cell"),
        (1, "1 rank is fewer than --min-np 2 of"),
    ):
        with pytest.raises(InvalidRequestError, match=why):
            pool.resize(size)

    # It shrinks: the rank leaves at its commit. No rank goes back, so no step is done twice.
    pool.resize(2)
    said.wait(lambda: said.sizes(1)[-1:] == [2])
    assert pool.ranks == (0, 1)

    # Too few: the other one waits, and reports so, until there are enough.
    os.kill(pids(pool)[0], signal.SIGKILL)
    said.wait(lambda: any("1 of at least 2 ranks is left" in note for note in said.notes))
    pool.repair()
    said.wait(lambda: said.sizes(0)[-1:] == [2])
    os.kill(pids(pool)[1], signal.SIGUSR1)
    results = running.wait(PATIENCE)
    assert results.ok, (results.root_cause, said.notes)
    assert results.ranks == (0, 1)
    assert results[0] == results[1]
    size, sizes, step, _ = results[0]
    assert (size, set(sizes), sum(sizes.values())) == (2, {2, 3}, 2 * step)
    assert pids(pool)[1] == before[1]
    # A series goes on over all changes: each step is in that of the rank that was always there, and that of each process is of its steps.
    pool.client.gathered(PATIENCE)
    done = np.unique(recording.points(1, "done")["value"])
    assert done[-1] == step
    assert (np.diff(done) == 1).all()
    for rank in (0, 1, 2):
        points = recording.points(rank, "done")
        assert (points["value"] == points["step"]).all()
        assert (np.diff(points["time"]) >= 0).all()
    assert recording.points(2, "done")["step"].max() < step
    told = "\n".join(said.notes)
    for expected in (
        "rank 2 joins at the others' next commit",
        "rank 0 died: killed by SIGKILL",
        "rank 0 joins at the others' next commit",
        "rank 2 leaves at the next commit",
        "rank 2 has left; nothing is lost by that",
    ):
        assert expected in told
    assert list(pool.run("hvd.allreduce(torch.ones(1), op=hvd.Sum).item()")) == [2.0, 2.0]


DEADLY = """
class Deadly:
    def __reduce__(self):
        if (hvd.rank(), hvd.size()) == (0, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        return int, (7,)

import os, signal
deadly = Deadly()
"""

CHOOSY = """
class Choosy:
    def __reduce__(self):
        return choosy_again, ()

def choosy_again():
    import os
    if os.environ["HVDLAB_RANK"] == "1":
        raise OSError("not here")
    return 7

choosy = Choosy()
"""

NO_COMMIT = """
import os, time

@hvd.elastic.run
def never(state, last):
    # It stays in training, so that no other rank is let in, until the test wants it to end.
    print("trains", flush=True)
    try:
        while True:
            time.sleep(0.01)
    finally:
        while not os.path.exists(last):
            time.sleep(0.01)

made = 5
"""


IN_A_STEP = """
import os
import hvdlab.torch as hvd

hvd.init()
state = hvd.elastic.TorchState(step=0)
sizes = []

@hvd.elastic.run
def train(state, gates):
    sizes.append(hvd.size())
    state.step += 1
    if len(sizes) == 1:
        gate = os.open(gates[hvd.rank()], os.O_RDONLY)
        print("in a step", flush=True)
        os.read(gate, 1)
        os.close(gate)
    state.commit()
    return state.step, sizes
"""


@pytest.mark.timeout(240)
def test_a_rank_that_is_let_go_finishes_its_step_although_the_coordinator_dies(
    start_pool: StartPool, tmp_path: Path
) -> None:
    """The others would go back to their last commit if it left in the middle of a step."""
    pool, said = start_pool(3), Said()
    gates = [str(tmp_path / f"gate{rank}") for rank in range(3)]
    for gate in gates:
        os.mkfifo(gate)
    writers = [os.open(gate, os.O_RDWR) for gate in gates]  # no thread waits for the other end then
    assert pool.run(IN_A_STEP).ok
    running = pool.start_run(f"train(state, {gates!r})", label="[3]", out=said, elastic=Bounds())
    said.wait(lambda: {rank for rank, _ in said.written} == {0, 1, 2})
    with pytest.raises(
        StartError, match=r"rank 2 did not come to a commit within 0\.1 s; they leave when they do"
    ):
        pool.resize(2, timeout=0.1)
    assert pool.ranks == (0, 1)
    here = "ready"
    assert pool.elastic().members == {0: here, 1: here, 2: "leaves at the next commit"}
    status = pool.status()[2]  # a busy machine may not answer in time
    assert (status.rank, status.state) in [(2, "running, leaves at the next commit"), (2, "no answer")]

    back = threading.Event()
    pool.client.on_reconnected(lambda membership: back.set())
    os.kill(PoolProbe(pool).coordinator.pid, signal.SIGKILL)
    assert back.wait(PATIENCE)
    assert PoolProbe(pool).recovery.await_recovered(PATIENCE)
    pool.client.flush(PATIENCE)
    now = pool.client.membership()
    assert (now.expected, now.leaving, now.ranks, said.ended) == ((0, 1, 2), (2,), (0, 1, 2), set())

    for writer in writers:
        os.write(writer, b".")
        os.close(writer)
    pool.resize(2, timeout=PATIENCE)  # waits for the rank that the first one has let go
    results = running.wait(PATIENCE)
    assert results.ok, (results.root_cause, said.notes)
    assert list(results) == [(2, [3, 2])] * 2, "no step was lost"
    assert (pool.ranks, pool.lost, pool.client.membership().expected) == ((0, 1), {}, (0, 1))
    assert "rank 2 has left; nothing is lost by that" in "\n".join(said.notes)


ASKING = """
import torch
import hvdlab.torch as hvd

hvd.init()
state = hvd.elastic.TorchState(step=0)
sizes, said = [], []

@hvd.elastic.run
def train(state):
    sizes.append(hvd.size())
    asking = {(2, 0): 1, (3, 1): 2, (2, 2): 0}.get((hvd.size(), state.step))
    if asking == hvd.rank() == 2:
        breakpoint()
    elif asking == hvd.rank():
        said.append(input("go on? "))
    hvd.allreduce(torch.ones(1), name="together")  # where the others wait meanwhile
    state.step += 1
    state.commit()
    return state.step, sizes, said
"""


class Users:
    """Does one thing after another when asked; each returns the answer."""

    shows_beside = False

    def __init__(self, *acts: Callable[[], str]) -> None:
        self._acts = iter(acts)
        self.prompts: list[str] = []

    def ask(self, prompt: str, *, hidden: bool) -> str:
        self.prompts.append(prompt)
        return next(self._acts)()


@pytest.mark.timeout(240)
def test_ranks_come_and_go_while_one_is_at_a_prompt(start_pool: StartPool) -> None:
    pool = start_pool(2)
    recording = pool.client.recording
    paused: queue.SimpleQueue[dict[int, str]] = queue.SimpleQueue()

    def row(rank: int) -> tuple[str, str]:
        """Return its row in the table of ranks, once it is known to be at its prompt."""
        while rank not in paused.get(timeout=PATIENCE):
            pass
        pool.client.flush(PATIENCE)  # the recording has all news by then
        shown = rank_rows(recording)[rank]
        return shown["paused"], shown["reason"]

    def grow() -> str:
        pool.resize(3, timeout=PATIENCE)
        pool.client.wait_for(lambda now: now.waiting == (2,), PATIENCE)
        assert row(1) == ("at a prompt", "")
        assert pool.elastic().members[2] == "waits to be let in"
        return "one"

    def shrink() -> str:
        with pytest.raises(StartError, match="rank 2 did not come to a commit"):
            pool.resize(2, timeout=0.1)
        pool.client.wait_for(lambda now: now.leaving == (2,), PATIENCE)
        assert row(2) == ("at a prompt", "leaves at the next commit")
        return "continue"

    def lose() -> str:
        os.kill(pids(pool)[0], signal.SIGKILL)
        threading.Event().wait()  # until the question is withdrawn
        raise AssertionError

    pool.client.on_paused(lambda now: paused.put(dict(now)))
    user = Users(grow, shrink, lose)
    assert pool.run(ASKING).ok
    results = pool.run("train(state)", label="[3]", prompter=user, elastic=Bounds())
    assert results.ok, results.root_cause
    assert results.ranks == (1,)
    assert results[1] == (3, [2, 3, 2, 1], ["one"])
    assert [prompt.split("]")[0] for prompt in user.prompts] == ["[rank 1", "[rank 2", "[rank 0"]


@pytest.mark.timeout(240)
def test_another_rank_gives_when_one_dies_of_giving(start_pool: StartPool) -> None:
    pool, said = start_pool(2), Said()
    running = start(pool, said, Bounds(), DEADLY)
    said.wait(lambda: said.sizes(1)[-1:] == [2])
    pool.resize(3)
    said.wait(lambda: said.sizes(2)[-1:] == [2] and said.sizes(1)[-1:] == [2])
    assert (list(pool.lost), pool.newcomers) == ([0], ())
    os.kill(pids(pool)[1], signal.SIGUSR1)
    results = running.wait(PATIENCE)
    assert results[1] == results[2], (results.root_cause, said.notes)
    assert pool.pull("deadly", [2]) == {2: 7}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lost", [1, 2], ids=["once", "each time"])
def test_what_did_not_reach_a_newcomer_is_brought_once_more(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """As where the coordinator dies that was to pass the parts on: the newcomer has none of them when it is to take them."""
    pool, said = start_pool(2), Said()
    running = start(pool, said, Bounds(1, 3))
    said.wait(lambda: said.sizes(0)[-1:] == [2])
    bring, tries = transfer._bring, []

    def loses(questions: Any, transfer_id: int, *rest: Any) -> dict[int, str]:
        tries.append(transfer_id)
        return bring(questions, transfer_id + (len(tries) <= lost), *rest)

    monkeypatch.setattr(transfer, "_bring", loses)
    pool.resize(3)
    if lost == 1:
        said.wait(lambda: said.sizes(2) == [3])
    else:
        said.wait(lambda: any("rank 2 can't take part: it did not arrive" in note for note in said.notes))
    assert len(tries) == 2
    os.kill(pids(pool)[0], signal.SIGUSR1)
    results = running.wait(PATIENCE)
    assert results[0] == results[1], (results.root_cause, said.notes)


def test_a_newcomer_that_refuses_keeps_no_other_from_joining(start_pool: StartPool) -> None:
    pool, said = start_pool(1), Said()
    running = start(pool, said, Bounds(), CHOOSY)
    said.wait(lambda: said.sizes(0)[-1:] == [1])
    pool.resize(3)
    said.wait(lambda: said.sizes(2)[-1:] == [2] and said.sizes(0)[-1:] == [2])
    assert pool.newcomers == (1,)
    refused = "rank 1 can't take part: OSError: not here; `%hvd_pool restart 1` tries again"
    said.wait(lambda: refused in said.notes)
    os.kill(pids(pool)[0], signal.SIGUSR1)
    results = running.wait(PATIENCE)
    assert results[0] == results[2], (results.root_cause, said.notes)


@pytest.mark.timeout(240)
def test_a_rank_whose_cell_ended_before_it_entered_is_a_newcomer(
    start_pool: StartPool, tmp_path: Path
) -> None:
    """It has none of the state sent to it, and is marked as a newcomer until it has."""
    pool, said = start_pool(1), Said()
    assert pool.run(SET_UP + NO_COMMIT).ok
    last = tmp_path / "last"
    running = pool.start_run(f"never(state, {str(last)!r})", label="[3]", out=said, elastic=Bounds())
    said.wait(lambda: bool(said.written))
    pool.resize(2)
    # It was brought all, and waits to be let in: there is nothing to do for its user.
    said.wait(lambda: "rank 1 joins at the others' next commit" in said.notes)
    assert pool.newcomers == ()
    running.interrupt()
    said.wait(lambda: 1 in said.ended)
    last.touch()
    assert set(running.wait(PATIENCE).errors) == {0, 1}
    assert pool.newcomers == (1,)
    failed = pool.run("made")
    assert failed.errors[1].ename == "NameError"
    assert set(failed.newcomers) == {1}
    pool.run("made = 6", ranks=[0])
    assert pool.sync().ranks == (1,)
    assert pool.pull("made") == {0: 6, 1: 6}
