"""A rank that a pool gets back to after mail was lost, or that another pool comes to."""

from __future__ import annotations

import errno
import os
import selectors
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest

from hvdlab.kernel_ext.notebook.cells.dispatch import MessageFate, ReceiveWindow
from hvdlab.kernel_ext.rank import output
from hvdlab.kernel_ext.rank.output import WINDOW, OutputQueue, OwnerWatch
from hvdlab.kernel_ext.rank.output_log import UNATTENDED, OutputLog
from hvdlab.kernel_ext.wire.cells import (
    CellDone,
    DiscardCell,
    ListRetainedCells,
    Output,
    ResendFrom,
    RetainedCell,
    RetainedCells,
    RunCell,
    SetOwner,
    Stream,
)
from hvdlab.kernel_ext.wire.channel import Payload
from hvdlab.kernel_ext.wire.codec import decode_to_pool
from hvdlab.kernel_ext.wire.values import Acked, PushValue
from hvdlab.launch.processes import start_time
from support.fakes.posting_engine import PostingEngine
from support.patience import PATIENCE

if TYPE_CHECKING:
    from integration.kernel_ext.rank.conftest import Pool, Rank


def text_of(output: Output) -> str:
    return "".join(chunk.text for chunk in output.chunks if isinstance(chunk, Stream))


