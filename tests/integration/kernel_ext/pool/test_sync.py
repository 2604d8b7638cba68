"""Variables of one rank are sent to ranks that came later."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdlab.collectives.errors import HvdlabError, InvalidRequestError
from hvdlab.kernel_ext.notebook.elastic import SyncResult, UnsyncedRank, why_unknown
from hvdlab.kernel_ext.notebook.output.error_report import report
from hvdlab.kernel_ext.notebook.pool import Pool
from support.patience import eventually

StartPool = Callable[..., Pool]

KNOWN = """
import os.path, threading, xml.dom.minidom
import numpy as np
from collections import Counter as Count, namedtuple
from dataclasses import dataclass

big = np.arange(100_000, dtype=np.float64)
part = {"same": big, "text": "ä", "none": None}
factor = 2
lock = threading.Lock()
Point = namedtuple("Point", "x y")

def scaled(x):
    return factor * x

def counting():
    count = 0
    def up():
        nonlocal count
        count += 1
        return count
    def now():
        return count
    def fall(n):
        return 0 if n == 0 else fall(n - 1)
    return up, now, fall

up, now, fall = counting()
up()

def needs_lock():
    with lock:
        return 1

class Base:
    def __init__(self): self.begun = True

@dataclass
class Known(Base):
    x: int = 1
    def __post_init__(self): super().__init__()
    def twice(self): return scaled(self.x)

known = Known(4)
point = Point(1, 2)
words = Count("aab")
"""

PLACES = """
import linecache
from hvdlab.collectives.text import call_site
def place():
    text = linecache.getline(place.__code__.co_filename, 6)
    return call_site(), text
"""

TORCH = """
import torch
import hvdlab.torch as hvd
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 1))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), named_parameters=model.named_parameters()
)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
mine = torch.ones(3, requires_grad=True)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

def step():
    optimizer.zero_grad()
    loss = model(torch.full((4, 300), hvd.rank() + 1.0)).sum()
    loss.backward()
    optimizer.step()
    return loss.item()

