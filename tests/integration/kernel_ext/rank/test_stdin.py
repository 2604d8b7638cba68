"""A rank asks the user, and its cell's debugger does."""

from __future__ import annotations

import bdb
import cmd
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from IPython.core.error import StdinNotImplementedError

from hvdlab.kernel_ext.rank.debugger import POST_MORTEM
from hvdlab.kernel_ext.rank.interrupts import InterruptDelivery
from hvdlab.kernel_ext.rank.output import OutputQueue
from hvdlab.kernel_ext.rank.stdin import LeftDebugger, RankStdin
from hvdlab.kernel_ext.wire.cells import (
    AT_AN_END,
    DEBUGGER,
    INPUT,
    PASSWORD,
    CellDone,
    PromptReply,
    PromptRequest,
    PromptWithdrawn,
    ResendFrom,
    SetOwner,
)
from hvdlab.kernel_ext.wire.codec import TO_POOL, decode_to_pool
from support.patience import PATIENCE

if TYPE_CHECKING:
    from integration.kernel_ext.rank.conftest import Pool, Ran, Rank


def talk(rank: Rank, source: str, answers: Sequence[str]) -> tuple[Ran, list[PromptRequest]]:
    """Run a cell, with these answers to its prompts."""
    found: list[tuple[Ran, list[PromptRequest]]] = []

    def script(pool: Pool) -> None:
        pool.answers = list(answers)
        ran = pool.run(source, label="[7]")
        assert not pool.answers, f"asked only for {pool.asked}"
        found.append((ran, pool.asked))

    rank.play(script)
    return found[0]


def test_what_was_written_before_comes_before_the_question_and_the_engine_pauses(rank: Rank) -> None:
    ran, asked = talk(rank, "print('hello', end='')\nn = input('name? ')\nprint(n.upper())", ["ada"])
    assert ran.text() == "helloADA\n"
    assert [(ask.kind, ask.prompt) for ask in asked] == [(INPUT, "name? ")]
    kinds = [kind for kind, _ in rank.engine.log]
    assert kinds.index("Output") < kinds.index("pause") < kinds.index("PromptRequest") < kinds.index("resume")


def test_a_password_is_one(rank: Rank) -> None:
    ran, asked = talk(rank, "import getpass\ngetpass.getpass()", ["x"])
    assert (asked[0].kind, asked[0].prompt) == (PASSWORD, "Password: ")
    assert ran.done.value_repr == "'x'"


