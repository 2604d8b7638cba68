"""A rank that a pool gets back to after mail was lost, or that another pool comes to."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hvdlab.kernel_ext.payloads import CellDone, Done, Output, PushValue, Resync, RunCell, Settled, Stream
from hvdlab.kernel_ext.rank.capture import WINDOW

if TYPE_CHECKING:
    from tests.kernel_ext.rank.conftest import Pool, Rank

PATIENCE = 20.0


def text_of(output: Output) -> str:
    return "".join(chunk.text for chunk in output.chunks if isinstance(chunk, Stream))


def test_output_and_end_of_a_cell_are_sent_again(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        cell = pool.start("print('hello')\n1 / 0")
        while not isinstance(pool.engine.posted.get(timeout=PATIENCE), CellDone):
            pass
        for _ in range(2):
            pool.engine.mail(Resync(((cell, 0, 0),)))
            output, done = pool.expect(Output), pool.expect(CellDone)
            assert (text_of(output), output.before, output.total) == ("hello\n", 0, 6)
            assert done.total == 6
            assert done.error is not None
            assert done.error.ename == "ZeroDivisionError"
        pool.engine.mail(Resync(((cell, 6, 6),)))
        assert isinstance(pool.engine.posted.get(timeout=PATIENCE), CellDone)
        pool.engine.mail(Settled(cell))
        pool.engine.mail(Resync(((cell, 0, 0),)))
        pool.engine.settle()
        assert pool.engine.posted.empty()

    rank.play(script)


def test_a_cell_that_comes_again_runs_once(rank: Rank) -> None:
    rank.shell.user_ns["go"] = go = threading.Event()
    rank.shell.user_ns["ran"] = ran = []

    def script(pool: Pool) -> None:
        waits = pool.start("go.wait()")
        order = RunCell("queued", "[2]", "ran.append(1)")
        for _ in range(2):
            pool.engine.mail(order)
        pool.engine.settle()
        go.set()
        pool.finish(waits)
        assert pool.expect(CellDone).cell == "queued"
        pool.engine.mail(order)  # ended, and not settled
        pool.run("ran.append(2)")

    rank.play(script)
    assert ran == [1, 2]


def test_a_cell_that_nobody_waits_for_is_not_stopped_by_its_window(rank: Rank) -> None:
    rank.shell.user_ns["size"] = WINDOW

    def script(pool: Pool) -> None:
        cell = pool.start("for _ in range(3):\n    print('x' * size)")
        while pool.expect(Output).total < WINDOW // 2:  # begun, and soon to wait for the window
            pass
        pool.engine.mail(Resync(()))
        while pool.expect(CellDone).cell != cell:
            pass
        pool.run("print('as before')")

    rank.play(script)


def test_a_question_that_comes_again_is_answered_once(rank: Rank) -> None:
    rank.shell.user_ns["go"] = go = threading.Event()

    def script(pool: Pool) -> None:
        waits = pool.start("go.wait()")
        for _ in range(3):
            pool.engine.mail(PushValue(7, (), ()))
        pool.engine.settle()
        go.set()
        pool.finish(waits)
        pool.run("pass")

    rank.play(script)
    assert [name for name, _ in rank.engine.log].count(Done.__name__) == 1
