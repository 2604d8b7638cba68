"""Ranks of a real pool that prompt a user that the test plays."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
from IPython.core.error import StdinNotImplementedError

from hvdlab.kernel_ext.notebook import stdin
from hvdlab.kernel_ext.notebook.cells import cell_state, dispatch, driver
from hvdlab.kernel_ext.notebook.pool import Pool
from support.patience import HOUR, PATIENCE
from support.pool_probe import PoolProbe
from support.pool_recorder import Recorder

StartPool = Callable[..., Pool]
LONG = 60.0  # seconds of a wait that an event has to end


class User:
    """User that does these things when asked, one after the other; the last one again and again."""

    shows_beside = False

    def __init__(self, *acts: Callable[[], str]) -> None:
        self._acts = list(acts)
        self.prompts: list[str] = []

    def ask(self, prompt: str, *, hidden: bool) -> str:
        self.prompts.append(prompt)
        act = self._acts.pop(0) if len(self._acts) > 1 else self._acts[0]
        return act()


class Clock:
    """Clock of the runs, in the place of the module ``time``, that a test sets forward.

    Attributes:
        ahead: Seconds by which it is ahead.
    """

    monotonic_ns = staticmethod(time.monotonic_ns)

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def never() -> str:
    time.sleep(LONG)
    raise AssertionError("nobody has broken this wait")


def test_the_time_limit_and_the_grace_after_a_failure_stand_still_at_a_prompt(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    for module in (driver, dispatch):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(cell_state, "GRACE", PATIENCE)  # the rank may be slow to come to its prompt

    def think() -> str:
        clock.ahead += HOUR
        return "Ada"

    pool = start_pool(2)
    source = "import os\nif os.environ['RANK'] == '1': raise ValueError('first')\ninput('name? ')"
    results = pool.run(source, timeout=PATIENCE, prompter=User(think))
    assert sorted(results.errors) == [1]
    assert results.errors[1].ename == "ValueError"
    assert results[0] == "Ada"


def test_a_coordinator_that_dies_meanwhile_changes_nothing(start_pool: StartPool) -> None:
    pool = start_pool(2)
    pool.run("from hvdlab.collectives import context\ncontext.init()")

    def kill() -> str:
        before = pool.client.incarnation
        renewed = threading.Event()
        pool.client.on_reconnected(lambda membership: renewed.set())
        os.kill(PoolProbe(pool).coordinator.pid, signal.SIGKILL)
        assert renewed.wait(LONG)
        assert pool.client.incarnation == before + 1
        return "all: yes"

    user = User(kill, lambda: "all: yes")
    results = pool.run("input('name? '), bool(context.engine().paused)", prompter=user, out=Recorder())
    assert [results[rank] for rank in (0, 1)] == [("yes", False)] * 2


def test_stopping_the_pool_closes_the_prompt(start_pool: StartPool) -> None:
    pool = start_pool(1)

    def stop() -> str:
        threading.Thread(target=pool.stop).start()
        return never()

    results = pool.run("input('name? ')", prompter=User(stop))
    # Stopping interrupts the rank, then ends it: its report of the interrupt may come before its death is seen.
    assert list(results.deaths) == [0] or results.errors[0].ename == "KeyboardInterrupt"


def test_prompt_of_a_dead_rank_closes_although_python_misses_the_signal(start_pool: StartPool) -> None:
    """As one that comes between Python's last look for signals and the beginning of its wait."""
    pool = start_pool(1)
    (pid,) = pool.run("import os\nos.getpid()")

    def miss() -> str:
        signal.pthread_sigmask(signal.SIG_BLOCK, [stdin.SIGNAL])
        os.kill(pid, signal.SIGKILL)
        signal.sigwait([stdin.SIGNAL])  # its handler is not called
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [stdin.SIGNAL])
        return never()

    assert list(pool.run("input('name? ')", prompter=User(miss)).deaths) == [0]


def test_the_end_of_the_input_and_nobody_to_ask_are_told_to_the_rank(start_pool: StartPool) -> None:
    pool = start_pool(1)

    def end() -> str:
        raise EOFError

    def refuse() -> str:
        raise StdinNotImplementedError

    assert pool.run("input()", prompter=User(end)).errors[0].ename == "EOFError"
    assert "takes no input" in pool.run("input()", prompter=User(refuse)).errors[0].evalue


def test_a_run_that_another_thread_waits_for_can_not_ask(start_pool: StartPool) -> None:
    pool = start_pool(1)
    said: list[str] = []
    user = User(never)
    thread = threading.Thread(target=lambda: said.append(pool.run("input()", prompter=user).errors[0].evalue))
    thread.start()
    thread.join()
    assert "in the background" in said[0]
    assert user.prompts == []


def test_a_second_interrupt_is_one_too(start_pool: StartPool) -> None:
    """Code that asks again when it is interrupted is asked for again, and interrupted again."""
    pool = start_pool(1)

    def interrupt() -> str:
        raise KeyboardInterrupt

    source = "try: input('one')\nexcept KeyboardInterrupt: input('two')"
    results = pool.run(source, prompter=User(interrupt))
    assert results.interrupted
    assert pool.run("1")[0] == 1


def test_who_detaches_leaves_nobody_at_a_prompt(start_pool: StartPool) -> None:
    name = f"ask-{os.getpid()}"
    pool = start_pool(1, keep=name)

    leaving = threading.Thread(target=pool.detach)

    def leave() -> str:
        leaving.start()
        return never()

    pool.run(
        "try:\n    input('name? ')\nexcept Exception as error:\n    said = str(error)", prompter=User(leave)
    )
    leaving.join()
    with Pool.attach(name) as again:
        assert "no notebook waits for this cell" in again.pull("said")[0]
