"""Variables compared over the ranks of a real pool."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from hvdlab.collectives.errors import HvdlabError, InvalidRequestError
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.kernel_ext.notebook.variables import diff as diffing
from hvdlab.kernel_ext.notebook.variables.diff import Diff
from hvdlab.kernel_ext.wire.values import ReleaseTransfer
from support.patience import HOUR, PATIENCE, eventually
from support.pool_probe import PoolProbe

StartPool = Callable[..., Pool]

SETUP = """
import os, time
import numpy as np
rank = int(os.environ['RANK'])
same = {'x': [1, 2], 'w': np.arange(1000.)}
grid = np.arange(12.).reshape(3, 4)
grid[1, 2] += 0.5 * (rank == 2)
grid[2, 3] = np.nan if rank == 2 else 1
large = np.zeros(30_000_000 // 4, dtype='f4')
large[3_000_000] = rank
if rank != 1: only = 3
class Bad:
    def __repr__(self): raise ValueError('no')
class Endless:
    def __repr__(self):
        while True: pass
bad = [Bad(), Endless(), rank == 0]
"""


@pytest.fixture
def pool(start_pool: StartPool) -> Pool:
    pool = start_pool(3)
    assert pool.run(SETUP).ok
    return pool


def test_what_agrees_and_what_does_not(pool: Pool) -> None:
    same = pool.diff("same")
    assert same.agree
    assert repr(same) == "same: ranks 0-2 agree (dict, 1 array, 7.8 KiB)"

    found = pool.diff("grid")
    assert (found.agree, found.odd, [group.ranks for group in found.groups]) == (False, (2,), [(0, 1), (2,)])
    (row,) = found.rows
    assert (row.ranks, row.what, row.first, row.count) == ((2,), ("values",), (1, 2), 2)
    assert (row.largest, row.relative, row.here, row.there) == (0.5, pytest.approx(0.5 / 6.5), "6.5", "6.0")
    assert (row.not_finite, row.expected_not_finite) == ((1, 0), (0, 0))
    assert "1 (elsewhere 0)" in repr(found)
    assert "font-weight: bold" in found._repr_html_()

    missing = pool.diff("only")
    assert [group.ranks for group in missing.groups] == [(0, 2), (1,)]
    assert "rank 1: NameError: name 'only' is not defined" in repr(missing)
    assert repr(pool.diff("nowhere")).startswith("nowhere: no rank has it")
    assert pool.diff("bad", [1, 2]).agree  # __repr__ does not matter
    assert [row.path for row in pool.diff("bad").rows] == ["[2]"]


def test_an_expression_that_never_returns_is_left_behind(pool: Pool) -> None:
    shorten = (
        "import itertools, hvdlab.kernel_ext.rank.compare as examining\nexamining.EVALUATED_WITHIN = 0.3\n"
    )
    assert pool.run(shorten).ok
    found = pool.diff("sum(1 for _ in itertools.count())")
    assert "takes longer than 0 s" in repr(found)
    assert pool.run("rank").ok


TEXTS = """
import threading
long = 'x' * 3000 + 'abc'[rank] + 'tail'
longer = 'y' * (100 + rank)
block = 'z' * (1 << 20) + '!' * rank
raw = b'x' * 5000 + bytes([rank])
number = (1 << 16609) + rank
locked = [threading.Lock(), 1]
"""


@pytest.mark.parametrize("near", [True, False])
def test_where_texts_differ_is_shown(pool: Pool, monkeypatch: pytest.MonkeyPatch, near: bool) -> None:
    if not near:  # as if on different hosts
        monkeypatch.setattr(PoolProbe(pool).group, "ranks_on_this_host", lambda: set())
    assert pool.run(TEXTS).ok

    def rows(name: str) -> list[tuple[object, ...]]:
        return [(row.ranks, row.first, row.here, row.there) for row in pool.diff(name, [0, 1]).rows]

    assert rows("long") == [((1,), (3000,), "…'xxxxxxxxbtail'", "…'xxxxxxxxatail'")]
    assert rows("longer") == [((1,), (100,), "…'yyyyyyyyy'", "…'yyyyyyyy' (ends)")]
    assert rows("block") == [((1,), (1 << 20,), "…'zzzzzzzz!'", "…'zzzzzzzz' (ends)")]
    assert rows("raw") == [((1,), (5000,), r"…b'xxxxxxxx\x01'", r"…b'xxxxxxxx\x00'")]
    assert rows("number") == [((1,), (4154,), "…000000001", "…000000000")]
    assert rows("[long, b'x' * 100 + bytes([rank])]")[1][1] == (100,)
    assert "[3000]" in repr(pool.diff("long"))


def test_what_can_not_be_compared_is_in_the_headline(pool: Pool) -> None:
    assert pool.run(TEXTS).ok
    found = pool.diff("locked")
    assert not found.agree
    assert repr(found) == (
        "locked: no difference found on ranks 0-2, 1 part not compared (list)\n  not compared: [0] (lock)"
    )


def large_rows(found: Diff) -> list[tuple[tuple[int, ...], tuple[int, ...] | None, int, float | None]]:
    return [(row.ranks, row.first, row.count, row.largest) for row in found.rows]


def test_large_arrays_are_compared_between_the_ranks(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [((1,), (3_000_000,), 1, 1.0), ((2,), (3_000_000,), 1, 2.0)]
    assert large_rows(pool.diff("large")) == expected
    monkeypatch.setattr(
        PoolProbe(pool).group, "ranks_on_this_host", lambda: set()
    )  # as if on different hosts
    assert large_rows(pool.diff("large")) == expected
    monkeypatch.setattr(diffing, "SENT_BYTES", 4 << 20)
    assert large_rows(pool.diff("large + np.arange(large.size) % 7 * (rank == 1)"))[0][2] > 6_000_000


def test_states_of_random_numbers_and_the_environment(pool: Pool) -> None:
    seeded = "import random; random.seed(4); np.random.seed(4)"
    assert pool.run(seeded).ok
    assert pool.diff(special="rng").agree
    assert pool.run("if rank == 1: random.random()").ok
    assert {row.path for row in pool.diff(special="rng").rows} >= {"['random'][0]"}
    assert pool.run("os.environ['MY_TOKEN'] = f'secret {rank}'; os.environ['COLOUR'] = str(rank // 2)").ok
    text = repr(pool.diff(special="environment"))
    assert "['variables']['COLOUR']" in text
    assert "['variables']['MY_TOKEN']" in text
    assert "secret" not in text
    with pytest.raises(InvalidRequestError, match="name of a variable"):
        pool.diff("a", special="rng")


def test_it_waits_for_cells_and_what_was_given_up_holds_nothing_up(pool: Pool) -> None:
    # An examination that is not let go would be kept for a pool that seems to be gone; for so long here that it is seen.
    assert pool.run(f"import hvdlab.kernel_ext.rank.compare as examining\nexamining.PATIENCE = {HOUR}").ok
    handle = pool.start_run("import threading; go = threading.Event(); go.wait()", ranks=[0])
    questions, over = PoolProbe(pool).runs.requests, threading.Event()

    def interrupt() -> None:
        while not over.is_set() and not questions._open:
            time.sleep(0.01)
        # Python does not notice one that comes in the moment in which it begins to wait.
        while not over.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            over.wait(5)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.diff("same")
    finally:
        over.set()
        thread.join()
    handle.interrupt()
    handle.wait()
    assert pool.run("rank", timeout=PATIENCE).ok
    assert pool.diff("same").agree


def test_a_rank_that_dies_meanwhile_ends_it(pool: Pool) -> None:
    pids = pool.run("os.getpid()")
    handle = pool.start_run("time.sleep(60)", ranks=[1])

    def kill() -> None:
        eventually(lambda: PoolProbe(pool).has_open_questions)
        os.kill(pids[1], signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    found = pool.diff("grid")
    killing.join()
    handle.wait()
    assert [group.ranks for group in found.groups] == [(0,), (2,), (1,)]
    assert "rank 1: it is lost" in repr(found)


def test_a_rank_that_lets_go_too_early_is_an_error(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = diffing._Comparison._ask_leaves

    def released(self: diffing._Comparison, group: object) -> object:
        self._questions.send(ReleaseTransfer(self._transfer_id), (0, 1, 2))
        return ask(self, group)  # type: ignore[arg-type]

    monkeypatch.setattr(diffing._Comparison, "_ask_leaves", released)
    with pytest.raises(HvdlabError, match="the examination is over"):
        pool.diff("grid")
