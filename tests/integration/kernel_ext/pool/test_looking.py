"""Looking into the variables of ranks, also while cells run and values misbehave."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.kernel_ext.notebook.variables.overview import RankView, VariableSource
from support.patience import PATIENCE

StartPool = Callable[..., Pool]

SETUP = """
import os, threading
import hvdlab.kernel_ext.rank.variable_view as looking
looking.REPR_WITHIN = 3  # less than the look's own limit
import numpy as np
rank = int(os.environ['RANK'])
grid = np.arange(12.).reshape(3, 4) + (rank == 1)
grid[0, 0] = np.nan
large = np.zeros(30_000_000, dtype='f4')
settings = {'rate': 0.1, 'names': ['a', 'b']}
class Holder:
    def __init__(self): self.weight, self.note = grid, 'fine'
class Raises:
    def __repr__(self): raise SystemExit('no')
class Endless:
    def __repr__(self):
        while True: pass
    @property
    def never(self):
        while True: pass
holder, raises, endless = Holder(), Raises(), Endless()
if rank == 1: only_here = 5
"""


@pytest.fixture
def pool(start_pool: StartPool) -> Pool:
    pool = start_pool(2)
    assert pool.run(SETUP).ok
    return pool


def test_a_ranks_values_are_seen_without_being_moved(pool: Pool) -> None:
    view = pool.ranks[1].holder.weight
    lines = repr(view).splitlines()
    assert lines == [
        "rank 1: holder.weight",
        "  numpy.ndarray float64[3, 4] on cpu, 96 bytes",
        "  min 2, max 12, mean 7, std 3.162, 1 NaN",
        "  [nan, 2, 3, 4, 5, 6, …]",
    ]
    assert view.pull()[0, 1] == 2
    assert repr(pool.ranks[0].settings["names"][1]).splitlines()[1] == "  str 'b'"
    assert repr(pool.ranks[0]("grid[1:].sum()")).splitlines()[1] == "  numpy.float64 60.0"
    assert "elements from all over it" in repr(pool.ranks[0].large)
    assert "AttributeError" in repr(pool.ranks[0].holder.nothing)
    assert repr(pool.ranks[1]).startswith("<rank 1: rank, grid, large, settings, ")
    assert "only_here" in dir(pool.ranks[1])
    assert "weight" in dir(pool.ranks[1].holder)


def test_ranks_are_numbers_still(pool: Pool) -> None:
    assert list(pool.ranks) == [0, 1]
    assert pool.ranks[:1] == (0,)
    assert type(copy.deepcopy(pool.ranks)) is tuple
    assert pool.ranks[1] == 1
    with pytest.raises(IndexError, match="there is no rank 7; the pool has ranks 0,1"):
        pool.ranks[7]
    with pytest.raises(InvalidRequestError, match="not object"):
        pool.ranks[0].settings[object()]
    assert pool.ranks == (0, 1)


def test_a_rank_of_a_pool_that_has_ended_can_still_be_shown() -> None:
    class Ended:
        def names(self, ranks: list[int]) -> dict[int, Any]:
            raise InvalidRequestError("the pool has been stopped")

    view = RankView(cast(VariableSource, Ended()), 3)
    assert repr(view) == "<rank 3: the pool has been stopped>"
    assert (dir(view), int(view)) == ([], 3)


def test_values_that_misbehave_take_nothing_down(pool: Pool) -> None:
    assert pool.run("looking.WITHIN = 3600").ok  # so that it is the limit of a __repr__ that is found
    assert "its __repr__ raised SystemExit: no" in repr(pool.ranks[0].raises)
    assert pool.run("looking.REPR_WITHIN = 0.5").ok
    assert "its __repr__ took longer than" in repr(pool.ranks[0].endless)
    assert pool.run("looking.WITHIN = 0.5").ok
    assert "looking at it takes longer than" in repr(pool.ranks[0].endless.never)
    stopped = (
        "import time\nwhile 'hvdlab-looking' in {t.name for t in threading.enumerate()}: time.sleep(0.01)"
    )
    assert pool.run(stopped, timeout=PATIENCE).ok


def test_variables_and_where_they_differ(pool: Pool) -> None:
    found = pool.variables()
    assert found.differing == ["rank", "grid", "holder", "only_here"]
    lines = repr(found).splitlines()
    assert lines[0] == "9 variables on ranks 0,1, 4 of them not alike" or lines[0].endswith(
        "4 of them not alike"
    )
    rows = {line.split()[0]: line.split() for line in lines[2:]}
    assert rows["settings"][-1] == "alike"
    assert rows["only_here"][-1] == "1"
    assert rows["large"][-4:] == ["114.4", "MiB", "alike"] or rows["large"][-3:] == ["114.4", "MiB", "alike"]
    assert "not alike" in found._repr_html_()


def test_arrays_by_memory(pool: Pool) -> None:
    assert pool.run("part = large[:10]; free = [np.ones(1000)]").ok
    found = pool.tensors(most=3)
    names = [tensor.name for tensor in found.ranks[0].tensors]
    assert names == ["large", "free[0]", "grid"]
    assert found.ranks[0].count == 3
    assert "114.4 MiB" in repr(found)


def test_a_busy_rank_is_seen_as_well(pool: Pool) -> None:
    handle = pool.start_run("count = 0\nstop = threading.Event()\nprint('on', flush=True)\nstop.wait(60)")
    while not all(stack.frames for stack in pool.where().stacks.values()):
        time.sleep(0.01)
    assert "a cell is running" in repr(pool.ranks[0].settings)
    assert "are running a cell" in repr(pool.variables())
    handle.interrupt()
    handle.wait()
