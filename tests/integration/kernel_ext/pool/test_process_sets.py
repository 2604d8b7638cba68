"""Process sets in the cells of a pool whose ranks come and go."""

from __future__ import annotations

from support.fixtures.kernel_ext_pool import StartPool
from support.patience import PATIENCE

SET_UP = """
import numpy as np
import hvdlab.numpy as hvd
from hvdlab.collectives import context, process_sets
context.init()
pair = process_sets.add_process_set([0, 1])
"""
TOTAL = "float(hvd.allreduce(np.ones(2, np.float32), 'x', op=hvd.Sum, process_set=pair.process_set_id)[0]) if pair.included() else 0.0"
# In a cell: a rank that had died before it would be none of the cell's.
DIE = """
import os, signal
if context.engine().rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
hvd.barrier()
"""


def test_all_ranks_register_a_set_anew_once_one_was_replaced(start_pool: StartPool) -> None:
    pool = start_pool(3)
    assert pool.run(SET_UP).ok
    assert pool.run("first = pair").ok
    assert [pool.run(TOTAL)[rank] for rank in range(3)] == [2.0, 2.0, 0.0]
    assert set(pool.run(DIE).deaths) == {1}
    pool.repair(timeout=PATIENCE)
    assert pool.run(SET_UP).ok
    assert [pool.run(TOTAL)[rank] for rank in range(3)] == [2.0, 2.0, 0.0]
    # The rest of the first is a set of its own.
    left = pool.run("(first.ranks, first.process_set_id != pair.process_set_id)", ranks=[0, 2])
    assert [left[0], left[2]] == [([0], True)] * 2


def test_among_the_same_processes_a_second_set_is_refused(start_pool: StartPool) -> None:
    pool = start_pool(2 + 1)
    assert pool.run(SET_UP).ok
    again = pool.run(SET_UP)
    assert {error.ename for error in again.errors.values()} == {"InvalidRequestError"}
    assert all("registered already" in error.evalue for error in again.errors.values())
    pool.resize(4)
    assert pool.run(SET_UP).ok
    assert [pool.run(TOTAL)[rank] for rank in range(4)] == [2.0, 2.0, 0.0, 0.0]


SCRIPT = """
import numpy as np
import hvdlab.numpy as hvd
hvd.init(process_sets=[[1, 2]])
before = "pair" in globals() and pair.process_set_id
pair = hvd.add_process_set([0, 1])
total = float(hvd.allreduce(np.ones(2, np.float32), op=hvd.Sum, process_set=pair)[0]) if pair.included() else 0.0
hvd.shutdown()
before, pair.process_set_id, total
"""
SETS = "from hvdlab.collectives import context\nlen(context.init().added_process_sets())"


def test_a_script_in_a_cell_can_be_run_again(start_pool: StartPool) -> None:
    """A new world has no sets of the one before, though a pool's ranks stay connected; and none is left over each time."""
    pool = start_pool(3)
    for before in (False, None, None):
        results = pool.run(SCRIPT)
        assert results.errors == {}
        assert [results[rank] for rank in range(3)] == [(before, None, total) for total in (2.0, 2.0, 0.0)]
        assert list(pool.run(SETS)) == [2, 2, 2]
    assert set(
        pool.run("context.init()\n" + DIE.replace("hvd.barrier()", "hvd.init()\nhvd.barrier()")).deaths
    ) == {1}
    pool.repair(timeout=PATIENCE)
    results = pool.run(SCRIPT)
    assert results.errors == {}
    assert [results[rank][1:] for rank in range(3)] == [(None, total) for total in (2.0, 2.0, 0.0)]