def test_the_end_of_the_input_is_eoferror(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        cell = pool.start("try:\n    input()\nexcept EOFError:\n    print('end')")
        pool.engine.mail(PromptReply(pool.expect(PromptRequest).number, "", AT_AN_END))
        assert pool.finish(cell).text() == "end\n"

    rank.play(script)


def test_an_interrupt_at_a_prompt_is_keyboardinterrupt_and_the_question_is_taken_back(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        cell = pool.start("try:\n    input('x')\nexcept KeyboardInterrupt:\n    print('left')")
        ask = pool.expect(PromptRequest)
        pool.engine.interrupt()
        assert pool.expect(PromptWithdrawn).number == ask.number
        assert pool.finish(cell).text() == "left\n"
        assert rank.engine.paused == ""

    rank.play(script)


def test_a_question_is_asked_again_when_mail_may_be_lost(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        cell = pool.start("input()")
        ask = pool.expect(PromptRequest)
        pool.engine.mail(ResendFrom(((cell, 0, 0),)))
        assert pool.expect(PromptRequest) == ask
        pool.engine.mail(PromptReply(ask.number, "yes"))
        pool.engine.mail(PromptReply(ask.number, "no"))  # the answer to the second one comes too late
        assert pool.finish(cell).done.value_repr == "'yes'"

    rank.play(script)


def test_who_waits_when_the_notebook_leaves_gets_an_error(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        cell = pool.start("input()")
        pool.expect(PromptRequest)
        pool.engine.mail(SetOwner(0, 0))
        error = pool.finish(cell).error
        assert error.ename == "StdinNotImplementedError"
        assert "no notebook waits" in error.evalue

    rank.play(script)


def test_a_thread_that_asks_is_let_go_when_the_cell_ends(rank: Rank) -> None:
    source = (
        "import threading\nsaid = []\n"
        "def ask():\n    try: input('x')\n    except Exception as error: said.append(type(error).__name__)\n"
        "thread = threading.Thread(target=ask)\nthread.start()\nasked.wait()"
    )
    asked = rank.shell.user_ns["asked"] = threading.Event()

    def script(pool: Pool) -> None:
        pool.start(source)
        pool.expect(PromptRequest)
        asked.set()
        pool.expect(CellDone)
        pool.start("thread.join()\nsaid")
        assert pool.expect(CellDone).value_repr == "['StdinNotImplementedError']"

    rank.play(script)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("Thread-")]


CALLED_BACK = """
import ctypes, threading
from tests.support.threads import asleep
libc, mutex, held, said = ctypes.CDLL(None), ctypes.create_string_buffer(64), threading.Event(), []
def ask():
    libc.pthread_mutex_lock(mutex)
    held.set()
    asleep(threading.main_thread().native_id, ctypes.addressof(mutex))
    for question in range(2):
        try: {ask}
        except BaseException as error: said.append(type(error).__name__)
    libc.pthread_mutex_unlock(mutex)
thread = threading.Thread(target=ask)
thread.start()
held.wait()
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_unlock(mutex)
thread.join()
"""
"""The main thread waits for another one where signals do not reach it, as it does in a framework's C++."""


@pytest.mark.parametrize("ask", ["input('x')", "import pdb; pdb.Pdb().set_trace(); held.set()"])
def test_an_interrupt_ends_what_another_thread_asks_while_the_main_thread_waits_for_it(
    rank: Rank, ask: str
) -> None:
    def script(pool: Pool) -> None:
        cell = pool.start(CALLED_BACK.format(ask=ask))
        pool.expect(PromptRequest)
        pool.engine.interrupt()
        assert pool.finish(cell).error.ename == "KeyboardInterrupt"
        pool.start("thread.join()\nsaid")
        kind = "KeyboardInterrupt" if "input" in ask else "LeftDebugger"
        assert pool.expect(CellDone).value_repr == str([kind] * 2)
        # The next cell's threads ask as before.
        pool.answers = ["yes"]
        pool.run(
            "thread = threading.Thread(target=lambda: said.append(input('y')))\nthread.start()\nthread.join()"
        )
        assert pool.run("said[2:]").done.value_repr == "['yes']"

    rank.play(script)


def test_an_interrupt_that_pybind11_made_another_error_of(rank: Rank) -> None:
    ran = rank.run(
        "raise RuntimeError('... ORIGINAL _NotOkStatusException REPLACED BY KeyboardInterrupt: ...')"
    )
    assert ran.error.ename == "KeyboardInterrupt"


def test_a_long_prompt_is_cut(rank: Rank) -> None:
    _, asked = talk(rank, "input('x' * 10_000_000)", [""])
    assert len(asked[0].prompt) < 3000


class PromptingEngine:
    """Engine of a rank that asks; the rank's mail goes to a function of the test."""

    def __init__(self, take: Callable[[object], object]) -> None:
        self._take = take

    def pause(self, reason: str = "") -> None: ...
    def resume(self, reason: str = "") -> None: ...

    def post(self, topic: str, body: bytes) -> None:
        assert topic == TO_POOL
        self._take(decode_to_pool(body))


def stdin_of(
    engine: PromptingEngine,
    flush: Callable[[], None] = lambda: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> RankStdin:
    """Return the questions of a rank whose output and interrupts are functions."""

    class Gate:
        @property
        def interrupted(self) -> bool:
            return interrupted()

    capture = SimpleNamespace(flush=flush)
    return RankStdin(engine, cast(OutputQueue, capture), cast(InterruptDelivery, Gate()))


def test_a_pause_that_an_interrupt_left_behind_ends_with_the_cell() -> None:
    class Engine(PromptingEngine):
        paused, interrupts = 0, 1

        def pause(self, reason: str = "") -> None:
            self.paused += 1

        def resume(self, reason: str = "") -> None:
            if self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            self.paused -= 1

    def answer(mail: object) -> None:
        if isinstance(mail, PromptRequest):
            prompting.answered(PromptReply(mail.number, "yes"))

    engine = Engine(answer)
    prompting = stdin_of(engine)

    prompting.cell_begins("c")
    with pytest.raises(KeyboardInterrupt):
        prompting.input("x")
    prompting.cell_ended()
    assert engine.paused == 0


def test_thread_that_resumes_after_its_cell_hides_no_later_pause() -> None:
    over, open_now = threading.Event(), threading.Event()

    class Engine(PromptingEngine):
        paused, interrupts = 0, 1

        def pause(self, reason: str = "") -> None:
            self.paused += 1

        def resume(self, reason: str = "") -> None:
            if threading.current_thread() is not threading.main_thread():
                assert over.wait(PATIENCE)
            elif over.is_set() and self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            self.paused = max(0, self.paused - 1)

    def post(mail: object) -> None:
        if isinstance(mail, PromptRequest) and mail.cell == "second":
            prompting.answered(PromptReply(mail.number, "yes"))
        open_now.set()

    engine = Engine(post)
    prompting = stdin_of(engine)

    def ask() -> None:
        with contextlib.suppress(StdinNotImplementedError):
            prompting.input("x")

    prompting.cell_begins("first")
    thread = threading.Thread(target=ask)
    thread.start()
    assert open_now.wait(PATIENCE)
    prompting.cell_ended()
    over.set()
    thread.join()
    assert engine.paused == 0
    prompting.cell_begins("second")
    with pytest.raises(KeyboardInterrupt):
        prompting.input("y")
    prompting.cell_ended()
    assert engine.paused == 0


@pytest.mark.parametrize(
    "end",
    [
        RankStdin.cell_ended,
        lambda prompting: prompting.discard_cell("c"),
        lambda prompting: prompting.set_owner_present(False),
    ],
    ids=["ended", "discarded", "deserted"],
)
def test_question_whose_cell_ends_before_it_opens_is_not_asked(
    end: Callable[[RankStdin], None],
) -> None:
    asked: list[object] = []

    def post(mail: object) -> None:
        asked.append(mail)
        if isinstance(mail, PromptRequest):
            prompting.answered(PromptReply(mail.number, "of no cell"))  # the thread would wait for ever

    # The output before a question is sent between the first look at the cell and the question's entry.
    prompting = stdin_of(PromptingEngine(post), flush=lambda: end(prompting))
    prompting.cell_begins("c")
    raised: list[Exception] = []

    def ask() -> None:
        try:
            prompting.input("x")
        except StdinNotImplementedError as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert raised
    assert not asked


def test_a_debugger_on_a_thread_does_not_ask_while_the_main_thread_begins_to_handle_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Debugger(bdb.Bdb, cmd.Cmd):
        def __init__(self) -> None:
            bdb.Bdb.__init__(self)
            cmd.Cmd.__init__(self)

    handled = iter([False])  # when it is looked for first; then it is
    asked: list[object] = []
    prompting = stdin_of(PromptingEngine(asked.append), interrupted=lambda: next(handled, True))
    monkeypatch.setattr("builtins.input", prompting.input)
    prompting.cell_begins("c")
    prompting.interrupted()
    left: list[BaseException] = []

    def stop() -> None:
        try:
            Debugger().cmdloop()
        except LeftDebugger as error:
            left.append(error)

    thread = threading.Thread(target=stop)
    thread.start()
    thread.join()
    assert left
    assert not asked


def test_question_interrupted_before_it_is_sent_is_not_asked_again() -> None:
    def interrupt() -> bool:
        raise KeyboardInterrupt  # as the signal's handler does, at this line

    asked: list[object] = []
    prompting = stdin_of(PromptingEngine(asked.append), interrupted=interrupt)
    prompting.cell_begins("c")
    prompting.interrupted()
    with pytest.raises(KeyboardInterrupt):
        prompting.input("?")
    prompting.ask_again()
    assert asked == []


# -- debuggers ------------------------------------------------------------------------------------------------------

STEPS = "def f(a):\n    b = a + 1\n    {stop}\n    c = b * 2\n    return c\nf(1)"


def test_breakpoint_steps_through_the_cell(rank: Rank) -> None:
    ran, asked = talk(rank, STEPS.format(stop="breakpoint()"), ["p b", "n", "p c", "c"])
    assert {ask.kind for ask in asked} == {DEBUGGER}
    assert asked[0].prompt == "ipdb> "
    assert ran.text().count("2\n") >= 1
    assert "<cell [7]>(5)f()" in ran.text()  # below the magic's line
    assert "c = b * 2" in ran.text()
    assert ran.done.value_repr == "4"
    assert sys.gettrace() is None or "bdb" not in repr(sys.gettrace())


def test_the_debugger_does_not_keep_the_interrupt(rank: Rank) -> None:
    ran, _ = talk(rank, STEPS.format(stop="breakpoint()"), ["c"])
    assert ran.done.value_repr == "4"
    handler = signal.getsignal(signal.SIGINT)
    assert isinstance(getattr(handler, "__self__", None), InterruptDelivery), handler


def test_ipythons_debugger_stops_as_well(rank: Rank) -> None:
    stop = "from IPython.core.debugger import set_trace; set_trace()"
    ran, _ = talk(rank, STEPS.format(stop=stop), ["p b", "c"])
    assert ran.done.value_repr == "4"


def test_stepping_off_the_end_of_the_cell_ends_it(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        pool.answers = ["n"] * 20
        ran = pool.run("breakpoint()\nx = 1\ny = 2", label="[7]")
        assert ran.done.error is None
        assert 3 <= len(pool.asked) < 10
        assert "cell_executor" not in ran.text()

    rank.play(script)
    assert rank.run("x + y").done.value_repr == "3"


def test_quit_ends_the_cell(rank: Rank) -> None:
    ran, _ = talk(rank, STEPS.format(stop="breakpoint()"), ["q"])
    assert (ran.error.ename, ran.error.evalue) == (
        "BdbQuit",
        "the debugger was left with quit, which ends the cell",
    )
    assert rank.run("1").done.value_repr == "1"


def test_an_interrupt_leaves_the_debugger_too(rank: Rank) -> None:
    def script(pool: Pool) -> None:
        cell = pool.start(STEPS.format(stop="breakpoint()"))
        pool.expect(PromptRequest)
        pool.engine.interrupt()
        error = pool.finish(cell).error
        assert error.ename == "KeyboardInterrupt"
        assert error.interrupted
        assert pool.run("2").done.value_repr == "2"

    rank.play(script)


def test_a_repr_that_raises_stays_in_the_debugger(rank: Rank) -> None:
    source = "class Bad:\n    def __repr__(self): raise RuntimeError('no repr')\nbad = Bad()\nbreakpoint()\nz = 3\nz"
    ran, _ = talk(rank, source, ["p bad", "bad", "c"])
    assert "no repr" in ran.text()
    assert ran.done.value_repr == "3"


def test_pythonbreakpoint_switches_it_off(rank: Rank) -> None:
    ran, asked = talk(rank, "import os\nos.environ['PYTHONBREAKPOINT'] = '0'\nbreakpoint()\n1", [])
    rank.run("del os.environ['PYTHONBREAKPOINT']")
    assert asked == []
    assert ran.done.value_repr == "1"


# -- afterwards -----------------------------------------------------------------------------------------------------

FAILS = "class Held: pass\ndef g(n):\n    held = Held()\n    return 1 / n\ng(0)"


def test_what_failed_can_be_looked_at_afterwards(rank: Rank) -> None:
    assert rank.run(FAILS).error.ename == "ZeroDivisionError"
    ran, asked = talk(rank, POST_MORTEM, ["p n", "up", "q"])
    assert len(asked) == 3
    assert "return 1 / n" in ran.text()
    assert ran.done.error is None
    ran, _ = talk(rank, "%debug", ["p n", "q"])  # as it is not another cell's
    assert ran.done.error is None


def test_what_failed_is_let_go_when_another_cell_begins(rank: Rank) -> None:
    rank.run(FAILS)
    assert rank.run("import gc\nlen([o for o in gc.get_objects() if type(o) is Held])").done.value_repr == "0"
    assert "nothing is left to look at" in rank.run(POST_MORTEM).error.evalue
