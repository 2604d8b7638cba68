"""Cells in which ranks join, and others do not."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hvdlab.kernel_ext.notebook.cells.sink import OutputSink
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.kernel_ext.wire.cells import CellDone, Chunk
from support.patience import PATIENCE

StartPool = Callable[..., Pool]

SETUP = """
import numpy as np
import hvdlab.numpy as hvd
from hvdlab.collectives import context
context.init()
rank = context.engine().rank
"""
JOIN_OR = """
if rank == 2:
    assert hvd.allreduce(np.ones(3), op=hvd.Sum)[0] == 1.0  # ranks 0 and 1 have joined
    {}
else:
    print("joins", flush=True)
    hvd.join()
"""
ALL_JOIN = "hvd.join() in (0, 1, 2) and float(hvd.allreduce(np.ones(3), op=hvd.Sum)[0])"


class Started(OutputSink):
    """Sink that knows when two ranks have written something."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.both = threading.Event()

    def output(self, rank: int, chunks: tuple[Chunk, ...]) -> None:
        self.ranks.add(rank)
        if {0, 1} <= self.ranks:
            self.both.set()

    def done(self, rank: int, done: CellDone | None) -> None:
        pass

    def note(self, text: str, *, warning: bool = False) -> None:
        pass


def test_a_cell_that_fails_ends_or_is_interrupted_ends_the_join_of_the_others(start_pool: StartPool) -> None:
    pool = start_pool(3)
    assert pool.run(SETUP).errors == {}
    for instead, told in (
        ("1 / 0", "rank 2 failed: ZeroDivisionError"),
        ("pass", "rank 2 finished its cell"),
    ):
        errors = pool.run(JOIN_OR.format(instead)).errors
        assert {errors[rank].ename for rank in (0, 1)} == {"AbortedError"}
        assert all(told in errors[rank].evalue for rank in (0, 1)), errors
        assert list(pool.run(ALL_JOIN)) == [3.0] * 3
    out = Started()
    run = pool.start_run(JOIN_OR.format("while True: pass"), out=out)
    assert out.both.wait(PATIENCE)
    run.interrupt()
    assert set(run.wait(PATIENCE).errors) == {0, 1, 2}
    assert list(pool.run(ALL_JOIN)) == [3.0] * 3
