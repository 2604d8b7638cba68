"""A pool whose ranks have consecutive numbers, for scripts that count on them; the pool itself knows them as it always does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hvdlab.kernel_ext.notebook.pool import Pool

NUMBERS = """
import hvdlab.numpy as hvd, numpy as np
from hvdlab.bindings.objects import allgather_object, broadcast_object

hvd.init()
(hvd.rank(), hvd.size(), broadcast_object(mine, root_rank=0), allgather_object((hvd.rank(), mine)))
"""


DIE = """
import os, signal
first = hvd.rank() == 0  # the next one is the first as soon as that one has died
hvd.barrier()
if first:
    os.kill(os.getpid(), signal.SIGKILL)
hvd.barrier()
"""


@pytest.mark.timeout(240)
def test_numbers_in_cells_follow_who_was_there_first(
    start_pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDLAB_RANK_NUMBERS", "consecutive")
    pool = start_pool(3)
    pool.push(mine="old")
    found = pool.run(NUMBERS)
    assert [found[rank][0] for rank in range(3)] == [0, 1, 2], found.root_cause

    # It dies in a cell, so that the pool knows of it when that has ended.
    assert not pool.run(DIE).ok
    assert set(pool.lost) == {0}
    found = pool.run(NUMBERS)
    assert {rank: found[rank][:3] for rank in (1, 2)} == {1: (0, 2, "old"), 2: (1, 2, "old")}

    # The one in its place has its number for the pool, and comes behind the others for cells.
    assert pool.repair() == (0,)
    assert pool.ranks == (0, 1, 2)
    pool.run("mine = 'new'", ranks=[0])
    found = pool.run(NUMBERS)
    gathered = [(0, "old"), (1, "old"), (2, "new")]
    assert [found[rank] for rank in range(3)] == [
        (2, 3, "old", gathered),
        (0, 3, "old", gathered),
        (1, 3, "old", gathered),
    ], found.root_cause

    # The variables come from the rank that is asked, all ranks as well as some.
    assert pool.sync([0], source=1).ranks == (0,)
    pool.run("mine = 'last'", ranks=[2])
    assert pool.sync([0, 1], source=2).ranks == (0, 1)
    assert pool.pull("mine") == dict.fromkeys(range(3), "last")

    # Those that are added come behind all; one that leaves moves only those behind it.
    pool.resize(5)
    pool.run("import hvdlab.numpy as hvd; hvd.init()", ranks=[3, 4])
    assert list(pool.run("hvd.rank()")) == [2, 0, 1, 3, 4]
    pool.resize(4)
    assert list(pool.run("hvd.rank()")) == [2, 0, 1, 3]