def test_output_and_end_of_a_cell_are_sent_again(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        cell = pool.start("import sys\nsys.stdout.write('hello\\n')\n1 / 0")  # print() may be torn apart
        while not isinstance(pool.engine.posted.get(timeout=PATIENCE), CellDone):
            pass
        for _ in range(2):
            pool.engine.mail(ResendFrom(((cell, 0, 0),)))
            output, done = pool.expect(Output), pool.expect(CellDone)
            assert (text_of(output), output.before, output.total) == ("hello\n", 0, 6)
            assert done.total == 6
            assert done.error is not None
            assert done.error.ename == "ZeroDivisionError"
        pool.engine.mail(ResendFrom(((cell, 6, 6),)))
        assert isinstance(pool.engine.posted.get(timeout=PATIENCE), CellDone)
        pool.engine.mail(DiscardCell(cell))
        pool.engine.mail(ResendFrom(((cell, 0, 0),)))
        pool.engine.settle()
        assert pool.engine.posted.empty()

    rank.play(script)


def test_cells_are_discarded_with_the_next_one(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        first, other = pool.start("pass"), pool.start("pass")
        assert [pool.expect(CellDone).cell for _ in range(2)] == [first, other]
        last = pool.start("pass", discards=(first, "unknown"), announced=True)
        pool.expect(CellDone)
        pool.engine.mail(ListRetainedCells(7))
        assert [held.cell for held in pool.expect(RetainedCells).cells] == [other, last]

    rank.play(script)


def test_a_cell_that_comes_again_runs_once(rank: Rank) -> None:
    rank.shell.user_ns["go"] = go = threading.Event()
    ran: list[int] = []
    rank.shell.user_ns["ran"] = ran

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
        pool.engine.mail(ResendFrom(()))
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
    assert [name for name, _ in rank.engine.log].count(Acked.__name__) == 1


def test_a_cell_that_nobody_attends_writes_on_and_its_newest_output_is_kept(rank: Rank) -> None:
    rank.shell.user_ns["go"] = go = threading.Event()
    line = "x" * ((1 << 20) - 1) + "\n"

    def script(pool: Pool) -> None:
        cell = pool.start("for _ in range(20): print('x' * ((1 << 20) - 1))\ngo.wait()\nprint('end')")
        pool.engine.mail(SetOwner(0, 0))  # without it the cell would wait for room: no pool gives credit
        while (output := pool.expect(Output)).total < 20 << 20:
            pass
        pool.engine.mail(SetOwner(*me()))
        pool.engine.mail(ListRetainedCells(7))
        (held,) = pool.expect(RetainedCells).cells
        assert (held.cell, held.running) == (cell, True)
        assert held.before == held.dropped
        assert 0 < output.total - held.before <= UNATTENDED
        pool.engine.mail(ResendFrom(((cell, held.before, held.before),)))
        said = ""
        while len(said) < output.total - held.before:
            said += text_of(pool.expect(Output))
        as_written = len(said) == output.total - held.before and said in line * 6
        assert as_written
        go.set()
        assert pool.read(cell, 4) == "end\n"
        assert pool.expect(CellDone).total == output.total + 4
        pool.engine.mail(DiscardCell(cell))
        pool.engine.mail(ListRetainedCells(8))
        assert pool.expect(RetainedCells).cells == ()

    rank.play(script)


def test_the_order_of_an_elastic_cell_is_kept_for_the_next_process(rank: Rank) -> None:
    rank.shell.user_ns["go"] = go = threading.Event()

    def script(pool: Pool) -> None:
        trains = pool.start("go.wait()", at_least=2, at_most=3)
        queued = pool.start("pass")
        pool.engine.mail(ListRetainedCells(7))
        elastic, other = pool.expect(RetainedCells).cells
        assert elastic.order is not None
        assert (elastic.order.source, elastic.order.at_least, elastic.order.at_most) == ("go.wait()", 2, 3)
        assert other.order is None
        go.set()
        pool.finish(trains)
        pool.finish(queued)

    rank.play(script)


def test_what_somebody_was_told_of_is_not_dropped_until_he_is_gone() -> None:
    sent = OutputLog(PostingEngine())
    sent.register("a", "[1]")
    for _ in range(3):
        sent.output("a", [], UNATTENDED, unattended=True)
    assert sent.retained_cells() == (RetainedCell("a", "[1]", 2 * UNATTENDED, 2 * UNATTENDED, True),)
    sent.output("a", [], UNATTENDED, unattended=True)
    assert sent.retained_cells()[0].before == 2 * UNATTENDED
    sent.allow_trimming()
    sent.output("a", [], UNATTENDED, unattended=True)
    assert sent.retained_cells()[0].before == 4 * UNATTENDED
    sent.acknowledge("a", 5 * UNATTENDED)
    sent.done(CellDone("a", None, 0.0))
    assert sent.retained_cells() == (RetainedCell("a", "[1]", 5 * UNATTENDED, 4 * UNATTENDED, False),)


def test_who_is_named_again_keeps_what_he_was_told_of() -> None:
    """SetOwner, question and a second SetOwner come before the sending thread has checked the owners."""
    capture = OutputQueue(PostingEngine())
    capture.sent.register("a", "[1]")
    capture.set_owner(*me())
    for _ in range(2):
        capture.sent.output("a", [], UNATTENDED, unattended=True)
    (held,) = capture.sent.retained_cells()
    capture.set_owner(*me())
    capture.sent.output("a", [], UNATTENDED, unattended=True)
    assert capture.sent.retained_cells() == (held,)
    capture.set_owner(0, 0)
    capture.sent.output("a", [], UNATTENDED, unattended=True)
    assert capture.sent.retained_cells()[0].before == 3 * UNATTENDED
    capture.start()
    capture.close()


def test_a_gap_is_told_instead_of_what_is_missing() -> None:
    posted: list[Payload] = []
    sent = OutputLog(PostingEngine(lambda topic, body: posted.append(decode_to_pool(body))))
    sent.register("a", "[1]")
    for _ in range(3):
        sent.output("a", [], UNATTENDED, unattended=True)
    sent.done(CellDone("a", None, 0.0))
    arrivals = ReceiveWindow([0], {0: 5})
    posted.clear()
    sent.resend([("a", 5, 5)])
    gap, rest, done = posted
    assert isinstance(gap, Output)
    assert isinstance(rest, Output)
    assert isinstance(done, CellDone)
    assert [arrivals.output(0, output) for output in (gap, rest)] == [MessageFate.TAKE] * 2
    assert f"{2 * UNATTENDED - 5} bytes" in text_of(gap)
    assert arrivals.done(0, done) is MessageFate.TAKE


def test_the_end_of_one_does_nothing_once_another_is_named() -> None:
    attendance = OwnerWatch()
    ends: list[str] = []
    with selectors.DefaultSelector() as selector:
        attendance.set_owner(*me())
        attendance.update(selector)
        attendance.set_owner(*me())
        attendance.on_exit(selector, lambda: ends.append("the first"))
        assert not attendance.absent
        attendance.update(selector)
        attendance.on_exit(selector, lambda: ends.append("the second"))
        assert attendance.absent
    assert ends == ["the second"]


def test_a_process_of_another_host_counts_as_there_until_the_rank_learns_otherwise() -> None:
    attendance = OwnerWatch()
    with selectors.DefaultSelector() as selector:
        attendance.set_owner(1, 1, near=False)  # here this is another process, or none
        attendance.update(selector)
        assert not attendance.absent
        assert not selector.get_map()
        attendance.set_owner(0, 0)
        attendance.update(selector)
        assert attendance.absent


def test_process_that_cannot_be_watched_counts_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(pid: int, started: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    attendance = OwnerWatch()
    with selectors.DefaultSelector() as selector:
        attendance.set_owner(0, 0)
        attendance.update(selector)
        monkeypatch.setattr(output, "open_process", no_descriptor)
        attendance.set_owner(*me())
        attendance.update(selector)
        assert not attendance.absent
        assert not selector.get_map()


def me() -> tuple[int, int]:
    return os.getpid(), start_time(os.getpid())


def test_the_end_of_who_attends_lets_a_cell_write_on(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
            pool.engine.mail(SetOwner(process.pid, start_time(process.pid)))
            cell = pool.start("for _ in range(20): print('x' * ((1 << 20) - 1))")
            while pool.expect(Output).total < WINDOW:
                pass
        while (mail := pool.engine.posted.get(timeout=PATIENCE)) and not isinstance(mail, CellDone):
            pass
        assert mail.cell == cell
        assert mail.total == 20 << 20

    rank.play(script)


def test_a_cell_that_was_interrupted_as_its_notebook_ended_is_named_to_the_next_process(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        pool.engine.mail(SetOwner(*me()))
        unseen = pool.start("raise KeyboardInterrupt", label="[3]")
        assert pool.expect(CellDone).cell == unseen
        pool.engine.mail(SetOwner(0, 0))
        pool.engine.mail(SetOwner(*me()))
        pool.engine.mail(ListRetainedCells(7))
        answer = pool.expect(RetainedCells)
        assert [(held.label, held.interrupted) for held in answer.cells] == [("[3]", True)]
        assert answer.interrupted == ""
        pool.engine.mail(DiscardCell(unseen))
        pool.engine.mail(SetOwner(0, 0))
        pool.engine.mail(SetOwner(*me()))
        pool.engine.mail(ListRetainedCells(8))
        assert pool.expect(RetainedCells).interrupted == "[3]"
        other = pool.start("pass", label="[4]")
        assert pool.expect(CellDone).cell == other
        pool.engine.mail(DiscardCell(other))
        pool.engine.mail(SetOwner(0, 0))
        pool.engine.mail(ListRetainedCells(9))
        assert pool.expect(RetainedCells).interrupted == ""

    rank.play(script)