step()
"""


@pytest.mark.timeout(240)
def test_newcomers_know_what_the_others_know(start_pool: StartPool) -> None:
    pool = start_pool(2)
    assert pool.newcomers == ()
    with pytest.raises(InvalidRequestError, match="no rank came later"):
        pool.sync()
    assert pool.run(KNOWN).errors == {}
    pool.run(PLACES, label="[3]")
    pool.resize(4)
    assert pool.newcomers == (2, 3)

    failed = pool.run("known.x")
    assert {rank: error.ename for rank, error in failed.errors.items()} == {2: "NameError", 3: "NameError"}
    said = "\n".join(report(failed, colours=False))
    assert "ranks 2,3 came later, by resize at " in said
    assert "`%hvd_pool sync 2,3` brings them what the others know" in said

    pool.run("'what the user saw last'", ranks=[0, 1], label="[7]", store_history=True)
    done = pool.sync(without=["words"])
    # It leaves no trace among the user's own cells.
    assert pool.run("_", ranks=[0, 1])[1] == "what the user saw last"
    assert pool.transcripts.find("sync") is None
    assert (done.source, done.ranks) == (0, (2, 3))
    assert list(done.failed) == ["lock"]
    assert "lock" in done.failed["lock"]
    assert done.nbytes > 800_000
    assert {"big", "part", "Known", "known", "point", "up", "scaled", "needs_lock"} <= set(done.names)
    assert {"np", "os", "threading", "xml"} <= set(done.modules)
    assert str(done).startswith("ranks 2,3 have what rank 0 knows: ")
    assert "not brought: lock (TypeError: " in str(done)
    assert pool.newcomers == ()

    looks = {
        "known.twice(), known.begun, point.y, Point(3, 4).x, xml.dom.minidom.__name__": (
            8,
            True,
            2,
            3,
            "xml.dom.minidom",
        ),
        # Shared references to one object stay shared, and functions see the variables of the rank where they are.
        "part['same'] is big, float(big.sum()), big.flags.writeable": (True, 4999950000.0, True),
        "isinstance(known, Known), isinstance(point, Point)": (True, True),
        "up(), now(), fall(3)": (2, 2, 0),
        "scaled.__globals__ is globals(), scaled.__module__": (True, "__main__"),
    }
    for look, seen in looks.items():
        found = pool.run(look)
        assert found[2] == found[3] == seen, look
    # Their lines are the notebook's, in the timeline as in tracebacks.
    assert pool.pull("place()") == dict.fromkeys(
        range(4), ("cell [3] line 6", "    return call_site(), text\n")
    )
    assert pool.pull("'words' in globals()") == {0: True, 1: True, 2: False, 3: False}
    pool.run("factor = 10", ranks=[3])
    assert [pool.pull("scaled(1)")[rank] for rank in (0, 2, 3)] == [2, 2, 10]
    assert {error.ename for error in pool.run("needs_lock()", ranks=[2, 3]).errors.values()} == {"NameError"}

    # A replaced rank, from another rank than the first; ranks that are not meant keep their own.
    pool.run("import os; mine = 'own'", ranks=[0, 2])
    pool.run("mine = 'of 3'", ranks=[3])
    os.kill(pool.status()[1].pid, signal.SIGKILL)
    # Not only the coordinator: it takes the end of the connection for it, before the fork server reports that of the process.
    eventually(lambda: 1 in pool.lost)
    pool.resize(5)
    assert pool.newcomers == (4,)
    with pytest.raises(InvalidRequestError, match="rank 1 is lost, and the world is complete only with all"):
        pool.sync()
    with pytest.raises(
        InvalidRequestError, match="rank 1 is lost, but rank 4 would end, with all variables there"
    ):
        pool.resize(4)
    assert pool.ranks == (0, 2, 3, 4)
    assert pool.repair() == (1,)
    pool.resize(4)
    assert pool.newcomers == (1,)
    assert pool.sync(source=3).ranks == (1,)
    assert pool.pull("mine") == {0: "own", 1: "of 3", 2: "own", 3: "of 3"}
    with pytest.raises(InvalidRequestError, match="from itself"):
        pool.sync([1, 3], source=3)

    # A variable that can't be sent leaves a newcomer as it was, and the report names it.
    pool.run(
        "class Odd:\n"
        "    def __reduce__(self): return (exec, ('import hvdlab; raise OSError(\"not here\")',))\n"
        "odd = Odd()",
        ranks=[0],
    )
    pool.restart([2])
    with pytest.raises(
        HvdlabError, match="rank 2 could not take what rank 0 knows: OSError: not here; `--without"
    ):
        pool.sync()
    assert pool.newcomers == (2,)
    assert pool.sync(without=["odd"]).ranks == (2,)


@pytest.mark.timeout(240)
def test_models_and_optimizers_go_on_training_together(
    start_pool: StartPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDLAB_PRELOAD", "torch,torch._dynamo")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    pool = start_pool(2)
    assert pool.run(TORCH).errors == {}
    pool.resize(3)
    done = pool.sync()
    assert done.failed == {}
    # The step after is one of all three, in one optimizer's momentum, with the models alike.
    assert pool.run("step(); schedule.step()").errors == {}
    same = "[p.double().sum().item() for p in model.parameters()]"
    momenta = "[optimizer.state[p]['momentum_buffer'].double().sum().item() for p in model.parameters()]"
    parts = f"({same}, {momenta}, optimizer.param_groups[0]['lr'], mine.requires_grad, hvd.size(), type(optimizer).__name__)"
    found = pool.pull(parts)
    assert found[2][2:] == (0.001, True, 3, "SGD")
    assert [found[rank] for rank in (1, 2)] == [found[0]] * 2
    shared = pool.pull("[a is b for a, b in zip(model.parameters(), optimizer.param_groups[0]['params'])]")
    assert shared[2] == [True] * 6
    assert pool.pull("optimizer._parameter_names[model[0].weight]")[2] == "0.weight"


def test_what_is_said() -> None:
    newcomers = {3: UnsyncedRank("repair", 0.0)}
    assert why_unknown(newcomers, [0, 1]) == ""
    said = why_unknown(newcomers, [1, 3])
    assert said.startswith("rank 3 came later, by repair at ")
    assert said.endswith(
        "and has nothing that earlier cells made; `%hvd_pool sync 3` brings it what the others know, and so does "
        "`%%hvd_run --sync` before its cell"
    )
    several = {
        1: UnsyncedRank("resize", 0.0),
        2: UnsyncedRank("repair", 0.0),
        4: UnsyncedRank("resize", 0.0),
        5: UnsyncedRank("resize", 90.0),
    }
    first, later = (time.strftime("%H:%M:%S", time.localtime(when)) for when in (0.0, 90.0))
    assert why_unknown(several, [0, 1, 2, 4, 5]).startswith(
        f"ranks 1,4 came later, by resize at {first}; rank 2 by repair at {first}; rank 5 by resize at {later}; they have "
        "nothing that earlier cells made; `%hvd_pool sync 1,2,4,5` brings them what the others know"
    )
    assert "ranks 1,4 came later, by resize at " in why_unknown(several, [1, 4])
    done = SyncResult(0, (3,), ("x",), (), {"lock": "TypeError: no"}, 2048, 0.25)
    assert str(done) == (
        "rank 3 has what rank 0 knows: 1 variable and 0 modules, 2.0 KiB in 0.2 s\nnot brought: lock (TypeError: no)"
    )
